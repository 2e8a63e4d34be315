"""Matrix values: what a GEMM operand really is, seen through transposes, reshapes and dtype casts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.graph.names import Kind
from lowering.formats import HIGH_PRECISION_DTYPES

aten = torch.ops.aten
prims = torch.ops.prims

#: Row-major reshapes.
RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)
PERMUTES = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
_SAME_VALUE = {aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default}


@dataclasses.dataclass(frozen=True)
class MatrixValue:
    """A matrix [rows, cols] held by a node of the graph: the node itself, or its row-major reshape.

    Two operands are the same tensor if they have equal values and differ at most in `Operand.transposed`.
    """

    root: fx.Node
    rows: Any
    cols: Any
    reshape: fx.Node | None = dataclasses.field(default=None, compare=False)
    """A node that ends in this matrix's two sizes, where root is of another shape."""

    def __hash__(self) -> int:
        return hash(self.root)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, MatrixValue)
            and self.root is other.root
            and same_size(self.rows, other.rows)
            and same_size(self.cols, other.cols)
        )

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the value itself, before the casts between it and the GEMM."""
        return value_of(self.root).dtype


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of a GEMM: a matrix value, or its transpose."""

    value: MatrixValue
    transposed: bool
    kind: Kind


def value_of(node: fx.Node) -> Any:
    """The fake value that tracing left on a node."""
    return node.meta["val"]


def argument(node: fx.Node, position: int) -> Any:
    """A positional argument of a node. fx types it as everything that a graph can hold; which it is, the target tells."""
    return node.args[position]


def same_size(left: Any, right: Any) -> bool:
    """Whether two sizes are known to be equal, without adding a guard."""
    return left is right or statically_known_true(left == right)


def _same_shape(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(same_size(x, y) for x, y in zip(left, right, strict=True))


def permutation(node: fx.Node) -> list[int] | None:
    """Where the dimensions of a permuting node come from; None for other nodes."""
    num_dims = value_of(node).dim()
    order = list(range(num_dims))
    if node.target is aten.permute.default:
        return [int(d) % num_dims for d in argument(node, 1)]
    if node.target is aten.t.default:
        return order[::-1]
    if node.target is aten.transpose.int:
        first, second = (int(argument(node, i)) % num_dims for i in (1, 2))
        order[first], order[second] = second, first
        return order
    return None


def _is_transpose(node: fx.Node) -> bool:
    """Whether a node swaps the last two dimensions; those before them are 1."""
    order = permutation(node)
    return order is not None and order[-2:] == [len(order) - 1, len(order) - 2]


def _is_reshape(node: fx.Node) -> bool:
    """Whether a node is a row-major reshape; a permutation is one if it moves only dimensions of size 1, as einsum's do."""
    order = permutation(node)
    if order is None:
        return node.target in RESHAPES
    sizes = value_of(node.all_input_nodes[0]).shape
    moved = [d for d in order if not same_size(sizes[d], 1)]
    return moved == sorted(moved)


def _is_float_cast(node: fx.Node) -> bool:
    if node.target is prims.convert_element_type.default:
        is_cast = True
    else:
        is_cast = node.target is aten._to_copy.default and not set(node.kwargs) - {"dtype", "memory_format"}
    return is_cast and all(value_of(n).dtype in HIGH_PRECISION_DTYPES for n in (node, argument(node, 0)))


def resolve(operand: fx.Node) -> tuple[MatrixValue, bool]:
    """The value behind an operand [m, k], or [1, m, k], and whether the operand is its transpose."""
    rows, cols = value_of(operand).shape[-2:]
    transposed = False
    reshape: fx.Node | None = None
    node = operand
    while node.op == "call_function":
        if _holds_matrix(node, rows, cols) and _is_transpose(node):
            rows, cols = cols, rows
            transposed = not transposed
            reshape = None
        elif _is_reshape(node):
            if _holds_matrix(node, rows, cols):
                reshape = node
        elif not (node.target in _SAME_VALUE or _is_float_cast(node)):
            break
        node = node.all_input_nodes[0]
    if _same_shape(value_of(node).shape, (rows, cols)):
        return MatrixValue(node, rows, cols), transposed
    return MatrixValue(node, rows, cols, reshape or node), transposed


def _holds_matrix(node: fx.Node, rows: Any, cols: Any) -> bool:
    """Whether a node is the matrix, or a batch of it alone."""
    shape = value_of(node).shape
    return _same_shape(shape[-2:], (rows, cols)) and all(same_size(size, 1) for size in shape[:-2])


def depends_on(graph: fx.Graph, seeds: set[fx.Node]) -> set[fx.Node]:
    """The seeds and every node that depends on one of them."""
    found = set(seeds)
    for node in graph.nodes:
        if node not in found and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def made_only_of(graph: fx.Graph, seeds: set[fx.Node]) -> set[fx.Node]:
    """The seeds and every node all of whose inputs are made of them."""
    found = set(seeds)
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and all(n in found for n in inputs):
            found.add(node)
    return found
