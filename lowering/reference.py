"""Eager semantics of every per-tensor operation, in plain torch. This is the specification: kernels are held against
it.

Formulas: docs/numerics.md. All functions run on any device and take any strides.
"""

import torch

from lowering import formats
from lowering.formats import FLOAT32_MAX, fp8_max, pad_to_alignment

_EXPONENT_AND_SIGN = -0x00800000  # int32 with the bits 0xFF800000

#: History rows that `update_scales` moves together: few enough to stay in a core's cache, for a thousand tensors too.
_ROWS_PER_STEP = 64


def amax(x: torch.Tensor) -> torch.Tensor:
    """max |x| as a float32 scalar: 0 for an empty tensor, inf or NaN if an element is (NaN wins)."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return torch.amax(x.abs()).to(torch.float32)


def scale_from_amax(
    amax: torch.Tensor,
    dtype: torch.dtype,
    margin: int = 0,
    epsilon: float = 0.0,
    power_of_2: bool = False,
    overflow_scale: float = FLOAT32_MAX,
) -> torch.Tensor:
    """fp8_max / 2**margin / max(amax, epsilon), float32; 1 where amax is 0, inf or NaN."""
    amax = amax.to(torch.float32)
    amax = torch.where(amax < epsilon, epsilon, amax)  # NaN compares false and stays
    scale = torch.full_like(amax, fp8_max(dtype) / 2.0**margin) / amax
    scale = torch.where(torch.isinf(scale), overflow_scale, scale)
    scale = torch.where((amax == 0) | ~torch.isfinite(amax), 1.0, scale)
    return clear_mantissa(scale) if power_of_2 else scale


def clear_mantissa(scale: torch.Tensor) -> torch.Tensor:
    """The power of two at or below each positive float32 value."""
    return (scale.view(torch.int32) & _EXPONENT_AND_SIGN).view(torch.float32)


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """saturate(round_to_nearest_even(float32(x) * scale)), shape of x; `scale` broadcasts against x.

    A finite overflow becomes +-fp8_max; NaN stays NaN; +-inf becomes +-inf (E5M2) or NaN (E4M3). Whether an
    element is non-finite is decided on x: a finite x whose product overflows float32 saturates. The scale is finite and
    positive, as `scale_from_amax` and `update_scales` make it; the sign of a NaN is not specified.
    """
    limit = fp8_max(dtype)
    x = x.to(torch.float32)
    scaled = torch.clamp(x * scale, -limit, limit)  # clamp keeps NaN
    infinite = torch.isinf(x)
    if dtype == formats.E5M2:
        # `.to(float8_e5m2)` keeps inf; x itself carries its sign.
        return torch.where(infinite, x, scaled).to(dtype)
    return torch.where(infinite, torch.nan, scaled).to(dtype)


def cast(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, columnwise: bool = False, pad_outer: bool = False
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
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, columnwise: bool = False, pad_outer: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cast` and `amax` of the same x."""
    return cast(x, scale, dtype, columnwise, pad_outer), amax(x)


def cast_transpose(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rowwise copy [R, C16] and the columnwise copy [C, R16] of x; `pad_rows` pads R of the first to a
    multiple of 16, `pad_cols` pads C of the second."""
    q = quantize(x, scale, dtype)
    return _padded(q, pad_rows), _padded(q.t(), pad_cols)


def cast_transpose_amax(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`cast_transpose` and `amax` of the same x."""
    return *cast_transpose(x, scale, dtype, pad_rows, pad_cols), amax(x)


def multi_cast_transpose_amax(
    xs: list[torch.Tensor], scales: torch.Tensor, dtype: torch.dtype, pad_rows: bool = False, pad_cols: bool = False
) -> list[torch.Tensor]:
    """`cast_transpose_amax` of each matrix with its element of `scales` [n]: rowwise copies, columnwise copies,
    amaxes [n]."""
    results = [cast_transpose_amax(x, scale, dtype, pad_rows, pad_cols) for x, scale in zip(xs, scales.unbind(), strict=True)]
    amaxes = torch.stack([amax for _, _, amax in results]) if results else torch.empty_like(scales)
    return [*(rowwise for rowwise, _, _ in results), *(columnwise for _, columnwise, _ in results), amaxes]


def load_scales(scale: torch.Tensor, slots: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of the first `count` slots, by value, and their reciprocals: [count], [count], float32."""
    taken = scale.index_select(0, slots[:count])
    return taken, taken.reciprocal()


def record_amax(amax: torch.Tensor, slots: torch.Tensor, observed: list[torch.Tensor], index: list[int]) -> None:
    """amax[slots[index[i]]] = max(itself, observed[i]), in place; NaN wins. A slot may be named more than once."""
    if not observed:
        return
    where = slots[torch.tensor(index, device=slots.device)]
    amax.scatter_reduce_(0, where, torch.stack(observed).to(amax.dtype), "amax")


def update_scales(
    amax_history: torch.Tensor,
    scale: torch.Tensor,
    fp8_max: torch.Tensor,
    num_non_finite: torch.Tensor | None = None,
    algo: str = "max",
    margin: int = 0,
) -> None:
    """The step boundary of delayed scaling for n tensors at once, in place. See docs/numerics.md.

    amax_history [len, n] float32 (row 0 is the staging row), scale [n] float32, fp8_max [n] float32,
    num_non_finite [n] int32: steps whose amax was inf or NaN.
    """
    length = amax_history.shape[0]
    staged = amax_history[0].clone()
    valid = torch.isfinite(staged) & (staged > 0)
    # One test of one vector saves a selection per element; off the CPU it would wait for the device.
    all_valid = staged.device.type == "cpu" and bool(valid.all())
    amax = torch.maximum(staged, amax_history[1]) if length > 1 else staged
    for start in range(1, length - 1, _ROWS_PER_STEP):
        target = amax_history[start : min(start + _ROWS_PER_STEP, length - 1)]
        moved = amax_history[start + 1 : start + 1 + target.shape[0]].clone()
        amax = torch.maximum(amax, moved.amax(dim=0))
        target.copy_(moved if all_valid else torch.where(valid, moved, target))
    if length > 1:
        amax_history[-1] = torch.where(valid, staged, amax_history[-1])
    amax = amax if algo == "max" else staged
    _finish_boundary(amax_history, scale, staged, valid, amax, scale_of(amax, fp8_max, margin), num_non_finite)


def scale_of(amax: torch.Tensor, fp8_max: torch.Tensor, margin: int) -> torch.Tensor:
    """(fp8_max / 2**margin) / amax in float32, the largest finite float32 if that is inf."""
    new = (fp8_max / 2.0**margin) / amax
    return torch.where(torch.isinf(new), FLOAT32_MAX, new)


def rolled_history(amax_history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The history after the boundary, [0, h2, ..., a], and the window it sees, [a, h1, ..., hL-1]."""
    window = amax_history.clone()
    rolled = torch.roll(window, -1, dims=0)
    rolled[0] = 0
    return rolled, window


def update_from_amax(
    amax_history: torch.Tensor,
    rolled: torch.Tensor,
    scale: torch.Tensor,
    staged: torch.Tensor,
    amax: torch.Tensor,
    new_scale: torch.Tensor,
    num_non_finite: torch.Tensor | None,
) -> None:
    """The boundary with an amax and a scale computed by the caller from `rolled_history`, in place.

    History and scale change where the staged amax is finite and positive; elsewhere only the staging entry is cleared.
    """
    valid = torch.isfinite(staged) & (staged > 0)
    amax_history.copy_(torch.where(valid, rolled, amax_history))
    _finish_boundary(amax_history, scale, staged, valid, amax, new_scale, num_non_finite)


def _finish_boundary(
    amax_history: torch.Tensor,
    scale: torch.Tensor,
    staged: torch.Tensor,
    valid: torch.Tensor,
    amax: torch.Tensor,
    new_scale: torch.Tensor,
    num_non_finite: torch.Tensor | None,
) -> None:
    if num_non_finite is not None:
        num_non_finite += (~torch.isfinite(staged)).to(num_non_finite.dtype)
    amax_history[0] = 0
    scale.copy_(torch.where(valid & (amax > 0), new_scale, scale))


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> torch.Tensor:
    """(a @ b) * scale_inv_a * scale_inv_b + bias, accumulated in float32, rounded once to out_dtype.

    `fast_accum` lets hardware accumulate in fewer bits; here it changes nothing.
    """
    out = a.to(torch.float32) @ b.to(torch.float32)
    out = out * (scale_inv_a * scale_inv_b)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)
