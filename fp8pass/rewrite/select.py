"""Select: the GEMMs that no rule names and that stay in high precision by default. Reads only.

`routing`  the result decides a choice of rows: a router of experts
`head`     the output embedding
`thin`     n or k below 32, such as LoRA's adapters
All three are found by structure, never by name, on the forward GEMM; its gradients follow it. `heads.py` finds heads whose loss
is outside of the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fp8pass.errors import Reason, ReasonKind
from fp8pass.graph.names import family
from fp8pass.graph.sites import GemmSite, GraphContext
from fp8pass.graph.values import PERMUTES, argument, depends_on, made_only_of, permutation, same_size, value_of
from fp8pass.rewrite.heads import Logits
from fp8pass.rewrite.routing import VIEWS, choice_of, keeps_elements, leading_to, leading_to_choices, name_of

aten = torch.ops.aten

#: A forward GEMM with fewer columns, or a shorter K, has too little work for what its casts cost.
THIN = 32

_LOG_SOFTMAX = ("_log_softmax", "log_softmax", "logsumexp")


@dataclasses.dataclass(frozen=True)
class Selection:
    """What was found in a graph."""

    reasons: dict[fx.Node, Reason] = dataclasses.field(default_factory=dict)
    """GEMMs that stay in high precision unless a rule names them."""
    heads: frozenset[fx.Node] = frozenset()
    """GEMMs that are a head, or that look like one without enough evidence to keep them in high precision."""


def select(graph: fx.Graph, sites: Sequence[GemmSite], context: GraphContext) -> Selection:
    """Routers, heads and thin GEMMs, each with the reason, and what else looks like a head."""
    finder = _Finder(graph, context)
    chosen: dict[fx.Node, Reason] = {}
    heads: set[fx.Node] = set()
    for site in sites:
        if site.forward is not None:
            reason, is_head = chosen.get(site.forward), site.forward in heads
        elif site.is_backward or not site.operands:
            continue
        else:
            reason = finder.reason(site)
            is_head = reason.kind is ReasonKind.HEAD if reason is not None else finder.logits.resembles(site)
        if reason is not None:
            chosen[site.node] = reason
        if is_head:
            heads.add(site.node)
    return Selection(chosen, frozenset(heads))


class _Finder:
    """Follows what becomes of GEMMs' results. Invariant: never changes the graph."""

    def __init__(self, graph: fx.Graph, context: GraphContext):
        placeholders = graph.find_nodes(op="placeholder")
        self.gradients = context.gradients_of(graph)
        self.data = depends_on(graph, set(placeholders))
        embeddings = {n for n, given in context.given(graph).items() if given.is_embedding}
        self.embeddings = made_only_of(graph, embeddings)
        self.leading_to_choices = leading_to_choices(graph, self.gradients)
        self.logits = Logits(graph, self.gradients, context)
        self.leading_to_logarithms = leading_to(graph, self.gradients, _is_log_softmax, keeps_elements)

    def reason(self, site: GemmSite) -> Reason | None:
        """Why a forward GEMM stays, or None."""
        override = f"to override: rules={{{family(site.module)!r}: recipe}} or select='all'"
        if any(o.kind == "weight" for o in site.operands):
            choice = choice_of(site.node, self.leading_to_choices, self.gradients, self.data)
            if choice is not None:
                return Reason(ReasonKind.ROUTING, f"the result selects rows ({choice}); {override}")
        if self._is_output_embedding(site):
            return Reason(ReasonKind.HEAD, f"the weight is the model's output embedding, or tied to an embedding; {override}")
        if self._feeds_cross_entropy(site.node):
            return Reason(ReasonKind.HEAD, f"the result feeds a log-softmax over its columns; {override}")
        if self.logits.are_made_by(site):
            return Reason(
                ReasonKind.HEAD,
                f"the result is an output of the graph, with a column per row of an embedding that its integer inputs index;"
                f" {override}",
            )
        for name, size in (("n", site.n), ("k", site.k)):
            if isinstance(size, int) and size < THIN:
                return Reason(ReasonKind.THIN, f"{name} is {size}, less than {THIN}; {override}")
        return None

    def _is_output_embedding(self, site: GemmSite) -> bool:
        """Whether activations are multiplied with every row of an embedding. An embedding may also be read as an activation:
        as learned queries, or to mix its rows."""
        assert site.a is not None
        assert site.b is not None
        left = site.a.value.root in self.embeddings and not site.a.transposed and site.b.kind == "input"
        right = site.b.value.root in self.embeddings and site.b.transposed and site.a.kind == "input"
        return left or right

    def _feeds_cross_entropy(self, gemm: fx.Node) -> bool:
        """Whether a log-softmax over the GEMM's columns follows, decomposed or not."""
        if self.leading_to_logarithms.isdisjoint(gemm.users):
            return False
        columns = {gemm: value_of(gemm).dim() - 1}
        pending = [gemm]
        while pending:
            source = pending.pop()
            dim = columns[source]
            for node in source.users:
                if node in columns or node in self.gradients or node.op != "call_function":
                    continue
                if name_of(node) in _LOG_SOFTMAX:
                    if _is_over(node, dim):
                        return True
                elif name_of(node) == "exp" and _is_log_of_sum(node, dim):
                    return True
                elif keeps_elements(node) and (after := _dim_after(node, source, dim)) is not None:
                    columns[node] = after
                    pending.append(node)
        return False


def _is_log_softmax(node: fx.Node) -> bool:
    """Whether a node is a log-softmax, over whatever dimension, or the exponential in a decomposed one."""
    return name_of(node) in _LOG_SOFTMAX or (
        name_of(node) == "exp" and any(_is_log_of_sum(node, dim) for dim in range(value_of(node).dim()))
    )


def _is_over(node: fx.Node, dim: int) -> bool:
    """Whether a reduction, or a softmax, runs over one dimension of its input."""
    dims: Any = argument(node, 1)
    num_dims = value_of(node.all_input_nodes[0]).dim()
    return [d % num_dims for d in (dims if isinstance(dims, Iterable) else [dims])] == [dim]


def _is_log_of_sum(exp: fx.Node, dim: int) -> bool:
    """Whether the sum of exp(x - max) over a dimension is turned into a logarithm."""
    following = [n for n in exp.users if name_of(n) == "sum" and len(n.args) > 1 and _is_over(n, dim)]
    while following:
        for node in following.pop().users:
            if name_of(node) == "log":
                return True
            if node.target in VIEWS:
                following.append(node)
    return False


def _dim_after(node: fx.Node, source: fx.Node, dim: int) -> int | None:
    """Which dimension of a view or pointwise result the columns are, all or some of them; None where they are mixed up."""
    before, after = value_of(source), value_of(node)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return dim  # the parts of a split, before and after one is picked
    if node.target in PERMUTES:
        order = permutation(node)
        return None if order is None else order.index(dim)
    if node.target is aten.slice.Tensor:
        return dim
    if node.target is aten.select.int:
        removed = int(argument(node, 1)) % before.dim()
        return None if removed == dim else dim - (removed < dim)
    behind = before.dim() - dim  # dimensions in front come and go: reshapes, broadcasting
    if after.dim() < behind:
        return None
    kept = zip(before.shape[dim:], after.shape[-behind:], strict=True)
    return after.dim() - behind if all(same_size(x, y) for x, y in kept) else None
