"""All kept copies of a compiled model: which are out of date, and one launch per kind that makes them again."""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from fp8pass.graph.casts import Layout
from fp8pass.state.store import DelayedStore
from fp8pass.weights.hollow import copies_of
from fp8pass.weights.kept import RELEASED, KeptWeight, Origin, QuantizedWeight, ScaleTime, key_of, origin_of
from fp8pass.weights.keys import WeightTensor
from fp8pass.weights.quantizer import CastKind, Made, quantize, quantize_together


class Scales:
    """The scales of a call: those of the state as it is, or those that an earlier call used."""

    def __init__(self, is_first: bool = False, remembered: Mapping[DelayedStore, tuple[ScaleTime, torch.Tensor]] | None = None):
        """is_first: whether the call is one of a first step, in which tensors with an empty history scale themselves."""
        self._is_first = is_first
        self._remembered = remembered

    def time(self, store: DelayedStore | None) -> ScaleTime | None:
        """When those of a store were taken; None for weights without a store."""
        if store is None:
            return None
        if self._remembered is not None and store in self._remembered:
            return self._remembered[store][0]
        return ScaleTime(store.version, self._is_first)

    def values(self, store: DelayedStore) -> torch.Tensor:
        """[capacity] float32; 0 for tensors that scale themselves."""
        if self._remembered is not None and store in self._remembered:
            return self._remembered[store][1]
        return store.marked(store.scale) if self._is_first else store.scale

    def remember(self, stores: Iterable[DelayedStore]) -> dict[DelayedStore, tuple[ScaleTime, torch.Tensor]]:
        """Copies, by which a later call repeats this one."""
        first = self._is_first
        return {s: (ScaleTime(s.version, first), s.marked(s.scale) if first else s.frozen_scale()) for s in stores}


class WeightCache:
    """The kept copies of one compiled model."""

    def __init__(self) -> None:
        self._weights: weakref.WeakValueDictionary[object, KeptWeight] = weakref.WeakValueDictionary()
        self._renewals = [0, 0]

    def claim(
        self,
        parameter: torch.Tensor,
        tensor: WeightTensor,
        store: DelayedStore | None,
        name: str,
        others: Sequence[torch.Tensor] = (),
    ) -> KeptWeight:
        """What is kept of a Parameter that is quantized so: shared by all graphs of the model. others: the Parameters that
        share its scale."""
        ids = tuple(id(other) for other in others)
        key = key_of(parameter, tensor.shape, tensor.recipe, tensor.quantization, name if store is not None else "", ids)
        found = self._weights.get(key)
        if found is None or found.parameter is not parameter or not all(map(operator.is_, found.others, others)):
            found = KeptWeight(parameter, tensor, store, name, others)
            for other in copies_of(parameter):  # another compiled model gave the values back
                if (other.shape, other.recipe, other.quantization) == (found.shape, found.recipe, found.quantization):
                    found.layouts, found.made = other.layouts, other.made
            self._weights[key] = found
        return found

    def renew(self, *, frozen: bool) -> None:
        """Make all copies again when they are next read, although their Parameters show no change: those of Parameters that
        train, and with `frozen` those of all others as well."""
        self._renewals[0] += 1
        self._renewals[1] += frozen

    def release(self) -> None:
        """Give up the copies that only graphs without a backward read, of Parameters that train: training needs the memory, and
        will change them."""
        for weight in self._weights.values():
            parameter = weight.parameter
            is_all_there_is = weight.made is not None and weight.made.origin is RELEASED
            if not weight.trains and parameter is not None and parameter.requires_grad and not is_all_there_is:
                weight.made = None

    def of(self, parameter: torch.Tensor) -> list[KeptWeight]:
        """What is kept of a Parameter: more than one where it is quantized in several ways."""
        return [w for w in self._weights.values() if w.parameter is parameter]

    def origin(self, weight: KeptWeight) -> Origin:
        """What copies of a weight that are made now are made of."""
        assert weight.parameter is not None
        own, *others = (origin_of(p, (self._renewals[0], self._renewals[1])) for p in (weight.parameter, *weight.others))
        return dataclasses.replace(own, others=tuple(others)) if others and own is not RELEASED else own

    def current(self, weights: Collection[KeptWeight], scales: Scales, *, trains: bool) -> dict[KeptWeight, QuantizedWeight]:
        """The copies of weights for a call with these scales. Where one is out of date, all that are, of all graphs of this
        kind (that train, or that do not), are made again together."""
        origins = self._origins(weights)
        if any(not _is_fresh(w, o, scales) for w, o in origins.items()):
            others = [w for w in self._weights.values() if (w.trains or not trains) and w not in origins and w.is_present]
            self._refresh(origins | self._origins(others), scales)
        return {w: w.made for w in weights if w.made is not None}

    def _refresh(self, origins: Mapping[KeptWeight, Origin], scales: Scales) -> None:
        for weight in _with_equal_scales(origins, scales):
            weight.time, weight.has_stayed = scales.time(weight.store), True
        stale = {w: o for w, o in origins.items() if not _is_fresh(w, o, scales)}
        for weight in stale:
            weight.made = None  # what is made now may take its memory
        for weight, made in _quantized(stale, scales).items():
            weight.made, weight.time, weight.has_stayed = made, scales.time(weight.store), False

    def again(self, weights: Collection[KeptWeight], scales: Scales) -> dict[KeptWeight, QuantizedWeight]:
        """The copies for a call that repeats one with these scales: the kept ones if theirs are the same, else others, which
        are not kept."""
        origins = self._origins(weights)
        equal = _with_equal_scales(origins, scales)
        kept = {w: w.made for w, o in origins.items() if w.made is not None and (w in equal or _is_fresh(w, o, scales))}
        return kept | _quantized({w: o for w, o in origins.items() if w not in kept}, scales)

    def cast(self, weights: Collection[KeptWeight], scales: Scales) -> dict[KeptWeight, QuantizedWeight]:
        """Copies that are not kept, of weights whose content comes and goes."""
        return _quantized(self._origins(weights), scales)

    def _origins(self, weights: Iterable[KeptWeight]) -> dict[KeptWeight, Origin]:
        return {w: self.origin(w) for w in weights if w.parameter is not None}


def _is_fresh(weight: KeptWeight, origin: Origin, scales: Scales) -> bool:
    # Copies of a Parameter without values keep their scale.
    return weight.is_of(origin) and (origin is RELEASED or weight.time == scales.time(weight.store))


def _with_equal_scales(origins: Mapping[KeptWeight, Origin], scales: Scales) -> set[KeptWeight]:
    """The weights whose copies are out of date by the time of their scales alone, and have the same scales nevertheless: so it
    is after a step that left the Parameter as it was. Reads both scales back, in one transfer per store."""
    found: set[KeptWeight] = set()
    by_store: dict[DelayedStore, list[KeptWeight]] = {}
    for weight, origin in origins.items():
        if weight.store is not None and weight.is_of(origin) and not _is_fresh(weight, origin, scales):
            by_store.setdefault(weight.store, []).append(weight)
    for store, weights in by_store.items():
        held = torch.cat([w.made.scale.reshape(-1) for w in weights if w.made is not None and w.made.scale is not None])
        is_equal = (held == _selected(weights, scales.values(store))).tolist()
        for weight in weights:
            of_weight, is_equal = is_equal[: weight.entries], is_equal[weight.entries :]
            if all(of_weight):
                found.add(weight)
    return found


def _selected(weights: Iterable[KeptWeight], scale: torch.Tensor) -> torch.Tensor:
    """The scales of weights of one store, side by side."""
    columns = [column for w in weights if w.store is not None for column in w.store.columns(w.name)]
    return scale[torch.tensor(columns, device=scale.device)]


def _quantized(origins: Mapping[KeptWeight, Origin], scales: Scales) -> dict[KeptWeight, QuantizedWeight]:
    """New copies of weights: one launch for those of one kind."""
    kinds: dict[tuple[CastKind, DelayedStore | None, frozenset[int]], list[KeptWeight]] = {}
    for weight in origins:
        time = scales.time(weight.store)
        for layouts in launches_of(weight.layouts):
            kind = CastKind(
                weight.recipe, weight.quantization, layouts, weight.dtype, weight.device, time is not None and time.is_first
            )
            sharing = frozenset(id(p) for p in (weight.parameter, *weight.others)) if weight.others else frozenset()
            kinds.setdefault((kind, weight.store, sharing), []).append(weight)
    made: dict[KeptWeight, list[tuple[CastKind, Made]]] = {weight: [] for weight in origins}
    for (kind, store, _), weights in kinds.items():
        matrices = [w.matrix() for w in weights]
        if weights[0].others:
            here = {id(w.parameter) for w in weights}
            quantized = quantize_together(kind, matrices, weights[0].measured(here))
        else:
            quantized = quantize(kind, matrices, None if store is None else _selected(weights, scales.values(store)))
        for weight, one in zip(weights, quantized, strict=True):
            made[weight].append((kind, one))
    return {w: _joined(w, origin, made[w]) for w, origin in origins.items()}


def launches_of(layouts: tuple[Layout, ...]) -> list[tuple[Layout, ...]]:
    """The layouts of copies, as casts make them: one of each orientation at a time. Two of one orientation differ in their
    padding."""
    found: list[tuple[Layout, ...]] = []
    for layout in layouts:
        free = next((i for i, group in enumerate(found) if layout.columnwise not in {x.columnwise for x in group}), None)
        if free is None:
            found.append((layout,))
        else:
            found[free] += (layout,)
    return found


def _joined(weight: KeptWeight, origin: Origin, made: Sequence[tuple[CastKind, Made]]) -> QuantizedWeight:
    data: dict[Layout, torch.Tensor] = {}
    scale_inv: dict[Layout, torch.Tensor] = {}
    for kind, one in made:
        data.update(zip(kind.layouts, one.data, strict=True))
        scale_inv.update(zip(kind.layouts, one.scale_inv, strict=True))
    first = made[0][1]
    return QuantizedWeight(origin, weight.storages(), data, scale_inv, first.scale, first.amax)
