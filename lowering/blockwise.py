"""Public functions of the blockwise operations, in front of the registered ones (`blockwise_ops.py`)."""

from __future__ import annotations

import torch

from lowering import blockwise_checks as checks
from lowering import blockwise_ops  # noqa: F401  (registers torch.ops.lowering.*_blockwise)
from lowering import blockwise_reference as reference

_ops = torch.ops.lowering


def quantize_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    *,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values of `x` and one factor per block of its matrix [rows, last]: q = cast(x * scale), scale_inv = 1/scale.

    x: float32, bfloat16 or float16, at least one dimension; all but the last are flattened to rows. block: (1, 128) or
    (128, 128). Returns q, contiguous, `dtype`, shape of x; and scale_inv, float32, [rows, ceil(last/128)] or
    [ceil(rows/128), ceil(last/128)]. Each block has the scale of `scale_from_amax` with the amax of its elements (edge
    blocks are smaller), and the largest finite value of x's dtype where that overflows. Non-finite elements as in
    `quantize`. Raises ValueError for another block, dtype or type of x. Source: TransformerEngine's Float8BlockScaling,
    docs/numerics.md.
    """
    checks.check_block(block)
    return _ops.quantize_blockwise(x, dtype, list(block), power_of_2=power_of_2, epsilon=epsilon)


def cast_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    block_dims: int,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One GEMM-ready FP8 copy of the matrix `x` [R, C] and its scales.

    Returns q, rowwise [R, C16] or columnwise (the transpose) [C, R16], padded with zeros along the inner dimension,
    with `pad_outer` along both; and scale_inv, contiguous float32, for q [outer, inner]: `block_dims` 1 (1x128)
    [ceil(inner/128), pad4(outer)], 2 (128x128) [ceil(outer/128), pad4(ceil(inner/128))], padding entries 0.
    """
    return _ops.cast_blockwise(
        x,
        dtype,
        block_dims=block_dims,
        columnwise=columnwise,
        pad_outer=pad_outer,
        power_of_2=power_of_2,
        epsilon=epsilon,
    )


def cast_transpose_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    block_dims: int,
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
    return _ops.cast_transpose_blockwise(
        x,
        dtype,
        block_dims=block_dims,
        pad_rows=pad_rows,
        pad_cols=pad_cols,
        power_of_2=power_of_2,
        epsilon=epsilon,
    )


def compact_blockwise(
    x: torch.Tensor, dtype: torch.dtype, *, block_dims: int, power_of_2: bool = True, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both copies of `x` [A, B] for gathering: q_rowwise, scale_inv_rowwise, q_columnwise, scale_inv_columnwise.

    Nothing is transposed or padded: both q are [A, B]; `block_dims` 1 has scales [A, ceil(B/128)] and [ceil(A/128), B],
    2 has [ceil(A/128), ceil(B/128)] twice. `gemm_ready_blockwise` converts each pair after the gathering.
    """
    return _ops.compact_blockwise(x, dtype, block_dims=block_dims, power_of_2=power_of_2, epsilon=epsilon)


def gemm_ready_blockwise(
    q: torch.Tensor,
    scale_inv: torch.Tensor,
    *,
    block_dims: int,
    columnwise: bool = False,
    pad_outer: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One pair of `compact_blockwise` in the GEMM-ready format: what `cast_blockwise` gives, bit for bit."""
    return _ops.gemm_ready_blockwise(q, scale_inv, block_dims=block_dims, columnwise=columnwise, pad_outer=pad_outer)


def scaled_mm_blockwise(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    block_dims_a: int,
    block_dims_b: int,
    out_dtype: torch.dtype = torch.bfloat16,
    implementation: str = "auto",
) -> torch.Tensor:
    """dequantized a [M, K] @ dequantized b [K, N] + bias [N]; [M, N] in `out_dtype`.

    a is row-major, b column-major (the transpose of a copy [N, K]). The scales are GEMM-ready, of a and of the copy [N,
    K]; block_dims are 1 or 2, not both 2. Each 128 of K accumulates in the tensor cores, is multiplied by its factors
    and added in float32; the bias, of any float dtype, is added in float32; the sum is rounded once. `implementation`:
    "auto" (reference on CPU; on CUDA cuBLASLt where it has this GEMM and a trial showed that it is right, else Triton)
    or one of `GEMM_IMPLEMENTATIONS`, where "reference" emulates on any device. Raises ValueError for operands that do
    not fit and for an implementation that cannot, NotImplementedError on a GPU without FP8 tensor cores.
    """
    return _ops.scaled_mm_blockwise(
        a,
        b,
        scale_inv_a,
        scale_inv_b,
        bias,
        block_dims_a=block_dims_a,
        block_dims_b=block_dims_b,
        out_dtype=out_dtype,
        implementation=implementation,
    )


def scaled_mm_compact(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    implementation: str = "auto",
) -> torch.Tensor:
    """`scaled_mm_blockwise` with compact scales, oriented like their operands; their shapes tell the blocks.

    scale_inv_a is [M, ceil(K/128)] (1x128) or [ceil(M/128), ceil(K/128)] (128x128); scale_inv_b is [ceil(K/128), N] or
    [ceil(K/128), ceil(N/128)]: for b = q.t() the scales of q, transposed.
    """
    (m, k), n = a.shape, b.shape[1]
    block_dims_a = checks.block_dims_of_compact("scale_inv_a", scale_inv_a, m, k, False)
    block_dims_b = checks.block_dims_of_compact("scale_inv_b", scale_inv_b, n, k, True)
    return scaled_mm_blockwise(
        a,
        b,
        reference.gemm_ready_scales(scale_inv_a, m, block_dims_a),
        reference.gemm_ready_scales(scale_inv_b.t(), n, block_dims_b),
        bias,
        block_dims_a=block_dims_a,
        block_dims_b=block_dims_b,
        out_dtype=out_dtype,
        implementation=implementation,
    )
