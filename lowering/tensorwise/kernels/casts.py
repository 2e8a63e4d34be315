"""The operation `cast`: which kernels make the copies."""

from __future__ import annotations

import torch

from lowering.copies import empty_copy, is_column_major
from lowering.tensorwise.kernels import cast_transpose, multi_cast_transpose, stacks
from lowering.tensorwise.kernels.amax import finish_amax
from lowering.tensorwise.kernels.cast import MATRIX_TILE, cast_matrix
from lowering.triton.launch import is_e5m2, on_device


def cast(
    xs: list[torch.Tensor],
    scales: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    pad_rows: bool = False,
    pad_cols: bool = False,
    with_amax: bool = False,
    in_parts: bool = False,
) -> list[torch.Tensor]:
    """`reference.cast`: one matrix and one stack take kernels of their own, all else that of many."""
    e5m2 = is_e5m2(dtype)
    row = [empty_copy(x, torch.uint8, False, pad_rows) for x in xs] if rowwise else []
    col = [empty_copy(x, torch.uint8, True, pad_cols) for x in xs] if columnwise else []
    if len(xs) > 1:
        amaxes = multi_cast_transpose.launch(xs, scales, row, col, e5m2, with_amax)
    else:
        fill = stacks.launch if xs[0].dim() == 3 else _fill
        with on_device(xs[0]):
            amaxes = fill(xs[0], scales[0], row[0] if row else None, col[0] if col else None, e5m2, with_amax)
            if amaxes is not None and xs[0].dim() == 2:
                amaxes = amaxes.view(torch.float32) if in_parts else finish_amax(amaxes)
    return [*(q.view(dtype) for q in row), *(q.view(dtype) for q in col), *([] if amaxes is None else [amaxes])]


def _fill(
    x: torch.Tensor,
    scale: torch.Tensor,
    row: torch.Tensor | None,
    col: torch.Tensor | None,
    e5m2: bool,
    with_amax: bool,
) -> torch.Tensor | None:
    """Fill the uint8 copies of a matrix; returns partial amaxes if asked for."""
    if x.numel() == 0:  # and so are its copies
        return torch.zeros(1, dtype=torch.int32, device=x.device) if with_amax else None
    if row is not None and col is not None:
        return cast_transpose.launch(x, scale, row, col, e5m2, with_amax)
    if row is None:
        x, row = x.t(), col
    assert row is not None
    if is_column_major(x):  # its columns are contiguous, the rows of its copy are: the columnwise copy of the row-major x.t()
        return cast_transpose.launch(x.t(), scale, None, row, e5m2, with_amax)
    return cast_matrix(x, scale, row, e5m2, with_amax, MATRIX_TILE)
