"""The state of delayed scaling as inputs of graphs: four per recipe and graph.

NOTE [the first step] A tensor whose amax history is empty takes its scale from itself. That needs a second read of the tensor,
so it is another graph, the variant `FIRST_STEP`. It gets scales in which 0 stands for an empty history. What is empty is known
on the host; once nothing is, calls run the usual graph and ask no more. Steps that pass do not matter: a tensor of a part that
never trains, or that is 0 in every step, has no history, and a scale of 1 would be no better in its tenth call than in its
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp8pass.inputs import USUAL, BoundInputs, ExtraInput, InputProvider, Needed, Placed, Records
from fp8pass.scales.reduction import AmaxReduction
from fp8pass.scales.store import DelayedStore, end_step
from fp8pass.scales.stores import Stores
from fp8pass.schemes.emitter import FIRST_STEP, STATE_KINDS, StateKey

_DTYPES = {"slots": torch.int64}
_FIRST = frozenset({FIRST_STEP})

Scales = dict[DelayedStore, torch.Tensor]
"""Per store the scales [capacity] of a call."""


class StateProvider(InputProvider):
    """Gives graphs windows of the stores, and ends their steps."""

    def __init__(self, stores: Stores, reduction: AmaxReduction):
        self.stores = stores
        self.reduction = reduction

    def inputs(self, device: torch.device, needed: Needed) -> list[ExtraInput]:
        """A window of the scales, the staging row twice, and slots, per recipe that keeps state."""
        found = []
        for i, recipe in enumerate(self.stores.in_force):
            capacity = self.stores.capacity(recipe, device, needed.entries)
            for kind in STATE_KINDS:
                dtype = _DTYPES.get(kind, torch.float32)
                name = f"fp8_{kind}_{i}" if i else f"fp8_{kind}"
                found.append(ExtraInput(StateKey(recipe, kind), name, (capacity,), dtype))
        return found

    def bind(self, placed: Placed) -> BoundState:
        """Give the instance's tensors their columns."""
        with self.stores.lock:
            return BoundState(self, placed)

    def after_step(self) -> None:
        """Amaxes are reduced over the ranks, then every store is updated once."""
        for store in self.stores:
            store.merge_outgrown()
        if self.reduction.is_active:
            self.reduction.run(self.stores.one_per_recipe())
        for store in self.stores:
            end_step(store)


class BoundState(BoundInputs):
    """The state of one module instance, as one graph receives it. Invariant: the slots are those of the instance's tensors."""

    def __init__(self, provider: StateProvider, placed: Placed):
        stores = provider.stores
        self._all = stores
        self._stores = [stores.store(recipe, placed.device) for recipe in _recipes_of(placed)]
        self._tensors = [_tensors_in(stores, store, placed) for store in self._stores]
        self.names = tuple(tuple(name for name, _, _ in named) for named in self._tensors)
        """Per recipe that keeps state, the instance's names of the graph's tensors."""
        self.identity = self.names
        self.is_read = any(self.names)
        self._sizes = [given.shape[0] for given in placed.inputs[:: len(STATE_KINDS)]]
        self._reduction = provider.reduction
        self._noted: dict[DelayedStore, int] = {}
        """How many step boundaries each store had seen when the device was last asked for empty histories."""
        self._full: tuple[int, ...] | None = None
        """`DelayedStore.num_emptied` of each store when no history was empty; None if one may be."""
        self._claim()
        placed_aliases = [(placed.name_tensor(alias), placed.name_tensor(name)) for alias, name in placed.aliases]
        for store in self._stores:
            stores.add_aliases(store, placed_aliases)

    def _claim(self) -> None:
        """Find the instance's tensors in the stores, which have grown, or given them up when the model moved."""
        for store, named in zip(self._stores, self._tensors, strict=True):
            self._all.claim(store, [(name, limit) for name, limit, _ in named], [entries for _, _, entries in named])
        each = zip(self._stores, self.names, self._sizes, strict=True)
        self._windows = [(store, store.window(names, size)) for store, names, size in each]
        self._full = None
        self._layouts = [(store, store.layout) for store in self._stores]

    def variants(self) -> frozenset[str]:
        """`FIRST_STEP` where a history of the instance is empty; see NOTE [the first step]."""
        if any(store.layout != layout for store, layout in self._layouts):
            self._claim()
        if self._full is not None and all(s.num_emptied == n for s, n in zip(self._stores, self._full, strict=True)):
            return USUAL
        if any(self._has_empty(store, names) for store, names in zip(self._stores, self.names, strict=True)):
            return _FIRST
        self._full = tuple(store.num_emptied for store in self._stores)
        return USUAL

    def _has_empty(self, store: DelayedStore, names: tuple[str, ...]) -> bool:
        if not store.needs_first_step(names):
            return False
        noted = self._noted.get(store)
        if noted is None or (self._reduction.is_active and noted != store.version):
            # Other ranks may have written the histories of a module that this rank has not trained.
            self._noted[store] = store.version
            store.note_empty(name for name in names if name in store.empty)
        return store.needs_first_step(names)

    def remember(self, variants: frozenset[str]) -> Scales:
        """The scales as they are now."""
        is_first = FIRST_STEP in variants
        return {s: s.marked(s.scale) if is_first else s.frozen_scale() for s in self._stores}

    def tensors(
        self, args: Sequence[Any], records: Records, variants: frozenset[str], remembered: Scales | None
    ) -> list[torch.Tensor]:
        """The four of each store. What does not count goes to a scratch row."""
        scales = remembered
        if FIRST_STEP in variants:  # in a graph that a first run had not met, gradients alone may have empty histories
            scales = {s: s.marked(s.scale if remembered is None else remembered[s]) for s in self._stores}
            if records is Records.ALL:
                for store, names in zip(self._stores, self.names, strict=True):
                    store.started.update(names)
        found: list[torch.Tensor] = []
        for store, window in self._windows:
            scale = window.scale
            if scales is not None:
                scale = scales[store][window.offset : window.offset + window.scale.shape[0]]
            scratch = store.scratch_of(window)
            amax = window.amax if records is Records.ALL else scratch
            grad_amax = scratch if records is Records.NOTHING else window.amax
            # `.data` gives each call version counters of its own: the boundary may change the state before backward has run.
            found += (scale.data, amax.data, grad_amax.data, window.slots)
        return found


def _recipes_of(placed: Placed) -> list[Any]:
    """The recipes of the rules that the graph was compiled with."""
    keys: list[Any] = [given.key for given in placed.inputs[:: len(STATE_KINDS)]]
    return [key.recipe for key in keys]


def _tensors_in(stores: Stores, store: DelayedStore, placed: Placed) -> Sequence[tuple[str, float, int]]:
    """Names, FP8_MAX and numbers of entries of a graph's tensors in a store, for one instance."""
    return [
        (str(stores.name_under(store.recipe, placed.name_tensor(tensor.name))), tensor.fp8_max, tensor.entries)
        for tensor in placed.tensors.get(store.recipe, ())
    ]
