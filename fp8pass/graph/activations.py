"""SiLU as its forward is decomposed, and the sigmoid that its gradient computes.

The forward is x / (1 + exp(-x)), the gradient uses sigmoid(x). Where backward computes the activation again next to its
gradient, one kernel computes both, and they are the largest part of its instructions: x * sigmoid(x) shares one with the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass.graph.values import argument, value_of

aten = torch.ops.aten
prims = torch.ops.prims


def divided_silus(graph: fx.Graph) -> list[fx.Node]:
    """The nodes x / (1 + exp(-x)) of float32 x whose sigmoid the graph computes as well."""
    sigmoids = {_key(argument(n, 0)) for n in graph.find_nodes(op="call_function", target=aten.sigmoid.default)}
    divisions = graph.find_nodes(op="call_function", target=aten.div.Tensor)
    return [n for n in divisions if _is_silu(n) and _key(argument(n, 0)) in sigmoids]


def _is_silu(division: fx.Node) -> bool:
    x, divisor = division.args[:2]
    exponential = _argument_of(divisor, aten.add.Tensor, rest=(1,))
    negated = _argument_of(exponential, aten.exp.default)
    return x is not None and _argument_of(negated, aten.neg.default) is x and value_of(division).dtype == torch.float32


def _argument_of(node: Any, target: Any, rest: tuple[Any, ...] = ()) -> Any:
    """The first argument of a call of `target` whose others are `rest`; None for every other node."""
    is_call = isinstance(node, fx.Node) and node.target is target and node.args[1:] == rest and not node.kwargs
    return node.args[0] if is_call else None


def _key(x: fx.Node) -> Any:
    """Equal for equal values: forward and backward convert x to float32 each for itself."""
    return x.args if x.target is prims.convert_element_type.default else x
