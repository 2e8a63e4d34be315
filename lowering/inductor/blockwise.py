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

import dataclasses
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler
from torch._inductor.runtime.hints import ReductionHint

from lowering.formats import BLOCK, GEMM_ALIGNMENT, Granularity
from lowering.inductor import elementwise
from lowering.inductor.buffers import (
    as_matrix,
    is_computed,
    is_empty,
    is_in_memory,
    is_multiple_of,
    max_reduction,
    pointwise,
    realize_ordered,
)
from lowering.inductor.casts import Matrix

lowering_ops = torch.ops.lowering

Boxes = list[ir.TensorBox]


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """One copy of a matrix."""

    dtype: torch.dtype
    granularity: str
    columnwise: bool
    pad_outer: bool
    power_of_2: bool
    epsilon: float


def _joins(x: ir.TensorBox, wanted: _Wanted) -> bool:
    """Whether a copy of x joins the code that computes x. See NOTE [one block, one reduction]."""
    outer, inner = _sizes(x, wanted)
    is_default = wanted.power_of_2 and wanted.granularity == Granularity.BLOCK_1X128
    is_whole = is_multiple_of(inner, BLOCK) and is_multiple_of(outer, GEMM_ALIGNMENT) and not is_empty(x)
    return is_default and is_whole and is_computed(x) and not is_in_memory(x)


def _sizes(x: ir.TensorBox, wanted: _Wanted) -> tuple[Any, Any]:
    rows, cols = x.get_size()
    return (cols, rows) if wanted.columnwise else (rows, cols)


def _copy(x: ir.TensorBox, wanted: _Wanted) -> Boxes:
    """A copy [outer, inner] and its scales [inner / 128, outer], in loops over [blocks, lines, 128].

    NOTE [pairs of columns] Triton gives a thread as many consecutive columns of a columnwise copy as 16 bytes hold, and so few
    rows: each thread would compute eight scales for the sixteen elements that it has. So the loops over lines take pairs of
    columns in another order, which for memory is the same: 32 columns, of which threads hold two and more rows.
    """
    matrix = Matrix(x)
    outer, inner = _sizes(x, wanted)
    in_pairs = wanted.columnwise and is_multiple_of(outer, 32)
    lines, steps = ([outer // 32, 4, 4, 2], [32, 2, 8, 1]) if in_pairs else ([outer], [1])
    ranges = [inner // BLOCK, *lines]

    def place(block: Any, *line_and_offset: Any) -> tuple[Any, Any]:
        *parts, offset = line_and_offset
        line = sum(part * step for part, step in zip(parts, steps, strict=True))
        along = block * BLOCK + offset
        return (along, line) if wanted.columnwise else (line, along)

    amax = max_reduction(
        matrix.device,
        torch.int32,
        lambda index, reduced: matrix.load_magnitude(*place(*index, *reduced)),
        ranges,
        [BLOCK],
        ReductionHint.OUTER,
    )
    of_scales = [outer, *steps]
    load = ir.TensorBox(realize_ordered(amax, of_scales)).make_loader()

    def scale_bits(index: Any) -> Any:
        return elementwise.power_of_2_scale(load(index), wanted.dtype, wanted.epsilon)

    def quantized(index: Any) -> Any:
        scale = elementwise.as_float(scale_bits(index[:-1]))
        return elementwise.quantize(matrix.load(*place(*index)), scale, wanted.dtype, matrix.device)

    inverse = pointwise(
        matrix.device, torch.float32, lambda index: elementwise.reciprocal_of_power_of_2(scale_bits(index)), ranges
    )
    scale_inv = as_matrix(realize_ordered(inverse, of_scales), inner // BLOCK, outer)
    strides = [BLOCK, *(step * inner for step in steps), 1]
    data = realize_ordered(pointwise(matrix.device, wanted.dtype, quantized, [*ranges, BLOCK]), strides)
    return [as_matrix(data, outer, inner), scale_inv]


def _cast(x: ir.TensorBox, wanted: _Wanted) -> Boxes:
    if _joins(x, wanted):
        return _copy(x, wanted)
    run = fallback_handler(lowering_ops.cast_blockwise.default, add_to_fallback_set=False)
    return list(run(x, wanted.dtype, **_options(wanted), columnwise=wanted.columnwise, pad_outer=wanted.pad_outer))


def _options(wanted: _Wanted) -> dict[str, Any]:
    return {"granularity": wanted.granularity, "power_of_2": wanted.power_of_2, "epsilon": wanted.epsilon}


def lower_cast_blockwise(
    x: ir.TensorBox,
    dtype: torch.dtype,
    *,
    granularity: str,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> Any:
    """One copy and its scales."""
    return tuple(_cast(x, _Wanted(dtype, granularity, columnwise, pad_outer, power_of_2, epsilon)))


def lower_multi_cast_blockwise(
    xs: Boxes,
    dtype: torch.dtype,
    *,
    granularity: str,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> Any:
    """One copy of each matrix: the data of all, then the scales of all."""
    wanted = _Wanted(dtype, granularity, columnwise, pad_outer, power_of_2, epsilon)
    run = fallback_handler(lowering_ops.multi_cast_blockwise.default, add_to_fallback_set=False)
    options = {**_options(wanted), "columnwise": columnwise, "pad_outer": pad_outer}
    return _each(xs, 2, lambda x: _copy(x, wanted) if _joins(x, wanted) else None, lambda rest: run(rest, dtype, **options))


def lower_cast_transpose_blockwise(
    x: ir.TensorBox,
    dtype: torch.dtype,
    *,
    granularity: str,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> Any:
    """Both copies and their scales."""
    rowwise = _Wanted(dtype, granularity, False, pad_rows, power_of_2, epsilon)
    made = _both(x, rowwise, pad_cols)
    if made is not None:
        return tuple(made)
    run = fallback_handler(lowering_ops.cast_transpose_blockwise.default, add_to_fallback_set=False)
    return run(x, dtype, **_options(rowwise), pad_rows=pad_rows, pad_cols=pad_cols)


def lower_multi_cast_transpose_blockwise(
    xs: Boxes,
    dtype: torch.dtype,
    *,
    granularity: str,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> Any:
    """Both copies of each matrix and their scales: each of the four outputs for all of them."""
    rowwise = _Wanted(dtype, granularity, False, pad_rows, power_of_2, epsilon)
    run = fallback_handler(lowering_ops.multi_cast_transpose_blockwise.default, add_to_fallback_set=False)
    options = {**_options(rowwise), "pad_rows": pad_rows, "pad_cols": pad_cols}
    return _each(xs, 4, lambda x: _both(x, rowwise, pad_cols), lambda rest: run(rest, dtype, **options))


def _both(x: ir.TensorBox, rowwise: _Wanted, pad_cols: bool) -> Boxes | None:
    """Both copies where both join the code that computes x, else None: one read then serves both."""
    columnwise = dataclasses.replace(rowwise, columnwise=True, pad_outer=pad_cols)
    if not (_joins(x, rowwise) and _joins(x, columnwise)):
        return None
    return [*_copy(x, rowwise), *_copy(x, columnwise)]


def _each(xs: Boxes, num_outputs: int, join: Any, run: Any) -> Boxes:
    """The outputs of all matrices, output by output: of those that join their producers, and of the rest by one launch."""
    made = [join(x) for x in xs]
    rest = [x for x, of_x in zip(xs, made, strict=True) if of_x is None]
    if rest:
        found = run(rest)
        of_rest = iter([found[i :: len(rest)] for i in range(len(rest))])
        made = [next(of_rest) if of_x is None else of_x for of_x in made]
    return [of_x[i] for i in range(num_outputs) for of_x in made]


LOWERINGS = {
    lowering_ops.cast_blockwise.default: lower_cast_blockwise,
    lowering_ops.multi_cast_blockwise.default: lower_multi_cast_blockwise,
    lowering_ops.cast_transpose_blockwise.default: lower_cast_transpose_blockwise,
    lowering_ops.multi_cast_transpose_blockwise.default: lower_multi_cast_transpose_blockwise,
}
