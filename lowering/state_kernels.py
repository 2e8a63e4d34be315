"""The state of delayed scaling at a graph's two ends: scales loaded by value, amaxes recorded; and the step boundary:
every history rolled and every scale computed in one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.formats import FLOAT32_MAX
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, on_device, pinned_table
from lowering.triton.many import raise_amaxes
from lowering.triton.tile import INF_BITS, magnitude_bits

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
    """amax_bits[slots[i]] = max(itself, bits of observed) for i in index, or for i = first, first + 1, ... A maximum of
    integers, so NaN wins; atomic, because two observations may name one slot."""
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
    or joins the vectors. Consecutive positions, which is what a graph that numbers its tensors in order asks for, travel as one
    number; any others as a table."""
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


#: Columns of a program: 64-byte segments of a history row, and enough programs for a thousand tensors to fill a device.
BLOCK_N = 16
#: Rows that are moved together.
BLOCK_L = 128

MAX_FLOAT32 = tl.constexpr(FLOAT32_MAX)


@Kernel
@triton.jit
def update_scales_kernel(
    history, scale, fp8_max, num_non_finite, length, n, stride_l, stride_scale, stride_fp8_max, stride_non_finite,
    margin_factor, MOST_RECENT: tl.constexpr, COUNT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """`reference.update_scales` of BLOCK_N columns of history [length, n], in place. A program owns its columns and moves their
    rows towards row 1 in order, BLOCK_L at a time. NOTE [barriers] What one thread stores another may still have to load, in
    the same step (row r goes to r - 1) and at the end (row 0, counts). A barrier stands between the loads and the stores of
    each step."""
    columns = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_range = columns < n
    stride_l = tl.cast(stride_l, tl.int64)
    staged = tl.load(history + columns, mask=in_range, other=0.0)
    staged_bits = magnitude_bits(staged)
    finite = staged_bits < INF_BITS
    valid = finite & (staged > 0.0)
    move = in_range & valid

    second = tl.load(history + stride_l + columns, mask=in_range & (length > 1), other=0.0)
    window_bits = tl.maximum(staged_bits, magnitude_bits(second))
    for start in range(1, length - 1, BLOCK_L):
        rows = start + tl.arange(0, BLOCK_L)
        row_in_range = (rows < length - 1)[:, None]
        target = history + rows[:, None] * stride_l + columns[None, :]
        moved = tl.load(target + stride_l, mask=row_in_range & in_range[None, :], other=0.0)
        window_bits = tl.maximum(window_bits, tl.max(magnitude_bits(moved), axis=0))
        tl.debug_barrier()
        tl.store(target, moved, mask=row_in_range & move[None, :])

    amax = staged if MOST_RECENT else window_bits.to(tl.float32, bitcast=True)
    largest_value = tl.load(fp8_max + columns * stride_fp8_max, mask=in_range, other=1.0) * margin_factor
    new_scale = tl.div_rn(largest_value, tl.where(amax > 0.0, amax, 1.0))
    new_scale = tl.where(new_scale == float("inf"), MAX_FLOAT32, new_scale)
    if COUNT:
        counted = num_non_finite + columns * stride_non_finite
        count = tl.load(counted, mask=in_range & ~finite, other=0)
    tl.debug_barrier()
    tl.store(history + (length - 1) * stride_l + columns, staged, mask=move & (length > 1))
    tl.store(history + columns, tl.zeros((BLOCK_N,), dtype=tl.float32), mask=in_range)
    tl.store(scale + columns * stride_scale, new_scale, mask=move & (amax > 0.0))
    if COUNT:
        tl.store(counted, count + 1, mask=in_range & ~finite)


def update_scales(
    amax_history: torch.Tensor,
    scale: torch.Tensor,
    fp8_max: torch.Tensor,
    *,
    num_non_finite: torch.Tensor | None = None,
    algo: str = "max",
    margin: int = 0,
) -> None:
    """`reference.update_scales`, in place. Rows of the history may be further apart than n; columns may not."""
    length, n = amax_history.shape
    if amax_history.stride(1) != 1 and n > 1:
        raise ValueError(f"amax_history needs contiguous rows, got strides {amax_history.stride()}")
    if n == 0:
        return
    with on_device(scale):
        update_scales_kernel[(cdiv(n, BLOCK_N),)](
            amax_history, scale, fp8_max, num_non_finite, length, n, amax_history.stride(0), scale.stride(0),
            fp8_max.stride(0), 0 if num_non_finite is None else num_non_finite.stride(0), 2.0**-margin,
            MOST_RECENT=algo == "most_recent", COUNT=num_non_finite is not None,
            BLOCK_N=BLOCK_N, BLOCK_L=BLOCK_L, num_warps=4,
        )  # fmt: skip
