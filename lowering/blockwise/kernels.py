"""Triton kernels of the blockwise casts and GEMM.

Casts: a tile is read once, and every copy of it written in its final layout, with its scales. Matrices of whole tiles with
contiguous, aligned rows share a launch: a table in device memory tells where each and its copies are, and a program finds its
matrix by counting the matrices that begin at or before its tile. Any other matrix has its own.

GEMM: FP8 tensor cores, each 128 of K multiplied by its factors and added in float32. The tensor cores of SM90 keep about 14
bits of the sum of an FP8 product. A float32 accumulator outside them, touched every 128 of K, bounds that error (DeepSeek-V3,
arXiv 2412.19437, section 3.3.2) and is where the factors of the blocks belong anyway.

NOTE [factors of columns] A thread has elements of 32 columns of a product. Loaded as they are multiplied, the factors of the
columns would take 16 loads and, while the tensor cores work, 32 registers. One thread loads one, and they go through shared
memory when the product is there.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl

from lowering.blockwise.reference import empty_scales
from lowering.copies import CastOptions, by_output, empty_copy, is_column_major
from lowering.formats import BLOCK, Granularity, fp8_max, largest_finite
from lowering.products import Compute, Product
from lowering.triton import limits
from lowering.triton.ahead import Kernel
from lowering.triton.launch import batch_step, cdiv, grid_of, has_whole_tiles, is_e5m2, is_whole, on_device
from lowering.triton.many import groups, table_of
from lowering.triton.tile import (
    INF_BITS,
    block_scale,
    find_matrix,
    four_rows,
    larger,
    largest,
    largest_of_rows,
    left,
    load_rows,
    magnitude_bits,
    one_per_thread,
    place_of_tile,
    reciprocal,
    row_amaxes,
    saturated_bits,
    store_columns,
    store_infinities,
    store_rows,
    tiles_of,
    turned,
)

#: Rows, columns and warps of a tile, by what a launch writes. A tile holds whole blocks, which need not make it square.
SQUARE_TILE = (BLOCK, BLOCK, 8)
ROWWISE_TILE = (64, BLOCK, 4)
COLUMNWISE_TILE = (BLOCK, 64, 4)
#: Per thread, by warps: three programs of eight warps share a multiprocessor, or five of four. Triton would take more.
REGISTERS = {8: 80, 4: 96}


@triton.jit
def store_line_scales(
    scale_inv, scale, first, num_lines, stored_lines, block, stride_line, stride_block, POWER_OF_2: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The reciprocal of the scale of each line (row or column) of a tile from line `first` on, zeros for padding lines."""
    LINES: tl.constexpr = scale.shape[0]
    line = tl.arange(0, LINES)
    inv = reciprocal(scale, POWER_OF_2)
    pointers = scale_inv + first * stride_line + block * stride_block + line.to(tl.int64) * stride_line
    if WHOLE:
        tl.store(pointers, inv)
    else:
        inv = tl.where(line < left(num_lines, first, LINES), inv, 0.0)
        tl.store(pointers, inv, mask=line < left(stored_lines, first, LINES))


@triton.jit
def store_grid_scale(scale_inv, inv, outer, inner, num_inner, stored_inner, stride_outer, stride_inner):
    """The factor of one 128x128 block; the last block of a line also writes the zeros behind it (at most 3)."""
    ahead = tl.arange(0, 4)
    mask = (ahead == 0) | ((inner == num_inner - 1) & (inner + ahead < stored_inner))
    pointers = scale_inv + outer * stride_outer + (inner + ahead) * stride_inner
    tl.store(pointers, tl.where(ahead == 0, inv, 0.0), mask=mask)


@triton.jit
def cast_tile(
    tile, x, rows, cols, stride_r, stride_c, overflow_scale, epsilon,
    q_row, q_row_rows, q_row_cols, q_row_stride_r, q_row_stride_c,
    s_row, s_row_stored, s_row_stride_outer, s_row_stride_block,
    q_col, q_col_rows, q_col_cols, q_col_stride_r, q_col_stride_c,
    s_col, s_col_stored, s_col_stride_outer, s_col_stride_block,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, TURN_ROWWISE: tl.constexpr, TURN_COLUMNWISE: tl.constexpr,
    BLOCK_DIMS: tl.constexpr, E5M2: tl.constexpr, HAS_EPSILON: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """FP8 copies of a tile of x [rows, cols] and the reciprocals of their scales, any strides. q_row, q_col: uint8, indexed by
    row and column of x, sizes rounded up; zeros beyond x. Scales of a copy [outer, inner] are indexed by outer (1D: a line, 2D:
    a block) and block along inner. s_*_stored: 1D, lines stored, padding included; 2D, blocks along inner stored. TURN_*: the
    columns of the copy are contiguous, where x's rows are. WHOLE: x and its copies consist of whole tiles (`is_whole`)."""
    tiles_c = tiles_of(cols, BLOCK_C)
    tile_r, tile_c = place_of_tile(tile, tiles_c)
    r0 = tile_r * BLOCK_R
    c0 = tile_c * BLOCK_C
    x += r0 * stride_r + c0 * stride_c
    q_row += r0 * q_row_stride_r + c0 * q_row_stride_c
    q_col += r0 * q_col_stride_r + c0 * q_col_stride_c
    rows_left, cols_left = left(rows, r0, BLOCK_R), left(cols, c0, BLOCK_C)
    r = 4 * tl.arange(0, BLOCK_R // 4)  # NOTE [four rows a thread] in tile.py
    c = tl.arange(0, BLOCK_C)
    v0, v1, v2, v3 = load_rows(x, r, c, rows_left, cols_left, stride_r, stride_c, WHOLE)
    stored_rows, stored_cols = left(q_row_rows, r0, BLOCK_R), left(q_row_cols, c0, BLOCK_C)
    if BLOCK_DIMS == 2 or COLUMNWISE:
        column = largest_of_rows(v0, v1, v2, v3)
    if BLOCK_DIMS == 2:
        amax_bits = largest(column)
        scale = block_scale(amax_bits.to(tl.float32, bitcast=True), overflow_scale, epsilon, HAS_EPSILON, FP8_MAX, POWER_OF_2)
        inv = reciprocal(scale, POWER_OF_2)
        if ROWWISE or not TURN_COLUMNWISE:
            b0, b1 = saturated_bits(v0, scale, E5M2), saturated_bits(v1, scale, E5M2)
            b2, b3 = saturated_bits(v2, scale, E5M2), saturated_bits(v3, scale, E5M2)
            four = four_rows(b0, b1, b2, b3)
        else:
            four = saturated_bits(four_rows(v0, v1, v2, v3), scale, E5M2)
        if ROWWISE:
            store_grid_scale(s_row, inv, tile_r, tile_c, tiles_c, s_row_stored, s_row_stride_outer, s_row_stride_block)
        if COLUMNWISE:
            tiles_r = tiles_of(rows, BLOCK_R)
            store_grid_scale(s_col, inv, tile_c, tile_r, tiles_r, s_col_stored, s_col_stride_outer, s_col_stride_block)
    elif ROWWISE:
        a0, a1, a2, a3 = row_amaxes(v0, v1, v2, v3)
        amax_bits = magnitude_bits(tl.reduce(larger(larger(a0, a1), larger(a2, a3)), 0, larger))
        s0 = block_scale(a0, overflow_scale, epsilon, HAS_EPSILON, FP8_MAX, POWER_OF_2)
        s1 = block_scale(a1, overflow_scale, epsilon, HAS_EPSILON, FP8_MAX, POWER_OF_2)
        s2 = block_scale(a2, overflow_scale, epsilon, HAS_EPSILON, FP8_MAX, POWER_OF_2)
        s3 = block_scale(a3, overflow_scale, epsilon, HAS_EPSILON, FP8_MAX, POWER_OF_2)
        own = one_per_thread(tl.reshape(four_rows(s0, s1, s2, s3), (BLOCK_R,)))
        store_line_scales(s_row, own, r0, rows, s_row_stored, tile_c, s_row_stride_outer, s_row_stride_block, POWER_OF_2, WHOLE)
        b0, b1 = saturated_bits(v0, s0[:, None], E5M2), saturated_bits(v1, s1[:, None], E5M2)
        b2, b3 = saturated_bits(v2, s2[:, None], E5M2), saturated_bits(v3, s3[:, None], E5M2)
        four = four_rows(b0, b1, b2, b3)
    if ROWWISE:
        if TURN_ROWWISE:
            store_columns(q_row, turned(four), stored_rows, stored_cols, q_row_stride_r, q_row_stride_c, WHOLE)
        else:
            store_rows(q_row, b0, b1, b2, b3, r, c, stored_rows, stored_cols, q_row_stride_r, q_row_stride_c, WHOLE)
    stored_rows, stored_cols = left(q_col_rows, r0, BLOCK_R), left(q_col_cols, c0, BLOCK_C)
    if COLUMNWISE and BLOCK_DIMS == 1:
        column = tl.reduce(column, 0, larger)
        amax_bits = magnitude_bits(tl.reduce(column, 0, larger))
        own = block_scale(one_per_thread(column), overflow_scale, epsilon, HAS_EPSILON, FP8_MAX, POWER_OF_2)
        store_line_scales(s_col, own, c0, cols, s_col_stored, tile_r, s_col_stride_outer, s_col_stride_block, POWER_OF_2, WHOLE)
        s = tl.gather(own, c, 0)
        if ROWWISE:
            # From cache: fewer registers than keeping it, so that twice the programs share a multiprocessor.
            v0, v1, v2, v3 = load_rows(x, r, c, rows_left, cols_left, stride_r, stride_c, WHOLE)
        if TURN_COLUMNWISE:
            four = saturated_bits(four_rows(v0, v1, v2, v3), s[None, :, None, None], E5M2)
        else:
            b0, b1 = saturated_bits(v0, s[None, :], E5M2), saturated_bits(v1, s[None, :], E5M2)
            b2, b3 = saturated_bits(v2, s[None, :], E5M2), saturated_bits(v3, s[None, :], E5M2)
    if COLUMNWISE:
        if TURN_COLUMNWISE:
            store_columns(q_col, turned(four), stored_rows, stored_cols, q_col_stride_r, q_col_stride_c, WHOLE)
        else:
            store_rows(q_col, b0, b1, b2, b3, r, c, stored_rows, stored_cols, q_col_stride_r, q_col_stride_c, WHOLE)
    if amax_bits >= INF_BITS:
        tl.debug_barrier()  # other threads have stored what is stored over here
        sizes = rows_left, cols_left, stride_r, stride_c
        if ROWWISE:
            store_infinities(x, q_row, c, *sizes, q_row_stride_r, q_row_stride_c, E5M2, BLOCK_R)
        if COLUMNWISE:
            store_infinities(x, q_col, c, *sizes, q_col_stride_r, q_col_stride_c, E5M2, BLOCK_R)


@Kernel
@triton.jit
def cast_blockwise_kernel(
    x, rows, cols, stride_r, stride_c, overflow_scale, epsilon,
    q_row, q_row_rows, q_row_cols, q_row_stride_r, q_row_stride_c,
    s_row, s_row_stored, s_row_stride_outer, s_row_stride_block,
    q_col, q_col_rows, q_col_cols, q_col_stride_r, q_col_stride_c,
    s_col, s_col_stored, s_col_stride_outer, s_col_stride_block,
    next_x, next_q_row, next_s_row, next_q_col, next_s_col, BATCHED: tl.constexpr,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, TURN_ROWWISE: tl.constexpr, TURN_COLUMNWISE: tl.constexpr,
    BLOCK_DIMS: tl.constexpr, E5M2: tl.constexpr, HAS_EPSILON: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`cast_tile` of every tile of a matrix. BATCHED: of each matrix, the second dimension of the grid; next_*: elements from a
    matrix, a copy, the scales of a copy to the next."""
    if BATCHED:
        e = tl.program_id(1).to(tl.int64)
        x += e * next_x
        q_row += e * next_q_row
        s_row += e * next_s_row
        q_col += e * next_q_col
        s_col += e * next_s_col
    cast_tile(
        tl.program_id(0).to(tl.int64), x, rows, cols, stride_r, stride_c, overflow_scale, epsilon,
        q_row, q_row_rows, q_row_cols, q_row_stride_r, q_row_stride_c,
        s_row, s_row_stored, s_row_stride_outer, s_row_stride_block,
        q_col, q_col_rows, q_col_cols, q_col_stride_r, q_col_stride_c,
        s_col, s_col_stored, s_col_stride_outer, s_col_stride_block,
        ROWWISE, COLUMNWISE, TURN_ROWWISE, TURN_COLUMNWISE, BLOCK_DIMS, E5M2, HAS_EPSILON, FP8_MAX, POWER_OF_2,
        WHOLE, BLOCK_R, BLOCK_C,
    )  # fmt: skip


_Copy = tuple[torch.Tensor, torch.Tensor]
"""The destination of one copy of a matrix or batch: views that the kernel indexes. Data: uint8, by row and column of x. Scales:
by outer and by block of the copy; 1D [stored lines, blocks], 2D [blocks, stored blocks]."""


def _of_copy(copy: _Copy, is_square: bool) -> tuple[Any, ...]:
    q, scale_inv = copy
    *_, rows, cols = q.shape
    stored = scale_inv.shape[-1 if is_square else -2]
    return q, rows, cols, *q.stride()[-2:], scale_inv, stored, *scale_inv.stride()[-2:]


def tile_of(is_square: bool, rowwise: bool, columnwise: bool) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps."""
    if is_square or (rowwise and columnwise):
        return SQUARE_TILE
    return ROWWISE_TILE if rowwise else COLUMNWISE_TILE


def launch(x: torch.Tensor, dtype: torch.dtype, cast: CastOptions, rowwise: _Copy | None, columnwise: _Copy | None) -> None:
    """Fill the given copies of a matrix or batch x, every element of them."""
    if x.numel() == 0:
        for view in itertools.chain(*(copy for copy in (rowwise, columnwise) if copy is not None)):
            view.zero_()
        return
    if is_column_major(x):
        # Loads run along the rows; the copies of a column-major x are the other copies of its transpose.
        x, (rowwise, columnwise) = x.mT, [copy and (copy[0].mT, copy[1]) for copy in (columnwise, rowwise)]
    copies = [copy for copy in (rowwise, columnwise) if copy is not None]
    first, second = copies[0], copies[-1]  # where only one copy is requested, the other's arguments are not touched
    is_square, is_batch = cast.is_square, x.dim() == 3
    block_r, block_c, num_warps = tile_of(is_square, rowwise is not None, columnwise is not None)
    (rows, cols), (stride_r, stride_c) = x.shape[-2:], x.stride()[-2:]
    of_first = _of_copy(first, is_square)
    of_second = of_first if second is first else _of_copy(second, is_square)
    whole = (
        has_whole_tiles(block_r, block_c, rows, cols, stride_r, stride_c)
        and has_whole_tiles(block_r, block_c, *of_first[1:5])
        and has_whole_tiles(block_r, block_c, *of_second[1:5])
    )
    has_columns = not is_square and columnwise is not None
    is_capped = (
        not is_batch and has_columns and whole and cast.power_of_2 and x.element_size() == 2
    )  # else registers would spill
    steps = tuple(map(batch_step, (x, *first, *second))) if is_batch else (0,) * 5
    with on_device(x):
        cast_blockwise_kernel[grid_of(x, cdiv(rows, block_r) * cdiv(cols, block_c))](
            x, rows, cols, stride_r, stride_c, largest_finite(x.dtype), cast.epsilon,
            *of_first, *of_second, *steps, BATCHED=is_batch,
            ROWWISE=rowwise is not None, COLUMNWISE=columnwise is not None,
            TURN_ROWWISE=rowwise is not None and is_column_major(rowwise[0]),
            TURN_COLUMNWISE=columnwise is not None and is_column_major(columnwise[0]),
            **scaling_of(cast, dtype), WHOLE=whole, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=num_warps,
            maxnreg=REGISTERS[num_warps] if is_capped else None,
        )  # fmt: skip


def scaling_of(cast: CastOptions, dtype: torch.dtype) -> dict[str, Any]:
    """The constants of a kernel that say how it quantizes."""
    return {
        "BLOCK_DIMS": 2 if cast.is_square else 1,
        "E5M2": is_e5m2(dtype),
        "HAS_EPSILON": cast.epsilon != 0,
        "FP8_MAX": fp8_max(dtype),
        "POWER_OF_2": cast.power_of_2,
    }


#: int64 fields of a matrix in the table; the first tiles of all matrices come before them.
FIELDS = tl.constexpr(20)
#: Registers per thread where `REGISTERS` would spill: two programs of eight warps.
MOST_REGISTERS = 128


@triton.jit
def _row_of_copy(fields):
    """The fields of a copy: data, its rows and columns as x has them, distance of its lines; scales, stored, strides."""
    q = tl.multiple_of(tl.load(fields).to(tl.pointer_type(tl.uint8)), 16)
    stride = tl.multiple_of(tl.load(fields + 3).to(tl.int32), 16)
    s = tl.load(fields + 4).to(tl.pointer_type(tl.float32))
    return q, tl.load(fields + 1), tl.load(fields + 2), stride, s, tl.load(fields + 5), tl.load(fields + 6)


@Kernel
@triton.jit(do_not_specialize=["num_matrices"])
def multi_cast_blockwise_kernel(
    table, num_matrices, overflow_scale, epsilon, element: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    BLOCK_DIMS: tl.constexpr, E5M2: tl.constexpr, HAS_EPSILON: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`cast_tile` of the matrix that this tile belongs to. table: first tile of each matrix [num_matrices], then its fields
    [num_matrices, FIELDS] (`_fields`). All matrices consist of whole tiles; their rows are contiguous and begin at multiples
    of 16 bytes."""
    tile = tl.program_id(0).to(tl.int64)
    fields, first = find_matrix(table, num_matrices, tile, FIELDS)
    tile -= first
    x = tl.multiple_of(tl.load(fields).to(tl.pointer_type(element)), 16)
    rows, cols = tl.load(fields + 1), tl.load(fields + 2)
    stride_r = tl.multiple_of(tl.load(fields + 3).to(tl.int32), 16)
    q_row, row_rows, row_cols, row_stride, s_row, row_stored, row_outer = _row_of_copy(fields + 4)
    q_col, col_rows, col_cols, col_stride, s_col, col_stored, col_outer = _row_of_copy(fields + 12)
    # Scales of lines are stored block by block, those of squares line by line of blocks.
    row_strides = (row_outer, 1) if BLOCK_DIMS == 2 else (1, row_outer)
    col_strides = (col_outer, 1) if BLOCK_DIMS == 2 else (1, col_outer)
    cast_tile(
        tile, x, rows, cols, stride_r, 1, overflow_scale, epsilon,
        q_row, row_rows, row_cols, row_stride, 1, s_row, row_stored, *row_strides,
        q_col, col_rows, col_cols, 1, col_stride, s_col, col_stored, *col_strides,
        ROWWISE, COLUMNWISE, False, True, BLOCK_DIMS, E5M2, HAS_EPSILON, FP8_MAX, POWER_OF_2, True, BLOCK_R, BLOCK_C,
    )  # fmt: skip


def _fields(x: torch.Tensor, is_square: bool, copies: tuple[_Copy | None, _Copy | None]) -> list[int]:
    """The fields of one matrix, in the kernel's order. A copy that is not asked for has zeros."""
    found = [x.data_ptr(), *x.shape, x.stride(0)]
    for copy in copies:
        if copy is None:
            found += [0] * 8
            continue
        q, scale_inv = copy
        stored = scale_inv.shape[1 if is_square else 0]
        distance = scale_inv.stride(0 if is_square else 1)
        found += [q.data_ptr(), *q.shape, max(q.stride()), scale_inv.data_ptr(), stored, distance, 0]
    return found


def _shares(x: torch.Tensor, copies: tuple[_Copy | None, _Copy | None], tile: tuple[int, int, int]) -> bool:
    block_r, block_c, _ = tile
    is_aligned = x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    return is_aligned and x.numel() > 0 and is_whole([x, *(copy[0] for copy in copies if copy is not None)], block_r, block_c)


def fill(
    xs: list[torch.Tensor], dtype: torch.dtype, cast: CastOptions, copies: list[tuple[_Copy | None, _Copy | None]]
) -> None:
    """Fill the GEMM-ready copies of matrices: in one launch for each dtype, but for those that the kernel does not take."""
    tile = tile_of(cast.is_square, cast.rowwise, cast.columnwise)
    block_r, block_c, num_warps = tile
    shares = [_shares(x, of_matrix, tile) for x, of_matrix in zip(xs, copies, strict=True)]
    for x, of_matrix, is_shared in zip(xs, copies, shares, strict=True):
        if not is_shared:
            launch(x, dtype, cast, *of_matrix)
    positions = [i for i, is_shared in enumerate(shares) if is_shared]
    xs, copies = [xs[i] for i in positions], [copies[i] for i in positions]
    for element, _, members in groups(xs, lambda x: None):
        # Divisions take more, and so do the bytes of both copies, kept where they are the same, or converted.
        first = xs[members[0]]
        is_large = cast.rowwise and cast.columnwise and (cast.is_square or first.dtype != torch.bfloat16)
        registers = MOST_REGISTERS if is_large or not cast.power_of_2 else REGISTERS[num_warps]
        tiles = [cdiv(xs[i].shape[0], block_r) * cdiv(xs[i].shape[1], block_c) for i in members]
        fields = [_fields(xs[i], cast.is_square, copies[i]) for i in members]
        with on_device(first):
            table, num_tiles = table_of(zip(tiles, fields, strict=True), first.device)
            multi_cast_blockwise_kernel[(num_tiles,)](
                table, len(members), largest_finite(first.dtype), cast.epsilon, element=element,
                ROWWISE=cast.rowwise, COLUMNWISE=cast.columnwise, **scaling_of(cast, dtype),
                BLOCK_R=block_r, BLOCK_C=block_c, num_warps=num_warps, maxnreg=registers,
            )  # fmt: skip


def copies(xs: list[torch.Tensor], dtype: torch.dtype, cast: CastOptions) -> list[torch.Tensor]:
    """`casts.cast_with_scales`. Matrices share a launch where they can; compact copies and batches have one each."""
    made: list[list[torch.Tensor]] = []
    to_fill: list[tuple[_Copy | None, _Copy | None]] = []
    for x in xs:
        row, of_row = _new(x, dtype, cast, False, cast.pad_rows) if cast.rowwise else (None, [])
        col, of_col = _new(x, dtype, cast, True, cast.pad_cols) if cast.columnwise else (None, [])
        to_fill.append((row, col))
        made.append([*of_row, *of_col])
    if len(xs) > 1 and not cast.compact and all(x.dim() == 2 for x in xs):
        fill(xs, dtype, cast, to_fill)
    else:
        for x, of_x in zip(xs, to_fill, strict=True):
            launch(x, dtype, cast, *of_x)
    return made[0] if len(xs) == 1 else by_output(made)


def _new(
    x: torch.Tensor, dtype: torch.dtype, cast: CastOptions, columnwise: bool, pad_outer: bool
) -> tuple[_Copy, list[torch.Tensor]]:
    """A copy of x to be filled, and its tensors as they are returned."""
    scale_inv = empty_scales(x, cast.granularity, columnwise, pad_outer, cast.compact)
    if cast.compact:
        q = x.new_empty(*x.shape, dtype=torch.uint8)
        return (q, scale_inv.t() if columnwise else scale_inv), [q.view(dtype), scale_inv]
    q = empty_copy(x, torch.uint8, columnwise, pad_outer)
    is_stored_by_blocks = x.dim() == 2 and not cast.is_square
    copy = q.mT if columnwise else q, scale_inv.mT if is_stored_by_blocks else scale_inv
    return copy, [q.view(dtype), scale_inv]


# -- GEMM

#: Neighbouring tiles of the output run together in groups of this many tile rows, so that they share operands in L2.
GROUP_M = 8


@Kernel
@triton.jit
def scaled_mm_blockwise_kernel(
    a, b, scale_inv_a, scale_inv_b, bias, out, m, n, k, stride_a, stride_b, scale_stride_a, scale_stride_b,
    BLOCK_DIMS_A: tl.constexpr, BLOCK_DIMS_B: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out [m, n] = a [m, k] @ b [k, n], a with strides (stride_a, 1), b with strides (1, stride_b), out contiguous. Scales are
    GEMM-ready memory of leading dimension scale_stride_*. BLOCK_K is the side of a block; BLOCK_M and BLOCK_N divide it."""
    tile = tl.program_id(0)
    tiles_m = tiles_of(m, BLOCK_M)
    tiles_n = tiles_of(n, BLOCK_N)
    group = tile // (GROUP_M * tiles_n)
    group_height = min(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + (tile % (GROUP_M * tiles_n)) % group_height
    tile_n = (tile % (GROUP_M * tiles_n)) // group_height

    offsets_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets_k = tl.arange(0, BLOCK_K)
    # Lines beyond the edge read valid memory and are not stored: no mask in the loop.
    lines_a = offsets_m % m
    lines_b = offsets_n % n
    pointers_a = a + lines_a.to(tl.int64)[:, None] * stride_a + offsets_k[None, :]
    pointers_b = b + offsets_k[:, None] + lines_b.to(tl.int64)[None, :] * stride_b
    if BLOCK_DIMS_A == 1:
        scales_a = scale_inv_a + lines_a
        step_a = scale_stride_a
    else:
        scales_a = scale_inv_a + (tile_m * BLOCK_M // BLOCK_K).to(tl.int64) * scale_stride_a
        step_a = 1
    if BLOCK_DIMS_B == 1:
        scales_b = scale_inv_b + lines_b
        step_b = scale_stride_b
    else:
        scales_b = scale_inv_b + (tile_n * BLOCK_N // BLOCK_K).to(tl.int64) * scale_stride_b
        step_b = 1

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(tiles_of(k, BLOCK_K)):
        if EVEN_K:
            tile_a = tl.load(pointers_a)
            tile_b = tl.load(pointers_b)
        else:
            left = k - block * BLOCK_K
            tile_a = tl.load(pointers_a, mask=offsets_k[None, :] < left, other=0.0)
            tile_b = tl.load(pointers_b, mask=offsets_k[:, None] < left, other=0.0)
        factor_a = tl.load(scales_a)
        factor_b = tl.load(scales_b)
        product = tl.dot(tile_a, tile_b)
        if BLOCK_DIMS_B == 1:
            factor_b = one_per_thread(factor_b)
        if BLOCK_DIMS_A == 1 and BLOCK_DIMS_B == 1:
            total += product * factor_a[:, None] * factor_b[None, :]
        elif BLOCK_DIMS_A == 1:
            total += product * (factor_a * factor_b)[:, None]
        else:
            total += product * (factor_a * factor_b)[None, :]
        pointers_a += BLOCK_K
        pointers_b += BLOCK_K
        scales_a += step_a
        scales_b += step_b

    if HAS_BIAS:
        total += tl.load(bias + lines_b).to(tl.float32)[None, :]
    pointers = out + offsets_m.to(tl.int64)[:, None] * n + offsets_n[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=(offsets_m < m)[:, None] & (offsets_n < n)[None, :])


def prepare(gemm: Product) -> Compute:
    """The function that computes `reference.multiply` of operands which differ from these in their values alone. Any
    M, N and K; rows of 16 bytes are what makes it fast."""
    a, b, (m, n, k), out_dtype = gemm.a, gemm.b, gemm.sizes, gemm.out_dtype
    if (k > 1 and a.stride(1) != 1) or (k > 1 and b.stride(0) != 1):
        raise ValueError(
            f"strides of a are {a.stride()} and of b {b.stride()}; FP8 tensor cores take a row-major and b column-major"
        )
    of_a, of_b = gemm.granularities
    tile = limits.tile_of_gemm(m, limits.of_device(a.device))
    sizes = m, n, k, a.stride(0), b.stride(1), gemm.scale_inv_a.stride(0), gemm.scale_inv_b.stride(0)
    flags: dict[str, Any] = {
        "BLOCK_DIMS_A": 2 if of_a == Granularity.BLOCK_128X128 else 1,
        "BLOCK_DIMS_B": 2 if of_b == Granularity.BLOCK_128X128 else 1,
        "HAS_BIAS": gemm.bias is not None,
        "EVEN_K": k % BLOCK == 0,
        "BLOCK_K": BLOCK,
        "GROUP_M": GROUP_M,
        **tile,
    }
    grid = (cdiv(m, tile["BLOCK_M"]) * cdiv(n, tile["BLOCK_N"]),)

    def compute(
        a: torch.Tensor, b: torch.Tensor, scale_inv_a: torch.Tensor, scale_inv_b: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
        if m and n:
            bias = None if bias is None else bias.contiguous()
            with on_device(a):
                scaled_mm_blockwise_kernel[grid](a, b, scale_inv_a, scale_inv_b, bias, out, *sizes, **flags)
        return out

    return compute


def multiply(gemm: Product) -> torch.Tensor:
    """The product of these operands."""
    return prepare(gemm)(*gemm.operands)
