"""What a graph was, to look at later: compilers go on changing the graphs that they are given.

A copy of a graph takes eight times as long, and is twice as many objects for Python's garbage collector to visit for as long as
the model lives.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from torch import fx
from torch.fx.node import map_aggregate, map_arg


class _Place(int):
    """In an argument: the node at this place in the graph."""

    __slots__ = ()


_place = functools.cache(_Place)
"""Snapshots share places."""


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
        """What the graph returns; None in the place of what is no tensor."""
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
