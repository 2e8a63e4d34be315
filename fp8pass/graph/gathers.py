"""All-gathers in a graph: which there are, which are equal, and how other data travels the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor, never_recompute, recomputation_of
from fp8pass.graph.moves import MOVES, is_gathered
from fp8pass.graph.origin import is_tangent
from fp8pass.graph.values import value_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclasses.dataclass(frozen=True)
class Gather:
    """An all-gather: every rank's shard, put together along the first dimension."""

    wait: fx.Node
    """The node that holds the gathered tensor."""
    collective: fx.Node
    source: fx.Node
    """This rank's shard."""
    num_ranks: int
    group: Any
    """The process group, as the collective names it."""
    shares_scales: bool
    """Whether delayed scaling has equal scales on all its ranks."""

    @classmethod
    def read(cls, wait: fx.Node, shares_scales: Callable[[Any], bool]) -> Gather:
        """The gather that a node waits for; `shares_scales` answers for its group."""
        collective: Any = wait.args[0]
        source, num_ranks, group = collective.args
        return cls(wait, collective, source, num_ranks, group, shares_scales(group))

    def shard_as_matrix(self, cursor: Cursor) -> fx.Node:
        """The shard [rows, last]."""
        source = self.source
        dims = value_of(source).dim()
        if dims == 2:
            return source
        return cursor.call(aten.reshape.default, source, [-1, cursor.size(source, dims - 1)])

    def send(self, cursor: Cursor, local: fx.Node) -> fx.Node:
        """Gather other data the way the tensor was gathered."""
        gathered = cursor.call(c10d.all_gather_into_tensor.default, local, self.num_ranks, self.group)
        waited = cursor.call(c10d.wait_tensor.default, gathered)
        for node in (gathered, waited):
            if "recompute" not in node.meta:
                never_recompute(node)
        return waited

    def largest_of_ranks(self, cursor: Cursor, amax: fx.Node) -> fx.Node:
        """The largest of all ranks' amaxes.

        As int32 the bit patterns of magnitudes are ordered with NaN on top; as floats, MAX may lose NaN on some ranks.
        """
        plain = dataclasses.replace(cursor, like=None)
        bits = plain.call(aten.view.dtype, amax, torch.int32)
        reduced = plain.call(c10d.all_reduce.default, bits, "max", self.group)
        waited = plain.call(c10d.wait_tensor.default, reduced)
        largest = plain.call(aten.view.dtype, waited, torch.float32)
        never_recompute(bits, reduced, waited, largest)
        return largest


def starts_at_input(node: fx.Node) -> bool:
    """Whether a chain of operations with one input each leads from an input of the graph, no gradient, to a node."""
    while node.op == "call_function":
        if len(node.all_input_nodes) != 1 or node.is_impure():
            return False
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and not is_tangent(node)


def waits(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that hold gathered tensors, in graph order."""
    return [n for n in graph.nodes if n.target is c10d.wait_tensor.default and is_gathered(n)]


def equal_gathers(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Gathers, and moves of what they gather, that repeat an earlier node -> that node.

    DTensor gathers a shard anew for each linear that reads it. Once q, k and v read one gather, they have one input again,
    which is sent once and quantized once. Where shards are uneven, it pads the smaller ones before each gather, on some ranks
    alone: equal paddings are merged too, so that all ranks enter as many collectives.
    """
    first: dict[Any, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    followed: set[fx.Node] = set()
    padded = _before_gathers(graph)
    for node in graph.nodes:
        starts = node.target is c10d.all_gather_into_tensor.default
        follows = node.target is c10d.wait_tensor.default or node.target in MOVES
        if node not in padded:
            if not starts and not (follows and any(n in followed for n in node.all_input_nodes)):
                continue
            followed.add(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: same.get(n, n))
        key = (node.target, _hashable(args), _hashable(tuple(kwargs.items())), recomputation_of(node))
        known = first.setdefault(key, node)
        if known is not node:
            same[node] = known
    return same


def _before_gathers(graph: fx.Graph) -> set[fx.Node]:
    """Paddings and moves, in chains that end in a gather."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_read = any(n in found or n.target is c10d.all_gather_into_tensor.default for n in node.users)
        if is_read and (node.target is aten.constant_pad_nd.default or node.target in MOVES):
            found.add(node)
    return found


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, (list, tuple)) else value
