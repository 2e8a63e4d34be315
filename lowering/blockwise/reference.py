"""Eager semantics of the blockwise operations, in plain torch. This is the specification: schemas are inferred from
these signatures, kernels are held against these results.

Blocks are 1x128 along the contraction dimension of a copy (1D below) or 128x128 (2D); `granularity` is a member of
`formats.Granularity` or its value. A copy is a matrix [outer, inner] whose inner dimension the GEMM contracts: the
rowwise copy of x [R, C] is [R, C], the columnwise one [C, R].

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
from typing import Any

import torch

from lowering.formats import BLOCK, Granularity, largest_finite, pad_to_alignment, round_up
from lowering.tensorwise.reference import bounded_scale, quantize

#: The last dimension of GEMM-ready scales is a multiple of this many float32 values (16 bytes).
SCALE_ALIGNMENT = 4


def num_blocks(size: int) -> int:
    """Blocks of 128 that cover `size` elements (an int or a SymInt)."""
    return (size + BLOCK - 1) // BLOCK


def compact_scale_shape(outer: int, inner: int, granularity: str) -> tuple[int, int]:
    """Shape of the compact scales of a copy [outer, inner]."""
    return (outer if granularity == Granularity.BLOCK_1X128 else num_blocks(outer)), num_blocks(inner)


def gemm_ready_scale_shape(outer: int, inner: int, granularity: str) -> tuple[int, int]:
    """Shape of the GEMM-ready scales of a copy [outer, inner]; see NOTE [scale layouts]."""
    if granularity == Granularity.BLOCK_1X128:
        return num_blocks(inner), round_up(outer, SCALE_ALIGNMENT)
    return num_blocks(outer), round_up(num_blocks(inner), SCALE_ALIGNMENT)


def quantize_blocks(
    x: torch.Tensor, dtype: torch.dtype, granularity: str, power_of_2: bool, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values [R, C] of the matrix x [R, C] and its compact float32 scale_inv, blocks along the last dimension.

    A block with amax 0, inf or NaN has scale 1; an infinite scale becomes the largest finite value of x's dtype;
    scale_inv is the float32 reciprocal of scale. Elements are cast as in `reference.quantize`.
    """
    rows, cols = x.shape
    height = 1 if granularity == Granularity.BLOCK_1X128 else BLOCK
    bottom, right = -rows % height, -cols % BLOCK
    if bottom or right:
        x = torch.nn.functional.pad(x, (0, right, 0, bottom))  # zeros: |x| of the valid elements decides the amax
    blocks = x.reshape((rows + bottom) // height, height, (cols + right) // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3))
    scale = bounded_scale(amax, dtype, 0, epsilon, power_of_2, largest_finite(x.dtype))
    q = quantize(blocks, scale[:, None, :, None], dtype).reshape(rows + bottom, cols + right)
    return _dense(q[:rows, :cols]) if bottom or right else q, scale.reciprocal()


def quantize_blockwise(
    x: torch.Tensor, dtype: torch.dtype, block: Sequence[int], *, power_of_2: bool = True, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values of `x` and one factor per block of its matrix [rows, last]: q = cast(x * scale), scale_inv = 1/scale.

    x: float32, bfloat16 or float16, at least one dimension; all but the last are flattened to rows. block: (1, 128) or
    (128, 128). Returns q, contiguous, `dtype`, shape of x; and scale_inv, float32, [rows, ceil(last/128)] or
    [ceil(rows/128), ceil(last/128)]. Each block has the scale of `scale_from_amax` with the amax of its elements (edge
    blocks are smaller), and the largest finite value of x's dtype where that overflows. Non-finite elements as in
    `quantize`. Raises ValueError for another block, dtype or type of x. Source: TransformerEngine's Float8BlockScaling,
    docs/numerics.md.
    """
    q, scale_inv = quantize_blocks(as_matrix(x), dtype, Granularity.of_block(block), power_of_2, epsilon)
    return q.view(x.shape), scale_inv


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """x flattened to [rows, last]."""
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return x.reshape(rows, x.shape[-1])


def cast_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    granularity: str,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One GEMM-ready FP8 copy of the matrix `x` [R, C] and its scales.

    Returns q, rowwise [R, C16] or columnwise (the transpose) [C, R16], padded with zeros along the inner dimension,
    with `pad_outer` along both; and scale_inv, contiguous float32, for q [outer, inner]: 1x128
    [ceil(inner/128), pad4(outer)], 128x128 [ceil(outer/128), pad4(ceil(inner/128))], padding entries 0.
    """
    q, scale_inv = quantize_blocks(x.t() if columnwise else x, dtype, granularity, power_of_2, epsilon)
    return padded(q, pad_outer), gemm_ready_scales(scale_inv, _padded_size(q.shape[0], pad_outer), granularity)


def cast_transpose_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    granularity: str,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both GEMM-ready copies of the matrix `x` from one read.

    Returns q_rowwise, scale_inv_rowwise, q_columnwise, scale_inv_columnwise. Each pair is what `cast_blockwise`
    returns. 1D: both are quantized from x, each along its own contraction dimension. 2D: one grid of blocks serves
    both. `pad_rows` pads R of the rowwise copy to a multiple of 16, `pad_cols` C of the columnwise one.
    """
    rowwise = cast_blockwise(x, dtype, granularity=granularity, pad_outer=pad_rows, power_of_2=power_of_2, epsilon=epsilon)
    columnwise = cast_blockwise(
        x, dtype, granularity=granularity, columnwise=True, pad_outer=pad_cols, power_of_2=power_of_2, epsilon=epsilon
    )
    return *rowwise, *columnwise


def multi_cast_blockwise(
    xs: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    granularity: str,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:
    """`cast_blockwise` of each matrix: the data of all, then the scales of all."""
    options: Any = {"columnwise": columnwise, "pad_outer": pad_outer, "power_of_2": power_of_2, "epsilon": epsilon}
    return _by_output([cast_blockwise(x, dtype, granularity=granularity, **options) for x in xs])


def multi_cast_transpose_blockwise(
    xs: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    granularity: str,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:
    """`cast_transpose_blockwise` of each matrix: each of its four outputs for all of them."""
    options: Any = {"pad_rows": pad_rows, "pad_cols": pad_cols, "power_of_2": power_of_2, "epsilon": epsilon}
    return _by_output([cast_transpose_blockwise(x, dtype, granularity=granularity, **options) for x in xs])


def _by_output(results: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [tensor for of_all in zip(*results, strict=True) for tensor in of_all]


def compact_blockwise(
    x: torch.Tensor, dtype: torch.dtype, *, granularity: str, power_of_2: bool = True, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both copies of `x` [A, B] for gathering: q_rowwise, scale_inv_rowwise, q_columnwise, scale_inv_columnwise.

    Nothing is transposed or padded: both q are [A, B]; scales are [A, ceil(B/128)] and [ceil(A/128), B] in 1D. In 2D
    both copies hold the same values and scales [ceil(A/128), ceil(B/128)]. `gemm_ready_blockwise` converts each pair
    after the gathering.
    """
    q, scale_inv = quantize_blocks(x, dtype, granularity, power_of_2, epsilon)
    if granularity == Granularity.BLOCK_128X128:
        return q, scale_inv, q.clone(), scale_inv.clone()
    q_t, scale_inv_t = quantize_blocks(x.t(), dtype, granularity, power_of_2, epsilon)
    return q, scale_inv, _dense(q_t.t()), _dense(scale_inv_t.t())


def gemm_ready_blockwise(
    q: torch.Tensor, scale_inv: torch.Tensor, *, granularity: str, columnwise: bool = False, pad_outer: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """One pair of `compact_blockwise` in the GEMM-ready format: what `cast_blockwise` gives, bit for bit."""
    if columnwise:
        q, scale_inv = q.t(), scale_inv.t()
    return padded(q, pad_outer), gemm_ready_scales(scale_inv, _padded_size(q.shape[0], pad_outer), granularity)


def gemm_ready_scales(scale_inv: torch.Tensor, outer: int, granularity: str) -> torch.Tensor:
    """Compact scales, in the orientation of their copy, as GEMM-ready memory; `outer` is the (padded) outer size."""
    stored = scale_inv.t() if granularity == Granularity.BLOCK_1X128 else scale_inv
    width = round_up(outer if granularity == Granularity.BLOCK_1X128 else stored.shape[1], SCALE_ALIGNMENT)
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


def dequantize(q: torch.Tensor, scale_inv: torch.Tensor, granularity: str) -> torch.Tensor:
    """float32 values of a GEMM-ready copy q [outer, inner]."""
    outer, inner = q.shape
    if granularity == Granularity.BLOCK_1X128:
        per_block = scale_inv[:, :outer].t()
    else:
        per_block = scale_inv[:, : num_blocks(inner)].repeat_interleave(BLOCK, dim=0)[:outer]
    return q.to(torch.float32) * per_block.repeat_interleave(BLOCK, dim=1)[:, :inner]


def scaled_mm_blockwise(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    granularity_a: str,
    granularity_b: str,
    out_dtype: torch.dtype = torch.bfloat16,
    implementation: str = "auto",
) -> torch.Tensor:
    """dequantized a [M, K] @ dequantized b [K, N] + bias [N]; [M, N] in `out_dtype`.

    a is row-major, b column-major (the transpose of a copy [N, K]). The scales are GEMM-ready, of a and of the copy [N,
    K]; the granularities are 1x128 or 128x128, not both 128x128. Each 128 of K accumulates in the tensor cores, is
    multiplied by its factors and added in float32; the bias, of any float dtype, is added in float32; the sum is rounded
    once. `implementation`: "auto" (the reference on the CPU; on CUDA cuBLASLt where it has this GEMM and a trial showed
    that it is right, else Triton) or one of `gemm.IMPLEMENTATIONS`, where "reference" emulates on any device and
    "mxfp8", for scales that are powers of two, multiplies as SM100 does. Raises ValueError for operands that do not fit and
    for an implementation that cannot, NotImplementedError on a GPU whose tensor cores cannot.
    """
    out = dequantize(a, scale_inv_a, granularity_a) @ dequantize(b.t(), scale_inv_b, granularity_b).t()
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)
