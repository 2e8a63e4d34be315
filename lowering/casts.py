"""The casts of the public interface: one tensor in, its copies by name out. The operations take many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowering.blockwise import ops as blockwise
from lowering.blockwise.checks import check_block
from lowering.checks import check_blocks, check_flat, check_two_dimensions
from lowering.copies import as_matrix
from lowering.formats import Granularity
from lowering.mxfp8 import ops as mxfp8
from lowering.rowwise import ops as rowwise
from lowering.tensorwise import ops as tensorwise

Copies = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def cast_transpose_amax(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both FP8 layouts of the matrix `x` [R, C] and its amax from one read.

    Returns rowwise [R, C16], columnwise [C, R16] (the transpose) and the float32 amax; C16 and R16 are padded with
    zeros to multiples of 16. `pad_rows` pads R of the rowwise copy, `pad_cols` C of the columnwise one. Raises
    ValueError for arguments of other shapes or dtypes.
    """
    check_two_dimensions(x)
    q, q_t, amax = tensorwise.cast([x], [scale], dtype, columnwise=True, pad_rows=pad_rows, pad_cols=pad_cols, with_amax=True)
    return q, q_t, amax


def quantize_mxfp8(x: torch.Tensor, dtype: torch.dtype, *, square: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values of `x` and an E8M0 code per block of its matrix [rows, last]: q = saturated(x / 2**(code - 127)).

    x: float32, bfloat16 or float16, at least one dimension; all but the last are flattened to rows. Returns q, contiguous,
    `dtype`, shape of x; and the codes, uint8, [rows, ceil(last/32)], with `square` [ceil(rows/32), ceil(last/32)]. A code
    is that of amax / FP8_MAX, rounded up to a power of two; edge blocks are smaller. A block with a NaN has code 255 and is
    all NaN; one with inf has code 254 and holds FP8_MAX for inf, which 2**127 makes infinite again; a block whose amax is
    at most FP8_MAX * 2**-127 has code 0 and holds zeros. Raises ValueError for another dtype or type of x. Source: OCP
    Microscaling Formats 1.0, rounding as in TransformerEngine's MXFP8BlockScaling; docs/numerics.md.
    """
    check_blocks(x, dtype, "to MXFP8")
    q, codes = mxfp8.cast_mxfp8([as_matrix(x)], dtype, square=square, compact=True)
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
    granularity = Granularity.of_block(block).value
    options: dict[str, Any] = {"granularity": granularity, "power_of_2": power_of_2, "epsilon": epsilon}
    q, scale_inv = blockwise.cast_blockwise([as_matrix(x)], dtype, compact=True, **options)
    return q.view(x.shape), scale_inv


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
    check_flat(x)
    options: dict[str, Any] = {"granularity": granularity, "power_of_2": power_of_2, "epsilon": epsilon}
    sides: dict[str, Any] = {"rowwise": not columnwise, "columnwise": columnwise}
    q, scale_inv = blockwise.cast_blockwise([x], dtype, **sides, pad_rows=pad_outer, pad_cols=pad_outer, **options)
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
    options: dict[str, Any] = {"granularity": granularity, "power_of_2": power_of_2, "epsilon": epsilon}
    q, scale_inv, q_t, scale_inv_t = blockwise.cast_blockwise(
        [x], dtype, columnwise=True, pad_rows=pad_rows, pad_cols=pad_cols, **options
    )
    return q, scale_inv, q_t, scale_inv_t


def compact_blockwise(
    x: torch.Tensor, dtype: torch.dtype, *, granularity: str, power_of_2: bool = True, epsilon: float = 0.0
) -> Copies:
    """Both copies of `x` [A, B] for gathering: q_rowwise, scale_inv_rowwise, q_columnwise, scale_inv_columnwise.

    Nothing is transposed or padded: both q are [A, B]; scales are [A, ceil(B/128)] and [ceil(A/128), B] in 1D. In 2D
    both copies hold the same values and scales [ceil(A/128), ceil(B/128)]. `gemm_ready_blockwise` converts each pair
    after the gathering.
    """
    options: dict[str, Any] = {"granularity": granularity, "power_of_2": power_of_2, "epsilon": epsilon}
    q, scale_inv, q_t, scale_inv_t = blockwise.cast_blockwise([x], dtype, columnwise=True, compact=True, **options)
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
    q, scale_inv = rowwise.cast_rowwise([matrix], dtype, power_of_2=power_of_2, epsilon=epsilon)
    if q.shape != matrix.shape:
        q = q.view(torch.uint8)[:, : matrix.shape[1]].contiguous().view(dtype)
    return q.view(x.shape), scale_inv
