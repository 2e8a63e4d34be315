"""The amax of many tensors from one launch: into a vector of its own, or into the staging row of delayed scaling.

A table in device memory tells where each tensor is and which element of the result it raises, by an atomic maximum of
integers (so that NaN wins). A grid of tensors x programs: the programs of one tensor share its blocks.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import triton
import triton.language as tl

from lowering.tensorwise.checks import check_input
from lowering.triton.launch import cdiv, on_device, pinned_table
from lowering.triton.tile import magnitude_bits

BLOCK = 4096
#: Programs of one launch that suffice to keep an H200 busy.
PROGRAMS = 1056


@triton.jit
def multi_amax_kernel(
    table, result, slots, stride_result, stride_slots, element: tl.constexpr,
    HAS_SLOTS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """result[target] = max(itself, bits of the largest magnitude) for each row (pointer, elements, target) of table.

    The target is slots[target] where HAS_SLOTS. ALIGNED: all pointers and sizes are multiples of 16 bytes.
    """
    row = table + 3 * tl.program_id(0)
    x = tl.load(row).to(tl.pointer_type(element))
    count = tl.load(row + 1)
    target = tl.load(row + 2)
    if ALIGNED:
        x = tl.multiple_of(x, 16)
        count = tl.multiple_of(count, 16)
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    start = tl.program_id(1).to(tl.int64) * BLOCK
    step = tl.num_programs(1).to(tl.int64) * BLOCK
    while start < count:
        offsets = start + tl.arange(0, BLOCK)
        value = tl.load(x + offsets, mask=offsets < count, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude_bits(value))
        start += step
    if HAS_SLOTS:
        target = tl.load(slots + target * stride_slots).to(tl.int64)
    tl.atomic_max(result + target * stride_result, tl.max(largest, axis=0), sem="relaxed")


def _flat(x: torch.Tensor) -> torch.Tensor:
    """x itself if its elements fill memory without gaps, in whatever order; else a contiguous copy."""
    strides = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            return x.contiguous()
        expected *= size
    return x


_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _launch(xs: list[torch.Tensor], targets: list[int], result: torch.Tensor, slots: torch.Tensor | None) -> None:
    """One launch per dtype and alignment."""
    groups: dict[tuple[torch.dtype, bool], list[tuple[torch.Tensor, int]]] = defaultdict(list)
    for x, target in zip(xs, targets, strict=True):
        check_input(x)
        if x.numel():
            flat = _flat(x)
            groups[x.dtype, flat.numel() % 16 == 0 and flat.data_ptr() % 16 == 0].append((flat, target))
    bits = result.view(torch.int32)
    for (dtype, aligned), members in groups.items():
        programs = min(cdiv(max(x.numel() for x, _ in members), BLOCK), max(1, PROGRAMS // len(members)))
        with on_device(result):
            table = pinned_table([field for x, target in members for field in (x.data_ptr(), x.numel(), target)], result.device)
            multi_amax_kernel[(len(members), programs)](
                table, bits, slots, bits.stride(0), 0 if slots is None else slots.stride(0), element=_ELEMENTS[dtype],
                HAS_SLOTS=slots is not None, ALIGNED=aligned, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip


def multi_amax(xs: list[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each tensor, float32 [n]: 0 for an empty one, NaN wins."""
    result = torch.zeros(len(xs), dtype=torch.float32, device=xs[0].device)
    _launch(xs, list(range(len(xs))), result, None)
    return result


def record_partial_amax(amax: torch.Tensor, slots: torch.Tensor, parts: list[torch.Tensor], index: list[int]) -> None:
    """amax[slots[index[i]]] = max(itself, largest element of parts[i]), in place. float32, nothing negative."""
    _launch(parts, index, amax, slots)
