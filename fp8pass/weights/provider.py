"""Cached and gathered copies of weights as inputs of graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fp8pass.graph.gemms import GraphInput
from fp8pass.inputs import BoundInputs, ExtraInput, InputProvider, Needed, Placed, Records, in_backward
from fp8pass.options import CompileOptions
from fp8pass.rules import Rules
from fp8pass.scales.exchanges import is_checked
from fp8pass.scales.store import DelayedStore
from fp8pass.scales.stores import Stores
from fp8pass.schemes.emitter import FIRST_STEP
from fp8pass.weights.cache import CachedWeight, Given, Scales, ScaleTime, WeightCache, WeightKey, WeightTensor
from fp8pass.weights.gathered import GatheredWeight, ParameterGathers
from fp8pass.weights.parameters import listen, places_of, take_compiled_steps
from fp8pass.weights.releases import Releases

Remembered = Mapping[DelayedStore, tuple[ScaleTime, torch.Tensor]]


class WeightProvider(InputProvider):
    """Gives the graphs of one compiled model the copies of their weights."""

    def __init__(
        self, stores: Stores, root: Callable[[], nn.Module | None], options: CompileOptions, is_running: Callable[[], bool]
    ):
        """is_running: true in a thread that runs the model compiled."""
        self.stores = stores
        self.gathers = None if options.fsdp_gather is None else ParameterGathers(root, options.first_rules, is_running)
        self.cache = WeightCache(options.weight_copies == "cache")
        self.releases = Releases(self.cache, root, is_on=options.release_frozen)
        self.root = root
        self.ends_steps = options.step == "manual"  # A boundary ends an optimizer's step; with step="auto" a microbatch.
        self._was_training: bool | None = None
        self.outlive_calls = self.gathers is not None or self.cache.keeps
        """True if copies are kept for later calls, or made before one: then every call looks at them."""

    def inputs(self, device: torch.device, needed: Needed) -> Sequence[ExtraInput]:
        """The inputs that an earlier attempt asked for."""
        return needed.inputs or ()

    def bind(self, placed: Placed) -> BoundWeights:
        """Claim the copies of the instance's Parameters."""
        listen(self.after_optimizer)
        with self.stores.lock:
            return BoundWeights(self, placed)

    def begin_forward(self, trains: bool) -> None:
        """Prepare an outermost forward, with or without gradients."""
        if trains and (self.cache.keeps or self.releases.is_on):
            self.cache.release()
        if self.gathers is not None:
            self.gathers.begin_forward(trains)
        root = self.root()
        is_training = None if root is None else root.training
        if is_training != self._was_training:  # exchanged Parameters are often written through `.data`
            self._was_training = is_training
            self.cache.renew(frozen=False)

    def end_forward(self, raised: bool) -> None:
        """Clean up after an outermost forward, which may have raised."""
        if self.gathers is not None:
            if raised:
                self.gathers.after_error()
            if raised or not self.gathers.trains:
                self.gathers.give_back()

    def after_optimizer(self, optimizer: Optimizer | None) -> None:
        """Renew the copies of Parameters that train: an optimizer may hold other tensors, from which they are written through
        `.data`, such as masters on another device."""
        self.cache.renew(frozen=False)
        if self.gathers is not None:
            self.gathers.give_back()

    def after_step(self) -> None:
        """Have copies compared with their Parameters before they are next read: those that train have changed."""
        self.cache.is_check_due = True
        if self.ends_steps:
            self.cache.renew(frozen=False)
        if self.gathers is not None:
            self.gathers.after_step()

    def note_break(self) -> None:
        """Take note of eager code before or after a graph that is about to run, or be compiled. Raises ReleasedWeightError."""
        self.releases.note_break()
        if self.gathers is not None:
            self.gathers.show_all()

    def note_reads(self, inputs: Sequence[GraphInput], args: Sequence[Any], reads: Mapping[int, str]) -> None:
        """Take note of a graph that is about to run on `args`, some of which it reads itself. Raises ReleasedWeightError."""
        if self.gathers is not None:
            self.gathers.show(args[i] for i in reads if i < len(inputs))
        self.releases.note_reads(inputs, args, reads)

    def use_rules(self, rules: Rules) -> None:
        """Take note of other rules."""
        if self.gathers is not None:
            self.gathers.use_rules(rules)


class BoundWeights(BoundInputs):
    """The copies that one graph receives for one module instance."""

    def __init__(self, provider: WeightProvider, placed: Placed):
        self._provider = provider
        self._cache = provider.cache
        self._num_calls = 0
        self._lock = provider.stores.lock
        self._trains = placed.trains
        stores = provider.stores
        self._parts: list[tuple[CachedWeight, WeightKey]] = []
        self._gathered: dict[CachedWeight, GatheredWeight | None] = {}
        """Weights that FSDP2 gathers, with what may be gathered in FP8."""
        claimed: dict[WeightTensor, CachedWeight] = {}
        root = provider.root()
        for extra in placed.inputs:
            key = extra.key
            assert isinstance(key, WeightKey)
            tensor = key.tensor
            weight = claimed.get(tensor)
            if weight is None:
                store = stores.store(tensor.recipe, placed.device) if tensor.quantization.has_state else None  # type: ignore[arg-type]
                name = "" if store is None else str(stores.name_under(store.recipe, placed.name_tensor(tensor.name)))
                given = _given(tensor, placed.args)
                if tensor.is_gathered:
                    weight, gathers = CachedWeight(given, tensor, store, name), provider.gathers
                    about = (tensor, store, name, placed.frame, placed.owners[tensor.index])
                    self._gathered[weight] = None if gathers is None else gathers.claim(given[0], *about)
                else:
                    weight = self._cache.claim(given, tensor, store, name, places_of(root, given))
                claimed[tensor] = weight
            wanted = () if key.layout is None else (key.layout,)
            weight.want(wanted, placed.trains)
            if (gathered := self._gathered.get(weight)) is not None:
                gathered.weight.want(wanted, placed.trains)
            self._parts.append((weight, key))
        self._weights = {weight: tensor for tensor, weight in claimed.items()}
        self._names: dict[DelayedStore, list[str]] = {}  # Those of the weights that have scales in the state.
        for weight in self._weights:
            if weight.store is not None:
                self._names.setdefault(weight.store, []).append(weight.name)

    def remember(self, variants: frozenset[str]) -> Remembered:
        """The scales: by them, copies of the same values are made again. Copies are not kept alive for it."""
        return Scales(FIRST_STEP in variants).remember(self._names)

    def tensors(
        self, args: Sequence[Any], records: Records, variants: frozenset[str], remembered: Remembered | None
    ) -> list[torch.Tensor]:
        """The copies, made again where they are out of date."""
        scales = Scales(FIRST_STEP in variants, remembered)
        given = {w: _given(tensor, args) for w, tensor in self._weights.items()}
        own = {w: tensors for w, tensors in given.items() if w not in self._gathered}
        with self._lock:
            take_compiled_steps()
            self._provider.releases.use(tensors[0] for tensors in own.values())
            if remembered is None:
                self._num_calls += 1
                checks = is_checked(self._num_calls) and not all(w.was_compared for w in own)
                for weight in own:
                    weight.was_compared = False
                made = self._cache.current(own, scales, trains=self._trains, checks=checks)
            else:
                made = self._cache.again(own, scales)
            here: dict[CachedWeight, GatheredWeight] = {}
            for weight, gathered in self._gathered.items():
                if gathered is not None:
                    gathered.is_run_again |= in_backward()
                    if gathered.has_copies:
                        gathered.provide(weight.layouts)
                        here[weight] = gathered
            others = {w: given[w] for w in self._gathered if w not in here}
            if self._provider.gathers is not None:
                self._provider.gathers.show(parameter for tensors in others.values() for parameter in tensors)
            made |= self._cache.cast(others, scales)
        return [(here[w] if w in here else made[w]).part(key) for w, key in self._parts]


def _given(tensor: WeightTensor, args: Sequence[Any]) -> Given:
    """The Parameter among the arguments of a graph, and behind it those that share its scale."""
    return tuple(args[i] for i in (tensor.index, *(i for i in tensor.fused if i != tensor.index)))
