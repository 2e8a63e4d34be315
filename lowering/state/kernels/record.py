"""The state of delayed scaling at a graph's two ends: scales loaded by value, amaxes recorded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.triton.ahead import Kernel
from lowering.triton.amaxes import raise_amaxes
from lowering.triton.launch import cdiv, on_device, pinned_table
from lowering.triton.tile import magnitude_bits

BLOCK = 128


@Kernel
@triton.jit(do_not_specialize=["count"])
def load_scales_kernel(scale, slots, taken, reciprocal, count, stride_scale, stride_slots, BLOCK: tl.constexpr):
    """taken, reciprocal [count] = scale[slots[:count]] and its correctly rounded reciprocal."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    slot = tl.load(slots + offsets.to(tl.int64) * stride_slots, mask=mask, other=0).to(tl.int64)
    value = tl.load(scale + slot * stride_scale, mask=mask, other=1.0)
    tl.store(taken + offsets, value, mask=mask)
    tl.store(reciprocal + offsets, tl.div_rn(tl.full((BLOCK,), 1.0, dtype=tl.float32), value), mask=mask)


@Kernel
@triton.jit(do_not_specialize=["first", "count"])
def record_amax_kernel(
    amax_bits, slots, observed, index, first, count, stride_amax, stride_slots,
    HAS_INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """amax_bits[slots[i]] = max(itself, bits of observed) for i in index, or for i = first, first + 1, ...

    A maximum of integers, so NaN wins; atomic, because two observations may name one slot.
    """
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    if HAS_INDEX:
        position = tl.load(index + offsets, mask=mask, other=0)
    else:
        position = (first + offsets).to(tl.int64)
    slot = tl.load(slots + position * stride_slots, mask=mask, other=0).to(tl.int64)
    bits = magnitude_bits(tl.load(observed + offsets, mask=mask, other=0.0))
    tl.atomic_max(amax_bits + slot * stride_amax, bits, mask=mask, sem="relaxed")


def load_scales(scale: torch.Tensor, slots: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.load_scales` in one launch."""
    taken, reciprocal = scale.new_empty(count), scale.new_empty(count)
    if count:
        with on_device(scale):
            load_scales_kernel[(cdiv(count, BLOCK),)](
                scale, slots, taken, reciprocal, count, scale.stride(0), slots.stride(0), BLOCK=BLOCK, num_warps=4
            )
    return taken, reciprocal


def record_amax(
    amax: torch.Tensor, slots: torch.Tensor, observed: list[torch.Tensor], index: list[int], *, in_parts: bool = False
) -> None:
    """`reference.record_amax`: of parts one launch for each dtype and alignment, else one behind that which stacks the scalars
    or joins the vectors.

    Consecutive positions, which is what a graph that numbers its tensors in order asks for, travel as one number; any
    others as a table.
    """
    if not observed:
        return
    if in_parts:
        raise_amaxes(observed, index, amax, slots)
        return
    if observed[0].dim():
        values = torch.cat(observed)
        index = [i for start, x in zip(index, observed, strict=True) for i in range(start, start + len(x))]
    else:
        values = torch.stack(observed) if len(observed) > 1 else observed[0].reshape(1)
    first = index[0]
    consecutive = index == list(range(first, first + len(index)))
    with on_device(amax):
        table = None if consecutive else pinned_table(index, amax.device)
        record_amax_kernel[(cdiv(len(index), BLOCK),)](
            amax.view(torch.int32), slots, values.to(torch.float32), table, first, len(index), amax.stride(0), slots.stride(0),
            HAS_INDEX=not consecutive, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
