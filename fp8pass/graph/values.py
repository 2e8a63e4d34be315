"""Matrix values: what a GEMM operand really is, seen through transposes, reshapes and dtype casts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.graph.origin import Kind
from lowering.formats import HIGH_PRECISION_DTYPES

aten = torch.ops.aten
prims = torch.ops.prims

T = TypeVar("T")
K = TypeVar("K")

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
class Groups:
    """Groups of the rows of a matrix, as a grouped GEMM reads them: consecutive slots belong to one group after the other."""

    offs: fx.Node  # [groups] int32: where each group ends, counted in slots. Slots from the last entry on belong to no group.
    index: fx.Node | None = None
    """[slots] integers: the row that each slot reads, by a gather that quantization commutes with. None: slot i reads row i."""


@dataclasses.dataclass(frozen=True)
class MatrixValue:
    """A matrix [rows, cols], or a batch of them, held by a node of the graph: the node itself, or its row-major reshape. Two
    operands are the same tensor if they have equal values and differ at most in `Operand.transposed`."""

    root: fx.Node
    rows: Any
    cols: Any
    reshape: fx.Node | None = dataclasses.field(default=None, compare=False)
    """A node that ends in this matrix's two sizes (in a batch's three), where root is of another shape."""
    batch: Any = None  # Number of matrices in a batch [batch, rows, cols]; None for a matrix.
    groups: Groups | None = None  # The rows that are read, and for which group; None where all are and there are no groups.

    def __hash__(self) -> int:
        return hash(self.root)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, MatrixValue)
            and self.root is other.root
            and same_size(self.rows, other.rows)
            and same_size(self.cols, other.cols)
            and (self.batch is None) == (other.batch is None)
            and (self.batch is None or same_size(self.batch, other.batch))
            and self.groups == other.groups
        )

    @property
    def shape(self) -> tuple[Any, ...]:
        """[rows, cols], or [batch, rows, cols]."""
        return (self.rows, self.cols) if self.batch is None else (self.batch, self.rows, self.cols)

    @property
    def num_elements(self) -> Any:
        """Number of elements."""
        return self.rows * self.cols * (1 if self.batch is None else self.batch)

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


def operation_name(node: fx.Node) -> str:
    """The name of a node's operation without namespace and overload; of what is no operation its target as text."""
    return str(getattr(node.target, "_opname", node.target))


def holds_tensor(node: fx.Node) -> bool:
    """Tell whether a node's value is a tensor, and known."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def value_of(node: fx.Node | torch.Tensor) -> Any:
    """The fake value that tracing left on a node; a tensor is its own."""
    return node if isinstance(node, torch.Tensor) else node.meta["val"]


def argument(node: fx.Node, position: int) -> Any:
    """A positional argument of a node. fx types it as everything that a graph can hold; which it is, the target tells."""
    return node.args[position]


def same_size(left: Any, right: Any) -> bool:
    """Tell whether two sizes are known to be equal, without adding a guard."""
    return left is right or statically_known_true(left == right)


def same_shape(left: Any, right: Any) -> bool:
    """Tell whether two shapes are known to be equal, without adding a guard."""
    return len(left) == len(right) and all(same_size(x, y) for x, y in zip(left, right, strict=True))


def size_hint(size: Any) -> int:
    """A size, or what a symbolic one was when traced; 0 where it is unknown. Adds no guard."""
    return size if isinstance(size, int) else size.node.hint or 0


def recorded_size(size: Any) -> int | str:
    """A size as records have it: text where it is symbolic."""
    return size if isinstance(size, int) else str(size)


def permutation(node: fx.Node) -> list[int] | None:
    """The order in which a permuting node reads dimensions; None for other nodes."""
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
    """Tell whether a node swaps the last two dimensions."""
    order = permutation(node)
    if order is None:
        return False
    last = len(order) - 1
    return order[-2:] == [last, last - 1] and order[:-2] == list(range(last - 1))


def _is_reshape(node: fx.Node) -> bool:
    """Tell whether a node is a row-major reshape, such as a permutation that moves only dimensions of size 1."""
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


def resolve(operand: fx.Node, is_batched: bool = False) -> tuple[MatrixValue, bool]:
    """The value behind an operand [m, k], [1, m, k] or, of a batch, [n, m, k]; and whether the operand is its transpose."""
    rows, cols = value_of(operand).shape[-2:]
    batch = value_of(operand).shape[-3] if is_batched else None
    transposed = False
    reshape: fx.Node | None = None
    node = operand
    while node.op == "call_function":
        if _holds_matrix(node, rows, cols, batch) and _is_transpose(node):
            rows, cols = cols, rows
            transposed = not transposed
            reshape = None
        elif _is_reshape(node):
            if _holds_matrix(node, rows, cols, batch):
                reshape = node
        elif not (node.target in _SAME_VALUE or _is_float_cast(node)):
            break
        node = node.all_input_nodes[0]
    shape = (rows, cols) if batch is None else (batch, rows, cols)
    if same_shape(value_of(node).shape, shape):
        return MatrixValue(node, rows, cols, None, batch), transposed
    return MatrixValue(node, rows, cols, reshape or node, batch), transposed


def _holds_matrix(node: fx.Node, rows: Any, cols: Any, batch: Any) -> bool:
    """Tell whether a node is the matrix, [1, rows, cols] too, or the batch."""
    shape = value_of(node).shape
    wanted = (rows, cols) if batch is None else (batch, rows, cols)
    num_dims = len(wanted)
    return same_shape(shape[-num_dims:], wanted) and all(same_size(size, 1) for size in shape[:-num_dims])


def behind_aliases(node: fx.Node) -> fx.Node:
    """The node that holds the same tensor, without aliases and copies."""
    while node.target in _SAME_VALUE:
        node = node.all_input_nodes[0]
    return node


def resolve_rows(operand: fx.Node, offs: fx.Node) -> tuple[MatrixValue, bool]:
    """The value behind an operand of a grouped GEMM with slots grouped by `offs`, and whether it is the transpose of slots.
    Where the slots gather rows of a matrix that has no more rows than there are slots, the value is that matrix."""
    value, transposed = resolve(operand)
    plain = dataclasses.replace(value, groups=Groups(offs))
    if value.reshape is not None or (gathered := row_gather(value.root)) is None:
        return plain, transposed
    source, index = gathered
    found, is_turned = resolve(source)
    if is_turned or not statically_known_true(found.rows <= value.rows):
        return plain, transposed
    return dataclasses.replace(found, groups=Groups(offs, index)), transposed


def row_gather(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The matrix and the index [slots] of a node that gathers rows; None for other nodes."""
    if node.target is aten.index.Tensor:
        source, indices = argument(node, 0), argument(node, 1)
        index = indices[0] if len(indices) == 1 else None
    elif node.target is aten.index_select.default and argument(node, 1) == 0:
        source, index = argument(node, 0), argument(node, 2)
    else:
        return None
    if not isinstance(index, fx.Node) or value_of(source).dim() != 2:
        return None
    return (source, index) if names_rows(index) else None


def names_rows(index: fx.Node) -> bool:
    """Tell whether a node is a vector of indices."""
    return value_of(index).dim() == 1 and value_of(index).dtype in (torch.int64, torch.int32)


def by_key(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items with each key, in their order; keys in the order in which they come first."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


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
