"""One scale per row: along K of each copy, so the two copies of a tensor have different values.

In a graph: one cast per tensor computes scales and copies. A rowwise copy travels through all-gathers with its scales, because
every rank has whole rows. A column lies on all ranks: of a Parameter, whose shards are known when a graph begins, its scale
is made from the largest amax of all ranks, and the columnwise copy travels alone. Where all rows share the scale of the tensor,
the casts are those of `tensorwise.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import ClassVar

import torch
from torch import fx

from fp8pass.graph.casts import CastFamily, Layout, emit, emit_many, register
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather, starts_at_input
from fp8pass.graph.moves import keeps_blocks, replay, replay_on_scales, scale_shape
from fp8pass.graph.sites import GemmSite
from fp8pass.graph.values import same_size, value_of
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.quantization import Quantization, ScaleFrom
from fp8pass.schemes.copies import Cast, FromGather, Quantized, QuantizedTensor
from fp8pass.schemes.grouped import cast_columns, in_slots
from fp8pass.schemes.scheme import (
    Emitter,
    GatheredCopies,
    Product,
    Read,
    Scheme,
    Scope,
    Sent,
    engine_obstacle,
    part_obstacle,
    scaling,
)
from fp8pass.schemes.tensorwise import TensorScheme
from fp8pass.schemes.turned import padding_of
from lowering.copies import padded

aten = torch.ops.aten
ops = torch.ops.lowering

CASTS = register(CastFamily(cast=ops.cast_rowwise.default, scales_out=True))


class RowScheme(Scheme):
    """One scale per row of the first operand of a GEMM and per column of the second."""

    num_reads: ClassVar[int] = 2

    def launch_key(self, cast: Cast) -> Hashable | None:
        """A rowwise copy alone takes a kernel that holds its row, and reads the matrix once; several in one launch read it
        twice."""
        return cast.layouts if any(layout.columnwise for layout in cast.layouts) else None

    def gathered(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> GatheredCopies:
        columns = value_of(gather.wait).shape[-1]
        scale_bytes = Fraction(4, columns) if isinstance(columns, int) and columns else Fraction()
        sides = dict.fromkeys(layout.columnwise for layout in layouts)
        sent = tuple(Sent((tensor.recipe, side), 1 + (Fraction() if side else scale_bytes)) for side in sides)
        matrix = tensor.value.reshape or tensor.value.root
        obstacle = engine_obstacle(tensor.quantization)
        if obstacle is not None:
            pass
        elif True in sides and not (tensor.name.kind == "weight" and starts_at_input(gather.source)):
            obstacle = Reason(ReasonKind.SCALES, "columns are spread over several ranks, and so are the amaxes that scale them")
        elif True in sides and (part := part_obstacle(tensor, gather)) is not None:
            obstacle = part
        elif not keeps_blocks(matrix, gather.wait, 1) or any(padding_of(tensor.value, layout) is None for layout in layouts):
            obstacle = Reason(ReasonKind.SHAPE, "ranks hold parts of rows, or sizes are dynamic")
        return GatheredCopies(sent, obstacle)

    def sharded_each(self, quantization: Quantization, rows: int, columns: int, is_even: bool) -> Sent | Reason:
        if (obstacle := engine_obstacle(quantization)) is not None:
            return obstacle
        if not is_even:
            return Reason(ReasonKind.SHAPE, f"not all ranks have {rows} rows, and scales of rows travel with all or none")
        return Sent(quantization, 1 + Fraction(4, columns))

    def scales_columns(self, quantization: Quantization) -> bool:
        return True

    def compact(
        self, x: torch.Tensor, quantization: Quantization, *, columnwise: bool = False, amaxes: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options, (rows, columns) = scaling(quantization), x.shape
        if not columnwise:
            data, scales = ops.cast_rowwise.default([x], quantization.dtype, **options)
            return data[:, :columns].contiguous(), scales
        sides = {"rowwise": False, "columnwise": True}
        found = ops.amax_rowwise.default([x], **sides) if amaxes is None else amaxes
        data, scales = ops.cast_lines_rowwise.default([x], found, quantization.dtype, **sides, **options)
        return data[:, :rows].t().contiguous(), scales[:columns].reshape(1, columns)

    def ready(self, data: torch.Tensor, scales: torch.Tensor, quantization: Quantization, layout: Layout) -> list[torch.Tensor]:
        turned, of_lines = (data.t(), scales.t()) if layout.columnwise else (data, scales)
        copy = padded(turned, layout.pads_outer)
        stored = scales.new_ones((copy.shape[0], 1))
        stored[: of_lines.shape[0]] = of_lines
        return [copy, stored]

    def values_of(self, data: torch.Tensor, scales: torch.Tensor, quantization: Quantization) -> torch.Tensor:
        return data.to(torch.float32).mul_(scales)

    def emitter(self, scope: Scope) -> Emitter:
        return RowEmitter()

    def matmul(self, cursor: Cursor, a: Quantized, b: Quantized, product: Product) -> fx.Node:
        transposed = cursor.call(aten.permute.default, b.data, [1, 0])
        args = (a.data, transposed, a.scale_inv, b.scale_inv, product.bias)
        return cursor.call(ops.scaled_mm_rowwise.default, *args, out_dtype=product.out_dtype, fast_accum=product.fast_accum)


#: The operation that quantized a shard; what arrived of its data, as a GEMM's operand is oriented; scales.
_Arrived = tuple[fx.Node, fx.Node, fx.Node]


class RowEmitter(Emitter):
    """Casts that compute their own scales."""

    def quantize(self, cursor: Cursor, casts: Sequence[Cast], reads: Sequence[Read]) -> list[tuple[Quantized, ...]]:
        cast, read = casts[0], reads[0]
        dtype, options = cast.tensor.dtype, scaling(cast.tensor.quantization)
        if isinstance(cast.source, FromGather):
            return [self._shard(cursor, cast, cast.source.gather, read.node)]
        if read.groups is not None:
            return [self._rows(cursor, cast, read)]
        if len(casts) == 1:
            made = [emit(cursor, CASTS, read.node, dtype, cast.layouts, **options)]
        else:
            made = emit_many(cursor, CASTS, [r.node for r in reads], dtype, cast.layouts, **options)
        return [Quantized.made_by(outputs, c.copies) for outputs, c in zip(made, casts, strict=True)]

    def _shard(self, cursor: Cursor, cast: Cast, gather: Gather, matrix: fx.Node) -> tuple[Quantized, ...]:
        """Data travel as uint8, which every communication library has, in the shape of the shard."""
        rows = gather.shard_as_matrix(cursor)
        found = []
        for copy, layout in zip(cast.copies, cast.layouts, strict=True):
            send = self._send_columns if layout.columnwise else self._send_rows
            made, data, scales = send(cursor, cast, gather, rows, matrix)
            padding = padding_of(cast.tensor.value, layout)
            if padding and any(padding):
                data = cursor.call(aten.constant_pad_nd.default, data, padding, 0)
                scales = cursor.call(aten.constant_pad_nd.default, scales, [0, 0, 0, padding[3]], 1.0)
            dense = {"memory_format": torch.contiguous_format}
            data, scales = (cursor.call(aten.clone.default, node, **dense) for node in (data, scales))
            found.append(Quantized(cursor.call(aten.view.dtype, data, cast.tensor.dtype), scales, copy, made))
        return tuple(found)

    def _send_rows(self, cursor: Cursor, cast: Cast, gather: Gather, rows: fx.Node, matrix: fx.Node) -> _Arrived:
        """Rows are whole on every rank, so that their scales are known before the gather, and travel with them."""
        tensor = cast.tensor
        outputs = emit(cursor, CASTS, rows, tensor.dtype, (Layout(False),), **scaling(tensor.quantization))
        data = self._send(cursor, gather, outputs.copies[0].data, matrix)
        scales = cursor.call(aten.reshape.default, outputs.copies[0].scale_inv, scale_shape(gather.source, 1, 1))
        scales = replay_on_scales(matrix, {gather.wait: gather.send(cursor, scales)}, 1, 1, cursor.call)
        return outputs.node, data, scales

    def _send_columns(self, cursor: Cursor, cast: Cast, gather: Gather, rows: fx.Node, matrix: fx.Node) -> _Arrived:
        """Every rank has a part of each column, and all amaxes once they are reduced: in forward, with those of all Parameters
        (`reductions.py`)."""
        tensor, sides = cast.tensor, {"rowwise": False, "columnwise": True}
        early = dataclasses.replace(cursor, backward=False, like=None)
        amaxes = gather.largest_of_ranks(early, early.call(ops.amax_rowwise.default, [rows], **sides))
        options = {**sides, **scaling(tensor.quantization)}
        made = cursor.call(ops.cast_lines_rowwise.default, [rows], amaxes, tensor.dtype, **options)
        turned, scales = cursor.items(made)
        columns, num_rows = value_of(rows).shape[1], value_of(rows).shape[0]
        if not same_size(value_of(turned).shape[1], num_rows):
            turned = cursor.call(aten.slice.Tensor, turned, 1, 0, num_rows)
        data = self._send(cursor, gather, cursor.call(aten.permute.default, turned, [1, 0]), matrix)
        if not same_size(value_of(scales).shape[0], columns):
            scales = cursor.call(aten.slice.Tensor, scales, 0, 0, columns)
        scales = cursor.call(aten.reshape.default, scales, [columns, 1])
        return made, cursor.call(aten.permute.default, data, [1, 0]), scales

    def _send(self, cursor: Cursor, gather: Gather, data: fx.Node, matrix: fx.Node) -> fx.Node:
        """What arrives of FP8 values [rows, columns or more], as the GEMMs read the tensor."""
        shape = list(value_of(gather.source).shape)
        if not same_size(value_of(data).shape[1], shape[-1]):
            data = cursor.call(aten.slice.Tensor, data, 1, 0, shape[-1])
        if not value_of(data).is_contiguous():  # torch 2.11 gathers no other
            data = cursor.call(aten.clone.default, data, memory_format=torch.contiguous_format)
        if len(shape) != 2:
            data = cursor.call(aten.reshape.default, data, shape)
        arrived = gather.send(cursor, cursor.call(aten.view.dtype, data, torch.uint8))
        return replay(matrix, {gather.wait: arrived}, cursor.call)

    def _rows(self, cursor: Cursor, cast: Cast, read: Read) -> tuple[Quantized, ...]:
        """Each row has its own scale, and so does each column in each group."""
        tensor, (layout,), groups = cast.tensor, cast.layouts, read.groups
        assert groups is not None
        if layout.columnwise:
            return (cast_columns(cursor, cast, read.node, groups),)
        outputs = emit(cursor, CASTS, read.node, tensor.dtype, (Layout(False),), **scaling(tensor.quantization))
        (made,) = Quantized.made_by(outputs, cast.copies)
        data, scales = (in_slots(cursor, node, groups) for node in (made.data, made.scale_inv))
        return (dataclasses.replace(made, data=data, scale_inv=scales),)


class SharedRowScheme(RowScheme):
    """The scale of the whole tensor for each of its rows: per tensor for the cast, row-wise for the GEMM."""

    def __init__(self, per_tensor: TensorScheme):
        self.per_tensor = per_tensor

    def obstacle(self, site: GemmSite, quantizations: Sequence[Quantization]) -> Reason | None:
        pairs = zip(site.operands, quantizations, strict=True)
        if not any(o.value.groups is not None and q.scale_from is ScaleFrom.SHARED for o, q in pairs):
            return None
        return Reason(ReasonKind.OPERAND_FORMATS, "one scale for the rows of several groups; a scale per row runs")

    def gathered(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> GatheredCopies:
        return self.per_tensor.gathered(tensor, layouts, gather)

    def sharded_each(self, quantization: Quantization, rows: int, columns: int, is_even: bool) -> Sent | Reason:
        return Scheme.sharded_each(self, quantization, rows, columns, is_even)

    def emitter(self, scope: Scope) -> Emitter:
        return SharedRowEmitter(self.per_tensor.emitter(scope))


class SharedRowEmitter(Emitter):
    """Casts per tensor, whose scales a batch repeats for its rows."""

    def __init__(self, per_tensor: Emitter):
        self.per_tensor = per_tensor

    def pair_of(self, tensor: QuantizedTensor) -> tuple[fx.Node, fx.Node] | None:
        return self.per_tensor.pair_of(tensor)

    def share(self, cursor: Cursor, tensors: Sequence[QuantizedTensor], matrices: Sequence[fx.Node]) -> None:
        self.per_tensor.share(cursor, tensors, matrices)

    def quantize(self, cursor: Cursor, casts: Sequence[Cast], reads: Sequence[Read]) -> list[tuple[Quantized, ...]]:
        made = self.per_tensor.quantize(cursor, casts, reads)
        if casts[0].tensor.value.batch is None:
            return made
        return [tuple(_per_row(cursor, copy) for copy in copies) for copies in made]


def _per_row(cursor: Cursor, made: Quantized) -> Quantized:
    """A batch whose matrices have one scale each, as a GEMM of rows reads them."""
    count, rows, _ = value_of(made.data).shape
    scales = cursor.call(aten.reshape.default, made.scale_inv, [-1, 1, 1])
    scales = cursor.call(aten.expand.default, scales, [count, rows, 1])
    dense = cursor.call(aten.clone.default, scales, memory_format=torch.contiguous_format)
    return dataclasses.replace(made, scale_inv=dense)
