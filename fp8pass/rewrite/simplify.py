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


def _is_backward(node: fx.Node) -> bool:
    return "backward" in str(node.meta.get("partitioner_tag"))


def gather_permuted_rows(scatters: Iterable[Scatter]) -> None:
    """Let a gather take the place of each scatter by a permutation (`graph.permutations`)."""
    for scatter in scatters:
        node = scatter.node
        cursor = Cursor.start(node.graph).at(node, _is_backward(node)).sharing(node)
        node.replace_all_uses_with(cursor.call(aten.index.Tensor, scatter.rows, [scatter.index]))
        node.graph.erase_node(node)


def share_sigmoids(nodes: Iterable[fx.Node]) -> None:
    """Compute each x / (1 + exp(-x)) as x * sigmoid(x) and each 1 / (1 + exp(-x)) as sigmoid(x), in place
    (`graph.activations`)."""
    for node in nodes:
        *_, divisor = node.all_input_nodes
        x = divisor.all_input_nodes[0].all_input_nodes[0].all_input_nodes[0]
        if node.target is aten.div.Tensor:
            cursor = Cursor.start(node.graph).at(node, _is_backward(node)).sharing(node)
            node.target, node.args = aten.mul.Tensor, (x, cursor.call(aten.sigmoid.default, x))
        else:
            node.target, node.args = aten.sigmoid.default, (x,)
        while divisor is not x and not divisor.users:
            (read,) = divisor.all_input_nodes
            node.graph.erase_node(divisor)
            divisor = read
