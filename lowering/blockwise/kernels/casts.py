"""The operation `cast_blockwise`: which kernels make the copies."""

from __future__ import annotations

from typing import Any

import torch

from lowering.blockwise import reference
from lowering.blockwise.kernels import multi_cast
from lowering.blockwise.kernels.cast import Copy, launch
from lowering.blockwise.reference import Cast, empty_scales
from lowering.copies import by_output, empty_copy


def cast_blockwise(
    xs: list[torch.Tensor], dtype: torch.dtype, *, inverse: str | None = None, **options: Any
) -> list[torch.Tensor]:
    """See `reference.cast_blockwise`. Matrices share a launch where they can; compact copies and batches have one each. The
    scales of engines are left to the reference."""
    if inverse is not None:
        return reference.cast_blockwise(xs, dtype, inverse=inverse, **options)
    cast = Cast.of(**options)
    made: list[list[torch.Tensor]] = []
    copies: list[tuple[Copy | None, Copy | None]] = []
    for x in xs:
        row, of_row = _new(x, dtype, cast, False, cast.pad_rows) if cast.rowwise else (None, [])
        col, of_col = _new(x, dtype, cast, True, cast.pad_cols) if cast.columnwise else (None, [])
        copies.append((row, col))
        made.append([*of_row, *of_col])
    if len(xs) > 1 and not cast.compact and all(x.dim() == 2 for x in xs):
        multi_cast.fill(xs, dtype, cast, copies)
    else:
        for x, of_x in zip(xs, copies, strict=True):
            launch(x, dtype, cast, *of_x)
    return made[0] if len(xs) == 1 else by_output(made)


def _new(x: torch.Tensor, dtype: torch.dtype, cast: Cast, columnwise: bool, pad_outer: bool) -> tuple[Copy, list[torch.Tensor]]:
    """A copy of x to be filled, and its tensors as they are returned."""
    scale_inv = empty_scales(x, cast.granularity, columnwise, pad_outer, cast.compact)
    if cast.compact:
        q = x.new_empty(*x.shape, dtype=torch.uint8)
        return Copy(q, scale_inv.t() if columnwise else scale_inv), [q.view(dtype), scale_inv]
    q = empty_copy(x, torch.uint8, columnwise, pad_outer)
    is_stored_by_blocks = x.dim() == 2 and not cast.is_square
    copy = Copy(q.mT if columnwise else q, scale_inv.mT if is_stored_by_blocks else scale_inv)
    return copy, [q.view(dtype), scale_inv]
