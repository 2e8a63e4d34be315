"""The kept copies of one Parameter, and what they were made of."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fp8pass.errors import ReleasedWeightError
from fp8pass.graph.casts import Layout
from fp8pass.state.store import DelayedStore
from fp8pass.weights.hollow import MESSAGE, is_hollow
from fp8pass.weights.keys import WeightKey, WeightTensor
from fp8pass.weights.sharding import not_kept


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
    """A weight of a compiled model as its graphs quantize it, and its copies. Holds no strong reference to the Parameter."""

    def __init__(
        self,
        parameter: torch.Tensor,
        tensor: WeightTensor,
        store: DelayedStore | None,
        name: str,
        others: Sequence[torch.Tensor] = (),
    ):
        """others: the Parameters that share the scale."""
        self._parameter = weakref.ref(parameter)
        self._others = tuple(weakref.ref(other) for other in others)
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
        self.time: ScaleTime | None = None
        """When the scale of `made` was known to be that of the state."""
        self.has_stayed = False
        """Whether the scale of `made` was still that of the state after a step boundary."""

    @property
    def parameter(self) -> torch.Tensor | None:
        """None where it is gone, or of another dtype or on another device now: then other graphs run."""
        found = self._parameter()
        return found if found is not None and found.dtype == self.dtype and found.device == self.device else None

    @property
    def others(self) -> list[torch.Tensor]:
        """The Parameters that share the scale."""
        found = [other for ref in self._others if (other := ref()) is not None]
        assert len(found) == len(self._others), "a graph runs on a Parameter that is gone"
        return found

    @property
    def is_present(self) -> bool:
        """Whether it can be quantized although no call is about to read it."""
        found = self.parameter
        there = [found, *(ref() for ref in self._others)]
        return self._is_tracked and bool(self.layouts) and all(p is not None and not is_hollow(p) for p in there)

    def want(self, layouts: tuple[Layout, ...], trains: bool) -> None:
        """A graph is going to read these copies."""
        self.trains |= trains
        if not set(layouts) <= set(self.layouts):
            if self.made is not None and self.made.origin is RELEASED:
                raise ReleasedWeightError(f"a graph needs another orientation of {list(self.shape)}: {MESSAGE}")
            self.layouts = tuple(sorted({*self.layouts, *layouts}, key=lambda x: (x.columnwise, x.pads_outer)))
            self.made = None

    def matrix(self) -> torch.Tensor:
        """The Parameter as it is quantized."""
        parameter = self.parameter
        assert parameter is not None, "a graph runs on a Parameter that is gone"
        if is_hollow(parameter):
            raise ReleasedWeightError(f"a graph quantizes {list(self.shape)} as {self.recipe.name!r} does: {MESSAGE}")
        return parameter.detach().reshape(self.shape)

    def measured(self, quantized: Collection[int]) -> list[torch.Tensor]:
        """Those that share the scale and are not quantized together with this one. quantized: the identities of those that
        are."""
        found = [p for p in self.others if id(p) not in quantized]
        if any(map(is_hollow, found)):
            raise ReleasedWeightError(f"{list(self.shape)} shares its scale with a weight that was released: {MESSAGE}")
        return [p.detach() for p in found]

    def storages(self) -> tuple[StorageWeakRef, ...]:
        """Of the Parameter, and of those that share the scale."""
        return tuple(StorageWeakRef(p.untyped_storage()) for p in (self.parameter, *self.others) if p is not None)

    def is_of(self, origin: Origin) -> bool:
        """Whether the copies were made of these values."""
        return self.made is not None and self.made.origin == origin and self._is_tracked


def origin_of(parameter: torch.Tensor, renewals: tuple[int, int]) -> Origin:
    """renewals: see `Origin.renewals`: of Parameters that train, and of others."""
    if is_hollow(parameter):
        return RELEASED
    # An inference tensor counts none; its copies are not kept.
    version = -1 if parameter.is_inference() else parameter._version
    storage = parameter.untyped_storage()
    return Origin(version, storage._cdata, parameter.data_ptr(), renewals[0 if parameter.requires_grad else 1])


def key_of(parameter: torch.Tensor, *rest: Any) -> Hashable:
    """Under which a cache keeps a weight: a Parameter that changes its dtype or device is another one."""
    return (id(parameter), parameter.dtype, parameter.device, *rest)
