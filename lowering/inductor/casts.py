"""Lowerings of cast and amax.

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
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.utils import has_free_symbols
from torch._inductor.virtualized import V, ops

from lowering.formats import GEMM_ALIGNMENT, pad_to_alignment
from lowering.inductor import buffers, elementwise
from lowering.tensorwise.reference import Cast

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
    """Whether fused code may compute x's copies: K of the rowwise copy needs no padding, nothing is empty."""
    return buffers.is_computed(x) and buffers.is_multiple_of(x.get_size()[1], GEMM_ALIGNMENT) and not buffers.is_empty(x)


def is_tiled(x: ir.TensorBox) -> bool:
    """Whether a tile kernel may write the columnwise copy of x."""
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


def _row_copies(matrix: Matrix, quantized: Any, dtype: torch.dtype, wanted: Cast) -> list[ir.TensorBox]:
    rows, cols = matrix.rows, matrix.cols
    if not wanted.rowwise:
        return [transposed_copy(matrix, quantized, dtype)]
    loops = buffers.pointwise(matrix.device, dtype, lambda index: quantized(*index), [rows, cols])
    box = ir.TensorBox(buffers.realize_ordered(loops, [cols, 1]))
    if not wanted.columnwise:
        return [box]
    return [box, buffers.as_it_is(lowering_ops.transposed_copy.default)(box)]


def transposed_copy(matrix: Matrix, quantized: Any, dtype: torch.dtype) -> ir.TensorBox:
    """The columnwise copy [C, R16] in a kernel of its own, with zeros beyond R.

    Left to itself, the scheduler would reorder its loops and store it from the row kernel, one byte at a time.
    """
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
    box.fp8_amax_parts = parts
    return box


def parts_of(amax: ir.TensorBox) -> ir.TensorBox:
    """The partial amaxes of an amax, or the amax itself."""
    return getattr(amax, "fp8_amax_parts", amax)


def lower_amax(x: ir.TensorBox) -> Any:
    """A maximum over each row, which fuses with the producer, then one over the rows."""
    if len(x.get_size()) != 2 or not _is_whole(x):
        box = buffers.as_it_is(lowering_ops.amax.default, is_read=False)(x)
        box.fp8_amax_of = [x]
        return box
    return total_amax(row_amaxes(Matrix(x)))


def lower_multi_amax(xs: list[ir.TensorBox], *, per_matrix: bool = False) -> Any:
    """The operation as it is; `lower_scales_from_amax` knows by the result what it is the amax of."""
    box = buffers.as_it_is(lowering_ops.multi_amax.default, is_read=per_matrix)(xs, per_matrix=per_matrix)
    if not per_matrix:
        box.fp8_amax_of = xs
    return box


# -- casts


def lower_cast(xs: list[ir.TensorBox], scales: list[ir.TensorBox], dtype: torch.dtype, **options: bool) -> list[Any]:
    """A matrix joins its producer where it can; several, and batches, share the launch of the operation."""
    x, scale, copies = xs[0], scales[0], Cast(**options)
    is_one = len(xs) == 1 and len(x.get_size()) == 2 and not copies.in_parts
    if not is_one:
        return list(buffers.as_it_is(lowering_ops.cast.default)(xs, scales, dtype, **options))
    if not _is_whole(x) or (copies.rowwise and copies.pad_rows and not buffers.is_multiple_of(x.get_size()[0], GEMM_ALIGNMENT)):
        return _hand_written(x, scale, dtype, copies)
    scale.realize()
    matrix = Matrix(x)
    quantized = matrix.quantizer(scale, dtype)
    reduces_rows = copies.with_amax and buffers.needs_row_reduction(x, matrix.rows, matrix.cols)
    if copies.columnwise and not reduces_rows and is_tiled(x):
        parts = _tile_amaxes(matrix) if copies.with_amax else None
        data = tile_copies(matrix, quantized, dtype, copies.rowwise, copies.columnwise)
        data[0].fp8_loops = "tiles"
    else:
        parts = row_amaxes(matrix) if copies.with_amax else None
        data = _row_copies(matrix, quantized, dtype, copies)
        data[0].fp8_loops = "" if reduces_rows else "rows"  # with the sums of a norm in them: see statistics.py
    return data if parts is None else [*data, total_amax(parts)]


def _hand_written(x: ir.TensorBox, scale: ir.TensorBox, dtype: torch.dtype, copies: Cast) -> list[Any]:
    """The operation as it is, but for the launch that reduces partial amaxes: who records them takes the parts."""
    in_parts = copies.with_amax and not has_free_symbols(x.get_size())
    call = buffers.as_it_is(lowering_ops.cast.default, is_traced=not in_parts)
    options = dataclasses.asdict(dataclasses.replace(copies, in_parts=in_parts))
    made = list(call([x], [scale], dtype, **options))
    return [*made[:-1], total_amax(made[-1])] if in_parts else made
