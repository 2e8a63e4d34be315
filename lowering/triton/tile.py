"""What every kernel does to one tile in registers: magnitudes as ordered integers, and the saturating FP8 cast."""

import triton
import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

#: Bits of float32 +inf, the largest of all non-NaN magnitudes.
INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def magnitude_bits(x):
    """|x| of float32 values as int32 bits.

    For non-negative floats integer order is float order, with inf above every finite value and NaN above inf: an
    integer maximum therefore propagates NaN, which a float maximum drops.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest(bits):
    """The largest element of a two-dimensional int32 tile."""
    return tl.max(tl.max(bits, axis=1), axis=0)


@constexpr_function
def converts_through_float16():
    """Whether Triton casts float32 to FP8 by way of float16, towards zero, on the device it compiles for: SM89."""
    target = current_target()
    return target is not None and target.backend == "cuda" and target.arch < 90


@triton.jit
def round_to_odd(x):
    """Float32 x with 6 bits of mantissa, the last of them set if anything was cut off.

    NOTE [SM89] Cut towards zero, what lies just beyond the middle of two FP8 values comes to lie on it, and then goes to
    the even one. A value rounded to odd stays on its side of every middle, and float16 holds it exactly wherever FP8 is
    not zero: 6 bits suffice for the subnormals of float16 from 2**-17, half the smallest E5M2 value.
    """
    bits = x.to(tl.int32, bitcast=True)
    return tl.where((bits & 0x1FFFF) != 0, (bits & -0x20000) | 0x20000, bits).to(tl.float32, bitcast=True)


@triton.jit
def saturated_bits(x, E5M2: tl.constexpr):
    """Float32 x, infinities included, saturated and rounded, as uint8 bits of E5M2 or E4M3; NaN stays NaN."""
    FP8_MAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    limited = tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    if converts_through_float16():
        limited = round_to_odd(limited)
    if E5M2:
        return limited.to(tl.float8e5, fp_downcast_rounding="rtne").to(tl.uint8, bitcast=True)
    return limited.to(tl.float8e4nv, fp_downcast_rounding="rtne").to(tl.uint8, bitcast=True)


@triton.jit
def fp8_bits(x, scale, E5M2: tl.constexpr):
    """`reference.quantize` of float32 x, as uint8 bits of E5M2 or E4M3; the sign of a NaN is not kept."""
    infinite = magnitude_bits(x) == INF_BITS
    if E5M2:
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        return tl.where(infinite, (sign | 0x7C).to(tl.uint8), saturated_bits(x * scale, E5M2))
    return saturated_bits(tl.where(infinite, float("nan"), x * scale), E5M2)
