"""Rowwise quantization in two passes: the largest magnitude of every line, then every copy of a tile from one read.

A line's scale needs the whole line, so the matrix is read twice, whatever is requested. Tiles are the same in both passes.
The first raises the amaxes of a tile's lines, a zeroed vector, by atomic integer maxima: exact in any order, and 192 of them
for 8192 elements. The second computes the scales of its lines from them; the tiles of the first column (row) of tiles store
those of the rows (columns).

Many matrices take one launch per pass: a table in device memory tells where each is, and a program finds its own by counting
the matrices that begin at or before its tile. One matrix needs no table.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lowering.formats import FLOAT32_MAX
from lowering.triton.ahead import Kernel
from lowering.triton.scales import block_scale, reciprocal
from lowering.triton.tile import (
    INF_BITS,
    find_matrix,
    four_rows,
    larger,
    largest_of_rows,
    left,
    load_rows,
    magnitude_bits,
    one_per_thread,
    place_of_tile,
    row_amaxes,
    saturated_bits,
    store_columns,
    store_infinities,
    store_rows,
    tiles_of,
    turned,
)

#: Whole 128-byte lines of the rowwise and 64-byte segments of the columnwise copy.
BLOCK_R = 64
BLOCK_C = 128
NUM_WARPS = 4
#: Of a launch over matrices of any strides, whose addresses take the registers of half a tile.
NUM_WARPS_UNALIGNED = 8
#: int64 fields of a matrix in the table; the first tiles of all matrices come before them.
FIELDS = tl.constexpr(13)

#: An infinite scale becomes this one.
SCALE_MAX = tl.constexpr(FLOAT32_MAX)


@triton.jit
def raise_amaxes(
    x, amax_row, amax_col, tile_r, tile_c, rows, cols, stride_r, stride_c,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Raise the amaxes (int32 bits) of the lines of one tile."""
    r0, c0 = tile_r * BLOCK_R, tile_c * BLOCK_C
    rows_left, cols_left = left(rows, r0, BLOCK_R), left(cols, c0, BLOCK_C)
    r, c = 4 * tl.arange(0, BLOCK_R // 4), tl.arange(0, BLOCK_C)
    v0, v1, v2, v3 = load_rows(x + r0 * stride_r + c0 * stride_c, r, c, rows_left, cols_left, stride_r, stride_c)
    if ROWWISE:
        a0, a1, a2, a3 = row_amaxes(v0, v1, v2, v3)
        amax = one_per_thread(tl.reshape(four_rows(a0, a1, a2, a3), (BLOCK_R,)))
        row = tl.arange(0, BLOCK_R)
        tl.atomic_max(amax_row + r0 + row, magnitude_bits(amax), mask=row < rows_left, sem="relaxed")
    if COLUMNWISE:
        amax = one_per_thread(tl.reduce(largest_of_rows(v0, v1, v2, v3), 0, larger))
        tl.atomic_max(amax_col + c0 + c, magnitude_bits(amax), mask=c < cols_left, sem="relaxed")


@triton.jit
def load_amaxes(amax, lines, lines_left):
    """float32 amaxes of lines, 0 from lines_left on."""
    bits = tl.load(amax + lines, mask=lines < lines_left, other=0) & 0x7FFFFFFF  # a NaN may have a sign
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def line_scales(amax, lines, lines_left, epsilon, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr):
    """The scales of lines with these amaxes, 1 for lines of padding."""
    scale = block_scale(amax, SCALE_MAX, epsilon, True, FP8_MAX, POWER_OF_2)
    return tl.where(lines < lines_left, scale, 1.0)


@triton.jit
def cast_tile(
    x, amax_row, amax_col, q_row, s_row, q_col, s_col, tile_r, tile_c,
    rows, cols, rows16, cols16, stored_rows, stored_cols, stride_r, stride_c, epsilon,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, E5M2: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store the FP8 bits of one tile in q_row [stored_rows, cols16] and transposed in q_col [stored_cols, rows16]."""
    r0, c0 = tile_r * BLOCK_R, tile_c * BLOCK_C
    rows_left, cols_left = left(rows, r0, BLOCK_R), left(cols, c0, BLOCK_C)
    r, c = 4 * tl.arange(0, BLOCK_R // 4), tl.arange(0, BLOCK_C)
    x += r0 * stride_r + c0 * stride_c
    q_row += r0 * cols16 + c0
    q_col += c0 * rows16 + r0
    v0, v1, v2, v3 = load_rows(x, r, c, rows_left, cols_left, stride_r, stride_c)
    if ROWWISE:
        amax_row += r0
        a0, a1 = load_amaxes(amax_row, r, rows_left), load_amaxes(amax_row, r + 1, rows_left)
        a2, a3 = load_amaxes(amax_row, r + 2, rows_left), load_amaxes(amax_row, r + 3, rows_left)
        s0 = line_scales(a0, r, rows_left, epsilon, FP8_MAX, POWER_OF_2)
        s1 = line_scales(a1, r + 1, rows_left, epsilon, FP8_MAX, POWER_OF_2)
        s2 = line_scales(a2, r + 2, rows_left, epsilon, FP8_MAX, POWER_OF_2)
        s3 = line_scales(a3, r + 3, rows_left, epsilon, FP8_MAX, POWER_OF_2)
        b0, b1 = saturated_bits(v0, s0[:, None], E5M2), saturated_bits(v1, s1[:, None], E5M2)
        b2, b3 = saturated_bits(v2, s2[:, None], E5M2), saturated_bits(v3, s3[:, None], E5M2)
        sizes = left(stored_rows, r0, BLOCK_R), left(cols16, c0, BLOCK_C)
        store_rows(q_row, b0, b1, b2, b3, r, c, sizes[0], sizes[1], cols16, 1)
        largest = larger(larger(a0, a1), larger(a2, a3))
        if tile_c == 0:
            row = tl.arange(0, BLOCK_R)
            scale = tl.reshape(four_rows(s0, s1, s2, s3), (BLOCK_R,))
            tl.store(s_row + r0 + row, reciprocal(scale, POWER_OF_2), mask=row < sizes[0])
    if COLUMNWISE:
        amax = load_amaxes(amax_col + c0, c, cols_left)
        own = line_scales(amax, c, cols_left, epsilon, FP8_MAX, POWER_OF_2)
        s = tl.gather(own, c, 0)
        bits = saturated_bits(four_rows(v0, v1, v2, v3), s[None, :, None, None], E5M2)
        sizes = left(rows16, r0, BLOCK_R), left(stored_cols, c0, BLOCK_C)
        store_columns(q_col, turned(bits), sizes[0], sizes[1], 1, rows16)
        largest = amax
        if tile_r == 0:
            tl.store(s_col + c0 + c, reciprocal(own, POWER_OF_2), mask=c < sizes[1])
    if magnitude_bits(tl.reduce(largest, 0, larger)) >= INF_BITS:
        tl.debug_barrier()  # other threads have stored what is stored over here
        if ROWWISE:
            store_infinities(x, q_row, c, rows_left, cols_left, stride_r, stride_c, cols16, 1, E5M2, BLOCK_R)
        if COLUMNWISE:
            store_infinities(x, q_col, c, rows_left, cols_left, stride_r, stride_c, 1, rows16, E5M2, BLOCK_R)


@Kernel
@triton.jit
def amax_kernel(
    x, amaxes, rows, cols, tiles_c, stride_r, stride_c, stride_e, num_lines, BATCHED: tl.constexpr,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The lines of one matrix, any strides. amaxes: int32 bits [num_lines], rows first where ROWWISE. BATCHED: of each matrix,
    the second dimension of the grid."""
    if BATCHED:
        e = tl.program_id(1).to(tl.int64)
        x += e * stride_e
        amaxes += e * num_lines
    tile_r, tile_c = place_of_tile(tl.program_id(0), tiles_c)
    amax_col = amaxes + rows if ROWWISE else amaxes
    sizes = rows, cols, stride_r, stride_c
    raise_amaxes(x, amaxes, amax_col, tile_r, tile_c, *sizes, ROWWISE, COLUMNWISE, BLOCK_R, BLOCK_C)


@Kernel
@triton.jit
def cast_kernel(
    x, amaxes, q_row, s_row, q_col, s_col,
    rows, cols, rows16, cols16, stored_rows, stored_cols, tiles_c, stride_r, stride_c, epsilon, stride_e, num_lines,
    BATCHED: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, E5M2: tl.constexpr, FP8_MAX: tl.constexpr,
    POWER_OF_2: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The copies of one matrix, any strides; zeros beyond it. BATCHED: of each matrix, the second dimension of the grid."""
    if BATCHED:
        e = tl.program_id(1).to(tl.int64)
        x += e * stride_e
        amaxes += e * num_lines
        q_row += e * stored_rows * cols16
        s_row += e * stored_rows
        q_col += e * stored_cols * rows16
        s_col += e * stored_cols
    tile_r, tile_c = place_of_tile(tl.program_id(0), tiles_c)
    amax_col = amaxes + rows if ROWWISE else amaxes
    cast_tile(
        x, amaxes, amax_col, q_row, s_row, q_col, s_col, tile_r, tile_c,
        rows, cols, rows16, cols16, stored_rows, stored_cols, stride_r, stride_c, epsilon,
        ROWWISE, COLUMNWISE, E5M2, FP8_MAX, POWER_OF_2, BLOCK_R, BLOCK_C,
    )  # fmt: skip


@triton.jit
def load_matrix(fields, element: tl.constexpr, ALIGNED: tl.constexpr):
    """What both passes need of a matrix: address, sizes, columns of tiles, strides."""
    x = tl.load(fields).to(tl.pointer_type(element))
    rows, cols = tl.load(fields + 1), tl.load(fields + 2)
    stride_r, stride_c = tl.load(fields + 3), tl.load(fields + 4)
    if ALIGNED:
        x = tl.multiple_of(x, 16)
        rows, cols = tl.multiple_of(rows, 16), tl.multiple_of(cols, 16)
        stride_r, stride_c = tl.multiple_of(stride_r, 16), 1
    return x, rows, cols, stride_r, stride_c, tl.load(fields + 5)


@Kernel
@triton.jit(do_not_specialize=["num_matrices"])
def multi_amax_kernel(
    table, amaxes, num_matrices, element: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`amax_kernel` of the matrix that this tile belongs to. table: first tiles, then fields (`_fields`)."""
    tile = tl.program_id(0).to(tl.int64)
    fields, first_tile = find_matrix(table, num_matrices, tile, FIELDS)
    tile -= first_tile
    x, rows, cols, stride_r, stride_c, tiles_c = load_matrix(fields, element, ALIGNED)
    amax_row = amaxes + tl.load(fields + 6)
    amax_col = amax_row + rows if ROWWISE else amax_row
    tile_r, tile_c = place_of_tile(tile, tiles_c)
    sizes = rows, cols, stride_r, stride_c
    raise_amaxes(x, amax_row, amax_col, tile_r, tile_c, *sizes, ROWWISE, COLUMNWISE, BLOCK_R, BLOCK_C)


@Kernel
@triton.jit(do_not_specialize=["num_matrices"])
def multi_cast_kernel(
    table, amaxes, num_matrices, epsilon, element: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    E5M2: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`cast_kernel` of the matrix that this tile belongs to."""
    tile = tl.program_id(0).to(tl.int64)
    fields, first_tile = find_matrix(table, num_matrices, tile, FIELDS)
    tile -= first_tile
    x, rows, cols, stride_r, stride_c, tiles_c = load_matrix(fields, element, ALIGNED)
    amax_row = amaxes + tl.load(fields + 6)
    amax_col = amax_row + rows if ROWWISE else amax_row
    q_row = tl.multiple_of(tl.load(fields + 7).to(tl.pointer_type(tl.uint8)), 16)
    s_row = tl.load(fields + 8).to(tl.pointer_type(tl.float32))
    q_col = tl.multiple_of(tl.load(fields + 9).to(tl.pointer_type(tl.uint8)), 16)
    s_col = tl.load(fields + 10).to(tl.pointer_type(tl.float32))
    stored_rows, stored_cols = tl.load(fields + 11), tl.load(fields + 12)
    rows16, cols16 = tiles_of(rows, 16) * 16, tiles_of(cols, 16) * 16
    tile_r, tile_c = place_of_tile(tile, tiles_c)
    cast_tile(
        x, amax_row, amax_col, q_row, s_row, q_col, s_col, tile_r, tile_c,
        rows, cols, rows16, cols16, stored_rows, stored_cols, stride_r, stride_c, epsilon,
        ROWWISE, COLUMNWISE, E5M2, FP8_MAX, POWER_OF_2, BLOCK_R, BLOCK_C,
    )  # fmt: skip
