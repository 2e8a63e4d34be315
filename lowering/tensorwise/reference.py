"""Eager semantics of the operations with one scale per tensor, in plain torch. This is the specification: schemas are
inferred from these signatures, kernels are held against these results.

Formulas: docs/numerics.md. All functions run on any device and take any strides.
"""

import torch

from lowering.formats import E5M2, FLOAT32_MAX, fp8_max, pad_to_alignment
from lowering.tensorwise import parts

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
    amax: torch.Tensor, dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scale_from_amax` and its reciprocal, shape of amax."""
    scale = scale_from_amax(amax, dtype, margin=margin, epsilon=epsilon, power_of_2=power_of_2)
    return scale, scale.reciprocal()


def clear_mantissa(scale: torch.Tensor) -> torch.Tensor:
    """The power of two at or below each positive float32 value."""
    return (scale.view(torch.int32) & _EXPONENT_AND_SIGN).view(torch.float32)


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


def cast(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, columnwise: bool = False, pad_outer: bool = False
) -> torch.Tensor:
    """One FP8 copy of the matrix x, contiguous along K of its GEMM and padded there with zeros to a multiple of 16.

    rowwise: [R, C16]; columnwise: [C, R16], the transpose. `pad_outer` pads the first dimension too.
    """
    if columnwise:
        x = x.t()
    return _padded(quantize(x, scale, dtype), pad_outer)


def _padded(q: torch.Tensor, pad_outer: bool) -> torch.Tensor:
    outer, inner = q.shape
    out_outer = pad_to_alignment(outer) if pad_outer else outer
    out_inner = pad_to_alignment(inner)
    if out_outer == outer and out_inner == inner:
        return q.contiguous() if q.numel() else q.clone()  # an empty transpose would be a view of the other copy
    out = torch.zeros((out_outer, out_inner), dtype=torch.uint8, device=q.device)  # 0x00 is +0 in both formats
    out[:outer, :inner] = q.view(torch.uint8) if q.is_contiguous() else q.contiguous().view(torch.uint8)
    return out.view(q.dtype)


def cast_amax(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, columnwise: bool = False, pad_outer: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cast` and `amax` of the same x."""
    return cast(x, scale, dtype, columnwise=columnwise, pad_outer=pad_outer), amax(x)


def cast_partial_amax(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, columnwise: bool = False, pad_outer: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cast`, and the float32 amaxes of x's tiles [P] in any order (`parts.num_parts`), which `record_partial_amax` takes."""
    return cast(x, scale, dtype, columnwise=columnwise, pad_outer=pad_outer), _amaxes_of_tiles(x, not columnwise, columnwise)


def _amaxes_of_tiles(x: torch.Tensor, rowwise: bool, columnwise: bool) -> torch.Tensor:
    return multi_amax(list(parts.tiles(x, rowwise, columnwise))) if x.numel() else amax(x).reshape(1)


def cast_transpose(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rowwise copy [R, C16] and the columnwise copy [C, R16] of x; `pad_rows` pads R of the first to a
    multiple of 16, `pad_cols` pads C of the second."""
    q = quantize(x, scale, dtype)
    return _padded(q, pad_rows), _padded(q.t(), pad_cols)


def cast_transpose_amax(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both FP8 layouts of the matrix `x` [R, C] and its amax from one read.

    Returns rowwise [R, C16], columnwise [C, R16] (the transpose) and the float32 amax; C16 and R16 are padded with
    zeros to multiples of 16. `pad_rows` pads R of the rowwise copy, `pad_cols` C of the columnwise one. Raises
    ValueError for arguments of other shapes or dtypes.
    """
    return *cast_transpose(x, scale, dtype, pad_rows=pad_rows, pad_cols=pad_cols), amax(x)


def cast_transpose_partial_amax(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`cast_transpose`, and the float32 amaxes of x's tiles [P] in any order, as `cast_partial_amax`."""
    return *cast_transpose(x, scale, dtype, pad_rows=pad_rows, pad_cols=pad_cols), _amaxes_of_tiles(x, True, True)


def transposed_copy(rowwise: torch.Tensor) -> torch.Tensor:
    """The columnwise copy [C, R16] made of the rowwise one, FP8 [R, C]: the same bytes, for all elements have one scale."""
    return _padded(rowwise.t().clone(memory_format=torch.contiguous_format), False)


def multi_amax(xs: list[torch.Tensor]) -> torch.Tensor:
    """`amax` of each tensor: [n], float32."""
    return torch.stack([amax(x) for x in xs])


def multi_scales(
    xs: list[torch.Tensor], dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scales_from_amax` of the `multi_amax` of tensors, at least one: scales [n] and their reciprocals [n]."""
    return scales_from_amax(multi_amax(xs), dtype, margin=margin, epsilon=epsilon, power_of_2=power_of_2)


def multi_cast_transpose_amax(
    xs: list[torch.Tensor], scales: list[torch.Tensor], dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> list[torch.Tensor]:
    """`cast_transpose` of each matrix with its float32 scalar of `scales` and `multi_amax` of them, at least one: rowwise
    copies, columnwise copies, the amaxes [n]."""
    pads = {"pad_rows": pad_rows, "pad_cols": pad_cols}
    copies = [cast_transpose(x, scale, dtype, **pads) for x, scale in zip(xs, scales, strict=True)]
    return [*(rowwise for rowwise, _ in copies), *(columnwise for _, columnwise in copies), multi_amax(xs)]


def multi_cast(
    xs: list[torch.Tensor],
    scales: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    columnwise: bool = False,
    pad_outer: bool = False,
) -> list[torch.Tensor]:
    """`cast` of each matrix with its float32 scalar of `scales`."""
    return [cast(x, scale, dtype, columnwise=columnwise, pad_outer=pad_outer) for x, scale in zip(xs, scales, strict=True)]


def multi_cast_amax(
    xs: list[torch.Tensor],
    scales: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    columnwise: bool = False,
    pad_outer: bool = False,
) -> list[torch.Tensor]:
    """`multi_cast` and `multi_amax` of the same matrices, at least one: copies, then the amaxes [n]."""
    return [*multi_cast(xs, scales, dtype, columnwise=columnwise, pad_outer=pad_outer), multi_amax(xs)]


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> torch.Tensor:
    """(a @ b) * scale_inv_a * scale_inv_b + bias for FP8 a [M, K] and b [K, N], accumulated in float32, rounded once
    to out_dtype.

    The scales are scalars, bias is [N] or None. `fast_accum` lets hardware accumulate in fewer bits; here it changes
    nothing.
    """
    out = a.to(torch.float32) @ b.to(torch.float32)
    out = out * (scale_inv_a * scale_inv_b)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)
