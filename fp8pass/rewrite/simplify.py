"""Simplify: edits that leave a graph's results as they are, so that more of it fuses with quantization; not in the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor
from fp8pass.graph.permutations import Scatter

aten = torch.ops.aten


def merge_equal_gathers(same: Mapping[fx.Node, fx.Node]) -> None:
    """Let readers of one shard share its gather: every key's readers read its value instead (`graph.gathers.equal_gathers`)."""
    for node, known in same.items():
        node.replace_all_uses_with(known)
        node.graph.erase_node(node)


def gather_permuted_rows(graph: fx.Graph, scatters: Iterable[Scatter]) -> dict[fx.Node, Scatter]:
    """Let a gather take the place of each scatter by a permutation (`graph.permutations`); returns the scatter by gather."""
    start, gathers = Cursor.start(graph), {}
    for scatter in scatters:
        node = scatter.node
        cursor = start.at(node, _is_backward(node)).sharing(node)
        gather = cursor.call(aten.index.Tensor, scatter.rows, [scatter.index])
        node.replace_all_uses_with(gather)
        graph.erase_node(node)
        gathers[gather] = scatter
    return gathers


def share_sigmoids(graph: fx.Graph, shared: Mapping[fx.Node, fx.Node]) -> None:
    """Compute each x / (1 + exp(-x)) as x * sigmoid(x) and each 1 / (1 + exp(-x)) as sigmoid(x), in place. shared: x by node
    (`graph.activations`)."""
    start = Cursor.start(graph)
    for node, x in shared.items():
        unused = node.all_input_nodes[-1]
        if node.target is aten.div.Tensor:
            cursor = start.at(node, _is_backward(node)).sharing(node)
            node.target, node.args = aten.mul.Tensor, (x, cursor.call(aten.sigmoid.default, x))
        else:
            node.target, node.args = aten.sigmoid.default, (x,)
        while unused is not x and not unused.users:
            (read,) = unused.all_input_nodes
            graph.erase_node(unused)
            unused = read


def _is_backward(node: fx.Node) -> bool:
    return "backward" in str(node.meta.get("partitioner_tag"))
