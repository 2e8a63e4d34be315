"""Casts of stacks [E, R, C]: the kernels of single matrices are called on the pointers of one, which is the second dimension of
the grid."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lowering.formats import fp8_max, pad_to_alignment
from lowering.rowwise.kernels.passes import BLOCK_C, BLOCK_R, NUM_WARPS, amax_kernel, cast_kernel
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, is_e5m2, on_device

_amax_kernel, _cast_kernel = amax_kernel.jit, cast_kernel.jit


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


def fill(
    x: torch.Tensor,
    dtype: torch.dtype,
    row: tuple[torch.Tensor, torch.Tensor] | None,
    col: tuple[torch.Tensor, torch.Tensor] | None,
    power_of_2: bool,
    epsilon: float,
) -> None:
    """Fill the copies of a stack that is not empty: uint8 data and float32 scales of each."""
    count, rows, cols = x.shape
    lines = rows * (row is not None) + cols * (col is not None)
    rows16, cols16 = pad_to_alignment(rows), pad_to_alignment(cols)
    tiles_r, tiles_c = cdiv(rows16, BLOCK_R), cdiv(cols16, BLOCK_C)
    flags: dict[str, Any] = {"ROWWISE": row is not None, "COLUMNWISE": col is not None}
    flags |= {"BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C, "num_warps": NUM_WARPS}
    first, second = row or col, col or row  # a copy that is not asked for is not touched
    assert first is not None
    assert second is not None
    with on_device(x):
        amaxes = torch.zeros((count, lines), dtype=torch.int32, device=x.device)
        amax_lines_stack_kernel[(tiles_r * tiles_c, count)](x, amaxes, rows, cols, tiles_c, *x.stride(), lines, **flags)
        cast_lines_stack_kernel[(tiles_r * tiles_c, count)](
            x, amaxes, *first, *second, rows, cols, rows16, cols16, first[0].shape[1], second[0].shape[1],
            tiles_c, *x.stride(), lines, epsilon,
            E5M2=is_e5m2(dtype), FP8_MAX=fp8_max(dtype), POWER_OF_2=power_of_2, **flags,
        )  # fmt: skip
