"""Checks of the arguments of the operations on the state: every error names the value and the fix."""

from __future__ import annotations

import torch


def check_algo(algo: str) -> None:
    """`algo` is one that the operation knows; others are functions, which the caller computes."""
    if algo not in ("max", "most_recent"):
        raise ValueError(f"algo is {algo!r}; use 'max' or 'most_recent'")


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
