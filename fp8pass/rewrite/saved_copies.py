"""FP8 copies that GEMMs read anyway, of values that the forward saves for the backward: nothing is cast for such a value, and a
copy that the backward has anyway is not saved a second time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor, arguments_of, maker_of
from fp8pass.graph.gemms import GraphContext, is_scaled_gemm
from fp8pass.graph.origin import maker_path
from fp8pass.graph.values import PERMUTES, RESHAPES, permutation, same_shape, same_size, value_of
from fp8pass.recipes import Quantization
from fp8pass.schemes import scheme_of
from lowering.formats import E4M3, Granularity

aten = torch.ops.aten
ops = torch.ops.lowering
prims = torch.ops.prims

_CASTS = (ops.cast.default, ops.cast_with_scales.default)
#: Operations whose result has the elements of their input in its order, but for rounding.
SAME_ORDER = RESHAPES | {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
}


@dataclasses.dataclass(frozen=True, eq=False)
class SharedCopy:
    """An E4M3 copy of a saved value that a GEMM reads."""

    module: str  # Path of the module whose GEMM reads it.
    data: fx.Node  # In the forward graph: the result that the backward gets, or will get.
    scale_inv: fx.Node  # Its scales there, laid out as the GEMM reads them; a vector that has its scale.
    index: int | None  # The position of the scale in a vector.
    quantization: Quantization
    matrix: fx.Node  # The matrix [rows, columns] that was cast.
    columnwise: bool  # The copy is of its transpose.
    transposed: bool  # `data` is the transpose of the copy.

    @property
    def is_by_column(self) -> bool:
        """`data` is [columns, rows] of the matrix."""
        return self.columnwise != self.transposed

    def bytes_added(self, saved: Sequence[Any]) -> Any:
        """Bytes that saving it takes, besides what the forward saves anyway."""
        added = [node for node in (self.data, self.scale_inv) if node not in saved]
        return sum(value_of(node).numel() * value_of(node).element_size() for node in added)

    def load(self, cursor: Cursor, data: fx.Node, scale_inv: fx.Node, shape: Sequence[Any], dtype: torch.dtype) -> fx.Node:
        """The values of a copy, whose nodes here are data and scale_inv, in the shape of the value, rounded to its dtype."""
        if self.index is not None:
            scale_inv = cursor.call(aten.select.int, scale_inv, 0, self.index)
        if self.transposed:
            data = cursor.call(aten.permute.default, data, [1, 0])
        made = scheme_of(self.quantization).dequantize(cursor, data, scale_inv, self.quantization)
        if dtype != torch.float32:
            made = cursor.call(prims.convert_element_type.default, made, dtype)
        if self.columnwise:
            made = cursor.call(aten.permute.default, made, [1, 0])
        for dim, size in enumerate(value_of(self.matrix).shape):
            if not same_size(value_of(made).shape[dim], size):  # padding
                made = cursor.call(aten.slice.Tensor, made, dim, 0, size)
        if not value_of(made).is_contiguous():
            made = cursor.call(aten.clone.default, made, memory_format=torch.contiguous_format)
        return made if same_shape(value_of(made).shape, shape) else cursor.call(aten.reshape.default, made, _sizes(shape))


def _sizes(shape: Sequence[Any]) -> list[int]:
    """Arguments of a reshape: -1 for a dynamic size."""
    return [size if isinstance(size, int) else -1 for size in shape]


def shared_copies(forward: fx.Graph, backward: fx.Graph, context: GraphContext) -> dict[Any, SharedCopy]:
    """The copies of a partitioned graph that GEMMs read, by `lines_of` the matrices that they are copies of: of each matrix one
    that the backward reads, or else the forward. Reads only."""
    found: dict[Any, SharedCopy] = {}
    for gemm, data, scale_inv, index in operands(forward, backward):
        copy = _copy(gemm, data, scale_inv, index, context)
        if copy is not None:
            found.setdefault(lines_of(copy.matrix, range(2)), copy)
    return found


def copy_of(copies: Mapping[Any, SharedCopy], node: fx.Node, order: Sequence[int]) -> SharedCopy | None:
    """One of `shared_copies` of a node, whose dimensions lie in memory in this order."""
    copy = copies.get(lines_of(node, order))
    if copy is None:
        return None
    shape = [value_of(node).shape[dim] for dim in order]
    matrix = value_of(copy.matrix).shape
    is_clear = same_shape(matrix, shape) or _sizes(shape).count(-1) < 2
    is_whole = same_shape(matrix, value_of(copy.data).shape[:: -1 if copy.is_by_column else 1])
    return copy if is_clear and (is_whole or all(isinstance(size, int) for size in matrix)) else None


def operands(forward: fx.Graph, backward: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, fx.Node, int | None]]:
    """The operands of all FP8 GEMMs that the forward makes, those that the backward reads first. Each is (GEMM, data, scales,
    position of the scale in a vector), data and scales as nodes of the forward, of the backward's GEMMs as its results."""
    results = {node.name: node for node in forward.output_node().all_input_nodes}
    for graph in (backward, forward):
        for gemm in filter(is_scaled_gemm, graph.nodes):
            given = arguments_of(gemm)
            for side in ("a", "b"):
                data: fx.Node = given[side]
                scale_inv: fx.Node = given[f"scale_inv_{side}"]
                while data.target in PERMUTES:
                    data = data.all_input_nodes[0]
                if graph is backward:
                    if not (data.op == scale_inv.op == "placeholder" and {data.name, scale_inv.name} <= results.keys()):
                        continue
                    data, scale_inv = results[data.name], results[scale_inv.name]
                index = given.get(f"scale_inv_{side}_index")
                yield gemm, data, scale_inv, None if index is None or index < 0 else index


def _copy(gemm: fx.Node, data: fx.Node, scale_inv: fx.Node, index: int | None, context: GraphContext) -> SharedCopy | None:
    if value_of(data).dtype is not E4M3 or value_of(data).dim() != 2:
        return None
    node, transposed, columnwise = data, False, False
    while node.target in PERMUTES:
        node, transposed = node.all_input_nodes[0], not transposed
    if node.target is ops.transposed_copy.default and len(node.args) == 1:
        node, columnwise = node.all_input_nodes[0], True
    made = cast_of(node)
    if made is None:
        return None
    cast, matrix, side = made
    given = arguments_of(cast)
    granularity = Granularity(given.get("granularity", Granularity.TENSOR_WISE))
    quantization = Quantization(E4M3, granularity, square=given.get("square", False))
    module = context.name_module(maker_path(gemm))
    return SharedCopy(module, data, scale_inv, index, quantization, matrix, columnwise != side, transposed)


def cast_of(data: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """The cast that made a copy, the matrix that it read, and whether the copy is columnwise; None for what else made it."""
    cast, position = maker_of(data)
    given = arguments_of(cast) if cast.target in _CASTS else {}
    if not given or given.get("compact"):
        return None
    matrices = given["xs"]
    per_side = len(matrices) * (1 if "scales" in given else 2)
    side, of_side = divmod(position or 0, per_side)
    sides = [False] * given["rowwise"] + [True] * given["columnwise"]
    matrix = matrices[of_side] if side < len(sides) and of_side < len(matrices) else None
    return None if matrix is None or value_of(matrix).dim() != 2 else (cast, matrix, sides[side])


def lines_of(node: fx.Node, order: Sequence[int]) -> tuple[fx.Node, tuple[int, ...]]:
    """The value that has the elements of a node, its dimensions read in an order, and the order in which its own are read.
    Equal for two nodes only if both have the same elements one behind the other, but for rounding."""
    order = tuple(order)
    while True:
        is_plain, permuted = order == tuple(range(len(order))), permutation(node)
        if permuted is not None:
            order = tuple(permuted[dim] for dim in order)
        elif node.target not in SAME_ORDER or not (is_plain or node.target not in RESHAPES):
            return node, order
        node = node.all_input_nodes[0]
        if is_plain and permuted is None:
            order = tuple(range(value_of(node).dim()))
