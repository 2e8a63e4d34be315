"""Both FP8 layouts of a matrix from one read: every tile is loaded once and stored along its rows and along its
columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.copies import is_column_major
from lowering.formats import pad_to_alignment
from lowering.tensorwise.kernels.cast import new_partials, step_of
from lowering.tensorwise.parts import COLUMNWISE_TILE
from lowering.triton.ahead import Kernel
from lowering.triton.launch import batch_step, cdiv, grid_of, on_device
from lowering.triton.tile import (
    INF_BITS,
    four_rows,
    fp8_bits,
    largest,
    largest_of_rows,
    left,
    load_rows,
    store_columns,
    store_infinities,
    store_rows,
    tiles_of,
    turned,
)

#: 128-byte lines of a bfloat16 input and of the columnwise copy, 64-byte segments of the rowwise one. On SM90 at least four
#: programs of four warps share a multiprocessor: some 64 KB of loads are under way.
BLOCK_R, BLOCK_C = COLUMNWISE_TILE
NUM_WARPS = 4


@triton.jit
def cast_tile(
    x, scale, rowwise, columnwise, tile_r, tile_c, rows, cols, stride_r, stride_c,
    rowwise_rows, cols16, columnwise_rows, rows16,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, E5M2: tl.constexpr, WITH_AMAX: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copies of one tile of x [rows, cols]: rowwise [rowwise_rows, cols16], columnwise [columnwise_rows, rows16].

    At least one of them. Returns the bits of the tile's amax, or 0 where it is not needed.
    """
    r0 = tile_r.to(tl.int64) * BLOCK_R
    c0 = tile_c.to(tl.int64) * BLOCK_C
    x += r0 * stride_r + c0 * stride_c
    rowwise += r0 * cols16 + c0
    columnwise += c0 * rows16 + r0
    rows_left = left(rows, r0, BLOCK_R)
    cols_left = left(cols, c0, BLOCK_C)
    r = 4 * tl.arange(0, BLOCK_R // 4)
    c = tl.arange(0, BLOCK_C)
    v0, v1, v2, v3 = load_rows(x, r, c, rows_left, cols_left, stride_r, stride_c)
    amax_bits = 0
    if WITH_AMAX or E5M2:
        amax_bits = largest(largest_of_rows(v0, v1, v2, v3))
    if ROWWISE:
        b0, b1 = fp8_bits(v0, scale, E5M2), fp8_bits(v1, scale, E5M2)
        b2, b3 = fp8_bits(v2, scale, E5M2), fp8_bits(v3, scale, E5M2)
        stored_rows, stored_cols = left(rowwise_rows, r0, BLOCK_R), left(cols16, c0, BLOCK_C)
        store_rows(rowwise, b0, b1, b2, b3, r, c, stored_rows, stored_cols, cols16, 1)
    if COLUMNWISE:
        if ROWWISE:
            four = four_rows(b0, b1, b2, b3)
        else:
            four = fp8_bits(four_rows(v0, v1, v2, v3), scale, E5M2)
        stored_rows, stored_cols = left(rows16, r0, BLOCK_R), left(columnwise_rows, c0, BLOCK_C)
        store_columns(columnwise, turned(four), stored_rows, stored_cols, 1, rows16)
    if E5M2:  # noqa: SIM102 (the one is a constant, the other a tensor)
        if amax_bits >= INF_BITS:
            tl.debug_barrier()  # other threads have stored what is stored over here
            if ROWWISE:
                store_infinities(x, rowwise, c, rows_left, cols_left, stride_r, stride_c, cols16, 1, True, BLOCK_R)
            if COLUMNWISE:
                store_infinities(x, columnwise, c, rows_left, cols_left, stride_r, stride_c, 1, rows16, True, BLOCK_R)
    return amax_bits


@Kernel
@triton.jit(do_not_specialize=["scale"])
def cast_transpose_kernel(
    x, scale, rowwise, columnwise, partials, rows, cols, stride_r, stride_c,
    rowwise_rows, cols16, columnwise_rows, rows16, stride_e, scale_stride, BATCHED: tl.constexpr,
    ROWWISE: tl.constexpr, E5M2: tl.constexpr, WITH_AMAX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """rowwise and columnwise = FP8 bits of x [rows, cols] (any strides) times the scalar scale, zeros beyond x.

    Without ROWWISE the columnwise copy alone. WITH_AMAX: partials[tile] = bits of max |x| over the tile. BATCHED: of each
    matrix, the second dimension of the grid.
    """
    tile = tl.program_id(0)
    if BATCHED:
        e = tl.program_id(1).to(tl.int64)
        x += e * stride_e
        scale += e * scale_stride
        rowwise += e * rowwise_rows * cols16
        columnwise += e * columnwise_rows * rows16
        if WITH_AMAX:
            partials += e * tl.num_programs(0)
    tiles_c = tiles_of(cols16, BLOCK_C)
    amax_bits = cast_tile(
        x, tl.load(scale), rowwise, columnwise, tile // tiles_c, tile % tiles_c, rows, cols, stride_r, stride_c,
        rowwise_rows, cols16, columnwise_rows, rows16, ROWWISE, True, E5M2, WITH_AMAX, BLOCK_R, BLOCK_C,
    )  # fmt: skip
    if WITH_AMAX:
        tl.store(partials + tile, amax_bits)


def launch(
    x: torch.Tensor,
    scale: torch.Tensor,
    rowwise: torch.Tensor | None,
    columnwise: torch.Tensor,
    e5m2: bool,
    with_amax: bool,
) -> torch.Tensor | None:
    """Fill the uint8 copies of x, a matrix or a batch that is not empty, with FP8 bits; returns partial amaxes if asked for."""
    if rowwise is not None and is_column_major(x):
        # Loads run along the rows; a column-major x is the transpose of a matrix with the same two copies.
        x, rowwise, columnwise = x.mT, columnwise, rowwise
    (*_, rows, cols), (*_, columnwise_rows, rows16) = x.shape, columnwise.shape
    cols16 = pad_to_alignment(cols)
    num_tiles = cdiv(rows16, BLOCK_R) * cdiv(cols16, BLOCK_C)
    with on_device(x):
        partials = new_partials(x, num_tiles) if with_amax else None
        cast_transpose_kernel[grid_of(x, num_tiles)](
            x, scale, columnwise if rowwise is None else rowwise, columnwise, partials,
            rows, cols, *x.stride()[-2:],
            0 if rowwise is None else rowwise.shape[-2], cols16, columnwise_rows, rows16, batch_step(x), step_of(scale),
            BATCHED=x.dim() == 3, ROWWISE=rowwise is not None, E5M2=e5m2, WITH_AMAX=with_amax,
            BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C, num_warps=NUM_WARPS,
        )  # fmt: skip
        return partials
