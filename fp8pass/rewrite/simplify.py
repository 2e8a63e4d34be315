"""Simplify: edits that leave a graph's results as they are, but for rounding, so that more of it fuses with quantization."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gemms import GraphContext, argument_of
from fp8pass.graph.values import argument, behind_aliases, made_only_of, names_rows, resolve, same_shape, same_size, value_of
from lowering.formats import Granularity
from lowering.operation import NAMESPACE

aten = torch.ops.aten


def merge_equal_gathers(same: Mapping[fx.Node, fx.Node]) -> None:
    """Let readers of one shard share its gather: every key's readers read its value instead (`graph.gathers.equal_gathers`)."""
    for node, known in same.items():
        node.replace_all_uses_with(known)
        node.graph.erase_node(node)


def multiply_at_once(graph: fx.Graph, repeated: Mapping[fx.Node, tuple[fx.Node, bool]]) -> None:
    """Multiply all rows of a batch by a weight in one product, where a bmm repeats the weight for each of the batch. repeated:
    see `repeated_weights`."""
    start = Cursor.start(graph)
    for node, (matrix, transposed) in repeated.items():
        cursor, rows = start.at(node, _is_backward(node)).sharing(node), argument(node, 0)
        sizes = [cursor.size(rows, 0), cursor.size(rows, 1), cursor.size(node, 2)]
        if not value_of(rows).is_contiguous():
            rows = cursor.call(aten.clone.default, rows, memory_format=torch.contiguous_format)
        rows = cursor.call(aten.view.default, rows, [-1, cursor.size(rows, 2)])
        matrix = cursor.call(aten.permute.default, matrix, [1, 0]) if transposed else matrix
        product = cursor.call(aten.mm.default, rows, matrix)
        node.replace_all_uses_with(cursor.call(aten.view.default, product, sizes))
        graph.erase_node(node)


def gather_permuted_rows(graph: fx.Graph, scatters: Mapping[fx.Node, RowsAndIndex]) -> dict[fx.Node, RowsAndIndex]:
    """Let a gather take the place of each scatter by a permutation (`permuting_scatters`); returns what each gather reads."""
    start, gathers = Cursor.start(graph), {}
    for node, (rows, index) in scatters.items():
        cursor = start.at(node, _is_backward(node)).sharing(node)
        gather = cursor.call(aten.index.Tensor, rows, [index])
        node.replace_all_uses_with(gather)
        graph.erase_node(node)
        gathers[gather] = rows, index
    return gathers


def share_sigmoids(graph: fx.Graph, shared: Mapping[fx.Node, fx.Node]) -> None:
    """Compute each x / (1 + exp(-x)) as x * sigmoid(x) and each 1 / (1 + exp(-x)) as sigmoid(x), in place. shared: x by node
    (`shared_sigmoids`)."""
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


# -- Fold: an operation of ours that reads an element of a vector reads the vector, with the element's position.
#
# Delayed scaling takes the scales of a whole graph from one vector. A node for each of them and for its reciprocal would be a
# third of what the pass adds to a graph: all that comes after it, the partitioner first, would take time for each, and forward
# would save each for backward.


def fold_elements(graph: fx.Graph) -> None:
    """In place, let operations read a vector and a position instead of an element; erase unread elements."""
    elements: dict[fx.Node, None] = {}
    for node in graph.nodes:
        operation = NAMESPACE.find(node.target)
        # Arguments that may be given as a vector and a position.
        for name, position in {} if operation is None else operation.indexed.items():
            # Generated code multiplies by the scales of rows: it would hold the position, and equal layers have other kernels.
            if position >= len(node.args) or node.kwargs.get("granularity_a") == Granularity.ROW_WISE:
                continue
            read: Any = node.args[position]
            is_list = isinstance(read, (list, tuple))
            scalars = list(read) if is_list else [read]
            found = [scalar for scalar in scalars if _is_element(scalar)]
            if f"{name}_index" in node.kwargs or not found:
                continue
            elements.update(dict.fromkeys(found))
            vectors = [scalar.args[0] if _is_element(scalar) else scalar for scalar in scalars]
            index = [scalar.args[2] if _is_element(scalar) else -1 for scalar in scalars]
            node.update_arg(position, vectors if is_list else vectors[0])
            node.update_kwarg(f"{name}_index", index if is_list else index[0])
    for element in elements:
        if not element.users:
            graph.erase_node(element)


def _is_element(node: fx.Node) -> bool:
    if node.target is not aten.select.int:
        return False
    vector, _, position = node.args
    return value_of(vector).dim() == 1 and isinstance(position, int) and position >= 0  # type: ignore[arg-type]


prims = torch.ops.prims


# -- Batches that are multiplied by one weight
#
# Torch traces a linear as such a product where its weight is frozen and its input [b, m, k] cannot be viewed as [b * m, k], and
# as mm where the weight is trained. As bmm, each repetition of the weight would have a cast and a scale of its own.


def repeated_weights(graph: fx.Graph, context: GraphContext) -> dict[fx.Node, tuple[fx.Node, bool]]:
    """The bmm whose second operand is one weight, expanded; with the weight, and whether its transpose is multiplied. None of a
    weight whose gradient is a bmm, which finds its role by what it shares with the forward's."""
    found: dict[fx.Node, tuple[fx.Node, bool]] = {}
    weights = made_only_of(graph, {n for n, given in context.given(graph).items() if given.is_weight})
    products, gradients = _calls(graph, aten.bmm.default), context.gradients_of(graph)
    operands = [n.all_input_nodes for n in products if n in gradients]
    known = {resolve(x, is_batched=True)[0] for each in operands for x in each if x not in gradients}
    trained = set()
    for node in products:
        value, transposed = resolve(argument(node, 1), is_batched=True)
        matrix: Any = value.root.args[0] if value.root.target is aten.expand.default and value.reshape is None else None
        is_same = matrix in weights and value_of(matrix).dtype == value_of(node).dtype
        if is_same and same_shape(value_of(matrix).shape, (value.rows, value.cols)):
            found[node] = matrix, transposed
            if resolve(argument(node, 0), is_batched=True)[0] in known:
                trained.add(matrix)
    return {node: repeated for node, repeated in found.items() if repeated[0] not in trained}


# -- SiLU as its forward is decomposed, and the sigmoid that its gradient computes.
#
# The forward is x / (1 + exp(-x)), the gradient uses sigmoid(x). Where backward computes the activation again next to its
# gradient, one kernel computes both, and they are the largest part of its instructions: x * sigmoid(x) shares one with the
# other.


def shared_sigmoids(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The nodes x / (1 + exp(-x)) of float32 x whose sigmoid the graph computes as well, and the nodes 1 / (1 + exp(-x)) of
    these x: torch before 2.13 writes the gradient's sigmoid so. With the x of each."""
    divisions, reciprocals = _calls(graph, aten.div.Tensor), _calls(graph, aten.reciprocal.default)
    silus = {n: x for n in divisions if (x := _negated_in(n.args[1])) is not None and x is n.args[0] and _is_float32(n)}
    spelled_out = {n: x for n in reciprocals if (x := _negated_in(n.args[0])) is not None and _is_float32(n)}
    known = {_key(x) for x in spelled_out.values()} | {_key(n.args[0]) for n in _calls(graph, aten.sigmoid.default)}
    shared = {_key(x) for x in silus.values()} & known
    return {n: x for n, x in (silus | spelled_out).items() if _key(x) in shared}


def _calls(graph: fx.Graph, target: Any) -> list[Any]:
    return list(graph.find_nodes(op="call_function", target=target))


def _is_float32(node: fx.Node) -> bool:
    return bool(value_of(node).dtype == torch.float32)


def _negated_in(divisor: Any) -> Any:
    """x of 1 + exp(-x); None for every other node."""
    exponential = _argument_of(divisor, aten.add.Tensor, rest=(1,))
    return _argument_of(_argument_of(exponential, aten.exp.default), aten.neg.default)


def _argument_of(node: Any, target: Any, rest: tuple[Any, ...] = ()) -> Any:
    """The first argument of a call of `target` whose others are `rest`; None for every other node."""
    is_call = isinstance(node, fx.Node) and node.target is target and node.args[1:] == rest and not node.kwargs
    return node.args[0] if is_call else None


def _key(x: fx.Node) -> Any:
    """Equal for equal values: forward and backward convert x to float32 each for itself."""
    return x.args if x.target is prims.convert_element_type.default else x


# -- Rows put at the places that a permutation says, and the gather that has the same result.
#
# To autograd, the gradient of `rows[index]` is zeros to which the gradient's rows are added at `index`, because an index may
# name a row twice. Mixtures of experts sort their rows and put them back with the inverse of the sort, which names each row
# once: the gradient is `gradient[sort]`, a gather, which fuses with the code that reads it.


_SORTS = {aten.sort.default, aten.sort.stable}
_ARGSORTS = {aten.argsort.default, aten.argsort.stable}
_ZEROS = {aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default}


RowsAndIndex = tuple[fx.Node, fx.Node]
"""The parts of a node that adds rows to zeros, each to another one: rows [rows, ...] of its shape, and [rows] integers; the
node equals `rows[index]`, but for the sign of zeros."""


def permuting_scatters(graph: fx.Graph) -> dict[fx.Node, RowsAndIndex]:
    """The scatters by a permutation whose inverse the graph has computed before, in graph order, with what they are."""
    inverses: dict[fx.Node, fx.Node] = {}
    found: dict[fx.Node, RowsAndIndex] = {}
    for node in graph.nodes:
        if (permutation := _inverts(node)) is not None:
            inverses[node] = permutation
            inverses.setdefault(permutation, node)
        elif (scatter := _scatter(node)) is not None:
            rows, index = scatter
            inverse = inverses.get(behind_aliases(index))
            if inverse is not None:
                found[node] = rows, inverse
    return found


def _is_permutation(node: fx.Node) -> bool:
    """Tell whether a node holds the indices that sort a vector."""
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
    """Tell whether a node that `_put` reads replaces values of the base, and does not add them."""
    adds = (
        argument_of(node, 3, "accumulate") if node.target is aten.index_put.default else node.target is aten.index_add.default
    )
    return not adds


def _counts_up(node: fx.Node) -> bool:
    """Tell whether a node holds 0, 1, 2, ..."""
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
