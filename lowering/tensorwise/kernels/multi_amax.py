"""The amax of many tensors from one launch, and the scales of current scaling, by a second launch over partial maxima."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.copies import matrices
from lowering.formats import FLOAT32_MAX, fp8_max
from lowering.tensorwise.kernels.amax import amax_batch
from lowering.triton.ahead import Kernel
from lowering.triton.amaxes import num_programs, raise_amaxes
from lowering.triton.launch import on_device

MAX_FLOAT32 = tl.constexpr(FLOAT32_MAX)


@Kernel
@triton.jit(do_not_specialize=["num_partials"])
def scales_kernel(
    partials, scales, inverses, num_partials, limit, epsilon, POWER_OF_2: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """scales, inverses [n] = `reference.scales_from_amax` of the largest of each row of int32 partials [n, num_partials]."""
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    bits = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, num_partials, BLOCK):
        mask = start + offsets < num_partials
        bits = tl.maximum(bits, tl.load(partials + row * num_partials + start + offsets, mask=mask, other=0))
    amax = tl.full([1], 0, tl.int32) + tl.max(bits, axis=0)
    amax = amax.to(tl.float32, bitcast=True)
    amax = tl.where(amax < epsilon, epsilon, amax)  # false for NaN
    infinity = float("inf")
    scale = tl.div_rn(tl.zeros([1], tl.float32) + limit, tl.where(amax > 0.0, amax, 1.0))
    scale = tl.where(scale == infinity, MAX_FLOAT32, scale)
    scale = tl.where((amax > 0.0) & (amax < infinity), scale, 1.0)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    one = tl.arange(0, 1)
    tl.store(scales + row + one, scale)
    tl.store(inverses + row + one, tl.div_rn(tl.full([1], 1.0, tl.float32), scale))


def multi_amax(xs: list[torch.Tensor], *, per_matrix: bool = False) -> torch.Tensor:
    """The largest magnitude of each tensor or matrix, float32 [n]: 0 for an empty one, NaN wins."""
    if per_matrix and len(xs) == 1 and xs[0].dim() == 3:
        return amax_batch(xs[0])
    if per_matrix:
        xs = matrices(xs)
    result = torch.zeros(len(xs), dtype=torch.float32, device=xs[0].device)
    raise_amaxes(xs, list(range(len(xs))), result, None)
    return result


def multi_scales(
    xs: list[torch.Tensor], dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.multi_scales`: the launches of `multi_amax`, and one more."""
    shape, device = (len(xs), max(1, num_programs(xs))), xs[0].device
    has_empty = any(x.numel() == 0 for x in xs)
    partials = (torch.zeros if has_empty else torch.empty)(shape, dtype=torch.int32, device=device)
    raise_amaxes(xs, list(range(len(xs))), partials, None, partials=True)
    scales, inverses = (torch.empty(len(xs), dtype=torch.float32, device=device) for _ in range(2))
    with on_device(scales):
        scales_kernel[(len(xs),)](
            partials, scales, inverses, shape[1], fp8_max(dtype) / 2.0**margin, epsilon,
            POWER_OF_2=power_of_2, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return scales, inverses
