"""Group: what stands ready together becomes one launch. Changes no number; runs last, on a rewritten graph.

Weights are inputs of the graph, and the gradients of q, k and v come from one attention kernel: hand-written kernels
quantize them, and a kernel per matrix would be as many launches. In current scaling their amaxes and scales are
grouped too, and everywhere a scale and its reciprocal come from one operation.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

import lowering  # noqa: F401 (registers operations)
from fp8pass.graph.values import PERMUTES, RESHAPES
from fp8pass.rewrite.insertion import Inserter, inherit_recomputation

aten = torch.ops.aten
ops = torch.ops.lowering

_CASTS = (ops.cast_transpose.default, ops.cast_transpose_amax.default)
_VIEWS = RESHAPES | PERMUTES | {operator.getitem}


def group_casts(graph: fx.Graph) -> None:
    """Replace every group of casts by one operation."""
    insert = Inserter(graph)
    for node in graph.find_nodes(op="call_function", target=ops.scale_from_amax.default):
        _pair_with_reciprocal(graph, insert, node)
    groups: dict[tuple[Any, ...], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target in _CASTS and (key := _key(node)) is not None:
            groups[key].append(node)
    for casts in groups.values():
        if len(casts) > 1:
            _Group(graph, insert, casts).replace()
    graph.eliminate_dead_code()


def _pair_with_reciprocal(graph: fx.Graph, insert: Inserter, scale: fx.Node) -> None:
    """scale_from_amax and aten.reciprocal -> scales_from_amax. Triton's float32 division, which is what Inductor makes
    of the latter, does not round correctly."""
    backward = _is_backward(scale)
    pair = insert.call(scale, ops.scales_from_amax.default, *scale.args, backward=backward, **scale.kwargs)
    inherit_recomputation(pair, scale)
    items = [insert.item(scale, pair, i, backward) for i in (0, 1)]
    for reciprocal in [n for n in scale.users if n.target is aten.reciprocal.default]:
        reciprocal.replace_all_uses_with(items[1])
        graph.erase_node(reciprocal)
    scale.replace_all_uses_with(items[0])
    graph.erase_node(scale)


def _is_backward(node: fx.Node) -> bool:
    return "backward" in str(node.meta.get("partitioner_tag"))


def _source(x: fx.Node) -> fx.Node | str | None:
    """What makes x ready: "input" for inputs of the graph, or an attention node; None for what codegen may fuse
    with."""
    while x.target in _VIEWS:
        x = x.all_input_nodes[0]
    if x.op == "placeholder":
        return "input"
    return x if x.op == "call_function" and "attention" in str(x.target) else None


def _key(cast: fx.Node) -> tuple[Any, ...] | None:
    """Casts with equal keys can share an operation; None if this one cannot."""
    x, scale, dtype = cast.args
    source = _source(x)
    if source is None:
        return None
    if scale.target is aten.select.int:
        origin: tuple[Any, ...] = (scale.args[0],)
    elif scale.target is operator.getitem and scale.args[0].target is ops.scales_from_amax.default:
        pair = scale.args[0]
        amax = pair.args[0]
        if amax.target is not ops.amax.default or amax.args[0] is not x or len(amax.users) > 1:
            return None
        origin = (pair.target, *pair.args[1:], *sorted(pair.kwargs.items()))
    else:
        return None
    tags = (cast.meta.get(k) for k in ("partitioner_tag", "recompute", "ac_graph_id"))
    return (source, x.meta["val"].device, dtype, *sorted(cast.kwargs.items()), origin, *tags)


class _Group:
    """The edits of one group. New nodes stand where its first cast, in current scaling its first amax, stood."""

    def __init__(self, graph: fx.Graph, insert: Inserter, casts: list[fx.Node]):
        self.graph = graph
        self.insert = insert
        self.casts = casts
        self.is_current = casts[0].args[1].target is not aten.select.int
        pairs = [c.args[1].args[0] for c in casts] if self.is_current else []
        self.amaxes = [pair.args[0] for pair in pairs]
        self.pairs = pairs
        order = {node: i for i, node in enumerate(graph.nodes)}
        self.before = min(self.amaxes or casts, key=order.__getitem__)
        self.is_backward = _is_backward(self.before)
        self.order = order

    def replace(self) -> None:
        for cast in self.casts:
            self._hoist(cast.args[0])
        scales = self._computed_scales() if self.is_current else self._loaded_scales()
        xs = [c.args[0] for c in self.casts]
        target = ops.multi_cast_transpose_amax.default
        node = self._call(target, xs, scales, self.casts[0].args[2], **self.casts[0].kwargs)
        count = len(self.casts)
        amaxes = self._item(node, 2 * count) if self.casts[0].target is ops.cast_transpose_amax.default else None
        replaced: list[fx.Node] = []
        for i, cast in enumerate(self.casts):
            for item in cast.users:
                index = item.args[1]
                is_data = index < 2
                new = self._item(node, index * count + i) if is_data else self._call(aten.select.int, amaxes, 0, i)
                item.replace_all_uses_with(new)
                replaced.append(item)
        for unused in (*replaced, *self.casts, *self.pairs, *self.amaxes):
            self.graph.erase_node(unused)

    def _hoist(self, node: fx.Node) -> None:
        """Move a chain of views, and the sizes they are given, in front of the group."""
        if self.order.get(node, -1) > self.order[self.before]:
            for read in node.all_input_nodes:
                self._hoist(read)
            self.before.prepend(node)
            del self.order[node]

    def _loaded_scales(self) -> fx.Node:
        selected = [c.args[1] for c in self.casts]
        return self._call(ops.take.default, selected[0].args[0], [s.args[2] for s in selected])

    def _computed_scales(self) -> fx.Node:
        amaxes = self._call(ops.multi_amax.default, [c.args[0] for c in self.casts])
        first = self.pairs[0]
        pair = self._call(first.target, amaxes, first.args[1], **first.kwargs)
        vectors = [self._item(pair, i) for i in (0, 1)]
        for i, old in enumerate(self.pairs):
            for item in list(old.users):
                item.replace_all_uses_with(self._call(aten.select.int, vectors[item.args[1]], 0, i))
                self.graph.erase_node(item)
        return vectors[0]

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.insert.call(self.before, target, *args, backward=self.is_backward, **kwargs)
        inherit_recomputation(node, self.casts[0])
        return node

    def _item(self, node: fx.Node, index: int) -> fx.Node:
        return self.insert.item(self.before, node, index, self.is_backward)
