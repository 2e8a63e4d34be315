"""One graph of Dynamo's: what it is compiled to, and its calls with the inputs of the right module instance.

NOTE [a switch] The rules of a model may change at a step boundary, and a step may be a measured one. Dynamo's code is
kept: behind it, a call runs the graph for the key that the session has then, compiled when it is first needed. A recomputation
runs the graph of its first run, whatever has changed since.

NOTE [graphs of variants] A variant of a graph (NOTE [variants] in `fp8pass.inputs`) is compiled when a call first needs it. In
training it runs without code generation, as "first_step" mostly serves one step; in inference, which ends no step, and from
call `UNCOMPILED_CALLS` on, code is generated for it, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import logging
import operator
import struct
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

from fp8pass.errors import ForwardModeError
from fp8pass.graph.origin import Path
from fp8pass.inputs import USUAL, BoundInputs, InputsMissing, Needed, Placed, Records, in_backward
from fp8pass.options import CompileOptions
from fp8pass.runtime import cache
from fp8pass.runtime.cache_key import request_key
from fp8pass.runtime.clock import is_dry
from fp8pass.runtime.dynamo_graphs import (
    describe_inputs,
    module_variables,
    modules_in_call,
    placement_in_trace,
    surroundings_of,
    with_extra_inputs,
    without_regions,
)
from fp8pass.runtime.eager import next_number
from fp8pass.runtime.instances import Held
from fp8pass.runtime.recompute import (
    FirstRun,
    GraphKey,
    call_under_hooks,
    hook_backward,
    is_checkpointed_again,
    may_be_checkpointed,
)
from fp8pass.runtime.session import CompiledGraph, Session
from fp8pass.runtime.snapshots import Modes, in_modes, modes_now
from fp8pass.runtime.warn import watch_backward
from fp8pass.runtime.words import Uncacheable
from fp8pass.weights.parameters import Seen, places_of
from fp8pass.weights.released import any_released, is_used
from lowering.operation import has_tangent

log = logging.getLogger(__name__)

#: torch's context for `torch.compiler.is_compiling()`, which 2.11 has not.
_is_compiling = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)

#: From this call of a variant on, training runs generated code for it. Fewer are a few batches of gradient accumulation.
UNCOMPILED_CALLS = 16
Compile = Callable[[fx.GraphModule, list[Any], CompiledGraph, frozenset[str], bool, bool], Callable[..., Any]]
"""(graph, example inputs, its record, variants, whether code is generated, whether InputsMissing may be raised) -> the code."""
Trace = Callable[[fx.GraphModule, list[Any], CompiledGraph], None]
"""(graph, example inputs, a record to be filled in) -> None: rewrites and partitions the graph, and generates no code."""


#: The fields of a graph's record that compiling it fills in.
UNTRACED: dict[str, Any] = {"rewrite": None, "forward": None, "backward": None, "summary": None, "cache": ""}


class Instance:
    """One module instance that a graph runs for."""

    def __init__(
        self,
        bound: dict[int, BoundInputs],
        records: bool,
        parameters: Hashable,
        seen: Mapping[int, Seen],
        modules: Sequence[nn.Module] = (),
    ):
        """parameters: their identities, and those of `modules` where these tell the instance. seen: the Parameters, by their
        positions among the arguments. modules: also those that hold the Parameters."""
        self.number = next_number()
        self.parameters = parameters
        self._seen = seen
        self._lost: list[object] = []  # Of the modules, those that are gone.
        self._modules = [weakref.ref(module, self._lost.append) for module in modules]
        self._first = next(iter(seen), 0)
        self.bound = bound  # Per provider that the graph has inputs of, by its position among all.
        known = tuple(found for inputs in bound.values() if (found := inputs.identity) is not None)
        self.identity: Hashable = known or parameters
        self.is_read = any(inputs.is_read for inputs in bound.values())  # True if the graph reads any of its extra inputs.
        self.records = records and self.is_read  # True if calls with gradients write into them what a step boundary reads.

    def is_of(self, args: tuple[Any, ...]) -> bool:
        """True if arguments with its identities are its Parameters, and not others that came where they were: all its modules
        are there, and the first Parameter, which goes with the others of its module, is the one that was seen."""
        return not self._lost and (not self._seen or self._seen[self._first].is_of(args[self._first]))

    @property
    def is_gone(self) -> bool:
        """True if no call can be its own any more."""
        return bool(self._lost) or any(seen.is_gone for seen in self._seen.values())

    def variants(self) -> frozenset[str]:
        """The variants of a call that is about to run."""
        found = USUAL
        for inputs in self.bound.values():
            found |= inputs.variants()
        return found

    def remembered(self, variants: frozenset[str]) -> dict[int, Any]:
        """The state that a recomputation repeats, by the positions of the providers."""
        return {i: inputs.remember(variants) for i, inputs in self.bound.items()} if self.is_read else {}

    def tensors(
        self, args: tuple[Any, ...], records: Records, variants: frozenset[str], first: FirstRun | None = None
    ) -> list[torch.Tensor]:
        """The extra inputs of a call. first: what the call repeats."""
        found: list[torch.Tensor] = []
        for i, inputs in self.bound.items():
            found += inputs.tensors(args, records, variants, None if first is None else first.remembered.get(i))
        return found

    def note_backward(self, *_: object) -> None:
        """Note that a backward has come to a call of a variant; a hook of autograd's, which compiled autograd would trace."""
        if not torch.compiler.is_compiling():
            for inputs in self.bound.values():
                inputs.note_started()


class DynamoGraph:
    """One graph of Dynamo's, compiled for each key that a session has when it calls it. Keeps no Parameter alive. Invariant: a
    graph receives the extra inputs of the instance whose Parameters it receives."""

    def __init__(
        self,
        name: str,
        gm: fx.GraphModule,
        example_inputs: list[Any],
        device: torch.device,
        code: CodeType | None,
        has_break: bool,
        find_session: Callable[[], Session],
        compile_inner: Compile,
        trace_inner: Trace,
    ):
        """code: of the frame that Dynamo traced. has_break: whether eager code runs before or after the graph in a call."""
        session = find_session()
        self._find_session, self._compile_inner, self._trace_inner = find_session, compile_inner, trace_inner
        self.name, self.device, self.has_break = name, device, has_break
        self._surroundings = surroundings_of(gm, session.root())
        gm = without_regions(gm)
        self.code = code
        whole = None if has_break else code
        self.inputs = describe_inputs(gm.graph, session.root(), session.options.fsdp_gather is not None, whole)
        self._positions = [i for i, given in enumerate(self.inputs) if given.is_parameter]
        self.placement = placement_in_trace(gm, self.inputs, session.names)
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._traced = [n.meta.get("example_value", x) for n, x in zip(placeholders, example_inputs, strict=True)]
        """The fake tensors that Dynamo traced with: they know which sizes are dynamic."""
        self._module = gm  # Dynamo's, which does not change: copies of it are compiled.
        context = TracingContext.try_get()
        self._context = None if context is None else weakref.ref(context)
        self._fake_mode = None if context is None else context.fake_mode
        self._identify = _identity_getter(self._positions)
        self._other_args = _getter([i for i, given in enumerate(self.inputs) if not given.is_parameter])
        self._tensor = next((i for i, x in enumerate(example_inputs) if isinstance(x, torch.Tensor)), None)
        """Position of the first tensor among the arguments."""
        self._wants = 0  # Position of an argument that wanted a gradient in the last call of training.
        self._first = self._usual = self._compile(session, session.key, (gm, example_inputs))
        self.graphs = {self._first.key: self._first}

    # -- compiling

    def _compile(self, session: Session, key: GraphKey, given: tuple[fx.GraphModule, list[Any]] | None = None) -> CompiledGraph:
        """The graph for a key. given: what Dynamo handed over, while it waits for the result."""
        graph = self._graph_with(session, key, Needed())
        kept_under = self._request_key(graph, session.options)
        needed = recalled = cache.recall(kept_under, graph)
        while True:
            if needed != Needed():
                graph = self._graph_with(session, key, needed)
            try:
                graph.function = self._compile_variant(graph, graph, USUAL, True, needed.inputs is None, given)
            except InputsMissing as missing:
                asked = missing.needed
                log.info("%s; compiling again with %s", missing, "room for them" if asked.inputs is None else "them as inputs")
                needed = Needed(asked.entries or needed.entries, needed.inputs if asked.inputs is None else asked.inputs)
            else:
                if needed != recalled:
                    cache.remember(kept_under, graph, needed)
                return graph

    def _graph_with(self, session: Session, key: GraphKey, needed: Needed) -> CompiledGraph:
        """The record of a graph that is about to be compiled, with the inputs that it needs."""
        extra = tuple(tuple(provider.inputs(self.device, needed)) for provider in session.providers_of(key))
        start, about = len(self._traced), (self.device, self.placement, self._surroundings)
        graph = CompiledGraph(self.name, key, self.inputs, self._module, start, extra, *about)
        graph.in_training = session.is_in_training()
        graph.frame = weakref.ref(self)
        graph.trace_again = functools.partial(_trace_again, weakref.ref(self), weakref.ref(graph), modes_now())
        return graph

    def _request_key(self, graph: CompiledGraph, options: CompileOptions) -> str | None:
        """The key under which processes tell each other what the graph asks for; None where nothing is cached."""
        if options.backend != "inductor" or cache.is_off() is not None:
            return None
        try:
            return request_key(graph, options, self._traced)
        except Uncacheable:
            return None  # the graph says so when it is compiled

    def _compile_variant(
        self,
        graph: CompiledGraph,
        record: CompiledGraph,
        variants: frozenset[str],
        generates_code: bool,
        may_ask: bool = False,
        given: tuple[fx.GraphModule, list[Any]] | None = None,
    ) -> Callable[..., Any]:
        """Compile a graph with the extra inputs of `graph`. given: see `_compile`; None once Dynamo has left it behind."""
        if given is not None:
            module, examples = with_extra_inputs(*given, graph.extra_inputs, self.device)
            return self._compile_inner(module, examples, record, variants, generates_code, may_ask)
        with self._as_dynamo_left_it(graph) as (module, examples):
            return self._compile_inner(module, examples, record, variants, generates_code, may_ask)

    @contextlib.contextmanager
    def _as_dynamo_left_it(self, graph: CompiledGraph) -> Iterator[tuple[fx.GraphModule, list[Any]]]:
        """The module with the extra inputs of `graph`, and its example inputs, in a context such as Dynamo traced in: with its
        lock and its flag too, as tracing exchanges `nn.Module.__call__` under the calls of all threads."""
        module, examples = with_extra_inputs(self._module, self._traced, graph.extra_inputs, self.device)
        examples = [_with_its_number(x, self._fake_mode) for x in examples]
        context = contextlib.nullcontext() if self._context is None else tracing(TracingContext(self._fake_mode))
        with compile_lock, _is_compiling(), context:
            yield module, examples

    def trace(self, graph: CompiledGraph) -> None:
        """Take the snapshots of a graph that came from a cache."""
        traced = dataclasses.replace(graph, **UNTRACED)
        with self._as_dynamo_left_it(graph) as (module, examples):
            self._trace_inner(module, examples, traced)
        self._forget_parameters()
        if graph.rewrite is not None and traced.rewrite is not None:
            before, after = traced.rewrite.before, traced.rewrite.after
            graph.rewrite = dataclasses.replace(graph.rewrite, before=before, after=after)
            graph.forward, graph.backward = traced.forward, traced.backward

    def _variant(self, graph: CompiledGraph, variants: frozenset[str]) -> Callable[..., Any]:
        """A graph's function for calls of these variants: see NOTE [graphs of variants]."""
        if not variants:
            return graph.function
        graph.num_calls[variants] += 1
        key = (variants, not graph.trains or graph.num_calls[variants] >= UNCOMPILED_CALLS)
        if key not in graph.variants:
            name = "_".join((graph.name, *sorted(variants)))
            record = dataclasses.replace(graph, name=name, **UNTRACED, trains=False)
            graph.variants[key] = self._compile_variant(graph, record, *key)
        return graph.variants[key]

    def _forget_parameters(self) -> None:
        """Clear Dynamo's weak references from fake tensors to Parameters, once it is done with the graph, as torch does behind
        its own backends: NOTE [no weak references to Parameters] in `fp8pass.weights.parameters`. And the references from the
        inputs of DDP's part of a graph, which Dynamo does not clear."""
        for node in self._module.graph.find_nodes(op="placeholder"):
            node.meta.pop("grapharg", None)
        context = None if self._context is None else self._context()
        if context is not None:
            context.tensor_to_context.clear()
        for mode in {self._fake_mode, *(x.fake_mode for x in self._traced if isinstance(x, FakeTensor))}:
            if mode is None:
                continue
            describer = mode.fake_tensor_converter.meta_converter.describer
            describer.lookup_tensor.clear()
            describer.lookup_storage.clear()

    # -- calls

    def run(self, *args: Any) -> Any:
        """Call the graph, with the extra inputs of the module instance that `args` belong to."""
        if self._tensor is not None and isinstance(first := args[self._tensor], FakeTensor):
            with first.fake_mode:  # DDPOptimizer runs each part of a split graph on fake tensors once
                return self._first.function(*args, *self._first.empty_inputs())
        if forward_ad._current_level >= 0 and has_tangent(args):
            raise ForwardModeError(
                "an input or a Parameter carries a tangent of forward-mode differentiation (torch.autograd.forward_ad), which"
                " FP8 operations do not have. Differentiate the uncompiled model, or use"
                " reverse mode: backward() or torch.autograd.grad"
            )
        session = self._find_session()
        session.num_graph_calls += 1
        if not torch.is_grad_enabled() and (quiet := self._quiet_instance(session, args)) is not None:
            session.eager.note(quiet.number)
            if not quiet.is_read:
                return self._usual.function(*(args + self._usual.unread))
            if not (variants := quiet.variants()):
                return self._usual.function(*(args + tuple(quiet.tensors(args, "backward", variants))))
        if self.has_break:
            session.weights.note_break()
        # Not every change of `requires_grad` makes Dynamo compile anew, so a graph that trains may run without gradients.
        trains = self._first.trains and torch.is_grad_enabled() and self._wants_gradients(args)
        dry = is_dry()
        if session.clock.at_graphs and not in_backward() and not dry:
            if trains:
                session.before_training()
            may_train = trains or (not torch.is_grad_enabled() and may_be_checkpointed(self._other_args(args)))
            if session.clock.is_step_due_at_graph(may_train):
                session.end_due_step()
            session.clock.trained |= may_train
        # Such as a frozen block behind a graph break: it wants no gradients, and goes on recording.
        is_frozen_part = not trains and self._first.in_training and session.is_in_training()
        graph = self._graph(session, args, (trains or is_frozen_part) and not dry)
        if graph.rewrite is not None and (any_released() or session.weights.gathers is not None):
            session.weights.note_reads(self.inputs, args, graph.rewrite.reads)
        instance = self._instance(session, graph, args)
        if instance is None:
            graph, instance = self._bind_to(session, graph, args)
        session.eager.note(instance.number)
        if in_backward():
            result = self._recompute(session, graph, instance, args, trains, dry)
        else:
            result = self._run(session, graph, instance, args, trains, is_frozen_part, dry)
        if dry:
            return result
        if graph.trains and session.seen.awaits_backward:
            watch_backward(session, result)
        if (trains or in_backward() or may_be_checkpointed(self._other_args(args))) and session.shares_boundaries:
            session.passes.note_forward(result)
        return result

    def _quiet_instance(self, session: Session, args: tuple[Any, ...]) -> Instance | None:
        """The instance of a call without gradients of which nothing is to be noted but that it runs: no step, recomputation or
        release can follow from it. None for any other call, and where it is not known yet."""
        graph = self._usual
        if (
            graph.key.rules is not session.rules
            or graph.key.watch is not None
            or self.has_break
            or session.weights.outlive_calls
            or is_used()
            or in_backward()
            or may_be_checkpointed(self._other_args(args))
            or not session.takes_short_way
        ):
            return None
        return self._instance(session, graph, args)

    def _wants_gradients(self, args: tuple[Any, ...]) -> bool:
        """True if an argument wants a gradient: mostly that of the last call does."""
        if isinstance(last := args[self._wants], torch.Tensor) and last.requires_grad:
            return True
        found = next((i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad), None)
        self._wants = 0 if found is None else found
        return found is not None

    def _graph(self, session: Session, args: tuple[Any, ...], trains: bool) -> CompiledGraph:
        """The graph that a call runs. trains: whether the call is one of training, which may be measured."""
        # At every call: rules that are the same object as before need no hash.
        usual = self._usual
        is_usual = usual.key.rules is session.rules and usual.key.watch is None and session.watch is None
        if is_usual and not in_backward():
            return usual
        key = self._key(session, args, trains)
        if key not in self.graphs:
            # Measured steps count as others do: that code is generated for a variant then must not depend on a monitor.
            counts = (graph.num_calls for known, graph in self.graphs.items() if known.rules == key.rules)
            num_calls = next(counts, None)
            self.graphs[key] = self._compile(session, key)
            if num_calls is not None:
                self.graphs[key].num_calls = num_calls
        if key.watch is None:
            self._usual = self.graphs[key]
        return self.graphs[key]

    def _key(self, session: Session, args: tuple[Any, ...], trains: bool) -> GraphKey:
        now = session.key if trains else GraphKey(session.rules)
        if not in_backward():
            return now
        first = session.first_runs.find(args)
        if first is None and len(self.graphs) > 1:
            instances = (self._instance(session, graph, args) for graph in self.graphs.values())
            runs = (session.first_runs.last_of(instance.identity) for instance in instances if instance is not None)
            first = next((run for run in runs if run is not None), None)
        if first is None:
            return now
        return first.key if first.trained else GraphKey(first.key.rules, now.watch)  # reentrant: this is the run that trains

    def _run(
        self,
        session: Session,
        graph: CompiledGraph,
        instance: Instance,
        args: tuple[Any, ...],
        trains: bool,
        is_frozen_part: bool,
        is_dry: bool,
    ) -> Any:
        """A call that is no recomputation. trains: whether gradients are wanted. is_frozen_part: whether they are not, in a
        model that trains. is_dry: whether it is part of a dry pass."""
        variants = instance.variants() if instance.is_read else USUAL
        may_record = instance.records and (trains or (variants == USUAL and is_frozen_part))
        records: Records = "nothing" if is_dry else "all" if may_record else "backward"
        if may_be_checkpointed(self._other_args(args)):
            run = FirstRun(instance.remembered(variants), records == "all", variants, graph.key, trains, is_dry)
            session.first_runs.add(args, instance.identity, run)
        session.clock.recorded |= (trains or may_record) and not is_dry
        result = self._call(graph, instance, args, records, variants) if instance.is_read else _call_unread(graph, args)
        if trains and session.clock.at_graphs and not is_dry:
            hook_backward(result, session.clock.note_backward)
        return result

    def _recompute(
        self, session: Session, graph: CompiledGraph, instance: Instance, args: tuple[Any, ...], trains: bool, is_dry: bool
    ) -> Any:
        first = session.first_runs.take(args, instance.identity)
        # A block that a user's autograd.Function recomputes of what it reconstructs has no first run that could have recorded.
        may_record = instance.records and (trains if first is None else not first.recorded)
        is_dry |= first is not None and first.is_dry
        records: Records = "nothing" if is_dry else "all" if may_record else "backward"
        if not is_dry:
            session.clock.recorded |= may_record
            session.clock.note_backward()
        variants = instance.variants() if instance.is_read else USUAL
        if first is not None:
            variants |= first.variants
        if is_checkpointed_again(self._other_args(args)):
            remembered = instance.remembered(variants) if first is None else first.remembered
            recorded = records == "all" or (first is not None and first.recorded)
            run = FirstRun(remembered, recorded, variants, graph.key, trains, is_dry)
            session.first_runs.add(args, instance.identity, run)
        if not instance.is_read:
            return _call_unread(graph, args)
        return self._call(graph, instance, args, records, variants, first)

    def _call(
        self,
        graph: CompiledGraph,
        instance: Instance,
        args: tuple[Any, ...],
        records: Records,
        variants: frozenset[str],
        first: FirstRun | None = None,
    ) -> Any:
        """Run a graph, or a variant of it. first: what the call repeats."""
        extra = instance.tensors(args, records, variants, first)
        result = call_under_hooks(self._variant(graph, variants), args, extra)
        if variants and records != "nothing":
            hook_backward(result, instance.note_backward)
        return result

    # -- module instances

    @functools.cached_property
    def _variables(self) -> tuple[Path, ...]:
        return module_variables(self._module.graph, self.inputs)

    def _held(self) -> Held:
        """The modules of a call, which tell its instance where Parameters do not."""
        return modules_in_call(self.code, self._variables)

    def _instance(self, session: Session, graph: CompiledGraph, args: tuple[Any, ...]) -> Instance | None:
        """The instance that `args` belong to; None where the graph has not run for it."""
        known = session.instances.get(graph)
        if not known:
            return None
        identity = self._key_of(args, self._held() if graph in session.by_modules else None)
        if len(known) == 1:  # mostly so: a thousand identities are compared in a quarter of the time that their hash takes
            (found,) = known.values()
            return found if found.parameters == identity and found.is_of(args) else None
        other = known.get(identity)
        return other if other is not None and other.is_of(args) else None

    def _key_of(self, args: tuple[Any, ...], held: Held | None) -> Hashable:
        """The identities of an instance's Parameters; held: and of its modules."""
        identity = self._identify(args)
        return identity if held is None else (identity, *(id(module) for _, module in held))

    def _bind_to(self, session: Session, graph: CompiledGraph, args: tuple[Any, ...]) -> tuple[CompiledGraph, Instance]:
        """Bind a graph to the instance that `args` belong to. Where the state has outgrown it, it is compiled once more, for
        all instances from now on; backwards that are under way are those of the earlier one."""
        try:
            return graph, self._bind(session, graph, args)
        except InputsMissing:
            wider = self._compile(session, graph.key)
        wider.num_calls, self.graphs[graph.key] = graph.num_calls, wider
        if self._usual is graph:
            self._usual = wider
        if self._first is graph:
            self._first = wider
        graph.frame = lambda: None
        return wider, self._bind(session, wider, args)

    def _bind(self, session: Session, graph: CompiledGraph, args: tuple[Any, ...]) -> Instance:
        rewrite = graph.rewrite
        with session.stores.lock:
            self._forget_parameters()
            if not session.names.is_told(self.inputs, args):
                session.by_modules.add(graph)
            held = self._held() if graph in session.by_modules else None
            placement = session.names.place(self.inputs, args, held or ())
            if session.names.has_news():
                session.follow_modules()
                session.forget_gone()
            key = self._key_of(args, held)
            graph.check_rules(placement, (graph.key.rules, *session.rules_to_come))
            tensors, aliases = ({}, ()) if rewrite is None else (rewrite.tensors, rewrite.aliases)
            watched = () if rewrite is None else rewrite.watched
            session.weights.note_reads(self.inputs, args, {} if rewrite is None else rewrite.reads)
            frame, owners = None if self.has_break else self.code, [given.owner for given in self.inputs]
            about = (tensors, aliases, placement.name_tensor, args, graph.trains, watched, frame, owners)
            bound = {
                i: provider.bind(Placed(self.device, given, *about))
                for i, (provider, given) in enumerate(zip(session.providers_of(graph.key), graph.extra, strict=True))
                if given
            }
            places = places_of(session.root(), [args[i] for i in self._positions])
            seen = {i: Seen(args[i], place) for i, place in zip(self._positions, places, strict=True)}
            holders = [module for place in places if place is not None and (module := place.module()) is not None]
            modules = dict.fromkeys((*holders, *(module for _, module in held or ())))
            instance = Instance(bound, graph.trains or graph.in_training, key, seen, tuple(modules))
            session.instances.setdefault(graph, {})[key] = instance
            session.every_graph.setdefault(graph, {})[placement] = None
            session.forget_replaced(graph)
            session.eager.bind(instance.number, self.inputs, placement, self.code)
            session.seen.num_bound += 1
        return instance


def _trace_again(frame: Callable[[], DynamoGraph | None], graph: Callable[[], CompiledGraph | None], modes: Modes) -> bool:
    """Take the snapshots of a graph as it was compiled in these modes, if its frame is still there."""
    here, its_graph = frame(), graph()
    if here is not None and its_graph is not None:
        with in_modes(modes):
            here.trace(its_graph)
    return here is not None


def _with_its_number(x: Any, fake_mode: FakeTensorMode | None) -> Any:
    """Give a Python float that changes, which is a fake tensor here, the symbol of its number: the fake that AOTAutograd would
    make in its own mode has none. Everything else is returned as it is."""
    if fake_mode is None or not isinstance(x, FakeTensor) or x.dim() or x.item_memo is None:
        return x
    own = fake_mode.from_tensor(x, static_shapes=True)
    own.item_memo = x.item_memo
    return own


def _call_unread(graph: CompiledGraph, args: tuple[Any, ...]) -> Any:
    """Run a graph that reads none of its extra inputs."""
    return call_under_hooks(graph.function, args, graph.unread)


def _getter(positions: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A fast function from a graph's arguments to those at these positions."""
    if not positions:
        return lambda args: ()
    first, last = positions[0], positions[-1]
    if len(positions) in (1, last - first + 1):
        return operator.itemgetter(slice(first, last + 1))
    return operator.itemgetter(*positions)


def _identity_getter(positions: list[int]) -> Callable[[tuple[Any, ...]], Hashable]:
    """A fast function from a graph's arguments to the identities of the Parameters among them."""
    held = set(positions)
    starts, ends = [p for p in positions if p - 1 not in held], [p + 1 for p in positions if p + 1 not in held]
    if not _HAS_ADDRESSES or len(positions) < 8 + 3 * len(starts):  # each part costs as much as three identities
        pick = _getter(positions)
        return lambda args: tuple(map(id, pick(args)))
    first = positions[0]
    offset, size = _HEADER + first * _ADDRESS, (ends[-1] - first) * _ADDRESS
    parts = [slice((start - first) * _ADDRESS, (end - first) * _ADDRESS) for start, end in zip(starts, ends, strict=True)]

    def identities(args: tuple[Any, ...]) -> bytes:
        addresses = ctypes.string_at(id(args) + offset, size)
        return addresses if len(parts) == 1 else b"".join([addresses[part] for part in parts])

    return identities


#: CPython's identities are addresses, which a tuple holds side by side behind its header: a thousand are one read.
_ADDRESS, _HEADER = struct.calcsize("P"), tuple.__basicsize__
_PAIR = (_ADDRESS, tuple)
_HAS_ADDRESSES = sys.implementation.name == "cpython" and (
    ctypes.string_at(id(_PAIR) + _HEADER, 2 * _ADDRESS) == struct.pack("2P", *map(id, _PAIR))
)
