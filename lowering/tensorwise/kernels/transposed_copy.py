"""The columnwise copy made of the bytes of the rowwise one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.formats import pad_to_alignment
from lowering.tensorwise.checks import check_rowwise
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, on_device
from lowering.triton.tile import four_rows, left, store_columns, tiles_of, turned

BLOCK_R = 128
BLOCK_C = 128


@triton.jit
def bytes_of(rowwise, r, c, rows_left, cols_left, stride_r, stride_c):
    mask = (r < rows_left)[:, None] & (c < cols_left)[None, :]
    pointers = rowwise + (r.to(tl.int64) * stride_r)[:, None] + (c.to(tl.int64) * stride_c)[None, :]
    return tl.load(pointers, mask=mask, other=0)


@Kernel
@triton.jit
def transposed_copy_kernel(
    rowwise, out, rows, cols, rows16, stride_r, stride_c, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """out [cols, rows16] = the bytes of rowwise [rows, cols] of any strides, transposed, zeros beyond them."""
    tiles_c = tiles_of(cols, BLOCK_C)
    r0 = (tl.program_id(0) // tiles_c).to(tl.int64) * BLOCK_R
    c0 = (tl.program_id(0) % tiles_c).to(tl.int64) * BLOCK_C
    rowwise += r0 * stride_r + c0 * stride_c
    rows_left, cols_left = left(rows, r0, BLOCK_R), left(cols, c0, BLOCK_C)
    r, c = 4 * tl.arange(0, BLOCK_R // 4), tl.arange(0, BLOCK_C)
    b0 = bytes_of(rowwise, r, c, rows_left, cols_left, stride_r, stride_c)
    b1 = bytes_of(rowwise, r + 1, c, rows_left, cols_left, stride_r, stride_c)
    b2 = bytes_of(rowwise, r + 2, c, rows_left, cols_left, stride_r, stride_c)
    b3 = bytes_of(rowwise, r + 3, c, rows_left, cols_left, stride_r, stride_c)
    store_columns(out + c0 * rows16 + r0, turned(four_rows(b0, b1, b2, b3)), left(rows16, r0, BLOCK_R), cols_left, 1, rows16)


def transposed_copy(rowwise: torch.Tensor) -> torch.Tensor:
    """`reference.transposed_copy`."""
    check_rowwise(rowwise)
    rows, cols = rowwise.shape
    rows16 = pad_to_alignment(rows)
    out = torch.empty((cols, rows16), dtype=torch.uint8, device=rowwise.device)
    if rowwise.numel():
        with on_device(rowwise):
            transposed_copy_kernel[(cdiv(rows16, BLOCK_R) * cdiv(cols, BLOCK_C),)](
                rowwise.view(torch.uint8), out, rows, cols, rows16, *rowwise.stride(),
                BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C, num_warps=4,
            )  # fmt: skip
    return out.view(rowwise.dtype)
