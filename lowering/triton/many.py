"""Launches over many matrices: which of them can share one, and the table that tells the kernel about them.

A table in device memory tells where each matrix and its copies are; a program finds its matrix by counting the matrices that
begin at or before its tile (`tile.find_matrix`).

NOTE [largest magnitudes of many tensors] One launch writes them into a vector of its own or into the staging row of delayed
scaling. The table tells where each tensor is and which element of the result it raises, by an atomic maximum of
integers (so that NaN wins). A grid of tensors x programs: the programs of one tensor share its blocks. Partial maxima have
an element for each program instead: no memory to clear, and nothing to wait for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from lowering.copies import without_gaps
from lowering.formats import GEMM_ALIGNMENT
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, on_device, pinned_table
from lowering.triton.tile import ELEMENTS, as_float32, magnitude_bits


def is_aligned(x: torch.Tensor) -> bool:
    """True if rows of a matrix are contiguous, and its address, sizes and distance of rows multiples of 16."""
    return x.stride(-1) == 1 and x.shape[-2] % GEMM_ALIGNMENT == 0 and has_aligned_lines(x)


def has_aligned_lines(x: torch.Tensor) -> bool:
    """True if rows or columns of a matrix or batch are contiguous, and their size, address and distances multiples of 16."""
    lines = x if x.stride(-1) == 1 else x.mT
    *distances, step = lines.stride()
    return step == 1 and not any(n % GEMM_ALIGNMENT for n in (lines.shape[-1], *distances, x.data_ptr()))


def warps(of_aligned: int, aligned: bool) -> int:
    """The warps of a launch: twice as many where strides are arbitrary, as addresses take the registers of half a tile."""
    return of_aligned if aligned else 2 * of_aligned


def groups(xs: Sequence[torch.Tensor], key: Callable[[torch.Tensor], Any]) -> Iterator[tuple[Any, Any, list[int]]]:
    """The tensors that one launch can take, not empty, of one dtype and equal keys: Triton's dtype, the key, positions."""
    found: dict[tuple[torch.dtype, Any], list[int]] = defaultdict(list)
    for i, x in enumerate(xs):
        if x.numel():
            found[x.dtype, key(x)].append(i)
    for (dtype, of_group), members in found.items():
        yield ELEMENTS[dtype], of_group, members


def table_of(rows: Iterable[tuple[int, Sequence[int]]], device: torch.device) -> tuple[torch.Tensor, int]:
    """The table of a launch, and its number of tiles. rows: of each matrix the number of its tiles, and its fields."""
    first_tiles: list[int] = []
    fields: list[int] = []
    num_tiles = 0
    for tiles, of_matrix in rows:
        first_tiles.append(num_tiles)
        fields += of_matrix
        num_tiles += tiles
    return pinned_table(first_tiles + fields, device), num_tiles


BLOCK = 4096
#: Programs of one launch that suffice to keep an H200 busy.
PROGRAMS = 1056


@Kernel
@triton.jit(do_not_specialize=["stride_result", "stride_slots"])
def multi_amax_kernel(
    table, result, slots, stride_result, stride_slots, element: tl.constexpr,
    HAS_SLOTS: tl.constexpr, PARTIAL: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """result[target] = max(itself, bits of the largest magnitude) for each row (pointer, elements, target) of table. The target
    is slots[target] where HAS_SLOTS. PARTIAL: each program stores its own maximum, those of a target in a row. ALIGNED: all
    pointers and sizes are multiples of 16 bytes."""
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


def num_programs(xs: list[torch.Tensor]) -> int:
    """Programs for each tensor of a launch."""
    return min(cdiv(max(x.numel() for x in xs), BLOCK), max(1, PROGRAMS // len(xs)))


def raise_amaxes(
    xs: list[torch.Tensor], targets: list[int], result: torch.Tensor, slots: torch.Tensor | None, partials: bool = False
) -> None:
    """result[targets[i]] = max(itself, largest magnitude of xs[i]), in place, or slots[targets[i]]: one launch per dtype and
    alignment. `partials`: result is [n, programs of a tensor]."""
    flats = [without_gaps(x) for x in xs]
    bits = result.view(torch.int32)
    with on_device(result):
        for element, aligned, members in groups(flats, lambda x: x.numel() % 16 == 0 and x.data_ptr() % 16 == 0):
            programs = result.shape[1] if partials else num_programs([flats[i] for i in members])
            fields = [field for i in members for field in (flats[i].data_ptr(), flats[i].numel(), targets[i])]
            multi_amax_kernel[(len(members), programs)](
                pinned_table(fields, result.device), bits, slots, bits.stride(0), 0 if slots is None else slots.stride(0),
                element=element, HAS_SLOTS=slots is not None, PARTIAL=partials, ALIGNED=aligned, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
