"""Remake: which FP8 copies backward makes itself, because it has what they are made of at hand. Reads only.

Forward saves tensors for backward in high precision whatever we do: the inputs of a norm or an activation for their own
gradients, q, k, v and the result of attention. A columnwise copy that only grad_weight reads and that pointwise code makes of
such tensors costs nothing to keep: backward computes the value again, fused with the gradient's own code, and quantizes it
there with forward's scale. Saving it would cost one byte per element.
"""

from __future__ import annotations

import heapq
from collections.abc import Set
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.graph.origin import is_tangent
from fp8pass.graph.values import PERMUTES, RESHAPES, depends_on, value_of
from fp8pass.rewrite.insertion import is_recomputed
from fp8pass.rewrite.plan import Plan, QuantizedTensor

aten = torch.ops.aten
prims = torch.ops.prims

_VIEWS = (
    RESHAPES
    | PERMUTES
    | {
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.select.int,
        aten.slice.Tensor,
    }
)
#: Besides what ATen tags as pointwise: casts, copies and views, which Inductor fuses as well.
_FUSIBLE = _VIEWS | {prims.convert_element_type.default, aten._to_copy.default, aten.clone.default}
#: A tensor this many times smaller than what is made of it, such as a norm's rstd, costs nothing to save.
_SMALL = 16

Chains = dict[fx.Node, frozenset[fx.Node]]
"""Node that holds a value -> the nodes that backward computes again to have it: none where it is saved anyway."""


def remade_in_backward(graph: fx.Graph, plan: Plan) -> Chains:
    """The values whose backward-only copies are made in backward. Empty where activation checkpointing decides already what
    is computed again, and in inference."""
    tangents = {n for n in graph.find_nodes(op="placeholder") if is_tangent(n)}
    if not tangents or any(is_recomputed(n) for n in graph.nodes):
        return {}
    finder = _Finder(graph, plan, depends_on(graph, tangents))
    chains = ((t.value.root, finder.chain(t)) for t in plan.copies)
    return {root: chain for root, chain in chains if chain is not None}


class _Finder:
    """Follows values of the forward back to what is at hand. Invariant: never changes the graph."""

    def __init__(self, graph: fx.Graph, plan: Plan, gradients: set[fx.Node]):
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.gradients = gradients
        self.gemms = {d.site.node for d in plan.rewritten}
        self.kept = self._kept()

    def _kept(self) -> set[fx.Node]:
        """What backward reads besides copies in FP8, and what pointwise code makes that of: the partitioner saves it, or
        something of its size."""
        readers = [n for n in self.gradients - self.gemms if n.op != "output"]
        pending = [n for reader in readers for n in reader.all_input_nodes if n not in self.gradients]
        kept: set[fx.Node] = set()
        while pending:
            node = pending.pop()
            if node not in kept and _is_tensor(node):
                kept.add(node)
                if _is_fusible(node):
                    pending += node.all_input_nodes
        return kept

    def chain(self, tensor: QuantizedTensor) -> frozenset[fx.Node] | None:
        """The nodes to compute again; None if that would need a tensor that backward does not have."""
        root = tensor.value.root
        if root in self.gradients or tensor.name.kind == "weight":
            return None
        size = value_of(root).numel()
        chain: set[fx.Node] = set()
        pending = [(-self.position[root], root)]  # latest first: all readers of a node within the chain come before it
        while pending:
            _, node = heapq.heappop(pending)
            if node in chain:
                continue
            if _is_fusible(node) and self._serves_only(node, chain):
                chain.add(node)
                for read in node.all_input_nodes:
                    heapq.heappush(pending, (-self.position[read], read))
            elif not (node in self.kept or _is_small(node, size)):
                return None
        if tensor.recipe.is_blockwise and not all(node.target in _VIEWS for node in chain):
            return None  # its casts do not fuse with what they read, so the value would be written in high precision once more
        return frozenset(chain)

    def _serves_only(self, node: fx.Node, chain: Set[fx.Node] = frozenset()) -> bool:
        """Whether nothing in forward reads a node but the chain and FP8 GEMMs: a residual sum, say, is saved and not summed up
        again."""
        return all(user in chain or user in self.gradients or self._leads_to_gemms(user) for user in node.users)

    def _leads_to_gemms(self, node: fx.Node) -> bool:
        return node in self.gemms or (node.target in _FUSIBLE and bool(node.users) and self._serves_only(node))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_fusible(node: fx.Node) -> bool:
    """Whether Inductor fuses the node into its readers, with the same result each time. Masks are not looked through: they are
    smaller than what they are made of, which may be random."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not _is_tensor(node):
        return False
    tags = node.target.tags
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return value_of(node).dtype is not torch.bool and (is_pointwise or node.target in _FUSIBLE)


def _is_small(node: fx.Node, size: Any) -> bool:
    return not _is_tensor(node) or bool(statically_known_true(value_of(node).numel() * _SMALL <= size))
