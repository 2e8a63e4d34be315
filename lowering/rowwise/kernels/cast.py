"""The launches of the two passes of `passes.py`, and the casts that are made of them.

A pass over one matrix is one launch; over more, one for each dtype and alignment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton.language as tl

from lowering.blockwise.reference import as_matrix
from lowering.formats import GEMM_ALIGNMENT, fp8_max, pad_to_alignment
from lowering.rowwise.kernels.passes import (
    BLOCK_C,
    BLOCK_R,
    NUM_WARPS,
    NUM_WARPS_UNALIGNED,
    amax_kernel,
    cast_kernel,
    multi_amax_kernel,
    multi_cast_kernel,
)
from lowering.rowwise.reference import scale_slices
from lowering.tensorwise.reference import scales_from_amax
from lowering.triton.launch import cdiv, is_e5m2, on_device, pinned_table

_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _tiles(x: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of tiles, which cover the padding, too."""
    return cdiv(pad_to_alignment(x.shape[0]), BLOCK_R), cdiv(pad_to_alignment(x.shape[1]), BLOCK_C)


def _groups(xs: list[torch.Tensor]) -> Iterator[tuple[tl.dtype, bool, list[int]]]:
    """The matrices that one launch can take: (dtype, whether pointers and sizes are multiples of 16, positions)."""
    groups: dict[tuple[torch.dtype, bool], list[int]] = defaultdict(list)
    for i, x in enumerate(xs):
        if x.numel():
            multiples = (*x.shape, x.stride(0), x.data_ptr())
            aligned = x.stride(1) == 1 and all(value % GEMM_ALIGNMENT == 0 for value in multiples)
            groups[x.dtype, aligned].append(i)
    for (dtype, aligned), members in groups.items():
        yield _ELEMENTS[dtype], aligned, members


def _num_warps(aligned: bool) -> int:
    return NUM_WARPS if aligned else NUM_WARPS_UNALIGNED


def _starts(xs: list[torch.Tensor], rowwise: bool, columnwise: bool) -> list[int]:
    """Where the lines of each matrix begin in the vector of amaxes; the last entry is its length."""
    starts = [0]
    for x in xs:
        starts.append(starts[-1] + x.shape[0] * rowwise + x.shape[1] * columnwise)
    return starts


def _table(
    xs: list[torch.Tensor], members: list[int], starts: list[int], copies: list[list[int]], device: torch.device
) -> tuple[torch.Tensor, int]:
    """The table of a launch, and its number of tiles. `copies`: fields of each matrix that say where its copies go."""
    first_tiles, fields, num_tiles = [], [], 0
    for i in members:
        x = xs[i]
        tiles_r, tiles_c = _tiles(x)
        first_tiles.append(num_tiles)
        fields += [x.data_ptr(), *x.shape, *x.stride(), tiles_c, starts[i], *copies[i]]
        num_tiles += tiles_r * tiles_c
    return pinned_table(first_tiles + fields, device), num_tiles


def amax_rowwise(xs: list[torch.Tensor], *, rowwise: bool, columnwise: bool) -> torch.Tensor:
    """See `reference.amax_rowwise`."""
    starts = _starts(xs, rowwise, columnwise)
    bits = torch.zeros(starts[-1], dtype=torch.int32, device=xs[0].device)
    flags = {"ROWWISE": rowwise, "COLUMNWISE": columnwise, "BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C}
    with on_device(bits):
        if len(xs) == 1 and xs[0].numel():
            (x,) = xs
            tiles_r, tiles_c = _tiles(x)
            amax_kernel[(tiles_r * tiles_c,)](x, bits, *x.shape, tiles_c, *x.stride(), **flags, num_warps=NUM_WARPS)
        elif len(xs) > 1:
            for element, aligned, members in _groups(xs):
                table, num_tiles = _table(xs, members, starts, [[0] * 6] * len(xs), bits.device)
                multi_amax_kernel[(num_tiles,)](
                    table, bits, len(members), element=element, ALIGNED=aligned, **flags, num_warps=_num_warps(aligned)
                )
    return bits.view(torch.float32)


def _empty_data(x: torch.Tensor, columnwise: bool, pad_outer: bool) -> torch.Tensor:
    """The uint8 data of a copy, to be filled."""
    outer, inner = (x.shape[1], x.shape[0]) if columnwise else (x.shape[0], x.shape[1])
    shape = (pad_to_alignment(outer) if pad_outer else outer, pad_to_alignment(inner))
    return torch.empty(shape, dtype=torch.uint8, device=x.device)


class Copies(NamedTuple):
    """Where the copies of one orientation go, a tensor for each matrix: uint8 data and float32 scales."""

    data: list[torch.Tensor]
    scales: list[torch.Tensor]


def _new_copies(xs: list[torch.Tensor], columnwise: bool, pad_outer: bool) -> Copies:
    data = [_empty_data(x, columnwise, pad_outer) for x in xs]
    return Copies(data, [torch.empty((q.shape[0], 1), dtype=torch.float32, device=q.device) for q in data])


def _fill(
    xs: list[torch.Tensor],
    amaxes: torch.Tensor,
    dtype: torch.dtype,
    row: Copies | None,
    col: Copies | None,
    power_of_2: bool,
    epsilon: float,
) -> None:
    """The second pass."""
    bits = amaxes.contiguous().view(torch.int32)
    how = {"E5M2": is_e5m2(dtype), "FP8_MAX": fp8_max(dtype), "POWER_OF_2": power_of_2}
    shape = {"BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C}
    flags = {"ROWWISE": row is not None, "COLUMNWISE": col is not None, **how, **shape}
    first, second = row or col, col or row  # a copy that is not asked for is not touched
    assert first is not None
    assert second is not None
    starts = _starts(xs, row is not None, col is not None)
    places = list(zip(first.data, first.scales, second.data, second.scales, strict=True))
    for i, x in enumerate(xs):
        if not x.numel():
            _fill_empty(amaxes[starts[i] : starts[i + 1]], x, dtype, row, col, i, power_of_2, epsilon)
    with on_device(bits):
        if len(xs) == 1 and xs[0].numel():
            x, (q_row, s_row, q_col, s_col) = xs[0], places[0]
            tiles_r, tiles_c = _tiles(x)
            sizes = [*x.shape, *(pad_to_alignment(size) for size in x.shape), q_row.shape[0], q_col.shape[0]]
            cast_kernel[(tiles_r * tiles_c,)](
                x, bits, q_row, s_row, q_col, s_col, *sizes, tiles_c, *x.stride(), epsilon, **flags, num_warps=NUM_WARPS
            )
        elif len(xs) > 1:
            fields = [[*(t.data_ptr() for t in copies), copies[0].shape[0], copies[2].shape[0]] for copies in places]
            for element, aligned, members in _groups(xs):
                table, num_tiles = _table(xs, members, starts, fields, bits.device)
                multi_cast_kernel[(num_tiles,)](
                    table, bits, len(members), epsilon,
                    element=element, ALIGNED=aligned, **flags, num_warps=_num_warps(aligned),
                )  # fmt: skip


def _fill_empty(
    amaxes: torch.Tensor,
    x: torch.Tensor,
    dtype: torch.dtype,
    row: Copies | None,
    col: Copies | None,
    i: int,
    power_of_2: bool,
    epsilon: float,
) -> None:
    """A matrix without elements needs no launch: its copies are padding, its lines have the scales of amax 0."""
    for copies, lines in ((row, x.shape[0]), (col, x.shape[1])):
        if copies is not None:
            copies.data[i].zero_()
            stored = copies.scales[i].view(-1).fill_(1.0)
            stored[:lines] = scales_from_amax(amaxes[:lines], dtype, power_of_2=power_of_2, epsilon=epsilon)[1]
            amaxes = amaxes[lines:]


def cast_lines_rowwise(
    xs: list[torch.Tensor],
    amaxes: torch.Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool,
    columnwise: bool,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:
    """See `reference.cast_lines_rowwise`."""
    slices, length = scale_slices([x.shape for x in xs], rowwise, columnwise, pad_rows, pad_cols)
    has_gaps = sum(end - start for start, end in slices) < length
    scales = (torch.ones if has_gaps else torch.empty)(length, dtype=torch.float32, device=xs[0].device)
    views = [scales[start:end] for start, end in slices]
    both = rowwise and columnwise
    row = Copies([_empty_data(x, False, pad_rows) for x in xs], views[::2] if both else views) if rowwise else None
    col = Copies([_empty_data(x, True, pad_cols) for x in xs], views[1::2] if both else views) if columnwise else None
    _fill(xs, amaxes, dtype, row, col, power_of_2, epsilon)
    data = [q.view(dtype) for copies in (row, col) if copies is not None for q in copies.data]
    return [*data, scales]


# -- what is made of the two passes


def quantize_rowwise(
    x: torch.Tensor, dtype: torch.dtype, *, power_of_2: bool = True, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.quantize_rowwise`."""
    matrix = as_matrix(x)
    q, scale_inv = cast_rowwise(matrix, dtype, power_of_2=power_of_2, epsilon=epsilon)
    if q.shape[1] != matrix.shape[1]:
        q = q.view(torch.uint8)[:, : matrix.shape[1]].contiguous().view(dtype)
    return q.view(x.shape), scale_inv


def cast_rowwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.cast_rowwise`."""
    q, scale_inv = multi_cast_rowwise(
        [x], dtype, columnwise=columnwise, pad_outer=pad_outer, power_of_2=power_of_2, epsilon=epsilon
    )
    return q, scale_inv


def cast_transpose_rowwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference.cast_transpose_rowwise`."""
    options: dict[str, Any] = {"pad_rows": pad_rows, "pad_cols": pad_cols, "power_of_2": power_of_2, "epsilon": epsilon}
    q, scale_inv, q_t, scale_inv_t = multi_cast_transpose_rowwise([x], dtype, **options)
    return q, scale_inv, q_t, scale_inv_t


def multi_cast_rowwise(
    xs: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:
    """See `reference.multi_cast_rowwise`."""
    copies = _new_copies(xs, columnwise, pad_outer)
    amaxes = amax_rowwise(xs, rowwise=not columnwise, columnwise=columnwise)
    row, col = (None, copies) if columnwise else (copies, None)
    _fill(xs, amaxes, dtype, row, col, power_of_2, epsilon)
    return [*(q.view(dtype) for q in copies.data), *copies.scales]


def multi_cast_transpose_rowwise(
    xs: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:
    """See `reference.multi_cast_transpose_rowwise`."""
    row, col = _new_copies(xs, False, pad_rows), _new_copies(xs, True, pad_cols)
    amaxes = amax_rowwise(xs, rowwise=True, columnwise=True)
    _fill(xs, amaxes, dtype, row, col, power_of_2, epsilon)
    return [*(q.view(dtype) for q in row.data), *row.scales, *(q.view(dtype) for q in col.data), *col.scales]
