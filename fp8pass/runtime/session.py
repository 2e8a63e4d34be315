"""What one call of `fp8_compile` owns: its rules, the stores of its state, its step clock, the graphs compiled for it."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, Protocol

import torch
from torch import nn

from fp8pass.errors import InvariantError, RuleError
from fp8pass.graph.names import TensorName
from fp8pass.graph.sites import GraphInput, Surroundings
from fp8pass.graph.snapshot import Snapshot
from fp8pass.inputs import ExtraInput, InputProvider, MonitorSpec
from fp8pass.options import CompileOptions, StepMode
from fp8pass.recipes import Recipe
from fp8pass.rewrite.runner import Rewrite
from fp8pass.rules import ROLES, Rules
from fp8pass.runtime.clock import StepClock
from fp8pass.runtime.dry import is_dry
from fp8pass.runtime.eager import EagerRuns
from fp8pass.runtime.frames import may_compile
from fp8pass.runtime.instances import ModuleNames, Placement, module_paths
from fp8pass.runtime.manual_steps import ManualSteps
from fp8pass.runtime.ranks import RankComparison, refuse_join, words_of
from fp8pass.runtime.recompute import FirstRuns, in_backward
from fp8pass.runtime.settings import Form
from fp8pass.scales.provider import StateProvider
from fp8pass.scales.reduction import AmaxReduction
from fp8pass.scales.stores import Stores
from fp8pass.weights.gathers import ParameterGathers
from fp8pass.weights.provider import WeightProvider

#: Makers of further providers, one per compiled model, which come after those that every model has.
PROVIDERS: tuple[Callable[[], InputProvider], ...] = ()

#: What torch says instead of the number of a backward where none runs.
NO_BACKWARD = -1


class StepMonitor(Protocol):
    """Measures steps of training."""

    @property
    def latest(self) -> Any:
        """The numbers of the last measured step, None before there are any."""

    def watch(self, step: int) -> MonitorSpec | None:
        """What is measured in a step, counted from 0; None: nothing."""

    def after_step(self, step: int) -> None:
        """A step of training has ended, measured or not."""


@dataclasses.dataclass(eq=False)
class CompiledGraph:
    """One graph of Dynamo's, compiled. Sessions with equal settings share it; it knows none of them."""

    name: str
    form: Form
    inputs: tuple[GraphInput, ...]
    captured: object
    """What Dynamo handed over: the same for all forms of a graph."""
    extra_start: int
    """Position of the first extra input among the graph's inputs."""
    extra: tuple[tuple[ExtraInput, ...], ...]
    """The extra inputs, per provider of the session that it was compiled in."""
    device: torch.device
    surroundings: Surroundings = dataclasses.field(default_factory=Surroundings)
    rewrite: Rewrite | None = None
    """Set when the joint graph (or the inference graph) is rewritten; None for a graph without operations."""
    forward: Snapshot | None = None
    backward: Snapshot | None = None
    trains: bool = False
    """Whether the graph has a backward."""
    code: CodeType | None = None
    """Of the frame that Dynamo traced."""
    is_whole: bool = True
    """Whether the graph is all of that frame."""
    forget_parameters: Callable[[], None] = lambda: None
    """Lets what Dynamo handed over refer to no Parameter any more, not even weakly."""

    @property
    def extra_inputs(self) -> tuple[ExtraInput, ...]:
        """Those of all providers, in the order of the graph's inputs."""
        return tuple(given for inputs in self.extra for given in inputs)

    def check_rules(self, placement: Placement, every: Iterable[Rules]) -> None:
        """A graph that serves many modules is rewritten by the rules for the first of them. Raises RuleError if some of these
        rules treat another module instance differently."""
        for gemm in self.rewrite.gemms if self.rewrite else ():
            module = placement.name_module(gemm.path)
            for rules in every:
                if rules.recipe_for(module, gemm.role) != rules.recipe_for(gemm.module, gemm.role):
                    raise RuleError(
                        f"{gemm.module} and {module} share one compiled graph, but the rules treat their {gemm.role}"
                        f" differently. Give both the same rule, or compile without graph breaks so that each has a graph of"
                        f" its own"
                    )


@dataclasses.dataclass
class GraphUse:
    """A compiled graph as one session uses it."""

    compiled: CompiledGraph
    placements: list[Placement] = dataclasses.field(default_factory=list)
    """One per module instance that the graph has run for."""
    instances: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """Identities of Parameters -> what `binding` keeps for the instance."""


class Session:
    """State and graphs of one compiled model. Invariant: holds no strong reference to the model or its Parameters."""

    def __init__(
        self,
        model: Any,
        options: CompileOptions,
        steps_at_graphs: bool = False,
        after_backward: Callable[[Session], None] = lambda session: None,
    ):
        self.root: Callable[[], nn.Module | None] = weakref.ref(model) if isinstance(model, nn.Module) else _no_module
        """The model; None where it was deleted, and for a function."""
        self.options = options
        self.rules = rules = options.first_rules
        """Those in force."""
        self.names = ModuleNames(self.root)
        self.stores = Stores(rules, self.root)
        self.reduction = AmaxReduction(options.amax_reduction_group, self.stores.recipes, self._may_quantize)
        gathers = None
        if options.fsdp_gather is not None:
            gathers = ParameterGathers(self.root, rules, _is_running(weakref.ref(self)))
        self.weights = WeightProvider(
            self.stores,
            self.root,
            ends_steps=options.step == "manual",
            gathers=gathers,
            releases=options.release_frozen,
            keeps=options.weight_copies == "cache",
        )
        self.providers: tuple[InputProvider, ...] = (
            StateProvider(self.stores, self.reduction),
            self.weights,
            *(make() for make in PROVIDERS),
        )
        """What gives the graphs their extra inputs."""
        self.clock = StepClock(options.step, self.reduction, steps_at_graphs)
        self.manual_steps = ManualSteps(self.root) if options.step == "manual" else None
        """Of a model whose steps somebody else ends: whether somebody does."""
        self.ranks = RankComparison(
            self.root, lambda: words_of(self.rules, options, self.clock.mode), self.reduction, is_strict=options.strict
        )
        self.every_use: dict[CompiledGraph, GraphUse] = {}
        """The graphs that have run for this session, in every form, in the order of their first call."""
        self.measuring: InputProvider | None = None
        """Takes what measured graphs count; made for the first monitor."""
        self.monitor: StepMonitor | None = None
        """Says which steps are measured, while it watches."""
        self.num_steps = 0
        """Steps of training that have ended."""
        self.schedule = options.later_rules
        self._next_rules: Rules | None = None
        """What `use_rules` asked for since the last step boundary."""
        self._past_rules: dict[Rules, None] = {rules: None}
        """All rules that were in force so far, in their order."""
        self.first_runs = FirstRuns()
        self.num_graph_calls = 0
        self.strict = options.strict
        """Whether what would be a warning is an error."""
        self.is_shared = False
        """Whether modules that are compiled one by one share it, so that a call of one shows only a part of the model."""
        self.warned: set[str] = set()
        """What was warned of so far; each is warned of once."""
        self.warned_of_eager_run = False
        self.eager_call: str | None = None
        """Why the first call that ran no compiled graph did not; None where there was none."""
        self.eager = EagerRuns(self.root)
        """The modules that ran eagerly in calls of the compiled model."""
        self.began_midway = False
        """Whether the only call so far was seen from its middle on."""
        self.num_bound = 0
        """How often a graph was bound to a module instance: while it stays the same, nothing new has run."""
        self.num_checked = -1
        """`num_bound` when it was last asked whether the model runs as it was asked for."""
        self.went_backward = False
        """Whether a backward has reached one of the graphs."""
        self.is_watching = True
        """Whether the first backward is still to come."""
        self._after_backward = after_backward
        self._backward = NO_BACKWARD

    @property
    def form(self) -> Form:
        """That of the graphs that are about to run."""
        return Form(self.rules, self.watch)

    @property
    def watch(self) -> MonitorSpec | None:
        """What is measured in this step."""
        return None if self.monitor is None else self.monitor.watch(self.num_steps)

    def providers_of(self, form: Form) -> tuple[InputProvider, ...]:
        """What gives graphs of a form their extra inputs."""
        if form.watch is None:
            return self.providers
        assert self.measuring is not None, "a session that measures nothing has no such form"
        return (*self.providers, self.measuring)

    @property
    def uses(self) -> dict[CompiledGraph, GraphUse]:
        """The graphs that have run under the rules in force; of those that ran measured, too, the usual ones."""
        here = {c: use for c, use in self.every_use.items() if c.form.rules == self.rules}
        usual = {c.captured for c in here if c.form.watch is None}
        return {c: use for c, use in here.items() if c.form.watch is None or c.captured not in usual}

    def begin_forward(self, args: tuple[Any, ...]) -> Session | None:
        """Called when a forward begins; ends the step before it if it is due. Returns the session that this thread was running
        before."""
        trains = torch.is_grad_enabled() or _wants_gradients(args)
        self.began_midway = False
        counts = not is_dry()
        if trains and counts and self.clock.is_outermost():
            self.before_training()
        if counts and self.clock.is_step_due(trains):
            self.end_step()
        if self.clock.is_outermost():
            self.weights.begin_forward(trains)
            if trains and counts and self.manual_steps is not None and self.rules.stateful:
                self.manual_steps.begin_forward()
        self.clock.begin_forward(trains and counts)
        self.weights.releases.open(self.num_graph_calls)
        outer = session_in_this_thread()
        _running.session = self
        return outer

    def before_training(self) -> None:
        """A forward with gradients is about to begin. Raises where ranks cannot train together: RankMismatchError,
        UnsupportedError."""
        self.ranks.before_training()
        if self.clock.mode == "auto" and self.clock.must_agree:
            refuse_join(self.root())

    def end_forward(self, outer: Session | None, *, raised: bool = False) -> None:
        """Called when a forward ends, with or without an error."""
        self.clock.end_forward()
        if self.clock.is_outermost():
            self.weights.end_forward(raised)
        self.weights.releases.close(self.num_graph_calls)
        _running.session = outer

    def end_step(self) -> None:
        """The step boundary."""
        self.ranks.before_boundary()
        with self.stores.lock:
            is_step = self.clock.is_step_pending
            if self.monitor is not None and is_step:
                self.monitor.after_step(self.num_steps)
            for provider in self.providers:
                provider.after_step()
            self.num_steps += is_step
            if self.manual_steps is not None:
                self.manual_steps.end_step()
            self.clock.set_pending(False)
            scheduled = dict(self.schedule).get(self.num_steps)
            rules, self._next_rules = self._next_rules, None
            self._switch(scheduled or rules or self.rules)

    def use_steps(self, mode: StepMode) -> None:
        """Let the next forward end steps from now on, or `state(model).step()`."""
        self.clock.mode = mode
        self.weights.ends_steps = mode == "manual"
        self.manual_steps = ManualSteps(self.root) if mode == "manual" else None

    # -- rules

    @property
    def rules_to_come(self) -> list[Rules]:
        """Those of the schedule, for later steps, and those that were asked for."""
        later = [rules for step, rules in self.schedule if step > self.num_steps]
        return later if self._next_rules is None else [*later, self._next_rules]

    @property
    def awaits_rules(self) -> bool:
        """Whether rules that were asked for wait for the step boundary."""
        return self._next_rules is not None

    def use_rules(self, rules: Rules) -> None:
        """Rules from the next step boundary on, which is now if nothing has trained since the last one.

        Raises RuleError, and changes nothing, if modules that share a graph would have to follow different ones.
        """
        for use in self.every_use.values():
            for placement in use.placements:
                use.compiled.check_rules(placement, [rules])
        self._next_rules = rules
        if not self.clock.is_step_pending:
            self._switch(rules)
            self._next_rules = None

    def go_to(self, num_steps: int) -> Callable[[], None]:
        """Count on from so many steps, with the rules that a schedule gives them; what is returned undoes it."""
        before = (self.num_steps, self.rules)

        def go_back() -> None:
            self.num_steps = before[0]
            self._switch(before[1])

        self.num_steps = num_steps
        if self.schedule:
            self._switch(self.options.first_rules)
        for step, rules in self.schedule:
            if step <= num_steps:
                self._switch(rules)
        return go_back

    def _switch(self, rules: Rules) -> None:
        if rules == self.rules:
            return
        self.rules = rules
        self._past_rules[rules] = None
        self.stores.use_rules(rules)
        self.weights.use_rules(rules)
        self.reduction.use_recipes(self.stores.recipes)
        self.warned.discard("rules")
        self.num_checked = -1

    # -- the first backward

    def watch_backward(self, result: Any) -> None:
        """Call `after_backward` at the end of the first backward that reaches what a graph returned.

        A forward that runs in a backward, a recomputation, is a part of it that knows nothing of the rest.
        """
        if in_backward():
            self.went_backward = True
            return
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        for node in {o.grad_fn for o in outputs if isinstance(o, torch.Tensor) and o.grad_fn is not None}:
            node.register_prehook(self._await_end_of_backward)

    def _await_end_of_backward(self, *_: object) -> None:
        """A hook of autograd's, in a backward. Compiled autograd traces hooks, and refuses callbacks."""
        if torch.compiler.is_compiling():
            return
        backward = torch._C._current_graph_task_id()
        if self.is_watching and backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.went_backward = True
        self._after_backward(self)
        self.is_watching = False  # unless that raised

    def _may_quantize(self, recipe: Recipe, name: str) -> bool:
        """Whether a tensor that another rank quantizes belongs to a module that this rank has, under the same recipe."""
        root = self.root()
        if root is None:
            return False
        module = TensorName.parse(name).module
        return module in module_paths(root) and any(
            rules.recipe_for(module, role) == recipe for rules in self._past_rules for role in ROLES
        )


def _is_running(session: Callable[[], Session | None]) -> Callable[[], bool]:
    """Whether this thread runs a model compiled: what it was told to run eagerly reads no copies."""
    return lambda: session_in_this_thread() is session() and may_compile()


def _no_module() -> None:
    """The root of a compiled function."""


_running = threading.local()


def running_session() -> Session:
    """The session whose compiled model this thread is running."""
    session = session_in_this_thread()
    if session is None:
        raise InvariantError("a graph of fp8pass was called from outside of the compiled model that it belongs to")
    return session


def session_in_this_thread() -> Session | None:
    """The session whose compiled model this thread is running, if it is."""
    return getattr(_running, "session", None)


def _wants_gradients(args: tuple[Any, ...]) -> bool:
    """Whether an argument does: so it is in the first run of reentrant checkpointing, which has gradients switched off."""
    return any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
