"""What one call of `fp8_compile` owns: its rules, the stores of its state, the graphs compiled for it, its step boundaries."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from fp8pass.capture.instances import ModuleNames, join
from fp8pass.capture.recompute import FirstRuns
from fp8pass.errors import CheckpointMismatchError, preview
from fp8pass.graph.sites import GraphInput, TensorName
from fp8pass.recipes import DelayedScaling
from fp8pass.rewrite.report import StateTensor
from fp8pass.rewrite.runner import Rewrite
from fp8pass.rules import Rules
from fp8pass.state.store import DelayedStore, capacity_for
from fp8pass.state.update import end_step


@dataclasses.dataclass
class CompiledGraph:
    """One graph of Dynamo's, compiled."""

    name: str
    inputs: tuple[GraphInput, ...]
    state_start: int
    """Position of the first state input among the graph's inputs."""
    state_count: int
    rewrite: Rewrite | None = None
    """Set when the joint graph (or the inference graph) is rewritten; None for a graph without operations."""
    forward: fx.Graph | None = None
    backward: fx.Graph | None = None
    records_amax: bool = False

    def tensors(self, recipe: DelayedScaling) -> list[StateTensor]:
        """Tensors whose scales the graph takes from the state of a recipe."""
        return [] if self.rewrite is None else self.rewrite.tensors.get(recipe, [])


class Session:
    """State and graphs of one compiled model. Invariant: holds no strong reference to the model or its Parameters."""

    def __init__(self, model: Any, rules: Rules, step: str, group: dist.ProcessGroup | None):
        root = model if isinstance(model, nn.Module) else None
        self.root = None if root is None else weakref.ref(root)
        self.rules = rules
        self.step_mode = step
        self.group = group
        self.names = ModuleNames(root)
        self.delayed = tuple(r for r in rules.recipes if isinstance(r, DelayedScaling))
        self.stores: dict[tuple[DelayedScaling, torch.device], DelayedStore] = {}
        self.graphs: list[CompiledGraph] = []
        self.first_runs = FirstRuns()
        self.recorded = False
        """Whether any amax was recorded since the last step boundary."""
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

    def expected_store(self, name: str) -> DelayedStore:
        """The store that a tensor will belong to that no graph has claimed yet, by the rules."""
        module, _, kind = name.rpartition(":")
        role = "grad_input" if kind.startswith("grad_output") else "output"
        recipe = self.rules.recipe_for(module, role)
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

    def claim(self, store: DelayedStore, tensors: list[tuple[str, float]], aliases: dict[str, str]) -> None:
        """Give the tensors of a module instance their columns, taking over what a checkpoint or another device holds."""
        names = [name for name, _ in tensors]
        with self.lock:
            self._check_restored(store, names)
            elsewhere = [s for (r, _), s in self.stores.items() if s is not store and r == store.recipe]
            moved = [n for n in names if n not in store]
            store.add(names, [limit for _, limit in tensors])
            for other in elsewhere:
                store.take_from(other, moved)
            store.restored.difference_update(names)
            for alias, name in aliases.items():
                if name in store and alias not in store:
                    store.aliases[alias] = name

    def _check_restored(self, store: DelayedStore, names: list[str]) -> None:
        if not store.restored:
            return
        kinds = {n.rpartition(":")[2].split("#")[0] for n in store.names}
        missing = [n for n in names if n not in store and n.rpartition(":")[2].split("#")[0] in kinds]
        if missing:
            raise CheckpointMismatchError(
                f"the loaded state does not fit this model and recipe: it lacks {preview(missing)}; it holds"
                f" {preview(sorted(store.restored))} that no module has claimed. Load the state of the same model, or none"
            )

    # -- steps

    def begin_forward(self) -> None:
        """Called when a forward begins; ends the step before it if this is an outermost one."""
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        if depth == 0 and self.step_mode == "auto" and self.recorded and not in_backward():
            self.end_step()

    def end_forward(self) -> None:
        """Called when a forward ends, with or without an error."""
        self._depth.value -= 1

    def end_step(self) -> None:
        """The step boundary: every store is updated once."""
        with self.lock:
            for store in list(self.stores.values()):
                end_step(store, self.group)
            self.recorded = False

    def name_of(self, name: TensorName, placed: dict[str, str]) -> str:
        """A tensor's name for the instance that `placed` describes."""
        return self.name_module(name.path, placed) + name.label

    def name_module(self, path: Any, placed: dict[str, str]) -> str:
        """A module's path in the user's model."""
        return "matmul" if path is None else join(placed, path, self.root is not None)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a forward that runs here is a recomputation."""
    return torch._C._current_graph_task_id() != -1
