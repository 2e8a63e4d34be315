"""The launches of the two passes of `passes.py`, and the casts that are made of them.

A pass over one matrix is one launch; over more, one for each dtype and alignment.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lowering.copies import by_output, empty_copy
from lowering.formats import fp8_max, pad_to_alignment
from lowering.rowwise import reference
from lowering.rowwise.kernels import stacks
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
from lowering.scaling import scales_from_amax
from lowering.triton.launch import cdiv, is_e5m2, on_device
from lowering.triton.many import groups, is_aligned, table_of


def _tiles(x: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of tiles, which cover the padding, too."""
    return cdiv(pad_to_alignment(x.shape[0]), BLOCK_R), cdiv(pad_to_alignment(x.shape[1]), BLOCK_C)


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
    rows = []
    for i in members:
        x = xs[i]
        tiles_r, tiles_c = _tiles(x)
        rows.append((tiles_r * tiles_c, [x.data_ptr(), *x.shape, *x.stride(), tiles_c, starts[i], *copies[i]]))
    return table_of(rows, device)


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
            for element, aligned, members in groups(xs, is_aligned):
                table, num_tiles = _table(xs, members, starts, [[0] * 6] * len(xs), bits.device)
                multi_amax_kernel[(num_tiles,)](
                    table, bits, len(members), element=element, ALIGNED=aligned, **flags, num_warps=_num_warps(aligned)
                )
    return bits.view(torch.float32)


class Copies(NamedTuple):
    """Where the copies of one orientation go, a tensor for each matrix: uint8 data and float32 scales."""

    data: list[torch.Tensor]
    scales: list[torch.Tensor]


def _new_copies(xs: list[torch.Tensor], columnwise: bool, pad_outer: bool) -> Copies:
    data = [empty_copy(x, torch.uint8, columnwise, pad_outer) for x in xs]
    return Copies(data, [q.new_empty((*q.shape[:-1], 1), dtype=torch.float32) for q in data])


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
            for element, aligned, members in groups(xs, is_aligned):
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
    row = Copies([empty_copy(x, torch.uint8, False, pad_rows) for x in xs], views[::2] if both else views) if rowwise else None
    col = (
        Copies([empty_copy(x, torch.uint8, True, pad_cols) for x in xs], views[1::2] if both else views) if columnwise else None
    )
    _fill(xs, amaxes, dtype, row, col, power_of_2, epsilon)
    data = [q.view(dtype) for copies in (row, col) if copies is not None for q in copies.data]
    return [*data, scales]


# -- what is made of the two passes


def cast_rowwise(
    xs: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:
    """See `reference.cast_rowwise`. Matrices share their launches; stacks have launches of their own."""
    if len(xs) > 1 and any(x.dim() == 3 for x in xs):
        options: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, "pad_rows": pad_rows, "pad_cols": pad_cols}
        options |= {"power_of_2": power_of_2, "epsilon": epsilon}
        return by_output([cast_rowwise([x], dtype, **options) for x in xs])
    row = _new_copies(xs, False, pad_rows) if rowwise else None
    col = _new_copies(xs, True, pad_cols) if columnwise else None
    if xs[0].dim() == 3 and xs[0].numel():
        of_row, of_col = (None if copies is None else (copies.data[0], copies.scales[0]) for copies in (row, col))
        stacks.fill(xs[0], dtype, of_row, of_col, power_of_2, epsilon)
    elif xs[0].dim() == 3:  # nothing to launch; lines of no elements have the scale of amax 0
        pads = {"pad_rows": pad_rows, "pad_cols": pad_cols}
        sides = {"rowwise": rowwise, "columnwise": columnwise}
        return reference.cast_rowwise(xs, dtype, **sides, **pads, power_of_2=power_of_2, epsilon=epsilon)
    else:
        amaxes = amax_rowwise(xs, rowwise=rowwise, columnwise=columnwise)
        _fill(xs, amaxes, dtype, row, col, power_of_2, epsilon)
    made = [copies for copies in (row, col) if copies is not None]
    return [tensor for copies in made for tensor in (*(q.view(dtype) for q in copies.data), *copies.scales)]
