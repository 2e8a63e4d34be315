"""One FP8 copy of a tensor in its own layout, with the amax of the same read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.tensorwise.parts import ROWWISE_TILE
from lowering.triton.ahead import Kernel
from lowering.triton.launch import as_matrices, batch_step, cdiv, grid_of, is_e5m2, on_device
from lowering.triton.tile import (
    INF_BITS,
    as_float32,
    fp8_bits,
    infinity_bits,
    largest,
    magnitude_bits,
    runtime_size,
    tiles_of,
)

#: Whole 128-byte lines of a row-major input and of its output.
MATRIX_TILE = ROWWISE_TILE
#: A dense tensor is one row.
FLAT_TILE = (1, 8192)


@Kernel
@triton.jit(do_not_specialize=["scale"])
def cast_kernel(
    x, scale, out, partials, rows, cols, out_rows, out_cols,
    stride_r, stride_c, out_stride_r, out_stride_c, stride_e, out_stride_e, scale_stride,
    BATCHED: tl.constexpr, E5M2: tl.constexpr, WITH_AMAX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out [out_rows, out_cols] = FP8 bits of x [rows, cols] times the scalar scale, zeros beyond x. Any strides.

    WITH_AMAX: partials[tile] = bits of max |x| over the tile. BATCHED: of each matrix, the second dimension of the grid.
    """
    tile = tl.program_id(0)
    if BATCHED:
        e = tl.program_id(1).to(tl.int64)
        x += e * stride_e
        out += e * out_stride_e
        scale += e * scale_stride
        if WITH_AMAX:
            partials += e * tl.num_programs(0)
    tiles_c = tiles_of(out_cols, BLOCK_C)
    r = (tile // tiles_c).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = (tile % tiles_c).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (r < runtime_size(rows))[:, None] & (c < runtime_size(cols))[None, :]
    value = as_float32(tl.load(x + r[:, None] * stride_r + c[None, :] * stride_c, mask=mask, other=0.0))
    if WITH_AMAX or E5M2:
        amax_bits = largest(value)
    if WITH_AMAX:
        tl.store(partials + tile, amax_bits)
    bits = fp8_bits(value, tl.load(scale), E5M2)
    out_mask = (r < out_rows)[:, None] & (c < out_cols)[None, :]
    pointers = out + r[:, None] * out_stride_r + c[None, :] * out_stride_c
    tl.store(pointers, bits, mask=out_mask)
    if E5M2:  # noqa: SIM102 (the one is a constant, the other a tensor)
        if amax_bits >= INF_BITS:
            tl.debug_barrier()  # other threads may have stored what is stored over here
            again = as_float32(tl.load(x + r[:, None] * stride_r + c[None, :] * stride_c, mask=mask, other=0.0))
            tl.store(pointers, infinity_bits(again, True), mask=magnitude_bits(again) == INF_BITS)


def cast_matrix(
    x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, e5m2: bool, with_amax: bool, tile: tuple[int, int]
) -> torch.Tensor | None:
    """Fill uint8 `out`, at least as large as x, a matrix or a batch that is not empty, with FP8 bits; returns partial amaxes if
    asked for."""
    (*_, rows, cols), (*_, out_rows, out_cols) = x.shape, out.shape
    num_tiles = cdiv(out_rows, tile[0]) * cdiv(out_cols, tile[1])
    with on_device(x):
        partials = new_partials(x, num_tiles) if with_amax else None
        cast_kernel[grid_of(x, num_tiles)](
            x, scale, out, partials, rows, cols, out_rows, out_cols, *x.stride()[-2:], *out.stride()[-2:],
            batch_step(x), batch_step(out), step_of(scale),
            BATCHED=x.dim() == 3, E5M2=e5m2, WITH_AMAX=with_amax, BLOCK_R=tile[0], BLOCK_C=tile[1], num_warps=8,
        )  # fmt: skip
        return partials


def new_partials(x: torch.Tensor, num_tiles: int) -> torch.Tensor:
    """Partial amaxes of a matrix or of those of a batch, to be filled."""
    size = (x.shape[0], num_tiles) if x.dim() == 3 else (num_tiles,)
    return x.new_empty(*size, dtype=torch.int32)


def step_of(scale: torch.Tensor) -> int:
    """From the scale of a matrix to that of the next; 0 where all share one."""
    return scale.stride(0) if scale.dim() else 0


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`reference.quantize` with one scale: shape of x, its strides where they are dense."""
    e5m2 = is_e5m2(dtype)
    out = torch.empty_like(x, dtype=torch.uint8)
    if x.numel():
        matrices = as_matrices(x, out) or as_matrices(torch.empty_like(x).copy_(x), out)
        assert matrices is not None
        matrix, out_matrix = matrices
        tile = FLAT_TILE if matrix.shape[0] == 1 else MATRIX_TILE
        cast_matrix(matrix, scale, out_matrix, e5m2, with_amax=False, tile=tile)
    return out.view(dtype)
