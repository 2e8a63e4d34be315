"""Casts of stacks [E, R, C] whose scales belong to rows or blocks: as in `stacks.py`, the kernels of single matrices."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lowering.blockwise.kernels import cast as blockwise
from lowering.formats import Granularity, fp8_max, largest_finite, pad_to_alignment
from lowering.grouped import cast_reference
from lowering.grouped.kernels.stacks import empty_copies, is_column_major
from lowering.grouped.layouts import scale_shape
from lowering.rowwise.kernels import passes as rowwise_kernels
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, is_e5m2, is_whole, on_device

_amax_kernel, _cast_kernel = rowwise_kernels.amax_kernel.jit, rowwise_kernels.cast_kernel.jit
_cast_blockwise_kernel = blockwise.cast_blockwise_kernel.jit

# -- one scale per row


@Kernel
@triton.jit
def amax_lines_stack_kernel(
    x, amaxes, rows, cols, tiles_c, stride_e, stride_r, stride_c, num_lines,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    _amax_kernel(
        x + e * stride_e, amaxes + e * num_lines, rows, cols, tiles_c, stride_r, stride_c, ROWWISE, COLUMNWISE, BLOCK_R, BLOCK_C
    )


@Kernel
@triton.jit
def cast_lines_stack_kernel(
    x, amaxes, q_row, s_row, q_col, s_col,
    rows, cols, rows16, cols16, stored_rows, stored_cols, tiles_c, stride_e, stride_r, stride_c, num_lines, epsilon,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, E5M2: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    _cast_kernel(
        x + e * stride_e, amaxes + e * num_lines, q_row + e * stored_rows * cols16, s_row + e * stored_rows,
        q_col + e * stored_cols * rows16, s_col + e * stored_cols,
        rows, cols, rows16, cols16, stored_rows, stored_cols, tiles_c, stride_r, stride_c, epsilon,
        ROWWISE, COLUMNWISE, E5M2, FP8_MAX, POWER_OF_2, BLOCK_R, BLOCK_C,
    )  # fmt: skip


def _cast_lines(
    x: torch.Tensor,
    dtype: torch.dtype,
    rowwise: torch.Tensor | None,
    columnwise: torch.Tensor | None,
    power_of_2: bool,
    epsilon: float,
) -> list[torch.Tensor]:
    """Fill the uint8 copies of a stack that is not empty; returns their scales."""
    count, rows, cols = x.shape
    copies = [copy for copy in (rowwise, columnwise) if copy is not None]
    scales = [torch.empty((*copy.shape[:2], 1), dtype=torch.float32, device=x.device) for copy in copies]
    lines = rows * (rowwise is not None) + cols * (columnwise is not None)
    block_r, block_c = rowwise_kernels.BLOCK_R, rowwise_kernels.BLOCK_C
    rows16, cols16 = pad_to_alignment(rows), pad_to_alignment(cols)
    tiles_r, tiles_c = cdiv(rows16, block_r), cdiv(cols16, block_c)
    flags: dict[str, Any] = {"ROWWISE": rowwise is not None, "COLUMNWISE": columnwise is not None}
    flags |= {"BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": rowwise_kernels.NUM_WARPS}
    places = [(copies[0], scales[0]), (copies[-1], scales[-1])]  # a copy that is not asked for is not touched
    with on_device(x):
        amaxes = torch.zeros((count, lines), dtype=torch.int32, device=x.device)
        amax_lines_stack_kernel[(tiles_r * tiles_c, count)](x, amaxes, rows, cols, tiles_c, *x.stride(), lines, **flags)
        cast_lines_stack_kernel[(tiles_r * tiles_c, count)](
            x, amaxes, *places[0], *places[1], rows, cols, rows16, cols16, places[0][0].shape[1], places[1][0].shape[1],
            tiles_c, *x.stride(), lines, epsilon,
            E5M2=is_e5m2(dtype), FP8_MAX=fp8_max(dtype), POWER_OF_2=power_of_2, **flags,
        )  # fmt: skip
    return scales


def cast_stack_rowwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `cast_reference.cast_stack_rowwise`."""
    if x.numel() == 0:  # nothing to launch; lines of no elements have the scale of amax 0
        options: dict[str, Any] = {"power_of_2": power_of_2, "epsilon": epsilon}
        return cast_reference.cast_stack_rowwise(x, dtype, columnwise=columnwise, pad_outer=pad_outer, **options)
    copies = empty_copies(x, columnwise, pad_outer)
    row, col = (None, copies) if columnwise else (copies, None)
    (scales,) = _cast_lines(x, dtype, row, col, power_of_2, epsilon)
    return copies.view(dtype), scales


def cast_transpose_stack_rowwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `cast_reference.cast_transpose_stack_rowwise`."""
    if x.numel() == 0:
        options: dict[str, Any] = {"power_of_2": power_of_2, "epsilon": epsilon}
        return cast_reference.cast_transpose_stack_rowwise(x, dtype, pad_rows=pad_rows, pad_cols=pad_cols, **options)
    row, col = empty_copies(x, False, pad_rows), empty_copies(x, True, pad_cols)
    row_scales, col_scales = _cast_lines(x, dtype, row, col, power_of_2, epsilon)
    return row.view(dtype), row_scales, col.view(dtype), col_scales


# -- one scale per block


@Kernel
@triton.jit
def cast_blockwise_stack_kernel(
    x, rows, cols, stride_r, stride_c, overflow_scale, epsilon,
    q_row, q_row_rows, q_row_cols, q_row_stride_r, q_row_stride_c,
    s_row, s_row_stored, s_row_stride_outer, s_row_stride_block,
    q_col, q_col_rows, q_col_cols, q_col_stride_r, q_col_stride_c,
    s_col, s_col_stored, s_col_stride_outer, s_col_stride_block,
    next_x, next_q_row, next_s_row, next_q_col, next_s_col,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, TURN_ROWWISE: tl.constexpr, TURN_COLUMNWISE: tl.constexpr,
    BLOCK_DIMS: tl.constexpr, E5M2: tl.constexpr, HAS_EPSILON: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """next_*: elements from a matrix, a copy, the scales of a copy to the next."""
    e = tl.program_id(1).to(tl.int64)
    _cast_blockwise_kernel(
        x + e * next_x, rows, cols, stride_r, stride_c, overflow_scale, epsilon,
        q_row + e * next_q_row, q_row_rows, q_row_cols, q_row_stride_r, q_row_stride_c,
        s_row + e * next_s_row, s_row_stored, s_row_stride_outer, s_row_stride_block,
        q_col + e * next_q_col, q_col_rows, q_col_cols, q_col_stride_r, q_col_stride_c,
        s_col + e * next_s_col, s_col_stored, s_col_stride_outer, s_col_stride_block,
        ROWWISE, COLUMNWISE, TURN_ROWWISE, TURN_COLUMNWISE, BLOCK_DIMS, E5M2, HAS_EPSILON, FP8_MAX, POWER_OF_2,
        WHOLE, BLOCK_R, BLOCK_C,
    )  # fmt: skip


def _cast_blocks(
    x: torch.Tensor,
    dtype: torch.dtype,
    granularity: str,
    rowwise: torch.Tensor | None,
    columnwise: torch.Tensor | None,
    power_of_2: bool,
    epsilon: float,
) -> list[torch.Tensor]:
    """Fill the uint8 copies; returns their compact scales."""
    is_square = granularity == Granularity.BLOCK_128X128
    scales: list[torch.Tensor] = []
    copies: list[blockwise.Copy | None] = []
    for q, is_turned in ((rowwise, False), (columnwise, True)):
        if q is None:
            copies.append(None)
            continue
        outer, inner = (x.shape[2], x.shape[1]) if is_turned else (x.shape[1], x.shape[2])
        shape = scale_shape(outer if is_square else q.shape[1], inner, granularity)
        scales.append(torch.empty((x.shape[0], *shape), dtype=torch.float32, device=x.device))
        copies.append(blockwise.Copy(q.mT if is_turned else q, scales[-1]))
    if x.numel() == 0:
        for tensor in (*scales, *(q for q in (rowwise, columnwise) if q is not None)):
            tensor.zero_()
        return scales
    if is_column_major(x):
        x, copies = x.mT, [None if copy is None else copy._replace(q=copy.q.mT) for copy in reversed(copies)]
    _launch_blocks(x, dtype, granularity, copies[0], copies[1], power_of_2, epsilon)
    return scales


def _launch_blocks(
    x: torch.Tensor,
    dtype: torch.dtype,
    granularity: str,
    row: blockwise.Copy | None,
    col: blockwise.Copy | None,
    power_of_2: bool,
    epsilon: float,
) -> None:
    block_r, block_c, num_warps = blockwise.tile_of(granularity, row is not None, col is not None)
    # A copy that is not asked for is not touched.
    stacks = [copy for copy in (row or col, col or row) if copy is not None]
    first = [blockwise.Copy(copy.q[0], copy.scale_inv[0]) for copy in stacks]
    matrix = x[0]
    turned = [copy is not None and copy.q.stride(1) == 1 and copy.q.stride(2) != 1 for copy in (row, col)]
    with on_device(x):
        cast_blockwise_stack_kernel[(cdiv(matrix.shape[0], block_r) * cdiv(matrix.shape[1], block_c), x.shape[0])](
            x, *matrix.shape, *matrix.stride(), largest_finite(x.dtype), epsilon,
            *first[0].arguments(granularity), *first[1].arguments(granularity),
            x.stride(0), stacks[0].q.stride(0), stacks[0].scale_inv.stride(0),
            stacks[1].q.stride(0), stacks[1].scale_inv.stride(0),
            ROWWISE=row is not None, COLUMNWISE=col is not None, TURN_ROWWISE=turned[0], TURN_COLUMNWISE=turned[1],
            BLOCK_DIMS=2 if granularity == Granularity.BLOCK_128X128 else 1, E5M2=is_e5m2(dtype),
            HAS_EPSILON=epsilon != 0, FP8_MAX=fp8_max(dtype), POWER_OF_2=power_of_2,
            WHOLE=is_whole([matrix, *(copy.q for copy in first)], block_r, block_c),
            BLOCK_R=block_r, BLOCK_C=block_c, num_warps=num_warps,
        )  # fmt: skip


def cast_stack_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    granularity: str,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `cast_reference.cast_stack_blockwise`."""
    copies = empty_copies(x, columnwise, pad_outer)
    row, col = (None, copies) if columnwise else (copies, None)
    (scales,) = _cast_blocks(x, dtype, granularity, row, col, power_of_2, epsilon)
    return copies.view(dtype), scales


def cast_transpose_stack_blockwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    granularity: str,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `cast_reference.cast_transpose_stack_blockwise`."""
    row, col = empty_copies(x, False, pad_rows), empty_copies(x, True, pad_cols)
    row_scales, col_scales = _cast_blocks(x, dtype, granularity, row, col, power_of_2, epsilon)
    return row.view(dtype), row_scales, col.view(dtype), col_scales
