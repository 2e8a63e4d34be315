"""What is done to a partitioned graph just before Inductor compiles it (`lowering.inductor.prepare`), checked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fp8pass.errors import InvariantError
from fp8pass.graph.values import value_of
from lowering.inductor import CASTS

#: Operation -> the one that may take its place, on float32 tensors of a GPU.
_CHEAPER = {torch.ops.aten.sigmoid.default: torch.ops.lowering.sigmoid.default}


def prepare_checked(graph: fx.Graph, prepare: Callable[[fx.Graph], None]) -> None:
    """Prepare a graph. Raises InvariantError if more became of it than cheaper operations with the same arguments, and
    statistics of a matrix that are given its FP8 copy, whose lowering knows the matrix."""
    before = [_call(node) for node in graph.nodes]
    prepare(graph)
    after = list(graph.nodes)
    if [node for node, *_ in before] != after:
        raise InvariantError("preparing the graph for Inductor added, removed or moved nodes")
    for node, target, args, kwargs in before:
        if (node.args, node.kwargs) != (args, kwargs) and not _reads_a_copy(node, args, kwargs):
            raise InvariantError(f"{node.name} reads {node.args} {node.kwargs}, before it was prepared {args} {kwargs}")
        if node.target == target:
            continue
        if _CHEAPER.get(target) != node.target:
            raise InvariantError(f"{node.name} calls {node.target} in the place of {target}")
        value = value_of(node)
        if value.dtype != torch.float32 or value.device.type != "cuda":
            raise InvariantError(f"{node.name} calls {node.target} on {value.dtype} on {value.device}")


def _reads_a_copy(node: fx.Node, args: Any, kwargs: Any) -> bool:
    """Whether nothing but the matrix of statistics was replaced, by the result of a cast at the matrix' position."""
    is_measured = node.target is torch.ops.lowering.quantization_statistics.default
    if not is_measured or (node.args[1:], node.kwargs) != (args[1:], kwargs):
        return False
    copy = node.args[0]
    if not isinstance(copy, fx.Node) or copy.target is not operator.getitem:
        return False
    cast, position = copy.args
    matrices = cast.args[0] if isinstance(cast, fx.Node) and cast.target in CASTS else ()
    return isinstance(position, int) and isinstance(matrices, Sequence) and args[0] in matrices[position : position + 1]


def _call(node: fx.Node) -> tuple[fx.Node, Any, Any, Any]:
    return node, node.target, node.args, node.kwargs
