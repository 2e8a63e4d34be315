"""Which frozen Parameters of a compiled model give their values back, and why the others keep them.

One does once its copies are made, at the end of that forward, if nothing that was compiled reads it otherwise. With delayed
scaling that is when the scale is the one of its own amax, or a step boundary has left it as it was: then no later step changes
it, and from then on it belongs to the copies.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import lowering
from fp8pass.errors import ReleasedWeightError
from fp8pass.graph.sites import GraphInput
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.schemes import scheme_of
from fp8pass.schemes.eager import bytes_and_scales
from fp8pass.weights.cache import WeightCache
from fp8pass.weights.checks import checksums_of
from fp8pass.weights.hollow import (
    CAN_REFUSE,
    MESSAGE,
    all_hollow,
    begin_call,
    copies_of,
    end_call,
    fill,
    has_hollow,
    hollow,
    is_hollow,
)
from fp8pass.weights.kept import RELEASED, Given, KeptWeight, storages_of
from lowering.formats import Granularity

_KEEPS = Reason(ReasonKind.SCALES, "it shares its scale with a weight that keeps high precision")


@dataclasses.dataclass(frozen=True)
class Release:
    """What became of a frozen Parameter that GEMMs read in FP8."""

    bytes: int
    """High-precision memory that it gave back; 0 if it keeps its values."""
    reason: Reason | None
    """Why it keeps them; None if it gave them back."""


class Releases:
    """The frozen Parameters of one compiled model."""

    def __init__(self, cache: WeightCache, root: Callable[[], nn.Module | None], *, is_on: bool):
        self._cache = cache
        self._root = root
        self.is_on = is_on
        self.found: dict[int, Release] = {}
        """By the identities of the Parameters whose copies graphs have read."""
        self._readers: dict[int, str] = {}
        """Identity of a Parameter -> what reads it in high precision."""
        self._used: dict[int, nn.Parameter] = {}
        """Those whose copies have been read in the call that runs."""
        self._lock = threading.Lock()
        self._num_calls = 0
        self._num_graph_calls = 0
        self._has_breaks = False
        """Whether eager code runs before or after a graph in a call."""

    def open(self, num_graph_calls: int) -> None:
        """A call begins, whose guards ask for nn.Parameters. num_graph_calls: how often graphs ran so far."""
        begin_call()
        if self.is_on:
            with self._lock:
                self._num_graph_calls = self._num_graph_calls if self._num_calls else num_graph_calls
                self._num_calls += 1

    def close(self, num_graph_calls: int) -> None:
        """It has ended: what can be released is."""
        try:
            if self.is_on:
                with self._lock:
                    self._num_calls -= 1
                    if not self._num_calls:
                        used, self._used = self._used, {}
                        self._release(used, has_breaks=self._has_breaks or num_graph_calls - self._num_graph_calls > 1)
        finally:
            end_call()

    def note_break(self) -> None:
        """A graph is about to run, or be compiled, with eager code before or after it. Raises ReleasedWeightError where torch
        could not refuse its reads of a Parameter without values."""
        self._has_breaks = True
        root = self._root()
        if not CAN_REFUSE and root is not None and has_hollow() and any(is_hollow(p) for p in root.parameters()):
            why = "code at a graph break, whose reads torch's builds without CUDA cannot refuse"
            raise ReleasedWeightError(f"{why}: {MESSAGE}")

    def use(self, parameters: Iterable[torch.Tensor]) -> None:
        """A graph reads copies of Parameters."""
        for parameter in parameters if self.is_on else ():
            if type(parameter) is nn.Parameter and not parameter.requires_grad:
                if id(parameter) not in self.found:
                    reason = None if is_hollow(parameter) else Reason(ReasonKind.READERS, "its copies are not made yet")
                    self.found[id(parameter)] = Release(0, reason)
                if self._num_calls:
                    self._used[id(parameter)] = parameter

    def note_reads(self, inputs: Sequence[GraphInput], args: Sequence[Any], reads: Mapping[int, str]) -> None:
        """A graph is about to run on `args`, some of which it reads itself. Raises ReleasedWeightError if one has no values."""
        for i, operation in reads.items():
            if i < len(inputs) and inputs[i].is_parameter and isinstance(args[i], torch.Tensor):
                if type(args[i]) is nn.Parameter and is_hollow(args[i]):
                    raise ReleasedWeightError(f"{operation} of a compiled graph reads {list(args[i].shape)}: {MESSAGE}")
                self._readers.setdefault(id(args[i]), operation)

    def _release(self, used: Mapping[int, nn.Parameter], has_breaks: bool) -> None:
        """Decide about all before the first gives its values back: copies of weights that share a scale are made of all."""
        weights = {i: self._cache.of(parameter) for i, parameter in used.items() if not is_hollow(parameter)}
        given = {weight: self._given(weight, used) for held in weights.values() for weight in held}
        there = {w: tensors for w, tensors in given.items() if tensors is not None and w.made is not None}
        fresh = {w for w, tensors in there.items() if w.is_made_of(self._cache.origin(tensors))}
        reasons = {i: self._obstacle(used[i], held, fresh, has_breaks) for i, held in weights.items()}
        made: dict[int, list[KeptWeight]] = {}
        for i, held in weights.items():
            reason = reasons[i]
            if reason is None and any(reasons.get(other, _KEEPS) is not None for w in held for other in w.identities[1:]):
                reason = _KEEPS
            self.found[i] = Release(0, reason)
            if reason is None:
                made[i] = [w for w in held if w in fresh]
        for i, held in made.items():
            self.found[i] = _give_back(used[i], {w: there[w] for w in held})
        if not self._cache.keeps:
            for weight in (w for i, held in weights.items() if i not in made for w in held):
                weight.forget()

    def _given(self, weight: KeptWeight, used: Mapping[int, nn.Parameter]) -> Given | None:
        """The Parameter of a weight and those that share its scale; None where the call has not read all of them."""
        found = [used.get(i) for i in weight.identities]
        return None if any(p is None for p in found) else tuple(p for p in found if p is not None)

    def _obstacle(
        self, parameter: nn.Parameter, weights: Sequence[KeptWeight], fresh: Collection[KeptWeight], has_breaks: bool
    ) -> Reason | None:
        """Why a Parameter keeps its values for now. fresh: the weights whose copies are those of its values."""
        root = self._root()
        if parameter.requires_grad:
            return Reason(ReasonKind.READERS, "it trains")
        if id(parameter) in self._readers:
            return Reason(ReasonKind.READERS, f"{self._readers[id(parameter)]} of a compiled graph reads it in high precision")
        if root is not None and any(isinstance(m, nn.Embedding) and m.weight is parameter for m in root.modules()):
            return Reason(ReasonKind.READERS, "an embedding reads it in high precision")
        if not any(w.trains for w in weights) and root is not None and any(p.requires_grad for p in root.parameters()):
            return Reason(ReasonKind.READERS, "no graph with a backward has run, which may need more of it")
        if any(len(w.shape) == 3 and not _is_restorable(w) for w in weights):
            detail = "a batch of matrices with scales of parts of rows, of which it could not be restored"
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
        """Give all Parameters their values again: those of their copies, which stay valid."""
        hollow_ones = {id(parameter): parameter for parameter in all_hollow() if id(parameter) in self.found}
        for i, parameter in hollow_ones.items():
            values = restored(parameter)
            fill(parameter)
            parameter.data = values
            self.found[i] = Release(0, Reason(ReasonKind.READERS, "it was restored"))
        for weight in (w for parameter in hollow_ones.values() for w in self._cache.of(parameter)):
            given = self._given(weight, hollow_ones)
            if weight.made is not None and given is not None:
                origin, checksum = self._cache.origin(given), checksums_of(given[:1])
                weight.made = dataclasses.replace(weight.made, origin=origin, storages=storages_of(given), checksum=checksum)


def _give_back(parameter: nn.Parameter, made: Mapping[KeptWeight, Given]) -> Release:
    storage = parameter.untyped_storage()
    size, reference = storage.nbytes(), StorageWeakRef(storage)
    del storage
    hollow(parameter, made)
    for weight, given in made.items():
        assert weight.made is not None
        weight.made = dataclasses.replace(weight.made, origin=RELEASED, storages=storages_of(given))
    return Release(size if reference.expired() else 0, None)  # shared storages stay


def restored(parameter: torch.Tensor) -> torch.Tensor:
    """The values that the copies of a Parameter without values stand for, rounded to its dtype."""
    weight: KeptWeight = copies_of(parameter)[0]
    assert weight.made is not None
    layout, data = next(iter(weight.made.data.items()))
    data, scales = bytes_and_scales(weight.quantization, layout, data, weight.made.scale_inv[layout], weight.shape)
    values = (data.float() * scales).to(parameter.dtype)
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device).copy_(
        values.reshape(parameter.shape)
    )


def _is_restorable(batch: KeptWeight) -> bool:
    """Whether `restored` knows the layout of the scales of a batch's copies."""
    quantization = batch.quantization
    return quantization.granularity is Granularity.ROW_WISE or scheme_of(quantization).can_transpose(quantization)


def _is_settled(weight: KeptWeight) -> bool:
    """Whether the scale of its copies stays as long as the weight does."""
    made, recipe = weight.made, weight.recipe
    if made is None or made.scale is None or made.amax is None or weight.has_stayed:
        return True
    if getattr(recipe, "scaling_factor_compute_algo", None) is not None or callable(getattr(recipe, "amax_compute_algo", None)):
        return False
    own = lowering.scale_from_amax(made.amax, weight.quantization.dtype, margin=weight.quantization.margin)
    return torch.equal(own.reshape(-1), made.scale.reshape(-1))
