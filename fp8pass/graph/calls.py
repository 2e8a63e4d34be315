"""Calls of operations by the names of their arguments, as their schemas have them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults of those that are not given; none for other nodes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    known = node.target._schema.arguments
    found = {a.name: a.default_value for a in known if a.has_default_value()}
    found.update(zip((a.name for a in known), node.args, strict=False))
    return {**found, **node.kwargs}


def maker_of(node: fx.Node) -> tuple[fx.Node, Any]:
    """The operation of which a node is a result, and which: None for all of it."""
    if node.target is operator.getitem:
        made: Any = node.args[0]
        return made, node.args[1]
    return node, None
