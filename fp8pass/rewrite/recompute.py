"""Plan recomputation: which FP8 copies backward makes itself, because what they are made of is available there. Reads only.

Forward saves tensors for backward in high precision anyway: the inputs of a norm or an activation for their own
gradients, q, k, v and the result of attention. A columnwise copy that only grad_weight reads and that pointwise code makes of
such tensors costs nothing to keep: backward computes the value again, fused with the gradient's own code, and quantizes it
there with forward's scale. Saving it would cost one byte per element.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Set
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.graph.cursor import is_recomputed
from fp8pass.graph.kinds import operation_of
from fp8pass.graph.origin import is_tangent
from fp8pass.graph.values import PERMUTES, RESHAPES, depends_on, row_gather, value_of
from fp8pass.options import WeightCopies
from fp8pass.rewrite.plan import Plan
from fp8pass.schemes import scheme_of
from fp8pass.schemes.copies import QuantizedTensor

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

#: weight_copies="auto": from this M on the copy of a weight is recomputed. By estimate (no GPU has run it: 4.3 TB/s, 1300
#: TFLOP/s) reading a bfloat16 weight once more takes an H200 2.5 % of the time that its three FP8 GEMMs take at M = 4096, and
#: half of that whenever M doubles; saving the copy takes one byte per parameter until backward.
#: Copies of experts' weights are recomputed in any case: an expert has few rows, but the experts have most of a model's
#: parameters, and a byte for each would be more than everything else that is saved.
MANY_ROWS = 4096


def plan_recomputation(graph: fx.Graph, plan: Plan, weight_copies: WeightCopies) -> Plan:
    """The plan with the values whose backward-only copies are made in backward. None in inference."""
    tangents = {n for n in graph.find_nodes(op="placeholder") if is_tangent(n)}
    if not tangents:
        return plan
    moved = {t for g in plan.gathers if g.reason is None for t in g.tensors}
    kept = {copy.tensor for copy in plan.kept}
    tensors = [t for t in plan.copies if t not in moved and t not in kept]
    weights = frozenset(_recomputed_weights(plan, tensors, weight_copies))
    if any(is_recomputed(n) for n in graph.nodes):  # the user's own activation checkpointing takes precedence
        return dataclasses.replace(plan, recomputed_weights=weights)
    finder = _Finder(graph, plan, depends_on(graph, tangents))
    chains = {t.value.root: chain for t in tensors if (chain := finder.chain(t)) is not None}
    return dataclasses.replace(plan, recomputed=chains, recomputed_weights=weights)


def _recomputed_weights(plan: Plan, tensors: list[QuantizedTensor], choice: WeightCopies) -> list[QuantizedTensor]:
    """Backward has Parameters, but not those that were gathered from other ranks."""
    rows = {d.b.tensor: _hint(d.site.m) for d in plan.rewritten if d.b is not None and d.site.role == "output"}
    weights = [t for t in tensors if t.name.kind == "weight" and t.value.root.op == "placeholder"]
    return [
        t
        for t in weights
        if choice == "recompute" or (choice != "save" and (t.value.batch is not None or rows.get(t, 0) >= MANY_ROWS))
    ]


def _hint(size: Any) -> int:
    """A size, or what a symbolic one was when traced; 0 where it is unknown. Adds no guard."""
    return size if isinstance(size, int) else size.node.hint or 0


class _Finder:
    """Follows values of the forward back to what is available in backward. Invariant: never changes the graph."""

    def __init__(self, graph: fx.Graph, plan: Plan, gradients: set[fx.Node]):
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.gradients = gradients
        self.gemms = {d.site.node for d in plan.rewritten}
        pairs = {operation_of(node) for node in self.gemms}
        self.gemms |= {node for node in pairs if all(user in self.gemms for user in node.users)}
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
        is_fused = scheme_of(tensor.quantization).fuses_with_producer(tensor)
        is_written = not is_fused and not all(node.target in _VIEWS for node in chain)
        if is_written and tensor.value.groups is None:
            return None  # the value would be written in high precision once more; rows in groups are larger, with their padding
        return frozenset(chain)

    def _serves_only(self, node: fx.Node, chain: Set[fx.Node] = frozenset()) -> bool:
        """Whether nothing in forward reads a node but the chain and FP8 GEMMs: a residual sum, say, is saved and not summed up
        again."""
        return all(user in chain or user in self.gradients or self._leads_to_gemms(user) for user in node.users)

    def _leads_to_gemms(self, node: fx.Node) -> bool:
        passes = node.target in _FUSIBLE or row_gather(node) is not None
        return node in self.gemms or (passes and bool(node.users) and self._serves_only(node))


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
