"""Where Parameters are: known by identity, by the module that holds them and by their memory.

NOTE [no weak references to Parameters] torch exchanges the content of two tensors, which `module.to` of a tensor-parallel model
does, only if nothing refers to them weakly: `torch.utils.swap_tensors`. So nothing here refers to a Parameter between calls.
It is known by its identity; which one that is, is told by what a call passes, or by the module that holds it, to which weak
references are harmless. An identity comes back when a Parameter is gone: then its memory is gone too, and no module holds it.
"""

from __future__ import annotations

import dataclasses
import weakref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """A name under which a module holds Parameters or buffers."""

    path: str
    """In the model: "layers.0.wq.weight"."""
    module: weakref.ref[nn.Module]
    key: str
    """The last part of the path."""

    def tensor(self) -> torch.Tensor | None:
        """What is there now."""
        module = self.module()
        if module is None:
            return None
        found = module._parameters.get(self.key)
        return module._buffers.get(self.key) if found is None else found


def places_in(root: nn.Module | None) -> dict[int, Place]:
    """Identity -> where a model holds it; of what several modules share, the first place."""
    found: dict[int, Place] = {}
    for path, module in () if root is None else root.named_modules():
        reference = weakref.ref(module)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in found:
                found[id(tensor)] = Place(f"{path}.{key}" if path else key, reference, key)
    return found


class Seen:
    """A Parameter that a call has passed. Holds no reference to it: NOTE [no weak references to Parameters]."""

    __slots__ = ("_storage", "id", "place")

    def __init__(self, tensor: torch.Tensor, place: Place | None):
        """place: where the model holds it; None for a Parameter of no module of the model."""
        self.id, self.place = id(tensor), place
        self._storage = _storage_of(tensor)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it is this tensor, and not an earlier one that had the same identity."""
        if id(tensor) != self.id:
            return False
        storage = _storage_of(tensor)
        if storage != self._storage:
            if self.place is None or self.place.tensor() is not tensor:
                return False
            self._storage = storage  # `p.data = other`, or exchanged
        return True

    def tensor(self) -> torch.Tensor | None:
        """It, by the module that holds it; None where no module does."""
        found = None if self.place is None else self.place.tensor()
        return found if found is not None and id(found) == self.id else None

    @property
    def is_gone(self) -> bool:
        """Whether it can be no more: neither its memory is there, nor does its module hold it."""
        return self._storage is not None and self._storage.expired() and self.tensor() is None


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    """None for tensors that are made of others and have no memory of their own."""
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    return None if is_wrapper else StorageWeakRef(tensor.untyped_storage())
