"""One scale per tensor, from the state: the amaxes of earlier steps decided it.

In a graph: the scales come from the state by value, every cast gives the amax of what it reads, and one operation per side of
the partition records the amaxes. `fp8pass.scales` turns them into the next step's scales.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from fp8pass.errors import InvariantError
from fp8pass.graph.cursor import Cursor, never_recompute, pin
from fp8pass.graph.gathers import Gather
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.quantization import Quantization
from fp8pass.schemes.copies import Cast, QuantizedTensor
from fp8pass.schemes.grouped import zero
from fp8pass.schemes.scheme import FIRST_STEP, Scope
from fp8pass.schemes.tensorwise import Pair, TensorEmitter, TensorScheme, amax_of, selected_pairs

aten = torch.ops.aten
ops = torch.ops.lowering


class DelayedScheme(TensorScheme):
    """One scale per tensor, known before the tensor is read."""

    num_reads: ClassVar[int] = 1

    def shard_obstacle(self, quantization: Quantization, shares_scales: bool) -> Reason | None:
        if not quantization.same_on_ranks:
            return Reason(ReasonKind.SCALES, "reduce_amax=False, so ranks scale the tensor differently")
        if not shares_scales:
            return Reason(ReasonKind.SCALES, "amax_reduction_group does not contain all ranks of the gather")
        return None

    def emitter(self, scope: Scope) -> TensorEmitter:
        return (FirstStepEmitter if FIRST_STEP in scope.variants else DelayedEmitter)(scope)


class DelayedEmitter(TensorEmitter):
    """Scales from the state; amaxes into it."""

    def __init__(self, scope: Scope):
        super().__init__(scope)
        ends = list(itertools.accumulate(tensor.entries for tensor in scope.tensors))
        self._num_entries = ends[-1] if ends else 0
        self._slot = {tensor: end - tensor.entries for tensor, end in zip(scope.tensors, ends, strict=True)}
        """First entry of each tensor."""
        self.amaxes: list[tuple[Cast, fx.Node]] = []
        """Of the casts so far."""

    @property
    def records(self) -> bool:
        return self.scope.trains

    def begin(self, cursor: Cursor) -> None:
        """The scales by value and their reciprocals, once per graph. Backward must see what forward saw, even after a
        step boundary has changed the state: so they are saved, never read again."""
        if not self.scope.tensors:
            return
        assert self.scope.state is not None
        state = self.scope.state
        loaded = cursor.call(ops.load_scales.default, state.scale, state.slots, self._num_entries)
        self._scale, self._scale_inv = (cursor.item(loaded, i) for i in (0, 1))
        never_recompute(loaded, self._scale, self._scale_inv)

    def scale_of(self, cursor: Cursor, tensor: QuantizedTensor, matrix: fx.Node) -> Pair:
        return self._selected(cursor, self._scale, tensor), self._selected(cursor, self._scale_inv, tensor)

    def _selected(self, cursor: Cursor, vector: fx.Node, tensor: QuantizedTensor) -> fx.Node:
        first = self._slot[tensor]
        if tensor.entries > 1:
            return cursor.sharing().call(aten.slice.Tensor, vector, 0, first, first + tensor.entries)
        return cursor.sharing().call(aten.select.int, vector, 0, first)

    def scales_of(self, cursor: Cursor, tensors: Sequence[QuantizedTensor], matrices: Sequence[fx.Node]) -> list[Pair]:
        return [self.scale_of(cursor, t, m) for t, m in zip(tensors, matrices, strict=True)]

    def scale_of_shard(self, cursor: Cursor, tensor: QuantizedTensor, gather: Gather) -> Pair:
        return self.scale_of(cursor, tensor, gather.source)

    def record(self, cursor: Cursor, cast: Cast, amax: fx.Node) -> None:
        if cast.tensor.entries > 1 and cast.at.offs is not None:
            amax = cursor.call(aten.where.self, self._is_recorded(cursor, cast, cast.at.offs), amax, zero(cursor, amax))
        self.amaxes.append((cast, amax))

    def _is_recorded(self, cursor: Cursor, cast: Cast, offs: fx.Node) -> fx.Node:
        """[entries] bool: an expert whose group is empty keeps its history, as a tensor does that a step did not read. An amax
        of 0 is none."""
        starts = cursor.call(aten.constant_pad_nd.default, offs, [1, -1], 0)
        return cursor.call(aten.gt.Tensor, offs, starts)

    def end(self, cursor: Cursor) -> None:
        order = {node: i for i, node in enumerate(cursor.graph.nodes)}
        here = [(cast, amax) for cast, amax in self.amaxes if cast.at.is_backward == cursor.backward]
        if not here:
            return
        here.sort(key=lambda entry: (order[entry[0].at.node], self._slot[entry[0].tensor]))
        assert self.scope.state is not None
        state = self.scope.state
        target = state.grad_amax if cursor.backward else state.amax
        for has_one in (True, False):  # scalars and vectors go by calls of their own
            entries = [entry for entry in here if (entry[0].tensor.entries == 1) == has_one]
            amaxes, slots = [amax for _, amax in entries], [self._slot[cast.tensor] for cast, _ in entries]
            if entries:
                pin(cursor.call(ops.record_amax.default, target, state.slots, amaxes, slots), cursor.backward)

    def verify(self, graph: fx.Graph) -> None:
        """The live scales are read once, by value; every slot is recorded once, in a graph that trains, on the side that made
        the amax."""
        if not self.scope.tensors:
            return
        assert self.scope.state is not None
        state = self.scope.state
        for node in state.scale.users:
            if node.target is not ops.load_scales.default:
                raise InvariantError(f"{node.name} reads the live scales, which a boundary may change before backward runs")
            if node.args[1:] != (state.slots, self._num_entries):
                raise InvariantError(f"{node.name} loads {node.args[2]} scales of {node.args[1]}, of {self._num_entries} slots")
        recorded: list[int] = []
        for target, side in ((state.amax, "forward"), (state.grad_amax, "backward")):
            for node in target.users:
                if node.target is not ops.record_amax.default or node.meta.get("partitioner_tag") != f"must_be_in_{side}":
                    raise InvariantError(f"{node.name} uses the staging row, but does not record amaxes in the {side}")
                arguments: Any = node.args
                if arguments[1] is not state.slots:
                    raise InvariantError(f"{node.name} records in the slots {arguments[1]}, which are no slots of the state")
                recorded += arguments[3]
        wanted = sorted(self._slot.values()) if self.scope.trains else []
        if sorted(recorded) != wanted:
            raise InvariantError(f"amaxes of slots {sorted(recorded)} are recorded, the plan quantizes {len(wanted)} tensors")


class FirstStepEmitter(DelayedEmitter):
    """Scales from the state, but for tensors whose history is empty: these arrive with the scale 0 and take it from their own
    amax. It reads every tensor once more, and runs only while some history is empty (`fp8pass.scales.provider`)."""

    def scale_of(self, cursor: Cursor, tensor: QuantizedTensor, matrix: fx.Node) -> Pair:
        loaded = self._selected(cursor, self._scale, tensor)
        return self._own_if_empty(cursor, loaded, amax_of(cursor, tensor, matrix), tensor.quantization)

    def scales_of(self, cursor: Cursor, tensors: Sequence[QuantizedTensor], matrices: Sequence[fx.Node]) -> list[Pair]:
        loaded = cursor.call(ops.take.default, self._scale, [self._slot[t] for t in tensors])
        amaxes = cursor.call(ops.multi_amax.default, list(matrices))
        pair = self._own_if_empty(cursor, loaded, amaxes, tensors[0].quantization)
        return selected_pairs(cursor, pair, len(tensors))

    def scale_of_shard(self, cursor: Cursor, tensor: QuantizedTensor, gather: Gather) -> Pair:
        loaded = self._selected(cursor, self._scale, tensor)
        amax = cursor.call(ops.amax.default, gather.shard_as_matrix(cursor))
        return self._own_if_empty(cursor, loaded, gather.largest_of_ranks(cursor, amax), tensor.quantization)

    def _is_recorded(self, cursor: Cursor, cast: Cast, offs: fx.Node) -> fx.Node:
        """Every empty history gets its first entry now, also that of an expert without tokens."""
        is_empty = cursor.call(aten.eq.Scalar, self._selected(cursor, self._scale, cast.tensor), 0)
        return cursor.call(aten.logical_or.default, super()._is_recorded(cursor, cast, offs), is_empty)

    def _own_if_empty(self, cursor: Cursor, loaded: fx.Node, amax: fx.Node, quantization: Quantization) -> Pair:
        own = cursor.call(ops.scale_from_amax.default, amax, quantization.dtype, margin=quantization.margin)
        scale = cursor.call(aten.where.self, cursor.call(aten.eq.Scalar, loaded, 0), own, loaded)
        return scale, cursor.call(aten.reciprocal.default, scale)
