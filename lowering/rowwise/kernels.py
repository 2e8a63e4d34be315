"""Rowwise quantization in two passes: the largest magnitude of every line, then every copy of a tile from one read.

A line's scale needs the whole line, so the matrix is read twice, whatever is requested. Tiles are the same in both passes.
The first raises the amaxes of a tile's lines, a zeroed vector, by atomic integer maxima: exact in any order, and 192 of them
for 8192 elements. The second computes the scales of its lines from them; the tiles of the first column (row) of tiles store
those of the rows (columns).

One matrix or one batch takes one launch per pass; more matrices one for each dtype and alignment. A table in device memory
tells where each is, and a program finds its own by counting the matrices that begin at or before its tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lowering.copies import CastOptions, by_output, empty_copy
from lowering.formats import FLOAT32_MAX, fp8_max, pad_to_alignment
from lowering.rowwise import reference
from lowering.scaling import scales_from_amax
from lowering.triton.ahead import Kernel
from lowering.triton.launch import batch_step, cdiv, grid_of, is_e5m2, on_device
from lowering.triton.many import groups, has_aligned_lines, is_aligned, table_of, warps
from lowering.triton.tile import (
    INF_BITS,
    block_scale,
    find_matrix,
    four_rows,
    larger,
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

#: Whole 128-byte lines of the rowwise and 64-byte segments of the columnwise copy.
BLOCK_R = 64
BLOCK_C = 128
NUM_WARPS = 4
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
    """The properties of a matrix that both passes need: address, sizes, columns of tiles, strides."""
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


_TILE = {"BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C}


def _tiles(rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns of tiles, which cover the padding, too."""
    return cdiv(pad_to_alignment(rows), BLOCK_R), cdiv(pad_to_alignment(cols), BLOCK_C)


def _starts(xs: list[torch.Tensor], rowwise: bool, columnwise: bool) -> list[int]:
    """The starts of the lines of each matrix in the vector of amaxes; the last entry is its length."""
    starts = [0]
    for x in xs:
        *_, rows, cols = x.shape
        starts.append(starts[-1] + rows * rowwise + cols * columnwise)
    return starts


def _table(
    xs: list[torch.Tensor], members: list[int], starts: list[int], copies: list[list[int]], device: torch.device
) -> tuple[torch.Tensor, int]:
    """The table of a launch, and its number of tiles. `copies`: fields of each matrix that say where its copies go."""
    rows = []
    for i in members:
        x = xs[i]
        tiles_r, tiles_c = _tiles(*x.shape)
        rows.append((tiles_r * tiles_c, [x.data_ptr(), *x.shape, *x.stride(), tiles_c, starts[i], *copies[i]]))
    return table_of(rows, device)


def amax_rowwise(xs: list[torch.Tensor], *, rowwise: bool, columnwise: bool) -> torch.Tensor:
    """See `reference.amax_rowwise`; also of one batch, matrix by matrix."""
    return _amax_bits(xs, _starts(xs, rowwise, columnwise), rowwise, columnwise).view(torch.float32)


def _amax_bits(xs: list[torch.Tensor], starts: list[int], rowwise: bool, columnwise: bool) -> torch.Tensor:
    """The first pass: the amaxes of all lines, as the int32 bits of float32."""
    count = xs[0].shape[0] if xs[0].dim() == 3 else 1
    bits = xs[0].new_zeros(count * starts[-1], dtype=torch.int32)
    flags = {"ROWWISE": rowwise, "COLUMNWISE": columnwise, **_TILE}
    with on_device(bits):
        if len(xs) == 1 and xs[0].numel():
            (x,) = xs
            *_, rows, cols = x.shape
            tiles_r, tiles_c = _tiles(rows, cols)
            amax_kernel[grid_of(x, tiles_r * tiles_c)](
                x, bits, rows, cols, tiles_c, *x.stride()[-2:], batch_step(x), starts[-1],
                BATCHED=x.dim() == 3, **flags, num_warps=warps(NUM_WARPS, has_aligned_lines(x)),
            )  # fmt: skip
        elif len(xs) > 1:
            for element, aligned, members in groups(xs, is_aligned):
                table, num_tiles = _table(xs, members, starts, [[0] * 6] * len(xs), bits.device)
                multi_amax_kernel[(num_tiles,)](
                    table, bits, len(members), element=element, ALIGNED=aligned, **flags,
                    num_warps=warps(NUM_WARPS, aligned),
                )  # fmt: skip
    return bits


Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""The destination of the copies of one orientation, a tensor for each matrix: uint8 data and float32 scales."""


def _new_copies(xs: list[torch.Tensor], columnwise: bool, pad_outer: bool) -> Copies:
    data = [empty_copy(x, torch.uint8, columnwise, pad_outer) for x in xs]
    return data, [q.new_empty(*q.shape[:-1], 1, dtype=torch.float32) for q in data]


def _fill(
    xs: list[torch.Tensor],
    starts: list[int],
    bits: torch.Tensor,
    dtype: torch.dtype,
    cast: CastOptions,
    row: Copies | None,
    col: Copies | None,
) -> None:
    """The second pass. bits: what `_amax_bits` returns."""
    how = {"E5M2": is_e5m2(dtype), "FP8_MAX": fp8_max(dtype), "POWER_OF_2": cast.power_of_2}
    flags = {"ROWWISE": cast.rowwise, "COLUMNWISE": cast.columnwise, **how, **_TILE}
    asked = [copies for copies in (row, col) if copies is not None]
    first, second = asked[0], asked[-1]  # where only one copy is requested, the other's arguments are not touched
    places = list(zip(*first, *second, strict=True))
    for i, x in enumerate(xs):
        if not x.numel():
            amaxes = bits[starts[i] : starts[i + 1]].view(torch.float32)
            _fill_empty(x, amaxes, dtype, cast, [c and (c[0][i], c[1][i]) for c in (row, col)])
    with on_device(bits):
        if len(xs) == 1 and xs[0].numel():
            x, (q_row, s_row, q_col, s_col) = xs[0], places[0]
            *_, rows, cols = x.shape
            tiles_r, tiles_c = _tiles(rows, cols)
            cast_kernel[grid_of(x, tiles_r * tiles_c)](
                x, bits, q_row, s_row, q_col, s_col, rows, cols, pad_to_alignment(rows), pad_to_alignment(cols),
                q_row.shape[-2], q_col.shape[-2], tiles_c, *x.stride()[-2:], cast.epsilon, batch_step(x), starts[-1],
                BATCHED=x.dim() == 3, **flags, num_warps=warps(NUM_WARPS, has_aligned_lines(x)),
            )  # fmt: skip
        elif len(xs) > 1:
            fields = [[*(t.data_ptr() for t in copies), copies[0].shape[0], copies[2].shape[0]] for copies in places]
            for element, aligned, members in groups(xs, is_aligned):
                table, num_tiles = _table(xs, members, starts, fields, bits.device)
                multi_cast_kernel[(num_tiles,)](
                    table, bits, len(members), cast.epsilon,
                    element=element, ALIGNED=aligned, **flags, num_warps=warps(NUM_WARPS, aligned),
                )  # fmt: skip


def _fill_empty(
    x: torch.Tensor,
    amaxes: torch.Tensor,
    dtype: torch.dtype,
    cast: CastOptions,
    copies: list[tuple[torch.Tensor, torch.Tensor] | None],
) -> None:
    """A matrix or batch without elements needs no launch: its copies are padding, its lines have the scales of amax 0."""
    for copy, lines in zip(copies, x.shape[-2:], strict=True):
        if copy is not None:
            data, scales = copy
            data.zero_()
            of_lines, amaxes = amaxes[..., :lines], amaxes[..., lines:]
            stored = scales.view(data.shape[:-1]).fill_(1.0)
            stored[..., :lines] = scales_from_amax(of_lines, dtype, power_of_2=cast.power_of_2, epsilon=cast.epsilon)[1]


def cast_lines_rowwise(xs: list[torch.Tensor], amaxes: torch.Tensor, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """See `reference.cast_lines_rowwise`."""
    cast = CastOptions.of(**options)
    slices, length = reference.scale_slices([x.shape for x in xs], cast)
    has_gaps = sum(end - start for start, end in slices) < length
    scales = (torch.ones if has_gaps else torch.empty)(length, dtype=torch.float32, device=xs[0].device)
    views, step = [scales[start:end] for start, end in slices], len(cast.wanted)
    made = {side[0]: ([empty_copy(x, torch.uint8, *side) for x in xs], views[i::step]) for i, side in enumerate(cast.wanted)}
    bits = amaxes.contiguous().view(torch.int32)
    _fill(xs, _starts(xs, cast.rowwise, cast.columnwise), bits, dtype, cast, made.get(False), made.get(True))
    return [*(q.view(dtype) for data, _ in made.values() for q in data), scales]


# -- what is made of the two passes


def copies(xs: list[torch.Tensor], dtype: torch.dtype, cast: CastOptions) -> list[torch.Tensor]:
    """`casts.cast_with_scales`. Matrices share their launches, batches have their own."""
    if len(xs) > 1 and any(x.dim() == 3 for x in xs):
        return by_output([copies([x], dtype, cast) for x in xs])
    made = {side[0]: _new_copies(xs, *side) for side in cast.wanted}
    starts = _starts(xs, cast.rowwise, cast.columnwise)
    bits = _amax_bits(xs, starts, cast.rowwise, cast.columnwise)
    _fill(xs, starts, bits, dtype, cast, made.get(False), made.get(True))
    returned: list[torch.Tensor] = []
    for data, scales in made.values():
        returned += [*(q.view(dtype) for q in data), *scales]
    return returned
