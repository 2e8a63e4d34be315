"""Recomputation: a compiled forward that torch.utils.checkpoint runs again inside a backward.

It must use the scales of its first run, although step boundaries may have come between, and must record an amax only if the
first run could not (reentrant checkpointing runs first without gradients). The first run is found again by the frame that torch
keeps of a checkpointed region, or by its inputs, which checkpointing keeps alive.

NOTE [hooks on saved tensors] The backward writes amaxes and statistics into inputs of its graph. Autograd hands them to the
backward as saved tensors, and hooks such as those of activation offloading replace saved tensors by copies: what is written
into a copy is lost. Only the topmost pair of hooks applies, so where there is one, a call runs under a pair of ours. It passes
the graph's extra inputs on as they are, which are kept outside of the graph anyway, and gives everything else to the user's
pair. FP8 values reach the user's hooks as uint8, because NumPy, for one, has no FP8.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8pass.inputs import Measured
from fp8pass.rules import Rules
from fp8pass.runtime.words import cells

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks

_LIMIT = 4096
_LIMIT_PER_INSTANCE = 256

Key = tuple[tuple[int, Any], ...]
Storages = tuple[StorageWeakRef, ...]
Hook = Callable[[Any], Any]
Owner = tuple[Any, bool]
"""The instance of a first run, and whether that ran under hooks on saved tensors."""


@dataclasses.dataclass(frozen=True)
class GraphKey:
    """The rules and the measurement of a step, which choose the graph that a call runs: NOTE [a switch] in `frame.py`."""

    rules: Rules
    watch: Measured | None = None  # The scope of a measured step.


@dataclasses.dataclass(frozen=True, eq=False)
class FirstRun:
    """The first run of a graph, as its recomputation has to know it."""

    remembered: Mapping[int, Any]  # By the positions of the graph's providers, a record for the recomputation, such as scales.
    recorded: bool  # True if its writes into its inputs counted.
    variants: frozenset[str]
    key: GraphKey
    trained: bool  # True if it ran with gradients.
    is_dry: bool = False  # True if it was part of a dry pass: then the recomputation is, too.
    under_hooks: bool = dataclasses.field(default_factory=lambda: are_hooks_set())
    """True if it ran under hooks on saved tensors. So do both runs of checkpointing without reentry, and an evaluation of the
    same inputs, which may be a first run of reentrant checkpointing, does not."""


def input_key(args: Sequence[Any]) -> Key:
    """Identity of the memory that a call reads, besides Parameters."""
    return tuple(
        (id(a) if _is_wrapper(a) else a.data_ptr(), a.shape)
        for a in args
        if isinstance(a, torch.Tensor) and not _is_parameter(a)
    )


def _alive(found: tuple[FirstRun, Storages] | None) -> FirstRun | None:
    """A first run, unless the memory that it read has been freed since."""
    return None if found is None or any(storage.expired() for storage in found[1]) else found[0]


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return is_traceable_wrapper_subclass(tensor)


def hook_backward(result: Any, hook: Callable[..., None]) -> None:
    """Have a function called when a backward comes to the graph that returned `result`."""
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    for node in {o.grad_fn for o in outputs if isinstance(o, torch.Tensor) and o.grad_fn is not None}:
        node.register_prehook(hook)


def are_hooks_set() -> bool:
    """True if saved tensors are intercepted."""
    return _top_hooks(True) is not None


def _newest(runs: Iterable[FirstRun]) -> FirstRun | None:
    """The last of first runs, of those that ran under hooks as what runs now does, if there are any."""
    found, hooks = list(runs), are_hooks_set()
    alike = [run for run in found if run.under_hooks == hooks]
    return next(reversed(alike or found), None)


def may_be_checkpointed(args: Sequence[Any]) -> bool:
    """True if this forward may run again inside backward: saved tensors are intercepted, or gradients are off although an
    input wants them, as in reentrant checkpointing."""
    return are_hooks_set() or _is_reentrant(args)


def _is_reentrant(args: Sequence[Any]) -> bool:
    if torch.is_grad_enabled():
        return False
    for a in args:  # noqa: SIM110 - at every call, where a generator costs as much as all else
        if isinstance(a, torch.Tensor) and a.requires_grad and not _is_parameter(a):
            return True
    return False


def is_checkpointed_again(args: Sequence[Any]) -> bool:
    """True if this recomputation will be repeated itself, as the checkpoint that it runs lies within another one. While torch
    runs the outer one again, its own hooks on saved tensors are the topmost, but for those of the inner one."""
    hooks = _top_hooks(True)
    return _is_reentrant(args) or (hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook."))


def _place() -> tuple[Any, int] | None:
    """The frame of the region that torch.utils.checkpoint, without reentry, runs now, for the first time or again, and how many
    tensors were saved in this run of it. None where other hooks are the topmost, such as those of offloading within it."""
    hooks = _top_hooks(True)
    pack = None if hooks is None else inspect.unwrap(hooks[0])
    if getattr(pack, "__module__", "") != "torch.utils.checkpoint" or not inspect.isfunction(pack):
        return None
    closed = cells(pack)
    if "frame" in closed:
        return closed["frame"], len(closed["frame"].weak_holders)
    frame = closed["target_frame_ref"]() if "target_frame_ref" in closed else None
    return None if frame is None else (frame, frame.recomp_counter[closed["gid"]])


class FirstRuns:
    """First runs that may be repeated, the oldest forgotten beyond a limit. A frame of torch.utils.checkpoint tells its own,
    which may be repeated several times. Without one they are keyed by memory and instance, for several graphs may read one
    tensor; a run without gradients may be repeated by a graph of another identity, which is found by its memory alone. Graphs
    after a graph break, whose inputs are made anew, are known by instance: checkpointed regions are mostly repeated in reverse
    order, so the newest first run of the instance is the one."""

    def __init__(self) -> None:
        self._by_frame: weakref.WeakKeyDictionary[Any, dict[int, dict[Any, FirstRun]]] = weakref.WeakKeyDictionary()
        """Frame -> number of tensors saved before -> instance -> its run, the newest last."""
        self._by_memory: collections.OrderedDict[Key, dict[Owner, tuple[FirstRun, Storages]]] = collections.OrderedDict()
        """Each with the memory that it read: once that is freed, other tensors may lie at the same addresses."""
        self._by_instance: dict[Any, list[FirstRun]] = {}

    def add(self, args: Sequence[Any], instance: Any, run: FirstRun) -> None:
        """Remember a first run."""
        if (place := _place()) is not None:
            self._by_frame.setdefault(place[0], {}).setdefault(place[1], {})[instance] = run
        found = self._by_memory.setdefault(input_key(args), {})
        owner = instance, run.under_hooks
        found.pop(owner, None)  # the newest is the last
        tensors = [a for a in args if isinstance(a, torch.Tensor) and not _is_parameter(a)]
        found[owner] = run, tuple(StorageWeakRef(t.untyped_storage()) for t in tensors if not _is_wrapper(t))
        runs = self._by_instance.setdefault(instance, [])
        runs.append(run)
        if len(self._by_memory) > _LIMIT:
            self._by_memory.popitem(last=False)
        del runs[:-_LIMIT_PER_INSTANCE]

    def _here(self) -> dict[Any, FirstRun]:
        """Instance -> its first run at this place of the checkpointed region that runs again."""
        place = _place()
        return {} if place is None else self._by_frame.get(place[0], {}).get(place[1], {})

    def find(self, args: Sequence[Any]) -> FirstRun | None:
        """The newest first run at the same place of a region, or with the same memory, which is left here."""
        return next(reversed(self._here().values()), None) or _newest(
            filter(None, map(_alive, self._by_memory.get(input_key(args), {}).values()))
        )

    def last_of(self, instance: Any) -> FirstRun | None:
        """The newest first run of an instance, which is left here."""
        return _newest(self._by_instance.get(instance, ()))

    def take(self, args: Sequence[Any], instance: Any) -> FirstRun | None:
        """The first run that this recomputation repeats, or None if the call has none: it is no recomputation."""
        if (run := self._here().get(instance)) is not None:
            self._forget(instance, run)
            return run
        key, hooks = input_key(args), are_hooks_set()
        found = self._by_memory.get(key, {})
        ranked = [(under_hooks == hooks, owner == instance, i) for i, (owner, under_hooks) in enumerate(found)]
        owner, under_hooks = list(found)[max(ranked)[2]] if ranked else (instance, hooks)
        run = _alive(found.pop((owner, under_hooks), None))
        if not found:
            self._by_memory.pop(key, None)
        if run is None:
            owner, run = instance, self.last_of(instance)
        self._forget(owner, run)
        return run

    def _forget(self, instance: Any, run: FirstRun | None) -> None:
        """A run that was repeated is no longer the newest of its instance."""
        owned = self._by_instance.get(instance, [])
        if run in owned:
            owned.remove(run)


# -- hooks on saved tensors


def call_under_hooks(function: Callable[..., Any], args: tuple[Any, ...], extra: Sequence[torch.Tensor]) -> Any:
    """`function(*args, *extra)`, whose backward gets the extra inputs themselves: NOTE [hooks on saved tensors]."""
    hooks: tuple[Hook, Hook] | None = _top_hooks(True)
    # AOTAutograd compiles hooks that are graphs into its own, where they apply to intermediate values alone.
    if hooks is None or all(isinstance(hook, torch.fx.GraphModule) for hook in hooks):
        return function(*(args + tuple(extra)))  # of a thousand, in two thirds of the time of `*args, *extra`
    user_pack, user_unpack = hooks
    passed = frozenset(_storage(x) for x in extra)

    def pack(tensor: torch.Tensor) -> Callable[[], Any]:
        """Replace a saved tensor by what gives it back."""
        if _storage(tensor) in passed:
            return lambda: tensor
        is_fp8, dtype = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1, tensor.dtype
        value = user_pack(tensor.view(torch.uint8) if is_fp8 else tensor)
        return lambda: user_unpack(value).view(dtype) if is_fp8 else user_unpack(value)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved()):
        return function(*args, *extra)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
