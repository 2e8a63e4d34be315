"""What recipes with one scale per tensor share: the casts, the GEMM, and how copies travel through all-gathers."""

from __future__ import annotations

import abc
import dataclasses
import operator
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import fx

from fp8pass.graph.casts import CastFamily, CastOutputs, Layout, emit, emit_many, register
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather
from fp8pass.graph.moves import replay
from fp8pass.graph.values import Operand, same_size, value_of
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.grouped import gathered, grouped_matmul, moved_columns
from fp8pass.recipes.recipe import (
    Cast,
    Emitter,
    Epilogue,
    GatheredCopies,
    GroupNodes,
    Quantization,
    Quantized,
    QuantizedTensor,
    Recipe,
    Scope,
    Sent,
    fp8_dtype,
)
from lowering.formats import Granularity, pad_to_alignment

aten = torch.ops.aten
ops = torch.ops.lowering

CASTS = register(
    CastFamily(
        one=ops.cast.default,
        both=ops.cast_transpose.default,
        one_amax=ops.cast_amax.default,
        both_amax=ops.cast_transpose_amax.default,
        many=ops.multi_cast_transpose_amax.default,
        many_one=ops.multi_cast.default,
        many_one_amax=ops.multi_cast_amax.default,
    )
)


STACKS = register(
    CastFamily(
        one=ops.cast_stack.default,
        both=ops.cast_transpose_stack.default,
        one_amax=ops.cast_stack_amax.default,
        both_amax=ops.cast_transpose_stack_amax.default,
    )
)


class TensorwiseRecipe(Recipe):
    """A recipe with one scale per tensor; in a stack of weights each matrix has its own."""

    has_groups: ClassVar[bool] = True
    moves_columns: ClassVar[bool] = True

    def quantization(self, operand: Operand, role: str) -> Quantization:
        return Quantization(fp8_dtype(self, operand), Granularity.TENSOR_WISE)

    def fast_accum(self, role: str) -> bool:
        chosen: bool = getattr(self, f"fast_accum_{role}")
        return chosen

    def launch_key(self, cast: Cast) -> Hashable | None:
        if cast.tensor.value.stack is not None:
            return None
        return (self, cast.tensor.dtype, cast.layouts, cast.is_first)

    def gathered(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> GatheredCopies:
        obstacle = self.gather_obstacle(gather)
        if obstacle is None and any(padding_of(tensor, layout) is None for layout in layouts):
            obstacle = Reason(ReasonKind.SHAPE, "dynamic sizes may need padding to multiples of 16")
        return GatheredCopies((Sent(tensor, Fraction(1)),), obstacle)

    def gather_obstacle(self, gather: Gather) -> Reason | None:
        """Why the ranks of a gather would quantize with different scales."""
        return None


def padding_of(tensor: QuantizedTensor, layout: Layout) -> list[int] | None:
    """How many zero columns and rows an FP8 copy has more than the matrix; None if that depends on dynamic sizes."""
    rows, cols = tensor.value.rows, tensor.value.cols
    outer, inner = (cols, rows) if layout.columnwise else (rows, cols)
    padded = (pad_to_alignment(outer) if layout.pads_outer else outer, pad_to_alignment(inner))
    extra: list[int] = []
    for have, want in zip(padded, (outer, inner), strict=True):
        if same_size(have, want):
            extra.append(0)
        elif isinstance(have, int) and isinstance(want, int):
            extra.append(have - want)
        else:
            return None
    return [0, extra[1], 0, extra[0]]


def amax_of(cursor: Cursor, tensor: QuantizedTensor, matrix: fx.Node) -> fx.Node:
    """The amax of a matrix or of a stack; a vector for a tensor with several entries."""
    return cursor.call((ops.amax if tensor.entries == 1 else ops.amax_stack).default, matrix)


def selected_pairs(cursor: Cursor, vectors: tuple[fx.Node, fx.Node], count: int) -> list[tuple[fx.Node, fx.Node]]:
    """Scale and reciprocal of each of `count` matrices, of the vectors of both."""
    scales, inverses = ([cursor.call(aten.select.int, vector, 0, i) for i in range(count)] for vector in vectors)
    return list(zip(scales, inverses, strict=True))


class TensorwiseEmitter(Emitter):
    """Casts with a scale per tensor. Subclasses say where scales come from and what becomes of amaxes."""

    def __init__(self, recipe: Any, scope: Scope):
        self.recipe = recipe
        self.scope = scope
        self.scales: dict[QuantizedTensor, tuple[fx.Node, fx.Node]] = {}
        """Scale and its reciprocal: float32 scalars, vectors for a tensor with several `entries`."""
        self.rows: dict[QuantizedTensor, fx.Node] = {}
        """Rowwise copies of rows in groups, before they are gathered."""

    @property
    def records(self) -> bool:
        """Whether the amax of every tensor is wanted from its first cast."""
        return False

    @abc.abstractmethod
    def scale_of(self, cursor: Cursor, tensor: QuantizedTensor, matrix: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Scale and reciprocal of one tensor: a matrix, or a stack with as many of each as the tensor has `entries`."""

    @abc.abstractmethod
    def scales_of(
        self, cursor: Cursor, tensors: Sequence[QuantizedTensor], matrices: Sequence[fx.Node]
    ) -> list[tuple[fx.Node, fx.Node]]:
        """Scale and reciprocal of each of several matrices."""

    @abc.abstractmethod
    def scale_of_shard(self, cursor: Cursor, tensor: QuantizedTensor, gather: Gather) -> tuple[fx.Node, fx.Node]:
        """Scale and reciprocal of a tensor of which this rank holds a shard: equal on all ranks."""

    def record(self, cursor: Cursor, cast: Cast, amax: fx.Node) -> None:
        """Take the amax of a tensor."""

    def quantize(self, cursor: Cursor, casts: Sequence[Cast], matrices: Sequence[fx.Node]) -> list[tuple[Quantized, ...]]:
        first = casts[0]
        with_amax = self.records and first.is_first
        dtype, layouts = first.tensor.dtype, first.layouts
        if len(casts) == 1:
            if first.tensor not in self.scales:
                self.scales[first.tensor] = self.scale_of(cursor, first.tensor, matrices[0])
            scale, _ = self.scales[first.tensor]
            made = [emit(cursor, CASTS, matrices[0], dtype, layouts, scale, with_amax)]
        else:
            tensors = [c.tensor for c in casts]
            if not all(t in self.scales for t in tensors):
                self.scales.update(zip(tensors, self.scales_of(cursor, tensors, matrices), strict=True))
            scales = [self.scales[t][0] for t in tensors]
            made = emit_many(cursor, CASTS, matrices, dtype, layouts, scales, with_amax)
        return [self._taken(cursor, cast, outputs) for cast, outputs in zip(casts, made, strict=True)]

    def _taken(self, cursor: Cursor, cast: Cast, outputs: CastOutputs) -> tuple[Quantized, ...]:
        if outputs.amax is not None:
            self.record(cursor, cast, outputs.amax)
        return self._quantized(cast, [copy.data for copy in outputs.copies])

    def _quantized(self, cast: Cast, data: Sequence[fx.Node]) -> tuple[Quantized, ...]:
        _, scale_inv = self.scales[cast.tensor]
        return tuple(Quantized(node, scale_inv, cast.tensor.quantization) for node in data)

    def quantize_shard(self, cursor: Cursor, cast: Cast, gather: Gather, matrix: fx.Node) -> tuple[Quantized, ...]:
        """One scale per tensor makes quantization elementwise: it commutes with the gather and with all moves, which are
        repeated on the FP8 bytes (uint8, which every communication library has). The columnwise copy is transposed last."""
        self.scales[cast.tensor] = self.scale_of_shard(cursor, cast.tensor, gather)
        scale, _ = self.scales[cast.tensor]
        dtype = cast.tensor.dtype
        source = gather.shard_as_matrix(cursor)
        local, amax = _cast_shard(cursor, source, scale, dtype, self.records)
        if amax is not None:
            self.record(cursor, cast, amax)
        if source is not gather.source:
            shape = [cursor.size(gather.source, dim) for dim in range(value_of(gather.source).dim())]
            local = cursor.call(aten.reshape.default, local, shape)
        waited = gather.send(cursor, cursor.call(aten.view.dtype, local, torch.uint8))
        moved = replay(matrix, {gather.wait: waited}, cursor.call)
        return self._quantized(cast, [_copy_of_bytes(cursor, moved, cast, layout) for layout in cast.layouts])

    def quantize_stack(self, cursor: Cursor, cast: Cast, stack: fx.Node) -> tuple[Quantized, ...]:
        tensor, with_amax = cast.tensor, self.records and cast.is_first
        if tensor not in self.scales:
            self.scales[tensor] = self.scale_of(cursor, tensor, stack)
        outputs = emit(cursor, STACKS, stack, tensor.dtype, cast.layouts, self.scales[tensor][0], with_amax)
        if outputs.amax is not None and tensor.entries == 1:
            amax = cursor.call(aten.amax.default, outputs.amax)
            outputs = dataclasses.replace(outputs, amax=amax)
        return self._taken(cursor, cast, outputs)

    def quantize_rows(self, cursor: Cursor, cast: Cast, matrix: fx.Node, groups: GroupNodes) -> Quantized:
        """One scale per tensor makes quantization elementwise: it commutes with gathers and transposes. Rows of no group matter
        to amaxes alone: a cast with a known scale takes them as they are."""
        tensor, (layout,) = cast.tensor, cast.layouts
        if not cast.is_moved:
            with_amax = self.records and cast.is_first
            if with_amax or tensor not in self.scales:
                matrix = groups.masked
            if tensor not in self.scales:
                self.scales[tensor] = self.scale_of(cursor, tensor, matrix)
            scale, _ = self.scales[tensor]
            outputs = emit(cursor, CASTS, matrix, tensor.dtype, (Layout(False),), scale, with_amax)
            if outputs.amax is not None:
                self.record(cursor, cast, outputs.amax)
            rows = outputs.copies[0].data
            if not layout.columnwise:
                self.rows[tensor] = rows
        else:
            rows = self.rows[tensor]
        data = moved_columns(cursor, rows, groups) if layout.columnwise else gathered(cursor, rows, groups)
        return self._quantized(cast, [data])[0]

    def grouped_matmul(self, cursor: Cursor, a: Quantized, b: Quantized, offs: fx.Node | None, epilogue: Epilogue) -> fx.Node:
        return grouped_matmul(cursor, self.recipe, a, b, offs, epilogue)

    def matmul(self, cursor: Cursor, a: Quantized, b: Quantized, epilogue: Epilogue) -> fx.Node:
        transposed = cursor.call(aten.permute.default, b.data, [1, 0])
        args = (a.data, transposed, a.scale_inv, b.scale_inv, epilogue.bias)
        fast_accum = self.recipe.fast_accum(epilogue.role)
        return cursor.call(ops.scaled_mm.default, *args, out_dtype=epilogue.out_dtype, fast_accum=fast_accum)


def _cast_shard(
    cursor: Cursor, matrix: fx.Node, scale: fx.Node, dtype: torch.dtype, with_amax: bool
) -> tuple[fx.Node, fx.Node | None]:
    """The FP8 values of a shard and, if asked for, its amax: from one read where the cast adds no padding."""
    columns = value_of(matrix).shape[1]
    if not (isinstance(columns, int) and pad_to_alignment(columns) == columns):
        data = cursor.call(ops.quantize.default, matrix, scale, dtype)
        return data, cursor.call(ops.amax.default, matrix) if with_amax else None
    if not with_amax:
        return cursor.call(ops.cast.default, matrix, scale, dtype), None
    both = cursor.call(ops.cast_amax.default, matrix, scale, dtype)
    return cursor.call(operator.getitem, both, 0), cursor.call(operator.getitem, both, 1)


def _copy_of_bytes(cursor: Cursor, data: fx.Node, cast: Cast, layout: Layout) -> fx.Node:
    """A copy for the GEMM, of the gathered bytes of the whole matrix."""
    if layout.columnwise:
        data = cursor.call(aten.permute.default, data, [1, 0])
    padding = padding_of(cast.tensor, layout)
    if padding and any(padding):
        data = cursor.call(aten.constant_pad_nd.default, data, padding, 0)
    data = cursor.call(aten.clone.default, data, memory_format=torch.contiguous_format)
    return cursor.call(aten.view.dtype, data, cast.tensor.dtype)
