"""Lowerings of the blockwise casts.

NOTE [one block, one reduction] A copy with a scale per 1x128 values is a reduction over 128 elements and the 128
conversions that follow it, which Inductor makes one kernel that holds them in registers. So a copy of what code of this graph
computes and nothing else writes joins that code: x is never written. Each copy is a kernel of its own, because blocks of the
rowwise copy lie along rows and those of the columnwise one along columns; both compute x anew.

What is in memory whatever happens (results of GEMMs and attention, residual sums, inputs of the graph) is cast by the
hand-written kernels, which read it once for both copies. So is everything else that has ragged blocks, 128x128 blocks, or
scales that are no powers of two, whose divisions every thread would repeat.

Values that are saved for the backward are always cast by generated code, which reads them for the forward anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv

from lowering.copies import CastOptions, by_output
from lowering.formats import BLOCK, E4M3, GEMM_ALIGNMENT, Granularity, largest_finite
from lowering.inductor import buffers, elementwise
from lowering.inductor.tensorwise import Matrix

aten, lowering_ops = torch.ops.aten, torch.ops.lowering

Boxes = list[ir.TensorBox]

BLOCKS_OF_128 = (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128)


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
    """The cuts of loops over lines, and the distances of the lines of neighbouring steps. NOTE [pairs of columns] Triton gives
    a thread as many consecutive columns of a columnwise copy as 16 bytes hold, and so few rows: each thread would compute eight
    scales for the sixteen elements that it has. So the loops over lines take pairs of columns in another order, which for
    memory is the same: 32 columns, of which threads hold two and more rows."""
    in_pairs = columnwise and buffers.is_multiple_of(outer, 32)
    return ([outer // 32, 4, 4, 2], [32, 2, 8, 1]) if in_pairs else ([outer], [1])


def lines_of(matrix: Matrix, columnwise: bool) -> tuple[list[Any], Callable[..., tuple[Any, Any]]]:
    """Loops over [blocks, lines] of a copy, and a function of their indices and of that in a block: the row and the column."""
    outer, inner = (matrix.cols, matrix.rows) if columnwise else (matrix.rows, matrix.cols)
    lines, steps = _steps(outer, columnwise)

    def place(index: Sequence[Any], reduced: Sequence[Any]) -> tuple[Any, Any]:
        line = sum(part * step for part, step in zip(index[1:], steps, strict=True))
        along = index[0] * BLOCK + reduced[0]
        return (along, line) if columnwise else (line, along)

    return [inner // BLOCK, *lines], place


def copies(xs: Boxes, dtype: torch.dtype, cast: CastOptions, call: Callable[..., Any]) -> Boxes:
    """Matrix by matrix: what joins no code shares the launch of the operation, which `call` calls, and so do batches and copies
    that travel."""
    made = [_joined(x, dtype, cast) for x in xs]
    rest = [x for x, of_x in zip(xs, made, strict=True) if of_x is None]
    if rest:
        found = list(call(rest))
        of_rest = iter([found[i :: len(rest)] for i in range(len(rest))])
        made = [next(of_rest) if of_x is None else of_x for of_x in made]
    return by_output([of_x for of_x in made if of_x is not None])


# -- values that are saved for the backward


def lower_save_activation(x: ir.TensorBox, *, power_of_2: bool = True, epsilon: float = 0.0, as_bytes: bool = False) -> Boxes:
    """Loops over blocks and 128, in the order of the code that reads x in the forward, which joins them: as x lies in memory,
    or as `lines_of` has it where blockwise casts are. Where the last block of a row is shorter, elements are converted in loops
    over [rows, columns]."""
    *sizes, cols = x.get_size()
    rows, blocks = (V.graph.sizevars.simplify(size) for size in (math.prod(sizes), (cols + BLOCK - 1) // BLOCK))
    matrix, is_whole = Matrix(lowerings[aten.view.default](x, [rows, cols])), buffers.is_multiple_of(cols, BLOCK)
    device, dtype, of_x = matrix.device, torch.uint8 if as_bytes else E4M3, x.get_dtype()
    swaps = is_whole and buffers.graph_calls(lowering_ops.cast_with_scales.default, BLOCKS_OF_128)
    ranges, strides = ([blocks, rows], [1, blocks]) if swaps else ([rows, blocks], [blocks, 1])

    def place(index: Any, column: Any) -> tuple[Any, Any]:
        row, block = reversed(index[:2]) if swaps else index[:2]
        return row, block * BLOCK + column

    def magnitude(index: Any, reduced: Any) -> Any:
        row, col = place(index, reduced[0])
        if is_whole:
            return matrix.load_magnitude(row, col)
        is_valid = ops.lt(ops.index_expr(col, torch.int64), ops.index_expr(cols, torch.int64))
        return ops.masked(is_valid, lambda: matrix.load_magnitude(row, col), 0)

    amax = buffers.max_reduction(device, torch.int32, magnitude, ranges, [BLOCK], ReductionHint.OUTER)
    load = ir.TensorBox(buffers.realize_ordered(amax, strides)).make_loader()

    def scale(index: Any) -> Any:
        if power_of_2:
            return elementwise.as_float(elementwise.power_of_2_scale(load(index), E4M3, epsilon))
        found = elementwise.scale_from_amax(elementwise.as_float(load(index)), E4M3, 0, epsilon, power_of_2)
        return ops.minimum(found, ops.constant(largest_finite(of_x), torch.float32))

    def inverse(index: Any) -> Any:
        if power_of_2:
            return elementwise.reciprocal_of_power_of_2(elementwise.power_of_2_scale(load(index), E4M3, epsilon))
        return elementwise.reciprocal(scale(index))

    def quantized(index: Any) -> Any:
        row, col = place(index, index[2]) if is_whole else index
        factor = scale(index[:2] if is_whole else [row, FloorDiv(col, BLOCK)])
        value = matrix.load(row, col)
        return elementwise.e4m3_byte(value, factor) if as_bytes else elementwise.quantize(value, factor, E4M3)

    of_data = [*(step * BLOCK for step in strides), 1]
    loops, steps = ([*ranges, BLOCK], of_data) if is_whole else ([rows, cols], [cols, 1])
    data = buffers.realize_ordered(buffers.pointwise(device, dtype, quantized, loops), steps)
    factors = buffers.realize_ordered(buffers.pointwise(device, torch.float32, inverse, ranges), strides)
    made = buffers.as_matrix(data, rows, cols), buffers.as_matrix(factors, rows, blocks)
    shapes = [*sizes, cols], [*sizes, blocks]
    return [lowerings[aten.view.default](box, shape) for box, shape in zip(made, shapes, strict=True)]


def lower_load_activation(q: ir.TensorBox, scale_inv: ir.TensorBox, *, dtype: torch.dtype) -> ir.TensorBox:
    """Pointwise code, which joins what reads it."""
    data, scales, is_bytes = q.make_loader(), scale_inv.make_loader(), q.get_dtype() == torch.uint8

    def value(index: Any) -> Any:
        x = elementwise.e4m3_value(data(index)) if is_bytes else elementwise.to_float32(data(index), E4M3)
        product = ops.mul(x, scales([*index[:-1], FloorDiv(index[-1], BLOCK)]))
        return ops.to_dtype(product, dtype, src_dtype=torch.float32)

    return ir.Pointwise.create(device=q.get_device(), dtype=dtype, inner_fn=value, ranges=q.get_size())


LOWERINGS = {
    lowering_ops.save_activation.default: lower_save_activation,
    lowering_ops.load_activation.default: lower_load_activation,
}
