"""The kernels of operations that run as they are: compiled while Inductor generates the rest of a graph's code.

GEMMs are left out: which one runs is found out at the first call, by trials.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor import ir
from torch.utils._pytree import tree_leaves, tree_map

from lowering.operation import NAMESPACE
from lowering.triton import ahead
from lowering.triton.ahead import Described


def of_boxes(overload: Any, args: Any, options: Any) -> None:
    """Of an operation on tensors of Inductor's."""

    def describe(box: ir.TensorBox) -> Described | None:
        layout = box.maybe_get_layout()
        return None if layout is None else _described(layout.size, layout.stride, layout.dtype, layout.offset)

    boxes = [x for x in tree_leaves((args, options)) if isinstance(x, ir.TensorBox)]
    known = {id(box): describe(box) for box in boxes}
    if boxes and all(known.values()):
        known_args, known_options = tree_map(lambda x: known.get(id(x), x), (args, options))
        _compile(overload, boxes[0].get_device(), known_args, known_options)


def of_node(node: fx.Node) -> None:
    """Of a call in a graph, by the fake tensors that it was traced with."""
    tensors = {n: n.meta.get("val") for n in node.all_input_nodes}
    known = {
        n: _described(x.shape, x.stride(), x.dtype, x.storage_offset())
        for n, x in tensors.items()
        if isinstance(x, torch.Tensor)
    }
    if len(known) == len(tensors) and all(known.values()):
        args, options = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        _compile(node.target, next(iter(tensors.values())).device, args, options)


def _described(size: Any, stride: Any, dtype: torch.dtype, offset: Any) -> Described | None:
    """None where sizes are dynamic: what they are divisible by is not known."""
    return ahead.described(size, stride, dtype, offset) if all(map(_is_known, (*size, *stride, offset))) else None


def _is_known(size: Any) -> bool:
    """Whether a size is a number, of Python's or of Inductor's, and no symbol."""
    return isinstance(size, int) or bool(getattr(size, "is_Integer", False))


def _compile(overload: Any, device: torch.device, args: Any, options: Any) -> None:
    operation = NAMESPACE.operations[overload.overloadpacket.__name__]
    launch = operation.implementation(device)
    if device.type == "cuda" and launch is not operation.reference and not operation.name.startswith("scaled_"):
        ahead.compile_ahead(launch, operation.name, device, args, options)
