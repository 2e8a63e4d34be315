"""The state of one compiled model: a store per delayed recipe and device, and their windows as inputs of graphs.

NOTE [a tensor under two recipes] Rules may give the GEMMs that read one tensor different recipes, and then it has a history
under each. The recipe that the rules give to the GEMM that the tensor is named after owns the plain name; under another one the
name has the recipe's position, as in "wq:input@recipe1". It depends on rules alone, so that all graphs, ranks and checkpoints
agree.

NOTE [the first step] A tensor whose amax history is empty takes its scale from itself. That needs a second read of the tensor,
so it is another graph, the variant `FIRST_STEP`. It gets scales in which 0 stands for an empty history. Whether a history is
empty is known on the host; once none is, calls run the usual graph and ask no more. Steps that pass do not matter. A tensor of
a part that never trains, or that is 0 in every step, has no history, and a scale of 1 would be no better in its tenth call than
in its first.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from fp8pass.errors import CheckpointMismatchError, preview
from fp8pass.graph.origin import TensorName
from fp8pass.inputs import USUAL, BoundInputs, ExtraInput, InputProvider, Needed, Placed, Records
from fp8pass.recipes import DelayedScaling
from fp8pass.rules import Rules
from fp8pass.scales.exchanges import Exchanges, is_checked
from fp8pass.scales.reduction import AmaxReduction
from fp8pass.scales.store import DelayedStore, Values, capacity_for
from fp8pass.schemes.emitter import FIRST_STEP, STATE_KINDS, StateKey

Move = tuple[nn.Module | None, str | None, str | None]
"""(module, path, path now) of a module that has another place in the model. None: the module is gone; no path."""


class Stores(InputProvider):
    """The stores of one compiled model, which give graphs windows of themselves. Invariants: holds no strong reference to the
    model; `lock` is held while tensors are claimed and while a step ends."""

    def __init__(
        self,
        rules: Rules,
        model: Callable[[], nn.Module | None],
        group: dist.ProcessGroup | None = None,
        may_quantize: Callable[[DelayedScaling, str], bool] = lambda recipe, name: False,
        strict: bool = False,
    ):
        """group, may_quantize: see `AmaxReduction`."""
        self.lock = threading.RLock()
        self._rules = rules  # The rules that the model was compiled with: names depend on them, whatever rules come later.
        self.in_force = self.recipes = _stateful(rules)
        """Recipes that keep state: of the rules in force, and of all rules so far, in the order in which they came."""
        self.reduction = AmaxReduction(group, self.recipes, may_quantize)
        self._model = model
        self.exchanges = Exchanges(model, strict)
        self._stores: dict[tuple[DelayedScaling, torch.device], DelayedStore] = {}
        self.away: weakref.WeakKeyDictionary[nn.Module, list[tuple[DelayedStore, TensorName, Values]]]
        """The histories of modules that were taken out of the model and still exist."""
        self.away = weakref.WeakKeyDictionary()
        shapes = [(1, 1) if is_lazy(p) else tuple(p.shape) for p in self._parameters()]
        self._expected_entries = sum(2 + (shape[0] if len(shape) == 3 else 1) for shape in shapes if len(shape) >= 2)

    def __iter__(self) -> Iterator[DelayedStore]:
        """The stores in the order in which they were made."""
        return iter(list(self._stores.values()))

    def store(self, recipe: DelayedScaling, device: torch.device) -> DelayedStore:
        """The store of a recipe on a device, made when first asked for."""
        key = (recipe, device)
        with self.lock:
            if key not in self._stores:
                self._stores[key] = DelayedStore(recipe, device, self._expected_entries)
            return self._stores[key]

    def one_per_recipe(self) -> list[DelayedStore]:
        """All stores, at least one per recipe: ranks that reduce must know the same recipes, whatever they have run."""
        for recipe in self.recipes:
            if not any(store.recipe == recipe for store in self):
                self.store(recipe, self._expected_device())
        return list(self)

    def capacity(self, recipe: DelayedScaling, device: torch.device, needed: int) -> int:
        """Number of entries a new graph's state placeholders should have."""
        store = self.store(recipe, device)
        if store.capacity < capacity_for(needed):
            store.grow(needed)
        return store.capacity

    def use_rules(self, rules: Rules) -> None:
        """Put other rules in force. Tensors keep their histories, whether these rules quantize them or not."""
        self.in_force = _stateful(rules)
        self.recipes = tuple(dict.fromkeys((*self.recipes, *self.in_force)))
        self.reduction.use_recipes(self.recipes)
        for store in self:
            store.is_complete = False

    # -- inputs of graphs

    def inputs(self, device: torch.device, needed: Needed) -> list[ExtraInput]:
        """A window of the scales, the staging row twice, and slots, per recipe that keeps state."""
        found = []
        for i, recipe in enumerate(self.in_force):
            capacity = self.capacity(recipe, device, needed.entries)
            for kind in STATE_KINDS:
                dtype = torch.int64 if kind == "slots" else torch.float32
                name = f"fp8_{kind}_{i}" if i else f"fp8_{kind}"
                found.append(ExtraInput(StateKey(recipe, kind), name, (capacity,), dtype))
        return found

    def bind(self, placed: Placed) -> BoundState:
        """Give the instance's tensors their columns."""
        with self.lock:
            return BoundState(self, placed)

    def before_boundary(self) -> None:
        """Complete the staged amaxes: what a backward wrote elsewhere, and what other ranks recorded."""
        for store in self:
            store.before_boundary()
        if self.reduction.is_active:
            self.reduction.run(self.one_per_recipe())
        for store in self:
            self.exchanges.before_update(store)

    # -- names

    def name_under(self, recipe: DelayedScaling, name: TensorName) -> TensorName:
        """A tensor's name in the store of a recipe; see NOTE [a tensor under two recipes]."""
        if recipe == self._recipe_of(name):
            return name
        return dataclasses.replace(name, recipe=self.recipes.index(recipe))

    def expected_store(self, name: TensorName) -> DelayedStore:
        """The store that a tensor will belong to that no graph has claimed yet, by the rules."""
        recipes = self.recipes
        if name.recipe is not None and name.recipe >= len(recipes):
            raise CheckpointMismatchError(
                f"'{name}' was saved under recipe {name.recipe}, counted from 0, of those that keep state; these rules have"
                f" {len(recipes)}. Load it with the rules that it was saved with"
            )
        own = self._recipe_of(name)
        if name.recipe is not None and recipes[name.recipe] == own:
            raise CheckpointMismatchError(
                f"'{name}' was saved by a model that was compiled with other rules, which gave '{name.module}' another recipe"
                f" first. Compile with the rules that it was compiled with, and call use_rules before loading"
            )
        return self.store(own if name.recipe is None else recipes[name.recipe], self._expected_device())

    def _recipe_of(self, name: TensorName) -> DelayedScaling:
        """The recipe that the rules give to the GEMM that a tensor is named after."""
        recipe = self._rules.recipe_for(name.module, "grad_input" if name.kind == "grad_output" else "output")
        recipes = self.recipes
        return next((r for r in recipes if r == recipe), recipes[0])

    def add_aliases(self, store: DelayedStore, aliases: Iterable[tuple[TensorName, TensorName]]) -> frozenset[tuple[str, str]]:
        """Let the other names of shared tensors, given as (another name, the name), stand for them. Returns them as they are
        in the store."""
        found = []
        for pair in aliases:
            other, name = (str(self.name_under(store.recipe, n)) for n in pair)
            store.add_alias(other, name)
            if not other.endswith(":weight"):
                found.append((other, name))
        return frozenset(found)

    # -- tensors

    def modules(self) -> set[str]:
        """The paths in the names of all tensors."""
        return {TensorName.parse(name).module for store in self for name in (*store.names, *store.aliases)}

    def follow(self, moves: Sequence[Move], paths: Set[str] | None) -> None:
        """Let histories go with their modules: one that comes in the place of another begins with empty ones, and one that is
        taken out finds its own when it comes back. Those that a checkpoint has just given a path stay. paths: those of the
        model now; None for a function."""
        to = {path: now for _, path, now in moves if path is not None}
        owners = {path: module for module, path, now in moves if path is not None and now is None}
        vacant = set() if paths is None else to.keys() - paths
        for store in self:
            store.drop_aliases(lambda name: TensorName.parse(name).module in to)
            named = [(text, TensorName.parse(text)) for text in store.names if text not in store.restored]
            renamed = {}
            for text, name in named:
                if (now := to.get(name.module)) is not None:
                    renamed[text] = self._moved(store, name, now)
                elif name.module in to:
                    if (owner := owners[name.module]) is not None:
                        self.away.setdefault(owner, []).append((store, name, store.values(text)))
                    store.forget([text])
            store.rename({old: new for old, new in renamed.items() if new not in store.restored})
            if left := [n for n in store.names if n not in store.restored and TensorName.parse(n).module in vacant]:
                store.give_up(left)
        for module, path, now in moves:
            if path is None and module is not None and now is not None:
                for store, name, values in self.away.pop(module, ()):
                    if (text := self._moved(store, name, now)) not in store.restored:
                        store.put(text, values)

    def _moved(self, store: DelayedStore, name: TensorName, module: str) -> str:
        return str(self.name_under(store.recipe, dataclasses.replace(name, module=module, recipe=None)))

    def claim(self, store: DelayedStore, tensors: Sequence[tuple[str, float]], entries: Sequence[int] | None = None) -> None:
        """Give the tensors of a module instance, (name, fp8_max) each, their columns (`entries`; 1 for each if None), taking
        over what a checkpoint or another device holds. A batch that has another number of matrices than before begins with an
        empty history; tensors that were one in another graph, as tied weights are, part. Raises CheckpointMismatchError if a
        loaded state lacks one of them, has it in another format, or has another number of experts."""
        names = [name for name, _ in tensors]
        counts = dict(zip(names, [1] * len(names) if entries is None else entries, strict=True))
        with self.lock:
            store.separate(names)
            # Experts were added or removed: which, their scales do not tell.
            changed = [name for name, count in counts.items() if name in store and store.entries(name) != count]
            _check_restored(store, names)
            for name, limit in tensors:
                if name in store.restored and (held := float(store.fp8_max[store.column(name)])) != limit:
                    raise CheckpointMismatchError(
                        f"the loaded state does not fit this recipe: {name} was saved with fp8_max {held:g} and has"
                        f" {limit:g} here; use the same fp8_format"
                    )
            for name in changed:
                if name in store.restored:
                    raise CheckpointMismatchError(
                        f"the loaded state does not fit this model: {name} has {store.entries(name)} scales there and"
                        f" {counts[name]} here, one per expert. Load the state of a model with as many experts, or none"
                    )
            if changed:
                store.give_up(store.aliases.get(name, name) for name in changed)
            elsewhere = [s for s in self if s is not store and s.recipe == store.recipe]
            moved = [n for n in names if n not in store]
            store.add(names, [limit for _, limit in tensors], [counts[name] for name in names])
            for other in elsewhere:
                store.take_from(other, moved)
                # No Parameter is there any more; a copy of a module on another device is no move.
                if self._model() is not None and all(p.device != other.device for p in self._parameters()):
                    other.give_up(n for n in names if n in other)
            store.restored.difference_update(names)

    def _expected_device(self) -> torch.device:
        """The device of the model, before any graph has told."""
        return next((p.device for p in self._parameters()), torch.device("cpu"))

    def _parameters(self) -> list[nn.Parameter]:
        model = self._model()
        return [] if model is None else list(model.parameters())


def _stateful(rules: Rules) -> tuple[DelayedScaling, ...]:
    return tuple(r for r in rules.stateful if isinstance(r, DelayedScaling))


def _check_restored(store: DelayedStore, names: list[str]) -> None:
    if not store.restored or not store.is_complete:
        return
    kinds = {TensorName.parse(n).kind for n in store.names}
    lacking = missing_of((n for n in names if n not in store), store.names)
    missing = [n for n in lacking if TensorName.parse(n).kind in kinds]
    if missing:
        raise CheckpointMismatchError(
            f"the loaded state does not fit this model and recipe: it lacks {preview(missing)}; it was saved by another model,"
            f" with other rules, or before this part of the model had run. Load the state of the same model and rules, or none"
        )


def missing_of(names: Iterable[str], saved: Iterable[str]) -> list[str]:
    """Names that a saved state lacks and a state of this model has. A module of which it has other tensors was
    frozen then, or called in another way: its inputs and gradients begin with empty histories, as without the checkpoint."""
    modules = {TensorName.parse(name).module for name in saved}
    parsed = ((name, TensorName.parse(name)) for name in names)
    return [name for name, of in parsed if of.kind == "weight" or of.module not in modules]


Scales = dict[DelayedStore, torch.Tensor]  # Per store the scales [capacity] of a call.


class BoundState(BoundInputs):
    """The state of one module instance, as one graph receives it. Invariant: the slots are those of the instance's tensors."""

    def __init__(self, stores: Stores, placed: Placed):
        keys: list[Any] = [given.key for given in placed.inputs[:: len(STATE_KINDS)]]
        self._all = stores
        self._stores = [stores.store(key.recipe, placed.device) for key in keys]
        self._tensors = [
            [
                (str(stores.name_under(store.recipe, placed.name_tensor(tensor.name))), tensor.fp8_max, tensor.entries)
                for tensor in placed.tensors.get(store.recipe, ())
            ]
            for store in self._stores
        ]
        """Per recipe that keeps state, the instance's names of the graph's tensors, their FP8_MAX and number of entries."""
        self.identity = self._names = tuple(tuple(name for name, _, _ in named) for named in self._tensors)
        self.is_read = any(self._names)
        self._parameters = [
            (store, name, tensor.input)
            for store, named in zip(self._stores, self._names, strict=True)
            for tensor, name in zip(placed.tensors.get(store.recipe, ()), named, strict=True)
            if tensor.input is not None and isinstance(placed.args[tensor.input], nn.Parameter)
        ]
        for store, name, _ in self._parameters:
            stores.exchanges.watch(store, name)
        self._num_unrecorded = 0  # The number of calls of which nothing was recorded.
        self._sizes = [given.shape[0] for given in placed.inputs[:: len(STATE_KINDS)]]
        self._noted: dict[DelayedStore, int] = {}
        """The step boundaries that each store had seen when the device was last asked for empty histories."""
        self._full: tuple[int, ...] | None = None  # `num_emptied` of each store when no history was empty, else None.
        self._claim()
        placed_aliases = [(placed.name_tensor(alias), placed.name_tensor(name)) for alias, name in placed.aliases]
        self._aliases = [stores.add_aliases(store, placed_aliases) for store in self._stores]

    def _claim(self) -> None:
        """Find the instance's tensors in the stores, which have grown, or given them up when the model moved."""
        for store, named in zip(self._stores, self._tensors, strict=True):
            self._all.claim(store, [(name, limit) for name, limit, _ in named], [entries for _, _, entries in named])
        each = zip(self._stores, self._names, self._sizes, strict=True)
        self._windows = [(store, store.window(names, size)) for store, names, size in each]
        self._full = None
        self._layouts = [(store, store.layout) for store in self._stores]

    def variants(self) -> frozenset[str]:
        """`FIRST_STEP` where a history of the instance is empty; see NOTE [the first step]."""
        for store, layout in self._layouts:
            if store.layout != layout:
                self._claim()
                break
        if self._full is not None and self._full == tuple([store.num_emptied for store in self._stores]):
            return USUAL
        if any(self._has_empty(store, names) for store, names in zip(self._stores, self._names, strict=True)):
            return frozenset({FIRST_STEP})
        self._full = tuple(store.num_emptied for store in self._stores)
        return USUAL

    def _has_empty(self, store: DelayedStore, names: tuple[str, ...]) -> bool:
        if not store.needs_first_step(names):
            return False
        noted = self._noted.get(store)
        if noted is None or (self._all.reduction.is_active and noted != store.version):
            # Other ranks may have written the histories of a module that this rank has not trained.
            self._noted[store] = store.version
            store.note_empty(name for name in names if name in store.empty)
        return store.needs_first_step(names)

    def remember(self, variants: frozenset[str]) -> Scales:
        """A copy of the present scales."""
        is_first = FIRST_STEP in variants
        each = zip(self._stores, self._names, strict=True)
        return {store: store.marked(store.scale, names) if is_first else store.frozen_scale() for store, names in each}

    def tensors(
        self, args: Sequence[Any], records: Records, variants: frozenset[str], remembered: Scales | None
    ) -> list[torch.Tensor]:
        """The four inputs per store. Amaxes that do not count go to a scratch row."""
        if records == "backward" and remembered is None:
            self._num_unrecorded += 1
            if self._num_unrecorded == 1 or is_checked(self._num_unrecorded):
                with self._all.lock:
                    for store in self._stores:
                        self._all.exchanges.compare(store, [(n, args[i]) for held, n, i in self._parameters if held is store])
        scales = None if remembered is None else {s: s.grown(scale) for s, scale in remembered.items()}
        if FIRST_STEP in variants:  # in a graph that a first run had not met, gradients alone may have empty histories
            each = zip(self._stores, self._names, strict=True)
            scales = {s: s.marked(s.scale if scales is None else scales[s], names) for s, names in each}
            if records == "all":
                self.note_started()
        if records == "all":
            for store, aliases in zip(self._stores, self._aliases, strict=True):
                store.recorded_for.add(aliases)
        found: list[torch.Tensor] = []
        for store, window in self._windows:
            scale, scratch = window.scale, window.scratch
            if scales is not None:
                scale = scales[store][window.offset : window.offset + window.scale.shape[0]]
            amax = window.amax if records == "all" else scratch
            grad_amax = scratch if records == "nothing" else window.amax
            if torch.is_grad_enabled():
                # `.data` gives each call version counters of its own: the boundary may change the state before the backward.
                scale, amax, grad_amax = scale.data, amax.data, grad_amax.data
            found += (scale, amax, grad_amax, window.slots)
        return found

    def note_started(self) -> None:
        """Note that tensors scale themselves in this step. Boundaries may have passed since the forward of a backward."""
        for store, names in zip(self._stores, self._names, strict=True):
            store.started.update(names)
