"""Routing: whether a GEMM's result decides which rows are taken, as a router of experts does. Reads only.

Two walks. The first goes from the result through what makes scores of logits to an operation that chooses. The second goes from
what was chosen to an operation that takes rows by it: an index into a matrix, a product with a mask, a mask that switches rows
on and off. A choice that is only compared with labels, or that takes entries of the scores themselves, takes no rows: metrics,
predictions and losses.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import fx

from fp8pass.graph.kinds import is_matmul
from fp8pass.graph.values import PERMUTES, RESHAPES, argument, same_size, value_of

aten = torch.ops.aten
prims = torch.ops.prims

VIEWS = (
    RESHAPES
    | PERMUTES
    | {
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten._to_copy.default,
        prims.convert_element_type.default,
        operator.getitem,
    }
)
#: What lies between a router's logits and the choice, besides views and pointwise operations.
_SCORES = frozenset(
    {
        "_softmax",
        "_log_softmax",
        "softmax",
        "log_softmax",
        "amax",
        "max",
        "mean",
        "sum",
        "cumsum",
        "topk",
        "sort",
        "scatter",
        "scatter_",
        "scatter_add",
        "masked_fill",
        "where",
        "cat",
        "gather",
    }
)
#: Operations that choose -> which of their outputs says what was chosen (None: the operation has one output).
_CHOICES = {"topk": 1, "sort": 1, "max": 1, "min": 1, "argmax": None, "argmin": None, "multinomial": None}
#: Operations that read or write at an index -> positions of the tensor and of the index among their arguments.
_INDEXED = {
    "index": (0, 1),
    "index_select": (0, 2),
    "index_put": (0, 1),
    "index_put_": (0, 1),
    "index_add": (0, 2),
    "index_add_": (0, 2),
    "embedding": (0, 1),
    "gather": (0, 2),
    "scatter": (0, 2),
    "scatter_": (0, 2),
    "scatter_add": (0, 2),
}
_ELEMENTWISE = frozenset({"gather", "scatter", "scatter_", "scatter_add"})

_Kind = Literal["index", "mask", "other"]


def name_of(node: fx.Node) -> str:
    """Name of an operation without its namespace and overload, "" for what is no operator."""
    return node.target._opname if isinstance(node.target, torch._ops.OpOverload) else ""


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result depends on the elements of its own position."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def keeps_elements(node: fx.Node) -> bool:
    """Whether a node is a view, a cast or pointwise."""
    return node.target in VIEWS or is_pointwise(node)


def leading_to(
    graph: fx.Graph, gradients: set[fx.Node], is_goal: Callable[[fx.Node], bool], passes: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """Goals of the forward, and the nodes from which one is reached through nodes that `passes` accepts: in one sweep, so that
    GEMMs from which none is reached cost nothing more, however long the residual stream behind them is."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in gradients and (is_goal(node) or (passes(node) and any(user in found for user in node.users))):
            found.add(node)
    return found


def leading_to_choices(graph: fx.Graph, gradients: set[fx.Node]) -> set[fx.Node]:
    """The nodes from which scores lead to an operation that chooses."""
    return leading_to(graph, gradients, lambda node: name_of(node) in _CHOICES, _makes_scores)


def _makes_scores(node: fx.Node) -> bool:
    name = name_of(node)
    return name in _SCORES or name in _CHOICES or keeps_elements(node)


def choice_of(gemm: fx.Node, leading: set[fx.Node], gradients: set[fx.Node], data: set[fx.Node]) -> str | None:
    """The operation that chooses rows by a GEMM's result, or None.

    leading: what `leading_to_choices` found. gradients: the nodes of the backward. data: the nodes that depend on an input of
    the graph.
    """
    if leading.isdisjoint(gemm.users):
        return None
    made = _scores_of(gemm, gradients)
    for node in made:
        name = name_of(node)
        if name in _CHOICES and any(_takes_rows(i, name, made, gradients, data) for i in _indices(node)):
            return name
    return None


def _scores_of(gemm: fx.Node, gradients: set[fx.Node]) -> dict[fx.Node, None]:
    """What is made of a GEMM's result in forward by views, pointwise operations and those of `_SCORES`."""
    found: dict[fx.Node, None] = {}
    pending = list(gemm.users)
    while pending:
        node = pending.pop()
        if node in found or node in gradients or node.op != "call_function":
            continue
        if _makes_scores(node):
            found[node] = None
            pending += node.users
    return found


def _indices(choice: fx.Node) -> list[fx.Node]:
    """Where a choosing operation says what it has chosen; of `max`, the form without a dimension does not."""
    position = _CHOICES[name_of(choice)]
    if isinstance(value_of(choice), torch.Tensor):
        return [choice] if position is None else []
    return [n for n in choice.users if n.target is operator.getitem and argument(n, 1) == position]


def _takes_rows(index: fx.Node, choice: str, made: dict[fx.Node, None], gradients: set[fx.Node], data: set[fx.Node]) -> bool:
    """Whether rows are taken by a chosen index: in this graph or, where it returns a mask or a top-k, in the next one."""
    kinds: dict[fx.Node, _Kind] = {index: "index"}
    own = {*made, *following(index, gradients)}
    pending = [index]
    while pending:
        node = pending.pop()
        kind = kinds[node]
        for user in node.users:
            if user.op == "output":  # of a joint graph it is among the gradients, too
                if kind == "mask" or (kind == "index" and choice in ("topk", "sort")):
                    return True
                continue
            if user in kinds or user in gradients:
                continue
            if _takes(user, node, kind, made) or _switches_rows(user, node, own):
                return True
            kinds[user] = _kind_of(user, node, kind, own, data)
            pending.append(user)
    return False


def following(node: fx.Node, gradients: set[fx.Node]) -> set[fx.Node]:
    """A node and everything in forward that depends on it."""
    found, pending = {node}, [node]
    while pending:
        new = [n for n in pending.pop().users if n not in found and n not in gradients]
        found.update(new)
        pending += new
    return found


def _takes(user: fx.Node, node: fx.Node, kind: _Kind, made: dict[fx.Node, None]) -> bool:
    """Whether an operation takes rows of a matrix, other than the scores, by an index, or multiplies a matrix with a mask."""
    if is_matmul(user):
        return True
    name = name_of(user)
    if name not in _INDEXED:
        return kind == "index" and _is_foreign(user)
    source, position = _INDEXED[name]
    tensor, index = argument(user, source), argument(user, position)
    is_index = node in index if isinstance(index, Sequence) else node is index
    if not is_index or tensor in made or value_of(tensor).dim() < 2:
        return False
    return name not in _ELEMENTWISE or not _is_along_last(user, tensor)


def _is_foreign(user: fx.Node) -> bool:
    """Whether an operation is neither ATen's nor a view: a custom one takes an index to use it."""
    return isinstance(user.target, torch._ops.OpOverload) and user.target.namespace not in ("aten", "prims")


def _is_along_last(node: fx.Node, tensor: fx.Node) -> bool:
    """Whether a gather or scatter moves elements within rows."""
    return argument(node, 1) in (-1, value_of(tensor).dim() - 1)


def _switches_rows(user: fx.Node, node: fx.Node, own: set[fx.Node]) -> bool:
    """Whether one number per row, [..., 1], multiplies or selects the rows [..., n] of something else."""
    if name_of(user) not in ("mul", "where", "masked_fill") or not _is_column(value_of(node)):
        return False
    others = [n for n in user.all_input_nodes if n not in own]
    return any(value_of(n).dim() >= 2 and not _is_column(value_of(n)) for n in others)


def _is_column(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and same_size(value.shape[-1], 1)


def _kind_of(user: fx.Node, node: fx.Node, kind: _Kind, own: set[fx.Node], data: set[fx.Node]) -> _Kind:
    name = name_of(user)
    if user.target in VIEWS:
        return kind
    if kind == "index":
        if name in ("sort", "cumsum"):
            return "index"
        if name in ("one_hot", "scatter", "scatter_") or _is_one_hot(user, node, data):
            return "mask"
    if kind == "mask" and (name == "cumsum" or is_pointwise(user)) and own.issuperset(user.all_input_nodes):
        return "mask"  # such as one without the tokens beyond an expert's capacity
    return "other"


def _is_one_hot(user: fx.Node, node: fx.Node, data: set[fx.Node]) -> bool:
    """Whether an index is compared with one position, or each with all: with something that depends on no input."""
    if name_of(user) not in ("eq", "ne"):
        return False
    others = [n for n in user.all_input_nodes if n is not node]
    if not others:
        return True
    spreads = _is_column(value_of(node)) and not _is_column(value_of(user))
    return spreads and others[0] not in data
