"""Scales of blocks and lines, computed in kernels by their exponents where they are powers of two."""

import triton
import triton.language as tl

from lowering.triton.tile import INF_BITS, larger


@triton.jit
def block_scale(amax, overflow_scale, epsilon, HAS_EPSILON: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr):
    """`scaling.scale_from_amax` of blocks or lines whose largest magnitudes are float32 `amax`.

    NOTE [exponents] Threads compute the scale of every row that they hold elements of, so divisions would cost more than the
    quantization itself. fp8_max is 1.75 * 2**p, and a power of two needs the quotient's exponent only: p minus
    that of the amax, one less where the amax's mantissa exceeds 1.75. The difference of 2**p * 1.75 and the amax, as
    integers, borrows from the exponent just there.
    """
    if HAS_EPSILON:
        amax = larger(amax, epsilon)
    if POWER_OF_2:
        # As unsigned integers positive floats keep their order, and quotients beyond float32 stay above all others. Those
        # need amaxes below 2**-112, which float16 lacks; of the other input dtypes 2**127 is the largest power of two.
        amax_bits = amax.to(tl.uint32, bitcast=True)
        QUOTIENT: tl.constexpr = ((254 + (8 if FP8_MAX == 448.0 else 15)) << 23) + 0x600000
        bits = (tl.full(amax_bits.shape, QUOTIENT, tl.uint32) - amax_bits) & 0xFF800000
        scale = tl.minimum(bits, 0x7F000000).to(tl.float32, bitcast=True)
    else:
        amax_bits = amax.to(tl.uint32, bitcast=True)
        scale = tl.div_rn(FP8_MAX, amax)
        scale = tl.where(scale.to(tl.int32, bitcast=True) == INF_BITS, overflow_scale, scale)
    # Zero, infinity and NaN: zero minus one is the largest of all.
    return tl.where(amax_bits - 1 >= INF_BITS - 1, 1.0, scale)


@triton.jit
def reciprocal(scale, POWER_OF_2: tl.constexpr):
    """1 / scale, correctly rounded, of finite positive float32; that of 2**127 is subnormal."""
    if POWER_OF_2:
        return tl.maximum(0x7F000000 - scale.to(tl.int32, bitcast=True), 0x00400000).to(tl.float32, bitcast=True)
    return tl.div_rn(1.0, scale)
