"""FP8 copies of many matrices from one launch, in one layout or in both, with or without their amaxes.

Amaxes are one zeroed vector (one memset for all), raised by atomic
integer maxima: partials would need a segmented second pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.copies import matrices
from lowering.formats import pad_to_alignment
from lowering.tensorwise.kernels.cast_transpose import BLOCK_C, BLOCK_R, NUM_WARPS, cast_tile
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, on_device
from lowering.triton.many import groups, is_aligned, table_of
from lowering.triton.tile import find_matrix, tiles_of

#: int64 fields of a matrix in the table; the first tiles of all matrices come before them.
FIELDS = tl.constexpr(12)


@Kernel
@triton.jit(do_not_specialize=["num_matrices"])
def multi_cast_transpose_amax_kernel(
    table, amaxes, num_matrices, element: tl.constexpr,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, E5M2: tl.constexpr, WITH_AMAX: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`cast_transpose.cast_tile` of the matrix that this tile belongs to, all with elements of dtype `element`.

    table: first tile of each matrix [num_matrices], then its fields [num_matrices, FIELDS] (`launch`); amaxes, where
    WITH_AMAX: int32 bits, zero at first. ALIGNED: rows are contiguous, and pointers, sizes and row strides are multiples of 16.
    """
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


def launch(
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
