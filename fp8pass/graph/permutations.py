"""Rows put at the places that a permutation says, and the gather that has the same result.

To autograd, the gradient of `rows[index]` is zeros to which the gradient's rows are added at `index`, because an index may name
a row twice. Mixtures of experts sort their rows and put them back with the inverse of the sort, which names each row once: the
gradient is `gradient[sort]`, a gather, which fuses with the code that reads it.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from fp8pass.graph.kinds import argument_of
from fp8pass.graph.values import argument, behind_aliases, names_rows, same_shape, same_size, value_of

aten = torch.ops.aten

_SORTS = {aten.sort.default, aten.sort.stable}
_ARGSORTS = {aten.argsort.default, aten.argsort.stable}
_ZEROS = {aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default}


@dataclasses.dataclass(frozen=True)
class Scatter:
    """A node that adds rows to zeros, each to another one."""

    node: fx.Node
    rows: fx.Node
    """[rows, ...], of the same shape as the node."""
    index: fx.Node
    """[rows] integers: the node equals `rows[index]`, but for the sign of zeros."""


def permuting_scatters(graph: fx.Graph) -> list[Scatter]:
    """The scatters by a permutation whose inverse the graph has computed before, in graph order."""
    inverses: dict[fx.Node, fx.Node] = {}
    found: list[Scatter] = []
    for node in graph.nodes:
        if (permutation := _inverts(node)) is not None:
            inverses[node] = permutation
            inverses.setdefault(permutation, node)
        elif (scatter := _scatter(node)) is not None:
            rows, index = scatter
            inverse = inverses.get(behind_aliases(index))
            if inverse is not None:
                found.append(Scatter(node, rows, inverse))
    return found


def _is_permutation(node: fx.Node) -> bool:
    """Whether a node holds the indices that sort a vector."""
    if node.target is operator.getitem:
        is_sort = argument(node, 0).target in _SORTS and argument(node, 1) == 1
    else:
        is_sort = node.target in _ARGSORTS
    return is_sort and value_of(node).dim() == 1


def _inverts(node: fx.Node) -> fx.Node | None:
    """The permutation of which a node holds the inverse; None for other nodes."""
    if _is_permutation(node):  # to sort a permutation is to invert it
        read: Any = argument(node, 0)
        sorted_values = behind_aliases(read.args[0] if node.target is operator.getitem else read)
        is_descending = argument_of(read if node.target is operator.getitem else node, 2, "descending")
        return sorted_values if _is_permutation(sorted_values) and not is_descending else None
    put = _put(node)
    if put is None:
        return None
    base, index, values = put
    permutation = behind_aliases(index)
    is_inverse = _is_permutation(permutation) and _counts_up(values) and _same_length(node, index)
    return permutation if is_inverse and (_overwrites(node) or _is_zeros(base)) else None


def _put(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Base, index and values of a node that overwrites or adds to rows of the base."""
    if node.target is aten.index_put.default:
        indices: Any = argument(node, 1)
        if len(indices) != 1:
            return None
        base, index, values = argument(node, 0), indices[0], argument(node, 2)
    else:
        adds = node.target is aten.index_add.default and argument(node, 1) == 0 and not node.kwargs
        if not adds and not (node.target is aten.scatter.src and value_of(node).dim() == 1):
            return None
        base, index, values = argument(node, 0), argument(node, 2), argument(node, 3)
    return (base, index, values) if names_rows(index) else None


def _overwrites(node: fx.Node) -> bool:
    """Whether a node that `_put` reads puts values in the place of the base's, and does not add them."""
    adds = (
        argument_of(node, 3, "accumulate") if node.target is aten.index_put.default else node.target is aten.index_add.default
    )
    return not adds


def _counts_up(node: fx.Node) -> bool:
    """Whether a node holds 0, 1, 2, ..."""
    if node.target is aten.arange.default:
        return len(node.args) == 1
    if node.target is aten.arange.start:
        return len(node.args) == 2 and bool(argument(node, 0) == 0)
    if node.target is torch.ops.prims.iota.default:
        return bool(node.kwargs.get("start") == 0 and node.kwargs.get("step") == 1)
    return False


def _same_length(node: fx.Node, other: fx.Node) -> bool:
    return same_size(value_of(node).shape[0], value_of(other).shape[0])


def _is_zeros(node: fx.Node) -> bool:
    return node.target in _ZEROS or (node.target is aten.full.default and bool(argument(node, 1) == 0))


def _scatter(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Rows and index of a node that puts as many rows as it has into zeros, or adds them."""
    put = _put(node)
    if put is None:
        return None
    base, index, rows = put
    has_shape = same_shape(value_of(node).shape, value_of(rows).shape)
    return (rows, index) if _is_zeros(base) and has_shape and _same_length(rows, index) else None
