"""Largest magnitude of a tensor: one partial maximum per tile, then one program over the partials.

NOTE [no atomics] Partials need no zeroed memory, where an atomic maximum would cost a memset per tensor, itself a
launch. The second launch reads 4 bytes per tile. Maxima are exact in any order, so both would give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.copies import is_column_major
from lowering.triton.ahead import Kernel
from lowering.triton.launch import as_matrices, batch_step, cdiv, on_device
from lowering.triton.tile import largest, tiles_of

ELEMENTS_PER_TILE = 8192
PARTIALS_PER_STEP = 4096


@Kernel
@triton.jit
def partial_amax_kernel(
    x, partials, rows, cols, stride_r, stride_c, stride_e,
    BATCHED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """partials[tile] = bits of max |x| over the tile; x [rows, cols] of any strides. BATCHED: of each matrix [rows, cols] of x,
    which is the second dimension of the grid."""
    tile = tl.program_id(0)
    if BATCHED:
        e = tl.program_id(1).to(tl.int64)
        x += e * stride_e
        partials += e * tl.num_programs(0)
    tiles_c = tiles_of(cols, BLOCK_C)
    r = (tile // tiles_c).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = (tile % tiles_c).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    tile_x = tl.load(x + r[:, None] * stride_r + c[None, :] * stride_c, mask=mask, other=0.0)
    tl.store(partials + tile, largest(tile_x.to(tl.float32)))


@Kernel
@triton.jit(do_not_specialize=["count"])
def finish_amax_kernel(partials, out, count, BLOCK: tl.constexpr):
    """out [n] = max of each row of int32 `partials` [n, count], as the float32 of those bits."""
    row = tl.program_id(0).to(tl.int64)
    partials += row * count
    offsets = tl.arange(0, BLOCK)
    bits = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, count, BLOCK):
        bits = tl.maximum(bits, tl.load(partials + start + offsets, mask=start + offsets < count, other=0))
    tl.store(out + row, tl.max(bits, axis=0).to(tl.float32, bitcast=True))


def finish_amax(partials: torch.Tensor) -> torch.Tensor:
    """The float32 values whose bits are the largest along the last dimension of int32 `partials`."""
    *batch, count = partials.shape
    if count == 1:
        return partials.view(torch.float32).view(batch)
    out = partials.new_empty(batch, dtype=torch.float32)
    finish_amax_kernel[(out.numel(),)](partials, out, count, BLOCK=PARTIALS_PER_STEP, num_warps=8)
    return out


def amax(x: torch.Tensor) -> torch.Tensor:
    """`reference.amax`: max |x| as a float32 scalar, of any shape and strides."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    matrices = as_matrices(x) or as_matrices(x.contiguous())
    assert matrices is not None
    return _amax_of_matrices(matrices[0])


def amax_batch(x: torch.Tensor) -> torch.Tensor:
    """The amax of each matrix of a batch: [E]."""
    if x.numel() == 0:
        return torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
    return _amax_of_matrices(x.mT if is_column_major(x) else x)


def _amax_of_matrices(x: torch.Tensor) -> torch.Tensor:
    """Of a matrix a scalar, of a batch [E]. A dense tensor is one row (`as_matrices`)."""
    *batch, rows, cols = x.shape
    block_c = 128 if cols > 32 else 32
    block_r, block_c = (1, ELEMENTS_PER_TILE) if rows == 1 else (ELEMENTS_PER_TILE // block_c, block_c)
    num_tiles = cdiv(rows, block_r) * cdiv(cols, block_c)
    with on_device(x):
        partials = torch.empty((*batch, num_tiles), dtype=torch.int32, device=x.device)
        partial_amax_kernel[(num_tiles, *batch)](
            x, partials, rows, cols, *x.stride()[-2:], batch_step(x),
            BATCHED=bool(batch), BLOCK_R=block_r, BLOCK_C=block_c, num_warps=8,
        )  # fmt: skip
        return finish_amax(partials)
