"""Rowwise quantization in two passes: the largest magnitude of every line, then every copy of a tile from one read.

A line's scale needs the whole line, so the matrix is read twice, whatever is asked for. Tiles are the same in both passes.
The first raises the amaxes of a tile's lines, a zeroed vector, by atomic integer maxima: exact in any order, and 192 of them
for 8192 elements. The second computes the scales of its lines from them; the tiles of the first column (row) of tiles store
those of the rows (columns).

Many matrices take one launch per pass: a table in device memory tells where each is, and a program finds its own by counting
the matrices that begin at or before its tile. One matrix needs no table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from lowering.blockwise.kernels.cast import block_scale
from lowering.blockwise.reference import as_matrix
from lowering.formats import FLOAT32_MAX, GEMM_ALIGNMENT, fp8_max, pad_to_alignment
from lowering.rowwise import reference
from lowering.triton.launch import cdiv, is_e5m2, on_device, pinned_table
from lowering.triton.tile import fp8_bits, magnitude_bits

#: Whole 128-byte lines of the rowwise and 64-byte segments of the columnwise copy.
BLOCK_R = 64
BLOCK_C = 128
NUM_WARPS = 8
#: int64 fields of a matrix in the table; the first tiles of all matrices come before them.
FIELDS = tl.constexpr(13)
MATRICES_PER_STEP = tl.constexpr(128)

#: An infinite scale becomes this one.
SCALE_MAX = tl.constexpr(FLOAT32_MAX)


@triton.jit
def load_tile(x, r, c, rows, cols, stride_r, stride_c):
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    return tl.load(x + r[:, None] * stride_r + c[None, :] * stride_c, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def raise_amaxes(x, amax_row, amax_col, r, c, rows, cols, stride_r, stride_c, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr):
    """Raise the amaxes (int32 bits) of the lines of one tile."""
    magnitude = magnitude_bits(load_tile(x, r, c, rows, cols, stride_r, stride_c))
    if ROWWISE:
        tl.atomic_max(amax_row + r, tl.max(magnitude, axis=1), mask=r < rows, sem="relaxed")
    if COLUMNWISE:
        tl.atomic_max(amax_col + c, tl.max(magnitude, axis=0), mask=c < cols, sem="relaxed")


@triton.jit
def line_scales(amax, lines, num_lines, epsilon, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr):
    """The scales of lines, 1 for lines of padding."""
    bits = tl.load(amax + lines, mask=lines < num_lines, other=0) & 0x7FFFFFFF  # a NaN may have a sign
    scale = block_scale(bits, SCALE_MAX, epsilon, FP8_MAX, POWER_OF_2)
    return tl.where(lines < num_lines, scale, 1.0)


@triton.jit
def cast_tile(
    x, amax_row, amax_col, q_row, s_row, q_col, s_col, tile_r, tile_c, r, c,
    rows, cols, rows16, cols16, stored_rows, stored_cols, stride_r, stride_c, epsilon,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, E5M2: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
):  # fmt: skip
    """Store the FP8 bits of one tile in q_row [stored_rows, cols16] and transposed in q_col [stored_cols, rows16]."""
    value = load_tile(x, r, c, rows, cols, stride_r, stride_c)
    if ROWWISE:
        scale = line_scales(amax_row, r, rows, epsilon, FP8_MAX, POWER_OF_2)
        bits = fp8_bits(value, scale[:, None], E5M2)
        tl.store(q_row + r[:, None] * cols16 + c[None, :], bits, mask=(r < stored_rows)[:, None] & (c < cols16)[None, :])
        tl.store(s_row + r, tl.div_rn(1.0, scale), mask=(r < stored_rows) & (tile_c == 0))
    if COLUMNWISE:
        scale = line_scales(amax_col, c, cols, epsilon, FP8_MAX, POWER_OF_2)
        bits = fp8_bits(value, scale[None, :], E5M2)
        tl.store(q_col + c[None, :] * rows16 + r[:, None], bits, mask=(r < rows16)[:, None] & (c < stored_cols)[None, :])
        tl.store(s_col + c, tl.div_rn(1.0, scale), mask=(c < stored_cols) & (tile_r == 0))


@triton.jit
def amax_kernel(
    x, amaxes, rows, cols, tiles_c, stride_r, stride_c,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The lines of one matrix, any strides. amaxes: int32 bits, rows first where ROWWISE."""
    tile = tl.program_id(0).to(tl.int64)
    r = (tile // tiles_c) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = (tile % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    amax_col = amaxes + rows if ROWWISE else amaxes
    raise_amaxes(x, amaxes, amax_col, r, c, rows, cols, stride_r, stride_c, ROWWISE, COLUMNWISE)


@triton.jit
def cast_kernel(
    x, amaxes, q_row, s_row, q_col, s_col,
    rows, cols, rows16, cols16, stored_rows, stored_cols, tiles_c, stride_r, stride_c, epsilon,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, E5M2: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The copies of one matrix, any strides; zeros beyond it."""
    tile = tl.program_id(0).to(tl.int64)
    tile_r, tile_c = tile // tiles_c, tile % tiles_c
    r = tile_r * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
    amax_col = amaxes + rows if ROWWISE else amaxes
    cast_tile(
        x, amaxes, amax_col, q_row, s_row, q_col, s_col, tile_r, tile_c, r, c,
        rows, cols, rows16, cols16, stored_rows, stored_cols, stride_r, stride_c, epsilon,
        ROWWISE, COLUMNWISE, E5M2, FP8_MAX, POWER_OF_2,
    )  # fmt: skip


@triton.jit
def find_matrix(table, num_matrices, tile):
    """The fields of the matrix that a tile belongs to, and its first tile."""
    matrix = -1
    for start in range(0, num_matrices, MATRICES_PER_STEP):
        offsets = start + tl.arange(0, MATRICES_PER_STEP)
        first = tl.load(table + offsets, mask=offsets < num_matrices, other=0x7FFFFFFFFFFFFFFF)
        matrix += tl.sum((first <= tile).to(tl.int32), axis=0)
    return table + num_matrices + matrix * FIELDS, tl.load(table + matrix)


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


@triton.jit
def multi_amax_kernel(
    table, amaxes, num_matrices, element: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`amax_kernel` of the matrix that this tile belongs to. table: first tiles, then fields (`_fields`)."""
    tile = tl.program_id(0).to(tl.int64)
    fields, first_tile = find_matrix(table, num_matrices, tile)
    tile -= first_tile
    x, rows, cols, stride_r, stride_c, tiles_c = load_matrix(fields, element, ALIGNED)
    amax_row = amaxes + tl.load(fields + 6)
    amax_col = amax_row + rows if ROWWISE else amax_row
    r = (tile // tiles_c) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = (tile % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    raise_amaxes(x, amax_row, amax_col, r, c, rows, cols, stride_r, stride_c, ROWWISE, COLUMNWISE)


@triton.jit
def multi_cast_kernel(
    table, amaxes, num_matrices, epsilon, element: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    E5M2: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`cast_kernel` of the matrix that this tile belongs to."""
    tile = tl.program_id(0).to(tl.int64)
    fields, first_tile = find_matrix(table, num_matrices, tile)
    tile -= first_tile
    x, rows, cols, stride_r, stride_c, tiles_c = load_matrix(fields, element, ALIGNED)
    amax_row = amaxes + tl.load(fields + 6)
    amax_col = amax_row + rows if ROWWISE else amax_row
    q_row = tl.multiple_of(tl.load(fields + 7).to(tl.pointer_type(tl.uint8)), 16)
    s_row = tl.load(fields + 8).to(tl.pointer_type(tl.float32))
    q_col = tl.multiple_of(tl.load(fields + 9).to(tl.pointer_type(tl.uint8)), 16)
    s_col = tl.load(fields + 10).to(tl.pointer_type(tl.float32))
    stored_rows, stored_cols = tl.load(fields + 11), tl.load(fields + 12)
    rows16, cols16 = tl.cdiv(rows, 16) * 16, tl.cdiv(cols, 16) * 16
    tile_r, tile_c = tile // tiles_c, tile % tiles_c
    r = tile_r * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
    cast_tile(
        x, amax_row, amax_col, q_row, s_row, q_col, s_col, tile_r, tile_c, r, c,
        rows, cols, rows16, cols16, stored_rows, stored_cols, stride_r, stride_c, epsilon,
        ROWWISE, COLUMNWISE, E5M2, FP8_MAX, POWER_OF_2,
    )  # fmt: skip


# -- launches

_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _tiles(x: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of tiles, which cover the padding, too."""
    return cdiv(pad_to_alignment(x.shape[0]), BLOCK_R), cdiv(pad_to_alignment(x.shape[1]), BLOCK_C)


def _groups(xs: list[torch.Tensor]) -> Iterator[tuple[tl.dtype, bool, list[int]]]:
    """The matrices that one launch can take: (dtype, whether pointers and sizes are multiples of 16, positions)."""
    groups: dict[tuple[torch.dtype, bool], list[int]] = defaultdict(list)
    for i, x in enumerate(xs):
        if x.numel():
            multiples = (*x.shape, x.stride(0), x.data_ptr())
            aligned = x.stride(1) == 1 and all(value % GEMM_ALIGNMENT == 0 for value in multiples)
            groups[x.dtype, aligned].append(i)
    for (dtype, aligned), members in groups.items():
        yield _ELEMENTS[dtype], aligned, members


def _starts(xs: list[torch.Tensor], rowwise: bool, columnwise: bool) -> list[int]:
    """Where the lines of each matrix begin in the vector of amaxes; the last entry is its length."""
    starts = [0]
    for x in xs:
        starts.append(starts[-1] + x.shape[0] * rowwise + x.shape[1] * columnwise)
    return starts


def _table(
    xs: list[torch.Tensor], members: list[int], starts: list[int], copies: list[list[int]], device: torch.device
) -> tuple[torch.Tensor, int]:
    """The table of a launch, and its number of tiles. `copies`: fields of each matrix that say where its copies go."""
    first_tiles, fields, num_tiles = [], [], 0
    for i in members:
        x = xs[i]
        tiles_r, tiles_c = _tiles(x)
        first_tiles.append(num_tiles)
        fields += [x.data_ptr(), *x.shape, *x.stride(), tiles_c, starts[i], *copies[i]]
        num_tiles += tiles_r * tiles_c
    return pinned_table(first_tiles + fields, device), num_tiles


def amax_rowwise(xs: list[torch.Tensor], *, rowwise: bool, columnwise: bool) -> torch.Tensor:
    """See `reference.amax_rowwise`. One matrix: one launch; more: one per dtype and alignment."""
    starts = _starts(xs, rowwise, columnwise)
    bits = torch.zeros(starts[-1], dtype=torch.int32, device=xs[0].device)
    flags = {"ROWWISE": rowwise, "COLUMNWISE": columnwise, "BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C, "num_warps": NUM_WARPS}
    with on_device(bits):
        if len(xs) == 1 and xs[0].numel():
            (x,) = xs
            tiles_r, tiles_c = _tiles(x)
            amax_kernel[(tiles_r * tiles_c,)](x, bits, *x.shape, tiles_c, *x.stride(), **flags)
        elif len(xs) > 1:
            for element, aligned, members in _groups(xs):
                table, num_tiles = _table(xs, members, starts, [[0] * 6] * len(xs), bits.device)
                multi_amax_kernel[(num_tiles,)](table, bits, len(members), element=element, ALIGNED=aligned, **flags)
    return bits.view(torch.float32)


def _new_copy(x: torch.Tensor, columnwise: bool, pad_outer: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy to be filled: uint8 data and scales."""
    outer, inner = (x.shape[1], x.shape[0]) if columnwise else (x.shape[0], x.shape[1])
    shape = (pad_to_alignment(outer) if pad_outer else outer, pad_to_alignment(inner))
    data = torch.empty(shape, dtype=torch.uint8, device=x.device)
    return data, torch.empty((shape[0], 1), dtype=torch.float32, device=x.device)


def cast_lines_rowwise(
    xs: list[torch.Tensor],
    amaxes: torch.Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool,
    columnwise: bool,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:
    """See `reference.cast_lines_rowwise`. Launches as `amax_rowwise`."""
    scaling: dict[str, Any] = {"power_of_2": power_of_2, "epsilon": epsilon}

    def copies(columnwise: bool, pad_outer: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for x in xs:
            if x.numel():
                found.append(_new_copy(x, columnwise, pad_outer))
            else:  # nothing to launch
                q, scale_inv = reference.cast_rowwise(x, dtype, columnwise=columnwise, pad_outer=pad_outer, **scaling)
                found.append((q.view(torch.uint8), scale_inv))
        return found

    row, col = copies(False, pad_rows) if rowwise else [], copies(True, pad_cols) if columnwise else []
    bits = amaxes.contiguous().view(torch.int32)
    how = {"E5M2": is_e5m2(dtype), "FP8_MAX": fp8_max(dtype), "POWER_OF_2": power_of_2}
    flags = {"ROWWISE": rowwise, "COLUMNWISE": columnwise, "BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C, "num_warps": NUM_WARPS}
    pairs = list(zip(row or col, col or row, strict=True))  # a copy that is not asked for is not touched
    with on_device(bits):
        if len(xs) == 1 and xs[0].numel():
            x, ((q_row, s_row), (q_col, s_col)) = xs[0], pairs[0]
            tiles_r, tiles_c = _tiles(x)
            sizes = [*x.shape, *(pad_to_alignment(size) for size in x.shape), q_row.shape[0], q_col.shape[0]]
            cast_kernel[(tiles_r * tiles_c,)](
                x, bits, q_row, s_row, q_col, s_col, *sizes, tiles_c, *x.stride(), epsilon, **how, **flags
            )
        elif len(xs) > 1:
            starts = _starts(xs, rowwise, columnwise)
            fields = [
                [q_row.data_ptr(), s_row.data_ptr(), q_col.data_ptr(), s_col.data_ptr(), q_row.shape[0], q_col.shape[0]]
                for (q_row, s_row), (q_col, s_col) in pairs
            ]
            for element, aligned, members in _groups(xs):
                table, num_tiles = _table(xs, members, starts, fields, bits.device)
                multi_cast_kernel[(num_tiles,)](
                    table, bits, len(members), epsilon, element=element, ALIGNED=aligned, **how, **flags
                )
    groups = [[q.view(dtype) for q, _ in row], [s for _, s in row], [q.view(dtype) for q, _ in col], [s for _, s in col]]
    return [tensor for group in groups for tensor in group]


# -- what is made of the two passes


def quantize_rowwise(
    x: torch.Tensor, dtype: torch.dtype, *, power_of_2: bool = True, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.quantize_rowwise`."""
    matrix = as_matrix(x)
    q, scale_inv = cast_rowwise(matrix, dtype, power_of_2=power_of_2, epsilon=epsilon)
    if q.shape[1] != matrix.shape[1]:
        q = q.view(torch.uint8)[:, : matrix.shape[1]].contiguous().view(dtype)
    return q.view(x.shape), scale_inv


def cast_rowwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.cast_rowwise`."""
    wanted = {"rowwise": not columnwise, "columnwise": columnwise}
    pads = {"pad_rows": pad_outer, "pad_cols": pad_outer}
    amaxes = amax_rowwise([x], **wanted)
    q, scale_inv = cast_lines_rowwise([x], amaxes, dtype, **wanted, **pads, power_of_2=power_of_2, epsilon=epsilon)
    return q, scale_inv


def cast_transpose_rowwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference.cast_transpose_rowwise`."""
    options: dict[str, Any] = {"pad_rows": pad_rows, "pad_cols": pad_cols, "power_of_2": power_of_2, "epsilon": epsilon}
    q, scale_inv, q_t, scale_inv_t = multi_cast_transpose_rowwise([x], dtype, **options)
    return q, scale_inv, q_t, scale_inv_t


def multi_cast_transpose_rowwise(
    xs: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:
    """See `reference.multi_cast_transpose_rowwise`."""
    both = {"rowwise": True, "columnwise": True}
    pads = {"pad_rows": pad_rows, "pad_cols": pad_cols}
    amaxes = amax_rowwise(xs, **both)
    return cast_lines_rowwise(xs, amaxes, dtype, **both, **pads, power_of_2=power_of_2, epsilon=epsilon)
