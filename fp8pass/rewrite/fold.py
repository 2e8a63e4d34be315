"""Fold: an operation of ours that reads an element of a vector reads the vector, with the element's position.

Delayed scaling takes the scales of a whole graph from one vector. A node for each of them and for its reciprocal would be a
third of what the pass adds to a graph: all that comes after it, the partitioner first, would take time for each, and forward
would save each for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass.graph.values import value_of
from lowering.operation import NAMESPACE

aten = torch.ops.aten


def fold_elements(graph: fx.Graph) -> None:
    """In place; removes the elements that nothing else reads."""
    elements: dict[fx.Node, None] = {}
    for node in graph.nodes:
        for name, position in _indexed(node).items():
            read: Any = node.args[position]
            is_list = isinstance(read, (list, tuple))
            scalars = list(read) if is_list else [read]
            found = [scalar for scalar in scalars if _is_element(scalar)]
            if f"{name}_index" in node.kwargs or not found:
                continue
            elements.update(dict.fromkeys(found))
            vectors = [scalar.args[0] if _is_element(scalar) else scalar for scalar in scalars]
            index = [scalar.args[2] if _is_element(scalar) else -1 for scalar in scalars]
            node.update_arg(position, vectors if is_list else vectors[0])
            node.update_kwarg(f"{name}_index", index if is_list else index[0])
    for element in elements:
        if not element.users:
            graph.erase_node(element)


def _indexed(node: fx.Node) -> dict[str, int]:
    """The arguments of a node that may be given as a vector and a position, with their places in its args."""
    operation = NAMESPACE.find(node.target)
    indexed = {} if operation is None else operation.indexed
    return {name: position for name, position in indexed.items() if position < len(node.args)}


def _is_element(node: fx.Node) -> bool:
    if node.target is not aten.select.int:
        return False
    vector, _, position = node.args
    return value_of(vector).dim() == 1 and isinstance(position, int) and position >= 0  # type: ignore[arg-type]
