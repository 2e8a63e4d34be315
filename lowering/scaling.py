"""The arithmetic of scaling, in plain torch: amaxes, scales made of them, the cast of an element; then scales of blocks:
float32 scales of 1x128 and 128x128 blocks, E8M0 codes of 1x32 and 32x32 blocks.

A copy is a matrix [outer, inner] whose inner dimension the GEMM contracts. Blocks are counted from its first element; those at
an edge are smaller. Scales of blocks are compact here: in the orientation of their copy, without padding.

NOTE [E8M0] A scale is a uint8 code c with the value 2**(c - 127), 255 being NaN: what `torch.float8_e8m0fnu` holds. It
multiplies what the FP8 data hold. Graphs hold uint8, which every compiler pass and communication library knows; only the
GEMM views it as `torch.float8_e8m0fnu`.

Formulas: docs/numerics.md. All functions take any device and strides.
"""

import torch

from lowering.copies import dense, num_blocks
from lowering.formats import E5M2, FLOAT32_MAX, MX_BLOCK, Granularity, fp8_max, largest_finite

_EXPONENT_AND_SIGN = -0x00800000  # int32 with the bits 0xFF800000


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of `x`, float32 scalar: 0 for an empty tensor, inf or NaN if an element is (NaN wins). `x` is float32,
    bfloat16 or float16, of any shape and strides. Raises ValueError for other dtypes."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return torch.amax(x.abs()).to(torch.float32)


def scale_from_amax(
    amax: torch.Tensor, dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> torch.Tensor:
    """The factor that maps `amax` to the largest value of FP8 `dtype`; float32, shape of `amax`. fp8_max / 2**margin /
    max(amax, epsilon), the largest finite float32 where that overflows, 1 where amax is 0, inf or NaN; `power_of_2` rounds down
    to a power of two. Raises ValueError if `dtype` is not an FP8 dtype."""
    return bounded_scale(amax, dtype, margin, epsilon, power_of_2, FLOAT32_MAX)


def bounded_scale(
    amax: torch.Tensor, dtype: torch.dtype, margin: int, epsilon: float, power_of_2: bool, overflow_scale: float
) -> torch.Tensor:
    """`scale_from_amax`, with `overflow_scale` where the quotient is inf."""
    amax = amax.to(torch.float32)
    amax = torch.where(amax < epsilon, epsilon, amax)  # NaN compares false and remains
    scale = torch.full_like(amax, fp8_max(dtype) / 2.0**margin) / amax
    scale = torch.where(torch.isinf(scale), overflow_scale, scale)
    scale = torch.where((amax == 0) | ~torch.isfinite(amax), 1.0, scale)
    return clear_mantissa(scale) if power_of_2 else scale


def scales_from_amax(
    amax: torch.Tensor,
    dtype: torch.dtype,
    *,
    margin: int = 0,
    epsilon: float = 0.0,
    power_of_2: bool = False,
    inverse: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scale_from_amax` and its reciprocal, shape of amax. inverse: as inference engines make them, None or one of INVERSES.
    Then `inverse_scale` comes first, and the scale is its reciprocal, rounded once more. Source: vLLM's
    csrc/quantization/w8a8/fp8/common.cu, dynamic_scaled_fp8_quant."""
    if inverse is not None:
        scale_inv = inverse_scale(amax, dtype, epsilon)
        return scale_inv.reciprocal(), scale_inv
    scale = scale_from_amax(amax, dtype, margin=margin, epsilon=epsilon, power_of_2=power_of_2)
    return scale, scale.reciprocal()


#: The operation of an engine on an element: multiply by the reciprocal of their scale, or divide by it.
INVERSES = ("multiply", "divide")


def clear_mantissa(scale: torch.Tensor) -> torch.Tensor:
    """The power of two at or below each positive float32 value."""
    return (scale.view(torch.int32) & _EXPONENT_AND_SIGN).view(torch.float32)


def inverse_scale(amax: torch.Tensor, dtype: torch.dtype, epsilon: float) -> torch.Tensor:
    """max(amax, epsilon) / fp8_max, what engines call the scale: the factor that dequantizes; float32, shape of `amax`. It is
    one float32 division, and not the reciprocal of `scale_from_amax`, from which it may differ in the last bit. An amax that is
    0, with `epsilon` 0, inf or NaN counts as 1."""
    amax = amax.to(torch.float32)
    amax = torch.where(amax < epsilon, epsilon, amax)
    amax = torch.where((amax == 0) | ~torch.isfinite(amax), 1.0, amax)
    return amax / torch.full_like(amax, fp8_max(dtype))  # of a number, CUDA would multiply by the reciprocal


def quantize_as(
    x: torch.Tensor, scale: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype, inverse: str | None
) -> torch.Tensor:
    """`quantize` with a pair of `scales_from_amax`, for "divide" by x / scale_inv; both broadcast against x."""
    if inverse != "divide":
        return quantize(x, scale, dtype)
    limit = fp8_max(dtype)
    x = x.to(torch.float32)
    scaled = torch.where(torch.isfinite(x), torch.clamp(x / scale_inv, -limit, limit), x)
    return quantize(scaled, torch.ones((), device=x.device), dtype)


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """saturate(round_to_nearest_even(float32(x) * scale)) in FP8 `dtype`, shape of `x`. `scale` is a float32 scalar (as an
    argument of this function, not of the operation, it may also broadcast against x). A finite overflow becomes +-fp8_max; NaN
    remains NaN; +-inf becomes +-inf (E5M2) or NaN (E4M3). Whether an element is non-finite is decided on x: a finite x whose
    product overflows float32 saturates. The scale is finite and positive, as `scale_from_amax` and `update_scales` make it; the
    sign of a NaN is not specified. `x` is float32, bfloat16 or float16. Raises ValueError for another dtype of `x`, `scale` or
    the result."""
    limit = fp8_max(dtype)
    x = x.to(torch.float32)
    scaled = torch.clamp(x * scale, -limit, limit)  # clamp keeps NaN
    infinite = torch.isinf(x)
    if dtype == E5M2:
        # `.to(float8_e5m2)` keeps inf; x itself carries its sign.
        return torch.where(infinite, x, scaled).to(dtype)
    return torch.where(infinite, torch.nan, scaled).to(dtype)


_NAN, _INF, _ZERO = 255, 254, 0


def scale_shape(outer: int, inner: int, granularity: str) -> tuple[int, int]:
    """Shape of the compact scales of a copy [outer, inner] that are not per tensor."""
    block = Granularity(granularity).block
    if block is None:
        return outer, 1
    height, width = block
    return (outer if height == 1 else num_blocks(outer, height)), num_blocks(inner, width)


def quantize_blocks(
    x: torch.Tensor, dtype: torch.dtype, granularity: str, power_of_2: bool, epsilon: float, inverse: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values [R, C] of the matrix x [R, C] and its compact float32 scale_inv, blocks along the last dimension. A block with
    amax 0, inf or NaN has scale 1; an infinite scale becomes the largest finite value of x's dtype; scale_inv is the float32
    reciprocal of scale. inverse: as in `scaling.scales_from_amax`. Elements are cast as in `scaling.quantize_as`."""
    block = Granularity(granularity).block
    assert block is not None
    blocks = split_blocks(x, block)
    scale, scale_inv = block_scales(blocks.abs().amax(dim=(1, 3)), dtype, power_of_2, epsilon, inverse, x.dtype)
    q = quantize_as(blocks, scale[:, None, :, None], scale_inv[:, None, :, None], dtype, inverse)
    return _joined(q, x), scale_inv


def block_scales(
    amax: torch.Tensor, dtype: torch.dtype, power_of_2: bool, epsilon: float, inverse: str | None, dtype_of_x: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of blocks of such amaxes and their reciprocals, float32."""
    if inverse is not None:
        return scales_from_amax(amax, dtype, epsilon=epsilon, inverse=inverse)
    scale = bounded_scale(amax, dtype, 0, epsilon, power_of_2, largest_finite(dtype_of_x))
    return scale, scale.reciprocal()


def quantize_mx_blocks(x: torch.Tensor, dtype: torch.dtype, square: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values [R, C] of the matrix x [R, C] and their compact E8M0 codes, blocks along the last dimension."""
    blocks = split_blocks(x.to(torch.float32), (MX_BLOCK if square else 1, MX_BLOCK))
    codes = e8m0_from_amax(blocks.abs().amax(dim=(1, 3)), dtype)
    limit = fp8_max(dtype)
    return _joined((blocks * factors(codes)[:, None, :, None]).clamp(-limit, limit).to(dtype), x), codes


def split_blocks(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The matrix as [rows of blocks, height, columns of blocks, width], with zeros beyond its edges."""
    (rows, cols), (height, width) = x.shape, block
    bottom, right = -rows % height, -cols % width
    if bottom or right:
        x = torch.nn.functional.pad(x, (0, right, 0, bottom))  # zeros: |x| of the valid elements decides the amax
    return x.reshape((rows + bottom) // height, height, (cols + right) // width, width)


def _joined(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The matrix of the shape of `like` that consists of these blocks."""
    rows, height, cols, width = blocks.shape
    q = blocks.reshape(rows * height, cols * width)
    is_whole = q.shape == like.shape and q.is_contiguous()
    return q if is_whole else dense(q[: like.shape[0], : like.shape[1]])


def dequantize(q: torch.Tensor, scale: torch.Tensor, granularity: str) -> torch.Tensor:
    """float32 values of a copy q [outer, inner] with compact scales, float32 or E8M0 codes; NaN for code 255."""
    (outer, inner), block = q.shape, Granularity(granularity).block
    assert block is not None
    if scale.dtype == torch.uint8:
        scale = scale.contiguous().view(torch.float8_e8m0fnu).to(torch.float32)
    lines = scale if block[0] == 1 else scale.repeat_interleave(block[0], dim=0)
    return q.to(torch.float32) * lines[:outer].repeat_interleave(block[1], dim=1)[:, :inner]


def e8m0_from_amax(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The codes of the smallest powers of two at or above float32(amax / FP8_MAX); 255 for NaN, 254 for inf, 0 up to 2**-127.
    By bits, as PTX's `cvt.rp.satfinite.ue8m0x2.f32` rounds: a logarithm rounds the quotients just above a power of two down to
    it."""
    bits = (amax / fp8_max(dtype)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Among subnormals 2**-127, the value of code 0, has mantissa 0x400000.
    rounds_up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    code = torch.where(exponent == 0xFF, torch.where(mantissa > 0, _NAN, _INF), exponent + rounds_up)
    return code.to(torch.uint8)


def factors(codes: torch.Tensor) -> torch.Tensor:
    """The factors of float32 values before the cast: 2**(127 - c), NaN for code 255, and 1 for code 0, whose blocks
    hold nothing that FP8 could represent."""
    bits = (_INF - codes.to(torch.int32)) << 23
    bits = torch.where(codes == _INF, 0x00400000, bits)  # 2**-127, a subnormal
    values = bits.to(torch.int32).view(torch.float32)
    return torch.where(codes == _NAN, torch.nan, torch.where(codes == _ZERO, 1.0, values))
