"""Argument checks that the operations and the launch wrappers share: every error names the value and the fix."""

from __future__ import annotations

import torch

from lowering.formats import HIGH_PRECISION_DTYPES, fp8_max
from lowering.hardware import Gemm, refusal


def check_input(x: torch.Tensor) -> None:
    """`x` has a dtype that can be quantized."""
    if x.dtype not in HIGH_PRECISION_DTYPES:
        names = ", ".join(str(dtype) for dtype in HIGH_PRECISION_DTYPES)
        raise ValueError(f"cannot quantize a {x.dtype} tensor; cast it to one of {names} first")


def check_matrix(x: torch.Tensor) -> None:
    """`x` has such a dtype and two dimensions."""
    check_input(x)
    _check_two_dimensions(x)


def _check_two_dimensions(x: torch.Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"expected a matrix, got a tensor of shape {tuple(x.shape)}; reshape it to two dimensions")


def check_scale(scale: torch.Tensor) -> None:
    """`scale` is one float32 value."""
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(f"scale must be one float32 value, got {scale.dtype} of shape {tuple(scale.shape)}")


def check_rowwise(rowwise: torch.Tensor) -> None:
    """`rowwise` is an FP8 matrix."""
    fp8_max(rowwise.dtype)
    _check_two_dimensions(rowwise)


def check_operands(a: torch.Tensor, b: torch.Tensor) -> None:
    """`a` and `b` are FP8 matrices that FP8 tensor cores multiply; the same rule on every device."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}; a is [M, K] and b is [K, N]")
    reason = refusal(Gemm(a.dtype, b.dtype), None)
    if reason is not None:
        fix = "quantize both operands to FP8, at least one operand to E4M3"
        raise ValueError(f"cannot multiply {a.dtype} by {b.dtype}: {reason}; {fix}")
