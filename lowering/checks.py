"""Checks of arguments that operations of several kinds share. Every error is a ValueError that names the value and the fix."""

from __future__ import annotations

import torch

from lowering.formats import HIGH_PRECISION_DTYPES, fp8_max


def check_blocks(x: torch.Tensor, dtype: torch.dtype, how: str) -> None:
    """`x` can be quantized to `dtype` and has blocks; `how` it would be quantized, for the error."""
    fp8_max(dtype)
    if x.dtype not in HIGH_PRECISION_DTYPES:
        names = ", ".join(str(d) for d in HIGH_PRECISION_DTYPES)
        raise ValueError(f"x is {x.dtype}, which is not quantized {how}; convert it to one of {names}")
    if x.dim() == 0:
        raise ValueError("x has no dimensions, blocks need one; reshape it to (1,)")


def check_flat(x: torch.Tensor) -> None:
    """`x` is a matrix."""
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; flatten it to a matrix [rows, last]")


def check_product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    """`a` [M, K] and `b` [K, N] are FP8 and multiply; `bias` and `out_dtype` suit the product."""
    fp8_max(a.dtype)
    fp8_max(b.dtype)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} do not multiply; pass a [M, K] and b [K, N]")
    if out_dtype not in HIGH_PRECISION_DTYPES:
        raise ValueError(f"out_dtype is {out_dtype}; use torch.bfloat16, torch.float16 or torch.float32")
    check_bias(bias, b)


def check_bias(bias: torch.Tensor | None, b: torch.Tensor) -> None:
    """`bias` has an entry for each column of `b`, if there is one."""
    if bias is not None and tuple(bias.shape) != (b.shape[1],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; pass one of shape ({b.shape[1]},), the columns of b")
