"""Binding: the run-time half of a compiled graph. Finds the module instance of a call and appends its extra inputs.

NOTE [graphs of variants] A variant of a graph (NOTE [variants] in `fp8pass.inputs`) is compiled when a call first needs it. In
training it runs without code generation, as "first_step" mostly serves one step; in inference, which ends no step, and from
call `UNCOMPILED_CALLS` on, code is generated for it, too.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8pass.inputs import USUAL, BoundInputs, Placed, Records
from fp8pass.runtime.clock import StepClock
from fp8pass.runtime.eager import next_number
from fp8pass.runtime.recompute import FirstRun, in_backward, may_be_checkpointed
from fp8pass.runtime.saved_tensors import call_under_hooks
from fp8pass.runtime.session import CompiledGraph, GraphUse, Session
from fp8pass.weights.hollow import has_hollow
from fp8pass.weights.places import Seen, places_in

#: From this call of a variant on, training runs generated code for it. Fewer are a few batches of gradient accumulation.
UNCOMPILED_CALLS = 16

CompileVariant = Callable[[frozenset[str], bool], Callable[..., Any]]
"""(variants, whether code is generated) -> the variant of a graph, compiled."""


class Instance:
    """One module instance that a graph runs for."""

    def __init__(self, bound: dict[int, BoundInputs], trains: bool, parameters: Hashable, seen: Mapping[int, Seen]):
        """parameters: their identities. seen: what they are, by their positions among the arguments."""
        self.number = next_number()
        self._seen = seen
        self._first = next(iter(seen), 0)
        self.bound = bound
        """Per provider that the graph has inputs of, by its position among all."""
        known = tuple(found for inputs in bound.values() if (found := inputs.identity) is not None)
        self.identity: Hashable = known or parameters
        self.is_read = any(inputs.is_read for inputs in bound.values())
        """Whether the graph reads any of its extra inputs."""
        self.records = trains and self.is_read
        """Whether calls with gradients write into them what a step boundary takes."""

    def is_of(self, args: tuple[Any, ...]) -> bool:
        """Whether arguments with its identities are its Parameters, and not others that came where they were. Of a module that
        is gone, the first one is."""
        return not self._seen or self._seen[self._first].is_of(args[self._first])

    @property
    def is_gone(self) -> bool:
        """Whether no call can be its own any more."""
        return any(seen.is_gone for seen in self._seen.values())

    def variants(self) -> frozenset[str]:
        """Of a call that is about to run."""
        found = USUAL
        for inputs in self.bound.values():
            found |= inputs.variants()
        return found


class Binder:
    """Runs one compiled graph in one form. Invariant: the graph receives the extra inputs of the instance whose Parameters it
    receives."""

    def __init__(
        self,
        compiled: CompiledGraph,
        function: Callable[..., Any],
        compile_variant: CompileVariant,
        num_calls: Counter[frozenset[str]],
    ):
        """num_calls: how often each variant was called, in any form with these rules."""
        self.compiled = compiled
        self._compile_variant = compile_variant
        self.num_calls = num_calls
        self._variants: dict[tuple[frozenset[str], bool], Callable[..., Any]] = {}
        """(variants, whether code was generated) -> what was compiled."""
        self.function = function
        self.form = compiled.form
        self._positions = [i for i, given in enumerate(compiled.inputs) if given.is_parameter]
        self._identify = _identity_getter(self._positions)

    def run(self, session: Session, args: tuple[Any, ...], trains: bool, is_dry: bool = False) -> Any:
        """Call the graph with the extra inputs of the instance that `args` belong to. trains: whether gradients are wanted.
        is_dry: whether the call is part of a dry pass."""
        if self.compiled.rewrite is not None and (has_hollow() or session.weights.gathers is not None):
            session.weights.note_reads(self.compiled.inputs, args, self.compiled.rewrite.reads)
        result = self._run(session, args, trains, is_dry)
        if self.compiled.trains and session.is_watching and not is_dry:
            session.watch_backward(result)
        return result

    def run_dry(self, args: tuple[Any, ...], fake_mode: FakeTensorMode) -> Any:
        """DDPOptimizer runs each part of a split graph on fake tensors once."""
        with fake_mode:
            return self.function(*args, *self._inputs_without_content())

    def last_first_run(self, session: Session, args: tuple[Any, ...]) -> FirstRun | None:
        """The newest first run of the instance that `args` belong to; None where it has not run in this form."""
        instance = self._instance(session, args)
        return None if instance is None else session.first_runs.last_of(instance.identity)

    def _instance(self, session: Session, args: tuple[Any, ...]) -> Instance | None:
        use = session.every_use.get(self.compiled)
        found = None if use is None else use.instances.get(self._identify(args))
        return found if found is not None and found.is_of(args) else None

    def _run(self, session: Session, args: tuple[Any, ...], trains: bool, is_dry: bool) -> Any:
        instance = self._instance(session, args) or self._bind(session, args)
        session.eager.note(instance.number)
        may_record = trains and instance.records
        records = Records.NOTHING if is_dry else Records.ALL if may_record else Records.BACKWARD
        if in_backward():
            return self._recompute(session, instance, args, trains, is_dry)
        variants = instance.variants() if instance.is_read else USUAL
        if may_be_checkpointed(args):
            remembered = {i: inputs.remember(variants) for i, inputs in instance.bound.items()} if instance.is_read else {}
            run = FirstRun(remembered, records is Records.ALL, variants, self.form, trains, is_dry)
            session.first_runs.add(args, instance.identity, run)
        session.clock.recorded |= trains and not is_dry
        result = self._call(instance, args, records, variants) if instance.is_read else self._call_stateless(args)
        if trains and session.clock.at_graphs and not is_dry:
            _notice_backward(result, session.clock)
        return result

    def _call(
        self,
        instance: Instance,
        args: tuple[Any, ...],
        records: Records,
        variants: frozenset[str],
        first: FirstRun | None = None,
    ) -> Any:
        """Run the graph, or a variant of it. first: what the call repeats."""
        extra: list[Any] = []
        for i, inputs in instance.bound.items():
            extra += inputs.tensors(args, records, variants, None if first is None else first.remembered.get(i))
        function = self._variant(variants) if variants else self.function
        return call_under_hooks(function, args, extra)

    def _call_stateless(self, args: tuple[Any, ...]) -> Any:
        return call_under_hooks(self.function, args, self._unread)

    def _variant(self, variants: frozenset[str]) -> Callable[..., Any]:
        """See NOTE [graphs of variants]."""
        self.num_calls[variants] += 1
        key = (variants, not self.compiled.trains or self.num_calls[variants] >= UNCOMPILED_CALLS)
        if key not in self._variants:
            self._variants[key] = self._compile_variant(*key)
        return self._variants[key]

    @functools.cached_property
    def _unread(self) -> list[torch.Tensor]:
        return self._inputs_without_content()

    def _inputs_without_content(self) -> list[torch.Tensor]:
        device = self.compiled.device
        return [given.empty(device) for given in self.compiled.extra_inputs]

    def _recompute(self, session: Session, instance: Instance, args: tuple[Any, ...], trains: bool, is_dry: bool) -> Any:
        first = session.first_runs.take(args, instance.identity)
        # A block that a user's autograd.Function recomputes of what it reconstructs has no first run that could have recorded.
        may_record = instance.records and (trains if first is None else not first.recorded)
        is_dry |= first is not None and first.is_dry
        records = Records.NOTHING if is_dry else Records.ALL if may_record else Records.BACKWARD
        if not is_dry:
            session.clock.recorded |= may_record
            session.clock.note_backward()
        if not instance.is_read:
            return self._call_stateless(args)
        variants = instance.variants()
        return self._call(instance, args, records, variants if first is None else variants | first.variants, first)

    def _bind(self, session: Session, args: tuple[Any, ...]) -> Instance:
        compiled, rewrite = self.compiled, self.compiled.rewrite
        with session.stores.lock:
            compiled.forget_parameters()
            placement = session.names.place(compiled.inputs, args)
            self.compiled.check_rules(placement, (self.form.rules, *session.rules_to_come))
            tensors, aliases = ({}, ()) if rewrite is None else (rewrite.tensors, rewrite.aliases)
            watched = () if rewrite is None else rewrite.watched
            session.weights.note_reads(compiled.inputs, args, {} if rewrite is None else rewrite.reads)
            names, owners = placement.name_tensor, [given.owner for given in compiled.inputs]
            frame = compiled.code if compiled.is_whole else None
            about = (tensors, aliases, names, args, compiled.trains, watched, frame, owners)
            bound = {
                i: provider.bind(Placed(compiled.device, given, *about))
                for i, (provider, given) in enumerate(zip(session.providers_of(self.form), compiled.extra, strict=True))
                if given
            }
            key = self._identify(args)
            places = places_in(session.root())
            seen = {i: Seen(args[i], places.get(id(args[i]))) for i in self._positions}
            instance = Instance(bound, compiled.trains, key, seen)
            for other in session.every_use.values():
                other.instances = {k: known for k, known in other.instances.items() if not known.is_gone}
            use = session.every_use.setdefault(compiled, GraphUse(compiled))
            if placement not in use.placements:
                use.placements.append(placement)
            use.instances[key] = instance
            session.eager.bind(instance.number, compiled.inputs, placement, compiled.code)
            session.num_bound += 1
        return instance


def _notice_backward(result: Any, clock: StepClock) -> None:
    """Tell the clock when a backward comes to the graph that returned `result`."""
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    for node in {o.grad_fn for o in outputs if isinstance(o, torch.Tensor) and o.grad_fn is not None}:
        node.register_prehook(clock.note_backward)


def _identity_getter(positions: list[int]) -> Callable[[tuple[Any, ...]], Any]:
    """A fast function from a graph's arguments to the identities of the Parameters among them."""
    if not positions:
        return lambda args: ()
    if len(positions) == 1:
        position = positions[0]
        return lambda args: id(args[position])
    pick = operator.itemgetter(*positions)
    return lambda args: tuple(map(id, pick(args)))
