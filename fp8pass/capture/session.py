"""What one call of `fp8_compile` owns: its rules, the stores of its state, the graphs compiled for it, its step boundaries."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from fp8pass.capture.instances import ModuleNames, Placement, module_paths
from fp8pass.capture.recompute import FirstRuns
from fp8pass.errors import CheckpointMismatchError, InvariantError, preview
from fp8pass.graph.names import TensorName
from fp8pass.graph.sites import GRAD_OUTPUT, GraphInput
from fp8pass.recipes import DelayedScaling
from fp8pass.rewrite.report import StateTensor
from fp8pass.rewrite.runner import Rewrite
from fp8pass.rules import ROLES, Rules
from fp8pass.state.reduction import AmaxReduction
from fp8pass.state.store import DelayedStore, capacity_for
from fp8pass.state.update import end_step


@dataclasses.dataclass(eq=False)
class CompiledGraph:
    """One graph of Dynamo's, compiled. Sessions with equal settings share it; it knows none of them."""

    name: str
    inputs: tuple[GraphInput, ...]
    state_start: int
    """Position of the first state input among the graph's inputs."""
    capacities: tuple[int, ...]
    """Entries of the state placeholders, per delayed recipe."""
    device: torch.device
    rewrite: Rewrite | None = None
    """Set when the joint graph (or the inference graph) is rewritten; None for a graph without operations."""
    forward: fx.Graph | None = None
    backward: fx.Graph | None = None
    records_amax: bool = False

    def tensors(self, recipe: DelayedScaling) -> list[StateTensor]:
        """Tensors whose scales the graph takes from the state of a recipe."""
        return [] if self.rewrite is None else self.rewrite.tensors.get(recipe, [])


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

    def __init__(self, model: Any, rules: Rules, step: str, group: dist.ProcessGroup | None):
        root = model if isinstance(model, nn.Module) else None
        self.root = None if root is None else weakref.ref(root)
        self.rules = rules
        self.step_mode = step
        self.names = ModuleNames(root)
        self.delayed = rules.delayed
        self.reduction = AmaxReduction(group, rules.delayed, self._may_quantize)
        self.stores: dict[tuple[DelayedScaling, torch.device], DelayedStore] = {}
        self.uses: dict[CompiledGraph, GraphUse] = {}
        """The graphs that have run for this session, in the order of their first call."""
        self.first_runs = FirstRuns()
        self.recorded = False
        """Whether any amax was recorded since the last step boundary."""
        self.trained = False
        """Whether an outermost forward with gradients began since the last step boundary."""
        self.num_graph_calls = 0
        self.warned_of_eager_run = False
        self.lock = threading.RLock()
        self._depth = threading.local()
        self._expected_tensors = 0 if root is None else 3 * sum(p.dim() >= 2 for p in root.parameters())

    # -- stores

    def store(self, recipe: DelayedScaling, device: torch.device) -> DelayedStore:
        """The store of a recipe on a device, made when first asked for."""
        key = (recipe, device)
        with self.lock:
            if key not in self.stores:
                self.stores[key] = DelayedStore(recipe, device, self._expected_tensors)
            return self.stores[key]

    def expected_store(self, name: TensorName) -> DelayedStore:
        """The store that a tensor will belong to that no graph has claimed yet, by the rules."""
        role = "grad_input" if name.kind == GRAD_OUTPUT else "output"
        recipe = self.rules.recipe_for(name.module, role)
        chosen = recipe if isinstance(recipe, DelayedScaling) else self.delayed[0]
        return self.store(chosen, self.expected_device())

    def expected_device(self) -> torch.device:
        """Where the model is, before any graph has told."""
        root = self.root() if self.root is not None else None
        return next((p.device for p in root.parameters()), torch.device("cpu")) if root is not None else torch.device("cpu")

    def capacity(self, recipe: DelayedScaling, device: torch.device, needed: int) -> int:
        """Number of entries a new graph's state placeholders should have."""
        store = self.store(recipe, device)
        if store.capacity < capacity_for(needed):
            store.grow(needed)
        return store.capacity

    def claim(self, store: DelayedStore, tensors: Sequence[tuple[str, float]]) -> None:
        """Give the tensors of a module instance their columns, taking over what a checkpoint or another device holds."""
        names = [name for name, _ in tensors]
        with self.lock:
            self._check_restored(store, names)
            elsewhere = [s for (r, _), s in self.stores.items() if s is not store and r == store.recipe]
            moved = [n for n in names if n not in store]
            store.add(names, [limit for _, limit in tensors])
            for other in elsewhere:
                store.take_from(other, moved)
                if self._has_left(other.device):
                    other.give_up(n for n in names if n in other)
            store.restored.difference_update(names)

    def _has_left(self, device: torch.device) -> bool:
        """Whether no Parameter of the model is on a device any more; a copy of a module on another device is no move."""
        root = None if self.root is None else self.root()
        return root is not None and all(p.device != device for p in root.parameters())

    def add_aliases(self, compiled: CompiledGraph, placement: Placement, stores: list[DelayedStore]) -> None:
        """Let the other names of a graph's shared tensors stand for them."""
        for pair in compiled.rewrite.aliases if compiled.rewrite else ():
            alias, name = (str(placement.name_tensor(n)) for n in pair)
            for store in stores:
                if name in store:
                    store.aliases.setdefault(alias, name)

    def _check_restored(self, store: DelayedStore, names: list[str]) -> None:
        if not store.restored:
            return
        kinds = {TensorName.parse(n).kind for n in store.names}
        missing = [n for n in names if n not in store and TensorName.parse(n).kind in kinds]
        if missing:
            raise CheckpointMismatchError(
                f"the loaded state does not fit this model and recipe: it lacks {preview(missing)}; it holds"
                f" {preview(sorted(store.restored))} that no module has claimed. Load the state of the same model, or none"
            )

    # -- steps

    def begin_forward(self, args: tuple[Any, ...]) -> Session | None:
        """Called when a forward begins; ends the step before it if this is an outermost one. Returns the session that this
        thread was running before."""
        depth = getattr(self._depth, "value", 0)
        if depth == 0 and not in_backward():
            trains = torch.is_grad_enabled() or _wants_gradients(args)
            if self.step_mode == "auto" and self._is_step_due(trains):
                self.end_step()
            self.trained |= trains
        self._depth.value = depth + 1
        outer: Session | None = getattr(_running, "session", None)
        _running.session = self
        return outer

    def _is_step_due(self, trains: bool) -> bool:
        """Where ranks reduce, they must agree that a step ends: they do on the calls they make, not on what these recorded.
        An evaluation, which often runs on one rank alone, ends no step there."""
        return self.is_step_pending and (trains or not self.reduction.is_active)

    @property
    def is_step_pending(self) -> bool:
        """Whether there is a step to end."""
        return self.trained if self.reduction.is_active else self.recorded

    def end_forward(self, outer: Session | None) -> None:
        """Called when a forward ends, with or without an error."""
        self._depth.value -= 1
        _running.session = outer

    def end_step(self) -> None:
        """The step boundary: amaxes are reduced over the ranks, then every store is updated once."""
        with self.lock:
            if self.reduction.is_active:
                for recipe in self.delayed:
                    if not any(store.recipe == recipe for store in self.stores.values()):
                        self.store(recipe, self.expected_device())
                self.reduction.run(list(self.stores.values()))
            for store in list(self.stores.values()):
                end_step(store)
            self.recorded = self.trained = False

    def _may_quantize(self, recipe: DelayedScaling, name: str) -> bool:
        """Whether a tensor that another rank quantizes belongs to a module that this rank has, under the same recipe."""
        root = None if self.root is None else self.root()
        if root is None:
            return False
        module = TensorName.parse(name).module
        return module in module_paths(root) and any(self.rules.recipe_for(module, role) == recipe for role in ROLES)


_running = threading.local()


def running_session() -> Session:
    """The session whose compiled model this thread is running."""
    session: Session | None = getattr(_running, "session", None)
    if session is None:
        raise InvariantError("a graph of fp8pass was called from outside of the compiled model that it belongs to")
    return session


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a forward that runs here is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _wants_gradients(args: tuple[Any, ...]) -> bool:
    """Whether an argument does: so it is in the first run of reentrant checkpointing, which has gradients switched off."""
    return any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
