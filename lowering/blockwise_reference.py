"""Eager semantics of the blockwise operations, in plain torch. This is the specification: kernels are held against it.

Blocks are 1x128 along the contraction dimension of a copy (`block_dims` 1) or 128x128 (`block_dims` 2). A copy is a
matrix [outer, inner] whose inner dimension the GEMM contracts: the rowwise copy of x [R, C] is [R, C], the columnwise
one [C, R].

NOTE [scale layouts]
compact      what `quantize_blockwise` returns and what is gathered: no padding, the orientation of its data.
             1D [outer, ceil(inner/128)], 2D [ceil(outer/128), ceil(inner/128)].
GEMM-ready   contiguous memory as cuBLASLt reads it, the last dimension padded to 4 with zeros.
             1D [ceil(inner/128), pad4(outer)] (transposed), 2D [ceil(outer/128), pad4(ceil(inner/128))].
The padded memory itself is returned, never a strided view of it: a view that does not cover its storage loses its
strides in `clone` and at graph boundaries, and a leading dimension without its padding gives silent wrong numbers
(pytorch/pytorch#166752). Only the GEMM makes views.

Formulas: docs/numerics.md; layouts: TransformerEngine's fp8_blockwise_scaling.rst. All functions take any device and
strides.
"""

from collections.abc import Sequence

import torch

from lowering.formats import BLOCK, largest_finite, pad_to_alignment, round_up
from lowering.reference import quantize, scale_from_amax

#: The last dimension of GEMM-ready scales is a multiple of this many float32 values (16 bytes).
SCALE_ALIGNMENT = 4


def num_blocks(size: int) -> int:
    """Blocks of 128 that cover `size` elements (an int or a SymInt)."""
    return (size + BLOCK - 1) // BLOCK


def compact_scale_shape(outer: int, inner: int, block_dims: int) -> tuple[int, int]:
    """Shape of the compact scales of a copy [outer, inner]."""
    return (outer if block_dims == 1 else num_blocks(outer)), num_blocks(inner)


def gemm_ready_scale_shape(outer: int, inner: int, block_dims: int) -> tuple[int, int]:
    """Shape of the GEMM-ready scales of a copy [outer, inner]; see NOTE [scale layouts]."""
    if block_dims == 1:
        return num_blocks(inner), round_up(outer, SCALE_ALIGNMENT)
    return num_blocks(outer), round_up(num_blocks(inner), SCALE_ALIGNMENT)


def quantize_blocks(
    x: torch.Tensor, dtype: torch.dtype, block_dims: int, power_of_2: bool = True, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values [R, C] of the matrix x [R, C] and its compact float32 scale_inv, blocks along the last dimension.

    A block with amax 0, inf or NaN has scale 1; an infinite scale becomes the largest finite value of x's dtype;
    scale_inv is the float32 reciprocal of scale. Elements are cast as in `reference.quantize`.
    """
    rows, cols = x.shape
    height = 1 if block_dims == 1 else BLOCK
    bottom, right = -rows % height, -cols % BLOCK
    if bottom or right:
        x = torch.nn.functional.pad(x, (0, right, 0, bottom))  # zeros: |x| of the valid elements decides the amax
    blocks = x.reshape((rows + bottom) // height, height, (cols + right) // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3))
    scale = scale_from_amax(amax, dtype, 0, epsilon, power_of_2, largest_finite(x.dtype))
    q = quantize(blocks, scale[:, None, :, None], dtype).reshape(rows + bottom, cols + right)
    return _dense(q[:rows, :cols]) if bottom or right else q, scale.reciprocal()


def quantize_blockwise(
    x: torch.Tensor, dtype: torch.dtype, block: Sequence[int], power_of_2: bool = True, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_blocks` of x, any shape, flattened to [rows, last]; q has the shape of x, the scales are compact."""
    q, scale_inv = quantize_blocks(as_matrix(x), dtype, block_dims_of(block), power_of_2, epsilon)
    return q.view(x.shape), scale_inv


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """x flattened to [rows, last]."""
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return x.reshape(rows, x.shape[-1])


def block_dims_of(block: Sequence[int]) -> int:
    """1 for blocks of (1, 128), 2 for (128, 128)."""
    return 1 if tuple(block) == (1, BLOCK) else 2


def cast_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    block_dims: int,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One GEMM-ready copy of the matrix x [R, C] and its GEMM-ready scales.

    rowwise: [R, C16]; columnwise: [C, R16], the transpose. The inner dimension is padded with zeros to a multiple of
    16, the outer one too with `pad_outer`.
    """
    q, scale_inv = quantize_blocks(x.t() if columnwise else x, dtype, block_dims, power_of_2, epsilon)
    return padded(q, pad_outer), gemm_ready_scales(scale_inv, _padded_size(q.shape[0], pad_outer), block_dims)


def cast_transpose_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    block_dims: int,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`cast_blockwise` of both orientations: q_rowwise, scale_inv_rowwise, q_columnwise, scale_inv_columnwise.

    1D: both are quantized from x. 2D: one grid of blocks serves both. `pad_rows` pads R of the rowwise copy to a
    multiple of 16, `pad_cols` C of the columnwise one.
    """
    return (
        *cast_blockwise(x, dtype, block_dims, False, pad_rows, power_of_2, epsilon),
        *cast_blockwise(x, dtype, block_dims, True, pad_cols, power_of_2, epsilon),
    )


def compact_blockwise(
    x: torch.Tensor, dtype: torch.dtype, block_dims: int, power_of_2: bool = True, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both copies of x [A, B] for gathering: q_rowwise, scale_inv_rowwise, q_columnwise, scale_inv_columnwise.

    Nothing is transposed or padded: both q are [A, B]; scales are [A, ceil(B/128)] and [ceil(A/128), B] in 1D. In 2D
    both copies hold the same values and scales [ceil(A/128), ceil(B/128)].
    """
    q, scale_inv = quantize_blocks(x, dtype, block_dims, power_of_2, epsilon)
    if block_dims == 2:
        return q, scale_inv, q.clone(), scale_inv.clone()
    q_t, scale_inv_t = quantize_blocks(x.t(), dtype, block_dims, power_of_2, epsilon)
    return q, scale_inv, _dense(q_t.t()), _dense(scale_inv_t.t())


def gemm_ready_blockwise(
    q: torch.Tensor, scale_inv: torch.Tensor, columnwise: bool, block_dims: int, pad_outer: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """One copy of `compact_blockwise` in the GEMM-ready format: what `cast_blockwise` gives, bit for bit."""
    if columnwise:
        q, scale_inv = q.t(), scale_inv.t()
    return padded(q, pad_outer), gemm_ready_scales(scale_inv, _padded_size(q.shape[0], pad_outer), block_dims)


def gemm_ready_scales(scale_inv: torch.Tensor, outer: int, block_dims: int) -> torch.Tensor:
    """Compact scales, in the orientation of their copy, as GEMM-ready memory; `outer` is the (padded) outer size."""
    stored = scale_inv.t() if block_dims == 1 else scale_inv
    width = round_up(outer if block_dims == 1 else stored.shape[1], SCALE_ALIGNMENT)
    out = stored.new_zeros((stored.shape[0], width))
    out[:, : stored.shape[1]] = stored
    return out


def padded(q: torch.Tensor, pad_outer: bool) -> torch.Tensor:
    """A contiguous copy of q [outer, inner], inner (with `pad_outer` both) zero-padded to a multiple of 16."""
    outer, inner = q.shape
    out = torch.zeros((_padded_size(outer, pad_outer), pad_to_alignment(inner)), dtype=torch.uint8, device=q.device)
    out[:outer, :inner] = q.view(torch.uint8)  # 0x00 is +0 in both formats
    return out.view(q.dtype)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """A row-major copy, also where a dimension has size 1: `contiguous` keeps its stride, unlike kernels and fakes."""
    return x.clone(memory_format=torch.contiguous_format)


def _padded_size(outer: int, pad_outer: bool) -> int:
    return pad_to_alignment(outer) if pad_outer else outer


def dequantize(q: torch.Tensor, scale_inv: torch.Tensor, block_dims: int) -> torch.Tensor:
    """float32 values of a GEMM-ready copy q [outer, inner]."""
    outer, inner = q.shape
    if block_dims == 1:
        per_block = scale_inv[:, :outer].t()
    else:
        per_block = scale_inv[:, : num_blocks(inner)].repeat_interleave(BLOCK, dim=0)[:outer]
    return q.to(torch.float32) * per_block.repeat_interleave(BLOCK, dim=1)[:, :inner]


def scaled_mm_blockwise(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None,
    block_dims_a: int,
    block_dims_b: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """dequantized a [M, K] @ dequantized b [K, N] + bias, accumulated in float32, rounded once to out_dtype."""
    out = dequantize(a, scale_inv_a, block_dims_a) @ dequantize(b.t(), scale_inv_b, block_dims_b).t()
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)
