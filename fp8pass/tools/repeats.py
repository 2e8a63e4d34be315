"""Equal layers in Dynamo's graph: one of each kind is kept, and how many others it stands for is counted.

A layer is what `container.index` in the modules' paths encloses. Two layers are equal if their nodes are: the same operations
in the same order, on tensors of the same shapes and dtypes, with the same constants, and with operands from the same places.
Those are the same node of the layer, the same Parameter of it, the same result of the layer before, or one node outside of all
layers. What surrounds a layer counts as well, so that casts are shared and fused as they are in the whole model. A layer stands
only for others whose neighbours are equal too, which is why the first and the last are kept. Where a
result of a layer is read by anything but the next layer, all layers are kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fp8pass.graph.origin import Path, begins, parse_path
from fp8pass.runtime.dynamo_graphs import path_of

Kept = dict[Path, tuple[int, ...]]  # Layer -> the indices that it stands for in its container, its own first.


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The nodes of one layer, and what they read and give."""

    index: int
    nodes: tuple[fx.Node, ...]
    text: str  # Equal for layers with equal nodes.
    sources: tuple[fx.Node, ...]  # The nodes outside of the layer that it reads, but its Parameters, in the order of reading.
    results: tuple[fx.Node, ...]  # The nodes that others read.


def cut_repeats(graph: fx.Graph) -> Kept:
    """Remove layers that equal others from a graph; the layers that are kept and what they stand for."""
    kept: Kept = {}
    for container in sorted({path for node in graph.nodes for path in _containers(node)}, key=lambda path: str(path)):
        layers = _layers(graph, container)
        if len(layers) > 2 and _is_chain(layers):
            kept |= {Path(container.root, f"{container.below}.{i}"): known for i, known in _cut(graph, layers).items()}
    return kept


def copies_of(path: Path | None, kept: Kept) -> list[Path]:
    """The paths that a module of the reduced graph stands for, its own first."""
    if path is None:
        return []
    paths = [path.below]
    for layer, indices in reversed(kept.items()):  # inner layers first, so that what precedes a number keeps its place
        prefix, _, own = layer.below.rpartition(".")
        if path.root == layer.root and begins(layer.below, path.below):
            at = len(prefix) + 1
            paths = [p[:at] + str(i) + p[at + len(own) :] for i in indices for p in paths]
    return [Path(path.root, below) for below in paths]


def num_copies(path: Path | None, kept: Kept) -> int:
    """The number of modules that a module of the reduced graph stands for."""
    return max(1, len(copies_of(path, kept)))


def _paths(node: fx.Node) -> list[Path]:
    stack = node.meta.get("nn_module_stack") or {} if node.op != "placeholder" else {}
    return [path for source, *_ in stack.values() if (path := parse_path(source)) is not None]


def _containers(node: fx.Node) -> list[Path]:
    """The paths before a number in the path of the module that a node belongs to."""
    found = []
    for path in _paths(node)[-1:]:
        parts = path.below.split(".")
        found += [Path(path.root, ".".join(parts[:i])) for i, part in enumerate(parts) if i and part.isdigit()]
    return found


def _layers(graph: fx.Graph, container: Path) -> list[_Layer]:
    """The layers of a container in the order in which they run; none where the nodes of several alternate."""
    order: list[int] = []
    nodes: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        index = _index_in(node, container)
        if index is None:
            continue
        if not order or order[-1] != index:
            order.append(index)
        nodes.setdefault(index, []).append(node)
    if len(order) != len(nodes):
        return []
    return [_layer(container, index, nodes[index]) for index in order]


def _index_in(node: fx.Node, container: Path) -> int | None:
    for path in reversed(_paths(node)):
        if path.root == container.root and path.below.startswith(f"{container.below}."):
            part = path.below[len(container.below) + 1 :].partition(".")[0]
            return int(part) if part.isdigit() else None
    return None


def _layer(container: Path, index: int, nodes: list[fx.Node]) -> _Layer:
    inside = {node: i for i, node in enumerate(nodes)}
    sources: dict[fx.Node, int] = {}
    prefix = f"{container.below}.{index}."

    def named(node: fx.Node) -> str:
        if node in inside:
            return f"%{inside[node]}"
        path = path_of(node) if node.op == "placeholder" else None
        if path is not None and path.root == container.root and path.below.startswith(prefix):
            return f"own {path.below[len(prefix) :]} {_described(node)}"
        return f"given {sources.setdefault(node, len(sources))} {_described(node)}"

    text = "\n".join(_text(node, named) for node in nodes)
    results = tuple(node for node in nodes if any(user not in inside for user in node.users))
    return _Layer(index, tuple(nodes), text, tuple(sources), results)


def _text(node: fx.Node, named: Any) -> str:
    arguments = fx.node.map_arg((node.args, node.kwargs), named)
    target: Any = node.target
    if node.op == "get_attr":
        target = _attribute(node)
    elif callable(target):
        target = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
    return f"{node.op} {target} {arguments} {_described(node)}"


def _attribute(node: fx.Node) -> str:
    """An attribute of the graph's module as text: a subgraph's nodes, such as those of a checkpointed layer, or its name."""
    owner: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        owner = getattr(owner, part)
    if not isinstance(owner, fx.GraphModule):
        return str(node.target)
    inside = {inner: i for i, inner in enumerate(owner.graph.nodes)}
    return "\n".join(_text(inner, lambda n: f"%{inside[n]}") for inner in owner.graph.nodes)


def _described(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}{value.requires_grad}"


def _is_chain(layers: Sequence[_Layer]) -> bool:
    """Say whether the next layer alone reads what a layer gives, except for the last one."""
    after = [set(layer.nodes) for layer in layers[1:]]
    pairs = zip(layers, after, strict=False)
    return all(u in following or u in layer.nodes for layer, following in pairs for r in layer.results for u in r.users)


def _links(layers: Sequence[_Layer], i: int) -> tuple[Any, ...]:
    """The origin of each input of a layer: the position of a result of the layer before, or a node outside of all layers."""
    before = layers[i - 1].results if i else ()
    return tuple(before.index(node) if node in before else node for node in layers[i].sources)


def _cut(graph: fx.Graph, layers: Sequence[_Layer]) -> dict[int, tuple[int, ...]]:
    states = []
    for i, layer in enumerate(layers):
        before = layers[i - 1].text if i else None
        after = (layers[i + 1].text, _links(layers, i + 1)) if i + 1 < len(layers) else None
        states.append((before, layer.text, _links(layers, i), after))
    kept = kept_positions(states)
    for p, q in itertools.pairwise(kept):
        if q != p + 1:
            instead = dict(zip(layers[q - 1].results, layers[p].results, strict=True))
            for node in layers[q].nodes:
                for old, new in instead.items():
                    node.replace_input_with(old, new)
    for i in reversed(range(len(layers))):
        if i not in kept:
            for node in reversed(layers[i].nodes):
                graph.erase_node(node)
    first = {states[i]: i for i in reversed(kept)}
    return {
        layers[i].index: (
            layers[i].index,
            *(layers[j].index for j in range(len(layers)) if j not in kept and first[states[j]] == i),
        )
        for i in kept
    }


def kept_positions(states: Sequence[Any]) -> list[int]:
    """The layers of a row to keep, where a state is a layer with what surrounds it. Every state is kept once at least, and
    each layer that is kept follows on one whose state is that of the layer that it followed on."""
    kept = list(range(len(states)))
    while (cut := _longest_cut([states[i] for i in kept])) is not None:
        del kept[cut[0] : cut[1]]
    return kept


def _longest_cut(states: Sequence[Any]) -> tuple[int, int] | None:
    """The first and the end of layers that can be left out: the layer at the end is like the first, and all are elsewhere."""
    numbers: Mapping[Any, int] = {state: i for i, state in enumerate(dict.fromkeys(states))}
    row = [numbers[state] for state in states]
    for length in range(len(row) - 1, 0, -1):
        for i in range(len(row) - length):
            if row[i] == row[i + length] and set(row[i : i + length]) <= {*row[:i], *row[i + length :]}:
                return i, i + length
    return None
