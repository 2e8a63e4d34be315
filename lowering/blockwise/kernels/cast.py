"""Blockwise quantization: a tile is read once, and every copy of it written in its final layout, with its scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lowering.blockwise.reference import as_matrix, compact_scale_shape, gemm_ready_scale_shape
from lowering.formats import BLOCK, Granularity, fp8_max, largest_finite, pad_to_alignment
from lowering.triton.launch import cdiv, is_e5m2, on_device
from lowering.triton.tile import INF_BITS, fp8_bits, largest, magnitude_bits

#: Rows, columns and warps of a tile, by what a launch writes. A tile holds whole blocks, which need not make it square.
SQUARE_TILE = (BLOCK, BLOCK, 8)
ROWWISE_TILE = (32, BLOCK, 4)
COLUMNWISE_TILE = (BLOCK, 64, 4)


@triton.jit
def block_scale(amax_bits, overflow_scale, epsilon, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr):
    """`reference.scale_from_amax` of blocks whose largest magnitudes have the float32 bits `amax_bits`."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    amax = tl.where(amax < epsilon, epsilon, amax)
    scale = tl.div_rn(FP8_MAX, amax)
    scale = tl.where(scale.to(tl.int32, bitcast=True) == INF_BITS, overflow_scale, scale)
    scale = tl.where((amax == 0.0) | (amax_bits >= INF_BITS), 1.0, scale)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & -0x00800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def store_line_scales(scale_inv, inv, lines, num_lines, stored_lines, block, stride_line, stride_block):
    """One factor per line (row or column) of a tile, zeros for the padding lines."""
    pointers = scale_inv + lines * stride_line + block * stride_block
    tl.store(pointers, tl.where(lines < num_lines, inv, 0.0), mask=lines < stored_lines)


@triton.jit
def store_grid_scale(scale_inv, inv, outer, inner, num_inner, stored_inner, stride_outer, stride_inner):
    """The factor of one 128x128 block; the last block of a line also writes the zeros behind it (at most 3)."""
    ahead = tl.arange(0, 4)
    mask = (ahead == 0) | ((inner == num_inner - 1) & (inner + ahead < stored_inner))
    pointers = scale_inv + outer * stride_outer + (inner + ahead) * stride_inner
    tl.store(pointers, tl.where(ahead == 0, inv, 0.0), mask=mask)


@triton.jit
def store_tile(q, bits, r, c, stored_rows, stored_cols, stride_r, stride_c):
    mask = (r < stored_rows)[:, None] & (c < stored_cols)[None, :]
    tl.store(q + r[:, None] * stride_r + c[None, :] * stride_c, bits, mask=mask)


@triton.jit
def cast_blockwise_kernel(
    x, rows, cols, stride_r, stride_c, overflow_scale, epsilon,
    q_row, q_row_rows, q_row_cols, q_row_stride_r, q_row_stride_c,
    s_row, s_row_stored, s_row_stride_outer, s_row_stride_block,
    q_col, q_col_rows, q_col_cols, q_col_stride_r, q_col_stride_c,
    s_col, s_col_stored, s_col_stride_outer, s_col_stride_block,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, BLOCK_DIMS: tl.constexpr,
    E5M2: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """FP8 copies of x [rows, cols] and the reciprocals of their scales, any strides.

    q_row, q_col: uint8, indexed by row and column of x, sizes rounded up; zeros beyond x. Scales of a copy [outer,
    inner] are indexed by outer (1D: a line, 2D: a block) and block along inner. s_*_stored: 1D, lines stored, padding
    included; 2D, blocks along inner stored.
    """
    tile = tl.program_id(0).to(tl.int64)
    tiles_c = tl.cdiv(cols, BLOCK_C)
    tile_r = tile // tiles_c
    tile_c = tile % tiles_c
    r = tile_r * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    value = tl.load(x + r[:, None] * stride_r + c[None, :] * stride_c, mask=mask, other=0.0).to(tl.float32)
    magnitude = magnitude_bits(value)
    if BLOCK_DIMS == 2:
        scale = block_scale(largest(magnitude), overflow_scale, epsilon, FP8_MAX, POWER_OF_2)
        inv = tl.div_rn(1.0, scale)
        bits = fp8_bits(value, scale, E5M2)
        if ROWWISE:
            store_tile(q_row, bits, r, c, q_row_rows, q_row_cols, q_row_stride_r, q_row_stride_c)
            store_grid_scale(s_row, inv, tile_r, tile_c, tiles_c, s_row_stored, s_row_stride_outer, s_row_stride_block)
        if COLUMNWISE:
            tiles_r = tl.cdiv(rows, BLOCK_R)
            store_tile(q_col, bits, r, c, q_col_rows, q_col_cols, q_col_stride_r, q_col_stride_c)
            store_grid_scale(s_col, inv, tile_c, tile_r, tiles_r, s_col_stored, s_col_stride_outer, s_col_stride_block)
    else:
        if ROWWISE:
            scale = block_scale(tl.max(magnitude, axis=1), overflow_scale, epsilon, FP8_MAX, POWER_OF_2)
            inv = tl.div_rn(1.0, scale)
            bits = fp8_bits(value, scale[:, None], E5M2)
            store_tile(q_row, bits, r, c, q_row_rows, q_row_cols, q_row_stride_r, q_row_stride_c)
            store_line_scales(s_row, inv, r, rows, s_row_stored, tile_c, s_row_stride_outer, s_row_stride_block)
        if COLUMNWISE:
            scale = block_scale(tl.max(magnitude, axis=0), overflow_scale, epsilon, FP8_MAX, POWER_OF_2)
            inv = tl.div_rn(1.0, scale)
            bits = fp8_bits(value, scale[None, :], E5M2)
            store_tile(q_col, bits, r, c, q_col_rows, q_col_cols, q_col_stride_r, q_col_stride_c)
            store_line_scales(s_col, inv, c, cols, s_col_stored, tile_r, s_col_stride_outer, s_col_stride_block)


class Copy(NamedTuple):
    """Where one copy of a matrix goes: the views the kernel indexes, and the tensors the caller returns.

    q: uint8 view indexed by row and column of x. scale_inv: view indexed by outer and by block of the copy; 1D [stored
    lines, blocks], 2D [blocks, stored blocks].
    """

    q: torch.Tensor
    scale_inv: torch.Tensor

    def arguments(self, granularity: str) -> tuple[object, ...]:
        stored = self.scale_inv.shape[1 if granularity == Granularity.BLOCK_128X128 else 0]
        return self.q, *self.q.shape, *self.q.stride(), self.scale_inv, stored, *self.scale_inv.stride()


def tile_of(granularity: str, rowwise: bool, columnwise: bool) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps."""
    if granularity == Granularity.BLOCK_128X128 or (rowwise and columnwise):
        return SQUARE_TILE
    return ROWWISE_TILE if rowwise else COLUMNWISE_TILE


def launch(
    x: torch.Tensor,
    dtype: torch.dtype,
    granularity: str,
    rowwise: Copy | None,
    columnwise: Copy | None,
    power_of_2: bool,
    epsilon: float,
) -> None:
    """Fill the given copies of the matrix x, every element of them."""
    if x.numel() == 0:
        for copy in (rowwise, columnwise):
            if copy is not None:
                copy.q.zero_()
                copy.scale_inv.zero_()
        return
    block_r, block_c, num_warps = tile_of(granularity, rowwise is not None, columnwise is not None)
    unused = (rowwise or columnwise).arguments(granularity)  # type: ignore[union-attr]
    block_dims = 2 if granularity == Granularity.BLOCK_128X128 else 1
    with on_device(x):
        cast_blockwise_kernel[(cdiv(x.shape[0], block_r) * cdiv(x.shape[1], block_c),)](
            x, *x.shape, *x.stride(), largest_finite(x.dtype), epsilon,
            *(rowwise.arguments(granularity) if rowwise else unused),
            *(columnwise.arguments(granularity) if columnwise else unused),
            ROWWISE=rowwise is not None, COLUMNWISE=columnwise is not None, BLOCK_DIMS=block_dims,
            E5M2=is_e5m2(dtype), FP8_MAX=fp8_max(dtype), POWER_OF_2=power_of_2,
            BLOCK_R=block_r, BLOCK_C=block_c, num_warps=num_warps,
        )  # fmt: skip


def _gemm_ready(
    x: torch.Tensor, dtype: torch.dtype, granularity: str, columnwise: bool, pad_outer: bool
) -> tuple[Copy, tuple[torch.Tensor, torch.Tensor]]:
    """A GEMM-ready copy of x to be filled, and its tensors as they are returned."""
    outer, inner = (x.shape[1], x.shape[0]) if columnwise else (x.shape[0], x.shape[1])
    outer = pad_to_alignment(outer) if pad_outer else outer
    q = torch.empty((outer, pad_to_alignment(inner)), dtype=torch.uint8, device=x.device)
    scale_shape = gemm_ready_scale_shape(outer, inner, granularity)
    scale_inv = torch.empty(scale_shape, dtype=torch.float32, device=x.device)
    copy = Copy(q.t() if columnwise else q, scale_inv if granularity == Granularity.BLOCK_128X128 else scale_inv.t())
    return copy, (q.view(dtype), scale_inv)


def _compact(
    x: torch.Tensor, dtype: torch.dtype, granularity: str, columnwise: bool
) -> tuple[Copy, tuple[torch.Tensor, torch.Tensor]]:
    """A compact, untransposed copy of x to be filled, and its tensors as they are returned."""
    outer, inner = (x.shape[1], x.shape[0]) if columnwise else (x.shape[0], x.shape[1])
    scale_shape = compact_scale_shape(outer, inner, granularity)
    scale_inv = torch.empty(scale_shape[::-1] if columnwise else scale_shape, dtype=torch.float32, device=x.device)
    q = torch.empty(tuple(x.shape), dtype=torch.uint8, device=x.device)
    return Copy(q, scale_inv.t() if columnwise else scale_inv), (q.view(dtype), scale_inv)


def quantize_blockwise(
    x: torch.Tensor, dtype: torch.dtype, block: Sequence[int], *, power_of_2: bool = True, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.quantize_blockwise`."""
    matrix = as_matrix(x)
    granularity = Granularity.of_block(block)
    copy, (q, scale_inv) = _compact(matrix, dtype, granularity, columnwise=False)
    launch(matrix, dtype, granularity, copy, None, power_of_2, epsilon)
    return q.view(x.shape), scale_inv


def cast_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    granularity: str,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.cast_blockwise`."""
    copy, tensors = _gemm_ready(x, dtype, granularity, columnwise, pad_outer)
    launch(x, dtype, granularity, None if columnwise else copy, copy if columnwise else None, power_of_2, epsilon)
    return tensors


def cast_transpose_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    granularity: str,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference.cast_transpose_blockwise`."""
    rowwise, row_tensors = _gemm_ready(x, dtype, granularity, False, pad_rows)
    columnwise, col_tensors = _gemm_ready(x, dtype, granularity, True, pad_cols)
    launch(x, dtype, granularity, rowwise, columnwise, power_of_2, epsilon)
    return *row_tensors, *col_tensors


def compact_blockwise(
    x: torch.Tensor, dtype: torch.dtype, *, granularity: str, power_of_2: bool = True, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference.compact_blockwise`."""
    rowwise, row_tensors = _compact(x, dtype, granularity, columnwise=False)
    columnwise, col_tensors = _compact(x, dtype, granularity, columnwise=True)
    launch(x, dtype, granularity, rowwise, columnwise, power_of_2, epsilon)
    return *row_tensors, *col_tensors
