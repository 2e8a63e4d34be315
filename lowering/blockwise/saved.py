"""Activations that are kept for the backward as E4M3 with a float32 scale per 1x128 values: the cast and its inverse, in plain
torch.

Blocks lie along the last dimension, whatever the number of dimensions; the last block of a line may be shorter. Formulas are
those of `cast_with_scales`. Devices without FP8 instructions run both operations as well: the values are then kept as their
bytes, uint8, which code for every device can load and store.
"""

from __future__ import annotations

import torch

from lowering import scaling
from lowering.checks import check_blocks
from lowering.copies import num_blocks
from lowering.formats import BLOCK, E4M3, HIGH_PRECISION_DTYPES, Granularity


def scales_shape(x: torch.Tensor) -> tuple[int, ...]:
    """Shape of the scales of a tensor of x's shape."""
    return (*x.shape[:-1], num_blocks(x.shape[-1], BLOCK))


def save_activation(
    x: torch.Tensor, *, power_of_2: bool = True, epsilon: float = 0.0, as_bytes: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values of x [..., C], contiguous, and float32 scale_inv [..., ceil(C/128)], of blocks along the last dimension. x is
    float32, bfloat16 or float16 with at least one dimension. Scales are those of `scaling.quantize_blocks`; a NaN or an
    infinity becomes NaN. as_bytes: the values as uint8. Raises ValueError for another dtype and for a scalar."""
    if not x.numel():
        q = x.new_empty(x.shape, dtype=E4M3)
        scale_inv = x.new_ones(scales_shape(x), dtype=torch.float32)
    else:
        matrix = x.reshape(-1, x.shape[-1])
        q, scale_inv = scaling.quantize_blocks(matrix, E4M3, Granularity.BLOCK_1X128, power_of_2, epsilon)
        q, scale_inv = q.reshape(x.shape), scale_inv.reshape(scales_shape(x))
    return q.view(torch.uint8) if as_bytes else q, scale_inv


def load_activation(q: torch.Tensor, scale_inv: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """float32(q) * scale_inv, rounded to `dtype`, [..., C] contiguous: what `save_activation` gave, q as E4M3 or as bytes.
    Raises ValueError for scales of another shape and for another dtype."""
    if not q.numel():
        return q.new_empty(q.shape, dtype=dtype)
    values = q.view(E4M3) if q.dtype == torch.uint8 else q
    matrix, scales = values.reshape(-1, q.shape[-1]), scale_inv.reshape(-1, scale_inv.shape[-1])
    return scaling.dequantize(matrix, scales, Granularity.BLOCK_1X128).to(dtype).reshape(q.shape)


def check_save(x: torch.Tensor) -> None:
    check_blocks(x, E4M3, "with scales of blocks")


def check_load(q: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> None:
    if q.dtype not in (E4M3, torch.uint8) or q.dim() == 0 or tuple(scale_inv.shape) != scales_shape(q):
        raise ValueError(
            f"q is {q.dtype} {list(q.shape)} with scale_inv {list(scale_inv.shape)}; pass both results of save_activation"
        )
    if dtype not in HIGH_PRECISION_DTYPES:
        raise ValueError(f"dtype is {dtype}; use one of {', '.join(map(str, HIGH_PRECISION_DTYPES))}")
