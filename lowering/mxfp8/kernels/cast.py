"""Quantization to MXFP8: a tile is read once, and every copy of it written in its final layout, with its scales.

A tile of 128x128 holds 4 blocks in either direction: what one GEMM-ready tile of scales describes, for both copies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lowering.formats import BLOCK, MX_BLOCK, fp8_max, pad_to_alignment, round_up
from lowering.mxfp8.reference import compact_scale_shape, gemm_ready_scale_shape
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, is_e5m2, on_device
from lowering.triton.tile import INF_BITS, as_float32, finite_bits, magnitude_bits, tiles_of

NUM_WARPS = 8


@triton.jit
def e8m0_code(amax_bits, FP8_MAX: tl.constexpr):
    """`reference.e8m0_from_amax` of amaxes with the float32 bits `amax_bits`, as int32."""
    bits = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), FP8_MAX).to(tl.int32, bitcast=True)
    exponent = bits >> 23
    least = tl.where(exponent == 0, 0x400000, 0)
    code = exponent + ((bits & 0x7FFFFF) > least).to(tl.int32)
    return tl.where(amax_bits == INF_BITS, 254, tl.where(amax_bits > INF_BITS, 255, code))


@triton.jit
def factor_of(code):
    """`reference.factors` of int32 codes."""
    bits = tl.where(code == 254, 0x400000, (254 - code) << 23)
    bits = tl.where(code == 0, 0x3F800000, tl.where(code == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_data(q, bits, valid, r, c, stored_rows, stored_cols, stride_r, stride_c):
    """The bits where x is, zeros around them: beside a NaN the product with 0.0 is NaN, too."""
    bits = tl.where(valid, bits, 0).to(tl.uint8)
    mask = (r < stored_rows)[:, None] & (c < stored_cols)[None, :]
    tl.store(q + r[:, None] * stride_r + c[None, :] * stride_c, bits, mask=mask)


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
    E5M2: tl.constexpr, FP8_MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """FP8 copies of x [rows, cols] and their codes, any strides.

    q_row, q_col: uint8, indexed by row and column of x, sizes rounded up; zeros beyond x. s_row, s_col: GEMM-ready
    (SWIZZLED), or compact and indexed by outer (SQUARE: by 32 of them) and by block along inner of the copy.
    """
    tile = tl.program_id(0).to(tl.int64)
    tiles_c = tiles_of(cols, BLOCK)
    tiles_r = tiles_of(rows, BLOCK)
    tile_r = tile // tiles_c
    tile_c = tile % tiles_c
    r = tile_r * BLOCK + tl.arange(0, BLOCK)
    c = tile_c * BLOCK + tl.arange(0, BLOCK)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    value = as_float32(tl.load(x + r[:, None] * stride_r + c[None, :] * stride_c, mask=mask, other=0.0))
    magnitude = magnitude_bits(value)
    blocks_r = tiles_of(rows, 32)
    blocks_c = tiles_of(cols, 32)
    if SQUARE:
        lines = tl.max(tl.reshape(magnitude, (BLOCK, 4, 32)), axis=2)
        code = e8m0_code(tl.max(tl.reshape(lines, (4, 32, 4)), axis=1), FP8_MAX)  # [block of rows, block of columns]
        factor = tl.broadcast_to(factor_of(code)[:, None, :, None], (4, 32, 4, 32))
        bits = finite_bits(value * tl.reshape(factor, (BLOCK, BLOCK)), E5M2)
        if ROWWISE:
            store_data(q_row, bits, mask, r, c, q_row_rows, q_row_cols, q_row_stride_r, q_row_stride_c)
            if SWIZZLED:
                spread = tl.reshape(tl.broadcast_to(code[:, None, :], (4, 32, 4)), (BLOCK, 4))
                store_scales(s_row, spread, tile_r, tile_c, rows, blocks_c, tiles_c, 0, 0, BLOCK, True, BLOCK)
            else:
                store_scales(
                    s_row, code, tile_r, tile_c, blocks_r, blocks_c, tiles_c, s_row_stride_outer, s_row_stride_block,
                    4, False, BLOCK,
                )  # fmt: skip
        if COLUMNWISE:
            store_data(q_col, bits, mask, r, c, q_col_rows, q_col_cols, q_col_stride_r, q_col_stride_c)
            code = tl.trans(code)
            if SWIZZLED:
                spread = tl.reshape(tl.broadcast_to(code[:, None, :], (4, 32, 4)), (BLOCK, 4))
                store_scales(s_col, spread, tile_c, tile_r, cols, blocks_r, tiles_r, 0, 0, BLOCK, True, BLOCK)
            else:
                store_scales(
                    s_col, code, tile_c, tile_r, blocks_c, blocks_r, tiles_r, s_col_stride_outer, s_col_stride_block,
                    4, False, BLOCK,
                )  # fmt: skip
    else:
        if ROWWISE:
            code = e8m0_code(tl.max(tl.reshape(magnitude, (BLOCK, 4, 32)), axis=2), FP8_MAX)  # [row, block]
            factor = tl.broadcast_to(factor_of(code)[:, :, None], (BLOCK, 4, 32))
            bits = finite_bits(value * tl.reshape(factor, (BLOCK, BLOCK)), E5M2)
            store_data(q_row, bits, mask, r, c, q_row_rows, q_row_cols, q_row_stride_r, q_row_stride_c)
            store_scales(
                s_row, code, tile_r, tile_c, rows, blocks_c, tiles_c, s_row_stride_outer, s_row_stride_block,
                BLOCK, SWIZZLED, BLOCK,
            )  # fmt: skip
        if COLUMNWISE:
            code = e8m0_code(tl.max(tl.reshape(magnitude, (4, 32, BLOCK)), axis=1), FP8_MAX)  # [block, column]
            factor = tl.broadcast_to(factor_of(code)[:, None, :], (4, 32, BLOCK))
            bits = finite_bits(value * tl.reshape(factor, (BLOCK, BLOCK)), E5M2)
            store_data(q_col, bits, mask, r, c, q_col_rows, q_col_cols, q_col_stride_r, q_col_stride_c)
            store_scales(
                s_col, tl.trans(code), tile_c, tile_r, cols, blocks_r, tiles_r, s_col_stride_outer, s_col_stride_block,
                BLOCK, SWIZZLED, BLOCK,
            )  # fmt: skip


class Copy(NamedTuple):
    """Where one copy of a matrix goes: views that the kernel indexes.

    q: uint8, by row and column of x. scale: by outer and block of the copy; GEMM-ready, the memory.
    """

    q: torch.Tensor
    scale: torch.Tensor

    def arguments(self) -> tuple[object, ...]:
        return self.q, *self.q.shape, *self.q.stride(), self.scale, *self.scale.stride()[:2]


def launch(
    x: torch.Tensor, dtype: torch.dtype, square: bool, swizzled: bool, rowwise: Copy | None, columnwise: Copy | None
) -> None:
    """Fill the given copies of the matrix x, every element of them."""
    if x.numel() == 0:
        for copy in (rowwise, columnwise):
            if copy is not None:
                copy.q.zero_()
                copy.scale.zero_()
        return
    unused = (rowwise or columnwise).arguments()  # type: ignore[union-attr]
    with on_device(x):
        cast_mxfp8_kernel[(cdiv(x.shape[0], BLOCK) * cdiv(x.shape[1], BLOCK),)](
            x, *x.shape, *x.stride(),
            *(rowwise.arguments() if rowwise else unused), *(columnwise.arguments() if columnwise else unused),
            ROWWISE=rowwise is not None, COLUMNWISE=columnwise is not None, SQUARE=square, SWIZZLED=swizzled,
            E5M2=is_e5m2(dtype), FP8_MAX=fp8_max(dtype), BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip


def _gemm_ready(
    x: torch.Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool
) -> tuple[Copy, tuple[torch.Tensor, torch.Tensor]]:
    """A GEMM-ready copy of x to be filled, and its tensors as they are returned."""
    outer, inner = (x.shape[1], x.shape[0]) if columnwise else (x.shape[0], x.shape[1])
    outer = pad_to_alignment(outer) if pad_outer else outer
    q = torch.empty((outer, round_up(inner, MX_BLOCK)), dtype=torch.uint8, device=x.device)
    scale = torch.empty(gemm_ready_scale_shape(outer, inner), dtype=torch.uint8, device=x.device)
    return Copy(q.t() if columnwise else q, scale), (q.view(dtype), scale)


def _compact(
    x: torch.Tensor, dtype: torch.dtype, square: bool, columnwise: bool
) -> tuple[Copy, tuple[torch.Tensor, torch.Tensor]]:
    """A compact, untransposed copy of x to be filled, and its tensors as they are returned."""
    outer, inner = (x.shape[1], x.shape[0]) if columnwise else (x.shape[0], x.shape[1])
    shape = compact_scale_shape(outer, inner, square)
    codes = torch.empty(shape[::-1] if columnwise else shape, dtype=torch.uint8, device=x.device)
    q = torch.empty(tuple(x.shape), dtype=torch.uint8, device=x.device)
    return Copy(q, codes.t() if columnwise else codes), (q.view(dtype), codes)


def quantize_mxfp8(x: torch.Tensor, dtype: torch.dtype, *, square: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.quantize_mxfp8`."""
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    matrix = x.reshape(rows, x.shape[-1])
    copy, (q, codes) = _compact(matrix, dtype, square, columnwise=False)
    launch(matrix, dtype, square, False, copy, None)
    return q.view(x.shape), codes


def cast_mxfp8(
    x: torch.Tensor, dtype: torch.dtype, *, square: bool = False, columnwise: bool = False, pad_outer: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.cast_mxfp8`."""
    copy, tensors = _gemm_ready(x, dtype, columnwise, pad_outer)
    launch(x, dtype, square, True, None if columnwise else copy, copy if columnwise else None)
    return tensors


def cast_transpose_mxfp8(
    x: torch.Tensor, dtype: torch.dtype, *, square: bool = False, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference.cast_transpose_mxfp8`."""
    rowwise, row_tensors = _gemm_ready(x, dtype, False, pad_rows)
    columnwise, col_tensors = _gemm_ready(x, dtype, True, pad_cols)
    launch(x, dtype, square, True, rowwise, columnwise)
    return *row_tensors, *col_tensors


def compact_mxfp8(
    x: torch.Tensor, dtype: torch.dtype, *, square: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference.compact_mxfp8`."""
    rowwise, row_tensors = _compact(x, dtype, square, columnwise=False)
    columnwise, col_tensors = _compact(x, dtype, square, columnwise=True)
    launch(x, dtype, square, False, rowwise, columnwise)
    return *row_tensors, *col_tensors
