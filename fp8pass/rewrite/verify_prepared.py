"""What is done to a partitioned graph just before Inductor compiles it (`lowering.inductor.prepare`), checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp8pass.errors import InvariantError
from fp8pass.graph.values import value_of

#: Operation -> the one that may take its place, on float32 tensors of a GPU.
_CHEAPER = {torch.ops.aten.sigmoid.default: torch.ops.lowering.sigmoid.default}


def prepare_checked(graph: fx.Graph, prepare: Callable[[fx.Graph], None]) -> None:
    """Prepare a graph. Raises InvariantError if more became of it than cheaper operations with the same arguments."""
    before = [_call(node) for node in graph.nodes]
    prepare(graph)
    after = list(graph.nodes)
    if [node for node, *_ in before] != after:
        raise InvariantError("preparing the graph for Inductor added, removed or moved nodes")
    for node, target, args, kwargs in before:
        if (node.args, node.kwargs) != (args, kwargs):
            raise InvariantError(f"{node.name} reads {node.args} {node.kwargs}, before it was prepared {args} {kwargs}")
        if node.target == target:
            continue
        if _CHEAPER.get(target) != node.target:
            raise InvariantError(f"{node.name} calls {node.target} in the place of {target}")
        value = value_of(node)
        if value.dtype != torch.float32 or value.device.type != "cuda":
            raise InvariantError(f"{node.name} calls {node.target} on {value.dtype} on {value.device}")


def _call(node: fx.Node) -> tuple[fx.Node, Any, Any, Any]:
    return node, node.target, node.args, node.kwargs
