"""Argument checks that the public functions and the launch wrappers share: every error names the value and the fix."""

from __future__ import annotations

import torch

from lowering.formats import E5M2, FP8_MAX, HIGH_PRECISION_DTYPES


def check_input(x: torch.Tensor) -> None:
    """`x` has a dtype that can be quantized."""
    if x.dtype not in HIGH_PRECISION_DTYPES:
        names = ", ".join(str(dtype) for dtype in HIGH_PRECISION_DTYPES)
        raise ValueError(f"cannot quantize a {x.dtype} tensor; cast it to one of {names} first")


def check_matrix(x: torch.Tensor) -> None:
    """`x` has such a dtype and two dimensions."""
    check_input(x)
    if x.dim() != 2:
        raise ValueError(f"expected a matrix, got a tensor of shape {tuple(x.shape)}; reshape it to two dimensions")


def check_scale(scale: torch.Tensor) -> None:
    """`scale` is one float32 value."""
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(f"scale must be one float32 value, got {scale.dtype} of shape {tuple(scale.shape)}")


def check_operands(a: torch.Tensor, b: torch.Tensor) -> None:
    """`a` and `b` are FP8 matrices that FP8 tensor cores multiply; the same rule on every device."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}; a is [M, K] and b is [K, N]")
    if a.dtype not in FP8_MAX or b.dtype not in FP8_MAX:
        raise ValueError(f"cannot multiply {a.dtype} by {b.dtype}; quantize both operands to FP8 first")
    if a.dtype == b.dtype == E5M2:
        raise ValueError(f"FP8 tensor cores do not multiply {E5M2} by {E5M2}; quantize one operand to E4M3")


def check_history(
    amax_history: torch.Tensor, scale: torch.Tensor, fp8_max: torch.Tensor, num_non_finite: torch.Tensor | None
) -> None:
    """history [len >= 1, n], scale [n] and fp8_max [n] are float32, num_non_finite [n] is int32."""
    if amax_history.dim() != 2 or amax_history.shape[0] < 1:
        raise ValueError(f"amax_history must be [len, n] with len >= 1, got shape {tuple(amax_history.shape)}")
    expected = {"amax_history": (amax_history, torch.float32, tuple(amax_history.shape))}
    columns = (amax_history.shape[1],)
    expected |= {"scale": (scale, torch.float32, columns), "fp8_max": (fp8_max, torch.float32, columns)}
    if num_non_finite is not None:
        expected["num_non_finite"] = (num_non_finite, torch.int32, columns)
    for name, (tensor, dtype, shape) in expected.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
