"""Rows in groups at padded offsets, for libraries whose tiles hold rows of one group, and back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.formats import BLOCK
from lowering.grouped.kernels.columns import map_of_rows
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, on_device

#: Rows and words of 8 bytes of a tile.
TILE = (16, 256)


@Kernel
@triton.jit
def move_rows_kernel(
    source, out, rows, words, width, stride_in, stride_out, TO_ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr
):
    """out [p] = source [rows[p]] for each of the `width` padded offsets that holds a row; TO_ROWS: out [rows[p]] = source [p].
    Lines of int64 words. What no row belongs to is neither read nor written."""
    tiles_w = tl.cdiv(words, BLOCK_W)
    p = (tl.program_id(0) // tiles_w) * BLOCK_P + tl.arange(0, BLOCK_P)
    w = (tl.program_id(0) % tiles_w) * BLOCK_W + tl.arange(0, BLOCK_W)
    row = tl.load(rows + p, mask=p < width, other=-1)
    mask = (row >= 0)[:, None] & (w < words)[None, :]
    read, written = (p, row) if TO_ROWS else (row, p)
    values = tl.load(source + read.to(tl.int64)[:, None] * stride_in + w[None, :], mask=mask)
    tl.store(out + written.to(tl.int64)[:, None] * stride_out + w[None, :], values, mask=mask)


@Kernel
@triton.jit
def padded_factors_kernel(
    scale_inv, rows, groups, out, indices, blocks, width, stride_row, stride_block,
    ALIGN: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """out [blocks, width] = the factors of the rows' blocks, 0 for padding; indices [width] = the group of the row, -1."""
    p = tl.program_id(0) * ALIGN + tl.arange(0, ALIGN)
    row = tl.load(rows + p)
    group = tl.load(groups + tl.program_id(0))
    tl.store(indices + p, tl.where(row >= 0, group, -1))
    for first in range(0, blocks, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        mask = (row >= 0)[:, None] & (b < blocks)[None, :]
        found = tl.load(scale_inv + row.to(tl.int64)[:, None] * stride_row + b[None, :] * stride_block, mask=mask, other=0.0)
        tl.store(out + b.to(tl.int64)[None, :] * width + p[:, None], found, mask=(b < blocks)[None, :])


def padded_rows(
    q: torch.Tensor, scale_inv: torch.Tensor, offs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows q [S, K] in groups, contiguous, and their scale_inv [S, B], with every group at a multiple of 128.

    Returns for the P padded offsets (`layouts.padded_width`) the row that each holds [P], -1 for padding; q [P, K], whose
    padding is not written; scale_inv [P, B], strides (1, P), 0 for padding; the group of each [P], -1 for padding.
    """
    block_p, block_w = TILE
    words, blocks = q.view(torch.int64), scale_inv.shape[1]
    with on_device(q):
        rows, groups = map_of_rows(q, offs, None, BLOCK, with_groups=True)
        width = rows.shape[0]
        padded = torch.empty((width, q.shape[1]), dtype=torch.uint8, device=q.device).view(q.dtype)
        factors = torch.empty((blocks, width), dtype=torch.float32, device=q.device)
        indices = torch.empty(width, dtype=torch.int32, device=q.device)
        move_rows_kernel[(cdiv(width, block_p) * cdiv(words.shape[1], block_w),)](
            words, padded.view(torch.int64), rows, words.shape[1], width, words.shape[1], words.shape[1],
            TO_ROWS=False, BLOCK_P=block_p, BLOCK_W=block_w, num_warps=4,
        )  # fmt: skip
        padded_factors_kernel[(width // BLOCK,)](
            scale_inv, rows, groups, factors, indices, blocks, width, *scale_inv.stride(), ALIGN=BLOCK, BLOCK_B=8, num_warps=4
        )
    return rows, padded, factors.t(), indices


def rows_of_groups(padded: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The rows [S, N] that lie at padded offsets in `padded` [P, N], of bfloat16, contiguous. Those that belong to no group are
    not written. rows: as `padded_rows` returns them."""
    block_p, block_w = TILE
    out = torch.empty((num_rows, padded.shape[1]), dtype=padded.dtype, device=padded.device)
    words = padded.view(torch.int64)
    with on_device(padded):
        move_rows_kernel[(cdiv(words.shape[0], block_p) * cdiv(words.shape[1], block_w),)](
            words, out.view(torch.int64), rows, words.shape[1], words.shape[0], words.shape[1], words.shape[1],
            TO_ROWS=True, BLOCK_P=block_p, BLOCK_W=block_w, num_warps=4,
        )  # fmt: skip
    return out
