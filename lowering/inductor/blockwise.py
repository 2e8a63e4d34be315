"""Lowerings of the blockwise casts.

NOTE [one block, one reduction] A copy with a scale per 1x128 values is a reduction over 128 elements and the 128
conversions that follow it, which Inductor makes one kernel that holds them in registers. So a copy of what code of this graph
computes and nothing else writes joins that code: x is never written. Each copy is a kernel of its own, because blocks of the
rowwise copy lie along rows and those of the columnwise one along columns; both compute x anew.

What is in memory whatever happens (results of GEMMs and attention, residual sums, inputs of the graph) is cast by the
hand-written kernels, which read it once for both copies. So is everything else that has ragged blocks, 128x128 blocks, or
scales that are no powers of two, whose divisions every thread would repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

from lowering.copies import CastOptions, by_output
from lowering.formats import BLOCK, GEMM_ALIGNMENT
from lowering.inductor import buffers, elementwise
from lowering.inductor.tensorwise import Matrix

aten, lowering_ops = torch.ops.aten, torch.ops.lowering

Boxes = list[ir.TensorBox]


def _sizes(x: ir.TensorBox, columnwise: bool) -> tuple[Any, Any]:
    rows, cols = x.get_size()
    return (cols, rows) if columnwise else (rows, cols)


def _has_whole_blocks(x: ir.TensorBox, columnwise: bool) -> bool:
    """True if a copy has no ragged block and no padding."""
    outer, inner = _sizes(x, columnwise)
    return buffers.is_multiple_of(inner, BLOCK) and buffers.is_multiple_of(outer, GEMM_ALIGNMENT) and not buffers.is_empty(x)


def _joined(x: ir.TensorBox, dtype: torch.dtype, cast: CastOptions) -> Boxes | None:
    """The copies of x, each with its scales, if they join the code that computes x; else None. Whole blocks need no padding.
    See NOTE [one block, one reduction]."""
    sides = [columnwise for columnwise, _ in cast.wanted]
    if len(x.get_size()) == 3:
        return _joined_batch(x, dtype, cast)
    is_default = cast.power_of_2 and not cast.is_square and not cast.compact
    is_whole = is_default and all(_has_whole_blocks(x, columnwise) for columnwise in sides)
    if not (is_whole and buffers.is_computed(x)) or buffers.is_in_memory(x):
        return None
    return [box for columnwise in sides for box in _copy(x, dtype, columnwise, cast.epsilon)]


def _joined_batch(x: ir.TensorBox, dtype: torch.dtype, cast: CastOptions) -> Boxes | None:
    """`_joined` of a batch of one, as which rows in groups are cast: the memory of its scales is that of a matrix's."""
    if not V.graph.sizevars.statically_known_equals(x.get_size()[0], 1):
        return None
    made = _joined(lowerings[aten.select.int](x, 0, 0), dtype, cast)
    if made is None:
        return None
    scales = (lowerings[aten.permute.default](scale_inv, [1, 0]) for scale_inv in made[1::2])
    return [lowerings[aten.unsqueeze.default](box, 0) for pair in zip(made[::2], scales, strict=True) for box in pair]


def _copy(x: ir.TensorBox, dtype: torch.dtype, columnwise: bool, epsilon: float) -> Boxes:
    """A copy [outer, inner] and its scales [inner / 128, outer], in loops over `lines_of` and 128."""
    matrix = Matrix(x)
    outer, inner = _sizes(x, columnwise)
    ranges, place = lines_of(matrix, columnwise)
    steps = _steps(outer, columnwise)[1]

    amax = buffers.max_reduction(
        matrix.device,
        torch.int32,
        lambda index, reduced: matrix.load_magnitude(*place(index, reduced)),
        ranges,
        [BLOCK],
        ReductionHint.OUTER,
    )
    of_scales = [outer, *steps]
    load = ir.TensorBox(buffers.realize_ordered(amax, of_scales)).make_loader()

    def scale_bits(index: Any) -> Any:
        return elementwise.power_of_2_scale(load(index), dtype, epsilon)

    def quantized(index: Any) -> Any:
        scale = elementwise.as_float(scale_bits(index[:-1]))
        return elementwise.quantize(matrix.load(*place(index[:-1], index[-1:])), scale, dtype)

    inverse = buffers.pointwise(
        matrix.device, torch.float32, lambda index: elementwise.reciprocal_of_power_of_2(scale_bits(index)), ranges
    )
    scale_inv = buffers.as_matrix(buffers.realize_ordered(inverse, of_scales), inner // BLOCK, outer)
    return [copy_of_lines(matrix, columnwise, quantized, dtype), scale_inv]


def copy_of_lines(matrix: Matrix, columnwise: bool, quantized: Callable[[Any], Any], dtype: torch.dtype) -> ir.TensorBox:
    """A copy [outer, inner] in loops over `lines_of` and 128, of whose indices `quantized` makes an element."""
    outer, inner = (matrix.cols, matrix.rows) if columnwise else (matrix.rows, matrix.cols)
    ranges, _ = lines_of(matrix, columnwise)
    strides = [BLOCK, *(step * inner for step in _steps(outer, columnwise)[1]), 1]
    data = buffers.realize_ordered(buffers.pointwise(matrix.device, dtype, quantized, [*ranges, BLOCK]), strides)
    return buffers.as_matrix(data, outer, inner)


def _steps(outer: Any, columnwise: bool) -> tuple[list[Any], list[int]]:
    """The cuts of loops over lines, and the distances of the lines of neighbouring steps.

    NOTE [pairs of columns] Triton gives a thread as many consecutive columns of a columnwise copy as 16 bytes hold, and so few
    rows: each thread would compute eight scales for the sixteen elements that it has. So the loops over lines take pairs of
    columns in another order, which for memory is the same: 32 columns, of which threads hold two and more rows.
    """
    in_pairs = columnwise and buffers.is_multiple_of(outer, 32)
    return ([outer // 32, 4, 4, 2], [32, 2, 8, 1]) if in_pairs else ([outer], [1])


def line_at(index: Sequence[Any], steps: Sequence[int]) -> Any:
    """The line of an index of loops over [blocks, lines]."""
    return sum(part * step for part, step in zip(index[1:], steps, strict=True))


def lines_of(matrix: Matrix, columnwise: bool) -> tuple[list[Any], Callable[..., tuple[Any, Any]]]:
    """Loops over [blocks, lines] of a copy, and a function of their indices and of that in a block: the row and the column."""
    outer, inner = (matrix.cols, matrix.rows) if columnwise else (matrix.rows, matrix.cols)
    lines, steps = _steps(outer, columnwise)

    def place(index: Sequence[Any], reduced: Sequence[Any]) -> tuple[Any, Any]:
        line = line_at(index, steps)
        along = index[0] * BLOCK + reduced[0]
        return (along, line) if columnwise else (line, along)

    return [inner // BLOCK, *lines], place


def lower_cast_blockwise(xs: Boxes, dtype: torch.dtype, *, inverse: str | None = None, **options: Any) -> Boxes:
    """Matrix by matrix: what joins no code shares the launch of the operation, and so do batches and copies that travel. Casts
    as engines make them have no kernel."""
    if inverse is not None:
        return list(
            buffers.call_operation(lowering_ops.cast_blockwise.default, is_read=False)(xs, dtype, inverse=inverse, **options)
        )
    cast = CastOptions(**options)
    made = [_joined(x, dtype, cast) for x in xs]
    rest = [x for x, of_x in zip(xs, made, strict=True) if of_x is None]
    if rest:
        found = list(buffers.call_operation(lowering_ops.cast_blockwise.default)(rest, dtype, **options))
        of_rest = iter([found[i :: len(rest)] for i in range(len(rest))])
        made = [next(of_rest) if of_x is None else of_x for of_x in made]
    return by_output([of_x for of_x in made if of_x is not None])


LOWERINGS = {lowering_ops.cast_blockwise.default: lower_cast_blockwise}
