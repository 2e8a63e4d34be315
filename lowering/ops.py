"""The operations: schema, shape function and dispatch of each; their public signatures.

An operation's name means its mathematics (`reference.py`). Which implementation runs is chosen here, in
`_implementation`: Triton kernels on CUDA devices with FP8 instructions, the eager reference everywhere else. All are
registered under `torch.ops.lowering`, so that graphs can hold them; none of them has an autograd formula, because the
graphs that hold them are differentiated already.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lowering import blockwise, hardware, reference
from lowering.checks import check_history, check_input, check_matrix, check_operands, check_scale
from lowering.formats import fp8_max, pad_to_alignment

_LIBRARY = torch.library.Library("lowering", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)

_SCHEMAS = {
    "amax": "(Tensor x) -> Tensor",
    "scale_from_amax": ("(Tensor amax, ScalarType dtype, *, int margin=0, float epsilon=0.0, bool power_of_2=False) -> Tensor"),
    "quantize": "(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
    "cast": "(Tensor x, Tensor scale, ScalarType dtype, *, bool columnwise=False, bool pad_outer=False) -> Tensor",
    "cast_amax": (
        "(Tensor x, Tensor scale, ScalarType dtype, *, bool columnwise=False, bool pad_outer=False) -> (Tensor, Tensor)"
    ),
    "cast_transpose": (
        "(Tensor x, Tensor scale, ScalarType dtype, *, bool pad_rows=False, bool pad_cols=False) -> (Tensor, Tensor)"
    ),
    "cast_transpose_amax": (
        "(Tensor x, Tensor scale, ScalarType dtype, *, bool pad_rows=False, bool pad_cols=False) -> (Tensor, Tensor, Tensor)"
    ),
    "multi_cast_transpose_amax": (
        "(Tensor[] xs, Tensor scales, ScalarType dtype, *, bool pad_rows=False, bool pad_cols=False) -> Tensor[]"
    ),
    "load_scales": "(Tensor scale, Tensor slots, int count) -> (Tensor, Tensor)",
    "record_amax": "(Tensor(a!) amax, Tensor slots, Tensor[] observed, int[] index) -> ()",
    "update_scales": (
        "(Tensor(a!) amax_history, Tensor(b!) scale, Tensor fp8_max, *, Tensor(c!)? num_non_finite=None,"
        ' str algo="max", int margin=0) -> ()'
    ),
    "scaled_mm": (
        "(Tensor a, Tensor b, Tensor scale_inv_a, Tensor scale_inv_b, Tensor? bias=None, *,"
        " ScalarType out_dtype=bfloat16, bool fast_accum=False) -> Tensor"
    ),
}


def _kernels() -> ModuleType:
    from lowering import kernels  # imported when such a device's tensor arrives, because it imports Triton

    return kernels


def _implementation(name: str, x: Tensor) -> Callable[..., Any]:
    """The function that computes operation `name` on the device of `x`."""
    return getattr(_kernels() if hardware.runs_kernels(x.device) else reference, name)


def _amax(x: Tensor) -> Tensor:
    return _implementation("amax", x)(x)


def _scale_from_amax(
    amax: Tensor, dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> Tensor:
    return reference.scale_from_amax(amax, dtype, margin, epsilon, power_of_2)


def _quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _implementation("quantize", x)(x, scale, dtype)


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype, *, columnwise: bool = False, pad_outer: bool = False) -> Tensor:
    return _implementation("cast", x)(x, scale, dtype, columnwise, pad_outer)


def _cast_amax(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, columnwise: bool = False, pad_outer: bool = False
) -> tuple[Tensor, Tensor]:
    return _implementation("cast_amax", x)(x, scale, dtype, columnwise, pad_outer)


def _cast_transpose(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[Tensor, Tensor]:
    return _implementation("cast_transpose", x)(x, scale, dtype, pad_rows, pad_cols)


def _cast_transpose_amax(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    return _implementation("cast_transpose_amax", x)(x, scale, dtype, pad_rows, pad_cols)


def _multi_cast_transpose_amax(
    xs: list[Tensor], scales: Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> list[Tensor]:
    return _implementation("multi_cast_transpose_amax", scales)(xs, scales, dtype, pad_rows, pad_cols)


def _load_scales(scale: Tensor, slots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return _implementation("load_scales", scale)(scale, slots, count)


def _record_amax(amax: Tensor, slots: Tensor, observed: list[Tensor], index: list[int]) -> None:
    # `.data` leaves the version counter alone: autograd holds this buffer for backward, and its content goes nowhere.
    _implementation("record_amax", amax)(amax.data, slots, observed, index)


def _update_scales(
    amax_history: Tensor,
    scale: Tensor,
    fp8_max: Tensor,
    *,
    num_non_finite: Tensor | None = None,
    algo: str = "max",
    margin: int = 0,
) -> None:
    _implementation("update_scales", scale)(amax_history, scale, fp8_max, num_non_finite, algo, margin)


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> Tensor:
    return _implementation("scaled_mm", a)(a, b, scale_inv_a, scale_inv_b, bias, out_dtype, fast_accum)


# Shape functions: metadata only, no data read.


def _scalar_like(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


def _fake_amax(x: Tensor) -> Tensor:
    return _scalar_like(x)


def _fake_scale_from_amax(
    amax: Tensor, dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> Tensor:
    return torch.empty_like(amax, dtype=torch.float32)


def _fake_quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _copy_shape(x: Tensor, columnwise: bool, pad_outer: bool) -> tuple[int, int]:
    outer, inner = (x.shape[1], x.shape[0]) if columnwise else (x.shape[0], x.shape[1])
    return (pad_to_alignment(outer) if pad_outer else outer), pad_to_alignment(inner)


def _fake_cast(x: Tensor, scale: Tensor, dtype: torch.dtype, *, columnwise: bool = False, pad_outer: bool = False) -> Tensor:
    return x.new_empty(_copy_shape(x, columnwise, pad_outer), dtype=dtype)


def _fake_cast_amax(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, columnwise: bool = False, pad_outer: bool = False
) -> tuple[Tensor, Tensor]:
    return _fake_cast(x, scale, dtype, columnwise=columnwise, pad_outer=pad_outer), _scalar_like(x)


def _fake_cast_transpose(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[Tensor, Tensor]:
    return (
        _fake_cast(x, scale, dtype, pad_outer=pad_rows),
        _fake_cast(x, scale, dtype, columnwise=True, pad_outer=pad_cols),
    )


def _fake_cast_transpose_amax(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_cast_transpose(x, scale, dtype, pad_rows=pad_rows, pad_cols=pad_cols), _scalar_like(x)


def _fake_multi_cast_transpose_amax(
    xs: list[Tensor], scales: Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> list[Tensor]:
    rowwise = [_fake_cast(x, scales, dtype, pad_outer=pad_rows) for x in xs]
    columnwise = [_fake_cast(x, scales, dtype, columnwise=True, pad_outer=pad_cols) for x in xs]
    return [*rowwise, *columnwise, scales.new_empty((len(xs),))]


def _fake_load_scales(scale: Tensor, slots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return scale.new_empty((count,)), scale.new_empty((count,))


def _fake_in_place(*args: object, **kwargs: object) -> None:
    return None


def _fake_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _register(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _LIBRARY.define(name + schema, tags=_TAGS)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowering::{name}", fake, lib=_LIBRARY)


for _name, _schema in _SCHEMAS.items():
    _register(_name, _schema, globals()[f"_{_name}"], globals().get(f"_fake_{_name}", _fake_in_place))

_ops = torch.ops.lowering


# Public functions: checked arguments in front of the registered operations.


def amax(x: Tensor) -> Tensor:
    """Largest magnitude of `x`, float32 scalar: 0 for an empty tensor, NaN or inf if an element is (NaN wins).

    `x` is float32, bfloat16 or float16, of any shape and strides. Raises ValueError for other dtypes.
    """
    check_input(x)
    return _ops.amax(x)


def scale_from_amax(
    amax: Tensor, dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> Tensor:
    """The factor that maps `amax` to the largest value of FP8 `dtype`; float32, shape of `amax`.

    fp8_max / 2**margin / max(amax, epsilon), the largest finite float32 where that overflows, 1 where amax is 0, inf
    or NaN; `power_of_2` rounds down to a power of two. Raises ValueError if `dtype` is not an FP8 dtype.
    """
    fp8_max(dtype)
    return _ops.scale_from_amax(amax, dtype, margin=margin, epsilon=epsilon, power_of_2=power_of_2)


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """saturate(round_to_nearest_even(float32(x) * scale)) in FP8 `dtype`, shape of `x`; `scale` is a float32 scalar.

    Finite overflow saturates; NaN stays NaN; +-inf becomes +-inf in E5M2 and NaN in E4M3.
    `x` is float32, bfloat16 or float16. Raises ValueError for another dtype of `x`, `scale` or the result.
    """
    fp8_max(dtype)
    check_input(x)
    check_scale(scale)
    return _ops.quantize(x, scale, dtype)


def cast_transpose_amax(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Both FP8 layouts of the matrix `x` [R, C] and its amax from one read.

    Returns rowwise [R, C16], columnwise [C, R16] (the transpose) and the float32 amax; C16 and R16 are padded with
    zeros to multiples of 16. `pad_rows` pads R of the rowwise copy, `pad_cols` C of the columnwise one. Raises
    ValueError for arguments of other shapes or dtypes.
    """
    fp8_max(dtype)
    check_matrix(x)
    check_scale(scale)
    return _ops.cast_transpose_amax(x, scale, dtype, pad_rows=pad_rows, pad_cols=pad_cols)


def update_scales(
    amax_history: Tensor,
    scale: Tensor,
    fp8_max: Tensor,
    *,
    algo: str = "max",
    margin: int = 0,
    num_non_finite: Tensor | None = None,
) -> None:
    """The step boundary of delayed scaling for n tensors at once, in place.

    amax_history [len, n], scale [n] and fp8_max [n] are float32; row 0 of the history is the staging row. `algo` is
    "max" or "most_recent". num_non_finite [n] int32, if given, counts the steps whose staged amax was inf or NaN;
    such a step leaves history and scale alone. Source: TransformerEngine's delayed scaling, with the differences
    named in docs/numerics.md.
    """
    if algo not in ("max", "most_recent"):
        raise ValueError(f"algo is {algo!r}; use 'max' or 'most_recent'")
    check_history(amax_history, scale, fp8_max, num_non_finite)
    _ops.update_scales(amax_history, scale, fp8_max, num_non_finite=num_non_finite, algo=algo, margin=margin)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> Tensor:
    """(a @ b) * scale_inv_a * scale_inv_b + bias for FP8 a [M, K] and b [K, N]; [M, N] in `out_dtype`.

    Products accumulate in float32 (`fast_accum` allows the tensor cores their shorter accumulator) and are rounded
    once. bias [N] or None. The scales are scalars, or those of `quantize_blockwise` in the orientation of their
    operands: for a [M, ceil(K/128)] or [ceil(M/128), ceil(K/128)], for b [ceil(K/128), N] or [ceil(K/128), ceil(N/128)]
    (b = q.t() takes the scales of q transposed, as a view). Blockwise GEMMs have no fast accumulation; one operand at
    least has 1x128 blocks. Raises ValueError for scales of other shapes, and for operands that FP8 tensor cores do not
    multiply (E5M2 by E5M2).
    """
    if scale_inv_a.numel() != 1 or scale_inv_b.numel() != 1:
        if fast_accum:
            raise ValueError("fast_accum is True, which blockwise scaling does not have; pass fast_accum=False")
        return blockwise.scaled_mm_compact(a, b, scale_inv_a, scale_inv_b, bias, out_dtype=out_dtype)
    check_operands(a, b)
    return _ops.scaled_mm(a, b, scale_inv_a, scale_inv_b, bias, out_dtype=out_dtype, fast_accum=fast_accum)
