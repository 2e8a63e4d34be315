"""Casts of stacks [E, R, C]: the kernel of single matrices is called on the pointers of one, which is the second dimension of
the grid."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.blockwise.kernels.cast import Copy, cast_blockwise_kernel, tile_of
from lowering.copies import is_column_major
from lowering.formats import Granularity, fp8_max, largest_finite
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, is_e5m2, is_whole, on_device

_cast_blockwise_kernel = cast_blockwise_kernel.jit


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


def launch(
    x: torch.Tensor,
    dtype: torch.dtype,
    granularity: str,
    row: Copy | None,
    col: Copy | None,
    power_of_2: bool,
    epsilon: float,
) -> None:
    """Fill the given copies of a stack and their compact scales."""
    if x.numel() == 0:  # and so are its copies and scales
        return
    if is_column_major(x):  # the copies of a column-major stack are the other copies of its transposes
        row, col = (None if copy is None else copy._replace(q=copy.q.mT) for copy in (col, row))
        x = x.mT
    block_r, block_c, num_warps = tile_of(granularity, row is not None, col is not None)
    # A copy that is not asked for is not touched.
    stacks = [copy for copy in (row or col, col or row) if copy is not None]
    first = [Copy(copy.q[0], copy.scale_inv[0]) for copy in stacks]
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
