"""Scales of blocks, in plain torch: float32 scales of 1x128 and 128x128 blocks, E8M0 codes of 1x32 and 32x32 blocks.

A copy is a matrix [outer, inner] whose inner dimension the GEMM contracts. Blocks are counted from its first element; those at
an edge are smaller. Scales are compact here: in the orientation of their copy, without padding.

NOTE [E8M0] A scale is a uint8 code c with the value 2**(c - 127), 255 being NaN: what `torch.float8_e8m0fnu` holds. It
multiplies what the FP8 data hold. Graphs hold uint8, which every compiler pass and communication library knows; only the
GEMM views it as `torch.float8_e8m0fnu`.

Formulas: docs/numerics.md. All functions take any device and strides.
"""

import torch

from lowering.copies import dense, num_blocks
from lowering.formats import MX_BLOCK, Granularity, fp8_max, largest_finite
from lowering.scaling import bounded_scale, quantize_as, scales_from_amax

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
    """FP8 values [R, C] of the matrix x [R, C] and its compact float32 scale_inv, blocks along the last dimension.

    A block with amax 0, inf or NaN has scale 1; an infinite scale becomes the largest finite value of x's dtype;
    scale_inv is the float32 reciprocal of scale. inverse: as in `scaling.scales_from_amax`. Elements are cast as in
    `scaling.quantize_as`.
    """
    block = Granularity(granularity).block
    assert block is not None
    blocks = _split(x, block)
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
    blocks = _split(x.to(torch.float32), (MX_BLOCK if square else 1, MX_BLOCK))
    codes = e8m0_from_amax(blocks.abs().amax(dim=(1, 3)), dtype)
    limit = fp8_max(dtype)
    return _joined((blocks * factors(codes)[:, None, :, None]).clamp(-limit, limit).to(dtype), x), codes


def _split(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The matrix as [rows of blocks, height, columns of blocks, width]."""
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
