"""Parameters between calls: their identities, the modules that hold them, and the steps of optimizers that change them.

NOTE [no weak references to Parameters] torch exchanges the content of two tensors, which `module.to` of a tensor-parallel model
does, only if nothing refers to them weakly: `torch.utils.swap_tensors`. So nothing here refers to a Parameter between calls.
It is known by its identity; which one that is, is told by what a call passes, or by the module that holds it, to which weak
references are harmless. An identity comes back when a Parameter is gone: then its memory is gone too, and no module holds it.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8pass.graph.origin import joined


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """A name under which a module holds Parameters or buffers."""

    path: str  # The path in the model: "layers.0.wq.weight".
    module: weakref.ref[nn.Module]
    key: str  # The last part of the path.

    def tensor(self) -> torch.Tensor | None:
        """The tensor that is there now."""
        module = self.module()
        if module is None:
            return None
        found = module._parameters.get(self.key)
        return module._buffers.get(self.key) if found is None else found


_places: weakref.WeakKeyDictionary[nn.Module, dict[int, Place]] = weakref.WeakKeyDictionary()
"""Per model, identity -> place of each tensor that it held when it was last searched."""


def places_of(root: nn.Module | None, tensors: Sequence[torch.Tensor]) -> list[Place | None]:
    """The places of tensors in a model; of what several modules share, the first place. None for tensors that it does not
    hold. The model is searched where one of them is not where it was: a graph for many blocks asks once per block."""
    if root is None:
        return [None] * len(tensors)
    known = _places.get(root, {})
    if any((place := known.get(id(x))) is None or place.tensor() is not x for x in tensors):
        known = {}
        for path, module in root.named_modules():
            reference = weakref.ref(module)
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    known.setdefault(id(tensor), Place(joined(path, key), reference, key))
        _places[root] = known
    return [known.get(id(x)) for x in tensors]


class Seen:
    """A Parameter that a call has passed. Holds no reference to it: NOTE [no weak references to Parameters]."""

    __slots__ = ("_storage", "id", "place")

    def __init__(self, tensor: torch.Tensor, place: Place | None):
        """place: where the model holds it; None for a Parameter of no module of the model."""
        self.id, self.place = id(tensor), place
        self._storage = _storage_of(tensor)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Tell whether it is this tensor, and not an earlier one that had the same identity."""
        if id(tensor) != self.id:
            return False
        own = self._storage  # a weak reference, which keeps the address from other storages
        if own is not None and type(tensor) is nn.Parameter and tensor.untyped_storage()._cdata == own.cdata:
            return True
        storage = _storage_of(tensor)
        if storage != self._storage:
            if self.place is None or self.place.tensor() is not tensor:
                return False
            self._storage = storage  # `p.data = other`, or exchanged
        return True

    def tensor(self) -> torch.Tensor | None:
        """The Parameter, by the module that holds it; None where no module does."""
        found = None if self.place is None else self.place.tensor()
        return found if found is not None and id(found) == self.id else None

    @property
    def is_gone(self) -> bool:
        """True if it can be no more: neither its memory is there, nor does its module hold it."""
        return self._storage is not None and self._storage.expired() and self.tensor() is None


Value = TypeVar("Value")


class OfParameters(Generic[Value]):
    """What is known of Parameters that calls have passed, and of no later one with the identity of one that is gone."""

    def __init__(self, root: Callable[[], nn.Module | None]) -> None:
        """root: the model that may hold them."""
        self._root = root
        self._known: dict[int, tuple[Seen, Value]] = {}

    def get(self, tensor: torch.Tensor) -> Value | None:
        """The value of a Parameter; None if it has none."""
        seen, value = self._known.get(id(tensor), (None, None))
        return value if seen is not None and seen.is_of(tensor) else None

    def set(self, tensor: torch.Tensor, value: Value) -> None:
        """Give a Parameter a value."""
        seen, _ = self._known.get(id(tensor), (None, None))
        if seen is None or not seen.is_of(tensor):
            seen = Seen(tensor, places_of(self._root(), [tensor])[0])
        self._known[id(tensor)] = seen, value

    def items(self) -> Iterator[tuple[int, Value]]:
        """The identities and values of the Parameters that are there, those of a model in the modules that held them."""
        for i, (seen, value) in self._known.items():
            is_there = not seen.is_gone if seen.place is None else seen.tensor() is not None
            if is_there:
                yield i, value


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    """None for tensors that are made of others and have no memory of their own."""
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    return None if is_wrapper else StorageWeakRef(tensor.untyped_storage())


# -- steps of optimizers, of any torch.optim.Optimizer in the process, compiled or not

Listener = Callable[[Optimizer | None], None]  # Called after each step of an optimizer; with None after one of a compiled one.

_listeners: set[weakref.WeakMethod[Listener]] = set()

_have_compiled_steps_run = False


def listen(listener: Listener) -> None:
    """Call a bound method after every step from now on, for as long as somebody else holds its object."""
    _hook()
    _listeners.add(weakref.WeakMethod(listener))


def take_compiled_steps() -> None:
    """Tell all listeners of steps of compiled optimizers since the last call."""
    global _have_compiled_steps_run
    if _have_compiled_steps_run:
        _have_compiled_steps_run = False
        _tell(None)


@functools.cache
def _hook() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    """Dynamo traces it into a compiled step. There it sets a global that it does not read: an assignment that compiled code
    repeats at each call, without an operation in its graph and without a guard on the value."""
    global _have_compiled_steps_run
    if torch.compiler.is_compiling():
        _have_compiled_steps_run = True
    else:
        _tell(optimizer)


def _tell(optimizer: Optimizer | None) -> None:
    for reference in list(_listeners):
        listener = reference()
        if listener is None:
            _listeners.discard(reference)
        else:
            listener(optimizer)
