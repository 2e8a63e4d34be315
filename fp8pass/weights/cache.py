"""FP8 copies of weights that are cached between calls: what they were made of, and one launch per kind that makes them again.

NOTE [what is cached] With the defaults nothing is cached that other code can write: graphs cast their weights, frozen or
not, in training and in evaluation. Cached are the copies of frozen Parameters that gave their values back, and, for one call,
the gathered shards of FSDP2. `weight_copies="cache"` caches more: then what follows tells that copies are out of date, and
writes without a trace are found by content, at step boundaries.

NOTE [cached copies] A copy and its scale are one object, `QuantizedWeight`, which is replaced as a whole and never written to:
a backward that is still to come reads the tensors of its own forward. Before each call of a graph its weights are compared with
what their copies were made of: the Parameter's version counter, its storage and, with delayed scaling, the scale. Copies of
weights that train are also made again after every step of an optimizer, after `state(...).step()`, and when the model
changes between training and evaluation, because a write through `.data` raises no version counter.

NOTE [writes without a trace] Version counters, storages and optimizers tell of most changes of a Parameter; nothing tells of a
write through `.data`, by a fused operation called by hand, through a NumPy or DLPack view, by another process, or by another
thread while a call makes copies. So what shows no change is compared by content, a checksum of all bytes: at every step
boundary, and in calls 2, 4, 8, 16 and every 16th from there. That is one launch for all weights, which reads each once, and
writes to nothing of the user's. On a GPU the host does not wait for the result: it looks at it when a call comes later, and
waits only where the next comparison is due by then.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fp8pass.errors import ReleasedWeightError, StaleWeightError, preview
from fp8pass.graph.origin import TensorName
from fp8pass.graph.values import by_key
from fp8pass.recipes.quantization import Quantization
from fp8pass.recipes.recipe import Recipe
from fp8pass.scales.exchanges import Arriving
from fp8pass.scales.store import DelayedStore
from fp8pass.schemes.copies import Layout
from fp8pass.schemes.eager import CastKind, Made, quantize
from fp8pass.weights.fsdp import not_kept
from fp8pass.weights.parameters import Place, Seen
from fp8pass.weights.released import MESSAGE, copies_of, is_released

Part = Literal["data", "scale_inv", "amax"]  # The FP8 values of a copy, its scales, or the amax that training records.
Given = tuple[torch.Tensor, ...]  # A Parameter, and behind it those that share its scale.
ScaleTime = tuple[int, bool]
"""The step boundaries before a scale was taken from a store, and whether tensors with an empty history took it from themselves.
Equal ones mean equal scales."""


@dataclasses.dataclass(frozen=True)
class WeightTensor:
    """A Parameter as a graph quantizes it."""

    index: int  # The position of the Parameter among the inputs of Dynamo's graph.
    shape: tuple[int, ...]  # [rows, cols], or [batch, rows, cols]: the Parameter, or a row-major reshape of it.
    recipe: Recipe
    quantization: Quantization
    name: TensorName  # The name of the tensor in the state, where scales come from there.
    is_gathered: bool = False  # FSDP2 gathers it in FP8: the copy lasts as long as the gathered Parameter.
    fused: tuple[int, ...] = ()  # The inputs of all weights that have one scale together, its own among them; empty if alone.

    @property
    def entries(self) -> int:
        """The number of its scales in the state: one per matrix."""
        return self.shape[0] if len(self.shape) == 3 else 1


@dataclasses.dataclass(frozen=True)
class WeightKey:
    """The key of the extra input that holds one part of a weight's copies."""

    tensor: WeightTensor
    part: Part
    layout: Layout | None  # The layout of the copy; None for the amax, which all copies share.


Origin = tuple[Hashable, ...]
"""The values that a weight's copies were made of, as far as the host knows: equal ones mean equal values. A write through
`.data` in the middle of a step changes none of it. See `_origin_of`; those that share the scale come behind it."""

RELEASED: Origin = ("released",)  # Copies of a Parameter without values: what was made before is all there is.


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """FP8 copies of a weight and their scales: one object, which is replaced as a whole and never written to."""

    origin: Origin
    storages: tuple[StorageWeakRef, ...]  # The storages of the Parameter, and of those that share the scale.
    data: Mapping[Layout, torch.Tensor]
    scale_inv: Mapping[Layout, torch.Tensor]
    scale: torch.Tensor | None  # The factor by which the weight was multiplied, where that came from the state.
    amax: torch.Tensor | None  # Largest magnitude of the weight, in the same cases.
    checksum: torch.Tensor | None = None  # The checksum of the bytes that copies were made of, if it is needed: int32 [1].

    def part(self, key: WeightKey) -> torch.Tensor:
        """The content of an input of a graph."""
        if key.layout is None:
            assert self.amax is not None
            return self.amax
        return (self.data if key.part == "data" else self.scale_inv)[key.layout]


class CachedWeight:
    """A weight of a compiled model as its graphs quantize it, and its copies. Holds no reference to the Parameter."""

    def __init__(
        self,
        given: Given,
        tensor: WeightTensor,
        store: DelayedStore | None,
        name: str,
        places: Sequence[Place | None] = (None,),
    ):
        """store, name: where its scale is, if the recipe keeps a state. places: where the model holds what is given."""
        parameter = given[0]
        self._seen = tuple(Seen(p, place) for p, place in zip(given, places, strict=False))
        self.path = str(tensor.name) if places[0] is None else places[0].path  # The path of the Parameter in the model.
        self.shape, self.recipe, self.quantization = tensor.shape, tensor.recipe, tensor.quantization
        self.entries = tensor.entries
        self.store, self.name = store, name
        self.dtype, self.device = parameter.dtype, parameter.device
        # A graph that was compiled for Parameters whose copies can be cached may meet one whose copies cannot.
        self._is_tracked = not_kept(parameter) is None
        self.layouts: tuple[Layout, ...] = ()  # The copies that graphs read, rowwise first.
        self.trains = False  # A graph with a backward reads the copies.
        self.made: QuantizedWeight | None = None
        self.was_compared = False  # Its content was compared since the graph that asks ran last.
        self.last: QuantizedWeight | None = None  # The origin and scale of the copies made last, if not cached; no copies.
        self.time: ScaleTime | None = None  # The time at which the scale of `made` was known to be that of the state.
        self.has_stayed = False  # The scale of `made` was still that of the state after a step boundary.

    @property
    def parameter(self) -> torch.Tensor | None:
        """The Parameter, by the module that holds it; None where it has gone, or has another dtype or device now."""
        found = self._seen[0].tensor()
        return found if found is not None and found.dtype == self.dtype and found.device == self.device else None

    @property
    def identities(self) -> tuple[int, ...]:
        """The identities of the Parameter, and of those that share the scale."""
        return tuple(seen.id for seen in self._seen)

    def is_of(self, given: Given) -> bool:
        """Tell whether a call passes the weight as these Parameters, which it has seen."""
        return len(given) == len(self._seen) and all(map(Seen.is_of, self._seen, given))

    def is_of_parameter(self, parameter: torch.Tensor) -> bool:
        """Tell whether a call passes the weight as this Parameter."""
        return self._seen[0].is_of(parameter) and (parameter.dtype, parameter.device) == (self.dtype, self.device)

    def found(self) -> Given | None:
        """The tensors to quantize although no call is about to read them; None where these are not known to be there."""
        there = [self.parameter, *(seen.tensor() for seen in self._seen[1:])]
        if not self._is_tracked or not self.layouts or any(p is None or is_released(p) for p in there):
            return None
        if self.store is not None and (self.name not in self.store or self.store.entries(self.name) != self.entries):
            return None  # another graph reads the Parameter as another number of matrices, and the scales are its
        return tuple(p for p in there if p is not None)

    def want(self, layouts: tuple[Layout, ...], trains: bool) -> None:
        """Prepare for a graph that is going to read these copies."""
        self.trains |= trains
        if not set(layouts) <= set(self.layouts):
            if self.made is not None and self.made.origin is RELEASED:
                raise ReleasedWeightError(f"a graph needs another orientation of {list(self.shape)}: {MESSAGE}")
            self.layouts = tuple(sorted({*self.layouts, *layouts}, key=lambda x: (x.columnwise, x.pads_outer)))
            self.made = None

    def forget(self) -> None:
        """Give up copies that were made for one call."""
        if self.made is not None:
            self.last, self.made = dataclasses.replace(self.made, data={}, scale_inv={}), None

    def matrix(self, given: Given) -> torch.Tensor:
        """The Parameter as it is quantized."""
        parameter = given[0]
        if is_released(parameter):
            raise ReleasedWeightError(f"a graph quantizes {list(self.shape)} as {self.recipe.name!r} does: {MESSAGE}")
        return parameter.detach().reshape(self.shape)

    def measured(self, given: Given, quantized: Collection[int]) -> list[torch.Tensor]:
        """The tensors that share the scale and are not quantized with this one. quantized: the identities of those that are."""
        found = [p for p in given[1:] if id(p) not in quantized]
        if any(map(is_released, found)):
            raise ReleasedWeightError(f"{list(self.shape)} shares its scale with a weight that was released: {MESSAGE}")
        return [p.detach() for p in found]

    def is_made_of(self, origin: Origin) -> bool:
        """Tell whether the copies, or those that were made last, were made of these values, as far as the host knows."""
        last = self.made or self.last
        return last is not None and last.origin == origin and self._is_tracked


def _origin_of(parameter: torch.Tensor, renewals: Sequence[int]) -> Origin:
    """The version counter, which every change in place raises; where the values are, of which a storage's identity is kept from
    others by the copies' weak reference, and its data may be replaced; and how often copies of Parameters that train, or that
    do not, have been given up in spite of all else."""
    if is_released(parameter):
        return RELEASED
    # An inference tensor counts none; its copies are not cached.
    version = -1 if parameter.is_inference() else parameter._version
    where = parameter.untyped_storage()._cdata, parameter.data_ptr(), parameter.stride()
    return version, *where, renewals[0 if parameter.requires_grad else 1]


def storages_of(given: Given) -> tuple[StorageWeakRef, ...]:
    """Weak references to the storages of a weight's Parameters."""
    return tuple(StorageWeakRef(p.untyped_storage()) for p in given)


class Scales:
    """The scales of a call: those of the state as it is, or those that an earlier call used."""

    def __init__(self, is_first: bool = False, remembered: Mapping[DelayedStore, tuple[ScaleTime, torch.Tensor]] | None = None):
        """is_first: whether the call is one of a first step, in which tensors with an empty history scale themselves."""
        self._is_first = is_first
        self._remembered = remembered

    def time(self, store: DelayedStore | None) -> ScaleTime | None:
        """The time of the scales of a store; None for weights without a store."""
        if store is None:
            return None
        if self._remembered is not None and store in self._remembered:
            return self._remembered[store][0]
        return store.version, self._is_first

    def of(self, weights: Sequence[CachedWeight]) -> torch.Tensor:
        """The scales of weights of one store, side by side, float32; 0 for weights that scale themselves."""
        store, names = weights[0].store, tuple(w.name for w in weights)
        assert store is not None
        if self._remembered is not None and store in self._remembered:
            scale = self._remembered[store][1]
        else:
            scale = store.marked(store.scale, names) if self._is_first else store.scale
        return scale.index_select(0, store.index_of(names))

    def remember(self, names: Mapping[DelayedStore, Iterable[str]]) -> dict[DelayedStore, tuple[ScaleTime, torch.Tensor]]:
        """Copies, by which a later call repeats this one. names: of the weights of each store."""
        first = self._is_first
        return {s: ((s.version, first), s.marked(s.scale, n) if first else s.frozen_scale()) for s, n in names.items()}


Known = tuple[Given, Origin]  # The tensors that a call passes for a weight, and the origin of copies that are made of them now.


class WeightCache:
    """The copies of the weights of one compiled model."""

    def __init__(self, keeps: bool = True) -> None:
        """keeps: whether copies are cached from call to call, until it can be told that they are out of date. Otherwise they
        are made anew at each call, but for those of Parameters that gave their values back."""
        self.keeps = keeps
        self._weights: weakref.WeakValueDictionary[object, CachedWeight] = weakref.WeakValueDictionary()
        self._renewals = [0, 0]
        self.is_check_due = False  # A step boundary has come since copies were last compared with their Parameters' content.
        self._comparisons: list[tuple[list[tuple[CachedWeight, QuantizedWeight]], Arriving]] = []
        """The weights that are compared, and whether they differ."""

    def claim(
        self, given: Given, tensor: WeightTensor, store: DelayedStore | None, name: str, places: Sequence[Place | None]
    ) -> CachedWeight:
        """The copies of a Parameter quantized so, shared by all graphs. places: where the model holds what is given."""
        first, *others = given
        kind = (tensor.shape, tensor.recipe, tensor.quantization)
        # A Parameter that changes its dtype or device is another one.
        key = (id(first), first.dtype, first.device, *kind, name if store is not None else "", tuple(map(id, others)))
        found = self._weights.get(key)
        if found is None or not found.is_of(given):
            found = CachedWeight(given, tensor, store, name, places)
            for other in copies_of(first):  # another compiled model gave the values back
                if (other.shape, other.recipe, other.quantization) == kind:
                    found.layouts, found.made = other.layouts, other.made
            self._weights[key] = found
        return found

    def renew(self, *, frozen: bool) -> None:
        """Make all copies again when they are next read, although their Parameters show no change: those of Parameters that
        train, and with `frozen`, where the user says that Parameters were written to, those of all others as well."""
        self._renewals[0] += 1
        self._renewals[1] += frozen
        if frozen:
            self._comparisons.clear()

    def release(self) -> None:
        """Give up copies of Parameters that train which only graphs without a backward read: training needs the memory."""
        for weight in self._weights.values():
            parameter = weight.parameter
            is_all_there_is = weight.made is not None and weight.made.origin is RELEASED
            if not weight.trains and parameter is not None and parameter.requires_grad and not is_all_there_is:
                weight.made = None

    def of(self, parameter: torch.Tensor) -> list[CachedWeight]:
        """The weights that are this Parameter: more than one where it is quantized in several ways."""
        return [w for w in self._weights.values() if w.is_of_parameter(parameter)]

    def origin(self, given: Given) -> Origin:
        """The origin of copies of a weight that are made now."""
        own, *others = (_origin_of(p, self._renewals) for p in given)
        return own if own is RELEASED else (*own, *others)

    def current(
        self, given: Mapping[CachedWeight, Given], scales: Scales, *, trains: bool, checks: bool = False
    ) -> dict[CachedWeight, QuantizedWeight]:
        """The copies of weights for a call with these scales. Where one is out of date, all that are, of all graphs of this
        kind (that train, or that do not), are made again together. checks: whether to compare those that show no change with
        the content of their Parameters; at a step boundary that is done for all, once. Raises StaleWeightError where they
        differ."""
        known, others = self._known(given), {}
        is_due, self.is_check_due = self.is_check_due, False
        if self.keeps and (is_due or not self._are_fresh(known, scales)):
            unread = {w: w.found() for w in list(self._weights.values()) if w not in given}
            others = self._known({w: there for w, there in unread.items() if there is not None})
        for weight in _with_equal_scales(known | others, scales):
            weight.time, weight.has_stayed = scales.time(weight.store), True
        if self.keeps:
            compared = known | others if is_due else known if checks else {}
            self._compare({w: k for w, k in compared.items() if k[1] is not RELEASED and self._is_fresh(w, k, scales)})
        if not self._are_fresh(known, scales):
            self._refresh(known | {w: k for w, k in others.items() if w.trains or not trains}, scales)
        return {w: w.made for w in given if w.made is not None}

    def _refresh(self, known: Mapping[CachedWeight, Known], scales: Scales) -> None:
        stale = {w: k for w, k in known.items() if not self._is_fresh(w, k, scales)}
        # Copies that are made anew at each call show no change of their weight, nor of its scale: then the scale has stayed.
        stayed = {w: w.last for w, (_, origin) in stale.items() if w.has_stayed and _is_in_time(w, origin, scales)}
        for weight in stale:
            weight.made = None  # what is made now may take its memory
        for weight, made in _quantized(stale, scales).items():
            last = stayed.get(weight)
            weight.has_stayed = last is not None and (
                last.amax is None or made.amax is None or torch.equal(last.amax, made.amax)
            )
            weight.made, weight.last, weight.time = made, None, scales.time(weight.store)
        if self.keeps:
            for weights, checksums in _checksums(stale):
                for weight, checksum in zip(weights, checksums.split(1), strict=True):
                    assert weight.made is not None
                    weight.made = dataclasses.replace(weight.made, checksum=checksum)

    def again(self, given: Mapping[CachedWeight, Given], scales: Scales) -> dict[CachedWeight, QuantizedWeight]:
        """The copies for a call that repeats one with these scales: cached ones if theirs are the same, else new ones."""
        known = self._known(given)
        equal = _with_equal_scales(known, scales)
        kept = {w: w.made for w, k in known.items() if w.made is not None and (w in equal or self._is_fresh(w, k, scales))}
        return kept | _quantized({w: k for w, k in known.items() if w not in kept}, scales)

    def cast(self, given: Mapping[CachedWeight, Given], scales: Scales) -> dict[CachedWeight, QuantizedWeight]:
        """Copies that are not cached, of weights whose content comes and goes."""
        return _quantized(self._known(given), scales)

    def _known(self, given: Mapping[CachedWeight, Given]) -> dict[CachedWeight, Known]:
        return {w: (tensors, self.origin(tensors)) for w, tensors in given.items()}

    def _are_fresh(self, known: Mapping[CachedWeight, Known], scales: Scales) -> bool:
        return all(self._is_fresh(w, k, scales) for w, k in known.items())

    def _is_fresh(self, weight: CachedWeight, known: Known, scales: Scales) -> bool:
        given, origin = known
        if weight.made is None or not _is_in_time(weight, origin, scales):
            return False
        if self.keeps or origin is RELEASED:
            return True
        checksum = weight.made.checksum
        return checksum is not None and torch.equal(checksums_of(given[:1]), checksum)

    # -- comparisons of content: NOTE [writes without a trace]

    def _compare(self, known: Mapping[CachedWeight, Known]) -> None:
        """Compare Parameters with what their copies were made of. Raises StaleWeightError, at once on the CPU."""
        self._settle(wait=bool(known))
        if not known or _is_capturing(known):
            return
        for weights, now in _checksums(known):
            compared = [(w, made) for w in weights if (made := w.made) is not None]
            for weight in weights:
                weight.was_compared = True
            before = [made.checksum for _, made in compared if made.checksum is not None]
            with torch.inference_mode(False), torch.no_grad():
                self._comparisons.append((compared, Arriving(now != torch.cat(before))))
        self._settle(wait=False)

    def _settle(self, wait: bool) -> None:
        """Look at the comparisons that are done, and with `wait` at all. Raises StaleWeightError; what is out of date is given
        up, so that the next call makes it again."""
        stale: dict[str, None] = {}
        while self._comparisons:
            compared, differs = self._comparisons[0]
            if _is_capturing(w for w, _ in compared) or not (wait or differs.are_there):
                break
            del self._comparisons[0]
            for (weight, made), is_stale in zip(compared, differs.take(), strict=True):
                if is_stale:
                    stale[weight.path] = None
                    if weight.made is made:
                        weight.made = None
        if stale:
            raise StaleWeightError(_stale_text(list(stale)))


def checksums_of(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The checksums of the bytes of tensors, by one launch: int32 [n]."""
    with torch.inference_mode(False), torch.no_grad():
        found: torch.Tensor = torch.ops.lowering.checksums([p.detach() for p in parameters])
    return found


def _checksums(known: Mapping[CachedWeight, Known]) -> Iterable[tuple[list[CachedWeight], torch.Tensor]]:
    """The checksums of Parameters, one launch per device."""
    for weights in by_key(known, lambda weight: weight.device).values():
        yield weights, checksums_of([known[w][0][0] for w in weights])


def _is_capturing(weights: Iterable[CachedWeight]) -> bool:
    """Tell whether the work of a call is recorded into a CUDA graph of the user's, which would repeat it."""
    return any(w.device.type == "cuda" for w in weights) and torch.cuda.is_current_stream_capturing()


def _stale_text(paths: list[str]) -> str:
    which = f"Parameter {paths[0]} has" if len(paths) == 1 else f"{len(paths)} Parameters have"
    names = "" if len(paths) == 1 else f" ({preview(paths)})"
    return (
        f"{which} changed since the FP8 copies that calls read were made, and the change was not counted{names}."
        f" weight_copies='cache' keeps copies until it detects a change. It cannot detect writes through .data, by a fused"
        f" operation called by hand (torch._fused_adamw_), through a NumPy or DLPack view, by another process, or by"
        f" another thread during a call. Call"
        f" fp8pass.state(compiled).refresh_weights() after each such write, or compile with weight_copies='auto', which"
        f" caches no such weight. The copies were dropped: the next call makes them again"
    )


def _is_in_time(weight: CachedWeight, origin: Origin, scales: Scales) -> bool:
    # Copies of a Parameter without values keep their scale.
    return weight.is_made_of(origin) and (origin is RELEASED or weight.time == scales.time(weight.store))


def _with_equal_scales(known: Mapping[CachedWeight, Known], scales: Scales) -> set[CachedWeight]:
    """The weights whose copies are out of date by the time of their scales alone, and have the same scales nevertheless: so it
    is after a step that left the Parameter as it was. Reads both scales back, in one transfer per store."""
    found: set[CachedWeight] = set()
    by_store: dict[DelayedStore, list[tuple[CachedWeight, torch.Tensor]]] = {}
    for weight, (_, origin) in known.items():
        last = weight.made or weight.last
        if weight.store is None or last is None or last.scale is None or not weight.is_made_of(origin):
            continue
        if not _is_in_time(weight, origin, scales):
            by_store.setdefault(weight.store, []).append((weight, last.scale))
    for weights in by_store.values():
        held = torch.cat([scale.reshape(-1) for _, scale in weights])
        is_equal = (held == scales.of([w for w, _ in weights])).tolist()
        for weight, _ in weights:
            here, is_equal = is_equal[: weight.entries], is_equal[weight.entries :]
            if all(here):
                found.add(weight)
    return found


def _quantized(known: Mapping[CachedWeight, Known], scales: Scales) -> dict[CachedWeight, QuantizedWeight]:
    """New copies of weights: one launch for those of one kind."""
    kinds: dict[tuple[CastKind, DelayedStore | None, frozenset[int]], list[CachedWeight]] = {}
    for w in known:
        time = scales.time(w.store)
        sharing = frozenset(w.identities) if len(w.identities) > 1 else frozenset()
        for layouts in launches_of(w.layouts):
            kind = CastKind(w.recipe, w.quantization, layouts, w.dtype, w.device, time is not None and time[1])
            kinds.setdefault((kind, w.store, sharing), []).append(w)
    made: dict[CachedWeight, list[tuple[CastKind, Made]]] = {weight: [] for weight in known}
    for (kind, store, sharing), weights in kinds.items():
        given = [known[w][0] for w in weights]
        matrices = [w.matrix(tensors) for w, tensors in zip(weights, given, strict=True)]
        if sharing:
            here = {id(tensors[0]) for tensors in given}
            quantized = quantize(kind, matrices, others=weights[0].measured(given[0], here))
        else:
            quantized = quantize(kind, matrices, None if store is None else scales.of(weights))
        for weight, one in zip(weights, quantized, strict=True):
            made[weight].append((kind, one))
    found = {}
    for weight, (tensors, origin) in known.items():
        data: dict[Layout, torch.Tensor] = {}
        scale_inv: dict[Layout, torch.Tensor] = {}
        for kind, one in made[weight]:
            data.update(zip(kind.layouts, one.data, strict=True))
            scale_inv.update(zip(kind.layouts, one.scale_inv, strict=True))
        first = made[weight][0][1]
        found[weight] = QuantizedWeight(origin, storages_of(tensors), data, scale_inv, first.scale, first.amax)
    return found


def launches_of(layouts: tuple[Layout, ...]) -> list[tuple[Layout, ...]]:
    """The layouts of copies, as casts make them: one of each orientation at a time, as two of one differ in padding."""
    found: list[tuple[Layout, ...]] = []
    for layout in layouts:
        free = next((i for i, group in enumerate(found) if layout.columnwise not in {x.columnwise for x in group}), None)
        if free is None:
            found.append((layout,))
        else:
            found[free] += (layout,)
    return found
