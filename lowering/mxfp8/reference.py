"""Eager semantics of the MXFP8 operations, in plain torch. This is the specification: schemas are inferred from these
signatures, kernels are held against these results.

A block is 32 neighbours along the contraction dimension of a copy or, with `square`, a 32x32 tile that serves both copies.
A copy is a matrix [outer, inner] whose inner dimension the GEMM contracts: the rowwise copy of x [R, C] is [R, C], the
columnwise one [C, R].

Scales are E8M0 codes: NOTE [E8M0] in lowering/scaling.py.

NOTE [scale layouts]
compact      what travels through gathers: no padding, the orientation of its data.
             [outer, ceil(inner/32)], with `square` [ceil(outer/32), ceil(inner/32)].
GEMM-ready   [ceil(outer/128), ceil(inner/128), 32, 16]: cuBLASLt's tiles of 128 rows by 4 blocks, row after row of tiles. In a
             tile the scale of row r and block b is at [r % 32, 4 * (r // 32) + b]. Padding is 0. Source: cuBLAS, "1D block
             scaling factors layout".

Formulas: docs/numerics.md. All functions take any device and strides.
Checks raise a ValueError that names the value and the fix.
"""

from __future__ import annotations

import torch

from lowering import checks, scaling
from lowering.copies import CastOptions, dense, empty_copy, num_blocks, outer_and_inner, padded, stacked
from lowering.formats import BLOCK, MX_BLOCK, Granularity, fp8_max
from lowering.products import Product, finished

#: Shape of a GEMM-ready tile of scales, for 128 rows by 4 blocks.
TILE = (32, 16)


def compact_scale_shape(outer: int, inner: int, square: bool) -> tuple[int, int]:
    """Shape of the compact scales of a copy [outer, inner]."""
    return (num_blocks(outer, MX_BLOCK) if square else outer), num_blocks(inner, MX_BLOCK)


def scale_shape(x: torch.Tensor, square: bool, columnwise: bool, pad_outer: bool, compact: bool) -> tuple[int, ...]:
    """Shape of the codes that `cast_with_scales` returns with a copy of x."""
    if compact:
        shape = compact_scale_shape(*outer_and_inner(x, columnwise), square)
        return shape[::-1] if columnwise else shape
    outer, inner = outer_and_inner(x, columnwise, pad_outer)
    return (x.shape[0], *compact_scale_shape(outer, inner, False)) if x.dim() == 3 else gemm_ready_scale_shape(outer, inner)


def gemm_ready_scale_shape(outer: int, inner: int) -> tuple[int, int, int, int]:
    """Shape of the GEMM-ready scales of a copy [outer, inner]; see NOTE [scale layouts]."""
    return (outer + BLOCK - 1) // BLOCK, (inner + BLOCK - 1) // BLOCK, *TILE


def copy(
    x: torch.Tensor, dtype: torch.dtype, how: CastOptions, columnwise: bool, pad_outer: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of a matrix or of a batch, and its codes: `casts.cast_with_scales`. Those of a square tile are repeated for
    each of its lines, but for data that travel."""
    if x.dim() == 2:
        q, codes = scaling.quantize_mx_blocks(x.t() if columnwise else x, dtype, how.square)
        if how.compact:
            return (dense(q.t()), dense(codes.t())) if columnwise else (q, codes)
        return ready(q, codes, how, pad_outer)
    matrices = x.mT if columnwise else x
    data, codes = stacked(scaling.quantize_mx_blocks(matrix, dtype, how.square) for matrix in matrices)
    outer, data = data.shape[1], padded(data, pad_outer, MX_BLOCK)
    lines = codes.repeat_interleave(MX_BLOCK, dim=1)[:, :outer] if how.square else codes
    return data, torch.nn.functional.pad(lines, (0, 0, 0, data.shape[1] - outer))


def ready(q: torch.Tensor, codes: torch.Tensor, how: CastOptions, pad_outer: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy q [outer, inner] and its compact codes as GEMMs read them."""
    if how.square:
        codes = codes.repeat_interleave(MX_BLOCK, dim=0)[: q.shape[0]]
    return padded(q, pad_outer, MX_BLOCK), swizzled(codes)


def empty(
    x: torch.Tensor, dtype: torch.dtype, how: CastOptions, columnwise: bool, pad_outer: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory of a copy and of its codes."""
    q = x.new_empty(x.shape, dtype=dtype) if how.compact else empty_copy(x, dtype, columnwise, pad_outer, MX_BLOCK)
    return q, x.new_empty(scale_shape(x, how.square, columnwise, pad_outer, how.compact), dtype=torch.uint8)


def compact_shape(how: CastOptions, outer: int, inner: int) -> tuple[int, int]:
    """Shape of the compact codes of a copy [outer, inner]."""
    return compact_scale_shape(outer, inner, how.square)


def swizzled(codes: torch.Tensor) -> torch.Tensor:
    """Codes [outer, blocks] as GEMM-ready memory."""
    outer, blocks = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -blocks % 4, 0, -outer % BLOCK))
    tiles = padded.reshape(padded.shape[0] // BLOCK, 4, 32, padded.shape[1] // 4, 4)
    return dense(tiles.permute(0, 3, 2, 1, 4)).reshape(tiles.shape[0], tiles.shape[3], *TILE)


def e8m0_scales(
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    m: int,
    n: int,
    k: int,
    *,
    square_a: bool = False,
    square_b: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GEMM-ready scales of MXFP8 that say what those of blocks of 128 say, for copies a [m, k] and b [n, k]. scale_inv: float32
    powers of two, the GEMM-ready scales of blockwise copies: [ceil(k/128), outer and padding], with `square` [ceil(outer/128),
    ceil(k/128) and padding]. 2**-127 and the padding, 0.0, have code 0; of another value the exponent counts."""
    return _codes_of_128(scale_inv_a, m, k, square_a), _codes_of_128(scale_inv_b, n, k, square_b)


def _codes_of_128(scale_inv: torch.Tensor, outer: int, inner: int, square: bool) -> torch.Tensor:
    """A tile of codes covers 128 rows and 128 of inner: one scale per row or, with `square`, in all."""
    codes = (scale_inv.view(torch.int32) >> 23).to(torch.uint8)
    rows, cols = gemm_ready_scale_shape(outer, inner)[:2]
    if square:
        return codes[:, :cols, None, None].expand(rows, cols, *TILE).contiguous()
    lines = torch.nn.functional.pad(codes, (0, rows * BLOCK - codes.shape[1])).reshape(cols, rows, 4, 32).permute(1, 0, 3, 2)
    return lines[..., None].expand(rows, cols, 32, 4, 4).reshape(rows, cols, *TILE)


def unswizzled(scale: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Codes [outer, ceil(inner/32)] of GEMM-ready scales of a copy [outer, inner]."""
    rows, cols, _, _ = scale.shape
    codes = scale.reshape(rows, cols, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(rows * BLOCK, cols * 4)
    return codes[:outer, : num_blocks(inner, MX_BLOCK)]


def scale_values_mxfp8(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The factors of the blocks of a GEMM-ready copy q [outer, inner], from its GEMM-ready scales: float32 [outer,
    ceil(inner/32)]; NaN for code 255."""
    return unswizzled(scale, *q.shape).contiguous().view(torch.float8_e8m0fnu).to(torch.float32)


def dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 values of a GEMM-ready copy q [outer, inner]."""
    return scaling.dequantize(q, unswizzled(scale, *q.shape), Granularity.BLOCK_1X32)


def multiply(product: Product) -> torch.Tensor:
    """`gemm.scaled_mm` of operands with codes of blocks of 32."""
    out = dequantize(product.a, product.scale_inv_a) @ dequantize(product.b.t(), product.scale_inv_b).t()
    return finished(out, product)


def check_scales(product: Product) -> None:
    _check_gemm_ready("scale_inv_a", product.scale_inv_a, *product.a.shape)
    _check_gemm_ready("scale_inv_b", product.scale_inv_b, *product.b.shape[::-1])


def check_scale(q: torch.Tensor, scale: torch.Tensor) -> None:
    fp8_max(q.dtype)
    checks.check_flat(q)
    _check_gemm_ready("scale", scale, *q.shape)


def _check_gemm_ready(name: str, scale: torch.Tensor, outer: int, inner: int) -> None:
    shape = gemm_ready_scale_shape(outer, inner)
    checks.check_gemm_ready(name, scale, shape, torch.uint8)
