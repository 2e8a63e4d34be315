"""Binding: the run-time half of a compiled graph. Finds the module instance of a call and appends its state.

NOTE [the first step] A tensor whose amax history is empty takes its scale from itself. That needs a second read of the tensor,
so it is another graph: the same one, rewritten with `Options.starts` and compiled when a call first needs it. It gets scales in
which 0 stands for an empty history. It runs without code generation, as it serves one step; in inference, which ends no step,
and from call `UNCOMPILED_CALLS` on, code is generated for it, too. What is empty is known on the host; once nothing is, calls
run the compiled graph and ask no more. A tensor that stays 0 for `PATIENCE` steps does not hold others back any longer.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fp8pass.capture.clock import StepClock
from fp8pass.capture.instances import Placement
from fp8pass.capture.placeholders import DTYPES
from fp8pass.capture.recompute import FirstRun, in_backward, may_be_checkpointed
from fp8pass.capture.session import CompiledGraph, GraphUse, Session, running_session
from fp8pass.errors import RuleError
from fp8pass.rules import Rules
from fp8pass.state.store import DelayedStore, Window

#: From this call of the graph for empty histories on, training runs generated code for it. Fewer are a few batches of gradient
#: accumulation.
UNCOMPILED_CALLS = 16
#: Steps for which a tensor that stays 0 is waited for, before its scale of 1 counts as its first.
PATIENCE = 8


@dataclasses.dataclass(eq=False)
class Instance:
    """One module instance that a graph runs for."""

    tensors: tuple[tuple[tuple[str, float, int], ...], ...]
    """Per recipe that keeps state, the instance's names of the graph's tensors, with the largest FP8 value and the number of
    entries of each."""
    names: tuple[tuple[str, ...], ...]
    """The names alone."""
    stores: list[DelayedStore]
    windows: list[Window]
    layouts: list[int]
    """Layout of each store that the windows belong to."""
    may_start: bool = True
    """Whether a history may be empty; once it is False, nothing is asked until the stores' layouts change."""
    started_at: dict[DelayedStore, int] = dataclasses.field(default_factory=dict)
    """Step boundaries that each store had seen when a call first met an empty history."""


class Binder:
    """Runs one compiled graph. Invariant: the graph receives exactly the slots of the instance whose Parameters it receives."""

    def __init__(
        self,
        compiled: CompiledGraph,
        function: Callable[..., Any],
        rules: Rules,
        compile_first: Callable[[bool], Callable[..., Any]] | None,
        find_session: Callable[[], Session] = running_session,
    ):
        self.compiled = compiled
        self._find_session = find_session
        self._compile_first = compile_first
        self._first: Callable[..., Any] | None = None
        self._num_first_calls = 0
        self.function = function
        self.rules = rules
        self._positions = [i for i, given in enumerate(compiled.inputs) if given.is_parameter]
        self._identify = _identity_getter(self._positions)

    def run(self, *args: Any) -> Any:
        """Call the graph with the state of the instance that `args` belong to."""
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if isinstance(first, FakeTensor):
            return self.function(*args, *self._fake_state(first.fake_mode))
        session = self._find_session()
        session.num_graph_calls += 1
        use = session.uses.get(self.compiled)
        instance: Instance | None = None if use is None else use.instances.get(self._identify(args))
        if instance is None:
            instance = self._bind(session, args)
        if not instance.stores:
            return self.function(*args)
        # Not every change of `requires_grad` makes Dynamo compile anew, so a graph that trains may run without gradients.
        records = self.compiled.records_amax and torch.is_grad_enabled() and any(map(_wants_gradient, args))
        if session.clock.at_graphs and not in_backward():
            trains = records or (not torch.is_grad_enabled() and may_be_checkpointed(args))
            if session.clock.is_step_due_at_graph(trains):
                session.end_step()
            session.clock.begin_graph(trains)
        if not any(instance.names):  # nothing of the graph has state in these stores: it reads none of what it is given
            return self.function(*args, *self._unread_state)
        for store, layout in zip(instance.stores, instance.layouts, strict=True):
            if store.layout != layout:
                self._refresh(session, instance)
                break
        if in_backward():
            return self._recompute(session, instance, args)
        starts = instance.may_start and self._starts(instance)
        scales = {store: store.marked(store.scale) for store in instance.stores} if starts else None
        if may_be_checkpointed(args):
            frozen = scales or {store: store.frozen_scale() for store in instance.stores}
            session.first_runs.add(args, instance.names, FirstRun(frozen, records, starts))
        session.clock.recorded |= records
        result = self._call(instance, args, records, scales, starts)
        if records and session.clock.at_graphs:
            _notice_backward(result, session.clock)
        return result

    def _call(
        self,
        instance: Instance,
        args: tuple[Any, ...],
        records: bool,
        scales: Mapping[DelayedStore, torch.Tensor] | None,
        starts: bool,
    ) -> Any:
        """Run the graph, or the one for empty histories; `scales`: those to use instead of the state's."""
        state: list[Any] = []
        if starts:
            for store, names in zip(instance.stores, instance.names, strict=True):
                store.started.update(names)
        for store, window in zip(instance.stores, instance.windows, strict=True):
            scale = window.scale
            if scales is not None:
                scale = scales[store][window.offset : window.offset + window.scale.shape[0]]
            amax = window.amax if records else store.scratch_of(window)
            # `.data` gives each call version counters of its own: the boundary may change the state before backward has run.
            state += (scale.data, amax.data, window.amax.data, window.slots)
        function = self._first_function() if starts else self.function
        return function(*args, *state)

    def _first_function(self) -> Callable[..., Any]:
        assert self._compile_first is not None, "only a graph with state meets empty histories"
        self._num_first_calls += 1
        if self._first is None:
            self._first = self._compile_first(not self.compiled.records_amax)
        elif self._num_first_calls == UNCOMPILED_CALLS and self.compiled.records_amax:
            self._first = self._compile_first(True)
        return self._first

    def _starts(self, instance: Instance) -> bool:
        """Whether a history of the instance is empty; see NOTE [the first step]."""
        for store, names in zip(instance.stores, instance.names, strict=True):
            if not store.needs_first_step(names):
                continue
            if store not in instance.started_at:
                instance.started_at[store] = store.version
                store.note_empty(names)  # other ranks may have written the histories of a module that runs here first now
                if not store.needs_first_step(names):
                    continue
            if store.version - instance.started_at[store] < PATIENCE:
                return True
            store.empty.difference_update(names)
        instance.may_start = False
        return False

    @functools.cached_property
    def _unread_state(self) -> list[torch.Tensor]:
        return self._state_without_content()

    def _fake_state(self, fake_mode: FakeTensorMode) -> list[torch.Tensor]:
        """For a dry run: DDPOptimizer runs each part of a split graph on fake tensors once."""
        with fake_mode:
            return self._state_without_content()

    def _state_without_content(self) -> list[torch.Tensor]:
        return [
            torch.empty(capacity, dtype=dtype, device=self.compiled.device)
            for capacity in self.compiled.capacities
            for dtype in DTYPES
        ]

    def _recompute(self, session: Session, instance: Instance, args: tuple[Any, ...]) -> Any:
        first = session.first_runs.take(args, instance.names)
        records = first is not None and not first.recorded and self.compiled.records_amax
        session.clock.recorded |= records
        session.clock.note_backward()
        scales = None if first is None else first.scales
        starts = (instance.may_start and self._starts(instance)) or (first is not None and first.starts)
        if starts:  # in a graph that the first run had not met, gradients alone may have empty histories
            scales = {s: s.marked(s.scale if scales is None else scales[s]) for s in instance.stores}
        return self._call(instance, args, records, scales, starts)

    def _bind(self, session: Session, args: tuple[Any, ...]) -> Instance:
        compiled = self.compiled
        with session.stores.lock:
            placement = session.names.place(compiled.inputs, args)
            self._check_rules(placement)
            stores = [session.stores.store(recipe, compiled.device) for recipe in self.rules.stateful]
            tensors = tuple(tuple(_tensors_in(store, session, compiled, placement)) for store in stores)
            names = tuple(tuple(name for name, _, _ in named) for named in tensors)
            instance = Instance(tensors, names, stores, [], [])
            self._refresh(session, instance)
            aliases = compiled.rewrite.aliases if compiled.rewrite else ()
            placed = [(placement.name_tensor(alias), placement.name_tensor(name)) for alias, name in aliases]
            for store in stores:
                session.stores.add_aliases(store, placed)
            use = session.uses.setdefault(compiled, GraphUse(compiled))
            if placement not in use.placements:
                use.placements.append(placement)
            key = self._identify(args)
            use.instances[key] = instance
            for i in self._positions:
                weakref.finalize(args[i], use.instances.pop, key, None).atexit = False
        return instance

    def _check_rules(self, placement: Placement) -> None:
        """A graph that serves many modules was rewritten by the rules for the first of them."""
        for gemm in self.compiled.rewrite.gemms if self.compiled.rewrite else ():
            module = placement.name_module(gemm.path)
            if self.rules.recipe_for(module, gemm.role) != self.rules.recipe_for(gemm.module, gemm.role):
                raise RuleError(
                    f"{gemm.module} and {module} share one compiled graph, but the rules treat their {gemm.role} differently."
                    f" Give both the same rule, or compile without graph breaks so that each has a graph of its own"
                )

    def _refresh(self, session: Session, instance: Instance) -> None:
        """Find the instance's tensors in the stores, which have grown, or given them up when the model moved."""
        for store, named in zip(instance.stores, instance.tensors, strict=True):
            tensors = [(name, limit) for name, limit, _ in named]
            session.stores.claim(store, tensors, [entries for _, _, entries in named])
        sizes = self.compiled.capacities
        instance.windows = [
            store.window(names, size) for store, names, size in zip(instance.stores, instance.names, sizes, strict=True)
        ]
        instance.may_start = True
        instance.layouts = [store.layout for store in instance.stores]


def _tensors_in(
    store: DelayedStore, session: Session, compiled: CompiledGraph, placement: Placement
) -> Iterator[tuple[str, float, int]]:
    """Names, FP8_MAX and numbers of entries of a graph's tensors in a store, for one instance."""
    for tensor in compiled.tensors(store.recipe):
        name = session.stores.name_under(store.recipe, placement.name_tensor(tensor.name))
        yield str(name), tensor.fp8_max, tensor.entries


def _notice_backward(result: Any, clock: StepClock) -> None:
    """Tell the clock when a backward comes to the graph that returned `result`."""
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    for node in {o.grad_fn for o in outputs if isinstance(o, torch.Tensor) and o.grad_fn is not None}:
        node.register_prehook(clock.note_backward)


def _wants_gradient(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.requires_grad


def _identity_getter(positions: list[int]) -> Callable[[tuple[Any, ...]], Any]:
    """A fast function from a graph's arguments to the identities of the Parameters among them."""
    if not positions:
        return lambda args: ()
    if len(positions) == 1:
        position = positions[0]
        return lambda args: id(args[position])
    pick = operator.itemgetter(*positions)
    return lambda args: tuple(map(id, pick(args)))
