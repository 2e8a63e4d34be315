"""Largest magnitude of a tensor: one partial maximum per tile, then one program over the partials.

NOTE [no atomics] Partials need no zeroed memory, where an atomic maximum would cost a memset per tensor, itself a
launch. The second launch reads 4 bytes per tile. Maxima are exact in any order, so both would give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.triton.ahead import Kernel
from lowering.triton.launch import as_matrices, cdiv, on_device
from lowering.triton.tile import largest, tiles_of

ELEMENTS_PER_TILE = 8192
PARTIALS_PER_STEP = 4096


@Kernel
@triton.jit
def partial_amax_kernel(x, partials, rows, cols, stride_r, stride_c, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """partials[tile] = bits of max |x| over the tile; x [rows, cols] of any strides."""
    tile = tl.program_id(0)
    tiles_c = tiles_of(cols, BLOCK_C)
    r = (tile // tiles_c).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = (tile % tiles_c).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    tile_x = tl.load(x + r[:, None] * stride_r + c[None, :] * stride_c, mask=mask, other=0.0)
    tl.store(partials + tile, largest(tile_x.to(tl.float32)))


@Kernel
@triton.jit(do_not_specialize=["count"])
def finish_amax_kernel(partials, out, count, BLOCK: tl.constexpr):
    """out = max of int32 `partials` [count], as the float32 of those bits. One program."""
    offsets = tl.arange(0, BLOCK)
    bits = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, count, BLOCK):
        bits = tl.maximum(bits, tl.load(partials + start + offsets, mask=start + offsets < count, other=0))
    tl.store(out, tl.max(bits, axis=0).to(tl.float32, bitcast=True))


def finish_amax(partials: torch.Tensor) -> torch.Tensor:
    """The float32 scalar whose bits are the largest of int32 `partials`; a single partial is that already."""
    if partials.numel() == 1:
        return partials.view(torch.float32).view(())
    out = torch.empty((), dtype=torch.float32, device=partials.device)
    finish_amax_kernel[(1,)](partials, out, partials.numel(), BLOCK=PARTIALS_PER_STEP, num_warps=8)
    return out


def amax_tile(rows: int, cols: int) -> tuple[int, int]:
    """Tile of a [rows, cols] matrix; a dense tensor is one row (`as_matrices`)."""
    if rows == 1:
        return 1, ELEMENTS_PER_TILE
    block_c = 128 if cols > 32 else 32
    return ELEMENTS_PER_TILE // block_c, block_c


def amax(x: torch.Tensor) -> torch.Tensor:
    """`reference.amax`: max |x| as a float32 scalar, of any shape and strides."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    matrices = as_matrices(x) or as_matrices(x.contiguous())
    assert matrices is not None
    (matrix,) = matrices
    rows, cols = matrix.shape
    block_r, block_c = amax_tile(rows, cols)
    num_tiles = cdiv(rows, block_r) * cdiv(cols, block_c)
    with on_device(x):
        partials = torch.empty(num_tiles, dtype=torch.int32, device=x.device)
        partial_amax_kernel[(num_tiles,)](
            matrix, partials, rows, cols, *matrix.stride(), BLOCK_R=block_r, BLOCK_C=block_c, num_warps=8
        )
        return finish_amax(partials)
