"""What one call of `fp8_compile` owns: its rules, the stores of its state, its step clock, the graphs compiled for it."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fp8pass.capture.clock import StepClock, StepMode
from fp8pass.capture.instances import ModuleNames, Placement, module_paths
from fp8pass.capture.recompute import FirstRuns, in_backward
from fp8pass.capture.settings import Settings
from fp8pass.errors import InvariantError
from fp8pass.graph.names import TensorName
from fp8pass.graph.sites import GraphInput
from fp8pass.graph.snapshot import Snapshot
from fp8pass.inputs import ExtraInput, InputProvider
from fp8pass.recipes import Recipe
from fp8pass.rewrite.runner import Rewrite
from fp8pass.rules import ROLES
from fp8pass.state.provider import StateProvider
from fp8pass.state.reduction import AmaxReduction
from fp8pass.state.stores import Stores

#: What torch says instead of the number of a backward where none runs.
NO_BACKWARD = -1


@dataclasses.dataclass(eq=False)
class CompiledGraph:
    """One graph of Dynamo's, compiled. Sessions with equal settings share it; it knows none of them."""

    name: str
    inputs: tuple[GraphInput, ...]
    extra_start: int
    """Position of the first extra input among the graph's inputs."""
    extra: tuple[tuple[ExtraInput, ...], ...]
    """The extra inputs, per provider of the session that it was compiled in."""
    device: torch.device
    embeddings_elsewhere: tuple[int, ...] = ()
    """The numbers of rows of the model's embeddings that the graph does not read."""
    rewrite: Rewrite | None = None
    """Set when the joint graph (or the inference graph) is rewritten; None for a graph without operations."""
    forward: Snapshot | None = None
    backward: Snapshot | None = None
    trains: bool = False
    """Whether the graph has a backward."""

    @property
    def extra_inputs(self) -> tuple[ExtraInput, ...]:
        """Those of all providers, in the order of the graph's inputs."""
        return tuple(given for inputs in self.extra for given in inputs)


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
        settings: Settings,
        step: StepMode,
        steps_at_graphs: bool = False,
        strict: bool = False,
        after_backward: Callable[[Session], None] = lambda session: None,
    ):
        self.root: Callable[[], nn.Module | None] = weakref.ref(model) if isinstance(model, nn.Module) else _no_module
        """The model; None where it was deleted, and for a function."""
        self.settings = settings
        self.rules = rules = settings.rules
        self.names = ModuleNames(self.root)
        self.stores = Stores(rules, self.root)
        self.reduction = AmaxReduction(settings.amax_reduction_group, self.stores.recipes, self._may_quantize)
        self.providers: tuple[InputProvider, ...] = (
            StateProvider(self.stores, self.reduction),
            *(make() for make in settings.providers),
        )
        """What gives the graphs their extra inputs."""
        self.clock = StepClock(step, self.reduction, steps_at_graphs)
        self.uses: dict[CompiledGraph, GraphUse] = {}
        """The graphs that have run for this session, in the order of their first call."""
        self.first_runs = FirstRuns()
        self.num_graph_calls = 0
        self.strict = strict
        """Whether what would be a warning is an error."""
        self.is_shared = False
        """Whether modules that are compiled one by one share it, so that a call of one shows only a part of the model."""
        self.warned: set[str] = set()
        """What was warned of so far; each is warned of once."""
        self.warned_of_eager_run = False
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

    def begin_forward(self, args: tuple[Any, ...]) -> Session | None:
        """Called when a forward begins; ends the step before it if it is due. Returns the session that this thread was running
        before."""
        trains = torch.is_grad_enabled() or _wants_gradients(args)
        if self.clock.is_step_due(trains):
            self.end_step()
        self.clock.begin_forward(trains)
        outer = session_in_this_thread()
        _running.session = self
        return outer

    def end_forward(self, outer: Session | None) -> None:
        """Called when a forward ends, with or without an error."""
        self.clock.end_forward()
        _running.session = outer

    def end_step(self) -> None:
        """The step boundary."""
        with self.stores.lock:
            for provider in self.providers:
                provider.after_step()
            self.clock.set_pending(False)

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
        return module in module_paths(root) and any(self.rules.recipe_for(module, role) == recipe for role in ROLES)


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
