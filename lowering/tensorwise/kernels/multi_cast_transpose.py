"""FP8 copies of many matrices from one launch, in one layout or in both, with or without their amaxes.

A table in device memory tells where each matrix and its copies are; a program finds its matrix by counting the
matrices that begin at or before its tile. Amaxes are one zeroed vector (one memset for all), raised by atomic
integer maxima: partials would need a segmented second pass.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import triton
import triton.language as tl

from lowering.formats import GEMM_ALIGNMENT, pad_to_alignment
from lowering.tensorwise.checks import check_matrix, check_scale
from lowering.tensorwise.kernels.cast_transpose import BLOCK_C, BLOCK_R, NUM_WARPS, cast_tile, empty_copies
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, is_e5m2, on_device, pinned_table
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

    table: first tile of each matrix [num_matrices], then its fields [num_matrices, FIELDS] (`_fields`); amaxes, where
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


Copies = tuple[torch.Tensor | None, torch.Tensor | None]


def _fields(index: int, scale: torch.Tensor, x: torch.Tensor, copies: Copies) -> list[int]:
    """What the kernel reads of one matrix, in its order. A copy that is not asked for is at address 0 and has no rows."""
    pointers = [x.data_ptr(), *(0 if copy is None else copy.data_ptr() for copy in copies)]
    heights = [0 if copy is None else copy.shape[0] for copy in copies]
    return [index, *pointers, *x.shape, *x.stride(), *heights, cdiv(pad_to_alignment(x.shape[1]), BLOCK_C), scale.data_ptr()]


def _is_aligned(x: torch.Tensor) -> bool:
    multiples = (*x.shape, x.stride(0), x.data_ptr())
    return x.stride(1) == 1 and all(value % GEMM_ALIGNMENT == 0 for value in multiples)


_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _launch(
    xs: list[torch.Tensor],
    scales: list[torch.Tensor],
    copies: list[Copies],
    amaxes: torch.Tensor | None,
    e5m2: bool,
) -> None:
    """Fill the copies, all in the same layouts. One launch for all matrices of one dtype whose rows are contiguous and whose
    pointers, sizes and strides are multiples of 16, one more for the others of that dtype."""
    groups: dict[tuple[torch.dtype, bool], list[int]] = defaultdict(list)
    for i, x in enumerate(xs):
        if x.numel():
            groups[x.dtype, _is_aligned(x)].append(i)
    bits = None if amaxes is None else amaxes.view(torch.int32)
    for (element, aligned), members in groups.items():
        first_tiles, fields, num_tiles = [], [], 0
        for i in members:
            x = xs[i]
            first_tiles.append(num_tiles)
            fields += _fields(i, scales[i], x, copies[i])
            num_tiles += cdiv(pad_to_alignment(x.shape[0]), BLOCK_R) * cdiv(pad_to_alignment(x.shape[1]), BLOCK_C)
        with on_device(xs[0]):
            table = pinned_table(first_tiles + fields, xs[0].device)
            multi_cast_transpose_amax_kernel[(num_tiles,)](
                table, bits, len(members), element=_ELEMENTS[element],
                ROWWISE=copies[0][0] is not None, COLUMNWISE=copies[0][1] is not None, E5M2=e5m2, WITH_AMAX=bits is not None,
                ALIGNED=aligned, BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C, num_warps=NUM_WARPS,
            )  # fmt: skip


def _check(xs: list[torch.Tensor], scales: list[torch.Tensor]) -> None:
    if len(scales) != len(xs):
        raise ValueError(f"{len(xs)} matrices need as many scales, got {len(scales)}")
    for x, scale in zip(xs, scales, strict=True):
        check_matrix(x)
        check_scale(scale)


def multi_cast_transpose_amax(
    xs: list[torch.Tensor], scales: list[torch.Tensor], dtype: torch.dtype, *, pad_rows: bool = False, pad_cols: bool = False
) -> list[torch.Tensor]:
    """`reference.multi_cast_transpose_amax`. Launches as `_launch` says."""
    e5m2 = is_e5m2(dtype)
    _check(xs, scales)
    amaxes = torch.zeros(len(xs), dtype=torch.float32, device=xs[0].device)
    copies = [empty_copies(x, pad_rows, pad_cols) for x in xs]
    _launch(xs, scales, list(copies), amaxes, e5m2)
    return [*(rowwise.view(dtype) for rowwise, _ in copies), *(columnwise.view(dtype) for _, columnwise in copies), amaxes]


def _multi_cast(xs, scales, dtype, columnwise, pad_outer, amaxes):
    e5m2 = is_e5m2(dtype)
    _check(xs, scales)
    outputs = []
    for x in xs:
        outer, inner = x.shape[::-1] if columnwise else x.shape
        shape = (pad_to_alignment(outer) if pad_outer else outer, pad_to_alignment(inner))
        outputs.append(torch.empty(shape, dtype=torch.uint8, device=x.device))
        if not x.numel():
            outputs[-1].zero_()
    if xs:
        _launch(xs, scales, [(None, q) if columnwise else (q, None) for q in outputs], amaxes, e5m2)
    return [q.view(dtype) for q in outputs]


def multi_cast(
    xs: list[torch.Tensor],
    scales: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    columnwise: bool = False,
    pad_outer: bool = False,
) -> list[torch.Tensor]:
    """`reference.multi_cast`. Launches as `_launch` says."""
    return _multi_cast(xs, scales, dtype, columnwise, pad_outer, None)


def multi_cast_amax(
    xs: list[torch.Tensor],
    scales: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    columnwise: bool = False,
    pad_outer: bool = False,
) -> list[torch.Tensor]:
    """`reference.multi_cast_amax`. Launches as `_launch` says."""
    amaxes = torch.zeros(len(xs), dtype=torch.float32, device=xs[0].device)
    return [*_multi_cast(xs, scales, dtype, columnwise, pad_outer, amaxes), amaxes]
