"""Eager semantics of the MXFP8 operations, in plain torch. This is the specification: schemas are inferred from these
signatures, kernels are held against these results.

A block is 32 neighbours along the contraction dimension of a copy or, with `square`, a 32x32 tile that serves both copies.
A copy is a matrix [outer, inner] whose inner dimension the GEMM contracts: the rowwise copy of x [R, C] is [R, C], the
columnwise one [C, R].

NOTE [E8M0] A scale is a uint8 code c with the value 2**(c - 127), 255 being NaN: what `torch.float8_e8m0fnu` holds. It
multiplies what the FP8 data hold. Graphs hold uint8, which every compiler pass and communication library knows; only the
GEMM views it as `torch.float8_e8m0fnu`.

NOTE [scale layouts]
compact      what travels through gathers: no padding, the orientation of its data.
             [outer, ceil(inner/32)], with `square` [ceil(outer/32), ceil(inner/32)].
GEMM-ready   [ceil(outer/128), ceil(inner/128), 32, 16]: cuBLASLt's tiles of 128 rows by 4 blocks, row after row of tiles. In a
             tile the scale of row r and block b is at [r % 32, 4 * (r // 32) + b]. Padding is 0. Source: cuBLAS, "1D block
             scaling factors layout".

Formulas: docs/numerics.md. All functions take any device and strides.
"""

import torch

from lowering.copies import by_output, dense, num_blocks, padded
from lowering.formats import BLOCK, MX_BLOCK, fp8_max

#: Shape of a GEMM-ready tile of scales, for 128 rows by 4 blocks.
TILE = (32, 16)

_NAN, _INF, _ZERO = 255, 254, 0


def compact_scale_shape(outer: int, inner: int, square: bool) -> tuple[int, int]:
    """Shape of the compact scales of a copy [outer, inner]."""
    return (num_blocks(outer, MX_BLOCK) if square else outer), num_blocks(inner, MX_BLOCK)


def gemm_ready_scale_shape(outer: int, inner: int) -> tuple[int, int, int, int]:
    """Shape of the GEMM-ready scales of a copy [outer, inner]; see NOTE [scale layouts]."""
    return (outer + BLOCK - 1) // BLOCK, (inner + BLOCK - 1) // BLOCK, *TILE


def e8m0_from_amax(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The codes of the smallest powers of two at or above float32(amax / FP8_MAX); 255 for NaN, 254 for inf, 0 up to 2**-127.

    By bits, as PTX's `cvt.rp.satfinite.ue8m0x2.f32` rounds: a logarithm rounds the quotients just above a power of two
    down to it.
    """
    bits = (amax / fp8_max(dtype)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Among subnormals 2**-127, the value of code 0, has mantissa 0x400000.
    rounds_up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    code = torch.where(exponent == 0xFF, torch.where(mantissa > 0, _NAN, _INF), exponent + rounds_up)
    return code.to(torch.uint8)


def factors(codes: torch.Tensor) -> torch.Tensor:
    """What float32 values are multiplied by before the cast: 2**(127 - c), NaN for code 255, and 1 for code 0, whose blocks
    hold nothing that FP8 could represent."""
    bits = (_INF - codes.to(torch.int32)) << 23
    bits = torch.where(codes == _INF, 0x00400000, bits)  # 2**-127, a subnormal
    values = bits.to(torch.int32).view(torch.float32)
    return torch.where(codes == _NAN, torch.nan, torch.where(codes == _ZERO, 1.0, values))


def quantize_blocks(x: torch.Tensor, dtype: torch.dtype, square: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values [R, C] of the matrix x [R, C] and their compact codes, blocks along the last dimension."""
    rows, cols = x.shape
    height = MX_BLOCK if square else 1
    bottom, right = -rows % height, -cols % MX_BLOCK
    x = torch.nn.functional.pad(x.to(torch.float32), (0, right, 0, bottom))
    blocks = x.reshape((rows + bottom) // height, height, (cols + right) // MX_BLOCK, MX_BLOCK)
    codes = e8m0_from_amax(blocks.abs().amax(dim=(1, 3)), dtype)
    limit = fp8_max(dtype)
    q = (blocks * factors(codes)[:, None, :, None]).clamp(-limit, limit).to(dtype)
    return dense(q.reshape(rows + bottom, cols + right)[:rows, :cols]), codes


def cast_mxfp8(
    xs: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    pad_rows: bool = False,
    pad_cols: bool = False,
    square: bool = False,
    compact: bool = False,
) -> list[torch.Tensor]:
    """FP8 copies of matrices [R, C] or stacks [E, R, C], and an E8M0 code per block: q = saturated(x / 2**(code - 127)).

    Returns the rowwise copies of all, their codes, the columnwise copies of all, their codes. Copies are [R, C32] and [C, R32],
    the transposes; padding is that of lowering/copies.py, to multiples of 32. Codes, uint8, are GEMM-ready; of stacks, whose
    grouped GEMMs read them so, compact with one for each line of a 32x32 tile, and 0 for lines of padding. compact: for data
    that travel, neither transposed nor padded: copies [R, C], codes [R, ceil(C/32)] and [ceil(R/32), C], with `square` both
    [ceil(R/32), ceil(C/32)]. Each copy is quantized along its own contraction dimension; with `square` one grid serves both.

    A code is that of amax / FP8_MAX, rounded up to a power of two; edge blocks are smaller. A block with a NaN has code 255 and
    is all NaN; one with inf has code 254 and holds FP8_MAX for inf, which 2**127 makes infinite again; a block whose amax is
    at most FP8_MAX * 2**-127 has code 0 and holds zeros. Raises ValueError for another dtype or type. Source: OCP Microscaling
    Formats 1.0, rounding as in TransformerEngine's MXFP8BlockScaling; docs/numerics.md.
    """
    found: list[torch.Tensor] = []
    for is_turned, is_wanted, pad_outer in ((False, rowwise, pad_rows), (True, columnwise, pad_cols)):
        if is_wanted:
            found += by_output([_copy(x, dtype, is_turned, pad_outer, square, compact) for x in xs])
    return found


def _copy(
    x: torch.Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool, square: bool, compact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dim() == 2:
        q, codes = quantize_blocks(x.t() if columnwise else x, dtype, square)
        if compact:
            return (dense(q.t()), dense(codes.t())) if columnwise else (q, codes)
        return _gemm_ready(q, codes, square, pad_outer)
    each = [quantize_blocks(matrix, dtype, square) for matrix in (x.mT if columnwise else x)]
    outer = each[0][0].shape[0]
    data = padded(torch.stack([q.view(torch.uint8) for q, _ in each]).view(dtype), pad_outer, MX_BLOCK)
    lines = torch.stack([codes.repeat_interleave(MX_BLOCK, dim=0)[:outer] if square else codes for _, codes in each])
    return data, torch.nn.functional.pad(lines, (0, 0, 0, data.shape[1] - outer))


def gemm_ready_mxfp8(
    q: torch.Tensor, codes: torch.Tensor, *, square: bool = False, columnwise: bool = False, pad_outer: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """One compact copy of a matrix and its codes in the GEMM-ready format: what `cast_mxfp8` gives, bit for bit."""
    if columnwise:
        q, codes = q.t(), codes.t()
    return _gemm_ready(dense(q), codes, square, pad_outer)


def _gemm_ready(q: torch.Tensor, codes: torch.Tensor, square: bool, pad_outer: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if square:
        codes = codes.repeat_interleave(MX_BLOCK, dim=0)[: q.shape[0]]
    return padded(q, pad_outer, MX_BLOCK), swizzled(codes)


def swizzled(codes: torch.Tensor) -> torch.Tensor:
    """Codes [outer, blocks] as GEMM-ready memory."""
    outer, blocks = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -blocks % 4, 0, -outer % BLOCK))
    tiles = padded.reshape(padded.shape[0] // BLOCK, 4, 32, padded.shape[1] // 4, 4)
    return dense(tiles.permute(0, 3, 2, 1, 4)).reshape(tiles.shape[0], tiles.shape[3], *TILE)


def unswizzled(scale: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Codes [outer, ceil(inner/32)] of GEMM-ready scales of a copy [outer, inner]."""
    rows, cols, _, _ = scale.shape
    codes = scale.reshape(rows, cols, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(rows * BLOCK, cols * 4)
    return codes[:outer, : num_blocks(inner, MX_BLOCK)]


def scale_values_mxfp8(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What the blocks of a GEMM-ready copy q [outer, inner] are multiplied by, from its GEMM-ready scales: float32 [outer,
    ceil(inner/32)]; NaN for code 255."""
    return unswizzled(scale, *q.shape).contiguous().view(torch.float8_e8m0fnu).to(torch.float32)


def dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 values of a GEMM-ready copy q [outer, inner]."""
    values = scale_values_mxfp8(q, scale)
    return q.to(torch.float32) * values.repeat_interleave(MX_BLOCK, dim=1)[:, : q.shape[1]]


def scaled_mm_mxfp8(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """dequantized a [M, K] @ dequantized b [K, N] + bias [N]; [M, N] in `out_dtype`.

    a is row-major, b column-major (the transpose of a copy [N, K]). The scales are GEMM-ready, of a and of the copy [N, K].
    Sums and the bias, of any float dtype, are added in float32 and rounded once. The CPU emulates; a GPU needs SM100. Raises
    ValueError for operands that do not fit, NotImplementedError on another GPU.
    """
    out = dequantize(a, scale_a) @ dequantize(b.t(), scale_b).t()
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)
