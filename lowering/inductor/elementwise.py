"""Scalar arithmetic of the lowerings, written with Inductor's virtualized `ops`: what `reference` does to one
element."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.virtualized import ops

from lowering.formats import CONSTRAINTS, E4M3, E5M2, FLOAT32_MAX, PACK, fp8_max, ptx_to_fp8

_EXPONENT_BITS = 0x7F800000  # +inf; with the mantissa cleared, every power of two


def to_float32(value: Any, dtype: torch.dtype) -> Any:
    """`value` of `dtype` as float32."""
    return ops.to_dtype(value, torch.float32, src_dtype=dtype)


def magnitude_bits(x: Any) -> Any:
    """|x| of float32 as int32 bits, whose order is that of the magnitudes, with NaN above all. An integer maximum is one
    instruction. Inductor's maximum of floats keeps NaN too, but takes four for it."""
    bits = ops.to_dtype_bitcast(x, torch.int32, src_dtype=torch.float32)
    return ops.bitwise_and(bits, _int(0x7FFFFFFF))


def _float(value: float) -> Any:
    return ops.constant(value, torch.float32)


def as_float(bits: Any) -> Any:
    """int32 bits as float32."""
    return ops.to_dtype_bitcast(bits, torch.float32, src_dtype=torch.int32)


def _int(value: int) -> Any:
    return ops.constant(value, torch.int32)


def is_infinite(x: Any) -> Any:
    """True if float32 x is +-inf."""
    return ops.eq(ops.abs(x), _float(float("inf")))


def quantize(x: Any, scale: Any, dtype: torch.dtype) -> Any:
    """`reference.quantize` of float32 x by float32 scale, as a value of FP8 `dtype`, on a GPU.

    NOTE [satfinite] The conversion itself saturates, infinities too, and keeps NaN. Only infinite elements need care. E4M3 gets
    a NaN to convert: x * 0 is NaN for them and a zero of x's sign for numbers, and the addition becomes a fused one. The E5M2
    bits of infinity are those of the largest finite value, 0x7B, with the last three turned over; ptxas does that to four
    elements at a time.
    """
    scaled = ops.mul(x, scale)
    if dtype != E5M2:
        scaled = ops.add(scaled, ops.mul(x, _float(0.0)))
    # NOTE [one piece of PTX] in lowering/formats.py
    bits = ops.inline_asm_elementwise(
        scaled, asm=ptx_to_fp8(dtype), constraints=CONSTRAINTS, dtype=torch.uint8, is_pure=True, pack=PACK
    )
    if dtype == E5M2:
        turned = ops.where(is_infinite(x), ops.constant(7, torch.uint8), ops.constant(0, torch.uint8))
        bits = ops.bitwise_xor(bits, turned)
    return ops.to_dtype_bitcast(bits, dtype, src_dtype=torch.uint8)


def e4m3_byte(x: Any, scale: Any) -> Any:
    """`reference.quantize` of float32 x by float32 scale as the byte of an E4M3 value, on a GPU without FP8 instructions.
    Adding half a step, less one bit for even codes, rounds the upper bits of a normal value; steps of 2**-9 count a
    subnormal."""
    magnitude = ops.minimum(ops.abs(ops.mul(x, scale)), _float(fp8_max(E4M3)))
    bits = ops.to_dtype_bitcast(magnitude, torch.int32, src_dtype=torch.float32)
    is_odd = ops.bitwise_and(ops.bitwise_right_shift(bits, _int(20)), _int(1))
    rounded = ops.add(ops.add(bits, _int(0x7FFFF)), is_odd)
    normal = ops.sub(ops.bitwise_right_shift(rounded, _int(20)), _int(120 << 3))
    subnormal = ops.to_dtype(ops.round(ops.mul(magnitude, _float(2.0**9))), torch.int32, src_dtype=torch.float32)
    code = ops.where(ops.lt(magnitude, _float(2.0**-6)), subnormal, normal)
    code = ops.where(ops.lt(ops.abs(x), _float(float("inf"))), code, _int(_E4M3_NAN))
    own = ops.to_dtype_bitcast(x, torch.int32, src_dtype=torch.float32)
    sign = ops.bitwise_and(ops.bitwise_right_shift(own, _int(24)), _int(0x80))
    return ops.to_dtype(ops.bitwise_or(code, sign), torch.uint8, src_dtype=torch.int32)


def e4m3_value(byte: Any) -> Any:
    """The byte of an E4M3 value as float32, on any GPU."""
    code = ops.to_dtype(byte, torch.int32, src_dtype=torch.uint8)
    magnitude = ops.bitwise_and(code, _int(_E4M3_NAN))
    normal = as_float(ops.add(ops.bitwise_left_shift(magnitude, _int(20)), _int(120 << 23)))
    subnormal = ops.mul(ops.to_dtype(magnitude, torch.float32, src_dtype=torch.int32), _float(2.0**-9))
    value = ops.where(ops.lt(magnitude, _int(8)), subnormal, normal)
    value = ops.where(ops.eq(magnitude, _int(_E4M3_NAN)), _float(float("nan")), value)
    return ops.where(ops.eq(magnitude, code), value, ops.neg(value))


_E4M3_NAN = 0x7F


def zero_unless(mask: Any, load: Callable[[], Any], dtype: torch.dtype) -> Any:
    """The loaded element of FP8 `dtype` where `mask`, +0 elsewhere: Triton cannot choose between FP8 values, but between their
    bytes."""
    loaded = ops.masked(mask, lambda: ops.to_dtype_bitcast(load(), torch.uint8, src_dtype=dtype), 0)
    return ops.to_dtype_bitcast(loaded, dtype, src_dtype=torch.uint8)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) of float32: with t = 1 + 2**(-x / ln 2), (t**-0.5)**2. Within some 3 ulp, and what rounding x / ln 2
    costs the exponential of a large one, in every form. With Triton's exp and / it is fourteen instructions, nine of them for a
    negation and for subnormal operands and results. Its exp2 and rsqrt flush these to zero: five. That changes nothing above
    2**-126, for t is at least 1. The errors of ex2.approx.ftz and rsqrt.approx.ftz are in the PTX ISA."""
    t = ops.add(ops.exp2(ops.mul(x, _float(-1.0 / math.log(2.0)))), _float(1.0))
    root = ops.rsqrt(t)
    return ops.mul(root, root)


def divide(dividend: Any, divisor: Any) -> Any:
    """Correctly rounded float32 quotient. Triton's float32 `/` is off by up to 2 ulp. Through float64 the result is exact: 53
    bits hold a quotient of 24-bit numbers well enough for the second rounding to do no harm. A few scalars per tensor are
    divided, so it costs nothing."""
    wide = [ops.to_dtype(v, torch.float64, src_dtype=torch.float32) for v in (dividend, divisor)]
    return ops.to_dtype(ops.truediv(*wide), torch.float32, src_dtype=torch.float64)


def reciprocal(x: Any) -> Any:
    """Correctly rounded 1 / x of float32."""
    return divide(_float(1.0), x)


def scale_from_amax(amax: Any, dtype: torch.dtype, margin: int, epsilon: float, power_of_2: bool) -> Any:
    """`reference.scale_from_amax` of a float32 amax."""
    amax = ops.where(ops.lt(amax, _float(epsilon)), _float(epsilon), amax)
    scale = divide(_float(fp8_max(dtype) / 2.0**margin), amax)
    infinity = _float(float("inf"))
    scale = ops.where(ops.eq(scale, infinity), _float(FLOAT32_MAX), scale)
    usable = ops.logical_and(ops.lt(_float(0.0), amax), ops.lt(amax, infinity))  # false for NaN
    scale = ops.where(usable, scale, _float(1.0))
    if not power_of_2:
        return scale
    bits = ops.to_dtype_bitcast(scale, torch.int32, src_dtype=torch.float32)
    bits = ops.bitwise_and(bits, _int(_EXPONENT_BITS))
    return as_float(bits)


# -- scales that are powers of two, by their exponents alone


def power_of_2_scale(amax_bits: Any, dtype: torch.dtype, epsilon: float) -> Any:
    """int32 bits of `reference.bounded_scale` with `power_of_2`, of an amax given as `magnitude_bits`. Quotients beyond
    float32, which float16 has none of, become 2**127. fp8_max is 1.75 * 2**p: the quotient's exponent is p minus that of the
    amax, one less where the amax's mantissa exceeds 1.75. Adding 0.25 to the mantissa carries just there."""
    fraction, exponent = math.frexp(fp8_max(dtype))
    assert fraction == 0.875
    if epsilon > 0.0:
        amax = as_float(amax_bits)
        amax_bits = ops.where(ops.lt(amax, _float(epsilon)), _int(_bits_of(epsilon)), amax_bits)  # NaN remains
    carried = ops.bitwise_right_shift(ops.add(amax_bits, _int(0x1FFFFF)), _int(23))
    biased = ops.minimum(ops.sub(_int(254 + exponent - 1), carried), _int(254))
    usable = ops.logical_and(ops.lt(_int(0), amax_bits), ops.lt(amax_bits, _int(_EXPONENT_BITS)))
    return ops.where(usable, ops.bitwise_left_shift(biased, _int(23)), _int(_bits_of(1.0)))


def reciprocal_of_power_of_2(bits: Any) -> Any:
    """float32 1 / x of the bits of a power of two; that of 2**127 is subnormal."""
    return as_float(ops.maximum(ops.sub(_int(0x7F000000), bits), _int(0x00400000)))


def _bits_of(value: float) -> int:
    (bits,) = struct.unpack("i", struct.pack("f", value))
    return int(bits)
