"""All kept copies of a compiled model: which are out of date, and one launch per kind that makes them again."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch

from fp8pass.graph.casts import Layout
from fp8pass.scales.store import DelayedStore
from fp8pass.schemes.eager import CastKind, Made, quantize
from fp8pass.weights.checks import ContentChecks, has_same_content, note_content
from fp8pass.weights.hollow import copies_of
from fp8pass.weights.kept import (
    RELEASED,
    Given,
    KeptWeight,
    Origin,
    QuantizedWeight,
    ScaleTime,
    key_of,
    origin_of,
    storages_of,
)
from fp8pass.weights.keys import WeightTensor
from fp8pass.weights.places import Place


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
    """The copies of the weights of one compiled model."""

    def __init__(self, keeps: bool = True) -> None:
        """keeps: whether copies are kept from call to call, until it can be told that they are out of date. Otherwise they are
        made anew at each call, but for those of Parameters that gave their values back."""
        self.keeps = keeps
        self._weights: weakref.WeakValueDictionary[object, KeptWeight] = weakref.WeakValueDictionary()
        self._renewals = [0, 0]
        self._checks = ContentChecks()

    def claim(
        self, given: Given, tensor: WeightTensor, store: DelayedStore | None, name: str, places: Sequence[Place | None]
    ) -> KeptWeight:
        """What is kept of a Parameter that is quantized so: shared by all graphs of the model. places: where the model holds
        what is given."""
        ids = tuple(id(p) for p in given[1:])
        key = key_of(given[0], tensor.shape, tensor.recipe, tensor.quantization, name if store is not None else "", ids)
        found = self._weights.get(key)
        if found is None or not found.is_of(given):
            found = KeptWeight(given, tensor, store, name, places)
            for other in copies_of(given[0]):  # another compiled model gave the values back
                if (other.shape, other.recipe, other.quantization) == (found.shape, found.recipe, found.quantization):
                    found.layouts, found.made = other.layouts, other.made
            self._weights[key] = found
        return found

    def renew(self, *, frozen: bool) -> None:
        """Make all copies again when they are next read, although their Parameters show no change: those of Parameters that
        train, and with `frozen` those of all others as well."""
        self._renewals[0] += 1
        self._renewals[1] += frozen
        if frozen:
            self._checks.clear()

    def after_step(self) -> None:
        """A step boundary: before they are next read, copies are compared with the content of their Parameters."""
        self._checks.are_due = True

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
        return [w for w in self._weights.values() if w.is_of_parameter(parameter)]

    def origin(self, given: Given) -> Origin:
        """What copies of a weight that are made now are made of."""
        own, *others = (origin_of(p, (self._renewals[0], self._renewals[1])) for p in given)
        return dataclasses.replace(own, others=tuple(others)) if others and own is not RELEASED else own

    def current(
        self, given: Mapping[KeptWeight, Given], scales: Scales, *, trains: bool, checks: bool = False
    ) -> dict[KeptWeight, QuantizedWeight]:
        """The copies of weights for a call with these scales. Where one is out of date, all that are, of all graphs of this
        kind (that train, or that do not), are made again together.

        checks: whether to compare those that show no change with the content of their Parameters; at a step boundary that
        is done for all, once. Raises StaleWeightError where they differ.
        """
        known, others = self._known(given), {}
        is_due, self._checks.are_due = self._checks.are_due, False
        if self.keeps and (is_due or not self._are_fresh(known, scales)):
            others = self._known(self._others(given))
        for weight in _with_equal_scales(known | others, scales):
            weight.time, weight.has_stayed = scales.time(weight.store), True
        if self.keeps:
            self._check(known | others if is_due else known if checks else {}, scales)
        if not self._are_fresh(known, scales):
            self._refresh(known | {w: k for w, k in others.items() if w.trains or not trains}, scales)
        return {w: w.made for w in given if w.made is not None}

    def _others(self, given: Mapping[KeptWeight, Given]) -> dict[KeptWeight, Given]:
        found = ((w, w.found()) for w in list(self._weights.values()) if w not in given)
        return {w: there for w, there in found if there is not None}

    def _check(self, known: Mapping[KeptWeight, Known], scales: Scales) -> None:
        """Compare what shows no change with the content."""
        chosen = {w: k.given[0] for w, k in known.items() if self._is_fresh(w, k, scales) and k.origin is not RELEASED}
        self._checks.settle(wait=bool(chosen))
        self._checks.compare(chosen)

    def _refresh(self, known: Mapping[KeptWeight, Known], scales: Scales) -> None:
        stale = {w: k for w, k in known.items() if not self._is_fresh(w, k, scales)}
        # Copies that are made anew at each call show no change of their weight, nor of its scale: then the scale has stayed.
        stayed = {w: w.last for w, k in stale.items() if w.has_stayed and _is_in_time(w, k.origin, scales)}
        for weight in stale:
            weight.made = None  # what is made now may take its memory
        for weight, made in _quantized(stale, scales).items():
            last = stayed.get(weight)
            weight.has_stayed = last is not None and _equal(last.amax, made.amax)
            weight.made, weight.last, weight.time = made, None, scales.time(weight.store)
        if self.keeps:
            note_content({w: k.given[0] for w, k in stale.items()})

    def again(self, given: Mapping[KeptWeight, Given], scales: Scales) -> dict[KeptWeight, QuantizedWeight]:
        """The copies for a call that repeats one with these scales: the kept ones if theirs are the same, else others, which
        are not kept."""
        known = self._known(given)
        equal = _with_equal_scales(known, scales)
        kept = {w: w.made for w, k in known.items() if w.made is not None and (w in equal or self._is_fresh(w, k, scales))}
        return kept | _quantized({w: k for w, k in known.items() if w not in kept}, scales)

    def cast(self, given: Mapping[KeptWeight, Given], scales: Scales) -> dict[KeptWeight, QuantizedWeight]:
        """Copies that are not kept, of weights whose content comes and goes."""
        return _quantized(self._known(given), scales)

    def _known(self, given: Mapping[KeptWeight, Given]) -> dict[KeptWeight, Known]:
        return {w: Known(tensors, self.origin(tensors)) for w, tensors in given.items()}

    def _are_fresh(self, known: Mapping[KeptWeight, Known], scales: Scales) -> bool:
        return all(self._is_fresh(w, k, scales) for w, k in known.items())

    def _is_fresh(self, weight: KeptWeight, known: Known, scales: Scales) -> bool:
        if weight.made is None or not _is_in_time(weight, known.origin, scales):
            return False
        return self.keeps or known.origin is RELEASED or has_same_content(weight.made, known.given[0])


@dataclasses.dataclass(frozen=True)
class Known:
    """What a call knows of a weight."""

    given: Given
    origin: Origin
    """Of copies that are made now."""


def _is_in_time(weight: KeptWeight, origin: Origin, scales: Scales) -> bool:
    # Copies of a Parameter without values keep their scale.
    return weight.is_made_of(origin) and (origin is RELEASED or weight.time == scales.time(weight.store))


def _equal(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is None or right is None or torch.equal(left, right)


def _with_equal_scales(known: Mapping[KeptWeight, Known], scales: Scales) -> set[KeptWeight]:
    """The weights whose copies are out of date by the time of their scales alone, and have the same scales nevertheless: so it
    is after a step that left the Parameter as it was. Reads both scales back, in one transfer per store."""
    found: set[KeptWeight] = set()
    by_store: dict[DelayedStore, list[tuple[KeptWeight, torch.Tensor]]] = {}
    for weight, of_weight in known.items():
        last = weight.made or weight.last
        if weight.store is None or last is None or last.scale is None or not weight.is_made_of(of_weight.origin):
            continue
        if not _is_in_time(weight, of_weight.origin, scales):
            by_store.setdefault(weight.store, []).append((weight, last.scale))
    for store, weights in by_store.items():
        held = torch.cat([scale.reshape(-1) for _, scale in weights])
        is_equal = (held == _selected([w for w, _ in weights], scales.values(store))).tolist()
        for weight, _ in weights:
            here, is_equal = is_equal[: weight.entries], is_equal[weight.entries :]
            if all(here):
                found.add(weight)
    return found


def _selected(weights: Iterable[KeptWeight], scale: torch.Tensor) -> torch.Tensor:
    """The scales of weights of one store, side by side."""
    named = [(w.store, w.name) for w in weights if w.store is not None]
    return scale.index_select(0, named[0][0].index_of(tuple(name for _, name in named)))


def _quantized(known: Mapping[KeptWeight, Known], scales: Scales) -> dict[KeptWeight, QuantizedWeight]:
    """New copies of weights: one launch for those of one kind."""
    kinds: dict[tuple[CastKind, DelayedStore | None, frozenset[int]], list[KeptWeight]] = {}
    for weight in known:
        time = scales.time(weight.store)
        for layouts in launches_of(weight.layouts):
            kind = CastKind(
                weight.recipe, weight.quantization, layouts, weight.dtype, weight.device, time is not None and time.is_first
            )
            sharing = frozenset(weight.identities) if len(weight.identities) > 1 else frozenset()
            kinds.setdefault((kind, weight.store, sharing), []).append(weight)
    made: dict[KeptWeight, list[tuple[CastKind, Made]]] = {weight: [] for weight in known}
    for (kind, store, sharing), weights in kinds.items():
        given = [known[w].given for w in weights]
        matrices = [w.matrix(tensors) for w, tensors in zip(weights, given, strict=True)]
        if sharing:
            here = {id(tensors[0]) for tensors in given}
            quantized = quantize(kind, matrices, others=weights[0].measured(given[0], here))
        else:
            quantized = quantize(kind, matrices, None if store is None else _selected(weights, scales.values(store)))
        for weight, one in zip(weights, quantized, strict=True):
            made[weight].append((kind, one))
    return {w: _joined(k, made[w]) for w, k in known.items()}


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


def _joined(known: Known, made: Sequence[tuple[CastKind, Made]]) -> QuantizedWeight:
    data: dict[Layout, torch.Tensor] = {}
    scale_inv: dict[Layout, torch.Tensor] = {}
    for kind, one in made:
        data.update(zip(kind.layouts, one.data, strict=True))
        scale_inv.update(zip(kind.layouts, one.scale_inv, strict=True))
    first = made[0][1]
    return QuantizedWeight(known.origin, storages_of(known.given), data, scale_inv, first.scale, first.amax)
