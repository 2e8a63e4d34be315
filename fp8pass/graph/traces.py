"""Graphs that somebody else traced: which of their nodes are gradients, and what marks the backward in them.

AOTAutograd's joint graphs take gradients as inputs, `tangents_1`, and tag each node with its side of the partition. A trace of
forward, loss and `torch.autograd.grad` by make_fx is never partitioned: its gradients begin at a one made for the loss, and
autograd's engine flags what it ran. While the passes run, such a graph carries partitioner tags as well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Set
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg
from torch.multiprocessing.reductions import StorageWeakRef

from fp8pass.graph.gemms import is_matmul, operands_of
from fp8pass.graph.values import depends_on, holds_tensor, value_of

aten = torch.ops.aten

FLAG = "autograd_backward"  # The entry that autograd's engine leaves in the metadata of nodes that it ran.
_TAG = "partitioner_tag"
_ONES = frozenset({aten.ones_like.default, aten.ones.default, aten.full.default, aten.full_like.default, aten.new_ones.default})


def gradients_in_trace(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a trace that depend on the gradient of an output, where a joint graph has tangents."""
    return depends_on(graph, _beginnings(graph))


def _beginnings(graph: fx.Graph) -> set[fx.Node]:
    """The beginnings of the backward of a trace: ones, else inputs, that the engine alone reads. Where nothing is flagged, the
    ones that are made for a scalar output, or that autograd makes for a scalar that is none: it asks for a memory format."""
    if not any(n.meta.get(FLAG) for n in graph.nodes):
        outputs = set(graph.output_node().all_input_nodes)
        scalars = [n for n in graph.nodes if n.target is aten.ones_like.default and value_of(n).dim() == 0]
        return {n for n in scalars if n.args[0] in outputs or n.kwargs.get("memory_format") is torch.preserve_format}
    ones = {n for n in graph.nodes if n.target in _ONES and _is_read_by_engine(n)}
    return ones or {n for n in graph.find_nodes(op="placeholder") if _is_read_by_engine(n)}


def _is_read_by_engine(node: fx.Node) -> bool:
    return bool(node.users) and not node.meta.get(FLAG) and all(user.meta.get(FLAG) for user in node.users)


def is_partitioned(graph: fx.Graph) -> bool:
    """Tell whether AOTAutograd's partitioner is still to split the graph: it has tagged the nodes."""
    return any(node.meta.get(_TAG) for node in graph.nodes)


def tag_sides(graph: fx.Graph, gradients: Set[fx.Node]) -> None:
    """Give each node of a trace the tag that AOTAutograd would have given it."""
    for node in graph.nodes:
        is_backward = node in gradients or bool(node.meta.get(FLAG))
        node.meta[_TAG] = "is_backward" if is_backward else "is_forward"


def untag_sides(graph: fx.Graph, known: Set[fx.Node]) -> None:
    """Take the tags off again, and flag the new nodes of the backward as autograd's engine would have: also those that record
    the forward's amaxes at the end of the graph."""
    has_begun = False
    for node in graph.nodes:
        tag = str(node.meta.pop(_TAG, ""))
        has_begun |= bool(node.meta.get(FLAG)) or "backward" in tag
        if node not in known and has_begun and node.op == "call_function":
            node.meta[FLAG] = True


def changed_operand(graph: fx.Graph) -> tuple[fx.Node, fx.Node] | None:
    """A matmul that reads memory which a node of the graph changes in place, and that node; None if there is none."""
    changing: dict[StorageWeakRef, fx.Node] = {}
    for node in graph.nodes:
        for changed in _changed_by(node):
            changing[StorageWeakRef(value_of(changed).untyped_storage())] = node
    if not changing:
        return None
    for node in graph.nodes:
        for operand in operands_of(node) if is_matmul(node) else ():
            for read in _values_behind(operand):
                found = changing.get(StorageWeakRef(value_of(read).untyped_storage()))
                if found is not None:
                    return node, found
    return None


def _changed_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    names = [a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not names:
        return []
    positions = {a.name: i for i, a in enumerate(node.target._schema.arguments)}
    given = [node.kwargs.get(name, node.args[positions[name]] if positions[name] < len(node.args) else None) for name in names]
    flat = [x for g in given for x in (g if isinstance(g, (list, tuple)) else [g])]
    return [x for x in flat if isinstance(x, fx.Node) and holds_tensor(x)]


def _values_behind(operand: fx.Node) -> list[fx.Node]:
    """An operand and what it is made of by nodes with one input, such as views and casts: a cast reads one of them."""
    found = [operand]
    while len(found[-1].all_input_nodes) == 1 and holds_tensor(found[-1].all_input_nodes[0]):
        found.append(found[-1].all_input_nodes[0])
    return found


# -- What a graph was, to look at later: compilers go on changing the graphs that they are given.
#
# A copy of a graph takes eight times as long, and is twice as many objects for Python's garbage collector to visit for as long
# as the model lives.


class _Place(int):
    """In an argument: the node at this place in the graph."""

    __slots__ = ()


_place = functools.cache(_Place)  # Snapshots share places.


class _Node(NamedTuple):
    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any
    type: Any
    meta: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """The nodes of a graph as they were, with their metadata."""

    nodes: tuple[_Node, ...]

    @classmethod
    def take(cls, graph: fx.Graph) -> Snapshot:
        """The snapshot of a graph as it is now. Values in metadata are shared with it, their dicts are not."""
        places = {node: _place(i) for i, node in enumerate(graph.nodes)}

        def recorded(arguments: Any) -> Any:
            return map_arg(arguments, places.__getitem__) if arguments else None

        return cls(
            tuple(
                _Node(n.name, n.op, n.target, recorded(n.args), recorded(n.kwargs), n.type, dict(n.meta)) for n in graph.nodes
            )
        )

    def inputs_of(self, node: _Node) -> list[_Node]:
        """The nodes that a node of the snapshot reads, in the order of its arguments."""
        places: list[int] = []

        def note(argument: Any) -> Any:
            if isinstance(argument, _Place):
                places.append(argument)
            return argument

        map_aggregate(node.args or (), note)
        map_aggregate(node.kwargs or {}, note)
        return [self.nodes[i] for i in dict.fromkeys(places)]

    def results(self) -> list[_Node | None]:
        """The results of the graph; None instead of a result that is not a tensor."""
        (values,) = self.nodes[-1].args
        return [self.nodes[v] if isinstance(v, _Place) else None for v in values]

    def restore(self) -> fx.Graph:
        """A graph of its own with these nodes."""
        graph = fx.Graph()
        made: list[fx.Node] = []

        def placed(argument: Any) -> Any:
            return made[argument] if isinstance(argument, _Place) else argument

        for node in self.nodes:
            args, kwargs = map_aggregate(node.args or (), placed), map_aggregate(node.kwargs or {}, placed)
            copy = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            copy.meta = dict(node.meta)
            made.append(copy)
        return graph
