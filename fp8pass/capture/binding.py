"""Binding: the run-time half of a compiled graph. Finds the module instance of a call and appends its extra inputs.

NOTE [graphs of variants] A variant of a graph (NOTE [variants] in `fp8pass.inputs`) is compiled when a call first needs it. In
training it runs without code generation, as "first_step" serves one step; in inference, which ends no step, and from call
`UNCOMPILED_CALLS` on, code is generated for it, too.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fp8pass.capture.clock import StepClock
from fp8pass.capture.instances import Placement
from fp8pass.capture.recompute import FirstRun, in_backward, may_be_checkpointed
from fp8pass.capture.session import CompiledGraph, GraphUse, Session, running_session
from fp8pass.errors import RuleError
from fp8pass.inputs import USUAL, BoundInputs, Placed
from fp8pass.rules import Rules

#: From this call of a variant on, training runs generated code for it. Fewer are a few batches of gradient accumulation.
UNCOMPILED_CALLS = 16

CompileVariant = Callable[[frozenset[str], bool], Callable[..., Any]]
"""(variants, whether code is generated) -> the variant of a graph, compiled."""


class Instance:
    """One module instance that a graph runs for."""

    def __init__(self, bound: list[BoundInputs], trains: bool):
        self.bound = bound
        """Per provider that the graph has inputs of."""
        self.identity: Hashable = tuple(inputs.identity for inputs in bound)
        self.is_read = any(inputs.is_read for inputs in bound)
        """Whether the graph reads any of its extra inputs."""
        self.records = trains and self.is_read
        """Whether calls with gradients write into them what a step boundary takes."""

    def variants(self) -> frozenset[str]:
        """Of a call that is about to run."""
        found = USUAL
        for inputs in self.bound:
            found |= inputs.variants()
        return found


@dataclasses.dataclass
class Variant:
    """A compiled variant of a graph."""

    function: Callable[..., Any]
    num_calls: int = 0


class Binder:
    """Runs one compiled graph. Invariant: the graph receives the extra inputs of the instance whose Parameters it receives."""

    def __init__(
        self,
        compiled: CompiledGraph,
        function: Callable[..., Any],
        rules: Rules,
        compile_variant: CompileVariant | None,
        find_session: Callable[[], Session] = running_session,
    ):
        self.compiled = compiled
        self._find_session = find_session
        self._compile_variant = compile_variant
        self._variants: dict[frozenset[str], Variant] = {}
        self.function = function
        self.rules = rules
        self._positions = [i for i, given in enumerate(compiled.inputs) if given.is_parameter]
        self._identify = _identity_getter(self._positions)

    def run(self, *args: Any) -> Any:
        """Call the graph with the extra inputs of the instance that `args` belong to."""
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if isinstance(first, FakeTensor):
            return self.function(*args, *self._fake_inputs(first.fake_mode))
        session = self._find_session()
        session.num_graph_calls += 1
        result = self._run(session, args)
        if self.compiled.trains and session.is_watching:
            session.watch_backward(result)
        return result

    def _run(self, session: Session, args: tuple[Any, ...]) -> Any:
        use = session.uses.get(self.compiled)
        instance: Instance | None = None if use is None else use.instances.get(self._identify(args))
        if instance is None:
            instance = self._bind(session, args)
        if not instance.bound:
            return self.function(*args)
        # Not every change of `requires_grad` makes Dynamo compile anew, so a graph that trains may run without gradients.
        records = instance.records and torch.is_grad_enabled() and any(map(_wants_gradient, args))
        if session.clock.at_graphs and not in_backward():
            trains = records or (not torch.is_grad_enabled() and may_be_checkpointed(args))
            if session.clock.is_step_due_at_graph(trains):
                session.end_step()
            session.clock.begin_graph(trains)
        if not instance.is_read:
            return self.function(*args, *self._unread)
        for inputs in instance.bound:
            inputs.refresh()
        if in_backward():
            return self._recompute(session, instance, args)
        variants = instance.variants()
        if may_be_checkpointed(args):
            remembered = tuple(inputs.remember(variants) for inputs in instance.bound)
            session.first_runs.add(args, instance.identity, FirstRun(remembered, records, variants))
        session.clock.recorded |= records
        result = self._call(instance, args, records, variants)
        if records and session.clock.at_graphs:
            _notice_backward(result, session.clock)
        return result

    def _call(
        self, instance: Instance, args: tuple[Any, ...], records: bool, variants: frozenset[str], first: FirstRun | None = None
    ) -> Any:
        """Run the graph, or a variant of it. first: what the call repeats."""
        extra: list[Any] = []
        for i, inputs in enumerate(instance.bound):
            extra += inputs.tensors(records, variants, None if first is None else first.remembered[i])
        function = self._variant(variants) if variants else self.function
        return function(*args, *extra)

    def _variant(self, variants: frozenset[str]) -> Callable[..., Any]:
        """See NOTE [graphs of variants]."""
        assert self._compile_variant is not None, "only a graph with extra inputs has variants"
        found = self._variants.get(variants)
        if found is None:
            found = self._variants[variants] = Variant(self._compile_variant(variants, not self.compiled.trains))
        found.num_calls += 1
        if found.num_calls == UNCOMPILED_CALLS and self.compiled.trains:
            found.function = self._compile_variant(variants, True)
        return found.function

    @functools.cached_property
    def _unread(self) -> list[torch.Tensor]:
        return self._inputs_without_content()

    def _fake_inputs(self, fake_mode: FakeTensorMode) -> list[torch.Tensor]:
        """For a dry run: DDPOptimizer runs each part of a split graph on fake tensors once."""
        with fake_mode:
            return self._inputs_without_content()

    def _inputs_without_content(self) -> list[torch.Tensor]:
        device = self.compiled.device
        return [torch.empty(given.shape, dtype=given.dtype, device=device) for given in self.compiled.extra_inputs]

    def _recompute(self, session: Session, instance: Instance, args: tuple[Any, ...]) -> Any:
        first = session.first_runs.take(args, instance.identity)
        records = first is not None and not first.recorded and instance.records
        session.clock.recorded |= records
        session.clock.note_backward()
        variants = instance.variants()
        return self._call(instance, args, records, variants if first is None else variants | first.variants, first)

    def _bind(self, session: Session, args: tuple[Any, ...]) -> Instance:
        compiled, rewrite = self.compiled, self.compiled.rewrite
        with session.stores.lock:
            placement = session.names.place(compiled.inputs, args)
            self._check_rules(placement)
            tensors, aliases = ({}, ()) if rewrite is None else (rewrite.tensors, rewrite.aliases)
            bound = [
                provider.bind(Placed(compiled.device, given, tensors, aliases, placement.name_tensor))
                for provider, given in zip(session.providers, compiled.extra, strict=True)
                if given
            ]
            instance = Instance(bound, compiled.trains)
            use = session.uses.setdefault(compiled, GraphUse(compiled))
            if placement not in use.placements:
                use.placements.append(placement)
            key = self._identify(args)
            use.instances[key] = instance
            session.num_bound += 1
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
