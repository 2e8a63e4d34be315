"""Binding: the run-time half of a compiled graph. Finds the module instance of a call and appends its state to the arguments."""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fp8pass.capture.recompute import FirstRun, may_be_checkpointed
from fp8pass.capture.session import CompiledGraph, Session, in_backward
from fp8pass.errors import RuleError
from fp8pass.recipes import DelayedScaling
from fp8pass.state.store import DelayedStore, Window


@dataclasses.dataclass
class Instance:
    """One module instance that a graph runs for."""

    names: tuple[tuple[str, ...], ...]
    """Per delayed recipe, the instance's names of the graph's tensors."""
    windows: list[Window]
    layouts: list[int]
    """Layout of each store that the windows belong to."""
    reduced: list[Any] = dataclasses.field(default_factory=list)


class Binder:
    """Runs one compiled graph. Invariant: the graph receives exactly the slots of the instance whose Parameters it receives."""

    def __init__(
        self, session: Session, compiled: CompiledGraph, function: Callable[..., Any], device: torch.device, sizes: list[int]
    ):
        self.session = session
        self.compiled = compiled
        self.function = function
        self.device = device
        self.sizes = sizes
        self.stores = [session.store(recipe, device) for recipe in session.delayed]
        self._instances: dict[Any, Instance] = {}
        positions = [i for i, given in enumerate(compiled.inputs) if given.is_parameter]
        self._identify = _identity_getter(positions)
        self._positions = positions

    def run(self, *args: Any) -> Any:
        """Call the graph with the state of the instance that `args` belong to."""
        key = self._identify(args)
        instance = self._instances.get(key)
        if instance is None:
            instance = self._bind(key, args)
        for store, layout in zip(self.stores, instance.layouts, strict=True):
            if store.layout != layout:
                self._refresh(instance)
                break
        if in_backward():
            return self._recompute(instance, args)
        if may_be_checkpointed(args):
            scales = {store: store.frozen_scale() for store in self.stores}
            self.session.first_runs.add(args, instance.names, FirstRun(scales, self.compiled.records_amax))
        if self.compiled.records_amax:
            self.session.recorded = True
        state: list[Any] = []
        for window in instance.windows:
            # `.data` gives each call version counters of its own: the boundary may change the state before backward has run.
            state += (window.scale.data, window.amax.data, window.slots)
        return self.function(*args, *state)

    def _recompute(self, instance: Instance, args: tuple[Any, ...]) -> Any:
        first = self.session.first_runs.take(args, instance.names)
        records = first is not None and not first.recorded and self.compiled.records_amax
        self.session.recorded |= records
        state: list[Any] = []
        for store, window in zip(self.stores, instance.windows, strict=True):
            shown = slice(window.offset, window.offset + window.scale.shape[0])
            scale = window.scale if first is None else first.scales[store][shown]
            amax = window.amax if records else store.scratch[shown]
            state += (scale.data, amax.data, window.slots)
        return self.function(*args, *state)

    def _bind(self, key: Any, args: tuple[Any, ...]) -> Instance:
        session, compiled = self.session, self.compiled
        with session.lock:
            placed = session.names.place(compiled.inputs, args)
            names: list[tuple[str, ...]] = []
            for recipe, store in zip(session.delayed, self.stores, strict=True):
                tensors = compiled.tensors(recipe)
                named = [(session.name_of(t.name, placed), t.fp8_max) for t in tensors]
                aliases = compiled.rewrite.aliases if compiled.rewrite and not self._instances else {}
                session.claim(store, named, aliases)
                names.append(tuple(name for name, _ in named))
            instance = Instance(tuple(names), [], [])
            self._refresh(instance)
            self._instances[key] = instance
            for i in self._positions:
                weakref.finalize(args[i], self._instances.pop, key, None).atexit = False
        return instance

    def _refresh(self, instance: Instance) -> None:
        instance.windows = [
            store.window(names, size) for store, names, size in zip(self.stores, instance.names, self.sizes, strict=True)
        ]
        instance.layouts = [store.layout for store in self.stores]


def _identity_getter(positions: list[int]) -> Callable[[tuple[Any, ...]], Any]:
    """A fast function from a graph's arguments to the identities of the Parameters among them."""
    if not positions:
        return lambda args: ()
    if len(positions) == 1:
        position = positions[0]
        return lambda args: id(args[position])
    pick = operator.itemgetter(*positions)
    return lambda args: tuple(map(id, pick(args)))
