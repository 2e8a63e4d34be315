"""One scale per row: along K of each copy, so the two copies of a tensor have different values.

In a graph: one cast per tensor computes scales and copies. A rowwise copy travels through all-gathers with its scales, because
every rank has whole rows. A column lies on all ranks: of a Parameter, whose shards are known when a graph begins, its scale
is made from the largest amax of all ranks, and the columnwise copy travels alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from fp8pass.errors import Reason, ReasonKind
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather, keeps_blocks, replay, replay_on_scales, scale_shape, starts_at_input
from fp8pass.graph.values import MatrixValue, same_size, value_of
from fp8pass.recipes.quantization import Quantization
from fp8pass.schemes.copies import Cast, Layout, Quantized, QuantizedTensor, as_operand, insert_cast, padding_of
from fp8pass.schemes.scheme import Compact, Scheme, engine_obstacle, part_obstacle, scaling

aten = torch.ops.aten
ops = torch.ops.lowering


class RowScheme(Scheme):
    """One scale per row of the first operand of a GEMM and per column of the second."""

    scales_columns = True
    num_reads = 2

    def launch_key(self, cast: Cast) -> Hashable | None:
        """A rowwise copy alone takes a kernel that reads the matrix once; several in one launch read it twice."""
        return cast.layouts if any(layout.columnwise for layout in cast.layouts) else None

    def sent(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> Mapping[Hashable, Fraction]:
        columns = value_of(gather.wait).shape[-1]
        scale_bytes = Fraction(4, columns) if isinstance(columns, int) and columns else Fraction()
        sides = dict.fromkeys(layout.columnwise for layout in layouts)
        return {(tensor.recipe, side): 1 + (Fraction() if side else scale_bytes) for side in sides}

    def gather_obstacle(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> Reason | None:
        matrix = tensor.value.reshape or tensor.value.root
        if (obstacle := engine_obstacle(tensor.quantization)) is not None:
            return obstacle
        if any(layout.columnwise for layout in layouts):
            if not (tensor.name.kind == "weight" and starts_at_input(gather.source)):
                return Reason(ReasonKind.SCALES, "columns are spread over several ranks, and so are the amaxes that scale them")
            if (part := part_obstacle(tensor, gather)) is not None:
                return part
        if not keeps_blocks(matrix, gather.wait, 1) or any(padding_of(tensor.value, layout) is None for layout in layouts):
            return Reason(ReasonKind.SHAPE, "ranks hold parts of rows, or sizes are dynamic")
        return None

    def sharded(self, quantization: Quantization, rows: int, elements: int, is_even: bool) -> Fraction | Reason:
        if (obstacle := engine_obstacle(quantization)) is not None:
            return obstacle
        if not is_even:
            return Reason(ReasonKind.SHAPE, f"not all ranks have {rows} rows, and row scales are sent by all ranks or by none")
        return 1 + Fraction(4 * rows, elements)

    def shard(self, cursor: Cursor, cast: Cast, gather: Gather, matrix: fx.Node) -> tuple[Quantized, ...]:
        """Rows are whole on every rank: their scales are known before the gather, and travel with them. Of a column every rank
        has a part, and all amaxes once they are reduced: in forward, with those of all Parameters (`rewrite/gathers.py`). Data
        travel as uint8, which every communication library has, in the shape of the shard."""
        rows, shape = gather.shard_as_matrix(cursor), list(value_of(gather.source).shape)
        quantization, found = cast.tensor.quantization, []
        for copy, layout in zip(cast.copies, cast.layouts, strict=True):
            amaxes = None
            if layout.columnwise:
                early = dataclasses.replace(cursor, backward=False, like=None)
                local = early.call(ops.amax_rowwise.default, [rows], rowwise=False, columnwise=True)
                amaxes = gather.largest_of_ranks(early, local)
            made, data, scales = self.compact(cursor, rows, quantization, layout.columnwise, amaxes)
            if len(shape) != 2:
                data = cursor.call(aten.reshape.default, data, shape)
            arrived = gather.send(cursor, cursor.call(aten.view.dtype, data, torch.uint8))
            data = replay(matrix, {gather.wait: arrived}, cursor.call)
            if not layout.columnwise:
                scales = cursor.call(aten.reshape.default, scales, scale_shape(gather.source, 1, 1))
                scales = replay_on_scales(matrix, {gather.wait: gather.send(cursor, scales)}, 1, 1, cursor.call)
            found.append(Quantized(*self.ready(cursor, data, scales, quantization, cast.tensor.value, layout), copy, made))
        return tuple(found)

    def compact(
        self, cursor: Cursor, x: fx.Node, quantization: Quantization, columnwise: bool, amaxes: fx.Node | None = None
    ) -> Compact:
        """Scales are [rows, 1] or [columns, 1]."""
        rows, columns = value_of(x).shape
        if not columnwise:
            options = self.cast_options(quantization)
            made, (((data,), (scales,), _),) = insert_cast(
                cursor, self.casts, [x], quantization.dtype, (Layout(False),), **options
            )
            return made, _dense(cursor, _cut(cursor, data, 1, columns)), scales
        sides = {"rowwise": False, "columnwise": True}
        amaxes = cursor.call(ops.amax_rowwise.default, [x], **sides) if amaxes is None else amaxes
        made = cursor.call(ops.cast_lines_rowwise.default, [x], amaxes, quantization.dtype, **sides, **scaling(quantization))
        data, scales = cursor.items(made)
        data = _dense(cursor, cursor.call(aten.permute.default, _cut(cursor, data, 1, rows), [1, 0]))
        return made, data, cursor.call(aten.reshape.default, _cut(cursor, scales, 0, columns), [columns, 1])

    def ready(
        self, cursor: Cursor, data: fx.Node, scales: fx.Node, quantization: Quantization, value: MatrixValue, layout: Layout
    ) -> tuple[fx.Node, fx.Node]:
        if layout.columnwise:
            data = cursor.call(aten.permute.default, data, [1, 0])
        if value_of(data).dtype != torch.uint8:
            data = cursor.call(aten.view.dtype, data, torch.uint8)
        padding = padding_of(value, layout)
        if padding and any(padding):
            scales = cursor.call(aten.constant_pad_nd.default, scales, [0, 0, 0, padding[3]], 1.0)
        data = as_operand(cursor, data, value, layout, quantization.dtype)
        return data, cursor.call(aten.clone.default, scales, memory_format=torch.contiguous_format)


def _cut(cursor: Cursor, x: fx.Node, dim: int, size: Any) -> fx.Node:
    """The node without its padding."""
    return x if same_size(value_of(x).shape[dim], size) else cursor.call(aten.slice.Tensor, x, dim, 0, size)


def _dense(cursor: Cursor, x: fx.Node) -> fx.Node:
    """A contiguous node: torch 2.11 gathers no other."""
    if value_of(x).is_contiguous():
        return x
    return cursor.call(aten.clone.default, x, memory_format=torch.contiguous_format)
