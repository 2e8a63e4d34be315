"""Merge the reductions of amaxes over ranks: those of sharded Parameters are all known when a graph begins, and go as one.

With one scale per tensor or per column, a shard is quantized by the largest amax of all ranks. An all-reduce of a few bytes
costs a network's latency: one for all Parameters costs it once. An amax of an activation is known when its own tensor is, and
is reduced alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor, never_recompute, recomputation_of
from fp8pass.graph.origin import is_tangent
from fp8pass.graph.values import value_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
#: Operations that make the amaxes: a scalar of a tensor, a vector of columns.
_AMAXES = (torch.ops.lowering.amax.default, torch.ops.lowering.amax_rowwise.default)


def merge_reductions(graph: fx.Graph) -> None:
    """In place: the all-reduces of amaxes of Parameters' shards become one per group of ranks."""
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        chain = _chain_from_input(node)
        if node.args[1] == "max" and chain is not None:
            dims = value_of(node).dim()
            groups.setdefault((node.args[2], dims, recomputation_of(node.args[0])), []).append(node)
    for reductions in groups.values():
        if len(reductions) > 1:
            _merge(graph, reductions)


def _chain_from_input(reduction: fx.Node) -> list[fx.Node] | None:
    """The nodes that lead from an input of the graph to the bits of an amax that is reduced; None for other reductions."""
    bits: Any = reduction.args[0]
    if bits.target is not aten.view.dtype or bits.args[0].target not in _AMAXES:
        return None
    chain: list[fx.Node] = []
    node = bits
    while node.op == "call_function":
        chain.append(node)
        if len(node.all_input_nodes) != 1 or node.is_impure():
            return None
        node = node.all_input_nodes[0]
    return None if is_tangent(node) else chain[::-1]


def _merge(graph: fx.Graph, reductions: list[fx.Node]) -> None:
    first = reductions[0]
    position = {node: i for i, node in enumerate(graph.nodes)}
    for reduction in reductions[1:]:
        for node in _chain_from_input(reduction) or ():
            if position[node] > position[first]:
                first.prepend(node)
    is_backward = "backward" in str(first.meta.get("partitioner_tag"))
    cursor = Cursor.start(graph).at(first, is_backward)
    together = aten.cat.default if value_of(first).dim() else aten.stack.default
    bits = cursor.call(together, [reduction.args[0] for reduction in reductions])
    reduced = cursor.call(c10d.all_reduce.default, bits, "max", first.args[2])
    waited = cursor.call(c10d.wait_tensor.default, reduced)
    largest = cursor.call(aten.view.dtype, waited, torch.float32)
    never_recompute(bits, reduced, waited, largest)
    start = 0
    for i, reduction in enumerate(reductions):
        (wait,) = reduction.users
        (alone,) = wait.users
        assert value_of(alone).dtype == torch.float32
        if value_of(first).dim():
            part = cursor.call(aten.slice.Tensor, largest, 0, start, start + value_of(alone).shape[0])
            start += value_of(alone).shape[0]
        else:
            part = cursor.call(aten.select.int, largest, 0, i)
        never_recompute(part)
        alone.replace_all_uses_with(part)
    for reduction in reversed(reductions):  # the cursor stands before the first
        (wait,) = reduction.users
        (alone,) = wait.users
        for node in (alone, wait, reduction):
            graph.erase_node(node)
