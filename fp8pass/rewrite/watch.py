"""Statistics of what a graph quantizes, for steps that are measured. Nothing else in the graph changes.

A tensor is measured where it is cast, and the vectors of one side of the partition are recorded by one operation, into a row
each of an input of the graph. What an operation gives: `lowering/statistics.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor, pin
from fp8pass.graph.gathers import Gather
from fp8pass.graph.gemms import GemmSite, kind_of, operands_of
from fp8pass.graph.origin import TensorName
from fp8pass.graph.values import argument, value_of
from fp8pass.inputs import STATISTICS, InputsMissing, Measured, MonitorRow
from fp8pass.recipes import Recipe
from fp8pass.schemes.copies import Cast, Copy, FromInput, Quantized
from fp8pass.schemes.emitter import Emitter
from lowering.formats import FORMAT_NAMES, Granularity, fp8_max

ops = torch.ops.lowering


#: The sides of an operation that measures, and which of its arguments are the factors of its lines.
_FACTORS = {"rowwise": 6, "columnwise": 7}


class StatisticsInserter:
    """Inserts the operations that measure. Invariant: it adds nodes that read, and changes none but its own: what measures
    one copy of a value is replaced where the other copy is made, so that one read serves both."""

    def __init__(self, inputs: Mapping[Hashable, fx.Node], watch: Measured):
        self._buffers = {side: inputs[STATISTICS[side]] for side in (False, True)}
        self.watch = watch
        self.rows: list[MonitorRow] = []
        self._made: list[tuple[fx.Node, str | None]] = []
        self._of_groups: dict[Hashable, fx.Node] = {}

    def casts(
        self,
        cursor: Cursor,
        casts: Sequence[Cast],
        reads: Sequence[fx.Node],
        emitter: Emitter,
        made: Sequence[Sequence[Quantized]],
    ) -> None:
        """Measure what a launch quantizes, just behind it. made: the copies of each cast."""
        here, together = cursor.at(cursor.before, cursor.backward), dict[Hashable, fx.Node]()
        for cast, read, copies in zip(casts, reads, made, strict=True):
            pair = emitter.pair_of(cast.tensor)
            if isinstance(cast.source, (Copy, FromInput)) or (pair is not None and not cast.is_first):
                continue  # values that are measured where they are made
            for quantized in copies[:1] if pair is not None else copies:
                # The copies of groups may have a cast each, and the value is in memory.
                known = together if cast.tensor.value.groups is None else self._of_groups
                self._measure(here, cast, quantized, read, pair, known)

    def _measure(
        self,
        cursor: Cursor,
        cast: Cast,
        made: Quantized,
        read: fx.Node,
        pair: tuple[fx.Node, fx.Node] | None,
        known: dict[Hashable, fx.Node],
    ) -> None:
        """known: operations that measure a copy of a value, to which the other one is added: one read serves both."""
        copy, quantization, groups = made.copy, made.copy.quantization, cast.tensor.value.groups
        matrix = cast.source.shard_as_matrix(cursor) if isinstance(cast.source, Gather) else read
        scale, scale_inv = (None, None) if pair is None else pair
        offs, index = (None, None) if groups is None else (groups.offs, groups.index)
        granularity = quantization.granularity if pair is None else Granularity.TENSOR_WISE
        how = {name: getattr(quantization, name) for name in ("square", "power_of_2", "epsilon", "inverse")}
        options = {"granularity": granularity.value, **how}
        side = "columnwise" if copy.columnwise and pair is None else "rowwise"
        key = (matrix, copy.dtype, offs, index, cursor.backward, *options.values())
        has_lines = quantization.granularity is Granularity.ROW_WISE and not isinstance(cast.source, Gather)
        factors = {side: made.scale_inv if has_lines else None}
        earlier = known.get(key) if pair is None else None
        if earlier is not None:
            factors |= {name: argument(earlier, place) for name, place in _FACTORS.items() if earlier.kwargs[name]}
        if earlier is None or len(factors) > sum(bool(earlier.kwargs[name]) for name in _FACTORS):
            sides = {name: name in factors for name in _FACTORS}
            args = (matrix, copy.dtype, scale, scale_inv, offs, index, *(factors.get(name) for name in _FACTORS))
            node = known[key] = cursor.call(ops.quantization_statistics.default, *args, **options, **sides)
            if earlier is not None:
                self._made = [(node if one is earlier else one, of_side) for one, of_side in self._made]
                cursor.graph.erase_node(earlier)
        else:
            node = earlier
        which, dtype, label = side if pair is None else "tensor", copy.dtype, quantization.granularity.label
        format_ = fp8_max(dtype), FORMAT_NAMES[dtype], label
        self._add(node, MonitorRow(copy.name, cast.at.role, which, copy.recipe, *format_, cursor.backward), side)

    def product(self, cursor: Cursor, site: GemmSite, recipe: Recipe, out: fx.Node, addend: fx.Node | None) -> None:
        """Measure the result of a GEMM against that in high precision, of the operands as the graph had them."""
        if self.watch != "products":
            return
        cursor = cursor.at(cursor.before, cursor.backward)
        a, b = (_as_multiplied(cursor, site.node, i) for i in (0, 1))
        node = cursor.call(ops.product_statistics.default, out, a, b, site.offs, addend)
        name = TensorName(site.module, "input", path=site.path)
        self._add(node, MonitorRow(name, site.role, None, recipe, 0.0, "", "", cursor.backward))

    def _add(self, node: fx.Node, watched: MonitorRow, side: str | None = None) -> None:
        self._made.append((node, side))
        self.rows.append(watched)

    def end(self, cursor: Cursor) -> None:
        """Record what one side of the partition has measured; cursor: before the graph's output."""
        buffer = self._buffers[cursor.backward]
        if len(self.rows) > value_of(buffer).shape[0]:
            raise InputsMissing(entries=len(self.rows))
        rows = [i for i, watched in enumerate(self.rows) if watched.is_backward == cursor.backward]
        if rows:
            vectors = [self._vector(cursor, *self._made[i]) for i in rows]
            pin(cursor.call(ops.record_statistics.default, buffer, vectors, rows), cursor.backward)

    @staticmethod
    def _vector(cursor: Cursor, node: fx.Node, side: str | None) -> fx.Node:
        """The result of an operation that is of this copy."""
        if side is None:
            return node
        is_second = side == "columnwise" and bool(node.kwargs["rowwise"])
        return cursor.call(operator.getitem, node, int(is_second))


def _as_multiplied(cursor: Cursor, gemm: fx.Node, position: int) -> fx.Node:
    """An operand of a GEMM; transposed where the operation reads its transpose."""
    kind, operand = kind_of(gemm), operands_of(gemm)[position]
    if kind is None or not kind.transposes[position]:
        return operand
    return cursor.call(torch.ops.aten.transpose.int, operand, -2, -1)
