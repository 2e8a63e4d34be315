"""Which scale a node holds: scales and their reciprocals come in pairs, from one operation, as scalars or as vectors.

An operation reads an element of a vector through a node that picks it, or reads the vector with a position
(`fp8pass.rewrite.fold`). A place is the same for both.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
ops = torch.ops.lowering

#: Operations that return scales and their reciprocals.
_PAIRS = {ops.load_scales.default, ops.scales_from_amax.default}
#: What repeats a scale or gives it another shape.
_VIEWS = {aten.reshape.default, aten.expand.default, aten.clone.default, aten.unsqueeze.default}

Place = tuple[Any, Any]
"""A node, and where in its result the scale is: None for all of it, a position, or the arguments of a slice."""


def place_of(node: fx.Node, index: int | None = None) -> Place:
    """Where an argument is. index: the position that the operation gives with it, if it reads a vector."""
    if index is not None and index >= 0:
        return node, index
    if node.target is aten.select.int:
        vector, _, position = node.args
        return vector, position
    if node.target is aten.slice.Tensor:
        vector, *rest = node.args
        return vector, tuple(rest)
    return node, None


def scale_at(place: Place) -> Place:
    """The operation that computed the scale at a place, and where in its result it is."""
    node, index = place
    return _of_pair(node, 0) or node, index


def inverse_at(place: Place) -> Place:
    """The same for the scale of which the reciprocal is at a place; (None, ...) if there is no reciprocal of a scale."""
    node, index = place
    if node.target in _VIEWS and index is None:
        return inverse_at(place_of(node.all_input_nodes[0]))
    if node.target is aten.reciprocal.default:
        return scale_at((node.args[0], index))
    return _of_pair(node, 1), index


def _of_pair(node: Any, position: int) -> Any:
    """The operation that made a pair of which a node is one; None for other nodes."""
    is_of_pair = node.target is operator.getitem and node.args[0].target in _PAIRS
    return node.args[0] if is_of_pair and node.args[1] == position else None
