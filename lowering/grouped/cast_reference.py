"""Eager semantics of casts of stacks, in plain torch: every matrix of x [E, R, C] is quantized as if it were alone. This is
the specification: schemas are inferred from these signatures, kernels are held against these results.

The rowwise copies are [E, R, C'], the columnwise ones [E, C, R'], their inner dimension padded with zeros to a multiple of 16
(MXFP8: 32), with `pad_outer` (`pad_rows` of the rowwise copies, `pad_cols` of the columnwise ones) the outer one to a multiple
of 16. Scales: NOTE [scales of grouped operands] in `layouts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowering.blockwise import reference as blockwise
from lowering.formats import Granularity, pad_to_alignment
from lowering.grouped.layouts import padded_inner
from lowering.mxfp8 import reference as mxfp8
from lowering.rowwise import reference as rowwise
from lowering.tensorwise import reference as tensorwise


def amax_stack(x: Tensor) -> Tensor:
    """Largest magnitude of each matrix of x [E, R, C]: [E], float32, as `amax` has it."""
    return torch.stack([tensorwise.amax(matrix) for matrix in x.unbind()])


def cast_stack(x: Tensor, scale: Tensor, dtype: torch.dtype, *, columnwise: bool = False, pad_outer: bool = False) -> Tensor:
    """One FP8 copy of each matrix of x [E, R, C], with the float32 scale [] that all share or their own of [E]."""
    layout = {"columnwise": columnwise, "pad_outer": pad_outer}
    return _stacked([tensorwise.cast(m, s, dtype, **layout) for m, s in zip(x.unbind(), _each(scale, x), strict=True)])


def cast_stack_amax(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, columnwise: bool = False, pad_outer: bool = False
) -> tuple[Tensor, Tensor]:
    """`cast_stack` and `amax_stack` of one read."""
    return cast_stack(x, scale, dtype, columnwise=columnwise, pad_outer=pad_outer), amax_stack(x)


def cast_transpose_stack(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[Tensor, Tensor]:
    """Both copies of each matrix of x [E, R, C] from one read."""
    rowwise_copies = cast_stack(x, scale, dtype, pad_outer=pad_rows)
    return rowwise_copies, cast_stack(x, scale, dtype, columnwise=True, pad_outer=pad_cols)


def cast_transpose_stack_amax(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`cast_transpose_stack` and `amax_stack` of one read."""
    return *cast_transpose_stack(x, scale, dtype, pad_rows=pad_rows, pad_cols=pad_cols), amax_stack(x)


def cast_stack_rowwise(
    x: Tensor,
    dtype: torch.dtype,
    *,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`cast_rowwise` of each matrix of x [E, R, C]: one copy of each and its scales [E, outer, 1]."""
    made = [
        rowwise.cast_rowwise(m, dtype, columnwise=columnwise, pad_outer=pad_outer, power_of_2=power_of_2, epsilon=epsilon)
        for m in x.unbind()
    ]
    return _stacked([q for q, _ in made]), torch.stack([scale_inv for _, scale_inv in made])


def cast_transpose_stack_rowwise(
    x: Tensor,
    dtype: torch.dtype,
    *,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both copies of each matrix of x [E, R, C], each followed by its scales, as `cast_stack_rowwise` makes them."""
    first = cast_stack_rowwise(x, dtype, pad_outer=pad_rows, power_of_2=power_of_2, epsilon=epsilon)
    return *first, *cast_stack_rowwise(x, dtype, columnwise=True, pad_outer=pad_cols, power_of_2=power_of_2, epsilon=epsilon)


def cast_stack_blockwise(
    x: Tensor,
    dtype: torch.dtype,
    *,
    granularity: str,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """One FP8 copy of each matrix of x [E, R, C] with 1x128 or 128x128 blocks, and its compact scales [E, ...], float32.

    Values and scales are those of `cast_blockwise`; scales of lines of padding are 0.
    """
    copies, scales = [], []
    for matrix in x.unbind():
        oriented = matrix.t() if columnwise else matrix
        q, scale_inv = blockwise.quantize_blocks(oriented, dtype, granularity, power_of_2, epsilon)
        copies.append(blockwise.padded(q, pad_outer))
        has_lines = granularity == Granularity.BLOCK_1X128
        scales.append(_with_lines(scale_inv, copies[-1].shape[0]) if has_lines else scale_inv)
    return _stacked(copies), torch.stack(scales)


def cast_transpose_stack_blockwise(
    x: Tensor,
    dtype: torch.dtype,
    *,
    granularity: str,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both copies of each matrix of x [E, R, C], each followed by its scales, as `cast_stack_blockwise` makes them."""
    first = cast_stack_blockwise(x, dtype, granularity=granularity, pad_outer=pad_rows, power_of_2=power_of_2, epsilon=epsilon)
    return *first, *cast_stack_blockwise(
        x, dtype, granularity=granularity, columnwise=True, pad_outer=pad_cols, power_of_2=power_of_2, epsilon=epsilon
    )


def cast_stack_mxfp8(
    x: Tensor, dtype: torch.dtype, *, square: bool = False, columnwise: bool = False, pad_outer: bool = False
) -> tuple[Tensor, Tensor]:
    """One FP8 copy of each matrix of x [E, R, C] with 1x32 blocks, and its compact codes [E, outer, ceil(inner/32)], uint8.

    Values are those of `cast_mxfp8`; with `square` the 32 lines of a tile have equal codes; codes of lines of padding are 0.
    """
    copies, codes = [], []
    for matrix in x.unbind():
        q, of_blocks = mxfp8.quantize_blocks(matrix.t() if columnwise else matrix, dtype, square)
        outer, inner = q.shape
        of_lines = of_blocks.repeat_interleave(32, dim=0)[:outer] if square else of_blocks
        stored = pad_to_alignment(outer) if pad_outer else outer
        extra = (0, padded_inner(inner, Granularity.BLOCK_1X32) - inner, 0, stored - outer)
        copies.append(pad(q.view(torch.uint8), extra).view(dtype))
        codes.append(_with_lines(of_lines, stored))
    return _stacked(copies), torch.stack(codes)


def cast_transpose_stack_mxfp8(
    x: Tensor, dtype: torch.dtype, *, square: bool = False, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both copies of each matrix of x [E, R, C], each followed by its codes, as `cast_stack_mxfp8` makes them."""
    first = cast_stack_mxfp8(x, dtype, square=square, pad_outer=pad_rows)
    return *first, *cast_stack_mxfp8(x, dtype, square=square, columnwise=True, pad_outer=pad_cols)


def _each(scale: Tensor, x: Tensor) -> Sequence[Tensor]:
    """The scale of each matrix of the stack."""
    return scale.expand(x.shape[0]).unbind()


def _with_lines(scales: Tensor, lines: int) -> Tensor:
    """Scales of padding lines, which are 0, added to those of a copy."""
    return pad(scales, (0, 0, 0, lines - scales.shape[0]))


def _stacked(copies: Sequence[Tensor]) -> Tensor:
    """FP8 matrices of one shape as one tensor."""
    return torch.stack([q.view(torch.uint8) for q in copies]).view(copies[0].dtype)
