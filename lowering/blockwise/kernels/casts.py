"""The operation `cast_blockwise`: which kernels make the copies."""

from __future__ import annotations

import torch

from lowering.blockwise.kernels import multi_cast, stacks
from lowering.blockwise.kernels.cast import Copy, launch
from lowering.blockwise.reference import scale_shape
from lowering.copies import by_output, empty_copy
from lowering.formats import Granularity


def cast_blockwise(
    xs: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    granularity: str,
    rowwise: bool = True,
    columnwise: bool = False,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
    compact: bool = False,
) -> list[torch.Tensor]:
    """See `reference.cast_blockwise`. Matrices share a launch where they can; compact copies and stacks have one each."""
    made: list[list[torch.Tensor]] = []
    copies: list[tuple[Copy | None, Copy | None]] = []
    for x in xs:
        row, of_row = _new(x, dtype, granularity, False, pad_rows, compact) if rowwise else (None, [])
        col, of_col = _new(x, dtype, granularity, True, pad_cols, compact) if columnwise else (None, [])
        copies.append((row, col))
        made.append([*of_row, *of_col])
    if len(xs) > 1 and not compact and all(x.dim() == 2 for x in xs):
        multi_cast.fill(xs, dtype, granularity, copies, power_of_2, epsilon)
    else:
        for x, of_matrix in zip(xs, copies, strict=True):
            (launch if x.dim() == 2 else stacks.launch)(x, dtype, granularity, *of_matrix, power_of_2, epsilon)
    return by_output(made)


def _new(
    x: torch.Tensor, dtype: torch.dtype, granularity: str, columnwise: bool, pad_outer: bool, compact: bool
) -> tuple[Copy, list[torch.Tensor]]:
    """A copy of x to be filled, and its tensors as they are returned."""
    scale_inv = x.new_empty(scale_shape(x, granularity, columnwise, pad_outer, compact), dtype=torch.float32)
    if compact:
        q = x.new_empty(x.shape, dtype=torch.uint8)
        return Copy(q, scale_inv.t() if columnwise else scale_inv), [q.view(dtype), scale_inv]
    q = empty_copy(x, torch.uint8, columnwise, pad_outer)
    is_stored_by_blocks = x.dim() == 2 and granularity == Granularity.BLOCK_1X128
    copy = Copy(q.mT if columnwise else q, scale_inv.t() if is_stored_by_blocks else scale_inv)
    return copy, [q.view(dtype), scale_inv]
