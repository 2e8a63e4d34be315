"""Delayed scaling: one scale per tensor, from the amaxes of earlier steps. Source: TransformerEngine's DelayedScaling.

In a graph: the scales come from the state by value, every cast gives the amax of what it reads, and one operation per side of
the partition records the amaxes. `fp8pass.state` turns them into the next step's scales.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from fp8pass.errors import InvariantError, nearest
from fp8pass.graph.cursor import Cursor, is_pinned, never_recompute, pin
from fp8pass.graph.gathers import Gather
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.grouped import zero
from fp8pass.recipes.options import FAST_ACCUM, Format, check, check_bools, check_format, is_int, recipe
from fp8pass.recipes.recipe import Cast, Emitter, QuantizedTensor, Scope
from fp8pass.recipes.tensorwise import TensorwiseEmitter, TensorwiseRecipe, amax_of, selected_pairs

aten = torch.ops.aten
ops = torch.ops.lowering

_RECORDS = (ops.record_amax.default, ops.record_amax_vectors.default)

AmaxAlgo = Literal["max", "most_recent"] | Callable[[torch.Tensor], torch.Tensor]


@recipe
class DelayedScaling(TensorwiseRecipe):
    """One scale per tensor, from the amaxes of earlier steps: each tensor is read once. Source: TransformerEngine."""

    name: ClassVar[str] = "delayed"
    keeps_state: ClassVar[bool] = True

    margin: int = 0
    """The scale leaves 2**margin of headroom: scale = fp8_max / 2**margin / amax."""
    fp8_format: Format = Format.HYBRID
    """FP8 formats of forward tensors and of gradients."""
    amax_history_len: int = 1024
    """Number of steps whose amaxes determine a scale, at least 1."""
    amax_compute_algo: AmaxAlgo = "max"
    """"max" or "most_recent" of the history, or a function amax_history[len, n] -> amax[n] (row 0: the current step)."""
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    """A function (amax[n], scale[n], fp8_max[n], recipe) -> scale[n], or None for the formula above."""
    initial_scale: Literal["current", "one"] = "current"
    """Scale of a tensor whose history is empty: "current" takes it from the tensor itself, as current scaling does, so that the
    model trains from the first step on; "one" starts with 1, as TransformerEngine does."""
    backward_override: None = None
    """None: as in TransformerEngine, delayed scaling has no backward override."""
    reduce_amax: bool = True
    """Whether amaxes are reduced (MAX) over `amax_reduction_group` at each step boundary."""
    fast_accum_output: bool = True
    """Whether the forward GEMM may use the tensor cores' faster, less precise accumulator."""
    fast_accum_grad_input: bool = False
    """The same for the grad_input GEMM."""
    fast_accum_grad_weight: bool = False
    """The same for the grad_weight GEMM."""

    def __post_init__(self) -> None:
        check_format(self)
        check(self, "margin", is_int(self.margin) and -100 <= self.margin <= 100, "use an int between -100 and 100")
        length = self.amax_history_len
        check(self, "amax_history_len", is_int(length) and length >= 1, "use an int of at least 1")
        algo = self.amax_compute_algo
        hint = nearest(algo, ("max", "most_recent")) if isinstance(algo, str) else ""
        is_algo = algo in ("max", "most_recent") if isinstance(algo, str) else callable(algo)
        check(self, "amax_compute_algo", is_algo, f"use 'max', 'most_recent' or a function.{hint}")
        factor = self.scaling_factor_compute_algo
        check(self, "scaling_factor_compute_algo", factor is None or callable(factor), "use a function or None")
        first = self.initial_scale
        hint = nearest(first, ("current", "one")) if isinstance(first, str) else ""
        check(self, "initial_scale", first in ("current", "one"), f"use 'current' or 'one'.{hint}")
        fix = "delayed scaling has none, as in TransformerEngine; use Float8CurrentScaling or another recipe"
        check(self, "backward_override", self.backward_override is None, fix)
        check_bools(self, "reduce_amax", *FAST_ACCUM)

    def gather_obstacle(self, gather: Gather) -> Reason | None:
        if not self.reduce_amax:
            return Reason(ReasonKind.SCALES, "reduce_amax=False, so ranks scale the tensor differently")
        if not gather.shares_scales:
            return Reason(ReasonKind.SCALES, "amax_reduction_group does not contain all ranks of the gather")
        return None

    def emitter(self, scope: Scope) -> Emitter:
        return (FirstStepEmitter if scope.starts else DelayedEmitter)(self, scope)


class DelayedEmitter(TensorwiseEmitter):
    """Scales from the state; amaxes into it."""

    def __init__(self, recipe: DelayedScaling, scope: Scope):
        super().__init__(recipe, scope)
        ends = list(itertools.accumulate(tensor.entries for tensor in scope.tensors))
        self._num_entries = ends[-1] if ends else 0
        self._slot = {tensor: end - tensor.entries for tensor, end in zip(scope.tensors, ends, strict=True)}
        """First entry of each tensor."""
        self._amaxes: list[tuple[Cast, fx.Node]] = []

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

    def scale_of(self, cursor: Cursor, tensor: QuantizedTensor, matrix: fx.Node) -> tuple[fx.Node, fx.Node]:
        return self._selected(cursor, self._scale, tensor), self._selected(cursor, self._scale_inv, tensor)

    def _selected(self, cursor: Cursor, vector: fx.Node, tensor: QuantizedTensor) -> fx.Node:
        first = self._slot[tensor]
        if tensor.entries > 1:
            return cursor.sharing().call(aten.slice.Tensor, vector, 0, first, first + tensor.entries)
        return cursor.sharing().call(aten.select.int, vector, 0, first)

    def scales_of(
        self, cursor: Cursor, tensors: Sequence[QuantizedTensor], matrices: Sequence[fx.Node]
    ) -> list[tuple[fx.Node, fx.Node]]:
        return [self.scale_of(cursor, t, m) for t, m in zip(tensors, matrices, strict=True)]

    def scale_of_shard(self, cursor: Cursor, tensor: QuantizedTensor, gather: Gather) -> tuple[fx.Node, fx.Node]:
        return self.scale_of(cursor, tensor, gather.source)

    def record(self, cursor: Cursor, cast: Cast, amax: fx.Node) -> None:
        if cast.tensor.entries > 1 and cast.at.offs is not None:
            amax = cursor.call(aten.where.self, self._is_recorded(cursor, cast, cast.at.offs), amax, zero(cursor, amax))
        self._amaxes.append((cast, amax))

    def _is_recorded(self, cursor: Cursor, cast: Cast, offs: fx.Node) -> fx.Node:
        """[entries] bool: an expert whose group is empty keeps its history, as a tensor does that a step did not read. An amax
        of 0 is none."""
        starts = cursor.call(aten.constant_pad_nd.default, offs, [1, -1], 0)
        return cursor.call(aten.gt.Tensor, offs, starts)

    def end(self, cursor: Cursor) -> None:
        order = {node: i for i, node in enumerate(cursor.graph.nodes)}
        here = [(cast, amax) for cast, amax in self._amaxes if cast.at.is_backward == cursor.backward]
        if not here:
            return
        here.sort(key=lambda entry: (order[entry[0].at.node], self._slot[entry[0].tensor]))
        assert self.scope.state is not None
        state = self.scope.state
        target = state.grad_amax if cursor.backward else state.amax
        for operation, has_one in ((ops.record_amax.default, True), (ops.record_amax_vectors.default, False)):
            entries = [entry for entry in here if (entry[0].tensor.entries == 1) == has_one]
            amaxes, slots = [amax for _, amax in entries], [self._slot[cast.tensor] for cast, _ in entries]
            if entries:
                pin(cursor.call(operation, target, state.slots, amaxes, slots), cursor.backward)

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
        recorded: list[int] = []
        for target, side in ((state.amax, "forward"), (state.grad_amax, "backward")):
            for node in target.users:
                if node.target not in _RECORDS or not is_pinned(node):
                    raise InvariantError(f"{node.name} uses the staging row, but does not record amaxes in the {side}")
                arguments: Any = node.args
                recorded += arguments[3]
        wanted = sorted(self._slot.values()) if self.scope.trains else []
        if sorted(recorded) != wanted:
            raise InvariantError(f"amaxes of slots {sorted(recorded)} are recorded, the plan quantizes {len(wanted)} tensors")


class FirstStepEmitter(DelayedEmitter):
    """Scales from the state, but for tensors whose history is empty: these arrive with the scale 0 and take it from their own
    amax. It reads every tensor once more, and runs only while some history is empty (`fp8pass.capture.binding`)."""

    def scale_of(self, cursor: Cursor, tensor: QuantizedTensor, matrix: fx.Node) -> tuple[fx.Node, fx.Node]:
        loaded = self._selected(cursor, self._scale, tensor)
        return self._own_if_empty(cursor, loaded, amax_of(cursor, tensor, matrix), tensor.dtype)

    def scales_of(
        self, cursor: Cursor, tensors: Sequence[QuantizedTensor], matrices: Sequence[fx.Node]
    ) -> list[tuple[fx.Node, fx.Node]]:
        loaded = cursor.call(ops.take.default, self._scale, [self._slot[t] for t in tensors])
        amaxes = cursor.call(ops.multi_amax.default, list(matrices))
        pair = self._own_if_empty(cursor, loaded, amaxes, tensors[0].dtype)
        return selected_pairs(cursor, pair, len(tensors))

    def scale_of_shard(self, cursor: Cursor, tensor: QuantizedTensor, gather: Gather) -> tuple[fx.Node, fx.Node]:
        loaded = self._selected(cursor, self._scale, tensor)
        amax = cursor.call(ops.amax.default, gather.shard_as_matrix(cursor))
        return self._own_if_empty(cursor, loaded, gather.largest_of_ranks(cursor, amax), tensor.dtype)

    def _is_recorded(self, cursor: Cursor, cast: Cast, offs: fx.Node) -> fx.Node:
        """Every empty history gets its first entry now, also that of an expert without tokens."""
        is_empty = cursor.call(aten.eq.Scalar, self._selected(cursor, self._scale, cast.tensor), 0)
        return cursor.call(aten.logical_or.default, super()._is_recorded(cursor, cast, offs), is_empty)

    def _own_if_empty(self, cursor: Cursor, loaded: fx.Node, amax: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, fx.Node]:
        own = cursor.call(ops.scale_from_amax.default, amax, dtype, margin=self.recipe.margin)
        scale = cursor.call(aten.where.self, cursor.call(aten.eq.Scalar, loaded, 0), own, loaded)
        return scale, cursor.call(aten.reciprocal.default, scale)
