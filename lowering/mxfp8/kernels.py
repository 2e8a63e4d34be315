"""Quantization to MXFP8: a tile is read once, and every copy of it written in its final layout, with its scales.

A tile of 128x128 holds 4 blocks in either direction: what one GEMM-ready tile of scales describes, for both copies.
Also the scales of blocks of 128 as those of MXFP8: both operands of a GEMM in one launch.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl

from lowering.copies import CastOptions, by_output, empty_copy
from lowering.formats import BLOCK, MX_BLOCK, fp8_max
from lowering.mxfp8 import reference
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, has_whole_tiles, is_e5m2, on_device
from lowering.triton.tile import (
    INF_BITS,
    converted,
    four_rows,
    larger,
    largest_of_rows,
    left,
    load_rows,
    magnitude_bits,
    one_per_thread,
    place_of_tile,
    store_columns,
    store_rows,
    tiles_of,
    turned,
)

NUM_WARPS = 8


@triton.jit
def e8m0_code(amax, FP8_MAX: tl.constexpr):
    """`reference.e8m0_from_amax` of float32 amaxes, none negative, as int32. fp8_max is 1.75 * 2**p. The quotient's power of
    two at or above is the amax's exponent less p, one more where the amax's mantissa exceeds 1.75: adding 0.25 less the last
    bit carries just there. Float32's rounding changes that for one amax alone, the first above 1.75 * 2**(p - 127), whose
    quotient is subnormal and rounds down to 2**-127."""
    P: tl.constexpr = 8 if FP8_MAX == 448.0 else 15
    bits = magnitude_bits(amax)
    code = tl.where(bits <= (P << 23) + 0x600001, 0, ((bits + 0x1FFFFF) >> 23) - P)
    return tl.where(bits >= INF_BITS, tl.where(bits > INF_BITS, 255, 254), code)


@triton.jit
def factor_of(code):
    """`reference.factors` of int32 codes."""
    bits = tl.where(code == 254, 0x400000, (254 - code) << 23)
    bits = tl.where(code == 0, 0x3F800000, tl.where(code == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def row_codes(x, FP8_MAX: tl.constexpr):
    """Codes [R, C / 32] of the 1x32 blocks of float32 x [R, C]."""
    blocks = tl.reshape(tl.abs(x), (x.shape[0], x.shape[1] // 32, 32))
    return e8m0_code(tl.reduce(blocks, 2, larger), FP8_MAX)


@triton.jit
def row_factors(code):
    """[R, C]: what each element is multiplied by."""
    factor = tl.broadcast_to(factor_of(code)[:, :, None], (code.shape[0], code.shape[1], 32))
    return tl.reshape(factor, (code.shape[0], code.shape[1] * 32))


@triton.jit
def code_per_line(code):
    """[128, 4]: the codes [4, 4] of 32x32 blocks, one for each of their lines."""
    return tl.reshape(tl.broadcast_to(code[:, None, :], (4, 32, 4)), (128, 4))


@triton.jit
def inside(bits, r, c, rows_left, cols_left, WHOLE: tl.constexpr):
    """The bits where x is, zeros around them: beside a NaN the product with 0.0 is NaN, too."""
    if WHOLE:
        return bits
    return tl.where((r < rows_left)[:, None] & (c < cols_left)[None, :], bits, 0)


@triton.jit
def store_scales(
    s, codes, tile_outer, tile_block, outer, blocks, tiles_inner, stride_outer, stride_block,
    LINES: tl.constexpr, SWIZZLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes [LINES, 4] of one tile: as a GEMM-ready tile, padding and all, or at their place among compact ones."""
    line = tl.arange(0, LINES)
    ahead = tl.arange(0, 4)
    if SWIZZLED:
        tile = (tile_outer * tiles_inner + tile_block) * (4 * BLOCK)
        offsets = tile + ((line % 32) * 16 + (line // 32) * 4)[:, None] + ahead[None, :]
        is_line = (tile_outer * LINES + line < outer)[:, None]
        tl.store(s + offsets, tl.where(is_line, codes, 0).to(tl.uint8))
    else:
        lines = tile_outer * LINES + line
        places = tile_block * 4 + ahead
        mask = (lines < outer)[:, None] & (places < blocks)[None, :]
        tl.store(s + lines[:, None] * stride_outer + places[None, :] * stride_block, codes.to(tl.uint8), mask=mask)


@Kernel
@triton.jit
def cast_mxfp8_kernel(
    x, rows, cols, stride_r, stride_c,
    q_row, q_row_rows, q_row_cols, q_row_stride_r, q_row_stride_c, s_row, s_row_stride_outer, s_row_stride_block,
    q_col, q_col_rows, q_col_cols, q_col_stride_r, q_col_stride_c, s_col, s_col_stride_outer, s_col_stride_block,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, SQUARE: tl.constexpr, SWIZZLED: tl.constexpr,
    E5M2: tl.constexpr, FP8_MAX: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """FP8 copies of x [rows, cols] and their codes, any strides. q_row, q_col: uint8, indexed by row and column of x, sizes
    rounded up; zeros beyond x. s_row, s_col: GEMM-ready (SWIZZLED), or compact and indexed by outer (SQUARE: by 32 of them) and
    by block along inner of the copy. WHOLE: x and its copies consist of whole tiles."""
    tiles_c, tiles_r = tiles_of(cols, BLOCK), tiles_of(rows, BLOCK)
    tile_r, tile_c = place_of_tile(tl.program_id(0), tiles_c)
    blocks_r, blocks_c = tiles_of(rows, 32), tiles_of(cols, 32)
    LINES: tl.constexpr = 4 if SQUARE and not SWIZZLED else BLOCK
    if LINES == BLOCK:
        outer_r, outer_c = rows, cols
    else:
        outer_r, outer_c = blocks_r, blocks_c
    r0, c0 = tile_r * BLOCK, tile_c * BLOCK
    x += r0 * stride_r + c0 * stride_c
    q_row += r0 * q_row_stride_r + c0 * q_row_stride_c
    q_col += r0 * q_col_stride_r + c0 * q_col_stride_c
    rows_left, cols_left = left(rows, r0, BLOCK), left(cols, c0, BLOCK)
    r, c = 4 * tl.arange(0, BLOCK // 4), tl.arange(0, BLOCK)  # NOTE [four rows a thread] in tile.py
    v0, v1, v2, v3 = load_rows(x, r, c, rows_left, cols_left, stride_r, stride_c, WHOLE)
    if SQUARE or COLUMNWISE:
        largest = largest_of_rows(v0, v1, v2, v3)
    if SQUARE:
        blocks = tl.reduce(tl.reduce(tl.reshape(largest, (4, 8, 4, 32)), 3, larger), 1, larger)
        code = e8m0_code(blocks, FP8_MAX)  # [block of rows, block of columns]
        factor = tl.reshape(tl.broadcast_to(factor_of(code)[:, None, :, None], (4, 8, 4, 32)), (BLOCK // 4, BLOCK))
        b0, b1 = converted(v0 * factor, E5M2), converted(v1 * factor, E5M2)
        b2, b3 = converted(v2 * factor, E5M2), converted(v3 * factor, E5M2)
        row_code, col_code = code, tl.trans(code)
        if SWIZZLED:
            row_code, col_code = code_per_line(row_code), code_per_line(col_code)
        bits = four_rows(b0, b1, b2, b3)
    elif ROWWISE:
        k0, k1 = row_codes(v0, FP8_MAX), row_codes(v1, FP8_MAX)  # [row, block]
        k2, k3 = row_codes(v2, FP8_MAX), row_codes(v3, FP8_MAX)
        b0, b1 = converted(v0 * row_factors(k0), E5M2), converted(v1 * row_factors(k1), E5M2)
        b2, b3 = converted(v2 * row_factors(k2), E5M2), converted(v3 * row_factors(k3), E5M2)
        row_code = tl.reshape(tl.permute(four_rows(k0, k1, k2, k3), (0, 2, 3, 1)), (BLOCK, 4))
    if ROWWISE:
        b0 = inside(b0, r, c, rows_left, cols_left, WHOLE)
        b1 = inside(b1, r + 1, c, rows_left, cols_left, WHOLE)
        b2 = inside(b2, r + 2, c, rows_left, cols_left, WHOLE)
        b3 = inside(b3, r + 3, c, rows_left, cols_left, WHOLE)
        stored_rows, stored_cols = left(q_row_rows, r0, BLOCK), left(q_row_cols, c0, BLOCK)
        store_rows(q_row, b0, b1, b2, b3, r, c, stored_rows, stored_cols, q_row_stride_r, q_row_stride_c, WHOLE)
        store_scales(
            s_row, row_code, tile_r, tile_c, outer_r, blocks_c, tiles_c, s_row_stride_outer, s_row_stride_block,
            LINES, SWIZZLED, BLOCK,
        )  # fmt: skip
    if COLUMNWISE:
        if not SQUARE:
            amaxes = tl.reshape(tl.reduce(tl.reshape(largest, (4, 8, BLOCK)), 1, larger), (4 * BLOCK,))
            code = e8m0_code(one_per_thread(amaxes), FP8_MAX)
            factors = tl.reshape(tl.gather(factor_of(code), tl.arange(0, 4 * BLOCK), 0), (4, BLOCK))  # [block, column]
            factors = tl.reshape(tl.broadcast_to(factors[:, None, :], (4, 8, BLOCK)), (BLOCK // 4, BLOCK))
            bits = converted(four_rows(v0, v1, v2, v3) * factors[:, :, None, None], E5M2)
            col_code = tl.trans(tl.reshape(code, (4, BLOCK)))
        rr = tl.arange(0, BLOCK)
        turned_bits = inside(turned(bits), c, rr, cols_left, rows_left, WHOLE)
        stored_rows, stored_cols = left(q_col_rows, r0, BLOCK), left(q_col_cols, c0, BLOCK)
        store_columns(q_col, turned_bits, stored_rows, stored_cols, q_col_stride_r, q_col_stride_c, WHOLE)
        store_scales(
            s_col, col_code, tile_c, tile_r, outer_c, blocks_r, tiles_r, s_col_stride_outer, s_col_stride_block,
            LINES, SWIZZLED, BLOCK,
        )  # fmt: skip


_Copy = tuple[torch.Tensor, torch.Tensor]
"""The destination of one copy of a matrix: views that the kernel indexes. Data: uint8, by row and column of x. Scales: by outer
and block of the copy; GEMM-ready, the memory."""


def _of_copy(copy: _Copy) -> tuple[Any, ...]:
    q, scale = copy
    return q, *q.shape, *q.stride(), scale, *scale.stride()[:2]


def launch(x: torch.Tensor, dtype: torch.dtype, cast: CastOptions, rowwise: _Copy | None, columnwise: _Copy | None) -> None:
    """Fill the given copies of the matrix x, every element of them."""
    copies = [copy for copy in (rowwise, columnwise) if copy is not None]
    if x.numel() == 0:
        for view in itertools.chain(*copies):
            view.zero_()
        return
    first, second = copies[0], copies[-1]  # where only one copy is requested, the other's arguments are not touched
    (rows, cols), (stride_r, stride_c) = x.shape, x.stride()
    of_first = _of_copy(first)
    of_second = of_first if second is first else _of_copy(second)
    whole = (
        has_whole_tiles(BLOCK, BLOCK, rows, cols, stride_r, stride_c)
        and has_whole_tiles(BLOCK, BLOCK, *of_first[1:5])
        and has_whole_tiles(BLOCK, BLOCK, *of_second[1:5])
    )
    with on_device(x):
        cast_mxfp8_kernel[(cdiv(rows, BLOCK) * cdiv(cols, BLOCK),)](
            x, rows, cols, stride_r, stride_c, *of_first, *of_second,
            ROWWISE=rowwise is not None, COLUMNWISE=columnwise is not None, SQUARE=cast.square, SWIZZLED=not cast.compact,
            E5M2=is_e5m2(dtype), FP8_MAX=fp8_max(dtype), WHOLE=whole,
            BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip


def copies(xs: list[torch.Tensor], dtype: torch.dtype, cast: CastOptions) -> list[torch.Tensor]:
    """`casts.cast_with_scales`: a launch for each matrix."""
    made: list[list[torch.Tensor]] = []
    for x in xs:
        row, of_row = _new(x, dtype, cast, False, cast.pad_rows) if cast.rowwise else (None, [])
        col, of_col = _new(x, dtype, cast, True, cast.pad_cols) if cast.columnwise else (None, [])
        launch(x, dtype, cast, row, col)
        made.append([*of_row, *of_col])
    return made[0] if len(xs) == 1 else by_output(made)


def _new(
    x: torch.Tensor, dtype: torch.dtype, cast: CastOptions, columnwise: bool, pad_outer: bool
) -> tuple[_Copy, list[torch.Tensor]]:
    """A copy of x to be filled, and its tensors as they are returned."""
    codes = x.new_empty(*reference.scale_shape(x, cast.square, columnwise, pad_outer, cast.compact), dtype=torch.uint8)
    if cast.compact:
        q = x.new_empty(*x.shape, dtype=torch.uint8)
        return (q, codes.t() if columnwise else codes), [q.view(dtype), codes]
    q = empty_copy(x, torch.uint8, columnwise, pad_outer, MX_BLOCK)
    return (q.mT if columnwise else q, codes), [q.view(dtype), codes]


#: Tiles of scales, along inner, that a program writes.
TILES = 8


@triton.jit
def turn(s, codes, pid, tiles_inner, stored, stride, SQUARE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """TILES tiles of `reference.e8m0_scales` of one operand. s: float32 bits, rows of `stored` elements. codes: int32, the four
    equal codes of a line in each."""
    programs = tiles_of(tiles_inner, TILES)
    outer = pid // programs
    tiles = (pid % programs) * TILES + tl.arange(0, TILES)
    is_tile = tiles < tiles_inner
    word = tl.arange(0, BLOCK)  # of a tile: [line % 32, line // 32]
    if SQUARE:
        bits = tl.load(s + outer * stride + tiles, mask=is_tile, other=0)[:, None]
    else:
        line = outer * BLOCK + (word % 4) * 32 + word // 4
        mask = is_tile[:, None] & (line < stored)[None, :]
        bits = tl.load(s + tiles[:, None] * stride + line[None, :], mask=mask, other=0)
    code = (bits >> 23) & 0xFF
    four = tl.broadcast_to(code | (code << 8) | (code << 16) | (code << 24), (TILES, BLOCK))
    places = (outer * tiles_inner + tiles)[:, None] * BLOCK + word[None, :]
    tl.store(codes + places, four, mask=tl.broadcast_to(is_tile[:, None], (TILES, BLOCK)))


@Kernel
@triton.jit
def e8m0_scales_kernel(
    s_a, codes_a, stored_a, stride_a, programs_a, s_b, codes_b, stored_b, stride_b, tiles_inner,
    SQUARE_A: tl.constexpr, SQUARE_B: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`turn` of a in the first programs_a programs, of b in the rest."""
    pid = tl.program_id(0)
    if pid < programs_a:
        turn(s_a, codes_a, pid, tiles_inner, stored_a, stride_a, SQUARE_A, TILES, BLOCK)
    else:
        turn(s_b, codes_b, pid - programs_a, tiles_inner, stored_b, stride_b, SQUARE_B, TILES, BLOCK)


def e8m0_scales(
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    m: int,
    n: int,
    k: int,
    *,
    square_a: bool = False,
    square_b: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.e8m0_scales`."""
    (of_a, programs_a), (of_b, programs_b) = (_new_codes(s, outer, k) for s, outer in ((scale_inv_a, m), (scale_inv_b, n)))
    if programs_a + programs_b:
        with on_device(scale_inv_a):
            e8m0_scales_kernel[(programs_a + programs_b,)](
                *_arguments(scale_inv_a, of_a), programs_a, *_arguments(scale_inv_b, of_b), cdiv(k, BLOCK),
                SQUARE_A=square_a, SQUARE_B=square_b, TILES=TILES, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    return of_a, of_b


def _new_codes(scale_inv: torch.Tensor, outer: int, inner: int) -> tuple[torch.Tensor, int]:
    """Codes to be filled, and how many programs do so."""
    rows, cols, *tile = reference.gemm_ready_scale_shape(outer, inner)
    return scale_inv.new_empty((rows, cols, *tile), dtype=torch.uint8), rows * cdiv(cols, TILES)


def _arguments(scale_inv: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return scale_inv.view(torch.int32), codes.view(torch.int32), scale_inv.shape[1], scale_inv.stride(0)
