"""SiLU as its forward is decomposed, and the sigmoid that its gradient computes.

The forward is x / (1 + exp(-x)), the gradient uses sigmoid(x). Where backward computes the activation again next to its
gradient, one kernel computes both, and they are the largest part of its instructions: x * sigmoid(x) shares one with the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass.graph.values import value_of

aten = torch.ops.aten
prims = torch.ops.prims


def shared_sigmoids(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The nodes x / (1 + exp(-x)) of float32 x whose sigmoid the graph computes as well, and the nodes 1 / (1 + exp(-x)) of
    these x: torch before 2.13 writes the gradient's sigmoid so. With the x of each."""
    divisions, reciprocals = _calls(graph, aten.div.Tensor), _calls(graph, aten.reciprocal.default)
    silus = {n: x for n in divisions if (x := _negated_in(n.args[1])) is not None and x is n.args[0] and _is_float32(n)}
    spelled_out = {n: x for n in reciprocals if (x := _negated_in(n.args[0])) is not None and _is_float32(n)}
    known = {_key(x) for x in spelled_out.values()} | {_key(n.args[0]) for n in _calls(graph, aten.sigmoid.default)}
    shared = {_key(x) for x in silus.values()} & known
    return {n: x for n, x in (silus | spelled_out).items() if _key(x) in shared}


def _calls(graph: fx.Graph, target: Any) -> list[Any]:
    return list(graph.find_nodes(op="call_function", target=target))


def _is_float32(node: fx.Node) -> bool:
    return bool(value_of(node).dtype == torch.float32)


def _negated_in(divisor: Any) -> Any:
    """x of 1 + exp(-x); None for every other node."""
    exponential = _argument_of(divisor, aten.add.Tensor, rest=(1,))
    return _argument_of(_argument_of(exponential, aten.exp.default), aten.neg.default)


def _argument_of(node: Any, target: Any, rest: tuple[Any, ...] = ()) -> Any:
    """The first argument of a call of `target` whose others are `rest`; None for every other node."""
    is_call = isinstance(node, fx.Node) and node.target is target and node.args[1:] == rest and not node.kwargs
    return node.args[0] if is_call else None


def _key(x: fx.Node) -> Any:
    """Equal for equal values: forward and backward convert x to float32 each for itself."""
    return x.args if x.target is prims.convert_element_type.default else x
