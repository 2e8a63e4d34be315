"""The frozen Parameters of a compiled model that give their values back, and the reasons why the others do not.

One does once its copies are made, at the end of that forward, if nothing that was compiled reads it otherwise. With delayed
scaling that is when the scale is the one of its own amax, or a step boundary has left it as it was: then no later step changes
it, and from then on it belongs to the copies.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import lowering
from fp8pass.errors import Reason, ReasonKind, ReleasedWeightError
from fp8pass.graph.gemms import FAST_PATH, NO_FAST_PATH, GraphInput
from fp8pass.schemes import scheme_of
from fp8pass.schemes.eager import bytes_and_scales
from fp8pass.weights import released
from fp8pass.weights.cache import RELEASED, CachedWeight, Given, WeightCache, checksums_of, storages_of
from fp8pass.weights.parameters import OfParameters
from fp8pass.weights.released import CAN_REFUSE, MESSAGE, copies_of, empty_like, is_released
from lowering.formats import Granularity

_KEEPS = Reason(ReasonKind.SCALES, "it shares its scale with a weight that keeps high precision")


@dataclasses.dataclass(frozen=True)
class Release:
    """The outcome for a frozen Parameter that GEMMs read in FP8."""

    bytes: int
    """High-precision memory that it gave back; 0 if it keeps its values."""
    reason: Reason | None
    """The reason why it keeps them; None if it gave them back."""


class Releases:
    """The frozen Parameters of one compiled model."""

    def __init__(self, cache: WeightCache, root: Callable[[], nn.Module | None], *, is_on: bool):
        self._cache = cache
        self._root = root
        self.is_on = is_on
        if is_on:
            released.note_use()
        self.found = OfParameters[Release](root)  # The outcomes for the Parameters whose copies graphs have read.
        self._readers = OfParameters[str](root)  # What reads a Parameter in high precision.
        self._used: dict[int, nn.Parameter] = {}  # The Parameters whose copies have been read in the call that runs.
        self._lock = threading.Lock()
        self._num_calls = 0
        self._num_graph_calls = 0
        self._has_breaks = False  # Eager code runs before or after a graph in a call.
        self._records: list[weakref.ref[released.ReleasedRecord]] = []  # The Parameters that the last search found released.
        self._num_changes = 0
        self._open: list[released.ReleasedRecord] = []  # The released Parameters that are nn.Parameters for the calls that run.

    def open(self, num_graph_calls: int) -> None:
        """Begin a call, whose guards ask for nn.Parameters. num_graph_calls: how often graphs ran so far."""
        if not released.is_used():
            return
        with self._lock:
            if not self._num_calls:
                self._num_graph_calls = num_graph_calls
                self._open = self._records_of_model()
                released.begin_call(self._open)
            self._num_calls += 1

    def close(self, num_graph_calls: int) -> None:
        """End a call, and release what can be released."""
        if not self._num_calls:  # nothing was released in this process when it began
            return
        with self._lock:
            self._num_calls -= 1
            if self._num_calls:
                return
            try:
                if self.is_on:
                    used, self._used = self._used, {}
                    self._release(used, has_breaks=self._has_breaks or num_graph_calls - self._num_graph_calls > 1)
            finally:
                opened, self._open = self._open, []
                released.end_call(opened)

    def _records_of_model(self) -> list[released.ReleasedRecord]:
        """The released Parameters that a guard may ask about; a compiled function may hold any."""
        root = self._root()
        if root is None:
            return released.records()
        if self._num_changes != released.num_changes():
            self._num_changes = released.num_changes()
            held = {id(parameter) for parameter in root.parameters()}
            self._records = [weakref.ref(record) for record in released.records() if id(record.parameter) in held]
        return [record for reference in self._records if (record := reference()) is not None]

    def note_break(self) -> None:
        """Take note of eager code before or after a graph that is about to run, or be compiled. Raises ReleasedWeightError
        where torch could not refuse its reads of a Parameter without values."""
        self._has_breaks = True
        root = self._root()
        if not CAN_REFUSE and root is not None and released.any_released() and any(is_released(p) for p in root.parameters()):
            why = "code at a graph break, whose reads torch's builds without CUDA cannot refuse"
            raise ReleasedWeightError(f"{why}: {MESSAGE}")

    def use(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take note of a graph that reads copies of Parameters."""
        for parameter in parameters if self.is_on else ():
            if type(parameter) is nn.Parameter and not parameter.requires_grad:
                if self.found.get(parameter) is None:
                    reason = None if is_released(parameter) else Reason(ReasonKind.READERS, "its copies are not made yet")
                    self.found.set(parameter, Release(0, reason))
                if self._num_calls:
                    self._used[id(parameter)] = parameter

    def note_reads(self, inputs: Sequence[GraphInput], args: Sequence[Any], reads: Mapping[int, str]) -> None:
        """Take note of a graph that is about to run on `args`. Raises ReleasedWeightError if it reads one without values."""
        for i, operation in reads.items():
            if i < len(inputs) and inputs[i].is_parameter and isinstance(args[i], torch.Tensor):
                if type(args[i]) is nn.Parameter and is_released(args[i]):
                    fix = f". To run this layer on the copies: {NO_FAST_PATH}" if f"aten::{operation}" in FAST_PATH else ""
                    raise ReleasedWeightError(f"{operation} of a compiled graph reads {list(args[i].shape)}: {MESSAGE}{fix}")
                if self._readers.get(args[i]) is None:
                    self._readers.set(args[i], operation)

    def _release(self, used: Mapping[int, nn.Parameter], has_breaks: bool) -> None:
        """Decide about all before the first gives its values back: copies of weights that share a scale are made of all."""
        weights = {i: self._cache.of(parameter) for i, parameter in used.items() if not is_released(parameter)}
        given = {weight: _given(weight, used) for held in weights.values() for weight in held}
        there = {w: tensors for w, tensors in given.items() if tensors is not None and w.made is not None}
        fresh = {w for w, tensors in there.items() if w.is_made_of(self._cache.origin(tensors))}
        root = self._root() if any(self._readers.get(used[i]) is None for i in weights) else None  # else all are decided
        embedded = set() if root is None else {id(m.weight) for m in root.modules() if isinstance(m, nn.Embedding)}
        trains = root is not None and any(p.requires_grad for p in root.parameters())
        reasons = {i: self._obstacle(used[i], w, fresh, has_breaks, embedded, trains) for i, w in weights.items()}
        freed: list[int] = []
        for i, held in weights.items():
            reason = reasons[i]
            if reason is None and any(reasons.get(other, _KEEPS) is not None for w in held for other in w.identities[1:]):
                reason = _KEEPS
            self.found.set(used[i], Release(0, reason))
            if reason is None:
                freed.append(i)
        for i in freed:
            self.found.set(used[i], _give_back(used[i], {w: there[w] for w in weights[i] if w in fresh}))
        if not self._cache.keeps:
            for weight in (w for i, held in weights.items() if i not in freed for w in held):
                weight.forget()

    def _obstacle(
        self,
        parameter: nn.Parameter,
        weights: Sequence[CachedWeight],
        fresh: Collection[CachedWeight],
        has_breaks: bool,
        embedded: Collection[int],
        trains: bool,
    ) -> Reason | None:
        """Why a Parameter keeps its values for now. fresh: the weights whose copies are those of its values. embedded: the
        identities of the weights of embeddings. trains: the model has Parameters that train."""
        if parameter.requires_grad:
            return Reason(ReasonKind.READERS, "it trains")
        if (reader := self._readers.get(parameter)) is not None:
            return Reason(ReasonKind.READERS, f"{reader} of a compiled graph reads it in high precision")
        if id(parameter) in embedded:
            return Reason(ReasonKind.READERS, "an embedding reads it in high precision")
        if trains and not any(w.trains for w in weights):
            return Reason(ReasonKind.READERS, "no graph with a backward has run, which may need more of it")
        if any(len(w.shape) == 3 and not _is_restorable(w) for w in weights):
            detail = "a batch of matrices with scales of parts of rows, from which it could not be restored"
            return Reason(ReasonKind.SHAPE, detail)
        if has_breaks and not CAN_REFUSE:
            detail = "code between graphs may read it, which torch's builds without CUDA cannot refuse"
            return Reason(ReasonKind.READERS, detail)
        if not any(w in fresh for w in weights):
            return Reason(ReasonKind.UNTRACKED, "its copies are out of date")
        if not all(_is_settled(w) for w in weights if w.made is not None):
            return Reason(ReasonKind.SCALES, "the next step may change its scale")
        return None

    def restore(self) -> None:
        """Give all Parameters their values again: those of their copies, which remain valid."""
        found = (record.parameter for record in released.records())
        parameters = {id(p): p for p in found if is_released(p) and self.found.get(p) is not None}
        for parameter in parameters.values():
            released.restore(parameter, _values_of(parameter))
            self.found.set(parameter, Release(0, Reason(ReasonKind.READERS, "it was restored")))
        for weight in (w for parameter in parameters.values() for w in self._cache.of(parameter)):
            given = _given(weight, parameters)
            if weight.made is not None and given is not None:
                origin, checksum = self._cache.origin(given), checksums_of(given[:1])
                weight.made = dataclasses.replace(weight.made, origin=origin, storages=storages_of(given), checksum=checksum)


def _given(weight: CachedWeight, known: Mapping[int, nn.Parameter]) -> Given | None:
    """The Parameter of a weight and those that share its scale; None where not all of them are known."""
    found = [known.get(i) for i in weight.identities]
    return None if any(p is None for p in found) else tuple(p for p in found if p is not None)


def _give_back(parameter: nn.Parameter, made: Mapping[CachedWeight, Given]) -> Release:
    storage = parameter.untyped_storage()
    size, reference = storage.nbytes(), StorageWeakRef(storage)
    del storage
    released.release(parameter, made)
    for weight, given in made.items():
        assert weight.made is not None
        weight.made = dataclasses.replace(weight.made, origin=RELEASED, storages=storages_of(given))
    return Release(size if reference.expired() else 0, None)  # shared storages are kept


def _values_of(parameter: torch.Tensor) -> torch.Tensor:
    """The values that the copies of a released Parameter stand for, rounded to its dtype."""
    weight: CachedWeight = copies_of(parameter)[0]
    assert weight.made is not None
    layout, data = next(iter(weight.made.data.items()))
    data, scales = bytes_and_scales(weight.quantization, layout, data, weight.made.scale_inv[layout], weight.shape)
    values = (data.float() * scales).to(parameter.dtype)
    return empty_like(parameter).copy_(values.reshape(parameter.shape))


def _is_restorable(batch: CachedWeight) -> bool:
    """Tell whether `_values_of` knows the layout of the scales of a batch's copies."""
    quantization = batch.quantization
    return quantization.granularity is Granularity.ROW_WISE or scheme_of(quantization).can_transpose(quantization)


def _is_settled(weight: CachedWeight) -> bool:
    """True if the scale of its copies is fixed as long as the weight is."""
    made, recipe = weight.made, weight.recipe
    if made is None or made.scale is None or made.amax is None or weight.has_stayed:
        return True
    if getattr(recipe, "scaling_factor_compute_algo", None) is not None or callable(getattr(recipe, "amax_compute_algo", None)):
        return False
    own = lowering.scale_from_amax(made.amax, weight.quantization.dtype, margin=weight.quantization.margin)
    return torch.equal(own.reshape(-1), made.scale.reshape(-1))
