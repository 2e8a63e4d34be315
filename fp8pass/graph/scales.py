"""Which scale a node holds: scales and their reciprocals come in pairs, from one operation, as scalars or as vectors."""

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
"""The operation that computed a scale, and where in its result the scale is."""


def place_of_scale(scale: fx.Node | tuple[fx.Node, ...], position: int) -> Place:
    """The place of the scale that a cast reads, or of the scales of a stack. position: of one matrix among several, which have
    a scale each."""
    return _place(scale[position] if isinstance(scale, tuple) else scale, _maker)


def place_of_inverse(scale_inv: fx.Node) -> Place:
    """The place of the scale of which a node holds the reciprocal; (None, ...) if it is no reciprocal of a scale."""
    while scale_inv.target in _VIEWS:
        scale_inv = scale_inv.all_input_nodes[0]
    return _place(scale_inv, _maker_of_inverse)


def _place(node: fx.Node, maker: Any) -> Place:
    if node.target is aten.select.int:
        vector, _, index = node.args
        return maker(vector), index
    if node.target is aten.slice.Tensor:
        vector, *rest = node.args
        return maker(vector), tuple(rest)
    return maker(node), None


def _maker(node: Any) -> Any:
    is_of_pair = node.target is operator.getitem and node.args[0].target in _PAIRS
    return node.args[0] if is_of_pair and node.args[1] == 0 else node


def _maker_of_inverse(node: Any) -> Any:
    if node.target is aten.reciprocal.default:
        return _maker(node.args[0])
    is_of_pair = node.target is operator.getitem and node.args[0].target in _PAIRS
    return node.args[0] if is_of_pair and node.args[1] == 1 else None
