"""Checks of the arguments of the rowwise operations. Every error is a ValueError that names the value and the fix."""

from __future__ import annotations

import torch

from lowering.checks import check_bias, check_inputs, check_two_dimensions
from lowering.formats import FP8_MAX, HIGH_PRECISION_DTYPES, Granularity, fp8_max
from lowering.hardware import Gemm, refusal


def check_lines(xs: list[torch.Tensor], rowwise: bool, columnwise: bool) -> None:
    """Every tensor is a matrix that can be quantized, and there is something to do."""
    for x in xs:
        check_two_dimensions(x)
    check_inputs(xs, rowwise, columnwise)


def check_casts(xs: list[torch.Tensor], dtype: torch.dtype, rowwise: bool, columnwise: bool) -> None:
    """Every tensor is a matrix or a batch that can be quantized to `dtype`, and there is something to do."""
    fp8_max(dtype)
    check_inputs(xs, rowwise, columnwise)


def check_amaxes(xs: list[torch.Tensor], amaxes: torch.Tensor, dtype: torch.dtype, rowwise: bool, columnwise: bool) -> None:
    """`amaxes` has an entry for every line."""
    fp8_max(dtype)
    check_lines(xs, rowwise, columnwise)
    lines = sum(x.shape[0] * rowwise + x.shape[1] * columnwise for x in xs)
    if amaxes.dtype != torch.float32 or tuple(amaxes.shape) != (lines,):
        raise ValueError(
            f"amaxes is {amaxes.dtype} {tuple(amaxes.shape)}, these matrices have {lines} lines; pass what amax_rowwise"
            " returned for them, with the same rowwise and columnwise"
        )


def _refusal(a: torch.dtype, b: torch.dtype, out: torch.dtype) -> str | None:
    return refusal(Gemm(a, b, Granularity.ROW_WISE, Granularity.ROW_WISE, out), None)


#: Of two FP8 dtypes and a float one: eager calls would wait for it.
_REFUSALS = {(a, b, out): _refusal(a, b, out) for a in FP8_MAX for b in FP8_MAX for out in HIGH_PRECISION_DTYPES}


def check_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    """Operands, scales and bias fit together."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}; a is [M, K] and b is [K, N]")
    dtypes = a.dtype, b.dtype, out_dtype
    reason = _REFUSALS[dtypes] if dtypes in _REFUSALS else _refusal(*dtypes)
    if reason is not None:
        fix = "quantize both operands to FP8, at least one operand to E4M3, and ask for a float output"
        raise ValueError(f"cannot multiply {a.dtype} by {b.dtype}: {reason}; {fix}")
    _check_scale("scale_inv_a", scale_inv_a, a.shape[0], "rows of a")
    _check_scale("scale_inv_b", scale_inv_b, b.shape[1], "columns of b")
    check_bias(bias, b)


def _check_scale(name: str, scale_inv: torch.Tensor, lines: int, what: str) -> None:
    is_scalar = scale_inv.dim() == 0
    if scale_inv.dtype != torch.float32 or not (is_scalar or tuple(scale_inv.shape) == (lines, 1)):
        raise ValueError(
            f"{name} is {scale_inv.dtype} {tuple(scale_inv.shape)}; pass float32 ({lines}, 1), one for each of the {what},"
            " or a scalar"
        )
