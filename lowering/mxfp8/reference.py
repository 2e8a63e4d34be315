"""Eager semantics of the MXFP8 operations, in plain torch. This is the specification: schemas are inferred from these
signatures, kernels are held against these results.

A block is 32 neighbours along the contraction dimension of a copy or, with `square`, a 32x32 tile that serves both copies.
A copy is a matrix [outer, inner] whose inner dimension the GEMM contracts: the rowwise copy of x [R, C] is [R, C], the
columnwise one [C, R].

NOTE [E8M0] A scale is a uint8 code c with the value 2**(c - 127), 255 being NaN: what `torch.float8_e8m0fnu` holds. It
multiplies what the FP8 data hold. Graphs hold uint8, which every compiler pass and communication library knows; only the
GEMM views it as `torch.float8_e8m0fnu`.

NOTE [scale layouts]
compact      what `quantize_mxfp8` returns and what is gathered: no padding, the orientation of its data.
             [outer, ceil(inner/32)], with `square` [ceil(outer/32), ceil(inner/32)].
GEMM-ready   [ceil(outer/128), ceil(inner/128), 32, 16]: cuBLASLt's tiles of 128 rows by 4 blocks, row after row of tiles. In a
             tile the scale of row r and block b is at [r % 32, 4 * (r // 32) + b]. Padding is 0. Source: cuBLAS, "1D block
             scaling factors layout".

Formulas: docs/numerics.md. All functions take any device and strides.
"""

import torch

from lowering.formats import BLOCK, MX_BLOCK, fp8_max, pad_to_alignment, round_up

#: Shape of a GEMM-ready tile of scales, for 128 rows by 4 blocks.
TILE = (32, 16)

_NAN, _INF, _ZERO = 255, 254, 0


def num_blocks(size: int) -> int:
    """Blocks of 32 that cover `size` elements (an int or a SymInt)."""
    return (size + MX_BLOCK - 1) // MX_BLOCK


def compact_scale_shape(outer: int, inner: int, square: bool) -> tuple[int, int]:
    """Shape of the compact scales of a copy [outer, inner]."""
    return (num_blocks(outer) if square else outer), num_blocks(inner)


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
    return _dense(q.reshape(rows + bottom, cols + right)[:rows, :cols]), codes


def quantize_mxfp8(x: torch.Tensor, dtype: torch.dtype, *, square: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values of `x` and an E8M0 code per block of its matrix [rows, last]: q = saturated(x / 2**(code - 127)).

    x: float32, bfloat16 or float16, at least one dimension; all but the last are flattened to rows. Returns q, contiguous,
    `dtype`, shape of x; and the codes, uint8, [rows, ceil(last/32)], with `square` [ceil(rows/32), ceil(last/32)]. A code
    is that of amax / FP8_MAX, rounded up to a power of two; edge blocks are smaller. A block with a NaN has code 255 and is
    all NaN; one with inf has code 254 and holds FP8_MAX for inf, which 2**127 makes infinite again; a block whose amax is
    at most FP8_MAX * 2**-127 has code 0 and holds zeros. Raises ValueError for another dtype or type of x. Source: OCP
    Microscaling Formats 1.0, rounding as in TransformerEngine's MXFP8BlockScaling; docs/numerics.md.
    """
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    q, codes = quantize_blocks(x.reshape(rows, x.shape[-1]), dtype, square)
    return q.view(x.shape), codes


def cast_mxfp8(
    x: torch.Tensor, dtype: torch.dtype, *, square: bool = False, columnwise: bool = False, pad_outer: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """One GEMM-ready FP8 copy of the matrix `x` [R, C] and its scales.

    Returns q, rowwise [R, C32] or columnwise (the transpose) [C, R32], padded with zeros along the inner dimension to a
    multiple of 32, with `pad_outer` along the outer one to a multiple of 16; and its GEMM-ready scales, uint8.
    """
    q, codes = quantize_blocks(x.t() if columnwise else x, dtype, square)
    return _gemm_ready(q, codes, square, pad_outer)


def cast_transpose_mxfp8(
    x: torch.Tensor, dtype: torch.dtype, *, square: bool = False, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both GEMM-ready copies of the matrix `x` from one read: q and scales of the rowwise one, of the columnwise one.

    Each pair is what `cast_mxfp8` returns. Both are quantized from x, each along its own contraction dimension; with
    `square` one grid of blocks serves both. `pad_rows` pads R of the rowwise copy to a multiple of 16, `pad_cols` C of the
    columnwise one.
    """
    rowwise = cast_mxfp8(x, dtype, square=square, pad_outer=pad_rows)
    return *rowwise, *cast_mxfp8(x, dtype, square=square, columnwise=True, pad_outer=pad_cols)


def compact_mxfp8(
    x: torch.Tensor, dtype: torch.dtype, *, square: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both copies of `x` [A, B] for gathering: q and codes of the rowwise one, of the columnwise one.

    Nothing is transposed or padded: both q are [A, B]; codes are [A, ceil(B/32)] and [ceil(A/32), B], with `square` both
    [ceil(A/32), ceil(B/32)]. `gemm_ready_mxfp8` converts each pair after the gathering.
    """
    q, codes = quantize_blocks(x, dtype, square)
    if square:
        return q, codes, q.clone(), codes.clone()
    q_t, codes_t = quantize_blocks(x.t(), dtype, square)
    return q, codes, _dense(q_t.t()), _dense(codes_t.t())


def gemm_ready_mxfp8(
    q: torch.Tensor, codes: torch.Tensor, *, square: bool = False, columnwise: bool = False, pad_outer: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """One pair of `compact_mxfp8`, or what `quantize_mxfp8` returned for a matrix, in the GEMM-ready format: what
    `cast_mxfp8` gives, bit for bit."""
    if columnwise:
        q, codes = q.t(), codes.t()
    return _gemm_ready(q, codes, square, pad_outer)


def _gemm_ready(q: torch.Tensor, codes: torch.Tensor, square: bool, pad_outer: bool) -> tuple[torch.Tensor, torch.Tensor]:
    outer, inner = q.shape
    if square:
        codes = codes.repeat_interleave(MX_BLOCK, dim=0)[:outer]
    padded_outer = pad_to_alignment(outer) if pad_outer else outer
    data = torch.zeros((padded_outer, round_up(inner, MX_BLOCK)), dtype=torch.uint8, device=q.device)
    data[:outer, :inner] = q.view(torch.uint8)  # 0x00 is +0 in both formats
    return data.view(q.dtype), swizzled(codes)


def swizzled(codes: torch.Tensor) -> torch.Tensor:
    """Codes [outer, blocks] as GEMM-ready memory."""
    outer, blocks = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -blocks % 4, 0, -outer % BLOCK))
    tiles = padded.reshape(padded.shape[0] // BLOCK, 4, 32, padded.shape[1] // 4, 4)
    return _dense(tiles.permute(0, 3, 2, 1, 4)).reshape(tiles.shape[0], tiles.shape[3], *TILE)


def unswizzled(scale: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Codes [outer, ceil(inner/32)] of GEMM-ready scales of a copy [outer, inner]."""
    rows, cols, _, _ = scale.shape
    codes = scale.reshape(rows, cols, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(rows * BLOCK, cols * 4)
    return codes[:outer, : num_blocks(inner)]


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


def _dense(x: torch.Tensor) -> torch.Tensor:
    """A row-major copy, also where a dimension has size 1: `contiguous` keeps its stride, unlike kernels and fakes."""
    return x.clone(memory_format=torch.contiguous_format)
