"""The arithmetic that every kind of scaling shares, in plain torch: amaxes, scales made of them, the cast of an element.

Formulas: docs/numerics.md. All functions run on any device and take any strides.
"""

import torch

from lowering.formats import E5M2, FLOAT32_MAX, fp8_max

_EXPONENT_AND_SIGN = -0x00800000  # int32 with the bits 0xFF800000


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of `x`, float32 scalar: 0 for an empty tensor, inf or NaN if an element is (NaN wins).

    `x` is float32, bfloat16 or float16, of any shape and strides. Raises ValueError for other dtypes.
    """
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return torch.amax(x.abs()).to(torch.float32)


def scale_from_amax(
    amax: torch.Tensor, dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> torch.Tensor:
    """The factor that maps `amax` to the largest value of FP8 `dtype`; float32, shape of `amax`.

    fp8_max / 2**margin / max(amax, epsilon), the largest finite float32 where that overflows, 1 where amax is 0, inf
    or NaN; `power_of_2` rounds down to a power of two. Raises ValueError if `dtype` is not an FP8 dtype.
    """
    return bounded_scale(amax, dtype, margin, epsilon, power_of_2, FLOAT32_MAX)


def bounded_scale(
    amax: torch.Tensor, dtype: torch.dtype, margin: int, epsilon: float, power_of_2: bool, overflow_scale: float
) -> torch.Tensor:
    """`scale_from_amax`, with `overflow_scale` where the quotient is inf."""
    amax = amax.to(torch.float32)
    amax = torch.where(amax < epsilon, epsilon, amax)  # NaN compares false and stays
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
    """`scale_from_amax` and its reciprocal, shape of amax.

    inverse: as inference engines make them, None or one of INVERSES. Then `inverse_scale` comes first, and the scale is its
    reciprocal, rounded once more. Source: vLLM's csrc/quantization/w8a8/fp8/common.cu, dynamic_scaled_fp8_quant.
    """
    if inverse is not None:
        scale_inv = inverse_scale(amax, dtype, epsilon)
        return scale_inv.reciprocal(), scale_inv
    scale = scale_from_amax(amax, dtype, margin=margin, epsilon=epsilon, power_of_2=power_of_2)
    return scale, scale.reciprocal()


#: What engines do with an element: multiply by the reciprocal of their scale, or divide by it.
INVERSES = ("multiply", "divide")


def clear_mantissa(scale: torch.Tensor) -> torch.Tensor:
    """The power of two at or below each positive float32 value."""
    return (scale.view(torch.int32) & _EXPONENT_AND_SIGN).view(torch.float32)


def inverse_scale(amax: torch.Tensor, dtype: torch.dtype, epsilon: float) -> torch.Tensor:
    """max(amax, epsilon) / fp8_max, what engines call the scale: the factor that dequantizes; float32, shape of `amax`.

    It is one float32 division, and not the reciprocal of `scale_from_amax`, from which it may differ in the last bit. An amax
    that is 0, with `epsilon` 0, inf or NaN counts as 1.
    """
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
    """saturate(round_to_nearest_even(float32(x) * scale)) in FP8 `dtype`, shape of `x`.

    `scale` is a float32 scalar (as an argument of this function, not of the operation, it may also broadcast against x).
    A finite overflow becomes +-fp8_max; NaN stays NaN; +-inf becomes +-inf (E5M2) or NaN (E4M3). Whether an
    element is non-finite is decided on x: a finite x whose product overflows float32 saturates. The scale is finite and
    positive, as `scale_from_amax` and `update_scales` make it; the sign of a NaN is not specified. `x` is float32,
    bfloat16 or float16. Raises ValueError for another dtype of `x`, `scale` or the result.
    """
    limit = fp8_max(dtype)
    x = x.to(torch.float32)
    scaled = torch.clamp(x * scale, -limit, limit)  # clamp keeps NaN
    infinite = torch.isinf(x)
    if dtype == E5M2:
        # `.to(float8_e5m2)` keeps inf; x itself carries its sign.
        return torch.where(infinite, x, scaled).to(dtype)
    return torch.where(infinite, torch.nan, scaled).to(dtype)
