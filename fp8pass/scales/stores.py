"""The stores of one compiled model: one per recipe that keeps state and per device, and which tensor is in which."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from fp8pass.errors import CheckpointMismatchError, preview
from fp8pass.graph.names import TensorName
from fp8pass.recipes import DelayedScaling
from fp8pass.rules import Rules
from fp8pass.scales.store import DelayedStore, capacity_for


class Stores:
    """The stores of one compiled model. Invariants: holds no strong reference to the model; `lock` is held while tensors are
    claimed and while a step ends.

    NOTE [a tensor under two recipes] Rules may give the GEMMs that read one tensor different recipes, and then it has a
    history under each. The recipe that the rules give to the GEMM that the tensor is named after owns the plain name; under
    another one the name has the recipe's position, as in "wq:input@recipe1". It depends on rules alone, so that all graphs,
    ranks and checkpoints agree.
    """

    def __init__(self, rules: Rules, model: Callable[[], nn.Module | None]):
        self.lock = threading.RLock()
        self._rules = rules
        """Those that the model was compiled with: names depend on them, whatever rules come later."""
        self.in_force = self.recipes = _stateful(rules)
        """Recipes that keep state: of the rules in force, and of all rules so far, in the order in which they came."""
        self._model = model
        self._stores: dict[tuple[DelayedScaling, torch.device], DelayedStore] = {}
        matrices = [p for p in self._parameters() if p.dim() >= 2]
        self._expected_entries = sum(2 + (p.shape[0] if p.dim() == 3 else 1) for p in matrices)

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
                self.store(recipe, self.expected_device())
        return list(self)

    def capacity(self, recipe: DelayedScaling, device: torch.device, needed: int) -> int:
        """Number of entries a new graph's state placeholders should have."""
        store = self.store(recipe, device)
        if store.capacity < capacity_for(needed):
            store.grow(needed)
        return store.capacity

    def use_rules(self, rules: Rules) -> None:
        """Other rules are in force. Tensors keep their histories, whether these rules quantize them or not."""
        self.in_force = _stateful(rules)
        self.recipes = tuple(dict.fromkeys((*self.recipes, *self.in_force)))
        for store in self:
            store.is_complete = False

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
        recipe = self._recipe_of(name) if name.recipe is None else recipes[name.recipe]
        return self.store(recipe, self.expected_device())

    def _recipe_of(self, name: TensorName) -> DelayedScaling:
        """The recipe that the rules give to the GEMM that a tensor is named after."""
        recipe = self._rules.recipe_for(name.module, "grad_input" if name.kind == "grad_output" else "output")
        recipes = self.recipes
        return next((r for r in recipes if r == recipe), recipes[0])

    def add_aliases(self, store: DelayedStore, aliases: Iterable[tuple[TensorName, TensorName]]) -> None:
        """Let the other names of shared tensors, given as (another name, the name), stand for them."""
        for pair in aliases:
            alias, name = (str(self.name_under(store.recipe, n)) for n in pair)
            if name in store:
                store.aliases.setdefault(alias, name)

    # -- tensors

    def claim(self, store: DelayedStore, tensors: Sequence[tuple[str, float]], entries: Sequence[int] | None = None) -> None:
        """Give the tensors of a module instance, (name, fp8_max) each, their columns (`entries`; 1 for each if None), taking
        over what a checkpoint or another device holds. A batch that has another number of matrices than before begins with an
        empty history. Raises CheckpointMismatchError if a loaded state lacks one of them, has it in another format, or has
        another number of experts."""
        names = [name for name, _ in tensors]
        counts = [1] * len(names) if entries is None else list(entries)
        with self.lock:
            _check_restored(store, names)
            _check_formats(store, tensors)
            _check_entries(store, names, counts)
            if changed := _changed(store, names, counts):  # experts were added or removed: which, their scales do not tell
                store.give_up(store.aliases.get(name, name) for name in changed)
            elsewhere = [s for s in self if s is not store and s.recipe == store.recipe]
            moved = [n for n in names if n not in store]
            store.add(names, [limit for _, limit in tensors], counts)
            for other in elsewhere:
                store.take_from(other, moved)
                if self._has_left(other.device):
                    other.give_up(n for n in names if n in other)
            store.restored.difference_update(names)

    def expected_device(self) -> torch.device:
        """Where the model is, before any graph has told."""
        return next((p.device for p in self._parameters()), torch.device("cpu"))

    def _has_left(self, device: torch.device) -> bool:
        """Whether no Parameter of the model is on a device any more; a copy of a module on another device is no move."""
        return self._model() is not None and all(p.device != device for p in self._parameters())

    def _parameters(self) -> list[nn.Parameter]:
        model = self._model()
        return [] if model is None else list(model.parameters())


def _stateful(rules: Rules) -> tuple[DelayedScaling, ...]:
    return tuple(r for r in rules.stateful if isinstance(r, DelayedScaling))


def _check_restored(store: DelayedStore, names: list[str]) -> None:
    if not store.restored or not store.is_complete:
        return
    kinds = {TensorName.parse(n).kind for n in store.names}
    missing = [n for n in names if n not in store and TensorName.parse(n).kind in kinds]
    if missing:
        raise CheckpointMismatchError(
            f"the loaded state does not fit this model and recipe: it lacks {preview(missing)}; it was saved by another model"
            f" or with other rules. Load the state of the same model and rules, or none"
        )


def _check_formats(store: DelayedStore, tensors: Sequence[tuple[str, float]]) -> None:
    for name, limit in tensors:
        if name in store.restored and (held := float(store.fp8_max[store.column(name)])) != limit:
            raise CheckpointMismatchError(
                f"the loaded state does not fit this recipe: {name} was saved with fp8_max {held:g} and has {limit:g} here; use"
                f" the same fp8_format"
            )


def _changed(store: DelayedStore, names: Sequence[str], entries: Sequence[int]) -> list[str]:
    """The names of batched weights that have another number of matrices than when they were claimed."""
    return [name for name, count in zip(names, entries, strict=True) if name in store and store.entries(name) != count]


def _check_entries(store: DelayedStore, names: list[str], entries: list[int]) -> None:
    for name in _changed(store, names, entries):
        if name in store.restored:
            count = entries[names.index(name)]
            raise CheckpointMismatchError(
                f"the loaded state does not fit this model: {name} has {store.entries(name)} scales there and {count} here,"
                f" one per expert. Load the state of a model with as many experts, or none"
            )
