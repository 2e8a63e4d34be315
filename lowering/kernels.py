"""Kernels of no room, for CUDA devices with FP8 instructions: statistics and checksums; and the choice of a cast's.

Statistics are of what is in memory: one read of a tensor serves both of its copies. A program takes 128 x 128 elements, and of
them 32 lines at a time, along the rows for the rowwise copy, then along the columns: the second time they come from the cache.
Sums are float64. Of a block that shares a scale its two ratios are written, 8 bytes; of lines, which are longer than a tile,
the sums of each tile. Rows in groups are read through a map (NOTE [padded offsets] in grouped/reference.py) that begins every
group at a tile, so that a tile has lines of one group.

Checksums of many tensors come from one launch: a table in device memory tells where each tensor's words are. The programs of
one tensor share its words, and add their sums to the result by an atomic addition, whose order does not matter modulo 2**32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lowering import casts, other_ops, statistics
from lowering.blockwise import kernels as blocks
from lowering.copies import CastOptions
from lowering.formats import BLOCK, E4M3, E5M2, MX_BLOCK, Granularity, fp8_max, largest_finite, largest_rounded
from lowering.grouped.column_kernels import columns_of_groups, map_of_rows, raise_line_amaxes
from lowering.grouped.reference import valid_rows
from lowering.mxfp8 import kernels as mx
from lowering.mxfp8.kernels import e8m0_code, factor_of
from lowering.rowwise import kernels as rows
from lowering.rowwise.kernels import amax_rowwise
from lowering.scaling import scales_from_amax
from lowering.statistics import How, Sums, vector_of_blocks, vector_of_sums
from lowering.tensorwise import kernels as tensors
from lowering.triton.ahead import Kernel
from lowering.triton.launch import batch_step, cdiv, is_e5m2, on_device, pinned_table
from lowering.triton.tile import (
    INF_BITS,
    as_float32,
    block_scale,
    converted,
    larger,
    magnitude_bits,
    place_of_tile,
    reciprocal,
    tiles_of,
)

#: Lines that a program holds at once; with four blocks in each, registers are enough for half of them.
LINES, LINES_OF_MX = 32, 16
NUM_WARPS = 8
#: The sums of a program, float64: UNDERFLOW, SATURATED, NON_FINITE, SQUARES, ERRORS, AMAX.
TOTALS = 6
#: The largest value that clipping does not change.
ROUNDED_E4M3, ROUNDED_E5M2 = tl.constexpr(largest_rounded(E4M3)), tl.constexpr(largest_rounded(E5M2))
#: The elements that share a scale: the tensor, a line, a block of a line, a square.
OF_TENSOR, OF_LINES, OF_BLOCKS, OF_SQUARES = (tl.constexpr(i) for i in range(4))


@triton.jit
def decoded(bits, E5M2: tl.constexpr):
    """Float32 of finite FP8 bits: shifted into place, the exponent's bias corrected by a product, which is exact."""
    code = bits.to(tl.int32)
    if E5M2:
        magnitude = ((code & 0x7F) << 21).to(tl.float32, bitcast=True) * 5192296858534827628530496329220096.0
    else:
        magnitude = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    return tl.where(code >= 0x80, -magnitude, magnitude)


@triton.jit
def mx_inverse(code):
    """2**(code - 127) of int32 codes, NaN for 255."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def load_lines(
    x, rows, r0, line0, size_r, size_c, c0, stride_r, stride_c, COLUMNWISE: tl.constexpr, HAS_ROWS: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 [LINES, BLOCK] of a tile, lines along its rows or its columns, zeros beyond the matrix; and of each
    place along the rows the row that is there."""
    if COLUMNWISE:
        position = r0 + tl.arange(0, BLOCK)
        c = c0 + line0 + tl.arange(0, LINES)
    else:
        position = r0 + line0 + tl.arange(0, LINES)
        c = c0 + tl.arange(0, BLOCK)
    if HAS_ROWS:
        row = tl.load(rows + position, mask=position < size_r, other=-1).to(tl.int64)
    else:
        row = tl.where(position < size_r, position, -1)
    if COLUMNWISE:
        mask = (row >= 0)[None, :] & (c < size_c)[:, None]
        pointers = x + row[None, :] * stride_r + c[:, None] * stride_c
    else:
        mask = (row >= 0)[:, None] & (c < size_c)[None, :]
        pointers = x + row[:, None] * stride_r + c[None, :] * stride_c
    return as_float32(tl.load(pointers, mask=mask, other=0.0)), row, c


@triton.jit
def of_elements(x, scale, scale_inv, E5M2: tl.constexpr):
    """Flags of underflow, of saturation and of non-finite elements; their squares and their errors', float64; magnitudes."""
    scaled = x * scale
    q = decoded(converted(scaled, E5M2), E5M2)
    is_finite = magnitude_bits(x) < INF_BITS
    made = q.to(tl.float64) * scale_inv.to(tl.float64)
    is_right = is_finite & (tl.abs(made) < float("inf"))
    exact = tl.where(is_right, x, 0.0).to(tl.float64)
    error = tl.where(is_right, exact - made, 0.0)
    under = (is_finite & (x != 0) & (q == 0)).to(tl.int32)
    over = (is_finite & (tl.abs(scaled) > (ROUNDED_E5M2 if E5M2 else ROUNDED_E4M3))).to(tl.int32)
    return under, over, 1 - is_finite.to(tl.int32), exact * exact, error * error, tl.where(is_right, tl.abs(x), 0.0)


@triton.jit
def store_blocks(first, second, place, squares, errors, amax, scale):
    """Store the largest scaled element of each block, 0 of zeros, and its RATIO, as float32; see
    `statistics.vector_of_blocks`."""
    scaled = tl.where(amax == 0, 0.0, amax.to(tl.float64) * scale.to(tl.float64))
    scaled = tl.where(scaled < 2.0**-126, -(scaled * 2.0**150), scaled)
    ratio = tl.where(errors == 0, float("inf"), squares / tl.where(errors == 0, 1.0, errors))
    tl.store(first + place, scaled.to(tl.float32))
    tl.store(second + place, ratio.to(tl.float32))


@triton.jit
def measure_copy(
    x, rows, groups, e, tile_r, tile_c, size_r, size_c, stride_r, stride_c, scale_in, inverse_in, step_scale, overflow_scale,
    epsilon, totals, first, second, largest,
    HAS_ROWS: tl.constexpr, HAS_GROUPS: tl.constexpr, COLUMNWISE: tl.constexpr, KIND: tl.constexpr, MX: tl.constexpr,
    WIDTH: tl.constexpr, E5M2: tl.constexpr, FP8_MAX: tl.constexpr, HAS_EPSILON: tl.constexpr, POWER_OF_2: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One copy's statistics of a tile: see `statistics_kernel`."""
    tiles_c, tiles_r = tiles_of(size_c, BLOCK), tiles_of(size_r, BLOCK)
    program = (e * tiles_r + tile_r) * tiles_c + tile_c
    r0, c0 = tile_r * BLOCK, tile_c * BLOCK
    IS_GRID: tl.constexpr = KIND == OF_SQUARES and WIDTH == BLOCK
    CELLS: tl.constexpr = BLOCK // WIDTH
    owner = e
    if HAS_GROUPS and COLUMNWISE:
        owner = tl.load(groups + tile_r).to(tl.int64)
    scale_in += owner * step_scale
    inverse_in += owner * step_scale
    under = tl.zeros((), tl.int32)
    over, lost = under, under
    squares_of_all = tl.zeros((), tl.float64)
    errors_of_all = tl.zeros((), tl.float64)
    amax_of_all = tl.zeros((), tl.float32)
    if KIND == OF_TENSOR:
        scale, scale_inv = tl.load(scale_in), tl.load(inverse_in)
    if IS_GRID:
        amax = tl.zeros((), tl.float32)
        for line0 in range(0, BLOCK, LINES):
            value, _, _ = load_lines(
                x, rows, r0, line0, size_r, size_c, c0, stride_r, stride_c, COLUMNWISE, HAS_ROWS, LINES, BLOCK
            )
            amax = larger(amax, tl.reduce(tl.reduce(tl.abs(value), 1, larger), 0, larger))
        scale = block_scale(amax, overflow_scale, epsilon, HAS_EPSILON, FP8_MAX, POWER_OF_2)
        scale_inv = reciprocal(scale, POWER_OF_2)
    for line0 in range(0, BLOCK, LINES):
        value, row, c = load_lines(
            x, rows, r0, line0, size_r, size_c, c0, stride_r, stride_c, COLUMNWISE, HAS_ROWS, LINES, BLOCK
        )
        if KIND == OF_LINES:
            if COLUMNWISE:
                line, is_line = c, c < size_c
            else:
                line, is_line = row, row >= 0
            cells = tl.load(scale_in + line, mask=is_line, other=1.0)[:, None]
            of_cells = tl.load(inverse_in + line, mask=is_line, other=1.0)[:, None]
        elif KIND == OF_TENSOR or IS_GRID:
            cells = tl.zeros((LINES, CELLS), tl.float32) + scale
            of_cells = tl.zeros((LINES, CELLS), tl.float32) + scale_inv
        else:
            amaxes = tl.reduce(tl.reshape(tl.abs(value), (LINES, CELLS, WIDTH)), 2, larger)
            if KIND == OF_SQUARES:
                amaxes = tl.broadcast_to(tl.reduce(amaxes, 0, larger)[None, :], (LINES, CELLS))
            if MX:
                code = e8m0_code(amaxes, FP8_MAX)
                cells, of_cells = factor_of(code), mx_inverse(code)
            else:
                cells = block_scale(amaxes, overflow_scale, epsilon, HAS_EPSILON, FP8_MAX, POWER_OF_2)
                of_cells = reciprocal(cells, POWER_OF_2)
        factor = tl.reshape(tl.broadcast_to(cells[:, :, None], (LINES, CELLS, WIDTH)), (LINES, BLOCK))
        inverse = tl.reshape(tl.broadcast_to(of_cells[:, :, None], (LINES, CELLS, WIDTH)), (LINES, BLOCK))
        lost_here, over_here, not_finite, square, error, magnitude = of_elements(value, factor, inverse, E5M2)
        under += tl.sum(tl.sum(lost_here, 1), 0)
        over += tl.sum(tl.sum(over_here, 1), 0)
        lost += tl.sum(tl.sum(not_finite, 1), 0)
        squares = tl.sum(tl.reshape(square, (LINES, CELLS, WIDTH)), 2)
        errors = tl.sum(tl.reshape(error, (LINES, CELLS, WIDTH)), 2)
        amax_of = tl.max(tl.reshape(magnitude, (LINES, CELLS, WIDTH)), 2)
        squares_of_all += tl.sum(tl.sum(squares, 1), 0)
        errors_of_all += tl.sum(tl.sum(errors, 1), 0)
        amax_of_all = tl.maximum(amax_of_all, tl.max(tl.max(amax_of, 1), 0))
        at = line0 + tl.arange(0, LINES)
        if KIND == OF_LINES:
            if COLUMNWISE:
                place, is_there = (e * tiles_r + tile_r) * size_c + c0 + at, c0 + at < size_c
            else:
                place, is_there = (e * tiles_c + tile_c) * size_r + r0 + at, r0 + at < size_r
            tl.store(first + place, tl.sum(squares, 1), mask=is_there)
            tl.store(second + place, tl.sum(errors, 1), mask=is_there)
            tl.store(largest + place, tl.max(amax_of, 1), mask=is_there)
        elif KIND == OF_BLOCKS:
            place = (program * BLOCK + at[:, None]) * CELLS + tl.arange(0, CELLS)[None, :]
            store_blocks(first, second, place, squares, errors, amax_of, cells)
        elif KIND == OF_SQUARES and not IS_GRID:
            of_cell = tl.max(cells, 0)  # all lines have the same
            place = (program * (BLOCK // LINES) + line0 // LINES) * CELLS + tl.arange(0, CELLS)
            store_blocks(first, second, place, tl.sum(squares, 0), tl.sum(errors, 0), tl.max(amax_of, 0), of_cell)
    if IS_GRID:
        store_blocks(first, second, program, squares_of_all, errors_of_all, amax_of_all, scale)
    out = totals + program * 6
    tl.store(out, under.to(tl.float64))
    tl.store(out + 1, over.to(tl.float64))
    tl.store(out + 2, lost.to(tl.float64))
    tl.store(out + 3, squares_of_all)
    tl.store(out + 4, errors_of_all)
    tl.store(out + 5, amax_of_all.to(tl.float64))


@Kernel
@triton.jit
def statistics_kernel(
    x, rows, groups, size_r, size_c, stride_r, stride_c, step, overflow_scale, epsilon,
    scale_r, inverse_r, step_r, totals_r, first_r, second_r, largest_r,
    scale_c, inverse_c, step_c, totals_c, first_c, second_c, largest_c,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_GROUPS: tl.constexpr, KIND: tl.constexpr,
    MX: tl.constexpr, WIDTH: tl.constexpr, E5M2: tl.constexpr, FP8_MAX: tl.constexpr, HAS_EPSILON: tl.constexpr,
    POWER_OF_2: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics of copies of the matrices [size_r, size_c] of a batch, a tile a program. rows: int32 [size_r], where HAS_ROWS,
    of each place the row that is there, -1 for none. groups: int32, the group of each tile of rows. Of either copy: scale and
    inverse, float32, of each matrix or group a step apart (OF_TENSOR), or of each of its lines; totals, float64 [matrices,
    tiles, TOTALS]. OF_BLOCKS, OF_SQUARES: first and second, float32, what `store_blocks` stores of the blocks of each tile.
    OF_LINES: first and second, float64, the SQUARES and ERRORS [matrices, tiles along lines, lines], and largest, float32, the
    amaxes."""
    tile_r, tile_c = place_of_tile(tl.program_id(0), tiles_of(size_c, BLOCK))
    e = tl.program_id(1).to(tl.int64)
    x += e * step
    if ROWWISE:
        measure_copy(
            x, rows, groups, e, tile_r, tile_c, size_r, size_c, stride_r, stride_c, scale_r, inverse_r, step_r,
            overflow_scale, epsilon, totals_r, first_r, second_r, largest_r, HAS_ROWS, HAS_GROUPS, False, KIND, MX, WIDTH,
            E5M2, FP8_MAX, HAS_EPSILON, POWER_OF_2, LINES, BLOCK,
        )  # fmt: skip
    if COLUMNWISE:
        measure_copy(
            x, rows, groups, e, tile_r, tile_c, size_r, size_c, stride_r, stride_c, scale_c, inverse_c, step_c,
            overflow_scale, epsilon, totals_c, first_c, second_c, largest_c, HAS_ROWS, HAS_GROUPS, True, KIND, MX, WIDTH,
            E5M2, FP8_MAX, HAS_EPSILON, POWER_OF_2, LINES, BLOCK,
        )  # fmt: skip


# -- launches


_Rows = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]
"""The rows of a matrix that are measured. The row of each place, int32, -1 for none; None: all rows. The group of each tile of
places, int32, for tiles of none the number of groups. The rows that a group reads, int64; of a batch those of all matrices."""


def _cells(how: How) -> tuple[int, int]:
    """KIND and WIDTH of the kernel."""
    if how.kind is Granularity.TENSOR_WISE:
        return OF_TENSOR.value, BLOCK
    if how.kind.block is None:
        return OF_LINES.value, BLOCK
    is_square = how.square or how.kind is Granularity.BLOCK_128X128
    return (OF_SQUARES if is_square else OF_BLOCKS).value, how.kind.block[1]


def quantization_statistics(
    *operands: Any, granularity: str, rowwise: bool = True, columnwise: bool = False, **options: Any
) -> list[torch.Tensor]:
    """See `statistics.quantization_statistics`. The scales of engines, and what is empty, are left to the reference."""
    given: list[Any] = [*operands, *[None] * (8 - len(operands))]
    x, dtype, scale, scale_inv, offs, index, of_rows, of_columns = given
    how = How(Granularity(granularity), dtype, **options)
    sides = [side for side, is_wanted in ((False, rowwise), (True, columnwise)) if is_wanted]
    if how.inverse is not None or not x.numel() or (index is not None and not index.numel()):
        options |= {"granularity": granularity, "rowwise": rowwise, "columnwise": columnwise}
        return statistics.quantization_statistics(*operands, **options)
    with on_device(x):
        if how.kind is Granularity.TENSOR_WISE:
            pair = scale.reshape(-1), scale_inv.reshape(-1), 1 if scale.dim() else 0
            return _measured(x, how, _valid(x, offs, index), {False: pair})
        factors: dict[bool, _Given] = dict.fromkeys(sides)
        if how.kind.block is None:
            factors = _factors(x, how, offs, index, {side: of_columns if side else of_rows for side in sides})
        if offs is None:
            return _measured(x, how, _valid(x, None, None), factors)
        if index is None and True in sides:
            return _measured(x, how, _in_groups(x, offs, None), factors)
        # Rows that several groups read count once rowwise, and once for each slot columnwise.
        places = {side: _in_groups(x, offs, index) if side else _valid(x, offs, index) for side in sides}
        return [vector for side in sides for vector in _measured(x, how, places[side], {side: factors[side]})]


_Given = tuple[torch.Tensor, torch.Tensor, int] | None  # Scales, their reciprocals, the step between matrices; None of blocks.


def _valid(x: torch.Tensor, offs: torch.Tensor | None, index: torch.Tensor | None) -> _Rows:
    """The rows of a matrix that groups read, in their order; all of a batch."""
    if offs is None:
        count = x.numel() // x.shape[-1]
        return None, None, torch.full((), count, dtype=torch.int64, device=x.device)
    valid = valid_rows(offs, x.shape[0], index)
    at = torch.where(valid, torch.arange(x.shape[0], dtype=torch.int32, device=x.device), -1)
    return at, None, valid.sum()


def _in_groups(x: torch.Tensor, offs: torch.Tensor, index: torch.Tensor | None) -> _Rows:
    """Group by group, each from a tile on."""
    return *map_of_rows(x, offs, index, BLOCK, with_groups=True), offs[-1].to(torch.int64)


def _factors(
    x: torch.Tensor, how: How, offs: torch.Tensor | None, index: torch.Tensor | None, known: dict[bool, torch.Tensor | None]
) -> dict[bool, _Given]:
    """Scales of the rows or columns of each matrix; of the columns of each group, and one more for tiles of none."""
    found: dict[bool, _Given] = {}
    for side, inverse in known.items():
        count = x.size(-1 if side else -2)
        if inverse is None or not how.power_of_2:
            amaxes = _amaxes(x, offs, index, side)
            scale, inverse = scales_from_amax(amaxes, how.dtype, power_of_2=how.power_of_2, epsilon=how.epsilon)
        else:
            inverse = inverse.reshape(-1, inverse.size(-2))[:, :count]
            if side and offs is not None:
                inverse = torch.nn.functional.pad(inverse, (0, 0, 0, 1), value=1.0)
            scale = inverse.reciprocal()
        found[side] = scale.contiguous(), inverse.contiguous(), count
    return found


def _amaxes(x: torch.Tensor, offs: torch.Tensor | None, index: torch.Tensor | None, columnwise: bool) -> torch.Tensor:
    """The amaxes of the lines of each matrix or group: one read more."""
    if offs is None or not columnwise:
        return amax_rowwise([x], rowwise=not columnwise, columnwise=columnwise).reshape(-1, x.size(-1 if columnwise else -2))
    (num_groups,), cols = offs.shape, x.shape[1]
    at, groups = map_of_rows(x, offs, index, BLOCK, with_groups=True)
    bits = torch.zeros((num_groups + 1, cols), dtype=torch.int32, device=x.device)
    raise_line_amaxes(x, at, groups, bits, num_groups, BLOCK)
    return bits.view(torch.float32)


_Memory = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # Totals, first and second sums, largest magnitudes.


def _memory_for(x: torch.Tensor, size_r: int, columnwise: bool, how: How) -> _Memory:
    """The memory of one copy's numbers."""
    count, size_c = (x.shape[0] if x.dim() == 3 else 1), x.size(-1)
    tiles_r, tiles_c = cdiv(size_r, BLOCK), cdiv(size_c, BLOCK)
    kind, width = _cells(how)

    def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    totals = new(count, tiles_r * tiles_c, TOTALS, dtype=torch.float64)
    if kind == OF_TENSOR.value:
        return totals, totals, totals, totals
    if kind == OF_LINES.value:
        shape = (count, tiles_r, size_c) if columnwise else (count, tiles_c, size_r)
        return totals, new(*shape, dtype=torch.float64), new(*shape, dtype=torch.float64), new(*shape, dtype=torch.float32)
    lines = 1 if _cells(how) == (OF_SQUARES.value, BLOCK) else BLOCK // LINES if kind == OF_SQUARES.value else BLOCK
    shape = (count, tiles_r * tiles_c, lines * (BLOCK // width))
    return totals, new(*shape, dtype=torch.float32), new(*shape, dtype=torch.float32), totals


def _measured(x: torch.Tensor, how: How, rows: _Rows, given: dict[bool, _Given]) -> list[torch.Tensor]:
    """The vectors of the copies that have an entry in `given`."""
    at, groups, count = rows
    size_r, size_c = x.size(-2) if at is None else at.shape[0], x.size(-1)
    made = {side: _memory_for(x, size_r, side, how) for side in given}
    kind, width = _cells(how)
    if kind == OF_SQUARES.value:
        made = dict.fromkeys(given, made[next(iter(given))])  # blocks of both copies are the same
    sides = []
    for side in (False, True):
        memory = made[side] if side in made else next(iter(made.values()))
        scale, inverse, step = given.get(side) or (memory[0], memory[0], 0)
        sides.append((scale, inverse, step, *memory))
    is_first = next(iter(given))
    tiles = cdiv(size_r, BLOCK) * cdiv(size_c, BLOCK)
    statistics_kernel[(tiles, x.shape[0] if x.dim() == 3 else 1)](
        x, x if at is None else at, x if groups is None else groups, size_r, size_c, *x.stride()[-2:],
        batch_step(x), largest_finite(x.dtype), how.epsilon, *sides[0], *sides[1],
        ROWWISE=False in given if kind != OF_SQUARES.value else not is_first,
        COLUMNWISE=True in given if kind != OF_SQUARES.value else is_first,
        HAS_ROWS=at is not None, HAS_GROUPS=groups is not None, KIND=kind, MX=how.kind is Granularity.BLOCK_1X32,
        WIDTH=width, E5M2=is_e5m2(how.dtype), FP8_MAX=fp8_max(how.dtype), HAS_EPSILON=how.epsilon != 0,
        POWER_OF_2=how.power_of_2, LINES=LINES_OF_MX if (kind, width) == (OF_BLOCKS.value, MX_BLOCK) else LINES, BLOCK=BLOCK,
        num_warps=NUM_WARPS if x.element_size() < 4 or width == MX_BLOCK else 2 * NUM_WARPS,  # else some registers spill
    )  # fmt: skip
    return [_finished(made[side], how, count * size_c, rows, side, of_side) for side, of_side in given.items()]


def _finished(made: _Memory, how: How, count: torch.Tensor, rows: _Rows, columnwise: bool, given: _Given) -> torch.Tensor:
    (totals, first, second, largest), (at, groups, _) = made, rows
    if given is None:
        return vector_of_blocks(count, totals.flatten(0, 1), first.reshape(-1), second.reshape(-1), how.dtype)
    counts = totals[..., :3].sum(dim=(0, 1))
    scale, _, step = given
    if how.kind is Granularity.TENSOR_WISE:
        found = totals if step else totals.flatten(0, 1)[None]
        sums = found[..., 3].sum(dim=1), found[..., 4].sum(dim=1), found[..., 5].amax(dim=1)
        return vector_of_sums(count, [Sums(counts, *sums, scale.to(torch.float64))], how.dtype)
    if groups is not None and columnwise:
        # Tiles beyond the last group are those of a group of zeros.
        of_groups = scale.new_zeros(scale.shape, dtype=torch.float64)
        group = groups.to(torch.int64)
        sums = (
            of_groups.index_add(0, group, first[0]),
            of_groups.index_add(0, group, second[0]),
            of_groups.scatter_reduce(0, group[:, None].expand_as(largest[0]), largest[0].to(torch.float64), "amax"),
        )
        return vector_of_sums(count, [Sums(counts, *sums, scale.to(torch.float64))], how.dtype)
    sums = first.sum(dim=1), second.sum(dim=1), largest.amax(dim=1).to(torch.float64)
    of_lines = scale if at is None else scale[:, at.to(torch.int64)]  # of places; those of none are zeros
    return vector_of_sums(count, [Sums(counts, *sums, of_lines.reshape(sums[0].shape).to(torch.float64))], how.dtype)


# -- checksums

#: Words that a program of checksums takes at once.
CHECKSUM_BLOCK = 4096
#: Programs of one launch that suffice to keep an H200 busy.
PROGRAMS = 1056
OF_POSITION, OF_FIRST, OF_SECOND = (tl.constexpr(f) for f in (other_ops.OF_POSITION, other_ops.OF_FIRST, other_ops.OF_SECOND))
FIRST_SHIFT, SECOND_SHIFT = (tl.constexpr(shift) for shift in other_ops.SHIFTS)


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
    words = [other_ops.words_of(x) for x in xs]
    result = torch.zeros(len(xs), dtype=torch.int32, device=xs[0].device)
    with on_device(result):
        for aligned in (True, False):
            members = [i for i, w in enumerate(words) if w.numel() and _is_aligned(w) is aligned]
            if members:
                programs = min(cdiv(max(words[i].numel() for i in members), CHECKSUM_BLOCK), max(1, PROGRAMS // len(members)))
                fields = [field for i in members for field in (words[i].data_ptr(), words[i].numel(), i)]
                checksums_kernel[(len(members), programs)](
                    pinned_table(fields, result.device), result, ALIGNED=aligned, BLOCK=CHECKSUM_BLOCK, num_warps=8
                )
    return result


def _is_aligned(words: torch.Tensor) -> bool:
    return words.data_ptr() % 16 == 0 and words.numel() % 4 == 0


def transposed_copy(q: torch.Tensor, offs: torch.Tensor | None = None, *index: Any, **options: Any) -> torch.Tensor:
    """See `grouped.reference.transposed_copy`."""
    return tensors.transposed_copy(q) if offs is None else columns_of_groups(q, offs, *index, **options)


_COPIES: dict[str, Any] = {
    Granularity.ROW_WISE: rows.copies,
    Granularity.BLOCK_1X32: mx.copies,
    Granularity.BLOCK_1X128: blocks.copies,
    Granularity.BLOCK_128X128: blocks.copies,
}


def cast_with_scales(xs: list[torch.Tensor], dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """See `casts.cast_with_scales`. The scales of engines are left to the reference, and batches in blocks of 32, whose grouped
    GEMMs have no kernel either."""
    how = CastOptions.of(**options)
    if how.inverse is not None or (how.granularity == Granularity.BLOCK_1X32 and any(x.dim() == 3 for x in xs)):
        return casts.cast_with_scales(xs, dtype, **options)
    found: list[torch.Tensor] = _COPIES[how.granularity](xs, dtype, how)
    return found
