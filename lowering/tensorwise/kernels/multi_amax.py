"""The amax of many tensors from one launch: into a vector of its own, or into the staging row of delayed scaling. And the
scales of current scaling, by a second launch over partial maxima.

A table in device memory tells where each tensor is and which element of the result it raises, by an atomic maximum of
integers (so that NaN wins). A grid of tensors x programs: the programs of one tensor share its blocks. Partial maxima have
an element for each program instead: no memory to clear, and nothing to wait for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.copies import matrices
from lowering.formats import FLOAT32_MAX, fp8_max
from lowering.tensorwise.kernels import stacks
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, on_device, pinned_table
from lowering.triton.many import groups
from lowering.triton.tile import as_float32, magnitude_bits

BLOCK = 4096
#: Programs of one launch that suffice to keep an H200 busy.
PROGRAMS = 1056

MAX_FLOAT32 = tl.constexpr(FLOAT32_MAX)


@Kernel
@triton.jit(do_not_specialize=["stride_result", "stride_slots"])
def multi_amax_kernel(
    table, result, slots, stride_result, stride_slots, element: tl.constexpr,
    HAS_SLOTS: tl.constexpr, PARTIAL: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """result[target] = max(itself, bits of the largest magnitude) for each row (pointer, elements, target) of table.

    The target is slots[target] where HAS_SLOTS. PARTIAL: each program stores its own maximum, those of a target in a row.
    ALIGNED: all pointers and sizes are multiples of 16 bytes.
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
        value = as_float32(tl.load(x + offsets, mask=offsets < count, other=0.0))
        largest = tl.maximum(largest, magnitude_bits(value))
        start += step
    if HAS_SLOTS:
        target = tl.load(slots + target * stride_slots).to(tl.int64)
    if PARTIAL:
        tl.store(result + target * stride_result + tl.program_id(1), tl.max(largest, axis=0))
    else:
        tl.atomic_max(result + target * stride_result, tl.max(largest, axis=0), sem="relaxed")


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


def _flat(x: torch.Tensor) -> torch.Tensor:
    """x itself if its elements fill memory without gaps, in whatever order; else a contiguous copy."""
    strides = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            return x.contiguous()
        expected *= size
    return x


def _num_programs(xs: list[torch.Tensor]) -> int:
    """Programs for each tensor of a launch."""
    return min(cdiv(max(x.numel() for x in xs), BLOCK), max(1, PROGRAMS // len(xs)))


def _launch(
    xs: list[torch.Tensor], targets: list[int], result: torch.Tensor, slots: torch.Tensor | None, partials: bool = False
) -> None:
    """One launch per dtype and alignment. `partials`: result is [n, programs of a tensor]."""
    flats = [_flat(x) for x in xs]
    bits = result.view(torch.int32)
    with on_device(result):
        for element, aligned, members in groups(flats, lambda x: x.numel() % 16 == 0 and x.data_ptr() % 16 == 0):
            programs = result.shape[1] if partials else _num_programs([flats[i] for i in members])
            fields = [field for i in members for field in (flats[i].data_ptr(), flats[i].numel(), targets[i])]
            multi_amax_kernel[(len(members), programs)](
                pinned_table(fields, result.device), bits, slots, bits.stride(0), 0 if slots is None else slots.stride(0),
                element=element, HAS_SLOTS=slots is not None, PARTIAL=partials, ALIGNED=aligned, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip


def multi_amax(xs: list[torch.Tensor], *, per_matrix: bool = False) -> torch.Tensor:
    """The largest magnitude of each tensor or matrix, float32 [n]: 0 for an empty one, NaN wins."""
    if per_matrix and len(xs) == 1 and xs[0].dim() == 3:
        return stacks.amax_stack(xs[0])
    if per_matrix:
        xs = matrices(xs)
    result = torch.zeros(len(xs), dtype=torch.float32, device=xs[0].device)
    _launch(xs, list(range(len(xs))), result, None)
    return result


def record_partial_amax(amax: torch.Tensor, slots: torch.Tensor, parts: list[torch.Tensor], index: list[int]) -> None:
    """amax[slots[index[i]]] = max(itself, largest element of parts[i]), in place. float32, nothing negative."""
    _launch(parts, index, amax, slots)


def multi_scales(
    xs: list[torch.Tensor], dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.multi_scales`: the launches of `multi_amax`, and one more."""
    shape, device = (len(xs), max(1, _num_programs(xs))), xs[0].device
    has_empty = any(x.numel() == 0 for x in xs)
    partials = (torch.zeros if has_empty else torch.empty)(shape, dtype=torch.int32, device=device)
    _launch(xs, list(range(len(xs))), partials, None, partials=True)
    scales, inverses = (torch.empty(len(xs), dtype=torch.float32, device=device) for _ in range(2))
    with on_device(scales):
        scales_kernel[(len(xs),)](
            partials, scales, inverses, shape[1], fp8_max(dtype) / 2.0**margin, epsilon,
            POWER_OF_2=power_of_2, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return scales, inverses
