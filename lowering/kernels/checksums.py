"""Checksums of the bytes of many tensors from one launch.

A table in device memory tells where each tensor's words are. A grid of tensors x programs: the programs of one tensor share its
words, and add their sums to the result by an atomic addition, whose order does not matter modulo 2**32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering import other_ops as reference
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, on_device, pinned_table

BLOCK = 4096
#: Programs of one launch that suffice to keep an H200 busy.
PROGRAMS = 1056
OF_POSITION, OF_FIRST, OF_SECOND = (tl.constexpr(f) for f in (reference.OF_POSITION, reference.OF_FIRST, reference.OF_SECOND))
FIRST_SHIFT, SECOND_SHIFT = (tl.constexpr(shift) for shift in reference.SHIFTS)


@Kernel
@triton.jit
def checksums_kernel(table, result, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """result[target] += the sum of the mixed words of each row (pointer, words, target) of table. ALIGNED: all pointers are
    multiples of 16 bytes, and all numbers of words of 4."""
    row = table + 3 * tl.program_id(0)
    words = tl.load(row).to(tl.pointer_type(tl.uint32))
    count = tl.load(row + 1)
    target = tl.load(row + 2)
    if ALIGNED:
        words = tl.multiple_of(words, 16)
        count = tl.multiple_of(count, 4)
    total = tl.zeros([BLOCK], dtype=tl.uint32)
    start = tl.program_id(1).to(tl.int64) * BLOCK
    step = tl.num_programs(1).to(tl.int64) * BLOCK
    while start < count:
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < count
        h = tl.load(words + offsets, mask=mask, other=0) ^ (offsets.to(tl.uint32) * OF_POSITION)
        h = h * OF_FIRST
        h = (h ^ (h >> FIRST_SHIFT)) * OF_SECOND
        total += tl.where(mask, h ^ (h >> SECOND_SHIFT), 0)
        start += step
    tl.atomic_add(result + target, tl.sum(total, axis=0).to(tl.int32, bitcast=True), sem="relaxed")


def checksums(xs: list[torch.Tensor]) -> torch.Tensor:
    """`lowering.other_ops.checksums`: one launch, or two where some tensors begin between multiples of 16 bytes."""
    words = [reference.words_of(x) for x in xs]
    result = torch.zeros(len(xs), dtype=torch.int32, device=xs[0].device)
    with on_device(result):
        for aligned in (True, False):
            members = [i for i, w in enumerate(words) if w.numel() and _is_aligned(w) is aligned]
            if members:
                programs = min(cdiv(max(words[i].numel() for i in members), BLOCK), max(1, PROGRAMS // len(members)))
                fields = [field for i in members for field in (words[i].data_ptr(), words[i].numel(), i)]
                checksums_kernel[(len(members), programs)](
                    pinned_table(fields, result.device), result, ALIGNED=aligned, BLOCK=BLOCK, num_warps=8
                )
    return result


def _is_aligned(words: torch.Tensor) -> bool:
    return words.data_ptr() % 16 == 0 and words.numel() % 4 == 0
