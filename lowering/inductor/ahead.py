"""The kernels of operations that run as they are: compiled while Inductor generates the rest of a graph's code.

GEMMs are left out: which one runs is found out at the first call, by trials.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor import ir
from torch.utils._pytree import tree_leaves, tree_map

from lowering.operation import NAMESPACE
from lowering.triton import ahead
from lowering.triton.ahead import Described


def of_boxes(overload: Any, args: Any, options: Any) -> None:
    """Compile ahead for an operation on tensors of Inductor's."""
    boxes = [x for x in tree_leaves((args, options)) if isinstance(x, ir.TensorBox)]
    launch = _launch_of(overload, boxes[0].get_device()) if boxes else None
    if launch is None:
        return
    layouts = [_layout(box) for box in boxes]
    known = {
        id(box): None if at is None else _described(at.size, at.stride, at.dtype, at.offset)
        for box, at in zip(boxes, layouts, strict=True)
    }
    if all(known.values()):
        given = tree_map(lambda x: known.get(id(x), x), (args, options))
        ahead.compile_ahead(launch, overload.name(), boxes[0].get_device(), *given)


def _layout(box: ir.TensorBox) -> ir.Layout | None:
    """Describe a tensor in memory, a view of one included; contiguous where the operation is given a copy."""
    view = box.data
    if isinstance(view, ir.BaseView) and not isinstance(view, ir.ReinterpretView):
        try:
            return ir.ExternKernel.convert_to_reinterpret_view(view).get_layout()
        except NotImplementedError:
            size = box.get_size()
            return ir.FixedLayout(box.get_device(), box.get_dtype(), size, ir.FlexibleLayout.contiguous_strides(size))
    return box.maybe_get_layout()


def of_node(node: fx.Node) -> None:
    """Compile ahead for a call in a graph, by the fake tensors that it was traced with."""
    tensors = [n.meta.get("val") for n in node.all_input_nodes]
    if not tensors or not all(isinstance(x, torch.Tensor) for x in tensors):
        return
    launch = _launch_of(node.target, tensors[0].device)
    if launch is None:
        return
    described = [_described(x.shape, x.stride(), x.dtype, x.storage_offset()) for x in tensors]
    if all(described):
        known = dict(zip(node.all_input_nodes, described, strict=True))
        # One variant of a kernel serves all positions in a vector: it does not depend on the addresses of scales.
        positions = {name: value for name, value in node.kwargs.items() if name.endswith("_index") and value is not None}
        zeros = {name: [0] * len(v) if isinstance(v, (list, tuple)) else 0 for name, v in positions.items()}
        given = fx.map_arg((node.args, {**node.kwargs, **zeros}), known.__getitem__)
        ahead.compile_ahead(launch, node.target.name(), tensors[0].device, *given)


def _launch_of(overload: Any, device: torch.device) -> Callable[..., Any] | None:
    """The function that launches kernels for an operation, if one does on the device."""
    operation = NAMESPACE.find(overload)
    assert operation is not None
    if device.type != "cuda" or operation.name.startswith("scaled_"):
        return None
    launch = operation.implementation(device)
    if launch is operation.reference:
        return None
    return functools.partial(_launch_picked, operation, launch) if operation.indexed else launch


def _launch_picked(operation: Any, launch: Callable[..., Any], *args: Any, **options: Any) -> None:
    given, rest = operation.picked(args, options)
    launch(*given, **rest)


def _described(size: Any, stride: Any, dtype: torch.dtype, offset: Any) -> Described | None:
    """None where sizes are dynamic: what they are divisible by is not known."""
    return ahead.described(size, stride, dtype, offset) if all(map(_is_known, (*size, *stride, offset))) else None


def _is_known(size: Any) -> bool:
    """True if a size is a number, of Python's or of Inductor's, and not a symbol."""
    return isinstance(size, int) or bool(getattr(size, "is_Integer", False))
