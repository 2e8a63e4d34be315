"""Kernels of the operations with one scale per tensor: amaxes, casts into one layout or both, of one matrix or of many.

Each function computes what the function of its name in the reference says, bit for bit except for the sign of NaN.

NOTE [no atomics] The amax of one tensor is a partial maximum per tile, then one program over the partials. Partials need no
zeroed memory, where an atomic maximum would cost a memset per tensor, itself a launch. The second launch reads 4 bytes per
tile. Maxima are exact in any order, so both would give the same bits. Of many matrices the amaxes are one zeroed vector (one
memset for all), raised by atomic integer maxima: partials would need a segmented second pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.copies import CastOptions, empty_copy, is_column_major, matrices
from lowering.formats import FLOAT32_MAX, fp8_max, pad_to_alignment
from lowering.tensorwise.reference import COLUMNWISE_TILE, ROWWISE_TILE
from lowering.triton.ahead import Kernel
from lowering.triton.launch import as_matrices, batch_step, cdiv, grid_of, is_e5m2, on_device
from lowering.triton.many import groups, has_aligned_lines, is_aligned, num_programs, raise_amaxes, table_of, warps
from lowering.triton.tile import (
    INF_BITS,
    as_float32,
    find_matrix,
    four_rows,
    fp8_bits,
    infinity_bits,
    largest,
    largest_of_rows,
    left,
    load_rows,
    magnitude_bits,
    runtime_size,
    store_columns,
    store_infinities,
    store_rows,
    tiles_of,
    turned,
)

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
    seen = as_matrices(x) or as_matrices(x.contiguous())
    assert seen is not None
    return _amax_of_matrices(seen[0])


def amax_batch(x: torch.Tensor) -> torch.Tensor:
    """The amax of each matrix of a batch: [E]."""
    if x.numel() == 0:
        return torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
    return _amax_of_matrices(x.mT if is_column_major(x) else x)


def _amax_of_matrices(x: torch.Tensor) -> torch.Tensor:
    """The amax of a matrix, a scalar, or of those of a batch [E]. A dense tensor is one row (`as_matrices`)."""
    *batch, rows, cols = x.shape
    block_c = 128 if cols > 32 else 32
    block_r, block_c = (1, ELEMENTS_PER_TILE) if rows == 1 else (ELEMENTS_PER_TILE // block_c, block_c)
    num_tiles = cdiv(rows, block_r) * cdiv(cols, block_c)
    with on_device(x):
        partials = torch.empty((*batch, num_tiles), dtype=torch.int32, device=x.device)
        partial_amax_kernel[(num_tiles, *batch)](
            x, partials, rows, cols, *x.stride()[-2:], batch_step(x),
            BATCHED=bool(batch), BLOCK_R=block_r, BLOCK_C=block_c, num_warps=warps(8, rows == 1 or has_aligned_lines(x)),
        )  # fmt: skip
        return finish_amax(partials)


MAX_FLOAT32 = tl.constexpr(FLOAT32_MAX)


@triton.jit
def scale_of(amax, limit, epsilon, POWER_OF_2: tl.constexpr):
    """`scaling.scale_from_amax` of float32 amaxes that are not negative."""
    amax = tl.where(amax < epsilon, epsilon, amax)  # false for NaN
    infinity = float("inf")
    scale = tl.div_rn(tl.zeros(amax.shape, tl.float32) + limit, tl.where(amax > 0.0, amax, 1.0))
    scale = tl.where(scale == infinity, MAX_FLOAT32, scale)
    scale = tl.where((amax > 0.0) & (amax < infinity), scale, 1.0)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@Kernel
@triton.jit(do_not_specialize=["num_partials"])
def scales_kernel(
    partials, scales, inverses, num_partials, limit, epsilon, POWER_OF_2: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """scales, inverses [n] = `reference.scales_from_amax` of the largest of each row of int32 partials [n, num_partials]."""
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    bits = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, num_partials, BLOCK):
        mask = start + offsets < num_partials
        bits = tl.maximum(bits, tl.load(partials + row * num_partials + start + offsets, mask=mask, other=0))
    amax = tl.full([1], 0, tl.int32) + tl.max(bits, axis=0)
    amax = amax.to(tl.float32, bitcast=True)
    scale = scale_of(amax, limit, epsilon, POWER_OF_2)
    one = tl.arange(0, 1)
    tl.store(scales + row + one, scale)
    tl.store(inverses + row + one, tl.div_rn(tl.full([1], 1.0, tl.float32), scale))


#: Amaxes of a program.
AMAXES = 128


@Kernel
@triton.jit(do_not_specialize=["amaxes", "count"])
def scales_from_amax_kernel(
    amaxes, scales, inverses, count, limit, epsilon, POWER_OF_2: tl.constexpr, OF_ENGINES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """scales, inverses [count] = `scaling.scales_from_amax` of float32 amaxes [count]; OF_ENGINES: with an `inverse`."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    amax = tl.load(amaxes + offsets, mask=mask, other=1.0)
    one = tl.full([BLOCK], 1.0, tl.float32)
    if OF_ENGINES:
        amax = tl.where(amax < epsilon, epsilon, amax)  # false for NaN
        amax = tl.where((amax > 0.0) & (amax < float("inf")), amax, 1.0)
        inverse = tl.div_rn(amax, tl.zeros([BLOCK], tl.float32) + limit)
        scale = tl.div_rn(one, inverse)
    else:
        scale = scale_of(amax, limit, epsilon, POWER_OF_2)
        inverse = tl.div_rn(one, scale)
    tl.store(scales + offsets, scale, mask=mask)
    tl.store(inverses + offsets, inverse, mask=mask)


def scales_from_amax(
    amax: torch.Tensor,
    dtype: torch.dtype,
    *,
    margin: int = 0,
    epsilon: float = 0.0,
    power_of_2: bool = False,
    inverse: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scaling.scales_from_amax` in one launch; amaxes in memory with gaps, or of another dtype, are copied first."""
    scales, inverses = (torch.empty_like(amax, dtype=torch.float32) for _ in range(2))
    if amax.dtype != torch.float32 or amax.stride() != scales.stride():
        amax = torch.empty_like(scales).copy_(amax)
    count = amax.numel()
    if count:
        with on_device(amax):
            scales_from_amax_kernel[(cdiv(count, AMAXES),)](
                amax, scales, inverses, count, fp8_max(dtype) / 2.0**margin, epsilon,
                POWER_OF_2=power_of_2, OF_ENGINES=inverse is not None, BLOCK=AMAXES, num_warps=4,
            )  # fmt: skip
    return scales, inverses


def amaxes(xs: list[torch.Tensor], *, per_matrix: bool = False) -> torch.Tensor:
    """`reference.amaxes`: the largest magnitude of each tensor or matrix, 0 for an empty one, NaN wins."""
    if len(xs) == 1 and not per_matrix:
        return amax(xs[0])
    if per_matrix and len(xs) == 1 and xs[0].dim() == 3:
        return amax_batch(xs[0])
    if per_matrix:
        xs = matrices(xs)
    result = torch.zeros(len(xs), dtype=torch.float32, device=xs[0].device)
    raise_amaxes(xs, list(range(len(xs))), result, None)
    return result


def multi_scales(
    xs: list[torch.Tensor], dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.multi_scales`: the launches of `amaxes`, and one more."""
    shape, device = (len(xs), max(1, num_programs(xs))), xs[0].device
    has_empty = any(x.numel() == 0 for x in xs)
    partials = (torch.zeros if has_empty else torch.empty)(shape, dtype=torch.int32, device=device)
    raise_amaxes(xs, list(range(len(xs))), partials, None, partials=True)
    scales, inverses = (torch.empty(len(xs), dtype=torch.float32, device=device) for _ in range(2))
    with on_device(scales):
        scales_kernel[(len(xs),)](
            partials, scales, inverses, shape[1], fp8_max(dtype) / 2.0**margin, epsilon,
            POWER_OF_2=power_of_2, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return scales, inverses


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
    """out [out_rows, out_cols] = FP8 bits of x [rows, cols] times the scalar scale, zeros beyond x. Any strides. WITH_AMAX:
    partials[tile] = bits of max |x| over the tile. BATCHED: of each matrix, the second dimension of the grid."""
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
        seen = as_matrices(x, out) or as_matrices(torch.empty_like(x).copy_(x), out)
        assert seen is not None
        matrix, out_matrix = seen
        tile = FLAT_TILE if matrix.shape[0] == 1 else MATRIX_TILE
        cast_matrix(matrix, scale, out_matrix, e5m2, with_amax=False, tile=tile)
    return out.view(dtype)


#: 128-byte lines of a bfloat16 input and of the columnwise copy, 64-byte segments of the rowwise one. On SM90 at least four
#: programs of four warps share a multiprocessor: some 64 KB of loads are under way.
BLOCK_R, BLOCK_C = COLUMNWISE_TILE
NUM_WARPS = 4


@triton.jit
def cast_tile(
    x, scale, rowwise, columnwise, tile_r, tile_c, rows, cols, stride_r, stride_c,
    rowwise_rows, cols16, columnwise_rows, rows16,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, E5M2: tl.constexpr, WITH_AMAX: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copies of one tile of x [rows, cols]: rowwise [rowwise_rows, cols16], columnwise [columnwise_rows, rows16]. At least one
    of them. Returns the bits of the tile's amax, or 0 where it is not needed."""
    r0 = tile_r.to(tl.int64) * BLOCK_R
    c0 = tile_c.to(tl.int64) * BLOCK_C
    x += r0 * stride_r + c0 * stride_c
    rowwise += r0 * cols16 + c0
    columnwise += c0 * rows16 + r0
    rows_left = left(rows, r0, BLOCK_R)
    cols_left = left(cols, c0, BLOCK_C)
    r = 4 * tl.arange(0, BLOCK_R // 4)
    c = tl.arange(0, BLOCK_C)
    v0, v1, v2, v3 = load_rows(x, r, c, rows_left, cols_left, stride_r, stride_c)
    amax_bits = 0
    if WITH_AMAX or E5M2:
        amax_bits = largest(largest_of_rows(v0, v1, v2, v3))
    if ROWWISE:
        b0, b1 = fp8_bits(v0, scale, E5M2), fp8_bits(v1, scale, E5M2)
        b2, b3 = fp8_bits(v2, scale, E5M2), fp8_bits(v3, scale, E5M2)
        stored_rows, stored_cols = left(rowwise_rows, r0, BLOCK_R), left(cols16, c0, BLOCK_C)
        store_rows(rowwise, b0, b1, b2, b3, r, c, stored_rows, stored_cols, cols16, 1)
    if COLUMNWISE:
        if ROWWISE:
            four = four_rows(b0, b1, b2, b3)
        else:
            four = fp8_bits(four_rows(v0, v1, v2, v3), scale, E5M2)
        stored_rows, stored_cols = left(rows16, r0, BLOCK_R), left(columnwise_rows, c0, BLOCK_C)
        store_columns(columnwise, turned(four), stored_rows, stored_cols, 1, rows16)
    if E5M2:  # noqa: SIM102 (the one is a constant, the other a tensor)
        if amax_bits >= INF_BITS:
            tl.debug_barrier()  # other threads have stored what is stored over here
            if ROWWISE:
                store_infinities(x, rowwise, c, rows_left, cols_left, stride_r, stride_c, cols16, 1, True, BLOCK_R)
            if COLUMNWISE:
                store_infinities(x, columnwise, c, rows_left, cols_left, stride_r, stride_c, 1, rows16, True, BLOCK_R)
    return amax_bits


@Kernel
@triton.jit(do_not_specialize=["scale"])
def cast_transpose_kernel(
    x, scale, rowwise, columnwise, partials, rows, cols, stride_r, stride_c,
    rowwise_rows, cols16, columnwise_rows, rows16, stride_e, scale_stride, BATCHED: tl.constexpr,
    ROWWISE: tl.constexpr, E5M2: tl.constexpr, WITH_AMAX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """rowwise and columnwise = FP8 bits of x [rows, cols] (any strides) times the scalar scale, zeros beyond x. Without ROWWISE
    the columnwise copy alone. WITH_AMAX: partials[tile] = bits of max |x| over the tile. BATCHED: of each matrix, the second
    dimension of the grid."""
    tile = tl.program_id(0)
    if BATCHED:
        e = tl.program_id(1).to(tl.int64)
        x += e * stride_e
        scale += e * scale_stride
        rowwise += e * rowwise_rows * cols16
        columnwise += e * columnwise_rows * rows16
        if WITH_AMAX:
            partials += e * tl.num_programs(0)
    tiles_c = tiles_of(cols16, BLOCK_C)
    amax_bits = cast_tile(
        x, tl.load(scale), rowwise, columnwise, tile // tiles_c, tile % tiles_c, rows, cols, stride_r, stride_c,
        rowwise_rows, cols16, columnwise_rows, rows16, ROWWISE, True, E5M2, WITH_AMAX, BLOCK_R, BLOCK_C,
    )  # fmt: skip
    if WITH_AMAX:
        tl.store(partials + tile, amax_bits)


def launch_one(
    x: torch.Tensor, scale: torch.Tensor, rowwise: torch.Tensor | None, columnwise: torch.Tensor, e5m2: bool, with_amax: bool
) -> torch.Tensor | None:
    """Fill the uint8 copies of x, a matrix or a batch that is not empty, with FP8 bits; returns partial amaxes if asked for."""
    if rowwise is not None and is_column_major(x):
        # Loads run along the rows; a column-major x is the transpose of a matrix with the same two copies.
        x, rowwise, columnwise = x.mT, columnwise, rowwise
    (*_, rows, cols), (*_, columnwise_rows, rows16) = x.shape, columnwise.shape
    cols16 = pad_to_alignment(cols)
    num_tiles = cdiv(rows16, BLOCK_R) * cdiv(cols16, BLOCK_C)
    with on_device(x):
        partials = new_partials(x, num_tiles) if with_amax else None
        cast_transpose_kernel[grid_of(x, num_tiles)](
            x, scale, columnwise if rowwise is None else rowwise, columnwise, partials,
            rows, cols, *x.stride()[-2:],
            0 if rowwise is None else rowwise.shape[-2], cols16, columnwise_rows, rows16, batch_step(x), step_of(scale),
            BATCHED=x.dim() == 3, ROWWISE=rowwise is not None, E5M2=e5m2, WITH_AMAX=with_amax,
            BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C, num_warps=warps(NUM_WARPS, has_aligned_lines(x)),
        )  # fmt: skip
        return partials


#: int64 fields of a matrix in the table; the first tiles of all matrices come before them.
FIELDS = tl.constexpr(12)


@Kernel
@triton.jit(do_not_specialize=["num_matrices"])
def multi_cast_transpose_amax_kernel(
    table, amaxes, num_matrices, element: tl.constexpr,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, E5M2: tl.constexpr, WITH_AMAX: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`cast_tile` of the matrix that this tile belongs to, all with elements of dtype `element`. table: first tile of each
    matrix [num_matrices], then its fields [num_matrices, FIELDS] (`fields` in `launch_many`); amaxes, where WITH_AMAX: int32
    bits, zero at first. ALIGNED: rows are contiguous, and pointers, sizes and row strides are multiples of 16."""
    tile = tl.program_id(0).to(tl.int64)
    fields, first = find_matrix(table, num_matrices, tile, FIELDS)
    tile -= first
    index = tl.load(fields)
    x = tl.load(fields + 1).to(tl.pointer_type(element))
    rowwise = tl.load(fields + 2).to(tl.pointer_type(tl.uint8))
    columnwise = tl.load(fields + 3).to(tl.pointer_type(tl.uint8))
    rows = tl.load(fields + 4)
    cols = tl.load(fields + 5)
    stride_r = tl.load(fields + 6)
    stride_c = tl.load(fields + 7)
    rowwise_rows = tl.load(fields + 8)
    columnwise_rows = tl.load(fields + 9)
    rows16 = tiles_of(rows, 16) * 16
    cols16 = tiles_of(cols, 16) * 16
    if ALIGNED:
        x = tl.multiple_of(x, 16)
        rows = tl.multiple_of(rows, 16)
        cols = tl.multiple_of(cols, 16)
        stride_r = tl.multiple_of(stride_r, 16)
        stride_c = 1
    rowwise = tl.multiple_of(rowwise, 16)
    columnwise = tl.multiple_of(columnwise, 16)

    tiles_c = tl.load(fields + 10)
    amax_bits = cast_tile(
        x, tl.load(tl.load(fields + 11).to(tl.pointer_type(tl.float32))), rowwise, columnwise, tile // tiles_c, tile % tiles_c,
        rows, cols, stride_r, stride_c, rowwise_rows, cols16, columnwise_rows, rows16,
        ROWWISE, COLUMNWISE, E5M2, WITH_AMAX, BLOCK_R, BLOCK_C,
    )  # fmt: skip
    if WITH_AMAX:
        tl.atomic_max(amaxes + index, amax_bits, sem="relaxed")


def launch_many(
    xs: list[torch.Tensor],
    scales: list[torch.Tensor],
    row: list[torch.Tensor],
    col: list[torch.Tensor],
    e5m2: bool,
    with_amax: bool,
) -> torch.Tensor | None:
    """Fill the uint8 copies of matrices and batches; an orientation that is not asked for is an empty list. One launch for all
    matrices of one dtype whose rows are contiguous and whose pointers, sizes and strides are multiples of 16, one more for the
    others of that dtype. Returns the amaxes if asked for."""
    each = [s for x, scale in zip(xs, scales, strict=True) for s in _of_matrices(x, scale)]
    xs, row, col = matrices(xs), matrices(row), matrices(col)
    amaxes = torch.zeros(len(xs), dtype=torch.float32, device=xs[0].device) if with_amax else None
    bits = None if amaxes is None else amaxes.view(torch.int32)

    def fields(i: int) -> tuple[int, list[int]]:
        """The tiles of a matrix, and what the kernel reads of it. A copy that is not asked for is at address 0 without rows."""
        x = xs[i]
        rows, cols = x.shape
        tiles_r, tiles_c = cdiv(pad_to_alignment(rows), BLOCK_R), cdiv(pad_to_alignment(cols), BLOCK_C)
        pointers = x.data_ptr(), row[i].data_ptr() if row else 0, col[i].data_ptr() if col else 0
        heights = row[i].shape[0] if row else 0, col[i].shape[0] if col else 0
        return tiles_r * tiles_c, [i, *pointers, rows, cols, *x.stride(), *heights, tiles_c, each[i].data_ptr()]

    with on_device(xs[0]):
        for element, aligned, members in groups(xs, is_aligned):
            table, num_tiles = table_of(map(fields, members), xs[0].device)
            multi_cast_transpose_amax_kernel[(num_tiles,)](
                table, bits, len(members), element=element,
                ROWWISE=bool(row), COLUMNWISE=bool(col), E5M2=e5m2, WITH_AMAX=with_amax,
                ALIGNED=aligned, BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C, num_warps=NUM_WARPS,
            )  # fmt: skip
    return amaxes


def _of_matrices(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The scale of each matrix of x."""
    if x.dim() == 2:
        return (scale,)
    return scale.unbind() if scale.dim() else (scale,) * x.shape[0]


def cast(xs: list[torch.Tensor], scales: list[torch.Tensor], dtype: torch.dtype, **options: bool) -> list[torch.Tensor]:
    """`reference.cast`: one matrix and one batch take kernels of their own, all else that of many."""
    e5m2, wanted = is_e5m2(dtype), CastOptions.of(**options)
    made = [empty_copy(x, torch.uint8, *side) for side in wanted.wanted for x in xs]
    if len(xs) > 1:
        row = made[: len(xs)] if wanted.rowwise else []
        col = made[-len(xs) :] if wanted.columnwise else []
        amaxes = launch_many(xs, scales, row, col, e5m2, wanted.with_amax)
    else:
        x, only_row, only_col = xs[0], made[0] if wanted.rowwise else None, made[-1] if wanted.columnwise else None
        amaxes = _fill(x, scales[0], only_row, only_col, e5m2, wanted.with_amax)
        if amaxes is not None and wanted.in_parts:
            amaxes = amaxes.view(torch.float32)
        elif amaxes is not None:
            with on_device(x):
                amaxes = finish_amax(amaxes)
    copies = [q.view(dtype) for q in made]
    return copies if amaxes is None else [*copies, amaxes]


def _fill(
    x: torch.Tensor, scale: torch.Tensor, row: torch.Tensor | None, col: torch.Tensor | None, e5m2: bool, with_amax: bool
) -> torch.Tensor | None:
    """Fill the uint8 copies of a matrix or batch; returns partial amaxes if asked for."""
    if x.numel() == 0:  # and so are its copies
        return torch.zeros((*x.shape[:-2], 1), dtype=torch.int32, device=x.device) if with_amax else None
    if row is not None and col is not None:
        return launch_one(x, scale, row, col, e5m2, with_amax)
    if row is None:
        x, row = x.mT, col
    assert row is not None
    if is_column_major(x):  # its columns are contiguous, the rows of its copy are: the columnwise copy of the row-major x.mT
        return launch_one(x.mT, scale, None, row, e5m2, with_amax)
    return cast_matrix(x, scale, row, e5m2, with_amax, MATRIX_TILE)


#: Rows and columns of a tile of `transposed_copy`.
COPY_SIDE = 128


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
    """`grouped.reference.transposed_copy` of rows that are in no groups."""
    rows, cols = rowwise.shape
    rows16 = pad_to_alignment(rows)
    out = torch.empty((cols, rows16), dtype=torch.uint8, device=rowwise.device)
    if rowwise.numel():
        with on_device(rowwise):
            transposed_copy_kernel[(cdiv(rows16, COPY_SIDE) * cdiv(cols, COPY_SIDE),)](
                rowwise.view(torch.uint8), out, rows, cols, rows16, *rowwise.stride(),
                BLOCK_R=COPY_SIDE, BLOCK_C=COPY_SIDE, num_warps=4,
            )  # fmt: skip
    return out.view(rowwise.dtype)
