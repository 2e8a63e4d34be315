"""The operation `cast`: which kernels make the copies."""

from __future__ import annotations

import torch

from lowering.copies import empty_copy, is_column_major
from lowering.tensorwise.kernels import cast_transpose, multi_cast_transpose
from lowering.tensorwise.kernels.amax import finish_amax
from lowering.tensorwise.kernels.cast import MATRIX_TILE, cast_matrix
from lowering.tensorwise.reference import Cast
from lowering.triton.launch import is_e5m2, on_device


def cast(xs: list[torch.Tensor], scales: list[torch.Tensor], dtype: torch.dtype, **options: bool) -> list[torch.Tensor]:
    """`reference.cast`: one matrix and one batch take kernels of their own, all else that of many."""
    e5m2, wanted = is_e5m2(dtype), Cast.of(**options)
    made = [empty_copy(x, torch.uint8, *side) for side in wanted.wanted for x in xs]
    if len(xs) > 1:
        row = made[: len(xs)] if wanted.rowwise else []
        col = made[-len(xs) :] if wanted.columnwise else []
        amaxes = multi_cast_transpose.launch(xs, scales, row, col, e5m2, wanted.with_amax)
    else:
        x, only_row, only_col = xs[0], made[0] if wanted.rowwise else None, made[-1] if wanted.columnwise else None
        amaxes = _fill(x, scales[0], only_row, only_col, e5m2, wanted.with_amax)
        if amaxes is not None and wanted.in_parts:
            amaxes = amaxes.view(torch.float32)
        elif amaxes is not None:
            with on_device(x):
                amaxes = finish_amax(amaxes)
    copies = [q.view(dtype) for q in made]
    return copies if amaxes is None else [*copies, amaxes]


def _fill(
    x: torch.Tensor,
    scale: torch.Tensor,
    row: torch.Tensor | None,
    col: torch.Tensor | None,
    e5m2: bool,
    with_amax: bool,
) -> torch.Tensor | None:
    """Fill the uint8 copies of a matrix or batch; returns partial amaxes if asked for."""
    if x.numel() == 0:  # and so are its copies
        return torch.zeros((*x.shape[:-2], 1), dtype=torch.int32, device=x.device) if with_amax else None
    if row is not None and col is not None:
        return cast_transpose.launch(x, scale, row, col, e5m2, with_amax)
    if row is None:
        x, row = x.mT, col
    assert row is not None
    if is_column_major(x):  # its columns are contiguous, the rows of its copy are: the columnwise copy of the row-major x.mT
        return cast_transpose.launch(x.mT, scale, None, row, e5m2, with_amax)
    return cast_matrix(x, scale, row, e5m2, with_amax, MATRIX_TILE)
