"""Calls of compiled graphs under hooks on saved tensors.

NOTE [hooks on saved tensors] The backward writes amaxes and statistics into inputs of its graph. Autograd hands them to the
backward as saved tensors, and hooks such as those of activation offloading replace saved tensors by copies: what is written
into a copy is lost. Only the topmost pair of hooks applies, so where there is one, a call runs under a pair of ours. It passes
the graph's extra inputs on as they are, which are kept outside of the graph anyway, and gives everything else to the user's
pair. FP8 values reach the user's hooks as uint8, because NumPy, for one, has no FP8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

Hook = Callable[[Any], Any]


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
