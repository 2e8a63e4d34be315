"""Blockwise copies of many matrices from one launch, in one layout or in both.

A table in device memory tells where each matrix and its copies are; a program finds its matrix by counting the matrices that
begin at or before its tile. Matrices of whole tiles with contiguous, aligned rows share a launch; any other has its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.blockwise.kernels.cast import REGISTERS, Copy, cast_tile, launch, scaling_of, tile_of
from lowering.blockwise.reference import Cast
from lowering.formats import largest_finite
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, is_whole, on_device
from lowering.triton.many import groups, table_of
from lowering.triton.tile import find_matrix

#: int64 fields of a matrix in the table; the first tiles of all matrices come before them.
FIELDS = tl.constexpr(20)
#: Registers per thread where `REGISTERS` would spill: two programs of eight warps.
MOST_REGISTERS = 128


@triton.jit
def _row_of_copy(fields):
    """The fields of a copy: data, its rows and columns as x has them, distance of its lines; scales, stored, strides."""
    q = tl.multiple_of(tl.load(fields).to(tl.pointer_type(tl.uint8)), 16)
    stride = tl.multiple_of(tl.load(fields + 3).to(tl.int32), 16)
    s = tl.load(fields + 4).to(tl.pointer_type(tl.float32))
    return q, tl.load(fields + 1), tl.load(fields + 2), stride, s, tl.load(fields + 5), tl.load(fields + 6)


@Kernel
@triton.jit(do_not_specialize=["num_matrices"])
def multi_cast_blockwise_kernel(
    table, num_matrices, overflow_scale, epsilon, element: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    BLOCK_DIMS: tl.constexpr, E5M2: tl.constexpr, HAS_EPSILON: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`cast_tile` of the matrix that this tile belongs to. table: first tile of each matrix [num_matrices], then its fields
    [num_matrices, FIELDS] (`_fields`). All matrices consist of whole tiles; their rows are contiguous and begin at multiples
    of 16 bytes."""
    tile = tl.program_id(0).to(tl.int64)
    fields, first = find_matrix(table, num_matrices, tile, FIELDS)
    tile -= first
    x = tl.multiple_of(tl.load(fields).to(tl.pointer_type(element)), 16)
    rows, cols = tl.load(fields + 1), tl.load(fields + 2)
    stride_r = tl.multiple_of(tl.load(fields + 3).to(tl.int32), 16)
    q_row, row_rows, row_cols, row_stride, s_row, row_stored, row_outer = _row_of_copy(fields + 4)
    q_col, col_rows, col_cols, col_stride, s_col, col_stored, col_outer = _row_of_copy(fields + 12)
    # Scales of lines are stored block by block, those of squares line by line of blocks.
    row_strides = (row_outer, 1) if BLOCK_DIMS == 2 else (1, row_outer)
    col_strides = (col_outer, 1) if BLOCK_DIMS == 2 else (1, col_outer)
    cast_tile(
        tile, x, rows, cols, stride_r, 1, overflow_scale, epsilon,
        q_row, row_rows, row_cols, row_stride, 1, s_row, row_stored, *row_strides,
        q_col, col_rows, col_cols, 1, col_stride, s_col, col_stored, *col_strides,
        ROWWISE, COLUMNWISE, False, True, BLOCK_DIMS, E5M2, HAS_EPSILON, FP8_MAX, POWER_OF_2, True, BLOCK_R, BLOCK_C,
    )  # fmt: skip


def _fields(x: torch.Tensor, is_square: bool, copies: tuple[Copy | None, Copy | None]) -> list[int]:
    """What the kernel reads of one matrix, in its order. A copy that is not asked for has zeros."""
    found = [x.data_ptr(), *x.shape, x.stride(0)]
    for copy in copies:
        if copy is None:
            found += [0] * 8
            continue
        q, scale_inv = copy
        stored = scale_inv.shape[1 if is_square else 0]
        distance = scale_inv.stride(0 if is_square else 1)
        found += [q.data_ptr(), *q.shape, max(q.stride()), scale_inv.data_ptr(), stored, distance, 0]
    return found


def _shares(x: torch.Tensor, copies: tuple[Copy | None, Copy | None], tile: tuple[int, int, int]) -> bool:
    """Whether a matrix and its copies are what the kernel takes."""
    block_r, block_c, _ = tile
    is_aligned = x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    return is_aligned and x.numel() > 0 and is_whole([x, *(copy.q for copy in copies if copy is not None)], block_r, block_c)


def fill(xs: list[torch.Tensor], dtype: torch.dtype, cast: Cast, copies: list[tuple[Copy | None, Copy | None]]) -> None:
    """Fill the GEMM-ready copies of matrices: in one launch for each dtype, but for those that the kernel does not take."""
    tile = tile_of(cast.is_square, cast.rowwise, cast.columnwise)
    block_r, block_c, num_warps = tile
    shares = [_shares(x, of_matrix, tile) for x, of_matrix in zip(xs, copies, strict=True)]
    for x, of_matrix, is_shared in zip(xs, copies, shares, strict=True):
        if not is_shared:
            launch(x, dtype, cast, *of_matrix)
    positions = [i for i, is_shared in enumerate(shares) if is_shared]
    xs, copies = [xs[i] for i in positions], [copies[i] for i in positions]
    for element, _, members in groups(xs, lambda x: None):
        # Divisions take more, and so do the bytes of both copies, kept where they are the same, or converted.
        first = xs[members[0]]
        is_large = cast.rowwise and cast.columnwise and (cast.is_square or first.dtype != torch.bfloat16)
        registers = MOST_REGISTERS if is_large or not cast.power_of_2 else REGISTERS[num_warps]
        tiles = [cdiv(xs[i].shape[0], block_r) * cdiv(xs[i].shape[1], block_c) for i in members]
        fields = [_fields(xs[i], cast.is_square, copies[i]) for i in members]
        with on_device(first):
            table, num_tiles = table_of(zip(tiles, fields, strict=True), first.device)
            multi_cast_blockwise_kernel[(num_tiles,)](
                table, len(members), largest_finite(first.dtype), cast.epsilon, element=element,
                ROWWISE=cast.rowwise, COLUMNWISE=cast.columnwise, **scaling_of(cast, dtype),
                BLOCK_R=block_r, BLOCK_C=block_c, num_warps=num_warps, maxnreg=registers,
            )  # fmt: skip
