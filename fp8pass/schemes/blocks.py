"""What schemes with one scale per block share: how copies travel through all-gathers, and the order of their operations.

In a graph: one cast per tensor computes scales and copies. Through all-gathers copies travel in the compact format, with their
scales. A block of scales commutes with the gather if no block crosses a shard: blocks along rows always do, blocks that
span several rows (the columnwise copy, square blocks) where each shard has a multiple of so many rows. With blocks along one
dimension the rowwise and the columnwise copy have different values, so each travels in its own right; with square blocks one
copy serves both.

NOTE [one chain] Passes that look for the gathers of Parameters, PyTorch's and GraphTrainer's, follow a chain from an input of
the graph: operations that read one node each. Values and scales of a Parameter in square blocks depend on nothing else, so
they travel as the bytes of one buffer.
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

from fp8pass.graph.casts import CastFamily, Layout, emit, emit_many
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather, starts_at_input
from fp8pass.graph.moves import keeps_blocks, replay, replay_on_scales, scale_shape
from fp8pass.graph.values import value_of
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.quantization import Quantization
from fp8pass.schemes.copies import Cast, FromGather, Quantized, QuantizedTensor
from fp8pass.schemes.grouped import cast_columns, in_slots
from fp8pass.schemes.scheme import Emitter, GatheredCopies, Read, Scheme, Scope, Sent, engine_obstacle

aten = torch.ops.aten


def block_of(quantization: Quantization) -> tuple[int, int]:
    """Rows and columns of a block, in the orientation of the copy."""
    block = quantization.block
    assert block is not None
    return block


@dataclasses.dataclass(frozen=True)
class Compact:
    """A copy in the compact format, which travels."""

    quantization: Quantization
    columnwise: bool
    """Whether blocks run along columns; False for square blocks, where both orientations share the copy."""

    @classmethod
    def needed_for(cls, quantization: Quantization, layout: Layout) -> Compact:
        """The compact copy that one of this layout is made of."""
        rows, columns = block_of(quantization)
        return cls(quantization, layout.columnwise and rows != columns)

    @property
    def height(self) -> int:
        """Rows of the tensor that share a row of scales."""
        return block_of(self.quantization)[1 if self.columnwise else 0]


@dataclasses.dataclass(frozen=True)
class BlockOperations:
    """The operations of one kind of blocks."""

    casts: CastFamily
    gemm_ready: Any
    """(q, scales, **kind, columnwise, pad_outer) -> a copy as the GEMM reads it."""


class BlockScheme(Scheme):
    """One scale per block."""

    reads_gemm_dtype: ClassVar[bool] = True
    scale_bytes: ClassVar[int]
    """Bytes of a scale."""
    operations: ClassVar[BlockOperations]

    @abc.abstractmethod
    def kind(self, quantization: Quantization) -> dict[str, Any]:
        """The arguments of an operation that say what a block is."""

    def options(self, quantization: Quantization) -> dict[str, Any]:
        """The arguments of a cast that say how scales are made."""
        return {}

    @abc.abstractmethod
    def scale_values(self, cursor: Cursor, made: Quantized) -> fx.Node:
        """float32 scales of the blocks of a copy: an entry per row, or row of blocks, and block of its inner dimension."""

    def scaling(self, quantization: Quantization) -> dict[str, Any]:
        """The arguments of a cast that say what a block is and how scales are made."""
        return {**self.kind(quantization), **self.options(quantization)}

    def fuses_with_producer(self, tensor: QuantizedTensor) -> bool:
        return False

    def gathered(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> GatheredCopies:
        copies = {Compact.needed_for(tensor.quantization, layout) for layout in layouts}
        matrix = tensor.value.reshape or tensor.value.root
        shard = value_of(gather.source).shape
        heights = {copy.height for copy in copies}
        is_whole = all(
            keeps_blocks(matrix, gather.wait, height) and isinstance(shard[-2], int) and shard[-2] % height == 0
            for height in heights
        )
        obstacle = engine_obstacle(tensor.quantization)
        if obstacle is None and not is_whole:
            obstacle = Reason(
                ReasonKind.SHAPE, "a block of scales crosses the border between two ranks' shards, or sizes are dynamic"
            )
        return GatheredCopies(tuple(Sent((tensor.recipe, c), self._bytes_per_element(c)) for c in copies), obstacle)

    def has_one_copy(self, quantization: Quantization) -> bool:
        height, width = block_of(quantization)
        return height == width

    def sharded(self, quantization: Quantization, rows: int, is_even: bool) -> Sent | Reason:
        if not self.has_one_copy(quantization):
            return super().sharded(quantization, rows, is_even)
        return self._sent(quantization, rows, is_even)

    def sharded_each(self, quantization: Quantization, rows: int, columns: int, is_even: bool) -> Sent | Reason:
        return self._sent(quantization, rows, is_even)

    def _sent(self, quantization: Quantization, rows: int, is_even: bool) -> Sent | Reason:
        if (obstacle := engine_obstacle(quantization)) is not None:
            return obstacle
        if rows % max(block_of(quantization)) or not is_even:
            detail = f"a block of scales crosses the border between two ranks' shards of {rows} rows"
            return Reason(ReasonKind.SHAPE, detail)
        compact = Compact(quantization, columnwise=False)
        return Sent(compact, self._bytes_per_element(compact))

    def compact(
        self, x: torch.Tensor, quantization: Quantization, *, columnwise: bool = False, amaxes: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"rowwise": not columnwise, "columnwise": columnwise, "compact": True, **self.scaling(quantization)}
        data, scales = self.operations.casts.cast([x], quantization.dtype, **options)
        return data, scales

    def ready(self, data: torch.Tensor, scales: torch.Tensor, quantization: Quantization, layout: Layout) -> list[torch.Tensor]:
        options = {"columnwise": layout.columnwise, "pad_outer": layout.pads_outer}
        return list(self.operations.gemm_ready(data, scales, **self.kind(quantization), **options))

    def values_of(self, data: torch.Tensor, scales: torch.Tensor, quantization: Quantization) -> torch.Tensor:
        factors = scales if scales.dtype == torch.float32 else scales.view(torch.float8_e8m0fnu).to(torch.float32)
        for dim, size in enumerate(data.shape):
            if factors.shape[dim] != size:
                factors = factors.repeat_interleave(max(block_of(quantization)), dim).narrow(dim, 0, size)
        return data.to(torch.float32).mul_(factors)

    def _bytes_per_element(self, copy: Compact) -> Fraction:
        """A byte, and its share of a scale."""
        rows, columns = block_of(copy.quantization)
        return 1 + Fraction(self.scale_bytes, rows * columns)

    def emitter(self, scope: Scope) -> Emitter:
        return BlockEmitter(self)

    def scales_of_values(self, cursor: Cursor, made: Quantized) -> fx.Node:
        """Each scale, repeated over its block."""
        block = made.quantization.granularity.block
        assert block is not None
        scales = self.scale_values(cursor, made)
        outer, inner = (cursor.size(made.data, dim) for dim in (0, 1))
        for dim, size, height in ((1, inner, block[1]), (0, outer, block[0])):
            if height > 1:
                others = [cursor.size(scales, d) for d in (0, 1)]
                scales = cursor.call(aten.unsqueeze.default, scales, dim + 1)
                shape = [*others[: dim + 1], height, *others[dim + 1 :]]
                scales = cursor.call(aten.expand.default, scales, shape)
                scales = cursor.call(aten.reshape.default, scales, [others[0], -1] if dim == 1 else [-1, others[1]])
                scales = cursor.call(aten.slice.Tensor, scales, dim, 0, size)
        return scales


class BlockEmitter(Emitter):
    """Casts that compute their own scales."""

    def __init__(self, scheme: BlockScheme):
        self.scheme = scheme
        self.operations = scheme.operations

    def quantize(self, cursor: Cursor, casts: Sequence[Cast], reads: Sequence[Read]) -> list[tuple[Quantized, ...]]:
        cast, read = casts[0], reads[0]
        dtype, options = cast.tensor.dtype, self.scheme.scaling(cast.tensor.quantization)
        family = self.operations.casts
        if isinstance(cast.source, FromGather):
            return [self._shard(cursor, cast, cast.source.gather, read.node)]
        if read.groups is not None:
            return [self._rows(cursor, cast, read)]
        if len(casts) == 1:
            made = [emit(cursor, family, read.node, dtype, cast.layouts, **options)]
        else:
            made = emit_many(cursor, family, [r.node for r in reads], dtype, cast.layouts, **options)
        return [Quantized.made_by(outputs, c.copies) for outputs, c in zip(made, casts, strict=True)]

    def _rows(self, cursor: Cursor, cast: Cast, read: Read) -> tuple[Quantized, ...]:
        """Rowwise, blocks lie within rows, which are gathered with their scales. Grouped GEMMs read compact copies."""
        quantization, (layout,), groups = cast.tensor.quantization, cast.layouts, read.groups
        assert groups is not None
        if layout.columnwise:
            return (cast_columns(cursor, cast, read.node, groups),)
        batch = cursor.call(aten.unsqueeze.default, read.node, 0)
        options = self.scheme.scaling(quantization)
        outputs = emit(cursor, self.operations.casts, batch, quantization.dtype, (Layout(False),), **options)
        (made,) = Quantized.made_by(outputs, cast.copies)
        found = [cursor.call(aten.select.int, node, 0, 0) for node in (made.data, made.scale_inv)]
        data, scales = (in_slots(cursor, node, groups) for node in found)
        return (dataclasses.replace(made, data=data, scale_inv=scales),)

    def _shard(self, cursor: Cursor, cast: Cast, gather: Gather, matrix: fx.Node) -> tuple[Quantized, ...]:
        """The shard's compact copies are gathered, and made ready for the GEMM afterwards."""
        quantization = cast.tensor.quantization
        travelled: dict[Compact, tuple[fx.Node, fx.Node, fx.Node]] = {}
        needed = [Compact.needed_for(quantization, layout) for layout in cast.layouts]
        found = []
        for copy, layout, compact in zip(cast.copies, cast.layouts, needed, strict=True):
            if compact not in travelled:
                if cast.tensor.name.kind == "weight" and len(set(needed)) == 1 and starts_at_input(gather.source):
                    travelled[compact] = self._send_packed(cursor, gather, compact)
                else:
                    made, data, scales = self._cast_shard(cursor, gather.source, compact, any(c.columnwise for c in needed))
                    data = gather.send(cursor, cursor.call(aten.view.dtype, data, torch.uint8))
                    travelled[compact] = made, data, gather.send(cursor, scales)
            made, data, scales = travelled[compact]
            data = replay(matrix, {gather.wait: data}, cursor.call)
            width = value_of(scales).shape[-1]
            scales = replay_on_scales(matrix, {gather.wait: scales}, compact.height, width, cursor.call)
            ready = cursor.call(
                self.operations.gemm_ready,
                cursor.call(aten.view.dtype, data, quantization.dtype),
                scales,
                **self.scheme.kind(quantization),
                columnwise=layout.columnwise,
                pad_outer=layout.pads_outer,
            )
            found.append(Quantized(cursor.item(ready, 0), cursor.item(ready, 1), copy, made))
        return tuple(found)

    def _send_packed(self, cursor: Cursor, gather: Gather, compact: Compact) -> tuple[fx.Node, fx.Node, fx.Node]:
        """The cast, and what arrives of its data and scales: NOTE [one chain]."""
        matrix, shape = gather.shard_as_matrix(cursor), list(value_of(gather.wait).shape)
        sides = {"rowwise": not compact.columnwise, "columnwise": compact.columnwise}
        options = {**sides, "compact": True, **self.scheme.scaling(compact.quantization)}
        made = cursor.call(self.operations.casts.cast, [matrix], compact.quantization.dtype, **options)
        arrived = gather.send(cursor, cursor.call(torch.ops.lowering.packed.default, made))
        data, scales = made.meta["val"]
        sizes = [part.numel() * part.element_size() for part in (data, scales)]
        of_ranks = cursor.call(aten.reshape.default, arrived, [gather.num_ranks, sum(sizes)])
        parts = [cursor.call(aten.slice.Tensor, of_ranks, 1, *ends) for ends in ((0, sizes[0]), (sizes[0], sum(sizes)))]
        bytes_of_row = scales.shape[1] * scales.element_size()
        values = cursor.call(aten.reshape.default, parts[0], shape)
        factors = cursor.call(aten.reshape.default, parts[1], [-1, bytes_of_row])
        if scales.dtype != torch.uint8:
            factors = cursor.call(aten.view.dtype, factors, scales.dtype)
        if len(shape) != 2:
            factors = cursor.call(aten.reshape.default, factors, scale_shape(gather.wait, compact.height, scales.shape[1]))
        return made, values, factors

    def _cast_shard(
        self, cursor: Cursor, source: fx.Node, compact: Compact, needs_columns: bool
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """The cast; data in the shard's shape; scales in the shape that the moves can be repeated on. With `needs_columns` it
        makes the columnwise copy of the same read."""
        shape = list(value_of(source).shape)
        matrix = source if len(shape) == 2 else cursor.call(aten.reshape.default, source, [-1, shape[-1]])
        options = {"columnwise": needs_columns, "compact": True, **self.scheme.scaling(compact.quantization)}
        made = cursor.call(self.operations.casts.cast, [matrix], compact.quantization.dtype, **options)
        first = 2 if compact.columnwise else 0
        data, scales = (cursor.call(operator.getitem, made, first + i) for i in (0, 1))
        if len(shape) != 2:
            data = cursor.call(aten.reshape.default, data, shape)
            width = value_of(scales).shape[-1]
            scales = cursor.call(aten.reshape.default, scales, scale_shape(source, compact.height, width))
        return made, data, scales
