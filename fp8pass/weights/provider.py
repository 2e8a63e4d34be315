"""Kept copies as inputs of graphs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8pass.inputs import USUAL, ExtraInput, Needed, Placed
from fp8pass.schemes.scheme import FIRST_STEP
from fp8pass.state.store import DelayedStore
from fp8pass.state.stores import Stores
from fp8pass.weights.cache import Scales, WeightCache
from fp8pass.weights.kept import KeptWeight, ScaleTime
from fp8pass.weights.keys import WeightKey

Remembered = Mapping[DelayedStore, tuple[ScaleTime, torch.Tensor]]


class WeightProvider:
    """Gives the graphs of one compiled model the copies of their weights."""

    def __init__(self, stores: Stores, root: Callable[[], nn.Module | None], *, ends_steps: bool):
        """ends_steps: whether a step boundary is the end of an optimizer's step, as with step="manual". With "auto" it is the
        end of a microbatch."""
        self.stores = stores
        self.cache = WeightCache()
        self._root = root
        self._ends_steps = ends_steps
        self._was_training: bool | None = None

    def inputs(self, device: torch.device, needed: Needed) -> Sequence[ExtraInput]:
        """Those that an earlier attempt asked for."""
        return needed.inputs or ()

    def bind(self, placed: Placed) -> BoundWeights:
        """Claim the copies of the instance's Parameters."""
        _watch_optimizers(self.cache)
        with self.stores.lock:
            return BoundWeights(self, placed)

    def begin_forward(self, trains: bool) -> None:
        """An outermost forward begins, with or without gradients."""
        if trains:
            self.cache.release()
        root = self._root()
        is_training = None if root is None else root.training
        if is_training != self._was_training:  # exchanged Parameters are often written through `.data`
            self._was_training = is_training
            self.cache.renew(frozen=False)

    def after_step(self) -> None:
        """Parameters that train have changed."""
        if self._ends_steps:
            self.cache.renew(frozen=False)


class BoundWeights:
    """The copies that one graph receives for one module instance."""

    is_read = True
    identity: Hashable = None

    def __init__(self, provider: WeightProvider, placed: Placed):
        self._cache = provider.cache
        self._lock = provider.stores.lock
        self._trains = placed.trains
        stores = provider.stores
        self._parts: list[tuple[KeptWeight, WeightKey]] = []
        for given in placed.inputs:
            key = given.key
            assert isinstance(key, WeightKey)
            tensor = key.tensor
            store = stores.store(tensor.recipe, placed.device) if tensor.has_state else None  # type: ignore[arg-type]
            name = "" if store is None else str(stores.name_under(store.recipe, placed.name_tensor(tensor.name)))
            weight = self._cache.claim(placed.args[tensor.index], tensor, store, name)
            weight.want(() if key.layout is None else (key.layout,), placed.trains)
            self._parts.append((weight, key))
        self._weights = list(dict.fromkeys(weight for weight, _ in self._parts))
        self._stores = list(dict.fromkeys(w.store for w in self._weights if w.store is not None))

    def refresh(self) -> None:
        """Nothing is replaced before the copies are asked for."""

    def variants(self) -> frozenset[str]:
        """None: copies are made outside of the graph."""
        return USUAL

    def remember(self, variants: frozenset[str]) -> Remembered:
        """The scales: by them, copies of the same values are made again. Copies are not kept alive for it."""
        return Scales(FIRST_STEP in variants).remember(self._stores)

    def tensors(self, records: bool, variants: frozenset[str], remembered: Remembered | None) -> list[torch.Tensor]:
        """The copies, made again where they are out of date."""
        scales = Scales(FIRST_STEP in variants, remembered)
        with self._lock:
            if remembered is None:
                made = self._cache.current(self._weights, scales, trains=self._trains)
            else:
                made = self._cache.again(self._weights, scales)
        return [made[weight].part(key) for weight, key in self._parts]


_watched: weakref.WeakSet[WeightCache] = weakref.WeakSet()


def _watch_optimizers(cache: WeightCache) -> None:
    """Renew the copies of Parameters that train after every step of an optimizer: it may hold other tensors, from which the
    Parameters are written through `.data`, such as masters on another device."""
    _hook()
    _watched.add(cache)


@functools.cache
def _hook() -> None:
    register_optimizer_step_post_hook(_after_optimizer)


def _after_optimizer(*_: Any) -> None:
    """A compiled optimizer's writes raise version counters, and its trace would guard on ours."""
    if not torch.compiler.is_compiling():
        for cache in list(_watched):
            cache.renew(frozen=False)
