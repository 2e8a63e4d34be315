"""The launches of the two passes of `passes.py`, and the casts that are made of them.

A pass over one matrix or one batch is one launch; over more matrices, one for each dtype and alignment.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lowering.copies import by_output, empty_copy
from lowering.formats import fp8_max, pad_to_alignment
from lowering.rowwise import reference
from lowering.rowwise.kernels import passes
from lowering.rowwise.reference import Cast
from lowering.scaling import scales_from_amax
from lowering.triton.launch import batch_step, cdiv, grid_of, is_e5m2, on_device
from lowering.triton.many import groups, is_aligned, table_of

_TILE = {"BLOCK_R": passes.BLOCK_R, "BLOCK_C": passes.BLOCK_C}


def _tiles(rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns of tiles, which cover the padding, too."""
    return cdiv(pad_to_alignment(rows), passes.BLOCK_R), cdiv(pad_to_alignment(cols), passes.BLOCK_C)


def _num_warps(aligned: bool) -> int:
    return passes.NUM_WARPS if aligned else passes.NUM_WARPS_UNALIGNED


def _num_lines(x: torch.Tensor, rowwise: bool, columnwise: bool) -> int:
    """Lines of a matrix, or of each of a batch."""
    *_, rows, cols = x.shape
    return rows * rowwise + cols * columnwise


def _starts(xs: list[torch.Tensor], rowwise: bool, columnwise: bool) -> list[int]:
    """Where the lines of each matrix begin in the vector of amaxes; the last entry is its length."""
    starts = [0]
    for x in xs:
        starts.append(starts[-1] + _num_lines(x, rowwise, columnwise))
    return starts


def _table(
    xs: list[torch.Tensor], members: list[int], starts: list[int], copies: list[list[int]], device: torch.device
) -> tuple[torch.Tensor, int]:
    """The table of a launch, and its number of tiles. `copies`: fields of each matrix that say where its copies go."""
    rows = []
    for i in members:
        x = xs[i]
        tiles_r, tiles_c = _tiles(*x.shape)
        rows.append((tiles_r * tiles_c, [x.data_ptr(), *x.shape, *x.stride(), tiles_c, starts[i], *copies[i]]))
    return table_of(rows, device)


def amax_rowwise(xs: list[torch.Tensor], *, rowwise: bool, columnwise: bool) -> torch.Tensor:
    """See `reference.amax_rowwise`; also of one batch, matrix by matrix."""
    return _amax_bits(xs, _starts(xs, rowwise, columnwise), rowwise, columnwise).view(torch.float32)


def _amax_bits(xs: list[torch.Tensor], starts: list[int], rowwise: bool, columnwise: bool) -> torch.Tensor:
    """The first pass: the amaxes of all lines, as the int32 bits of float32."""
    count = xs[0].shape[0] if xs[0].dim() == 3 else 1
    bits = xs[0].new_zeros(count * starts[-1], dtype=torch.int32)
    flags = {"ROWWISE": rowwise, "COLUMNWISE": columnwise, **_TILE}
    with on_device(bits):
        if len(xs) == 1 and xs[0].numel():
            (x,) = xs
            *_, rows, cols = x.shape
            tiles_r, tiles_c = _tiles(rows, cols)
            passes.amax_kernel[grid_of(x, tiles_r * tiles_c)](
                x, bits, rows, cols, tiles_c, *x.stride()[-2:], batch_step(x), starts[-1],
                BATCHED=x.dim() == 3, **flags, num_warps=_num_warps(True),
            )  # fmt: skip
        elif len(xs) > 1:
            for element, aligned, members in groups(xs, is_aligned):
                table, num_tiles = _table(xs, members, starts, [[0] * 6] * len(xs), bits.device)
                passes.multi_amax_kernel[(num_tiles,)](
                    table, bits, len(members), element=element, ALIGNED=aligned, **flags, num_warps=_num_warps(aligned)
                )
    return bits


class Copies(NamedTuple):
    """Where the copies of one orientation go, a tensor for each matrix: uint8 data and float32 scales."""

    data: list[torch.Tensor]
    scales: list[torch.Tensor]


def _new_copies(xs: list[torch.Tensor], columnwise: bool, pad_outer: bool) -> Copies:
    data = [empty_copy(x, torch.uint8, columnwise, pad_outer) for x in xs]
    return Copies(data, [q.new_empty(*q.shape[:-1], 1, dtype=torch.float32) for q in data])


def _fill(
    xs: list[torch.Tensor],
    starts: list[int],
    bits: torch.Tensor,
    dtype: torch.dtype,
    cast: Cast,
    row: Copies | None,
    col: Copies | None,
) -> None:
    """The second pass. bits: what `_amax_bits` returns."""
    how = {"E5M2": is_e5m2(dtype), "FP8_MAX": fp8_max(dtype), "POWER_OF_2": cast.power_of_2}
    flags = {"ROWWISE": cast.rowwise, "COLUMNWISE": cast.columnwise, **how, **_TILE}
    first, second = row or col, col or row  # a copy that is not asked for is not touched
    assert first is not None
    assert second is not None
    places = list(zip(first.data, first.scales, second.data, second.scales, strict=True))
    for i, x in enumerate(xs):
        if not x.numel():
            amaxes = bits[starts[i] : starts[i + 1]].view(torch.float32)
            _fill_empty(x, amaxes, dtype, cast, [c and (c.data[i], c.scales[i]) for c in (row, col)])
    with on_device(bits):
        if len(xs) == 1 and xs[0].numel():
            x, (q_row, s_row, q_col, s_col) = xs[0], places[0]
            *_, rows, cols = x.shape
            tiles_r, tiles_c = _tiles(rows, cols)
            passes.cast_kernel[grid_of(x, tiles_r * tiles_c)](
                x, bits, q_row, s_row, q_col, s_col, rows, cols, pad_to_alignment(rows), pad_to_alignment(cols),
                q_row.shape[-2], q_col.shape[-2], tiles_c, *x.stride()[-2:], cast.epsilon, batch_step(x), starts[-1],
                BATCHED=x.dim() == 3, **flags, num_warps=_num_warps(True),
            )  # fmt: skip
        elif len(xs) > 1:
            fields = [[*(t.data_ptr() for t in copies), copies[0].shape[0], copies[2].shape[0]] for copies in places]
            for element, aligned, members in groups(xs, is_aligned):
                table, num_tiles = _table(xs, members, starts, fields, bits.device)
                passes.multi_cast_kernel[(num_tiles,)](
                    table, bits, len(members), cast.epsilon,
                    element=element, ALIGNED=aligned, **flags, num_warps=_num_warps(aligned),
                )  # fmt: skip


def _fill_empty(
    x: torch.Tensor,
    amaxes: torch.Tensor,
    dtype: torch.dtype,
    cast: Cast,
    copies: list[tuple[torch.Tensor, torch.Tensor] | None],
) -> None:
    """A matrix or batch without elements needs no launch: its copies are padding, its lines have the scales of amax 0."""
    for copy, lines in zip(copies, x.shape[-2:], strict=True):
        if copy is not None:
            data, scales = copy
            data.zero_()
            of_lines, amaxes = amaxes[..., :lines], amaxes[..., lines:]
            stored = scales.view(data.shape[:-1]).fill_(1.0)
            stored[..., :lines] = scales_from_amax(of_lines, dtype, power_of_2=cast.power_of_2, epsilon=cast.epsilon)[1]


def cast_lines_rowwise(xs: list[torch.Tensor], amaxes: torch.Tensor, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """See `reference.cast_lines_rowwise`."""
    cast = Cast.of(**options)
    slices, length = reference.scale_slices([x.shape for x in xs], cast)
    has_gaps = sum(end - start for start, end in slices) < length
    scales = (torch.ones if has_gaps else torch.empty)(length, dtype=torch.float32, device=xs[0].device)
    views, step = [scales[start:end] for start, end in slices], len(cast.wanted)
    made = {
        side[0]: Copies([empty_copy(x, torch.uint8, *side) for x in xs], views[i::step]) for i, side in enumerate(cast.wanted)
    }
    bits = amaxes.contiguous().view(torch.int32)
    _fill(xs, _starts(xs, cast.rowwise, cast.columnwise), bits, dtype, cast, made.get(False), made.get(True))
    return [*(q.view(dtype) for copies in made.values() for q in copies.data), scales]


# -- what is made of the two passes


def cast_rowwise(
    xs: list[torch.Tensor], dtype: torch.dtype, *, inverse: str | None = None, **options: Any
) -> list[torch.Tensor]:
    """See `reference.cast_rowwise`. Matrices share their launches, batches have their own. The scales of engines are left to
    the reference."""
    if inverse is not None:
        return reference.cast_rowwise(xs, dtype, inverse=inverse, **options)
    if len(xs) > 1 and any(x.dim() == 3 for x in xs):
        return by_output([cast_rowwise([x], dtype, **options) for x in xs])
    cast = Cast.of(**options)
    made = {side[0]: _new_copies(xs, *side) for side in cast.wanted}
    starts = _starts(xs, cast.rowwise, cast.columnwise)
    bits = _amax_bits(xs, starts, cast.rowwise, cast.columnwise)
    _fill(xs, starts, bits, dtype, cast, made.get(False), made.get(True))
    returned: list[torch.Tensor] = []
    for copies in made.values():
        returned += [q.view(dtype) for q in copies.data]
        returned += copies.scales
    return returned
