"""Recomputation: a compiled forward that torch.utils.checkpoint runs again inside a backward.

It must use the scales of its first run, although step boundaries may have come between, and must record an amax only if the
first run could not (reentrant checkpointing runs first without gradients). The first run is found again by its inputs, which
checkpointing keeps alive.

NOTE [hooks on saved tensors] The backward writes amaxes and statistics into inputs of its graph. Autograd hands them to the
backward as saved tensors, and hooks such as those of activation offloading replace saved tensors by copies: what is written
into a copy is lost. Only the topmost pair of hooks applies, so where there is one, a call runs under a pair of ours. It passes
the graph's extra inputs on as they are, which are kept outside of the graph anyway, and gives everything else to the user's
pair. FP8 values reach the user's hooks as uint8, because NumPy, for one, has no FP8.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8pass.inputs import MonitorSpec
from fp8pass.rules import Rules

_LIMIT = 4096
_LIMIT_PER_INSTANCE = 256

Key = tuple[tuple[int, Any], ...]
Storages = tuple[StorageWeakRef, ...]
Hook = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class GraphKey:
    """What may change between steps, and with it the graph that a call runs: NOTE [a switch] in `frame.py`."""

    rules: Rules
    watch: MonitorSpec | None = None
    """The scope of a measured step."""


@dataclasses.dataclass(frozen=True, eq=False)
class FirstRun:
    """What a recomputation has to know of its first run."""

    remembered: Mapping[int, Any]
    """By the positions of the providers that the graph has inputs of, what it must see again: a copy of the scales at the time.
    """
    recorded: bool
    """Whether what the first run wrote into its inputs counted."""
    variants: frozenset[str]
    """Those of the graph that it ran."""
    key: GraphKey
    """That of the graph that it ran."""
    trained: bool
    """Whether it ran with gradients."""
    is_dry: bool = False
    """Whether it was part of a dry pass: so is then the recomputation."""


def input_key(args: Sequence[Any]) -> Key:
    """Identity of the memory that a call reads, besides Parameters."""
    return tuple((_address(a), a.shape) for a in args if isinstance(a, torch.Tensor) and not _is_parameter(a))


def _storages(args: Sequence[Any]) -> Storages:
    """The memory whose identity `input_key` is."""
    tensors = [a for a in args if isinstance(a, torch.Tensor) and not _is_parameter(a)]
    return tuple(StorageWeakRef(t.untyped_storage()) for t in tensors if not _is_wrapper(t))


def _alive(found: tuple[FirstRun, Storages] | None) -> FirstRun | None:
    """A first run, unless the memory that it read has been freed since."""
    return None if found is None or any(storage.expired() for storage in found[1]) else found[0]


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _address(tensor: torch.Tensor) -> int:
    """Where the data lies; wrapper subclasses such as DTensor have none of their own and go by identity."""
    return id(tensor) if _is_wrapper(tensor) else tensor.data_ptr()


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return is_traceable_wrapper_subclass(tensor)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a forward that runs here is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def may_be_checkpointed(args: Sequence[Any]) -> bool:
    """Whether this forward may run again inside backward: saved tensors are intercepted, or gradients are off although an
    input wants them, as in reentrant checkpointing."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return True
    return not torch.is_grad_enabled() and any(
        isinstance(a, torch.Tensor) and a.requires_grad and not _is_parameter(a) for a in args
    )


class FirstRuns:
    """First runs that may be repeated, the oldest forgotten beyond a limit.

    Keyed by memory and, for graphs after a graph break, whose inputs are made anew, by instance: checkpointed regions are
    repeated in reverse order, so the newest first run of the instance is the one.
    """

    def __init__(self) -> None:
        self._by_memory: collections.OrderedDict[Key, tuple[FirstRun, Storages]] = collections.OrderedDict()
        """Each with the memory that it read: once that is freed, other tensors may lie at the same addresses."""
        self._by_instance: dict[Any, list[FirstRun]] = {}

    def add(self, args: Sequence[Any], instance: Any, run: FirstRun) -> None:
        """Remember a first run."""
        self._by_memory[input_key(args)] = run, _storages(args)
        runs = self._by_instance.setdefault(instance, [])
        runs.append(run)
        if len(self._by_memory) > _LIMIT:
            self._by_memory.popitem(last=False)
        del runs[:-_LIMIT_PER_INSTANCE]

    def find(self, args: Sequence[Any]) -> FirstRun | None:
        """The first run with the same memory, which is left here."""
        return _alive(self._by_memory.get(input_key(args)))

    def last_of(self, instance: Any) -> FirstRun | None:
        """The newest first run of an instance, which is left here."""
        runs = self._by_instance.get(instance)
        return runs[-1] if runs else None

    def take(self, args: Sequence[Any], instance: Any) -> FirstRun | None:
        """The first run that this recomputation repeats, or None if the call has none: it is no recomputation."""
        runs = self._by_instance.get(instance, [])
        run = _alive(self._by_memory.pop(input_key(args), None))
        if run is None:
            return runs.pop() if runs else None
        if run in runs:
            runs.remove(run)
        return run

    def clear(self) -> None:
        """Forget all first runs."""
        self._by_memory.clear()
        self._by_instance.clear()


# -- hooks on saved tensors


def user_hooks() -> tuple[Hook, Hook] | None:
    """The (pack, unpack) pair that applies to tensors saved now; None where there is none."""
    hooks: tuple[Hook, Hook] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def call_under_hooks(function: Callable[..., Any], args: Sequence[Any], extra: Sequence[torch.Tensor]) -> Any:
    """`function(*args, *extra)`, whose backward gets the extra inputs themselves: NOTE [hooks on saved tensors]."""
    hooks = user_hooks()
    if hooks is None or _are_inlined(hooks):
        return function(*args, *extra)
    ours = _Hooks(hooks, frozenset(_storage(x) for x in extra))
    with torch.autograd.graph.saved_tensors_hooks(ours.pack, _unpack):
        return function(*args, *extra)


def _are_inlined(hooks: tuple[Hook, Hook]) -> bool:
    """Whether AOTAutograd compiles the hooks into the graphs. There they apply to intermediate values alone."""
    return all(isinstance(hook, torch.fx.GraphModule) for hook in hooks)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclasses.dataclass(frozen=True, eq=False)
class _Passed:
    """A saved tensor that no hook of the user's has seen."""

    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class _Packed:
    """What the user's hook made of a saved tensor."""

    value: Any
    unpack: Hook
    dtype: torch.dtype | None
    """Of a tensor in FP8, whose bytes the hook got; None for others."""


class _Hooks:
    """The pair of one call: the user's, but for some storages."""

    def __init__(self, user: tuple[Hook, Hook], passed: frozenset[int]):
        self._pack, self._unpack = user
        self._passed = passed

    def pack(self, tensor: torch.Tensor) -> _Passed | _Packed:
        """What autograd keeps of a saved tensor."""
        if _storage(tensor) in self._passed:
            return _Passed(tensor)
        is_fp8 = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
        value = self._pack(tensor.view(torch.uint8) if is_fp8 else tensor)
        return _Packed(value, self._unpack, tensor.dtype if is_fp8 else None)


def _unpack(kept: _Passed | _Packed) -> Any:
    if isinstance(kept, _Passed):
        return kept.tensor
    value = kept.unpack(kept.value)
    return value if kept.dtype is None else value.view(kept.dtype)
