"""Moves: the ops between a gather and a GEMM that put elements elsewhere and leave them as they are.

They are repeated on other data: on FP8 bytes, which have the shape of the tensor, and on block scales, which have one
row per `height` rows of the tensor and a last dimension of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp8pass.graph.values import PERMUTES, RESHAPES, permutation, value_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

_COPIES = {aten.clone.default, aten.alias.default, aten.detach.default}
_PARTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, aten.cat.default}
MOVES = RESHAPES | PERMUTES | _COPIES | _PARTS | {operator.getitem}

Call = Callable[..., fx.Node]
Done = dict[fx.Node, fx.Node]


def is_gathered(node: fx.Node) -> bool:
    """Whether an all-gather made the value that a node holds."""
    while node.target in MOVES:
        node = _first(node)
    if node.target is not c10d.wait_tensor.default:
        return False
    gathered = node.args[0]
    return isinstance(gathered, fx.Node) and gathered.target is c10d.all_gather_into_tensor.default


def origins(graph: fx.Graph) -> dict[fx.Node, fx.Node | None]:
    """For every node the one of whose elements alone it consists, seen through moves, which may be itself; None for moves of
    elements of several nodes."""
    found: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        if node.target in MOVES:
            sources = {found[n] for n in node.all_input_nodes}
            found[node] = sources.pop() if len(sources) == 1 else None
        else:
            found[node] = node
    return found


def replay(node: fx.Node, done: Done, call: Call) -> fx.Node:
    """The moves that lead to `node` from the keys of `done`, on the values of `done`."""
    if node not in done:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: replay(n, done, call))
        done[node] = call(node.target, *args, **kwargs)
    return done[node]


def keeps_blocks(node: fx.Node, start: fx.Node, height: int) -> bool:
    """Whether the moves from `start` to `node` keep every row whole, and every `height` rows that follow each other together.
    False where sizes are dynamic."""
    if node is start:
        return _has_blocks(node, height)
    if not all(keeps_blocks(n, start, height) for n in node.all_input_nodes):
        return False
    if node.target in (aten.split.Tensor, aten.split_with_sizes.default):
        return _splits_blocks(node, height)
    if not _has_blocks(node, height) or value_of(node).shape[-1] != value_of(start).shape[-1]:
        return False
    if node.target in PERMUTES:
        fixed = 1 if height == 1 else 2  # how many of the last dimensions must stay where they are
        order = permutation(node)
        return order is not None and order[-fixed:] == list(range(len(order)))[-fixed:]
    return node.target not in _PARTS or _splits_blocks(node, height)


def replay_on_scales(node: fx.Node, done: Done, height: int, width: int, call: Call) -> fx.Node:
    """`replay` for block scales: `height` rows of the tensor have one row of scales, with `width` entries."""
    if node in done:
        return done[node]
    if node.target in RESHAPES:
        scales = replay_on_scales(_first(node), done, height, width, call)
        done[node] = call(aten.reshape.default, scales, scale_shape(node, height, width))
        return done[node]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: replay_on_scales(n, done, height, width, call))
    if node.target in _PARTS and _dim(node) == value_of(_first(node)).dim() - 2:
        args = _scaled(node, args, height)
    done[node] = call(node.target, *args, **kwargs)
    return done[node]


def scale_shape(node: fx.Node, height: int, width: int) -> list[int]:
    """The shape of the scales of a node's tensor."""
    *outer, rows, _ = value_of(node).shape
    return [*outer, rows // height, width]


def _first(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]


def _has_blocks(node: fx.Node, height: int) -> bool:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return False
    return all(isinstance(size, int) for size in value.shape) and value.shape[-2] % height == 0


def _dim(node: fx.Node) -> int:
    """The dimension along which a node splits, slices or concatenates."""
    position = 1 if node.target in (aten.slice.Tensor, aten.cat.default) else 2
    dim: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    return int(dim) % value_of(_first(node)).dim()


def _sizes(node: fx.Node) -> list[int]:
    """What a node says in elements of its dimension."""
    if node.target is aten.cat.default:
        return [value_of(n).shape[_dim(node)] for n in node.all_input_nodes]
    if node.target is aten.slice.Tensor:
        length = value_of(_first(node)).shape[_dim(node)]
        start, end = (*node.args[2:4], None, None)[:2]
        bounds: list[Any] = [start or 0, length if end is None else min(end, length)]
        return bounds
    given: Any = node.args[1]
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _splits_blocks(node: fx.Node, height: int) -> bool:
    """Whether a node that takes parts, or puts them together, leaves blocks whole."""
    dim, num_dims = _dim(node), value_of(_first(node)).dim()
    if dim == num_dims - 1 or (node.target is aten.slice.Tensor and node.args[4:] not in ((), (1,))):
        return False
    return dim != num_dims - 2 or all(isinstance(size, int) and size % height == 0 for size in _sizes(node))


def _scaled(node: fx.Node, args: tuple[Any, ...], height: int) -> tuple[Any, ...]:
    """The node's arguments where its dimension counts blocks."""
    sizes = [size // height for size in _sizes(node)]
    if node.target is aten.cat.default:
        return args
    if node.target is aten.slice.Tensor:
        return (*args[:2], *sizes)
    return (args[0], sizes if node.target is aten.split_with_sizes.default else sizes[0], *args[2:])
