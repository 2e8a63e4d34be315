"""What recipes with one scale per block share: how copies travel through all-gathers, and the order of their operations.

In a graph: one cast per tensor computes scales and copies. Through all-gathers copies travel in the compact format, with their
scales. A block of scales commutes with the gather if no block crosses a shard: blocks along rows always do, blocks that
span several rows (the columnwise copy, square blocks) where each shard has a multiple of so many rows. With blocks along one
dimension the rowwise and the columnwise copy have different values, so each travels in its own right; with square blocks one
copy serves both.
"""

from __future__ import annotations

import abc
import dataclasses
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import fx

from fp8pass.graph.casts import CastFamily, ColumnFamily, Layout, emit, emit_many
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather
from fp8pass.graph.moves import keeps_blocks, replay, replay_on_scales, scale_shape
from fp8pass.graph.values import value_of
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.grouped import cast_columns, gathered, grouped_matmul
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
    Sent,
)

aten = torch.ops.aten


class BlockRecipe(Recipe):
    """A recipe with one scale per block."""

    reads_gemm_dtype: ClassVar[bool] = True
    has_groups: ClassVar[bool] = True
    scale_bytes: ClassVar[int]
    """Bytes of a scale."""

    def fuses_with_producer(self, tensor: QuantizedTensor) -> bool:
        return False

    @abc.abstractmethod
    def block(self, quantization: Quantization) -> tuple[int, int]:
        """Rows and columns of a block, in the orientation of the copy."""

    def gathered(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> GatheredCopies:
        copies = {self.compact(tensor, layout) for layout in layouts}
        matrix = tensor.value.reshape or tensor.value.root
        shard = value_of(gather.source).shape
        heights = {copy.height for copy in copies}
        is_whole = all(
            keeps_blocks(matrix, gather.wait, height) and isinstance(shard[-2], int) and shard[-2] % height == 0
            for height in heights
        )
        obstacle = None
        if not is_whole:
            obstacle = Reason(
                ReasonKind.SHAPE, "a block of scales crosses the border between two ranks' shards, or sizes are dynamic"
            )
        return GatheredCopies(tuple(Sent((self, c), self._bytes_per_element(c)) for c in copies), obstacle)

    def compact(self, tensor: QuantizedTensor, layout: Layout) -> Compact:
        """The compact copy that one of this layout is made of."""
        block = self.block(tensor.quantization)
        is_square = block[0] == block[1]
        return Compact(tensor.quantization, block, layout.columnwise and not is_square)

    def _bytes_per_element(self, copy: Compact) -> Fraction:
        """A byte, and its share of a scale."""
        return 1 + Fraction(self.scale_bytes, copy.block[0] * copy.block[1])


@dataclasses.dataclass(frozen=True)
class Compact:
    """A copy in the compact format, which travels."""

    quantization: Quantization
    block: tuple[int, int]
    """Rows and columns of a block of the copy's own orientation."""
    columnwise: bool
    """Whether blocks run along columns; False for square blocks, where both orientations share the copy."""

    @property
    def height(self) -> int:
        """Rows of the tensor that share a row of scales."""
        return self.block[1] if self.columnwise else self.block[0]


@dataclasses.dataclass(frozen=True)
class BlockOperations:
    """The operations of one kind of blocks."""

    casts: CastFamily
    compact: Any
    """(x, dtype, **scaling) -> both copies of a matrix in the compact format."""
    gemm_ready: Any
    """(q, scales, **kind, columnwise, pad_outer) -> a copy as the GEMM reads it."""
    stacks: CastFamily
    """Casts of stacks."""
    columns: ColumnFamily
    """Columnwise copies of rows in groups."""


class BlockEmitter(Emitter):
    """Casts that compute their own scales."""

    def __init__(self, recipe: BlockRecipe, operations: BlockOperations):
        self.blocks = recipe
        self.operations = operations

    @abc.abstractmethod
    def kind(self, quantization: Quantization) -> dict[str, Any]:
        """The arguments of an operation that say what a block is."""

    @abc.abstractmethod
    def scaling(self, quantization: Quantization) -> dict[str, Any]:
        """The arguments of a cast that say what a block is and how scales are made."""

    @property
    def column_options(self) -> dict[str, Any]:
        """The arguments of a cast of columns that say how scales are made."""
        return {}

    @abc.abstractmethod
    def quantize_compact(self, cursor: Cursor, matrix: fx.Node, quantization: Quantization) -> fx.Node:
        """The rowwise copy of a matrix alone, in the compact format."""

    @abc.abstractmethod
    def scale_values(self, cursor: Cursor, copy: Quantized) -> fx.Node:
        """float32 scales of the blocks of a copy: an entry per row, or row of blocks, and block of its inner dimension."""

    def scales_of_values(self, cursor: Cursor, copy: Quantized) -> fx.Node:
        """Each scale, repeated over its block."""
        block = copy.quantization.granularity.block
        assert block is not None
        scales = self.scale_values(cursor, copy)
        outer, inner = (cursor.size(copy.data, dim) for dim in (0, 1))
        for dim, size, height in ((1, inner, block[1]), (0, outer, block[0])):
            if height > 1:
                others = [cursor.size(scales, d) for d in (0, 1)]
                scales = cursor.call(aten.unsqueeze.default, scales, dim + 1)
                shape = [*others[: dim + 1], height, *others[dim + 1 :]]
                scales = cursor.call(aten.expand.default, scales, shape)
                scales = cursor.call(aten.reshape.default, scales, [others[0], -1] if dim == 1 else [-1, others[1]])
                scales = cursor.call(aten.slice.Tensor, scales, dim, 0, size)
        return scales

    def quantize(self, cursor: Cursor, casts: Sequence[Cast], matrices: Sequence[fx.Node]) -> list[tuple[Quantized, ...]]:
        first, family = casts[0], self.operations.casts
        quantization = first.tensor.quantization
        options = self.scaling(quantization)
        if len(casts) == 1:
            made = [emit(cursor, family, matrices[0], quantization.dtype, first.layouts, **options)]
        else:
            made = emit_many(cursor, family, matrices, quantization.dtype, first.layouts, **options)
        return [Quantized.made_by(outputs, quantization) for outputs in made]

    def quantize_stack(self, cursor: Cursor, cast: Cast, stack: fx.Node) -> tuple[Quantized, ...]:
        quantization = cast.tensor.quantization
        options = self.scaling(quantization)
        outputs = emit(cursor, self.operations.stacks, stack, quantization.dtype, cast.layouts, **options)
        return Quantized.made_by(outputs, quantization)

    def quantize_rows(self, cursor: Cursor, cast: Cast, matrix: fx.Node, groups: GroupNodes) -> Quantized:
        """Rowwise, blocks lie within rows, which are gathered with their scales. Grouped GEMMs read compact copies."""
        quantization, (layout,) = cast.tensor.quantization, cast.layouts
        if layout.columnwise:
            return cast_columns(cursor, self.operations.columns, cast, matrix, groups, **self.column_options)
        stack = cursor.call(aten.unsqueeze.default, matrix, 0)
        options = self.scaling(quantization)
        outputs = emit(cursor, self.operations.stacks, stack, quantization.dtype, (Layout(False),), **options)
        (made,) = Quantized.made_by(outputs, quantization)
        found = [cursor.call(aten.select.int, node, 0, 0) for node in (made.data, made.scale_inv)]
        data, scales = (gathered(cursor, node, groups) for node in found)
        return Quantized(data, scales, quantization)

    def grouped_matmul(self, cursor: Cursor, a: Quantized, b: Quantized, offs: fx.Node | None, epilogue: Epilogue) -> fx.Node:
        return grouped_matmul(cursor, self.blocks, a, b, offs, epilogue)

    def quantize_shard(self, cursor: Cursor, cast: Cast, gather: Gather, matrix: fx.Node) -> tuple[Quantized, ...]:
        quantization = cast.tensor.quantization
        travelled: dict[Compact, tuple[fx.Node, fx.Node]] = {}
        needed = [self.blocks.compact(cast.tensor, layout) for layout in cast.layouts]
        copies = []
        for layout, compact in zip(cast.layouts, needed, strict=True):
            if compact not in travelled:
                data, scales = self._cast_shard(cursor, gather.source, compact, any(c.columnwise for c in needed))
                data = gather.send(cursor, cursor.call(aten.view.dtype, data, torch.uint8))
                travelled[compact] = data, gather.send(cursor, scales)
            data, scales = travelled[compact]
            data = replay(matrix, {gather.wait: data}, cursor.call)
            width = value_of(scales).shape[-1]
            scales = replay_on_scales(matrix, {gather.wait: scales}, compact.height, width, cursor.call)
            ready = cursor.call(
                self.operations.gemm_ready,
                cursor.call(aten.view.dtype, data, quantization.dtype),
                scales,
                **self.kind(quantization),
                columnwise=layout.columnwise,
                pad_outer=layout.pads_outer,
            )
            copies.append(Quantized(cursor.item(ready, 0), cursor.item(ready, 1), quantization))
        return tuple(copies)

    def _cast_shard(self, cursor: Cursor, source: fx.Node, compact: Compact, needs_columns: bool) -> tuple[fx.Node, fx.Node]:
        """Data in the shard's shape, and scales in the shape that the moves can be repeated on. With `needs_columns` one op
        makes the rowwise and the columnwise copy of one read."""
        shape = list(value_of(source).shape)
        matrix = source if len(shape) == 2 else cursor.call(aten.reshape.default, source, [-1, shape[-1]])
        if needs_columns:
            options = self.scaling(compact.quantization)
            made = cursor.call(self.operations.compact, matrix, compact.quantization.dtype, **options)
        else:
            made = self.quantize_compact(cursor, matrix, compact.quantization)
        first = 2 if compact.columnwise else 0
        data, scales = (cursor.call(operator.getitem, made, first + i) for i in (0, 1))
        if len(shape) != 2:
            data = cursor.call(aten.reshape.default, data, shape)
            width = value_of(scales).shape[-1]
            scales = cursor.call(aten.reshape.default, scales, scale_shape(source, compact.height, width))
        return data, scales
