"""A session: everything that belongs to one compiled model, its rules, state, step clock and graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from fp8pass.errors import InvariantError, OptionError, RuleError
from fp8pass.graph.gemms import GraphInput, Surroundings
from fp8pass.graph.origin import TensorName
from fp8pass.graph.traces import Snapshot
from fp8pass.inputs import ExtraInput, InputProvider, Measured, in_backward
from fp8pass.options import CompileOptions, StepMode
from fp8pass.recipes import Recipe
from fp8pass.rewrite.report import GemmRecord
from fp8pass.rewrite.runner import Rewrite
from fp8pass.rewrite.saved import SavedRecord
from fp8pass.rules import ROLES, SAVED, Rules
from fp8pass.runtime.clock import ManualSteps, Passes, StepClock, is_dry
from fp8pass.runtime.eager import Call, EagerRuns, may_compile
from fp8pass.runtime.instances import ROOT, ModuleNames, Placement, Search, module_paths
from fp8pass.runtime.ranks import JoinGuard, RankComparison, words_of
from fp8pass.runtime.recompute import FirstRuns, GraphKey
from fp8pass.scales import shared
from fp8pass.scales.stores import Stores
from fp8pass.weights.provider import WeightProvider
from fp8pass.weights.released import is_used

#: Makers of further providers, one per compiled model, which come after those that every model has.
PROVIDERS: tuple[Callable[[], InputProvider], ...] = ()


Summary = tuple[tuple[str, ...], dict[str, int]]
"""(the names of the extra inputs that a rewritten graph has, the bytes that its forward saves for the backward by dtype, the
largest first; empty in inference)."""


@dataclasses.dataclass(eq=False)
class CompiledGraph:
    """A graph, compiled for one key. Sessions with equal options share it; it knows none of them."""

    name: str
    key: GraphKey
    inputs: tuple[GraphInput, ...]
    source: fx.GraphModule | None  # The graph before compilation: the same for all keys. No frame, which holds this record.
    extra_start: int  # Position of the first extra input among the graph's inputs.
    extra: tuple[tuple[ExtraInput, ...], ...]  # The extra inputs, per provider of the session that it was compiled in.
    device: torch.device
    placement: Placement  # The place in the model of the instance that the graph was traced with.
    surroundings: Surroundings = dataclasses.field(default_factory=Surroundings)
    rewrite: Rewrite | None = None
    """Set when the joint graph (or the inference graph) is rewritten; None for a graph without operations. Its snapshots are
    empty where it came from a cache: `snapshots.py`."""
    summary: Summary | None = None  # Set with `rewrite` where that came from a cache, else when it is first asked for.
    cache: str = ""  # The use of AOTAutograd's cache: "hit", "miss", or "bypassed: ..." with the reason.
    frame: Callable[[], object] = lambda: True  # Returns None once Dynamo has given the graph up, as in a reset.
    trace_again: Callable[[], bool] | None = None  # Takes the snapshots of a graph from a cache; False if it no longer can.
    forward: Snapshot | None = None
    backward: Snapshot | None = None
    in_training: bool = False  # True if it was compiled for calls with gradients of a model that has something to train.
    trains: bool = False  # True if the graph has a backward.
    function: Callable[..., Any] = lambda *args: None  # The compiled code of usual calls.
    variants: dict[tuple[frozenset[str], bool], Callable[..., Any]] = dataclasses.field(default_factory=dict)
    """(variants, whether code was generated) -> the compiled code of such calls."""
    num_calls: Counter[frozenset[str]] = dataclasses.field(default_factory=Counter)
    """Variants -> the number of their calls, for any key with these rules."""

    @property
    def extra_inputs(self) -> tuple[ExtraInput, ...]:
        """The extra inputs of all providers, in the order of the graph's inputs."""
        return tuple(given for inputs in self.extra for given in inputs)

    def empty_inputs(self) -> list[torch.Tensor]:
        """Extra inputs without content."""
        return [given.empty(self.device) for given in self.extra_inputs]

    @property
    def rows(self) -> set[tuple[str, str]]:
        """The GEMMs: the module, in the place of the instance that the graph was traced with, and the role."""
        return set() if self.rewrite is None else {(gemm.module, gemm.role) for gemm in self.rewrite.gemms}

    @functools.cached_property
    def unread(self) -> tuple[torch.Tensor, ...]:
        """Extra inputs for calls of a graph that reads none."""
        return tuple(self.empty_inputs())

    def check_rules(self, placement: Placement, every: Iterable[Rules]) -> None:
        """A graph that serves many modules is rewritten by the rules for the first of them. Raises RuleError if some of these
        rules treat another module instance differently."""
        if self.rewrite is None:
            return
        records: list[GemmRecord | SavedRecord] = [*self.rewrite.gemms, *self.rewrite.saved]
        for record in records:
            module = placement.name_module(record.path)
            for rules in every:
                if rules.recipe_for(module, record.role) != rules.recipe_for(record.module, record.role):
                    raise RuleError(
                        f"{record.module} and {module} share one compiled graph, but the rules treat their"
                        f" {'saved values' if record.role == SAVED else record.role} differently. Give both the same rule, or"
                        f" compile without graph breaks so that each has a graph of its own"
                    )


@dataclasses.dataclass
class Observations:
    """Observations of a model's calls, which decide about warnings."""

    warned: set[str] = dataclasses.field(default_factory=set)  # The kinds of warnings so far: each is given once.
    eager_call: str | None = None  # Why the first call that ran no compiled graph did not; None where there was none.
    began_midway: bool = False  # True if the only call so far was seen from its middle on.
    num_bound: int = 0  # The number of times that a graph was bound to an instance: while it is the same, nothing new has run.
    num_checked: int = -1  # `num_bound` at the last check whether the model runs as requested.
    awaits_backward: bool = True  # True if the first backward is still to come.
    went_backward: bool = False  # True if a backward has reached one of the graphs.
    backward: int = -1  # Torch's number of the last backward that reached one; -1 where none did.


_numbers = itertools.count()
_sessions: weakref.WeakValueDictionary[CompileOptions, weakref.WeakSet[Session]] = weakref.WeakValueDictionary()


class Session:
    """State and graphs of one compiled model. Invariant: holds no strong reference to the model or its Parameters."""

    takes_short_way = True  # Private: tests compare quiet calls, NOTE [quiet calls] in `wrap.py`, with the long way.

    def __init__(self, model: Any, options: CompileOptions, *, steps_at_graphs: bool = False):
        """Raises OptionError where `fsdp_gather` cannot be."""
        if options.fsdp_gather is not None and (steps_at_graphs or not isinstance(model, nn.Module)):
            what = "torch.compile(backend='fp8pass')" if steps_at_graphs else f"a {type(model).__name__}"
            raise OptionError(
                f"fsdp_gather={options.fsdp_gather!r} needs an nn.Module that fp8_compile compiles,"
                f" not {what}; use fp8_compile(model, ..., in_place=True) where fully_shard comes later"
            )
        self.root: Callable[[], nn.Module | None] = weakref.ref(model) if isinstance(model, nn.Module) else lambda: None
        """The model; None where it was deleted, and for a function."""
        self.number = next(_numbers)
        self.options = options
        self._peers = _sessions.setdefault(options, weakref.WeakSet())  # The sessions with equal options, this one among them.
        self._peers.add(self)
        self.names = ModuleNames(self.root)
        # What the graphs read and write.
        self.stores = Stores(options.first_rules, self.root, options.amax_reduction_group, self._may_quantize, options.strict)
        self.reduction = self.stores.reduction
        self.weights = WeightProvider(self.stores, self.root, options, _is_running(weakref.ref(self)))
        providers = (self.stores, self.weights, *(make() for make in PROVIDERS))
        self.providers: tuple[InputProvider, ...] = providers  # The providers of the graphs' extra inputs.
        self.measuring: InputProvider | None = None  # The provider of measured graphs' inputs; for the first monitor.
        self.every_graph: dict[CompiledGraph, dict[Placement, None]] = {}
        """The graphs that have run for this session, for every key, by their first call, with the places of their instances."""
        self.instances: dict[CompiledGraph, dict[Any, Any]] = {}  # Per graph its live instances, by their Parameters' ids.
        self.by_modules: set[CompiledGraph] = set()
        """Graphs of which an instance's Parameters do not tell it (`ModuleNames.is_told`): keys have ids of modules, too."""
        self.first_runs = FirstRuns()
        self.num_graph_calls = 0
        # Steps, and what may change at their boundaries.
        self.clock = StepClock(options.step, self.reduction, steps_at_graphs)
        self.manual_steps = ManualSteps(self.root) if options.step == "manual" else None
        """A watch over the steps of a model that its user has to end."""
        self.join = JoinGuard(self.root)
        self.ranks = RankComparison(
            self.root, lambda: words_of(self.rules, options, self.clock.mode), self.reduction, self.join, options.strict
        )
        self.passes = Passes()
        self.num_steps = 0  # Steps of training that have ended.
        self.rules = options.first_rules  # The rules in force.
        self._next_rules: Rules | None = None  # The rules that `use_rules` was given since the last step boundary.
        self._past_rules: dict[Rules, None] = {self.rules: None}  # All rules that were in force so far, in their order.
        self.monitor: Any = None
        """The monitor that measures steps, while it does: `watch(step)` is the scope of a step's measurement or None,
        `after_step(session)` takes note of a step's end, `latest` are the last numbers."""
        # What is known of calls.
        self.frame: CodeType | None = None  # Of the frame of ours around a model that is a module of torch's.
        self.is_shared = False  # True if modules compiled one by one share it, so that a call shows only a part of the model.
        self.eager = EagerRuns(self.root)  # The modules that ran eagerly in calls of the compiled model.
        self.seen = Observations()

    @property
    def key(self) -> GraphKey:
        """The key of the graphs that are about to run in training."""
        return GraphKey(self.rules, self.watch)

    @property
    def watch(self) -> Measured | None:
        """The scope of measurement in this step; None: it is not measured."""
        scope: Measured | None = None if self.monitor is None else self.monitor.watch(self.num_steps)
        return scope

    def forget_replaced(self, graph: CompiledGraph) -> None:
        """Forget graphs that Dynamo has given up and that a graph, which has just been bound, took the place of."""
        placements = self.every_graph[graph]
        for old in [g for g in self.every_graph if g.frame() is None]:
            is_alike = (old.key, old.trains) == (graph.key, graph.trains) and old.rows <= graph.rows
            if is_alike and all(placement in placements for placement in self.every_graph[old]):
                del self.every_graph[old]
                self.instances.pop(old, None)
                self.by_modules.discard(old)

    def forget_gone(self) -> None:
        """Forget instances whose Parameters or modules are gone."""
        for known in self.instances.values():
            for gone in [key for key, instance in known.items() if instance.is_gone]:
                self.eager.forget(known.pop(gone).number)

    def follow_modules(self) -> None:
        """Let amax histories go with the modules that have another place in the model than when a graph was last bound."""
        with self.stores.lock:
            moves = self.names.moves(self.stores.modules, self.stores.away)
            if not moves:
                return
            for known in self.instances.values():
                for instance in known.values():
                    self.eager.forget(instance.number)
            self.instances.clear()  # their tensors have other names
            root = self.root()
            self.stores.follow(moves, None if root is None else module_paths(root))

    def providers_of(self, key: GraphKey) -> tuple[InputProvider, ...]:
        """The providers of the extra inputs of graphs with a key."""
        if key.watch is None:
            return self.providers
        assert self.measuring is not None, "a session that measures nothing has no such key"
        return (*self.providers, self.measuring)

    @property
    def graphs(self) -> Mapping[CompiledGraph, Collection[Placement]]:
        """The graphs that have run under the rules in force; of those that ran measured, too, the usual ones."""
        here = [g for g in self.every_graph if g.key.rules == self.rules]
        usual = {g.source for g in here if g.key.watch is None}
        return {g: self.every_graph[g] for g in here if g.key.watch is None or g.source not in usual}

    def is_quiet(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """True if around an outermost call with these arguments there is nothing to do: NOTE [quiet calls] in `wrap.py`."""
        clock, seen = self.clock, self.seen
        return (
            not torch.is_grad_enabled()
            and not (clock.recorded or clock.trained or seen.began_midway)
            and seen.num_bound == seen.num_checked
            and self.eager.is_settled
            and not (self.is_shared or self.weights.outlive_calls or is_used() or in_backward())
            and self.takes_short_way
            and not _wants_gradients(args)
            and not (kwargs and _wants_gradients(kwargs.values()))
        )

    def begin_quietly(self) -> Call:
        """Begin a quiet call."""
        _running.session = self
        self.clock.depth.value, self.names.search = 1, Search()
        return self.eager.begin_settled()

    def end_quietly(self, call: Call) -> bool:
        """End a quiet call; False if `self.eager` has to look at what ran, and at warnings."""
        self.clock.depth.value, self.names.search = 0, None
        _running.session = None
        return self.eager.end_settled(call) and self.seen.num_bound == self.seen.num_checked

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})) -> Session | None:
        """Begin a forward; end the step before it if it is due. Returns the session that this thread was running before."""
        trains = torch.is_grad_enabled() or _wants_gradients(args) or _wants_gradients(kwargs.values())
        self.seen.began_midway = False
        counts = not is_dry()
        if self.clock.is_outermost():
            if trains and counts:
                self.before_training()
            if counts and self.clock.is_step_due(trains):
                self.end_due_step()
            self.weights.begin_forward(trains)
            if trains and counts and self.manual_steps is not None:
                self.manual_steps.begin_forward()
            self.names.search = Search()
        self.clock.begin_forward(trains and counts)
        self.weights.releases.open(self.num_graph_calls)
        outer = session_in_this_thread()
        _running.session = self
        return outer

    def is_in_training(self) -> bool:
        """True if gradients are enabled, and the compiled model has a Parameter that trains: searched once in a call."""
        root = self.root() if torch.is_grad_enabled() else None
        if root is None:
            return False
        search = self.names.search or Search()  # which another thread may end
        if search.trains is None:
            search.trains = any(p.requires_grad for p in root.parameters())
        return search.trains

    def before_training(self) -> None:
        """Check, before a forward with gradients, that ranks can train together. Raises RankMismatchError, UnsupportedError."""
        self.ranks.before_training()
        if self.clock.must_agree:
            self.join.before_forward(self.clock.mode)

    def end_forward(self, outer: Session | None, *, raised: bool = False) -> None:
        """End a forward, with or without an error."""
        self.clock.end_forward()
        if self.clock.is_outermost():
            self.names.search = None
            self.weights.end_forward(raised)
        self.weights.releases.close(self.num_graph_calls)
        _running.session = outer

    def end_step(self) -> None:
        """End the step."""
        end_steps([self])

    def end_due_step(self) -> None:
        """End the step as a forward begins, and those of others that are over: NOTE [shared boundaries] in `clock.py`."""
        over = [] if self.clock.must_agree or not self.passes.are_over else [s for s in self._peers if s.passes.are_over]
        others = [s for s in over if s is not self and not s.clock.must_agree]
        due = [s for s in others if s.clock.is_step_pending and s.clock.ends_as(self.clock) and s.passes.follow(self.passes)]
        end_steps([self, *due], [s for s in others if s not in due])

    @property
    def shares_boundaries(self) -> bool:
        """True if there are sessions with which a step may end together."""
        return len(self._peers) > 1 and self.clock.mode == "auto" and bool(self.rules.stateful)

    def _finish_step(self) -> None:
        is_step = self.clock.is_step_pending
        for provider in self.providers:
            provider.after_step()
        self.num_steps += is_step
        if self.manual_steps is not None:
            self.manual_steps.end_step()
        self.clock.set_pending(False)
        scheduled = dict(self.options.later_rules).get(self.num_steps) if is_step else None
        rules, self._next_rules = self._next_rules, None
        self._switch(rules or scheduled or self.rules)  # the user's own word came later

    def use_steps(self, mode: StepMode) -> None:
        """Let the next forward end steps from now on, or `state(model).step()`."""
        self.clock.mode = mode
        self.weights.ends_steps = mode == "manual"
        self.manual_steps = ManualSteps(self.root) if mode == "manual" else None

    # -- rules

    @property
    def rules_to_come(self) -> list[Rules]:
        """The rules of the schedule for later steps, and those that `use_rules` was given."""
        later = [rules for step, rules in self.options.later_rules if step > self.num_steps]
        return later if self._next_rules is None else [*later, self._next_rules]

    @property
    def awaits_rules(self) -> bool:
        """True if rules that `use_rules` was given wait for the step boundary."""
        return self._next_rules is not None

    def use_rules(self, rules: Rules) -> None:
        """Switch to other rules at the next step boundary, which is now if nothing has trained since the last one. Raises
        RuleError, and changes nothing, if modules that share a graph would have to follow different ones."""
        for graph, placements in self.every_graph.items():
            for placement in placements:
                graph.check_rules(placement, [rules])
        self._next_rules = rules
        if not self.clock.is_step_pending:
            self._switch(rules)
            self._next_rules = None

    def go_to(self, num_steps: int) -> Callable[[], None]:
        """Continue at this number of steps, with the schedule's rules for it. Returns a function that undoes it."""
        before = (self.num_steps, self.rules)

        def go_back() -> None:
            self.num_steps = before[0]
            self._switch(before[1])

        self.num_steps = num_steps
        if self.options.later_rules:
            self._switch(self.options.first_rules)
        for step, rules in self.options.later_rules:
            if step <= num_steps:
                self._switch(rules)
        return go_back

    def _switch(self, rules: Rules) -> None:
        if rules is self.rules or rules == self.rules:
            return
        self.rules = rules
        self._past_rules[rules] = None
        self.stores.use_rules(rules)
        self.weights.use_rules(rules)
        self.seen.warned.discard("rules")
        self.seen.num_checked = -1

    def _may_quantize(self, recipe: Recipe, name: str) -> bool:
        """True if a tensor that another rank quantizes belongs to a module that this rank has, under the same recipe."""
        root = self.root()
        if root is None:
            return False
        module = TensorName.parse(name).module
        return module in module_paths(root) and any(
            rules.recipe_for(module, role) == recipe for rules in self._past_rules for role in ROLES
        )


def end_steps(sessions: Sequence[Session], others: Sequence[Session] = ()) -> None:
    """End the steps of sessions: one update for all stores that are alike. others: those with equal options that go on, whose
    graphs no call and no backward is running."""
    for session in sessions:
        if session.clock.must_agree:
            session.join.before_boundary()
        session.ranks.before_boundary()
    held = [s.stores.lock for s in sorted((*sessions, *others), key=lambda s: s.number)]
    with held[0] if len(held) == 1 else _all_of(held):
        for session in sessions:
            if session.monitor is not None and session.clock.is_step_pending:
                session.monitor.after_step(session)
        for session in sessions:
            session.stores.before_boundary()
        shared.end_steps([store for s in sessions for store in s.stores], [store for s in others for store in s.stores])
        for session in sessions:
            session._finish_step()


@contextlib.contextmanager
def _all_of(locks: Sequence[contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield


def _is_running(session: Callable[[], Session | None]) -> Callable[[], bool]:
    """A test for the thread that it is called in: true if it runs the model compiled. Eager code reads no copies."""
    return lambda: session_in_this_thread() is session() and may_compile()


_running = threading.local()


def running_session() -> Session:
    """The session whose compiled model this thread is running."""
    session: Session | None = getattr(_running, "session", None)
    if session is None:
        raise InvariantError("a graph of fp8pass was called from outside of the compiled model that it belongs to")
    return session


def session_in_this_thread() -> Session | None:
    """The session whose compiled model this thread is running, if it is."""
    return getattr(_running, "session", None)


def _wants_gradients(values: Iterable[Any]) -> bool:
    """True if a tensor among arguments, or in lists, tuples and mappings among them, does, as in the first run of reentrant
    checkpointing, which has gradients switched off."""
    for a in values:
        if isinstance(a, torch.Tensor):
            if a.requires_grad:
                return True
        elif isinstance(a, (list, tuple)):
            if _wants_gradients(a):
                return True
        elif isinstance(a, Mapping) and _wants_gradients(a.values()):
            return True
    return False


@dataclasses.dataclass(frozen=True)
class Part:
    """A session, and the place of its model in a larger one."""

    session: Session
    prefix: str = ""  # Path of the part, "" for the whole model.

    def outer(self, module: str) -> str:
        """The path in the whole model of a path in the part."""
        if not self.prefix:
            return module
        return self.prefix if module == ROOT else f"{self.prefix}.{module}"

    def inner(self, module: str) -> str | None:
        """The path in the part of a path in the whole model; None if it is not below the part."""
        if not self.prefix:
            return module
        if module == self.prefix:
            return ROOT
        return module[len(self.prefix) + 1 :] if module.startswith(f"{self.prefix}.") else None


def part_of(parts: Sequence[Part], module: str) -> tuple[Part, str] | None:
    """The part that a path of the whole model belongs to, the innermost one, and the path in it; None if there is none."""
    found = [(part, inner) for part in parts if (inner := part.inner(module)) is not None]
    return max(found, key=lambda pair: len(pair[0].prefix), default=None)
