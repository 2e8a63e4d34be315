"""Both FP8 layouts of a matrix from one read: every tile is loaded once and stored along its rows and along its
columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.formats import pad_to_alignment
from lowering.tensorwise.checks import check_matrix, check_scale
from lowering.tensorwise.kernels.amax import finish_amax
from lowering.triton.launch import cdiv, is_e5m2, on_device
from lowering.triton.tile import fp8_bits, largest, magnitude_bits

#: 128-byte lines of the rowwise and 64-byte segments of the columnwise copy. Four warps hold the tile in some 145
#: registers a thread, so three programs share an SM90 multiprocessor; 128 x 128 leaves room for one, with nothing to
#: hide its loads.
BLOCK_R = 64
BLOCK_C = 128
NUM_WARPS = 4


@triton.jit
def store_both(bits, r, c, rowwise, columnwise, rowwise_rows, cols16, columnwise_rows, rows16):
    """Store a tile of FP8 bits at rows r and columns c of rowwise [rowwise_rows, cols16], transposed in
    columnwise [columnwise_rows, rows16]; both are contiguous."""
    rowwise_mask = (r < rowwise_rows)[:, None] & (c < cols16)[None, :]
    tl.store(rowwise + r[:, None] * cols16 + c[None, :], bits, mask=rowwise_mask)
    columnwise_mask = (r < rows16)[:, None] & (c < columnwise_rows)[None, :]
    tl.store(columnwise + c[None, :] * rows16 + r[:, None], bits, mask=columnwise_mask)


@triton.jit
def cast_transpose_kernel(
    x, scale, rowwise, columnwise, partials, rows, cols, stride_r, stride_c,
    rowwise_rows, cols16, columnwise_rows, rows16,
    E5M2: tl.constexpr, WITH_AMAX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """rowwise and columnwise = FP8 bits of x [rows, cols] (any strides) times the scalar scale, zeros beyond x.

    WITH_AMAX: partials[tile] = bits of max |x| over the tile.
    """
    tile = tl.program_id(0)
    tiles_c = tl.cdiv(cols16, BLOCK_C)
    r = (tile // tiles_c).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = (tile % tiles_c).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    value = tl.load(x + r[:, None] * stride_r + c[None, :] * stride_c, mask=mask, other=0.0).to(tl.float32)
    if WITH_AMAX:
        tl.store(partials + tile, largest(magnitude_bits(value)))
    bits = fp8_bits(value, tl.load(scale), E5M2)
    store_both(bits, r, c, rowwise, columnwise, rowwise_rows, cols16, columnwise_rows, rows16)


def cast_transpose(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.cast_transpose`: rowwise [R, C16] and columnwise [C, R16] copies of the matrix x."""
    rowwise, columnwise, _ = _cast_transpose(x, scale, dtype, pad_rows, pad_cols, with_amax=False)
    return rowwise, columnwise


def cast_transpose_amax(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`cast_transpose` and `amax` of one read of x."""
    rowwise, columnwise, amax = _cast_transpose(x, scale, dtype, pad_rows, pad_cols, with_amax=True)
    assert amax is not None
    return rowwise, columnwise, amax


def empty_copies(x: torch.Tensor, pad_rows: bool, pad_cols: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised uint8 rowwise and columnwise copies of the matrix x."""
    rows, cols = x.shape
    rows16, cols16 = pad_to_alignment(rows), pad_to_alignment(cols)
    rowwise = torch.empty((rows16 if pad_rows else rows, cols16), dtype=torch.uint8, device=x.device)
    columnwise = torch.empty((cols16 if pad_cols else cols, rows16), dtype=torch.uint8, device=x.device)
    return rowwise, columnwise


def _cast_transpose(x, scale, dtype, pad_rows, pad_cols, with_amax):
    check_matrix(x)
    check_scale(scale)
    e5m2 = is_e5m2(dtype)
    rowwise, columnwise = empty_copies(x, pad_rows, pad_cols)
    amax = None
    if x.numel() == 0:
        amax = torch.zeros((), dtype=torch.float32, device=x.device) if with_amax else None
    else:
        num_tiles = cdiv(columnwise.shape[1], BLOCK_R) * cdiv(rowwise.shape[1], BLOCK_C)
        with on_device(x):
            partials = torch.empty(num_tiles, dtype=torch.int32, device=x.device) if with_amax else None
            cast_transpose_kernel[(num_tiles,)](
                x, scale, rowwise, columnwise, partials, *x.shape, *x.stride(), *rowwise.shape, *columnwise.shape,
                E5M2=e5m2, WITH_AMAX=with_amax, BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C, num_warps=NUM_WARPS,
            )  # fmt: skip
            amax = None if partials is None else finish_amax(partials)
    return rowwise.view(dtype), columnwise.view(dtype), amax
