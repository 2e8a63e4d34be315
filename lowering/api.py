"""The public functions of one tensor: its FP8 copies by name, and the GEMM whose kind its scales tell. The operations of
graphs cast many tensors at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowering import ops
from lowering.blockwise.reference import GRANULARITIES, check_block, gemm_ready_scales, granularity_of_compact
from lowering.checks import check_blocks, check_flat, check_granularity, check_two_dimensions
from lowering.copies import as_matrix
from lowering.formats import BLOCK, Granularity

Copies = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of `x`, float32 scalar: 0 for an empty tensor, inf or NaN if an element is (NaN wins). `x` is float32,
    bfloat16 or float16, of any shape and strides. Raises ValueError for other dtypes."""
    return ops.amaxes([x])


def cast_transpose_amax(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both FP8 layouts of the matrix `x` [R, C] and its amax from one read.

    Returns rowwise [R, C16], columnwise [C, R16] (the transpose) and the float32 amax; C16 and R16 are padded with
    zeros to multiples of 16. `pad_rows` pads R of the rowwise copy, `pad_cols` C of the columnwise one. Raises
    ValueError for arguments of other shapes or dtypes.
    """
    check_two_dimensions(x)
    q, q_t, amax = ops.cast([x], [scale], dtype, columnwise=True, pad_rows=pad_rows, pad_cols=pad_cols, with_amax=True)
    return q, q_t, amax


def quantize_mxfp8(x: torch.Tensor, dtype: torch.dtype, *, square: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values of `x` and an E8M0 code per block of its matrix [rows, last]: q = saturated(x / 2**(code - 127)).

    x: float32, bfloat16 or float16, at least one dimension; all but the last are flattened to rows. Returns q, contiguous,
    `dtype`, shape of x; and the codes, uint8, [rows, ceil(last/32)], with `square` [ceil(rows/32), ceil(last/32)]. A code
    is that of amax / FP8_MAX, rounded up to a power of two; edge blocks are smaller. A block with a NaN has code 255 and is
    all NaN. One with inf has code 254 and holds FP8_MAX for inf, which 2**127 makes infinite again. A block whose amax is
    at most FP8_MAX * 2**-127 has code 0 and holds zeros. Raises ValueError for another dtype or type of x. Source: OCP
    Microscaling Formats 1.0, rounding as in TransformerEngine's MXFP8BlockScaling; docs/numerics.md.
    """
    check_blocks(x, dtype, "to MXFP8")
    q, codes = ops.cast_with_scales([as_matrix(x)], dtype, granularity="block_1x32", square=square, compact=True)
    return q.view(x.shape), codes


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
    check_blocks(x, dtype, "blockwise")
    check_block(block)
    options = _blockwise(Granularity.of_block(block).value, power_of_2, epsilon)
    q, scale_inv = ops.cast_with_scales([as_matrix(x)], dtype, compact=True, **options)
    return q.view(x.shape), scale_inv


def _blockwise(granularity: str, power_of_2: bool, epsilon: float) -> dict[str, Any]:
    check_granularity("granularity", granularity, GRANULARITIES)
    return {"granularity": granularity, "power_of_2": power_of_2, "epsilon": epsilon}


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
    with `pad_outer` along both. Returns also scale_inv, contiguous float32, for q [outer, inner]: 1x128
    [ceil(inner/128), pad4(outer)], 128x128 [ceil(outer/128), pad4(ceil(inner/128))], padding entries 0.
    """
    check_flat(x)
    options = _blockwise(granularity, power_of_2, epsilon)
    sides: dict[str, Any] = {"rowwise": not columnwise, "columnwise": columnwise}
    q, scale_inv = ops.cast_with_scales([x], dtype, **sides, pad_rows=pad_outer, pad_cols=pad_outer, **options)
    return q, scale_inv


def cast_transpose_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    granularity: str,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> Copies:
    """Both GEMM-ready copies of the matrix `x` from one read.

    Returns q_rowwise, scale_inv_rowwise, q_columnwise, scale_inv_columnwise. Each pair is what `cast_blockwise`
    returns. 1D: both are quantized from x, each along its own contraction dimension. 2D: one grid of blocks serves
    both. `pad_rows` pads R of the rowwise copy to a multiple of 16, `pad_cols` C of the columnwise one.
    """
    check_flat(x)
    options = _blockwise(granularity, power_of_2, epsilon)
    q, scale_inv, q_t, scale_inv_t = ops.cast_with_scales(
        [x], dtype, columnwise=True, pad_rows=pad_rows, pad_cols=pad_cols, **options
    )
    return q, scale_inv, q_t, scale_inv_t


def compact_blockwise(
    x: torch.Tensor, dtype: torch.dtype, *, granularity: str, power_of_2: bool = True, epsilon: float = 0.0
) -> Copies:
    """Both copies of `x` [A, B] for gathering: q_rowwise, scale_inv_rowwise, q_columnwise, scale_inv_columnwise.

    Nothing is transposed or padded: both q are [A, B]; scales are [A, ceil(B/128)] and [ceil(A/128), B] in 1D. In 2D
    both copies hold the same values and scales [ceil(A/128), ceil(B/128)]. `gemm_ready` converts each pair
    after the gathering.
    """
    options = _blockwise(granularity, power_of_2, epsilon)
    q, scale_inv, q_t, scale_inv_t = ops.cast_with_scales([x], dtype, columnwise=True, compact=True, **options)
    return q, scale_inv, q_t, scale_inv_t


def quantize_rowwise(
    x: torch.Tensor, dtype: torch.dtype, *, power_of_2: bool = True, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values of `x` and one factor per row of its matrix [rows, last]: q = cast(x * scale), scale_inv = 1/scale.

    x: float32, bfloat16 or float16, at least one dimension; all but the last are flattened to rows. Returns q,
    contiguous, `dtype`, shape of x; and scale_inv, float32, [rows, 1]. Each row has the scale of `scale_from_amax` with
    the amax of its elements: 1 where that is 0 or not finite, the largest finite float32 where the quotient overflows;
    `power_of_2` rounds it down to a power of two. Amaxes below `epsilon` count as `epsilon`. Non-finite elements as in
    `quantize`. Raises ValueError for another dtype or type of x. Source: torchao's rowwise float8 recipe,
    docs/numerics.md.
    """
    check_blocks(x, dtype, "in rows")
    matrix = as_matrix(x)
    q, scale_inv = ops.cast_with_scales([matrix], dtype, granularity="row_wise", power_of_2=power_of_2, epsilon=epsilon)
    if q.shape != matrix.shape:
        q = q.view(torch.uint8)[:, : matrix.shape[1]].contiguous().view(dtype)
    return q.view(x.shape), scale_inv


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    granularity_a: str | None = None,
    granularity_b: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
    implementation: str = "auto",
) -> torch.Tensor:
    """(a @ b) * scale_inv_a * scale_inv_b + bias for FP8 a [M, K] and b [K, N]; [M, N] in `out_dtype`.

    Products accumulate in float32 (`fast_accum` allows the tensor cores their shorter accumulator) and are rounded
    once. bias [N] or None. The scales are scalars, or those of `quantize_rowwise` or `quantize_blockwise` in the
    orientation of their operands. For a they are [M, 1], [M, ceil(K/128)] or [ceil(M/128), ceil(K/128)]. For b they are [1, N],
    [ceil(K/128), N] or [ceil(K/128), ceil(N/128)] (b = q.t() takes the scales of q transposed, as a view). Blockwise
    GEMMs have no fast accumulation; one operand at least has 1x128 blocks. With granularities the scales are what the casts
    of these return: GEMM-ready ones of blocks, and all those of b in the orientation of its copy [N, K]; `implementation`
    chooses what multiplies blocks of 128. Raises ValueError for scales of other shapes, and for operands that FP8 tensor cores
    do not multiply (E5M2 by E5M2).
    """
    if granularity_a is None and granularity_b is None:
        granularity_a = granularity_b = Granularity.TENSOR_WISE
        if _are_rowwise(a, b, scale_inv_a, scale_inv_b, fast_accum):
            granularity_a = granularity_b = Granularity.ROW_WISE
            scale_inv_b = scale_inv_b.t()
        elif scale_inv_a.numel() != 1 or scale_inv_b.numel() != 1:
            (m, k), n = a.shape, b.shape[1]
            granularity_a = granularity_of_compact("scale_inv_a", scale_inv_a, m, k, False)
            granularity_b = granularity_of_compact("scale_inv_b", scale_inv_b, n, k, True)
            scale_inv_a = gemm_ready_scales(scale_inv_a, m, granularity_a)
            scale_inv_b = gemm_ready_scales(scale_inv_b.t(), n, granularity_b)
    how: dict[str, Any] = {"granularity_a": granularity_a, "granularity_b": granularity_b, "implementation": implementation}
    return ops.scaled_mm(a, b, scale_inv_a, scale_inv_b, bias, **how, out_dtype=out_dtype, fast_accum=fast_accum)


def _are_rowwise(
    a: torch.Tensor, b: torch.Tensor, scale_inv_a: torch.Tensor, scale_inv_b: torch.Tensor, fast_accum: bool
) -> bool:
    """True if scales belong to rows. Where one block of 128 covers K, those of blocks have the same shape and meaning; then
    the GEMM of blocks is taken unless fast accumulation is requested."""
    if a.dim() != 2 or b.dim() != 2 or scale_inv_a.numel() == scale_inv_b.numel() == 1:
        return False
    is_per_line = scale_inv_a.shape == (a.shape[0], 1) and scale_inv_b.shape == (1, b.shape[1])
    return is_per_line and (a.shape[1] > BLOCK or fast_accum)
