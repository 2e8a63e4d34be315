"""Lowering of quantization_statistics: sums over parts of a matrix, which join the code that casts it, and one operation that
makes the vector of them.

NOTE [nothing else changes] A measured step must train as others do, bit for bit. Whether Inductor writes a value decides what
is rounded, and how many elements a program of a reduction takes in which order they are added. So the statistics

- are no reader of the matrix in the graph: `prepare` has them read its FP8 copy, whose lowering knows the matrix
  (`buffers.source_of`). With one reader more, Inductor might write what it computes twice otherwise;
- are reductions of tiles, which join the loops of casts alone. These have no sums of their own: maxima and elements are the
  same in every order.

What is in memory, has other loops or no whole tiles is measured by the operation itself (`lowering/kernels.py`),
behind the cast: one read for both copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.utils import has_free_symbols
from torch._inductor.virtualized import ops

from lowering.formats import BLOCK, E5M2, Granularity, largest_rounded
from lowering.inductor import blockwise, buffers, elementwise
from lowering.inductor.buffers import Lines
from lowering.inductor.tensorwise import COLUMNS, ROWS, Matrix, is_tiled, tile_places
from lowering.statistics import PACKED_BITS

lowering_ops = torch.ops.lowering

#: Rows of a part of a matrix that is in memory: with COLUMNS columns, 2048 elements.
_ROWS = 64

Load = Callable[[Any], Any]
Place = Callable[[Sequence[Any], Sequence[Any]], tuple[Any, Any]]


def lower_quantization_statistics(
    x: ir.TensorBox,
    dtype: torch.dtype,
    scale: ir.TensorBox | None = None,
    scale_inv: ir.TensorBox | None = None,
    offs: ir.TensorBox | None = None,
    index: ir.TensorBox | None = None,
    of_rows: ir.TensorBox | None = None,
    of_columns: ir.TensorBox | None = None,
    *,
    granularity: str,
    rowwise: bool = True,
    columnwise: bool = False,
    power_of_2: bool = False,
    epsilon: float = 0.0,
    **options: Any,
) -> list[ir.TensorBox]:
    """In loops over the matrix where code of this graph computes it in whole tiles; else one call for both copies."""
    of_cast = x
    x = buffers.source_of(x)
    if len(x.get_size()) == 3 and len(of_cast.get_size()) == 3 and of_cast is not x:  # rows in groups, cast as a batch of one
        x = lowerings[torch.ops.aten.select.int](x, 0, 0)
    is_matrix = len(x.get_size()) == 2 and not has_free_symbols(x.get_size()) and not buffers.is_empty(x)
    kind, sides = Granularity(granularity), [side for side, wanted in ((False, rowwise), (True, columnwise)) if wanted]
    made: dict[bool, ir.TensorBox] = {}
    if scale is not None and scale_inv is not None:
        loops = buffers.facts_of(of_cast).loops
        can_join = offs is None or (index is None and bool(loops))
        if is_matrix and can_join and is_tiled(x) and not scale.get_size():
            made = {side: _of_tensor(x, dtype, scale, scale_inv, loops, offs) for side in sides}
    elif is_matrix and kind.block is None:
        known = buffers.facts_of(of_cast).lines
        joined = [side for side in sides if side in known and index is None and _can_join(x, side, known[side][0], offs)]
        made = {side: _of_lines(x, dtype, side, known[side], offs) for side in joined}
    elif is_matrix and power_of_2 and index is None and buffers.is_computed(x) and not buffers.is_in_memory(x):
        joined = [side for side in sides if _has_whole_blocks(x, kind, side)]
        joined = joined if offs is None else [side for side in joined if not side and kind is Granularity.BLOCK_1X128]
        made = {side: _of_blocks(x, dtype, kind, side, epsilon, offs) for side in joined}
    rest = [side for side in sides if side not in made]
    if rest:
        of_rest = [factors if side in rest else None for side, factors in ((False, of_rows), (True, of_columns))]
        call = buffers.call_operation(lowering_ops.quantization_statistics.default, is_read=False, is_traced=False)
        options |= {"granularity": granularity, "power_of_2": power_of_2, "epsilon": epsilon}
        found = call(
            x, dtype, scale, scale_inv, offs, index, *of_rest, rowwise=False in rest, columnwise=True in rest, **options
        )
        made |= dict(zip(rest, found, strict=True))
    return [made[side] for side in sides]


def _can_join(x: ir.TensorBox, columnwise: bool, loops: str, offs: ir.TensorBox | None) -> bool:
    """True if there are loops for the lines of a copy; of rows in groups, only those over rows."""
    if loops == "rows":
        return True
    return offs is None and buffers.is_multiple_of(x.get_size()[0 if columnwise else 1], BLOCK)


def _has_whole_blocks(x: ir.TensorBox, kind: Granularity, columnwise: bool) -> bool:
    rows, cols = x.get_size()[:: -1 if columnwise else 1]
    if kind is Granularity.BLOCK_1X128:
        return buffers.is_multiple_of(cols, BLOCK)
    is_square = kind is Granularity.BLOCK_128X128
    return is_square and buffers.is_multiple_of(cols, BLOCK) and buffers.is_multiple_of(rows, BLOCK)


def _of_tensor(
    x: ir.TensorBox, dtype: torch.dtype, scale: ir.TensorBox, scale_inv: ir.TensorBox, loops: str, offs: ir.TensorBox | None
) -> ir.TensorBox:
    """In the cast's loops, "tiles" or "rows", where it has joined the code that computes x. Else in loops that no other code
    has: of what is in memory, and of what a norm computes, whose rows Inductor then adds as it always does."""
    matrix = Matrix(x)
    tiles, rows, columns = tile_places(matrix)
    if loops == "tiles":
        ranges, reduced = [tiles, rows], [columns]

        def place(index: Sequence[Any], inner: Sequence[Any]) -> tuple[Any, Any]:
            return index[1], index[0] * COLUMNS + inner[0]
    elif loops == "rows":
        ranges, reduced = [rows], [matrix.cols]

        def place(index: Sequence[Any], inner: Sequence[Any]) -> tuple[Any, Any]:
            return index[0], inner[0]
    else:
        height = _ROWS if buffers.is_multiple_of(rows, _ROWS) else ROWS
        ranges, reduced = [tiles, rows // height], [height, columns]

        def place(index: Sequence[Any], inner: Sequence[Any]) -> tuple[Any, Any]:
            return index[1] * height + inner[0], index[0] * COLUMNS + inner[1]

    for scalar in (scale, scale_inv):
        scalar.realize()
    parts = _parts(matrix, dtype, _of_scalar(scale), _of_scalar(scale_inv), place, ranges, reduced)
    return _vector(parts, scale, matrix, dtype, are_blocks=False, offs=offs)


def _of_scalar(scalar: ir.TensorBox) -> Load:
    own = buffers.as_own_input(scalar)
    load = own.make_loader()
    return lambda index: load([0] * len(own.get_size()))


def _of_lines(x: ir.TensorBox, dtype: torch.dtype, columnwise: bool, lines: Lines, offs: ir.TensorBox | None) -> ir.TensorBox:
    """A part for each row, in the loops of its copy, or for each 128 elements of a line."""
    matrix, (loops, scale_of_line) = Matrix(x), lines
    if loops == "rows":
        ranges, reduced, of_lines = [matrix.rows], [matrix.cols], [matrix.rows]

        def place(index: Sequence[Any], inner: Sequence[Any]) -> tuple[Any, Any]:
            return index[0], inner[0]

        def scale_at(index: Sequence[Any]) -> Any:
            return scale_of_line(index[0])
    else:
        ranges, place = blockwise.lines_of(matrix, columnwise)
        reduced, of_lines = [BLOCK], ranges[1:]

        def scale_at(index: Sequence[Any]) -> Any:
            return scale_of_line(place(index, [0])[1 if columnwise else 0])

    def inverse_at(index: Sequence[Any]) -> Any:
        return elementwise.reciprocal(scale_at(index))

    def scale_of(index: Sequence[Any]) -> Any:
        return scale_at(index if loops == "rows" else [0, *index])

    parts = _parts(matrix, dtype, scale_at, inverse_at, place, ranges, reduced)
    scale = _dense(buffers.pointwise(matrix.device, torch.float32, scale_of, of_lines), of_lines)
    return _vector(parts, ir.TensorBox(scale), matrix, dtype, are_blocks=True, offs=offs)


def _of_blocks(
    x: ir.TensorBox, dtype: torch.dtype, kind: Granularity, columnwise: bool, epsilon: float, offs: ir.TensorBox | None
) -> ir.TensorBox:
    """A part for each block, whose scale is made of its amax as the cast makes it. offs: of rows in groups, blocks of rows."""
    matrix = Matrix(x)
    if kind is Granularity.BLOCK_128X128:
        ranges, reduced = [matrix.rows // BLOCK, matrix.cols // BLOCK], [BLOCK, BLOCK]

        def place(index: Sequence[Any], inner: Sequence[Any]) -> tuple[Any, Any]:
            return index[0] * BLOCK + inner[0], index[1] * BLOCK + inner[1]
    else:
        ranges, place = blockwise.lines_of(matrix, columnwise)
        reduced = [BLOCK]

    def magnitude(index: Any, inner: Any) -> Any:
        return matrix.load_magnitude(*place(index, inner))

    amax = buffers.max_reduction(matrix.device, torch.int32, magnitude, ranges, reduced, ReductionHint.OUTER)
    load = ir.TensorBox(_dense(amax, ranges)).make_loader()

    def scale_at(index: Any) -> Any:
        return elementwise.as_float(bits_at(index))

    def bits_at(index: Any) -> Any:
        return elementwise.power_of_2_scale(load(index), dtype, epsilon)

    def inverse_at(index: Any) -> Any:
        return elementwise.reciprocal_of_power_of_2(bits_at(index))

    parts = _parts(matrix, dtype, scale_at, inverse_at, place, ranges, reduced)
    scale = _dense(buffers.pointwise(matrix.device, torch.float32, scale_at, ranges), ranges)
    return _vector(parts, ir.TensorBox(scale), matrix, dtype, are_blocks=True, offs=offs)


def _dense(loops: ir.Loops, ranges: Sequence[Any]) -> ir.StorageBox:
    return buffers.realize_ordered(loops, ir.FlexibleLayout.contiguous_strides(list(ranges)))


def _parts(
    matrix: Matrix, dtype: torch.dtype, scale: Load, scale_inv: Load, place: Place, ranges: list[Any], reduced: list[Any]
) -> list[ir.TensorBox]:
    """Squares and errors, float64, the amax as bits, and the counts in one number, of each part of a matrix."""
    limit = ops.constant

    def element(index: Any, inner: Any) -> tuple[Any, ...]:
        """x, its FP8 value in float32, whether x is finite."""
        x = matrix.load(*place(index, inner))
        q = _decoded(elementwise.quantize(x, scale(index), dtype), dtype)
        return x, q, ops.lt(elementwise.magnitude_bits(x), limit(0x7F800000, torch.int32))

    def known(index: Any, inner: Any) -> tuple[Any, ...]:
        """x and what the GEMM sees, in float64, and whether both are finite."""
        x, q, is_finite = element(index, inner)
        x, q, inverse = (ops.to_dtype(v, torch.float64, src_dtype=torch.float32) for v in (x, q, scale_inv(index)))
        made = ops.mul(q, inverse)
        return x, made, ops.logical_and(is_finite, ops.lt(ops.abs(made), limit(float("inf"), torch.float64)))

    def squared(value: Any, mask: Any) -> Any:
        value = ops.where(mask, value, limit(0.0, torch.float64))
        return ops.mul(value, value)

    def squares(index: Any, inner: Any) -> Any:
        x, _, mask = known(index, inner)
        return squared(x, mask)

    def errors(index: Any, inner: Any) -> Any:
        x, made, mask = known(index, inner)
        return squared(ops.sub(x, made), mask)

    def amax(index: Any, inner: Any) -> Any:
        bits, (*_, mask) = elementwise.magnitude_bits(matrix.load(*place(index, inner))), known(index, inner)
        return ops.where(mask, bits, limit(0, torch.int32))

    numel = math.prod(int(size) for size in reduced)
    counter = torch.int32 if numel < 1 << PACKED_BITS[torch.int32] else torch.int64
    bits = PACKED_BITS[counter]

    def counts(index: Any, inner: Any) -> Any:
        x, q, is_finite = element(index, inner)
        zero, one = limit(0, counter), limit(1, counter)
        scaled = ops.abs(ops.mul(x, scale(index)))
        lost = ops.logical_and(ops.ne(x, limit(0.0, torch.float32)), ops.eq(q, limit(0.0, torch.float32)))
        clipped = ops.lt(limit(largest_rounded(dtype), torch.float32), scaled)
        under = ops.where(ops.logical_and(is_finite, lost), one, zero)
        over = ops.where(ops.logical_and(is_finite, clipped), limit(1 << bits, counter), zero)
        return ops.add(ops.add(under, over), ops.where(is_finite, zero, limit(1 << 2 * bits, counter)))

    wanted: list[tuple[Any, torch.dtype, Any]] = [
        (squares, torch.float64, "sum"),
        (errors, torch.float64, "sum"),
        (amax, torch.int32, "max"),
    ]
    made = []
    for inner_fn, of_dtype, kind in [*wanted, (counts, counter, "sum")]:
        loops = ir.Reduction(
            device=matrix.device,
            dtype=of_dtype,
            inner_fn=inner_fn,
            ranges=list(ranges),
            reduction_ranges=list(reduced),
            reduction_type=kind,
            src_dtype=of_dtype,
            reduction_hint=ReductionHint.OUTER,
        )
        storage = _dense(loops, ranges)
        made.append(buffers.as_float32(storage) if kind == "max" else ir.TensorBox(storage))
    return made


def _decoded(q: Any, dtype: torch.dtype) -> Any:
    """A finite FP8 value as float32, by its bits: shifted into place, the exponent's bias mended by a product, which is exact.
    NaN becomes a number, or infinite."""
    bits = ops.to_dtype(ops.to_dtype_bitcast(q, torch.uint8, src_dtype=dtype), torch.int32, src_dtype=torch.uint8)
    mantissa, bias = (21, 15) if dtype == E5M2 else (20, 7)
    magnitude = ops.bitwise_left_shift(
        ops.bitwise_and(bits, ops.constant(0x7F, torch.int32)), ops.constant(mantissa, torch.int32)
    )
    value = ops.mul(elementwise.as_float(magnitude), ops.constant(2.0 ** (127 - bias), torch.float32))
    is_negative = ops.ge(bits, ops.constant(0x80, torch.int32))
    return ops.where(is_negative, ops.neg(value), value)


def _vector(
    parts: list[ir.TensorBox],
    scale: ir.TensorBox,
    matrix: Matrix,
    dtype: torch.dtype,
    are_blocks: bool,
    offs: ir.TensorBox | None = None,
) -> ir.TensorBox:
    finish = buffers.call_operation(lowering_ops.statistics_of_parts.default, is_read=False, is_traced=False)
    return finish(*parts, scale, dtype, int(matrix.rows * matrix.cols), are_blocks, offs)


LOWERINGS = {lowering_ops.quantization_statistics.default: lower_quantization_statistics}
