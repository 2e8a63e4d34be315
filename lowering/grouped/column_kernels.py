"""Columnwise copies [C, P] of rows in groups, at padded offsets: a kernel gathers, quantizes and transposes a tile.

A first kernel writes for each of the P tokens the row that it holds, -1 for padding (NOTE [padded offsets] in ../reference.py):
4 bytes per token, which the others read instead of looking for groups. The kernel that makes both copies quantizes rows of no
group, too, in the rowwise one: behind the last group -2 - row stands for each.
Other kernels move rows in groups to padded offsets, for libraries whose tiles hold rows of one group, and back.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lowering.copies import CastOptions, empty_copy
from lowering.formats import BLOCK, FLOAT32_MAX, GEMM_ALIGNMENT, Granularity, fp8_max, largest_finite, pad_to_alignment
from lowering.grouped import reference
from lowering.grouped.gemm_kernels import group_sizes, pick
from lowering.grouped.reference import alignment, padded_width
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, is_e5m2, on_device
from lowering.triton.tile import (
    INF_BITS,
    as_float32,
    block_scale,
    four_rows,
    fp8_bits,
    infinity_bits,
    larger,
    largest_of_rows,
    left,
    magnitude_bits,
    one_per_thread,
    reciprocal,
    row_amaxes,
    saturated_bits,
    store_columns,
    turned,
)

#: Tokens and columns of a tile: 128-byte lines of the source and of the copy.
BYTES_TILE = (128, 128)
#: By whether the rowwise copy, whose blocks lie along columns, is made, too; and warps.
BLOCK_TILES = {False: (BLOCK, 64, 4), True: (BLOCK, BLOCK, 8)}
#: Per thread, where scales are divisions and both copies are made: ptxas would spill before it takes more.
MOST_REGISTERS = 200
#: And warps, of the pass that quantizes lines.
LINE_TILE = (128, 64, 4)
#: Of the pass that finds amaxes, by the alignment of groups; warps, and tiles of a program.
AMAX_TILES = {GEMM_ALIGNMENT: (64, 128), BLOCK: (BLOCK, 64)}
AMAX_WARPS, AMAX_STEPS = 8, 4
#: Programs per group that write the map, and the tokens that each takes at once.
CHUNKS, CHUNK = 8, 1024

#: An infinite scale becomes this one.
SCALE_MAX = tl.constexpr(FLOAT32_MAX)


@Kernel
@triton.jit
def padded_rows_kernel(
    offs, index, rows, groups, num_groups, num_sources, width,
    HAS_INDEX: tl.constexpr, HAS_GROUPS: tl.constexpr, HAS_OTHERS: tl.constexpr, ALIGN: tl.constexpr, BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """rows [width] = the row that each token holds, -1 for padding; groups [width / ALIGN], where HAS_GROUPS, its group.
    HAS_OTHERS: padding behind the last group is -2 - row of each row of no group, which it has room for."""
    group = tl.program_id(0)
    g, starts, sizes = group_sizes(offs, num_groups, BLOCK_E)
    steps = tl.cdiv(sizes, ALIGN)
    first = tl.sum(tl.where(g < group, steps, 0), axis=0) * ALIGN
    last = tl.where(group < num_groups, first + pick(steps, g, group) * ALIGN, width)
    start, size = pick(starts, g, group), pick(sizes, g, group)
    for begin in range(first + tl.program_id(1) * CHUNK, last, tl.num_programs(1) * CHUNK):
        position = begin + tl.arange(0, CHUNK)
        is_row = position - first < size
        row = start + position - first
        if HAS_INDEX:
            row = tl.load(index + row, mask=is_row, other=0).to(tl.int32)
            row = tl.where(row < 0, row + num_sources, row)
        padding = -1
        if HAS_OTHERS:
            other = tl.load(offs + num_groups - 1) + position - first
            padding = tl.where((group == num_groups) & (other < num_sources), -2 - other, -1)
        tl.store(rows + position, tl.where(is_row, row, padding), mask=position < last)
        if HAS_GROUPS:
            is_first = (position % ALIGN == 0) & (position < last)
            tl.store(groups + position // ALIGN, tl.zeros((CHUNK,), tl.int32) + group, mask=is_first)


@triton.jit
def rows_of_tile(rows, first, width, COUNT: tl.constexpr, STEP: tl.constexpr):
    """Every STEP-th row of a tile of COUNT tokens, from token `first` on."""
    position = first + STEP * tl.arange(0, COUNT // STEP)
    return tl.load(rows + position, mask=position < width, other=-1)


@triton.jit
def gathered(x, row, c, cols, stride_r, stride_c):
    """Elements of the matrix x at rows and columns c, zeros where the row is -1."""
    pointers = x + (row.to(tl.int64) * stride_r)[:, None] + (c.to(tl.int64) * stride_c)[None, :]
    return tl.load(pointers, mask=(row >= 0)[:, None] & (c < cols)[None, :], other=0.0)


@triton.jit
def gathered_rows(x, rows, p0, c, cols, width, stride_r, stride_c, BLOCK_P: tl.constexpr):
    """Of a tile of BLOCK_P tokens from p0 on the rows 4 * k + i, as v_i, float32: see NOTE [four rows a thread]."""
    v0 = as_float32(gathered(x, rows_of_tile(rows, p0, width, BLOCK_P, 4), c, cols, stride_r, stride_c))
    v1 = as_float32(gathered(x, rows_of_tile(rows, p0 + 1, width, BLOCK_P, 4), c, cols, stride_r, stride_c))
    v2 = as_float32(gathered(x, rows_of_tile(rows, p0 + 2, width, BLOCK_P, 4), c, cols, stride_r, stride_c))
    v3 = as_float32(gathered(x, rows_of_tile(rows, p0 + 3, width, BLOCK_P, 4), c, cols, stride_r, stride_c))
    return v0, v1, v2, v3


@Kernel
@triton.jit
def group_columns_kernel(q, rows, out, cols, width, stride_r, stride_c, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """out [cols, width] = the bytes of q's rows, transposed."""
    tiles_c = tl.cdiv(cols, BLOCK_C)
    p0 = (tl.program_id(0) // tiles_c) * BLOCK_P
    c0 = (tl.program_id(0) % tiles_c).to(tl.int64) * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    t0 = gathered(q, rows_of_tile(rows, p0, width, BLOCK_P, 4), c, cols, stride_r, stride_c)
    t1 = gathered(q, rows_of_tile(rows, p0 + 1, width, BLOCK_P, 4), c, cols, stride_r, stride_c)
    t2 = gathered(q, rows_of_tile(rows, p0 + 2, width, BLOCK_P, 4), c, cols, stride_r, stride_c)
    t3 = gathered(q, rows_of_tile(rows, p0 + 3, width, BLOCK_P, 4), c, cols, stride_r, stride_c)
    four = turned(four_rows(t0, t1, t2, t3))
    store_columns(out + c0 * width + p0, four, left(width, p0, BLOCK_P), left(cols, c0, BLOCK_C), 1, width)


@triton.jit
def rows_read(rows, first, width, COUNT: tl.constexpr, STEP: tl.constexpr):
    """`rows_of_tile`, with rows of no group."""
    row = rows_of_tile(rows, first, width, COUNT, STEP)
    return tl.where(row < -1, -2 - row, row)


@triton.jit
def cast_rows_of_tile(
    x, rows, q, s, cols, stored_cols, num_rows, width, p0, c0, stride_r, stride_c, overflow_scale, epsilon,
    E5M2: tl.constexpr, HAS_EPSILON: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The rows of a tile, as wide as a block, in q [num_rows, stored_cols], and their factors in s, column-major."""
    c = c0 + tl.arange(0, BLOCK_C)
    r0, r1 = rows_read(rows, p0, width, BLOCK_P, 4), rows_read(rows, p0 + 1, width, BLOCK_P, 4)
    r2, r3 = rows_read(rows, p0 + 2, width, BLOCK_P, 4), rows_read(rows, p0 + 3, width, BLOCK_P, 4)
    v0 = as_float32(gathered(x, r0, c, cols, stride_r, stride_c))
    v1 = as_float32(gathered(x, r1, c, cols, stride_r, stride_c))
    v2 = as_float32(gathered(x, r2, c, cols, stride_r, stride_c))
    v3 = as_float32(gathered(x, r3, c, cols, stride_r, stride_c))
    a0, a1, a2, a3 = row_amaxes(v0, v1, v2, v3)
    s0 = block_scale(a0, overflow_scale, epsilon, HAS_EPSILON, FP8_MAX, POWER_OF_2)
    s1 = block_scale(a1, overflow_scale, epsilon, HAS_EPSILON, FP8_MAX, POWER_OF_2)
    s2 = block_scale(a2, overflow_scale, epsilon, HAS_EPSILON, FP8_MAX, POWER_OF_2)
    s3 = block_scale(a3, overflow_scale, epsilon, HAS_EPSILON, FP8_MAX, POWER_OF_2)
    inverse = reciprocal(one_per_thread(tl.reshape(four_rows(s0, s1, s2, s3), (BLOCK_P,))), POWER_OF_2)
    line = rows_read(rows, p0, width, BLOCK_P, 1)
    tl.store(s + (c0 // BLOCK_C) * num_rows + line, inverse, mask=line >= 0)
    store_at_rows(q, saturated_bits(v0, s0[:, None], E5M2), r0, c, stored_cols)
    store_at_rows(q, saturated_bits(v1, s1[:, None], E5M2), r1, c, stored_cols)
    store_at_rows(q, saturated_bits(v2, s2[:, None], E5M2), r2, c, stored_cols)
    store_at_rows(q, saturated_bits(v3, s3[:, None], E5M2), r3, c, stored_cols)
    if tl.max(magnitude_bits(larger(larger(a0, a1), larger(a2, a3))), axis=0) >= INF_BITS:
        tl.debug_barrier()  # other threads have stored what is stored over here
        for i in tl.static_range(4):
            row = rows_read(rows, p0 + i, width, BLOCK_P, 4)
            again = as_float32(gathered(x, row, c, cols, stride_r, stride_c))
            pointers = q + (row.to(tl.int64) * stored_cols)[:, None] + c[None, :]
            tl.store(pointers, infinity_bits(again, E5M2), mask=magnitude_bits(again) == INF_BITS)


@triton.jit
def store_at_rows(q, bits, row, c, stored_cols):
    """Store bits at rows, but where those are -1, and columns c of q, whose rows are contiguous."""
    pointers = q + (row.to(tl.int64) * stored_cols)[:, None] + c[None, :]
    tl.store(pointers, bits, mask=(row >= 0)[:, None] & (c < stored_cols)[None, :])


@triton.jit
def store_infinities_of_columns(
    x, rows, out, p0, c, cols, width, stride_r, stride_c, E5M2: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """Store the infinities of a tile's columns c over what `store_columns` stored at `out`."""
    tl.debug_barrier()  # other threads have stored what is stored over here
    for i in tl.static_range(4):
        again = as_float32(gathered(x, rows_of_tile(rows, p0 + i, width, BLOCK_P, 4), c, cols, stride_r, stride_c))
        position = i + 4 * tl.arange(0, BLOCK_P // 4)
        pointers = out + position[:, None] + (tl.arange(0, c.shape[0]).to(tl.int64) * width)[None, :]
        tl.store(pointers, infinity_bits(again, E5M2), mask=magnitude_bits(again) == INF_BITS)


@Kernel
@triton.jit
def cast_columns_blockwise_kernel(
    x, rows, q, s, q_row, s_row, cols, stored_cols, row_cols, num_rows, width, stride_r, stride_c, overflow_scale, epsilon,
    ROWWISE: tl.constexpr, E5M2: tl.constexpr, HAS_EPSILON: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """q [stored_cols, width] and its factors s [stored_cols, width / BLOCK_P], column-major; a block of tokens per tile.
    ROWWISE: q_row [num_rows, row_cols] and s_row [num_rows, tiles of columns], column-major, too."""
    tiles_c = tl.cdiv(stored_cols, BLOCK_C)
    tile_p = tl.program_id(0) // tiles_c
    p0 = tile_p * BLOCK_P
    c0 = (tl.program_id(0) % tiles_c).to(tl.int64) * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    if ROWWISE:  # the columns are read again, from cache, as in lowering/blockwise/kernels.py
        cast_rows_of_tile(
            x, rows, q_row, s_row, cols, row_cols, num_rows, width, p0, c0, stride_r, stride_c, overflow_scale, epsilon,
            E5M2, HAS_EPSILON, FP8_MAX, POWER_OF_2, BLOCK_P, BLOCK_C,
        )  # fmt: skip
    v0, v1, v2, v3 = gathered_rows(x, rows, p0, c, cols, width, stride_r, stride_c, BLOCK_P)
    amax = tl.reduce(largest_of_rows(v0, v1, v2, v3), 0, larger)
    own = block_scale(one_per_thread(amax), overflow_scale, epsilon, HAS_EPSILON, FP8_MAX, POWER_OF_2)
    inverse = tl.where(c < cols, reciprocal(own, POWER_OF_2), 0.0)
    tl.store(s + tile_p.to(tl.int64) * stored_cols + c, inverse, mask=c < stored_cols)
    scale = tl.gather(own, tl.arange(0, BLOCK_C), 0)
    four = saturated_bits(four_rows(v0, v1, v2, v3), scale[None, :, None, None], E5M2)
    out = q + c0 * width + p0
    store_columns(out, turned(four), left(width, p0, BLOCK_P), left(stored_cols, c0, BLOCK_C), 1, width)
    if tl.max(magnitude_bits(amax), axis=0) >= INF_BITS:
        store_infinities_of_columns(x, rows, out, p0, c, cols, width, stride_r, stride_c, E5M2, BLOCK_P)


@triton.jit
def raise_lines(amaxes, group, c, bits, num_groups, cols):
    """Raise the amaxes of groups [G] and columns c [C] by bits [G, C]; nothing of a group that does not exist."""
    mask = ((group >= 0) & (group < num_groups))[:, None] & (c < cols)[None, :]
    tl.atomic_max(amaxes + group.to(tl.int64)[:, None] * cols + c[None, :], bits, mask=mask, sem="relaxed")


@Kernel
@triton.jit
def amax_columns_kernel(
    x, rows, groups, amaxes, num_groups, cols, width, stride_r, stride_c,
    ALIGN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Raise amaxes [num_groups, cols], int32 bits: a line per group and column. A program takes STEPS tiles, and raises those
    of a group once but for tiles with several: an atomic for every ALIGN tokens takes several times as long as they do."""
    tiles_c = tl.cdiv(cols, BLOCK_C)
    first = (tl.program_id(0) // tiles_c) * BLOCK_P * STEPS
    c = (tl.program_id(0) % tiles_c).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    current, largest = tl.full((1,), -1, tl.int32), tl.zeros((1, BLOCK_C), tl.int32)
    for p0 in range(first, tl.minimum(first + BLOCK_P * STEPS, width), BLOCK_P):
        value = as_float32(gathered(x, rows_of_tile(rows, p0, width, BLOCK_P, 1), c, cols, stride_r, stride_c))
        of_blocks = tl.max(tl.reshape(magnitude_bits(value), (BLOCK_P // ALIGN, ALIGN, BLOCK_C)), axis=1)
        block = p0 // ALIGN + tl.arange(0, BLOCK_P // ALIGN)
        group = tl.load(groups + block, mask=block * ALIGN < width, other=num_groups)
        low, high = tl.min(group, axis=0, keep_dims=True), tl.max(group, axis=0, keep_dims=True)
        if tl.max(high - low, axis=0) == 0:
            if tl.max(low - current, axis=0) != 0:
                raise_lines(amaxes, current, c, largest, num_groups, cols)
                current, largest = low, tl.zeros((1, BLOCK_C), tl.int32)
            largest = tl.maximum(largest, tl.max(of_blocks, axis=0, keep_dims=True))
        else:
            raise_lines(amaxes, group, c, of_blocks, num_groups, cols)
    raise_lines(amaxes, current, c, largest, num_groups, cols)


@Kernel
@triton.jit
def cast_columns_rowwise_kernel(
    x, rows, groups, amaxes, q, num_groups, cols, stored_cols, width, stride_r, stride_c, epsilon,
    E5M2: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """q [stored_cols, width] by those amaxes."""
    tiles_c = tl.cdiv(stored_cols, BLOCK_C)
    p0 = (tl.program_id(0) // tiles_c) * BLOCK_P
    c0 = (tl.program_id(0) % tiles_c).to(tl.int64) * BLOCK_C
    c = c0 + tl.arange(0, BLOCK_C)
    block = p0 // ALIGN + tl.arange(0, BLOCK_P // ALIGN)
    group = tl.load(groups + block, mask=block * ALIGN < width, other=num_groups)
    mask = (group < num_groups)[:, None] & (c < cols)[None, :]
    amax = tl.load(amaxes + group.to(tl.int64)[:, None] * cols + c[None, :], mask=mask, other=0).to(tl.float32, bitcast=True)
    scale = block_scale(amax, SCALE_MAX, epsilon, True, FP8_MAX, POWER_OF_2)
    scale = tl.broadcast_to(scale[:, None, :], (BLOCK_P // ALIGN, ALIGN // 4, BLOCK_C))
    scale = tl.reshape(scale, (BLOCK_P // 4, BLOCK_C))
    v0, v1, v2, v3 = gathered_rows(x, rows, p0, c, cols, width, stride_r, stride_c, BLOCK_P)
    four = fp8_bits(four_rows(v0, v1, v2, v3), scale[:, :, None, None], E5M2)
    out = q + c0 * width + p0
    store_columns(out, turned(four), left(width, p0, BLOCK_P), left(stored_cols, c0, BLOCK_C), 1, width)
    if E5M2:  # noqa: SIM102 (the one is a constant, the other a tensor)
        if tl.max(tl.max(magnitude_bits(amax), axis=1), axis=0) >= INF_BITS:
            store_infinities_of_columns(x, rows, out, p0, c, cols, width, stride_r, stride_c, True, BLOCK_P)


@Kernel
@triton.jit
def line_inverses_kernel(
    amaxes, out, cols, stored_cols, epsilon, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr, BLOCK_C: tl.constexpr
):
    """out [num_groups, stored_cols] = the factors of the lines, 1 for padding."""
    group = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    amax = tl.load(amaxes + group * cols + c, mask=c < cols, other=0).to(tl.float32, bitcast=True)
    scale = block_scale(amax, SCALE_MAX, epsilon, True, FP8_MAX, POWER_OF_2)
    tl.store(out + group * stored_cols + c, tl.where(c < cols, tl.div_rn(1.0, scale), 1.0), mask=c < stored_cols)


# -- launches


def map_of_rows(
    x: torch.Tensor, offs: torch.Tensor, index: torch.Tensor | None, align: int, with_groups: bool, with_others: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The map, where asked for with rows of no group, and the group of every `align` tokens, `num_groups` behind the last."""
    num_groups = offs.shape[0]
    width = padded_width(x.shape[0] if index is None else index.shape[0], num_groups, align)
    rows = torch.empty(width, dtype=torch.int32, device=x.device)
    groups = torch.empty(width // align if with_groups else 1, dtype=torch.int32, device=x.device)
    padded_rows_kernel[(num_groups + 1, CHUNKS)](
        offs.contiguous(), offs if index is None else index.contiguous(), rows, groups, num_groups, x.shape[0], width,
        HAS_INDEX=index is not None, HAS_GROUPS=with_groups, HAS_OTHERS=with_others, ALIGN=align,
        BLOCK_E=max(16, triton.next_power_of_2(num_groups)), CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    return rows, groups


def _empty(x: torch.Tensor, width: int, pad_outer: bool) -> torch.Tensor:
    outer = pad_to_alignment(x.shape[1]) if pad_outer else x.shape[1]
    return torch.empty((outer, width), dtype=torch.uint8, device=x.device)


def columns_of_groups(
    q: torch.Tensor, offs: torch.Tensor, index: torch.Tensor | None = None, *, align: int = 16
) -> torch.Tensor:
    """`reference.transposed_copy` of rows in groups."""
    if q.numel() == 0:
        return reference.transposed_copy(q, offs, index, align=align)
    block_p, block_c = BYTES_TILE
    with on_device(q):
        rows, _ = map_of_rows(q, offs, index, align, with_groups=False)
        out = _empty(q, rows.shape[0], False)
        group_columns_kernel[(cdiv(rows.shape[0], block_p) * cdiv(q.shape[1], block_c),)](
            q.view(torch.uint8), rows, out, q.shape[1], rows.shape[0], *q.stride(),
            BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
    return out.view(q.dtype)


def cast_columns(
    x: torch.Tensor, dtype: torch.dtype, offs: torch.Tensor, index: torch.Tensor | None = None, **options: Any
) -> list[torch.Tensor]:
    """See `reference.cast_columns`, which makes those for MXFP8: no GPU has a grouped GEMM of theirs yet."""
    if x.numel() == 0 or options["granularity"] == Granularity.BLOCK_1X32:
        return reference.cast_columns(x, dtype, offs, index, **options)
    cast = CastOptions.of(columnwise=True, pad_cols=options.pop("pad_outer", False), **{"rowwise": False, **options})
    with on_device(x):
        return (_by_lines if cast.granularity == Granularity.ROW_WISE else _by_blocks)(x, dtype, offs, index, cast)


def _by_blocks(
    x: torch.Tensor, dtype: torch.dtype, offs: torch.Tensor, index: torch.Tensor | None, cast: CastOptions
) -> list[torch.Tensor]:
    block_p, block_c, num_warps = BLOCK_TILES[cast.rowwise]
    rows, _ = map_of_rows(x, offs, index, BLOCK, with_groups=False, with_others=cast.rowwise)
    (num_rows, cols), width = x.shape, rows.shape[0]
    q = _empty(x, width, cast.pad_cols)
    made = [q.view(dtype), torch.empty((width // BLOCK, q.shape[0]), dtype=torch.float32, device=x.device).t()]
    if cast.rowwise:
        factors = torch.empty((cdiv(cols, BLOCK), num_rows), dtype=torch.float32, device=x.device).t()
        made = [empty_copy(x, dtype, False, False), factors, *made]
    row, of_row = made[0], made[1]  # those of columns where the rowwise copy is not asked for, and not touched
    cast_columns_blockwise_kernel[(cdiv(width, block_p) * cdiv(q.shape[0], block_c),)](
        x, rows, q, made[-1], row.view(torch.uint8), of_row, cols, q.shape[0], row.shape[1], num_rows, width, *x.stride(),
        largest_finite(x.dtype), cast.epsilon, ROWWISE=cast.rowwise, E5M2=is_e5m2(dtype), HAS_EPSILON=cast.epsilon != 0,
        FP8_MAX=fp8_max(dtype), POWER_OF_2=cast.power_of_2, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=num_warps,
        maxnreg=None if cast.power_of_2 or not cast.rowwise else MOST_REGISTERS,
    )  # fmt: skip
    return made


def raise_line_amaxes(
    x: torch.Tensor, rows: torch.Tensor, groups: torch.Tensor, amaxes: torch.Tensor, num_groups: int, align: int
) -> None:
    """Raise amaxes [num_groups or more, C], int32 bits, of the columns of groups that a map of rows tells."""
    block_p, block_c = AMAX_TILES[align]
    amax_columns_kernel[(cdiv(rows.shape[0], block_p * AMAX_STEPS) * cdiv(x.shape[1], block_c),)](
        x, rows, groups, amaxes, num_groups, x.shape[1], rows.shape[0], *x.stride(),
        ALIGN=align, BLOCK_P=block_p, BLOCK_C=block_c, STEPS=AMAX_STEPS, num_warps=AMAX_WARPS,
    )  # fmt: skip


def _by_lines(
    x: torch.Tensor, dtype: torch.dtype, offs: torch.Tensor, index: torch.Tensor | None, cast: CastOptions
) -> list[torch.Tensor]:
    """Two passes, as the casts of matrices."""
    align, num_groups, cols = alignment(Granularity.ROW_WISE), offs.shape[0], x.shape[1]
    how = {"FP8_MAX": fp8_max(dtype), "POWER_OF_2": cast.power_of_2}
    rows, groups = map_of_rows(x, offs, index, align, with_groups=True)
    width = rows.shape[0]
    q = _empty(x, width, cast.pad_cols)
    amaxes = torch.zeros((num_groups, cols), dtype=torch.int32, device=x.device)
    scale_inv = torch.empty((num_groups, q.shape[0], 1), dtype=torch.float32, device=x.device)
    raise_line_amaxes(x, rows, groups, amaxes, num_groups, align)
    block_p, block_c, num_warps = LINE_TILE
    cast_columns_rowwise_kernel[(cdiv(width, block_p) * cdiv(q.shape[0], block_c),)](
        x, rows, groups, amaxes, q, num_groups, cols, q.shape[0], width, *x.stride(), cast.epsilon,
        E5M2=is_e5m2(dtype), **how, ALIGN=align, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=num_warps,
    )  # fmt: skip
    line_inverses_kernel[(cdiv(q.shape[0], 1024), num_groups)](
        amaxes, scale_inv, cols, q.shape[0], cast.epsilon, **how, BLOCK_C=1024, num_warps=4
    )
    return [q.view(dtype), scale_inv]


#: Rows and words of 8 bytes of a tile.
TILE = (16, 256)


@Kernel
@triton.jit
def move_rows_kernel(
    source, out, rows, words, width, stride_in, stride_out, TO_ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr
):
    """out [p] = source [rows[p]] for each of the `width` padded offsets that holds a row; TO_ROWS: out [rows[p]] = source [p].
    Lines of int64 words. What no row belongs to is neither read nor written."""
    tiles_w = tl.cdiv(words, BLOCK_W)
    p = (tl.program_id(0) // tiles_w) * BLOCK_P + tl.arange(0, BLOCK_P)
    w = (tl.program_id(0) % tiles_w) * BLOCK_W + tl.arange(0, BLOCK_W)
    row = tl.load(rows + p, mask=p < width, other=-1)
    mask = (row >= 0)[:, None] & (w < words)[None, :]
    read, written = (p, row) if TO_ROWS else (row, p)
    values = tl.load(source + read.to(tl.int64)[:, None] * stride_in + w[None, :], mask=mask)
    tl.store(out + written.to(tl.int64)[:, None] * stride_out + w[None, :], values, mask=mask)


@Kernel
@triton.jit
def padded_factors_kernel(
    scale_inv, rows, groups, out, indices, blocks, width, stride_row, stride_block,
    ALIGN: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """out [blocks, width] = the factors of the rows' blocks, 0 for padding; indices [width] = the group of the row, -1."""
    p = tl.program_id(0) * ALIGN + tl.arange(0, ALIGN)
    row = tl.load(rows + p)
    group = tl.load(groups + tl.program_id(0))
    tl.store(indices + p, tl.where(row >= 0, group, -1))
    for first in range(0, blocks, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        mask = (row >= 0)[:, None] & (b < blocks)[None, :]
        found = tl.load(scale_inv + row.to(tl.int64)[:, None] * stride_row + b[None, :] * stride_block, mask=mask, other=0.0)
        tl.store(out + b.to(tl.int64)[None, :] * width + p[:, None], found, mask=(b < blocks)[None, :])


def padded_rows(
    q: torch.Tensor, scale_inv: torch.Tensor, offs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows q [S, K] in groups, contiguous, and their scale_inv [S, B], with every group at a multiple of 128. Returns for the P
    padded offsets (`layouts.padded_width`) the row that each holds [P], -1 for padding; q [P, K], whose padding is not written;
    scale_inv [P, B], strides (1, P), 0 for padding; the group of each [P], -1 for padding."""
    block_p, block_w = TILE
    words, blocks = q.view(torch.int64), scale_inv.shape[1]
    with on_device(q):
        rows, groups = map_of_rows(q, offs, None, BLOCK, with_groups=True)
        width = rows.shape[0]
        padded = torch.empty((width, q.shape[1]), dtype=torch.uint8, device=q.device).view(q.dtype)
        factors = torch.empty((blocks, width), dtype=torch.float32, device=q.device)
        indices = torch.empty(width, dtype=torch.int32, device=q.device)
        move_rows_kernel[(cdiv(width, block_p) * cdiv(words.shape[1], block_w),)](
            words, padded.view(torch.int64), rows, words.shape[1], width, words.shape[1], words.shape[1],
            TO_ROWS=False, BLOCK_P=block_p, BLOCK_W=block_w, num_warps=4,
        )  # fmt: skip
        padded_factors_kernel[(width // BLOCK,)](
            scale_inv, rows, groups, factors, indices, blocks, width, *scale_inv.stride(), ALIGN=BLOCK, BLOCK_B=8, num_warps=4
        )
    return rows, padded, factors.t(), indices


def rows_of_groups(padded: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The rows [S, N] that lie at padded offsets in `padded` [P, N], of bfloat16, contiguous. Those that belong to no group are
    not written. rows: as `padded_rows` returns them."""
    block_p, block_w = TILE
    out = torch.empty((num_rows, padded.shape[1]), dtype=padded.dtype, device=padded.device)
    words = padded.view(torch.int64)
    with on_device(padded):
        move_rows_kernel[(cdiv(words.shape[0], block_p) * cdiv(words.shape[1], block_w),)](
            words, out.view(torch.int64), rows, words.shape[1], words.shape[0], words.shape[1], words.shape[1],
            TO_ROWS=True, BLOCK_P=block_p, BLOCK_W=block_w, num_warps=4,
        )  # fmt: skip
    return out
