"""Argument checks that the operations and the launch wrappers share: every error names the value and the fix."""

from __future__ import annotations

import torch

from lowering.checks import check_inputs, check_two_dimensions
from lowering.formats import fp8_max


def check_scale(scale: torch.Tensor) -> None:
    """`scale` is one float32 value."""
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(f"scale must be one float32 value, got {scale.dtype} of shape {tuple(scale.shape)}")


def check_margin(inverse: str | None, margin: int) -> None:
    """Scales as engines make them have no margin."""
    if inverse is not None and margin:
        raise ValueError(f"inverse is {inverse!r} and margin {margin}; engines have no margin: pass margin=0")


def check_casts(
    xs: list[torch.Tensor],
    scales: list[torch.Tensor],
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    with_amax: bool,
    in_parts: bool,
) -> None:
    """Every tensor is a matrix or a batch that can be quantized to `dtype`, and has its scale."""
    fp8_max(dtype)
    check_inputs(xs, rowwise, columnwise)
    if len(scales) != len(xs):
        raise ValueError(f"{len(xs)} matrices need as many scales, got {len(scales)}")
    for i, x in enumerate(xs):
        scale = scales[i]
        if x.dim() == 2:
            check_scale(scale)
        elif scale.dtype != torch.float32 or tuple(scale.shape) not in ((), (x.shape[0],)):
            raise ValueError(
                f"scale is {scale.dtype} {tuple(scale.shape)}; pass a float32 scalar, or one for each of the"
                f" {x.shape[0]} matrices"
            )
    if in_parts and not (with_amax and len(xs) == 1 and xs[0].dim() == 2):
        raise ValueError("in_parts is True, which is for one matrix, with_amax=True; pass in_parts=False")


def check_rowwise(rowwise: torch.Tensor) -> None:
    """`rowwise` is an FP8 matrix."""
    fp8_max(rowwise.dtype)
    check_two_dimensions(rowwise)
