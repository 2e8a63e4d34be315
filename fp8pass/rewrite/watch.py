"""Watch: statistics of what a graph quantizes, for steps that are measured. Nothing else in the graph changes.

A tensor is measured where it is cast, and the vectors of one side of the partition are recorded by one operation, into a row
each of an input of the graph. What an operation gives: `lowering/statistics.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor, pin
from fp8pass.graph.kinds import operands_of
from fp8pass.graph.names import TensorName
from fp8pass.graph.sites import GemmSite
from fp8pass.graph.values import value_of
from fp8pass.inputs import CapacityExceeded, Watch, Watched, WatchKey
from fp8pass.recipes import Recipe
from fp8pass.schemes.copies import Cast, Copy, FromCopy, FromGather, FromInput
from fp8pass.schemes.scheme import Emitter, Read
from lowering.formats import Granularity, fp8_max

ops = torch.ops.lowering


class Watcher:
    """Inserts the operations that measure. Invariant: it adds nodes that read, and changes none."""

    def __init__(self, inputs: Mapping[Hashable, fx.Node], watch: Watch):
        self._buffers = {side: inputs[WatchKey(side)] for side in (False, True)}
        self.watch = watch
        self.rows: list[Watched] = []
        self._made: list[fx.Node] = []

    def casts(self, cursor: Cursor, casts: Sequence[Cast], reads: Sequence[Read], emitter: Emitter) -> None:
        """Measure what a launch quantizes, just behind it."""
        here = cursor.at(cursor.before, cursor.backward)
        for cast, read in zip(casts, reads, strict=True):
            pair = emitter.pair_of(cast.tensor)
            if isinstance(cast.source, (FromCopy, FromInput)) or (pair is not None and not cast.is_first):
                continue  # values that are measured where they are made
            for copy in cast.copies[:1] if pair is not None else cast.copies:
                self._measure(here, cast, copy, read, pair)

    def _measure(self, cursor: Cursor, cast: Cast, copy: Copy, read: Read, pair: tuple[fx.Node, fx.Node] | None) -> None:
        quantization, groups = copy.quantization, read.groups
        matrix = cast.source.gather.shard_as_matrix(cursor) if isinstance(cast.source, FromGather) else read.node
        scale, scale_inv = (None, None) if pair is None else pair
        node = cursor.call(
            ops.quantization_statistics.default,
            matrix,
            copy.dtype,
            scale,
            scale_inv,
            None if groups is None else groups.offs,
            None if groups is None else groups.index,
            granularity=(quantization.granularity if pair is None else Granularity.TENSOR_WISE).value,
            columnwise=copy.columnwise and pair is None,
            square=quantization.square,
            power_of_2=quantization.power_of_2,
            epsilon=quantization.epsilon,
            inverse=quantization.inverse,
        )
        side = "tensor" if pair is not None else "columnwise" if copy.columnwise else "rowwise"
        label = quantization.granularity.label
        format_ = "e4m3" if "e4m3" in str(copy.dtype) else "e5m2"
        self._add(
            node,
            cursor,
            Watched(copy.name, cast.at.role, side, copy.recipe, fp8_max(copy.dtype), format_, label, cursor.backward),
        )

    def product(self, cursor: Cursor, site: GemmSite, recipe: Recipe, out: fx.Node, addend: fx.Node | None) -> None:
        """Measure the result of a GEMM against that in high precision, of the operands as the graph had them."""
        if not self.watch.products:
            return
        cursor = cursor.at(cursor.before, cursor.backward)
        a, b = operands_of(site.node)
        node = cursor.call(ops.product_statistics.default, out, a, b, site.offs, addend)
        name = TensorName(site.module, "input", path=site.path)
        self._add(node, cursor, Watched(name, site.role, None, recipe, 0.0, "", "", cursor.backward))

    def _add(self, node: fx.Node, cursor: Cursor, watched: Watched) -> None:
        self._made.append(node)
        self.rows.append(watched)

    def end(self, cursor: Cursor) -> None:
        """Record what one side of the partition has measured; cursor: before the graph's output."""
        buffer = self._buffers[cursor.backward]
        if len(self.rows) > value_of(buffer).shape[0]:
            raise CapacityExceeded(len(self.rows))
        rows = [i for i, watched in enumerate(self.rows) if watched.is_backward == cursor.backward]
        if rows:
            pin(cursor.call(ops.record_statistics.default, buffer, [self._made[i] for i in rows], rows), cursor.backward)
