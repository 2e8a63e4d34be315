"""Casts of stacks [E, R, C] with one scale per matrix.

The kernels of single matrices are called on the pointers of one matrix, which is the second dimension of the grid: there is one
place that quantizes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lowering.copies import is_column_major
from lowering.formats import pad_to_alignment
from lowering.tensorwise.kernels import amax as amax_kernels
from lowering.tensorwise.kernels import cast as cast_kernels
from lowering.tensorwise.kernels import cast_transpose as both_kernels
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, on_device

_partial_amax_kernel, _finish_amax_kernel = amax_kernels.partial_amax_kernel.jit, amax_kernels.finish_amax_kernel.jit
_cast_kernel, _cast_transpose_kernel = cast_kernels.cast_kernel.jit, both_kernels.cast_transpose_kernel.jit


@Kernel
@triton.jit
def partial_amax_stack_kernel(
    x, partials, rows, cols, stride_e, stride_r, stride_c, num_tiles, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    e = tl.program_id(1).to(tl.int64)
    _partial_amax_kernel(x + e * stride_e, partials + e * num_tiles, rows, cols, stride_r, stride_c, BLOCK_R, BLOCK_C)


@Kernel
@triton.jit(do_not_specialize=["count"])
def finish_amax_stack_kernel(partials, out, count, BLOCK: tl.constexpr):
    e = tl.program_id(0).to(tl.int64)
    _finish_amax_kernel(partials + e * count, out + e, count, BLOCK)


@Kernel
@triton.jit(do_not_specialize=["scale"])
def cast_stack_kernel(
    x, scale, out, partials, rows, cols, out_rows, out_cols, stride_e, stride_r, stride_c, scale_stride, num_tiles,
    E5M2: tl.constexpr, WITH_AMAX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    _cast_kernel(
        x + e * stride_e, scale + e * scale_stride, out + e * out_rows * out_cols, partials + e * num_tiles,
        rows, cols, out_rows, out_cols, stride_r, stride_c, out_cols, 1, E5M2, WITH_AMAX, BLOCK_R, BLOCK_C,
    )  # fmt: skip


@Kernel
@triton.jit(do_not_specialize=["scale"])
def cast_transpose_stack_kernel(
    x, scale, rowwise, columnwise, partials, rows, cols, stride_e, stride_r, stride_c,
    rowwise_rows, cols16, columnwise_rows, rows16, scale_stride, num_tiles,
    ROWWISE: tl.constexpr, E5M2: tl.constexpr, WITH_AMAX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    _cast_transpose_kernel(
        x + e * stride_e, scale + e * scale_stride, rowwise + e * rowwise_rows * cols16,
        columnwise + e * columnwise_rows * rows16, partials + e * num_tiles, rows, cols, stride_r, stride_c,
        rowwise_rows, cols16, columnwise_rows, rows16, ROWWISE, E5M2, WITH_AMAX, BLOCK_R, BLOCK_C,
    )  # fmt: skip


def _finished(partials: torch.Tensor) -> torch.Tensor:
    """The amaxes [E] of partials [E, tiles]."""
    count, num_tiles = partials.shape
    if num_tiles == 1:
        return partials.view(torch.float32).view(count)
    out = torch.empty(count, dtype=torch.float32, device=partials.device)
    finish_amax_stack_kernel[(count,)](partials, out, num_tiles, BLOCK=amax_kernels.PARTIALS_PER_STEP, num_warps=8)
    return out


def amax_stack(x: torch.Tensor) -> torch.Tensor:
    """The amax of each matrix of a stack: [E]."""
    if x.numel() == 0:
        return torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
    if is_column_major(x):
        x = x.mT
    count, rows, cols = x.shape
    block_r, block_c = amax_kernels.amax_tile(rows, cols)
    num_tiles = cdiv(rows, block_r) * cdiv(cols, block_c)
    with on_device(x):
        partials = torch.empty((count, num_tiles), dtype=torch.int32, device=x.device)
        partial_amax_stack_kernel[(num_tiles, count)](
            x, partials, rows, cols, *x.stride(), num_tiles, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=8
        )
        return _finished(partials)


def launch(
    x: torch.Tensor,
    scale: torch.Tensor,
    rowwise: torch.Tensor | None,
    columnwise: torch.Tensor | None,
    e5m2: bool,
    with_amax: bool,
) -> torch.Tensor | None:
    """Fill the uint8 copies of a stack; returns the amaxes [E], if they are asked for."""
    count = x.shape[0]
    if x.numel() == 0:  # and so are its copies
        return torch.zeros(count, dtype=torch.float32, device=x.device) if with_amax else None
    if is_column_major(x):  # the rowwise copies are the columnwise ones of the transposes
        x, rowwise, columnwise = x.mT, columnwise, rowwise
    options: dict[str, Any] = {"E5M2": e5m2, "WITH_AMAX": with_amax}
    scale_stride = 0 if scale.dim() == 0 else scale.stride(0)
    with on_device(x):
        if columnwise is None:
            assert rowwise is not None
            block_r, block_c = cast_kernels.MATRIX_TILE
            num_tiles = cdiv(rowwise.shape[1], block_r) * cdiv(rowwise.shape[2], block_c)
            partials = torch.empty((count, num_tiles if with_amax else 0), dtype=torch.int32, device=x.device)
            cast_stack_kernel[(num_tiles, count)](
                x, scale, rowwise, partials, *x.shape[1:], *rowwise.shape[1:], *x.stride(), scale_stride, num_tiles,
                **options, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=8,
            )  # fmt: skip
        else:
            block_r, block_c = both_kernels.BLOCK_R, both_kernels.BLOCK_C
            rows16, cols16 = columnwise.shape[2], pad_to_alignment(x.shape[2])
            num_tiles = cdiv(rows16, block_r) * cdiv(cols16, block_c)
            partials = torch.empty((count, num_tiles if with_amax else 0), dtype=torch.int32, device=x.device)
            cast_transpose_stack_kernel[(num_tiles, count)](
                x, scale, columnwise if rowwise is None else rowwise, columnwise, partials, *x.shape[1:], *x.stride(),
                0 if rowwise is None else rowwise.shape[1], cols16, columnwise.shape[1], rows16, scale_stride, num_tiles,
                ROWWISE=rowwise is not None, **options, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=both_kernels.NUM_WARPS,
            )  # fmt: skip
        return _finished(partials) if with_amax else None
