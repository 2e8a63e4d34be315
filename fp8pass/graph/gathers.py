"""Moves: the ops between a gather and a GEMM that put elements elsewhere and leave them as they are.

They are repeated on other data: on FP8 bytes, which have the shape of the tensor, and on block scales, which have one
row per `height` rows of the tensor and a last dimension of their own.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor, never_recompute, recomputation_of
from fp8pass.graph.origin import is_tangent
from fp8pass.graph.values import PERMUTES, RESHAPES, permutation, value_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

_COPIES = {aten.clone.default, aten.alias.default, aten.detach.default}
_PARTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, aten.cat.default}
MOVES = RESHAPES | PERMUTES | _COPIES | _PARTS | {operator.getitem}

Call = Callable[..., fx.Node]
Done = dict[fx.Node, fx.Node]


def is_gathered(node: fx.Node) -> bool:
    """Tell whether an all-gather made the value that a node holds."""
    while node.target in MOVES:
        node = _first(node)
    if node.target is not c10d.wait_tensor.default:
        return False
    gathered = node.args[0]
    return isinstance(gathered, fx.Node) and gathered.target is c10d.all_gather_into_tensor.default


def origins(graph: fx.Graph) -> dict[fx.Node, fx.Node | None]:
    """For every node the one whose elements it has, seen through moves, perhaps itself; None for elements of several."""
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
    """Tell whether moves from `start` to `node` keep every `height` rows that follow each other whole, of known sizes."""
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
    """The sizes that a node gives in elements of its dimension."""
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
    """Tell whether a node that takes parts, or puts them together, leaves blocks whole."""
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


# -- All-gathers in a graph: which there are, which are equal, and how other data travels the same way.


@dataclasses.dataclass(frozen=True)
class Gather:
    """An all-gather: every rank's shard, put together along the first dimension."""

    wait: fx.Node  # The node that holds the gathered tensor.
    collective: fx.Node
    source: fx.Node  # This rank's shard.
    num_ranks: int
    group: Any  # The process group, as the collective names it.
    shares_scales: bool  # Delayed scaling has equal scales on all its ranks.

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
        """The largest of all ranks' amaxes."""
        plain = dataclasses.replace(cursor, like=None)
        return largest_of_ranks(plain, plain.call(aten.view.dtype, amax, torch.int32), self.group)


def starts_at_input(node: fx.Node) -> bool:
    """Tell whether a chain of operations with one input each leads from an input of the graph, no gradient, to a node."""
    return chain_from_input(node) is not None


def chain_from_input(node: fx.Node) -> list[fx.Node] | None:
    """The operations with one input each that lead from an input of the graph, no gradient, to a node; None for others."""
    chain: list[fx.Node] = []
    while node.op == "call_function":
        chain.append(node)
        if len(node.all_input_nodes) != 1 or node.is_impure():
            return None
        node = node.all_input_nodes[0]
    return chain[::-1] if node.op == "placeholder" and not is_tangent(node) else None


def largest_of_ranks(cursor: Cursor, bits: fx.Node, group: Any) -> fx.Node:
    """The largest of all ranks' float32 amaxes, of their bits as int32, with NaN on top: as floats, MAX may lose NaN."""
    reduced = cursor.call(c10d.all_reduce.default, bits, "max", group)
    waited = cursor.call(c10d.wait_tensor.default, reduced)
    largest = cursor.call(aten.view.dtype, waited, torch.float32)
    never_recompute(bits, reduced, waited, largest)
    return largest


def waits(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that hold gathered tensors, in graph order."""
    return [n for n in graph.nodes if n.target is c10d.wait_tensor.default and is_gathered(n)]


def equal_gathers(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Gathers, and moves of what they gather, that repeat an earlier node -> that node. DTensor gathers a shard anew for each
    linear that reads it. Once q, k and v read one gather, they have one input again, which is sent once and quantized once.
    Where shards are uneven, it pads the smaller ones before each gather, on some ranks alone: equal paddings are merged too, so
    that all ranks enter as many collectives."""
    first: dict[Any, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    followed: set[fx.Node] = set()
    # Paddings and moves, in chains that end in a gather.
    padded: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_read = any(n in padded or n.target is c10d.all_gather_into_tensor.default for n in node.users)
        if is_read and (node.target is aten.constant_pad_nd.default or node.target in MOVES):
            padded.add(node)
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


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, (list, tuple)) else value
