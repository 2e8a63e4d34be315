"""The kept copies of one Parameter, and what they were made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fp8pass.errors import ReleasedWeightError
from fp8pass.graph.casts import Layout
from fp8pass.scales.store import DelayedStore
from fp8pass.weights.hollow import MESSAGE, is_hollow
from fp8pass.weights.keys import WeightKey, WeightTensor
from fp8pass.weights.places import Place, Seen
from fp8pass.weights.sharding import not_kept

Given = tuple[torch.Tensor, ...]
"""A Parameter, and behind it those that share its scale."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a weight's copies were made of, as far as the host knows. Equal ones mean equal values.

    A write through `.data` in the middle of a step changes none of it.
    """

    version: int
    """The Parameter's version counter, which every change in place raises."""
    storage: int
    """Identity of its storage. The copies keep a weak reference to it, so that no other storage gets the same."""
    address: int
    """Of its data: that of a storage can be replaced."""
    renewals: int
    """How often copies of Parameters that train, or that do not, have been given up, whatever else says that they are valid."""
    others: tuple[Origin, ...] = ()
    """Of the Parameters that share the scale."""


RELEASED = Origin(-2, 0, 0, 0)
"""That of a Parameter without values: NOTE [hollow Parameters]. What was made before it gave them back is all there is."""


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """FP8 copies of a weight and their scales: one object, which is replaced as a whole and never written to."""

    origin: Origin
    storages: tuple[StorageWeakRef, ...]
    """Of the Parameter, and of those that share the scale."""
    data: Mapping[Layout, torch.Tensor]
    scale_inv: Mapping[Layout, torch.Tensor]
    scale: torch.Tensor | None
    """By which the weight was multiplied, where that came from the state."""
    amax: torch.Tensor | None
    """Largest magnitude of the weight, in the same cases."""
    checksum: torch.Tensor | None = None
    """Of the bytes that the copies were made of, where they are going to be asked for: int32 [1]."""

    def part(self, key: WeightKey) -> torch.Tensor:
        """What an input of a graph holds."""
        if key.layout is None:
            assert self.amax is not None
            return self.amax
        return (self.data if key.part == "data" else self.scale_inv)[key.layout]


@dataclasses.dataclass(frozen=True)
class ScaleTime:
    """When a scale was taken from a store: equal ones mean equal scales."""

    boundaries: int
    """`DelayedStore.version`."""
    is_first: bool
    """Whether tensors with an empty history took it from themselves."""


class KeptWeight:
    """A weight of a compiled model as its graphs quantize it, and its copies. Holds no reference to the Parameter."""

    def __init__(
        self,
        given: Given,
        tensor: WeightTensor,
        store: DelayedStore | None,
        name: str,
        places: Sequence[Place | None] = (None,),
    ):
        """places: where the model holds what is given."""
        parameter = given[0]
        self._seen = tuple(Seen(p, place) for p, place in zip(given, places, strict=False))
        self.path = str(tensor.name) if places[0] is None else places[0].path
        """Of the Parameter in the model."""
        self.shape, self.recipe, self.quantization = tensor.shape, tensor.recipe, tensor.quantization
        self.entries = tensor.entries
        """How many scales it has in the state."""
        self.store = store
        """The store of its scale; None for recipes that keep none."""
        self.name = name
        """Its name in the store."""
        self.dtype, self.device = parameter.dtype, parameter.device
        # A graph that was compiled for Parameters whose copies can be kept may meet one whose copies cannot.
        self._is_tracked = not_kept(parameter) is None
        self.layouts: tuple[Layout, ...] = ()
        """Those that graphs read, rowwise first."""
        self.trains = False
        """Whether a graph with a backward reads the copies."""
        self.made: QuantizedWeight | None = None
        self.was_compared = False
        """Whether its content was, since the graph that asks ran last."""
        self.last: QuantizedWeight | None = None
        """Of the copies that were made last, where they are not kept: no copies, but what they were made of, and the scale."""
        self.time: ScaleTime | None = None
        """When the scale of `made` was known to be that of the state."""
        self.has_stayed = False
        """Whether the scale of `made` was still that of the state after a step boundary."""

    @property
    def parameter(self) -> torch.Tensor | None:
        """By the module that holds it. None where none does, or where it is of another dtype or on another device now: then
        other graphs run."""
        found = self._seen[0].tensor()
        return found if found is not None and found.dtype == self.dtype and found.device == self.device else None

    @property
    def identities(self) -> tuple[int, ...]:
        """Of the Parameter, and of those that share the scale."""
        return tuple(seen.id for seen in self._seen)

    def is_of(self, given: Given) -> bool:
        """Whether it is a weight that a call passes as these Parameters, which it has seen."""
        return len(given) == len(self._seen) and all(map(Seen.is_of, self._seen, given))

    def is_of_parameter(self, parameter: torch.Tensor) -> bool:
        """Whether it is a weight that a call passes as this Parameter."""
        return id(parameter) == self._seen[0].id and (parameter.dtype, parameter.device) == (self.dtype, self.device)

    def found(self) -> Given | None:
        """What can be quantized although no call is about to read it; None where that is not known to be there."""
        there = [self.parameter, *(seen.tensor() for seen in self._seen[1:])]
        if not self._is_tracked or not self.layouts or any(p is None or is_hollow(p) for p in there):
            return None
        return tuple(p for p in there if p is not None)

    @property
    def is_gone(self) -> bool:
        """Whether no call can ask for it any more."""
        return any(seen.is_gone for seen in self._seen)

    def want(self, layouts: tuple[Layout, ...], trains: bool) -> None:
        """A graph is going to read these copies."""
        self.trains |= trains
        if not set(layouts) <= set(self.layouts):
            if self.made is not None and self.made.origin is RELEASED:
                raise ReleasedWeightError(f"a graph needs another orientation of {list(self.shape)}: {MESSAGE}")
            self.layouts = tuple(sorted({*self.layouts, *layouts}, key=lambda x: (x.columnwise, x.pads_outer)))
            self.made = None

    def forget(self) -> None:
        """Give the copies up, which were made for one call."""
        if self.made is not None:
            self.last, self.made = dataclasses.replace(self.made, data={}, scale_inv={}), None

    def matrix(self, given: Given) -> torch.Tensor:
        """The Parameter as it is quantized."""
        parameter = given[0]
        if is_hollow(parameter):
            raise ReleasedWeightError(f"a graph quantizes {list(self.shape)} as {self.recipe.name!r} does: {MESSAGE}")
        return parameter.detach().reshape(self.shape)

    def measured(self, given: Given, quantized: Collection[int]) -> list[torch.Tensor]:
        """Those that share the scale and are not quantized together with this one. quantized: the identities of those that
        are."""
        found = [p for p in given[1:] if id(p) not in quantized]
        if any(map(is_hollow, found)):
            raise ReleasedWeightError(f"{list(self.shape)} shares its scale with a weight that was released: {MESSAGE}")
        return [p.detach() for p in found]

    def is_made_of(self, origin: Origin) -> bool:
        """Whether the copies, or those that were made last, were made of these values, as far as the host knows."""
        last = self.made or self.last
        return last is not None and last.origin == origin and self._is_tracked


def origin_of(parameter: torch.Tensor, renewals: tuple[int, int]) -> Origin:
    """renewals: see `Origin.renewals`: of Parameters that train, and of others."""
    if is_hollow(parameter):
        return RELEASED
    # An inference tensor counts none; its copies are not kept.
    version = -1 if parameter.is_inference() else parameter._version
    storage = parameter.untyped_storage()
    return Origin(version, storage._cdata, parameter.data_ptr(), renewals[0 if parameter.requires_grad else 1])


def storages_of(given: Given) -> tuple[StorageWeakRef, ...]:
    """See `QuantizedWeight.storages`."""
    return tuple(StorageWeakRef(p.untyped_storage()) for p in given)


def key_of(parameter: torch.Tensor, *rest: Any) -> Hashable:
    """Under which a cache keeps a weight: a Parameter that changes its dtype or device is another one."""
    return (id(parameter), parameter.dtype, parameter.device, *rest)
