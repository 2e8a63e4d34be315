"""What an operation returns for the fake tensors of a graph's nodes, without its data.

A fake tensor is a meta tensor that says which device it stands for. `FakeTensorMode` finds out, in some 0.3 ms, how to run an
operation on it: by a decomposition, by the operation's shape function, by tables of exceptions. Our operations have one shape
function and keep to one device, views have one meta kernel: these are run as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves, tree_map_only

from lowering.operation import NAMESPACE

aten = torch.ops.aten

_VIEWS = frozenset({aten.permute.default, aten.reshape.default, aten.select.int, aten.slice.Tensor, aten.unsqueeze.default})


def result_of(mode: Any, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`target(*args, **kwargs)` on fake tensors of `mode`, a FakeTensorMode or a context that does nothing."""
    if not isinstance(target, torch._ops.OpOverload):  # such as operator.getitem
        return target(*args, **kwargs)
    device = _device_of(mode, (*args, *kwargs.values())) if target in _VIEWS or NAMESPACE.find(target) else None
    if device is None:
        with mode:
            return target(*args, **kwargs)
    with torch.no_grad(), in_kernel_invocation_manager(mode):
        made = target(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda meta: FakeTensor(mode, meta, device), made)


def _device_of(mode: Any, args: Sequence[Any]) -> torch.device | None:
    """That of all tensors among the arguments; None where they are not on one, are no fake tensors of this mode or have
    symbolic sizes, about which the mode knows more."""
    tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    is_known = isinstance(mode, FakeTensorMode) and all(isinstance(x, FakeTensor) and x.fake_mode is mode for x in tensors)
    if not tensors or not is_known or any(x.device != tensors[0].device or not _is_static(x) for x in tensors):
        return None
    device: torch.device = tensors[0].device
    return device


def _is_static(x: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in (*x.shape, *x.stride(), x.storage_offset()))
