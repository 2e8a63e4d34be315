"""Select: the GEMMs that no rule names and that stay in high precision by default. Reads only.

`routing`  the result decides a choice of rows: a router of experts
`head`     the output embedding
`thin`     n or k below 32, such as LoRA's adapters
All three are found by structure, never by name, on the forward GEMM; its gradients follow it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fp8pass.graph.kinds import is_matmul
from fp8pass.graph.names import family
from fp8pass.graph.origin import input_index, is_tangent
from fp8pass.graph.sites import GemmSite, GraphContext
from fp8pass.graph.values import PERMUTES, RESHAPES, argument, depends_on, value_of
from fp8pass.reasons import Reason, ReasonKind

aten = torch.ops.aten
prims = torch.ops.prims

#: A forward GEMM with fewer columns, or a shorter K, has too little work for what its casts cost.
THIN = 32

_VIEWS = (
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
#: Operations whose result depends on rows that an index names.
_TAKES = frozenset(
    {
        "index",
        "index_select",
        "index_put",
        "index_put_",
        "index_add",
        "index_add_",
        "gather",
        "scatter",
        "scatter_add",
        "embedding",
        "one_hot",
        "histc",
        "bincount",
        "nonzero",
    }
)


def select(graph: fx.Graph, sites: Sequence[GemmSite], context: GraphContext) -> dict[fx.Node, Reason]:
    """GEMMs that stay in high precision unless a rule names them, each with the reason."""
    finder = _Finder(graph, context)
    chosen: dict[fx.Node, Reason] = {}
    for site in sites:
        if site.forward is not None:
            reason = chosen.get(site.forward)
        else:
            reason = None if site.is_backward or not site.operands else finder.reason(site)
        if reason is not None:
            chosen[site.node] = reason
    return chosen


class _Finder:
    """Follows what becomes of GEMMs' results. Invariant: never changes the graph."""

    def __init__(self, graph: fx.Graph, context: GraphContext):
        placeholders = graph.find_nodes(op="placeholder")
        self.gradients = depends_on(graph, {n for n in placeholders if is_tangent(n)})
        self.data = depends_on(graph, set(placeholders))
        self.embeddings = {
            n
            for n in placeholders
            if (i := input_index(n)) is not None and i < len(context.inputs) and context.inputs[i].is_embedding
        }

    def reason(self, site: GemmSite) -> Reason | None:
        """Why a forward GEMM stays, or None."""
        overrule = f"to overrule: rules={{{family(site.module)!r}: recipe}} or select='all'"
        if any(o.kind == "weight" for o in site.operands):
            choice = self._choice(site.node)
            if choice is not None:
                return Reason(ReasonKind.ROUTING, f"the result chooses rows ({choice}); {overrule}")
            if any(o.value.root in self.embeddings for o in site.operands):
                return Reason(
                    ReasonKind.HEAD, f"the weight is the model's output embedding, or tied to an embedding; {overrule}"
                )
        if self._feeds_cross_entropy(site.node):
            return Reason(ReasonKind.HEAD, f"the result feeds a log-softmax over its columns; {overrule}")
        for name, size in (("n", site.n), ("k", site.k)):
            if isinstance(size, int) and size < THIN:
                return Reason(ReasonKind.THIN, f"{name} is {size}, less than {THIN}; {overrule}")
        return None

    # -- routing

    def _choice(self, gemm: fx.Node) -> str | None:
        """The operation that chooses rows by a GEMM's result, or None."""
        for node in self._slice(gemm):
            name = _name(node)
            if name not in _CHOICES:
                continue
            position = _CHOICES[name]
            if isinstance(value_of(node), torch.Tensor):  # of `max`, the form without a dimension has no index
                outputs = [node] if position is None else []
            else:
                outputs = [n for n in node.users if n.target is operator.getitem and argument(n, 1) == position]
            if any(self._takes_rows(output, name) for output in outputs):
                return name
        return None

    def _slice(self, gemm: fx.Node) -> list[fx.Node]:
        """What is made of a GEMM's result in forward by views, pointwise operations and those of `_SCORES`."""
        found: dict[fx.Node, None] = {}
        pending = list(gemm.users)
        while pending:
            node = pending.pop()
            if node in found or node in self.gradients or node.op != "call_function":
                continue
            name = _name(node)
            if name in _SCORES or name in _CHOICES or node.target in _VIEWS or _is_pointwise(node):
                found[node] = None
                pending += node.users
        return list(found)

    def _takes_rows(self, index: fx.Node, choice: str) -> bool:
        """Whether rows are taken by a chosen index: in this graph, or, for a top-k that the graph returns as it is, in the
        next one. That is not so where it is only compared with labels."""
        seen: set[fx.Node] = set()
        pending: list[tuple[fx.Node, bool]] = [(user, True) for user in index.users]
        while pending:
            node, is_index = pending.pop()
            if node in seen or node in self.gradients:
                continue
            seen.add(node)
            if node.op == "output":
                if is_index and choice in ("topk", "sort"):
                    return True
                continue
            if is_matmul(node) or _name(node) in _TAKES or self._is_one_hot(node):
                return True
            stays_index = is_index and (node.target in _VIEWS or _name(node) in ("sort", "cumsum"))
            pending += [(user, stays_index) for user in node.users]
        return False

    def _is_one_hot(self, node: fx.Node) -> bool:
        """Whether an index is compared with all positions: with something that depends on no input."""
        return _name(node) in ("eq", "ne") and any(n not in self.data for n in node.all_input_nodes)

    # -- the head

    def _feeds_cross_entropy(self, gemm: fx.Node) -> bool:
        """Whether a log-softmax over the GEMM's columns follows, decomposed or not."""
        seen: set[fx.Node] = set()
        pending = list(gemm.users)
        while pending:
            node = pending.pop()
            if node in seen or node in self.gradients or node.op != "call_function":
                continue
            seen.add(node)
            if _name(node) in ("_log_softmax", "log_softmax", "logsumexp"):
                if _is_last_dim(node):
                    return True
            elif _name(node) == "exp" and _log_of_sum(node):
                return True
            elif (node.target in _VIEWS or _is_pointwise(node)) and _keeps_columns(node):
                pending += node.users
        return False


def _name(node: fx.Node) -> str:
    return node.target._opname if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _is_last_dim(node: fx.Node) -> bool:
    dims: Any = argument(node, 1)
    last = value_of(node.all_input_nodes[0]).dim() - 1
    return all(dim in (-1, last) for dim in (dims if isinstance(dims, Iterable) else [dims]))


def _log_of_sum(exp: fx.Node) -> bool:
    """exp(x - max) whose sum over the last dimension is turned into a logarithm."""
    for total in exp.users:
        if _name(total) == "sum" and len(total.args) > 1 and _is_last_dim(total):
            following = list(total.users)
            while following:
                node = following.pop()
                if _name(node) == "log":
                    return True
                if node.target in _VIEWS:
                    following += node.users
    return False


def _keeps_columns(node: fx.Node) -> bool:
    """Whether the last dimension is still the GEMM's columns, all or some of them."""
    source = node.all_input_nodes[0]
    if node.target in PERMUTES or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    before, after = value_of(source), value_of(node)
    if node.target is aten.slice.Tensor:
        return True
    return bool(after.dim()) and bool(before.dim()) and after.shape[-1] == before.shape[-1]
