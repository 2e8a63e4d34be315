"""The lowering of casts that compute scales, in rows above all.

NOTE [two reads] A scale needs its whole row or column, so what is quantized is read, or computed, twice; unless a kernel holds
the row. The copy and the producer of x decide.

- Rowwise copy: a reduction over each row, then the copy, which Inductor makes one kernel. It joins the code that computes x,
  whether that is pointwise or has a reduction over rows of its own (a norm).
- Columnwise copy of what code of this graph computes and nothing else writes: a reduction over the columns, then a tile kernel
  (`tensorwise.py`); both compute x anew.
- Columnwise copy of what is in memory whatever happens (results of GEMMs and attention, residual sums, inputs of the graph):
  the hand-written passes. They make both copies if no code of this graph computes x, because one read then serves both amaxes.
- Many matrices at once are in memory, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.runtime.hints import ReductionHint

from lowering.copies import CastOptions, by_output
from lowering.formats import BLOCK, GEMM_ALIGNMENT, Granularity
from lowering.inductor import blockwise, buffers, elementwise
from lowering.inductor.blockwise import BLOCKS_OF_128, copy_of_lines, lines_of
from lowering.inductor.buffers import facts_of
from lowering.inductor.tensorwise import (
    Matrix,
    is_tiled,
    row_amaxes,
    tile_copies,
    transposed_copy,
)
from lowering.rowwise.reference import scale_slices

lowering_ops = torch.ops.lowering

Boxes = list[ir.TensorBox]


def _scale(amax: Any, dtype: torch.dtype, cast: CastOptions) -> Any:
    return elementwise.scale_from_amax(amax, dtype, 0, cast.epsilon, cast.power_of_2)


def _in_two_passes(xs: Boxes, dtype: torch.dtype, cast: CastOptions) -> Boxes:
    """The hand-written passes: rowwise copies, their scales, columnwise copies, their scales."""
    of_lines = buffers.call_operation(lowering_ops.amax_rowwise.default)
    amaxes = of_lines(xs, rowwise=cast.rowwise, columnwise=cast.columnwise)
    lines = buffers.call_operation(lowering_ops.cast_lines_rowwise.default)
    *data, scales = lines(xs, amaxes, dtype, **cast.sides, power_of_2=cast.power_of_2, epsilon=cast.epsilon)
    slices, _ = scale_slices([x.get_size() for x in xs], cast)
    views = [_part(scales, start, end) for start, end in slices]
    step, count = len(cast.wanted), len(xs)
    groups = [group for i in range(step) for group in (data[i * count : (i + 1) * count], views[i::step])]
    return [box for group in groups for box in group]


def _part(vector: ir.TensorBox, start: Any, end: Any) -> ir.TensorBox:
    """A part of a vector as a column, without a copy."""
    part = lowerings[torch.ops.aten.slice.Tensor](vector, 0, start, end)
    return lowerings[torch.ops.aten.unsqueeze.default](part, 1)


def _rowwise_copy(x: ir.TensorBox, dtype: torch.dtype, cast: CastOptions) -> Boxes:
    matrix = Matrix(x)
    amax = row_amaxes(matrix)
    load = amax.make_loader()

    def scale_at(row: Any) -> Any:
        return _scale(load([row]), dtype, cast)

    def quantized(index: Any) -> Any:
        row, col = index
        return elementwise.quantize(matrix.load(row, col), scale_at(row), dtype)

    scale_inv = _column(matrix, lambda row: elementwise.reciprocal(scale_at(row)), matrix.rows)
    copy = buffers.pointwise(matrix.device, dtype, quantized, [matrix.rows, matrix.cols])
    box = ir.TensorBox(buffers.realize_ordered(copy, [matrix.cols, 1]))
    # The sums of a norm are left as they are: NOTE [nothing else changes] in statistics.py.
    loops = "" if buffers.needs_row_reduction(x, matrix.rows, matrix.cols) else "rows"
    facts_of(box).lines[False] = loops, scale_at
    return [box, scale_inv]


def _columnwise_copy(x: ir.TensorBox, dtype: torch.dtype, cast: CastOptions) -> Boxes:
    """The scales are computed once, by the last part of the reduction: a tile kernel would compute them per element."""
    matrix = Matrix(x)
    amax = _column_amaxes(matrix)
    load = amax.make_loader()
    scale = buffers.pointwise_like(amax, lambda index: _scale(load(index), dtype, cast), [matrix.cols])
    scale.realize()
    load_scale = scale.make_loader()
    scale_inv = _column(matrix, lambda col: elementwise.reciprocal(load_scale([col])), matrix.cols)

    def quantized(row: Any, col: Any) -> Any:
        return elementwise.quantize(matrix.load(row, col), load_scale([col]), dtype)

    if buffers.is_measured_columnwise() and buffers.is_multiple_of(matrix.rows, BLOCK):
        _, place = lines_of(matrix, columnwise=True)
        data = copy_of_lines(matrix, True, lambda index: quantized(*place(index[:-1], index[-1:])), dtype)
        facts_of(data).lines[True] = "blocks", lambda col: load_scale([col])
        return [data, scale_inv]
    if is_tiled(x):
        return [*tile_copies(matrix, quantized, dtype, rowwise=False, columnwise=True), scale_inv]
    return [transposed_copy(matrix, quantized, dtype), scale_inv]


def _column(matrix: Matrix, inner: Callable[[Any], Any], lines: Any) -> ir.TensorBox:
    """A float32 buffer [lines, 1], whose strides are those that torch's GEMM asks for."""
    loops = buffers.pointwise(matrix.device, torch.float32, lambda index: inner(index[0]), [lines, 1])
    return ir.TensorBox(buffers.realize_ordered(loops, [1, 1]))


def _column_amaxes(matrix: Matrix) -> ir.TensorBox:
    """The amax of each column [cols]; Inductor divides the rows among programs."""
    box = ir.Reduction.create(
        device=matrix.device,
        dst_dtype=torch.int32,
        src_dtype=torch.int32,
        inner_fn=lambda index, reduced: matrix.load_magnitude(reduced[0], index[0]),
        ranges=[matrix.cols],
        reduction_ranges=[matrix.rows],
        reduction_type="max",
        reduction_hint=ReductionHint.OUTER,
    )
    box.realize()
    return buffers.as_float32(box.data)


def _copies(x: ir.TensorBox, dtype: torch.dtype, cast: CastOptions) -> Boxes:
    """The copies of one matrix, each with its scales."""
    rows, cols = x.get_size()
    pads_rows = cast.rowwise and cast.pad_rows and not buffers.is_multiple_of(rows, GEMM_ALIGNMENT)
    needs_passes = buffers.is_empty(x) or pads_rows or not buffers.is_multiple_of(cols, GEMM_ALIGNMENT)
    if needs_passes or (cast.columnwise and not (buffers.is_computed(x) if cast.rowwise else not buffers.is_in_memory(x))):
        return _in_two_passes([x], dtype, cast)
    row = _rowwise_copy(x, dtype, cast) if cast.rowwise else []
    if not cast.columnwise:
        return row
    if buffers.is_in_memory(x):
        columns = _in_two_passes([x], dtype, dataclasses.replace(cast, rowwise=False))
    else:
        columns = _columnwise_copy(x, dtype, cast)
    if row:  # those who measure ask the first copy
        facts_of(row[0]).lines |= facts_of(columns[0]).lines
    return [*row, *columns]


def lower_cast_with_scales(xs: Boxes, dtype: torch.dtype, **options: Any) -> Boxes:
    """By the kind of scales. In rows columnwise copies of many share two launches; a rowwise copy alone is a kernel that reads
    its matrix once, which the two passes of many do twice. Batches have launches of their own. In blocks of 32 there is no
    generated code, and casts as engines make them have no kernel either."""
    cast = CastOptions(**options)
    call = buffers.call_operation(lowering_ops.cast_with_scales.default, is_read=cast.inverse is None)
    if cast.inverse is None and cast.granularity in BLOCKS_OF_128:
        return blockwise.copies(xs, dtype, cast, lambda rest: call(rest, dtype, **options))
    is_called = cast.inverse is not None or cast.granularity == Granularity.BLOCK_1X32
    if is_called or any(len(x.get_size()) == 3 for x in xs):
        return list(call(xs, dtype, **options))
    if len(xs) > 1 and cast.columnwise:
        return _in_two_passes(xs, dtype, cast)
    return by_output([_copies(x, dtype, cast) for x in xs])


LOWERINGS = {lowering_ops.cast_with_scales.default: lower_cast_with_scales}
