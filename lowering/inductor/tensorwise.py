"""Lowerings of the operations with one scale per tensor, and of those on the state of delayed scaling.

NOTE [where a cast runs] The producer of x decides.

- An extern kernel, or an input of the graph (a weight): the hand-written kernel, which reads x once.
- Pointwise code: a tile kernel. All results are loops over [column tiles, rows, COLUMNS]; the last is the reduction
  that makes the partial amaxes. So Inductor fuses them, with the producer inlined, into one kernel that holds a tile
  of rows x COLUMNS elements and stores it twice; Triton transposes the tile between its layouts, and both stores are
  coalesced.
- Code with a reduction over rows (a norm, its backward): the rowwise copy and the partial amax of each row join that
  kernel, which already holds the row. A transposed store from there would touch one byte per 32-byte sector, so the
  columnwise copy is made of the rowwise FP8 bytes by a kernel of its own: one more byte read per element. Without an
  amax (current scaling) the cast waits for its scale and joins no reduction anyway: then it is a tile kernel too.

x itself is written only if something else needs it.

One kernel takes the partial amaxes of every tensor of a graph, whatever their number and sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.utils import has_free_symbols
from torch._inductor.virtualized import V, ops

from lowering.copies import CastOptions
from lowering.formats import BLOCK, GEMM_ALIGNMENT, pad_to_alignment
from lowering.inductor import buffers, elementwise
from lowering.inductor.buffers import call_operation, facts_of, is_computed, pointwise_like

lowering_ops = torch.ops.lowering

#: Columns of a tile. Inductor keeps reductions of up to 64 in registers whatever the hint says, so that the hint can ask for
#: tiles of many rows (see `persistent_reduction` in its triton_heuristics): 128 rows x 32 columns. With 64 columns it takes
#: 32 rows, half as many elements per thread, which all share the cost of addresses.
COLUMNS = 32
#: Rows that a tile kernel should have a multiple of, for whole 32-byte sectors in the columnwise copy.
ROWS = 32
#: Partial amaxes that one program reduces, 256 KB of them; Inductor would take a second launch from 16384 on.
PARTS_OF_ONE_PROGRAM = 65536


class Matrix:
    """The high-precision matrix of a cast: sizes, and a loader of float32 elements."""

    def __init__(self, x: ir.TensorBox):
        self.rows, self.cols = x.get_size()
        self.device = x.get_device()
        self._load, self._dtype = x.make_loader(), x.get_dtype()

    def load(self, row: Any, col: Any) -> Any:
        """One element, float32."""
        return elementwise.to_float32(self._load([row, col]), self._dtype)

    def load_magnitude(self, row: Any, col: Any) -> Any:
        """Its magnitude as int32 bits."""
        return elementwise.magnitude_bits(self.load(row, col))

    def quantizer(self, scale: ir.TensorBox, dtype: torch.dtype) -> Any:
        """A function (row, col) -> the FP8 element."""
        own = buffers.as_own_input(scale)
        load_scale = own.make_loader()

        def quantized(row: Any, col: Any) -> Any:
            return elementwise.quantize(self.load(row, col), load_scale([0] * len(own.get_size())), dtype)

        return quantized


def _is_whole(x: ir.TensorBox) -> bool:
    """True if fused code may compute x's copies: K of the rowwise copy needs no padding, nothing is empty."""
    return buffers.is_computed(x) and buffers.is_multiple_of(x.get_size()[1], GEMM_ALIGNMENT) and not buffers.is_empty(x)


def is_tiled(x: ir.TensorBox) -> bool:
    """True if a tile kernel may write the columnwise copy of x."""
    rows, cols = x.get_size()
    return buffers.is_multiple_of(rows, ROWS) and buffers.is_multiple_of(cols, COLUMNS)


# -- tiles


def tile_places(matrix: Matrix) -> list[Any]:
    return [V.graph.sizevars.simplify(matrix.cols // COLUMNS), matrix.rows, COLUMNS]


def tile_copies(matrix: Matrix, quantized: Any, dtype: torch.dtype, rowwise: bool, columnwise: bool) -> list[ir.TensorBox]:
    """Copies of a matrix that `is_tiled`; quantized: a function (row, col) -> the FP8 element."""
    rows, cols = matrix.rows, matrix.cols

    def inner(index: Any) -> Any:
        tile, row, col = index
        return quantized(row, tile * COLUMNS + col)

    def realize(strides: list[Any]) -> ir.StorageBox:
        return buffers.realize_ordered(buffers.pointwise(matrix.device, dtype, inner, tile_places(matrix)), strides)

    copies = []
    if rowwise:
        copies.append(buffers.as_matrix(realize([COLUMNS, cols, 1]), rows, cols))
    if columnwise:
        copies.append(buffers.as_matrix(realize([COLUMNS * rows, 1, rows]), cols, rows))
    return copies


def _tile_amaxes(matrix: Matrix) -> ir.TensorBox:
    """Partial amaxes [column tiles, rows]."""

    def inner(index: Any, reduced: Any) -> Any:
        (tile, row), (col,) = index, reduced
        return matrix.load_magnitude(row, tile * COLUMNS + col)

    tiles, rows, columns = tile_places(matrix)
    loops = buffers.max_reduction(matrix.device, torch.int32, inner, [tiles, rows], [columns], ReductionHint.OUTER)
    return buffers.as_float32(buffers.realize_ordered(loops, [rows, 1]))


# -- rows


def _row_copies(matrix: Matrix, quantized: Any, dtype: torch.dtype, wanted: CastOptions) -> list[ir.TensorBox]:
    rows, cols = matrix.rows, matrix.cols
    if not wanted.rowwise:
        return [transposed_copy(matrix, quantized, dtype)]
    loops = buffers.pointwise(matrix.device, dtype, lambda index: quantized(*index), [rows, cols])
    box = ir.TensorBox(buffers.realize_ordered(loops, [cols, 1]))
    if not wanted.columnwise:
        return [box]
    return [box, buffers.call_operation(lowering_ops.transposed_copy.default)(box)]


def transposed_copy(matrix: Matrix, quantized: Any, dtype: torch.dtype) -> ir.TensorBox:
    """The columnwise copy [C, R16] in a kernel of its own, with zeros beyond R. Left to itself, the scheduler would reorder its
    loops and store it from the row kernel, one byte at a time."""
    rows, padded = matrix.rows, pad_to_alignment(matrix.rows)

    def inner(index: Any) -> Any:
        col, row = index
        if buffers.is_multiple_of(rows, GEMM_ALIGNMENT):
            return quantized(row, col)
        is_valid = ops.lt(ops.index_expr(row, torch.int64), ops.index_expr(rows, torch.int64))
        return elementwise.zero_unless(is_valid, lambda: quantized(row, col), dtype)

    width = V.graph.sizevars.simplify(padded)
    storage = buffers.realize_ordered(buffers.pointwise(matrix.device, dtype, inner, [matrix.cols, width]), [width, 1])
    V.graph.no_fuse_buffer_names.add(storage.get_name())
    return ir.TensorBox(storage)


def row_amaxes(matrix: Matrix) -> ir.TensorBox:
    """The amax of each row [rows]."""
    loops = buffers.max_reduction(
        matrix.device,
        torch.int32,
        lambda index, reduced: matrix.load_magnitude(index[0], reduced[0]),
        [matrix.rows],
        [matrix.cols],
        ReductionHint.INNER,
    )
    storage = ir.StorageBox(loops)
    storage.realize()
    return buffers.as_float32(storage)


# -- amax


def total_amax(parts: ir.TensorBox) -> ir.TensorBox:
    """The scalar amax of partial ones; who can take the parts themselves finds them in `parts_of`."""
    load, known = parts.make_loader(), V.graph.sizevars
    sizes, numel = list(parts.get_size()), parts.get_numel()

    def inner(index: Any, reduced: Any) -> Any:
        return load(reduced)

    if known.statically_known_gt(numel, 1) and known.statically_known_leq(numel, PARTS_OF_ONE_PROGRAM):
        reduction = buffers.max_reduction(parts.get_device(), torch.float32, inner, [], sizes, ReductionHint.INNER)
        box = ir.TensorBox(ir.StorageBox(reduction))
    else:
        box = ir.Reduction.create(
            device=parts.get_device(),
            dst_dtype=torch.float32,
            src_dtype=torch.float32,
            inner_fn=inner,
            ranges=[],
            reduction_ranges=sizes,
            reduction_type="max",
            reduction_hint=ReductionHint.INNER,
        )
    box.realize()  # other ops cannot load an unrealized reduction
    facts_of(box).amax_parts = parts
    return box


def parts_of(amax: ir.TensorBox) -> ir.TensorBox:
    """The partial amaxes of an amax, or the amax itself."""
    parts = facts_of(amax).amax_parts
    return amax if parts is None else parts


def lower_amaxes(xs: list[ir.TensorBox], *, per_matrix: bool = False) -> Any:
    """Of one matrix a maximum over each row, which fuses with the producer, then one over the rows; else the operation, by
    whose result `lower_scales_from_amax` knows what it is the amax of."""
    if len(xs) == 1 and not per_matrix and len(xs[0].get_size()) == 2 and _is_whole(xs[0]):
        return total_amax(row_amaxes(Matrix(xs[0])))
    box = buffers.call_operation(lowering_ops.amaxes.default, is_read=per_matrix)(xs, per_matrix=per_matrix)
    if not per_matrix:
        facts_of(box).amax_of = xs
    return box


# -- casts


def lower_cast(xs: list[ir.TensorBox], scales: list[ir.TensorBox], dtype: torch.dtype, **options: bool) -> list[Any]:
    """A matrix joins its producer where it can; several, and batches, share the launch of the operation."""
    x, scale, copies = xs[0], scales[0], CastOptions(**options)
    is_one = len(xs) == 1 and len(x.get_size()) == 2 and not copies.in_parts
    if not is_one:
        return list(buffers.call_operation(lowering_ops.cast.default)(xs, scales, dtype, **options))
    if not _is_whole(x) or (copies.rowwise and copies.pad_rows and not buffers.is_multiple_of(x.get_size()[0], GEMM_ALIGNMENT)):
        # The operation as it is, without the launch that reduces partial amaxes: what records them takes the parts.
        in_parts = copies.with_amax and not has_free_symbols(x.get_size())
        call = buffers.call_operation(lowering_ops.cast.default, is_traced=not in_parts)
        made = list(call([x], [scale], dtype, **copies.sides, with_amax=copies.with_amax, in_parts=in_parts))
        return [*made[:-1], total_amax(made[-1])] if in_parts else made
    scale.realize()
    matrix = Matrix(x)
    quantized = matrix.quantizer(scale, dtype)
    reduces_rows = copies.with_amax and buffers.needs_row_reduction(x, matrix.rows, matrix.cols)
    # The copy and its amax are made of what is also saved, in loops over blocks of 128, which they can join.
    is_whole = copies.with_amax and not copies.columnwise and buffers.is_multiple_of(x.get_size()[1], BLOCK)
    if is_whole and buffers.graph_calls(lowering_ops.save_activation.default) and not reduces_rows:
        parts: ir.TensorBox | None = _block_amaxes(matrix)
        data = _row_copies(matrix, quantized, dtype, copies)
    elif copies.columnwise and not reduces_rows and is_tiled(x):
        parts = _tile_amaxes(matrix) if copies.with_amax else None
        data = tile_copies(matrix, quantized, dtype, copies.rowwise, copies.columnwise)
        facts_of(data[0]).loops = "tiles"
    else:
        parts = row_amaxes(matrix) if copies.with_amax else None
        data = _row_copies(matrix, quantized, dtype, copies)
        facts_of(data[0]).loops = "" if reduces_rows else "rows"  # with the sums of a norm in them: see statistics.py
    return data if parts is None else [*data, total_amax(parts)]


def _block_amaxes(matrix: Matrix) -> ir.TensorBox:
    """Partial amaxes [rows, blocks]."""
    blocks = V.graph.sizevars.simplify(matrix.cols // BLOCK)

    def inner(index: Any, reduced: Any) -> Any:
        return matrix.load_magnitude(index[0], index[1] * BLOCK + reduced[0])

    loops = buffers.max_reduction(matrix.device, torch.int32, inner, [matrix.rows, blocks], [BLOCK], ReductionHint.OUTER)
    return buffers.as_float32(buffers.realize_ordered(loops, [blocks, 1]))


def _scale_of(amax: ir.TensorBox, dtype: torch.dtype, margin: int, epsilon: float, power_of_2: bool) -> Callable[[Any], Any]:
    """The scale at an index."""
    load, amax_dtype = amax.make_loader(), amax.get_dtype()

    def scale_at(index: Any) -> Any:
        value = elementwise.to_float32(load(index), amax_dtype)
        return elementwise.scale_from_amax(value, dtype, margin, epsilon, power_of_2)

    return scale_at


def lower_scales_from_amax(
    amax: ir.TensorBox,
    dtype: torch.dtype,
    *,
    margin: int = 0,
    epsilon: float = 0.0,
    power_of_2: bool = False,
    inverse: str | None = None,
) -> tuple[ir.TensorBox, ir.TensorBox]:
    """Two scalars that join the reduction of the amax. Where an extern kernel made it, the operation that makes scales of
    tensors takes its place, or one buffer for both, because two kernels that share but four bytes are not fused. Scales as
    engines make them are left to the operation."""
    amax.realize()
    if inverse is not None:
        of_engines = call_operation(torch.ops.lowering.scales_from_amax.default)
        return of_engines(amax, dtype, epsilon=epsilon, inverse=inverse)
    tensors = facts_of(amax).amax_of
    if tensors is not None:  # hand-written kernels, the second of which makes the scales; nothing reads amax
        fused = call_operation(torch.ops.lowering.multi_scales.default)
        made = fused(tensors, dtype, margin=margin, epsilon=epsilon, power_of_2=power_of_2)
        return made if amax.get_size() else tuple(lowerings[torch.ops.aten.select.int](vector, 0, 0) for vector in made)
    scale_at, size = _scale_of(amax, dtype, margin, epsilon, power_of_2), list(amax.get_size())

    def inverse_at(index: Any) -> Any:
        return elementwise.reciprocal(scale_at(index))

    def either_at(index: Any) -> Any:
        which, *rest = index
        is_scale = ops.eq(ops.index_expr(which, torch.int32), ops.constant(0, torch.int32))
        return ops.where(is_scale, scale_at(rest), inverse_at(rest))

    if is_computed(amax):
        boxes = pointwise_like(amax, scale_at, size), pointwise_like(amax, inverse_at, size)
        for box in boxes:
            box.realize()
        return boxes
    both = pointwise_like(amax, either_at, [2, *size])
    both.realize()
    select = lowerings[torch.ops.aten.select.int]
    return select(both, 0, 0), select(both, 0, 1)


def lower_load_scales(scale: ir.TensorBox, slots: ir.TensorBox, count: int) -> tuple[ir.TensorBox, ir.TensorBox]:
    """One kernel for the scales of a whole graph."""
    load_scale, load_slot = scale.make_loader(), slots.make_loader()

    def taken(index: Any) -> Any:
        slot = ops.indirect_indexing(load_slot(index), scale.get_size()[0])
        return load_scale([slot])

    boxes = pointwise_like(scale, taken, [count]), pointwise_like(scale, lambda i: elementwise.reciprocal(taken(i)), [count])
    for box in boxes:
        box.realize()
    return boxes


def lower_take(x: ir.TensorBox, index: list[int]) -> ir.TensorBox:
    """A slice; else the positions as arithmetic in the kernel: a table would be a tensor to copy to the device."""
    offsets = [position - i for i, position in enumerate(index)]
    steps = [(i, offset) for i, offset in enumerate(offsets) if i == 0 or offset != offsets[i - 1]]
    if len(steps) == 1:
        return lowerings[torch.ops.aten.slice.Tensor](x, 0, index[0], index[-1] + 1)
    load = x.make_loader()

    def inner(indices: Any) -> Any:
        i = ops.index_expr(indices[0], torch.int64)
        position = ops.add(i, ops.constant(steps[0][1], torch.int64))
        for start, offset in steps[1:]:
            moved = ops.add(i, ops.constant(offset, torch.int64))
            position = ops.where(ops.ge(i, ops.constant(start, torch.int64)), moved, position)
        return load([ops.indirect_indexing(position, x.get_size()[0])])

    box = pointwise_like(x, inner, [len(index)])
    box.realize()
    return box


def lower_record_amax(amax: ir.TensorBox, slots: ir.TensorBox, observed: list[ir.TensorBox], index: list[int]) -> Any:
    """Record partial amaxes as they are: nothing finishes them one by one, nothing is stacked. Vectors remain vectors."""
    record = call_operation(torch.ops.lowering.record_amax.default)
    if any(o.get_size() for o in observed):
        return record(amax, slots, observed, index)
    return record(amax, slots, [parts_of(o) for o in observed], index, in_parts=True)


LOWERINGS = {
    lowering_ops.amaxes.default: lower_amaxes,
    lowering_ops.cast.default: lower_cast,
    lowering_ops.scales_from_amax.default: lower_scales_from_amax,
    lowering_ops.load_scales.default: lower_load_scales,
    lowering_ops.take.default: lower_take,
    lowering_ops.record_amax.default: lower_record_amax,
}
