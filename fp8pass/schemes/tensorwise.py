"""One scale per tensor, from the tensor itself: the casts, the GEMM, and how copies travel through all-gathers.

In a graph: the amax of every tensor, its scale and the reciprocal, then the cast. A tensor that is sharded over ranks and
gathered in FP8 gets one scale by an all-reduce of the amax. `delayed.py` takes the scales from the state instead.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import ClassVar

import torch
from torch import fx

from fp8pass.graph.casts import CastFamily, CastOutputs, Layout, emit, emit_many, register
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather
from fp8pass.graph.moves import replay
from fp8pass.graph.values import same_size, value_of
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.quantization import Quantization
from fp8pass.schemes.copies import Cast, FromCopy, FromGather, Quantized, QuantizedTensor
from fp8pass.schemes.grouped import in_slots, moved_columns
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
from fp8pass.schemes.turned import padding_of
from lowering.formats import pad_to_alignment

aten = torch.ops.aten
ops = torch.ops.lowering

Pair = tuple[fx.Node, fx.Node]
"""A scale and its reciprocal: float32 scalars, or vectors for a tensor with several `entries`."""

CASTS = register(CastFamily(cast=ops.cast.default))


class TensorScheme(Scheme):
    """One scale per tensor; in batched weights each matrix has its own."""

    has_one_scale: ClassVar[bool] = True
    num_reads: ClassVar[int] = 2

    def launch_key(self, cast: Cast) -> Hashable | None:
        return (cast.layouts, cast.is_first)

    def can_turn(self, quantization: Quantization) -> bool:
        return True

    def gathered(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> GatheredCopies:
        obstacle = engine_obstacle(tensor.quantization) or self.shard_obstacle(tensor.quantization, gather.shares_scales)
        obstacle = obstacle or part_obstacle(tensor, gather)
        if obstacle is None and any(padding_of(tensor.value, layout) is None for layout in layouts):
            obstacle = Reason(ReasonKind.SHAPE, "dynamic sizes may need padding to multiples of 16")
        return GatheredCopies((Sent(tensor, Fraction(1)),), obstacle)

    def sharded(self, quantization: Quantization, rows: int, is_even: bool) -> Sent | Reason:
        return engine_obstacle(quantization) or Sent(quantization, Fraction(1))

    def emitter(self, scope: Scope) -> TensorEmitter:
        return TensorEmitter(scope)

    def matmul(self, cursor: Cursor, a: Quantized, b: Quantized, product: Product) -> fx.Node:
        transposed = cursor.call(aten.permute.default, b.data, [1, 0])
        args = (a.data, transposed, a.scale_inv, b.scale_inv, product.bias)
        return cursor.call(ops.scaled_mm.default, *args, out_dtype=product.out_dtype, fast_accum=product.fast_accum)


def amax_of(cursor: Cursor, tensor: QuantizedTensor, matrix: fx.Node) -> fx.Node:
    """The amax of a matrix or of a batch; a vector for a tensor with several entries."""
    if tensor.entries == 1:
        return cursor.call(ops.amax.default, matrix)
    return cursor.call(ops.multi_amax.default, [matrix], per_matrix=True)


def selected_pairs(cursor: Cursor, vectors: Pair, count: int) -> list[Pair]:
    """Scale and reciprocal of each of `count` matrices, of the vectors of both."""
    scales, inverses = ([cursor.call(aten.select.int, vector, 0, i) for i in range(count)] for vector in vectors)
    return list(zip(scales, inverses, strict=True))


class TensorEmitter(Emitter):
    """Casts with a scale per tensor. Here scales come from amaxes of the tensors; a subclass has them from elsewhere, and says
    what becomes of amaxes."""

    def __init__(self, scope: Scope):
        self.scope = scope
        self.scales: dict[QuantizedTensor, Pair] = {}
        self.rows: dict[QuantizedTensor, fx.Node] = {}
        """Rowwise copies of rows in groups, before they are gathered."""

    @property
    def records(self) -> bool:
        """Whether the amax of every tensor is wanted from its first cast."""
        return False

    def scale_of(self, cursor: Cursor, tensor: QuantizedTensor, matrix: fx.Node) -> Pair:
        """Scale and reciprocal of one tensor: a matrix, or a batch with as many of each as the tensor has `entries`."""
        return self._pair(cursor, amax_of(cursor, tensor, matrix), tensor.quantization)

    def scales_of(self, cursor: Cursor, tensors: Sequence[QuantizedTensor], matrices: Sequence[fx.Node]) -> list[Pair]:
        """Scale and reciprocal of each of several matrices, which are quantized alike."""
        pair = self._pair(cursor, cursor.call(ops.multi_amax.default, list(matrices)), tensors[0].quantization)
        return selected_pairs(cursor, pair, len(tensors))

    def scale_of_shard(self, cursor: Cursor, tensor: QuantizedTensor, gather: Gather) -> Pair:
        """Scale and reciprocal of a tensor of which this rank holds a shard: equal on all ranks."""
        amax = cursor.call(ops.amax.default, gather.shard_as_matrix(cursor))
        return self._pair(cursor, gather.largest_of_ranks(cursor, amax), tensor.quantization)

    def pair_of(self, tensor: QuantizedTensor) -> Pair | None:
        return self.scales[tensor]

    def share(self, cursor: Cursor, tensors: Sequence[QuantizedTensor], matrices: Sequence[fx.Node]) -> None:
        amaxes = cursor.call(ops.multi_amax.default, list(matrices))
        pair = self._pair(cursor, cursor.call(aten.amax.default, amaxes), tensors[0].quantization)
        self.scales.update(dict.fromkeys(tensors, pair))

    def _pair(self, cursor: Cursor, amax: fx.Node, quantization: Quantization) -> Pair:
        """Scale and reciprocal from one operation: Triton's float32 division, which is what Inductor makes of
        aten.reciprocal, does not round correctly."""
        pair = cursor.call(ops.scales_from_amax.default, amax, quantization.dtype, **scaling(quantization))
        return cursor.item(pair, 0), cursor.item(pair, 1)

    # -- casts

    def quantize(self, cursor: Cursor, casts: Sequence[Cast], reads: Sequence[Read]) -> list[tuple[Quantized, ...]]:
        cast, read = casts[0], reads[0]
        if isinstance(cast.source, FromGather):
            return [self._shard(cursor, cast, cast.source.gather, read.node)]
        if read.groups is not None:
            return [self._rows(cursor, cast, read)]
        if len(casts) == 1:
            return [self._alone(cursor, cast, read.node)]
        tensors, matrices = [c.tensor for c in casts], [r.node for r in reads]
        if not all(t in self.scales for t in tensors):
            self.scales.update(zip(tensors, self.scales_of(cursor, tensors, matrices), strict=True))
        scales = [self.scales[t][0] for t in tensors]
        made = emit_many(cursor, CASTS, matrices, cast.tensor.dtype, cast.layouts, scales, self.records and cast.is_first)
        return [self._taken(cursor, c, outputs) for c, outputs in zip(casts, made, strict=True)]

    def _alone(self, cursor: Cursor, cast: Cast, matrix: fx.Node) -> tuple[Quantized, ...]:
        """A matrix, or a batch."""
        tensor, is_batched = cast.tensor, cast.tensor.value.batch is not None
        scale, _ = self._scales(cursor, tensor, matrix)
        outputs = emit(cursor, CASTS, matrix, tensor.dtype, cast.layouts, scale, self.records and cast.is_first)
        if is_batched and outputs.amax is not None and tensor.entries == 1:
            outputs = dataclasses.replace(outputs, amax=cursor.call(aten.amax.default, outputs.amax))
        return self._taken(cursor, cast, outputs)

    def _scales(self, cursor: Cursor, tensor: QuantizedTensor, matrix: fx.Node) -> Pair:
        if tensor not in self.scales:
            self.scales[tensor] = self.scale_of(cursor, tensor, matrix)
        return self.scales[tensor]

    def _taken(self, cursor: Cursor, cast: Cast, outputs: CastOutputs) -> tuple[Quantized, ...]:
        if outputs.amax is not None:
            self.record(cursor, cast, outputs.amax)
        return self._quantized(cast, [copy.data for copy in outputs.copies], outputs.node)

    def _quantized(self, cast: Cast, data: Sequence[fx.Node], maker: fx.Node) -> tuple[Quantized, ...]:
        _, scale_inv = self.scales[cast.tensor]
        return tuple(Quantized(node, scale_inv, copy, maker) for node, copy in zip(data, cast.copies, strict=True))

    def _shard(self, cursor: Cursor, cast: Cast, gather: Gather, matrix: fx.Node) -> tuple[Quantized, ...]:
        """One scale per tensor makes quantization elementwise: it commutes with the gather and with all moves, which are
        repeated on the FP8 bytes (uint8, which every communication library has). The columnwise copy is transposed last."""
        self.scales[cast.tensor] = self.scale_of_shard(cursor, cast.tensor, gather)
        scale, _ = self.scales[cast.tensor]
        dtype = cast.tensor.dtype
        source = gather.shard_as_matrix(cursor)
        local, amax = _cast_shard(cursor, source, scale, dtype, self.records)
        if amax is not None:
            self.record(cursor, cast, amax)
        maker = local.all_input_nodes[0] if local.target is operator.getitem else local
        if source is not gather.source:
            shape = [cursor.size(gather.source, dim) for dim in range(value_of(gather.source).dim())]
            local = cursor.call(aten.reshape.default, local, shape)
        waited = gather.send(cursor, cursor.call(aten.view.dtype, local, torch.uint8))
        moved = replay(matrix, {gather.wait: waited}, cursor.call)
        return self._quantized(cast, [_copy_of_bytes(cursor, moved, cast, layout) for layout in cast.layouts], maker)

    def turned(self, cursor: Cursor, cast: Cast, rows: Quantized) -> tuple[Quantized, ...]:
        (copy,), (layout,) = cast.copies, cast.layouts
        data = rows.data
        if not same_size(value_of(data).shape[1], cast.tensor.value.cols):  # padding
            data = cursor.call(aten.slice.Tensor, data, 1, 0, cast.tensor.value.cols)
        made = _copy_of_bytes(cursor, cursor.call(aten.view.dtype, data, torch.uint8), cast, layout)
        return (Quantized(made, rows.scale_inv, copy, made),)

    def _rows(self, cursor: Cursor, cast: Cast, read: Read) -> tuple[Quantized, ...]:
        """One scale per tensor makes quantization elementwise: it commutes with gathers and transposes."""
        tensor, (layout,), groups = cast.tensor, cast.layouts, read.groups
        assert groups is not None
        if isinstance(cast.source, FromCopy):
            moved = moved_columns(cursor, self.rows[tensor], groups)
            return self._quantized(cast, [moved], moved)
        scale, _ = self._scales(cursor, tensor, read.node)
        with_amax = self.records and cast.is_first
        outputs = emit(cursor, CASTS, read.node, tensor.dtype, (Layout(False),), scale, with_amax)
        if outputs.amax is not None:
            self.record(cursor, cast, outputs.amax)
        rows = outputs.copies[0].data
        if layout.columnwise:
            return self._quantized(cast, [moved_columns(cursor, rows, groups)], outputs.node)
        self.rows[tensor] = rows
        return self._quantized(cast, [in_slots(cursor, rows, groups)], outputs.node)


def _cast_shard(
    cursor: Cursor, matrix: fx.Node, scale: fx.Node, dtype: torch.dtype, with_amax: bool
) -> tuple[fx.Node, fx.Node | None]:
    """The FP8 values of a shard and, if asked for, its amax: from one read where the cast adds no padding."""
    columns = value_of(matrix).shape[1]
    if not (isinstance(columns, int) and pad_to_alignment(columns) == columns):
        data = cursor.call(ops.quantize.default, matrix, scale, dtype)
        return data, cursor.call(ops.amax.default, matrix) if with_amax else None
    made = emit(cursor, CASTS, matrix, dtype, (Layout(False),), scale, with_amax)
    return made.copies[0].data, made.amax


def _copy_of_bytes(cursor: Cursor, data: fx.Node, cast: Cast, layout: Layout) -> fx.Node:
    """A copy for the GEMM, of the gathered bytes of the whole matrix."""
    if layout.columnwise:
        data = cursor.call(aten.permute.default, data, [1, 0])
    padding = padding_of(cast.tensor.value, layout)
    if padding and any(padding):
        data = cursor.call(aten.constant_pad_nd.default, data, padding, 0)
    data = cursor.call(aten.clone.default, data, memory_format=torch.contiguous_format)
    return cursor.call(aten.view.dtype, data, cast.tensor.dtype)
