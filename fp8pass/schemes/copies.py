"""FP8 copies, and the casts that make them: data, which the plan decides and everything after it obeys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather
from fp8pass.graph.gemms import GemmSite
from fp8pass.graph.origin import TensorName
from fp8pass.graph.values import MatrixValue, same_size, value_of
from fp8pass.recipes.quantization import Quantization
from fp8pass.recipes.recipe import Recipe
from lowering.formats import pad_to_alignment

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of one FP8 copy of a matrix, contiguous along K of the GEMMs that read it."""

    columnwise: bool  # It is the transpose of the matrix.
    pads_outer: bool = False  # Its outer dimension is padded with zeros, because it is the N of a GEMM.


#: The layout of a rowwise copy without padding.
ROWWISE = Layout(False)


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A value quantized in one way under one recipe: it has a scale, or one set of scales, and a history in the state."""

    value: MatrixValue
    quantization: Quantization
    recipe: Recipe
    name: TensorName = dataclasses.field(compare=False)

    def __hash__(self) -> int:  # cheaper than that of all fields, and as good: few tensors have one value
        return hash(self.value)

    @property
    def dtype(self) -> torch.dtype:
        """The FP8 dtype."""
        return self.quantization.dtype

    @property
    def entries(self) -> int:
        """Number of scales and amax histories where a recipe keeps them: one per matrix of batched weights."""
        batch = self.value.batch
        return batch if self.name.kind == "weight" and isinstance(batch, int) else 1


@dataclasses.dataclass(frozen=True)
class Copy:
    """One FP8 copy of a value, contiguous along K of the GEMMs that read it. Equal copies are made once. The rowwise and the
    columnwise copy of a value may differ in their quantizations; then they are two tensors, with a cast each."""

    value: MatrixValue
    columnwise: bool
    quantization: Quantization
    recipe: Recipe
    name: TensorName = dataclasses.field(compare=False)

    def __hash__(self) -> int:
        return hash((self.value, self.columnwise))

    @functools.cached_property
    def tensor(self) -> QuantizedTensor:
        """The tensor that it is a copy of: copies of one tensor share its scales, or the cast that computes them."""
        return QuantizedTensor(self.value, self.quantization, self.recipe, self.name)

    @property
    def dtype(self) -> torch.dtype:
        """The FP8 dtype."""
        return self.quantization.dtype


# -- sources: what a cast reads


@dataclasses.dataclass(frozen=True)
class FromInput:
    """Inputs of the graph, which hold the copy already: nothing is cast."""

    data: fx.Node
    scale_inv: fx.Node
    amax: fx.Node | None = None  # The amax of the tensor, for a graph that records it.


Source = Gather | Copy | FromInput | None
"""None: the value itself, in high precision. From a gather this rank's shard is read: FP8 copies of it travel instead of the
value. From another copy of the tensor the bytes are moved; the value is not read."""


@dataclasses.dataclass(frozen=True)
class Cast:
    """The quantization of one tensor, to one copy or to both, before the GEMM that needs it first."""

    copies: tuple[Copy, ...]  # Rowwise first; all of one tensor.
    layouts: tuple[Layout, ...]  # One per copy.
    at: GemmSite  # The GEMM that needs it first: it gives the place and the side of the partition.
    source: Source
    reads: torch.dtype  # The dtype in which the value is read: a value that was computed in a wider one is rounded to it first.
    is_first: bool = True  # No earlier cast has quantized this tensor: its scale is computed here, its amax recorded.
    is_pinned: bool = False  # It is in the backward, although the forward could make it: its copies are recomputed.
    masked: bool = False  # Rows of no group, which may hold NaN, are read as zeros: they would reach the one amax of all rows.

    @property
    def tensor(self) -> QuantizedTensor:
        """The tensor that is quantized."""
        return self.copies[0].tensor


# -- made copies


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A copy and its scale, as nodes of a graph; as tensors where quantization runs outside of graphs (`eager.py`). Invariants:
    `data` is [outer, inner], of a batch [batch, outer, inner], contiguous, of the copy's dtype, inner along K of its GEMMs.
    `scale_inv` is float32, or E8M0 codes in uint8, and multiplies what `data` holds, laid out as the GEMM of this granularity
    reads it."""

    data: fx.Node
    scale_inv: fx.Node
    copy: Copy
    maker: fx.Node  # The operation that wrote the bytes: a cast, or one that moved them; an input of the graph if nothing did.

    @property
    def quantization(self) -> Quantization:
        """The quantization of the copy."""
        return self.copy.quantization


Results = tuple[list[fx.Node], list[fx.Node], fx.Node | None]
"""The results of a cast for one matrix: data of each copy, its scales where the operation computes them, and the amax."""


def insert_cast(
    cursor: Cursor,
    target: Any,
    matrices: Sequence[fx.Node],
    dtype: torch.dtype,
    layouts: Sequence[Layout],
    scales: Sequence[fx.Node] | None = None,
    with_amax: bool = False,
    **options: Any,
) -> tuple[fx.Node, list[Results]]:
    """Insert one cast of matrices, or of a batch, to one copy or to both; `scales` has one for each, None where the operation
    computes them. `options`: the operation's own keyword arguments. Its results, each for all matrices: the data of the rowwise
    copies, their scales where the operation computes them, then both of the columnwise copies; then the amaxes, a scalar of one
    matrix, else a vector."""
    row, col = ([layout for layout in layouts if layout.columnwise == side] for side in (False, True))
    pads = {"pad_rows": any(x.pads_outer for x in row), "pad_cols": any(x.pads_outer for x in col)}
    options |= {"rowwise": bool(row), "columnwise": bool(col), **pads, **({"with_amax": True} if with_amax else {})}
    given = () if scales is None else (list(scales),)
    node = cursor.call(target, list(matrices), *given, dtype, **options)
    count, width = len(matrices), 2 if scales is None else 1
    amaxes = cursor.item(node, len(layouts) * width * count) if with_amax else None
    found: list[Results] = []
    for i in range(count):
        results = [cursor.item(node, position * count + i) for position in range(len(layouts) * width)]
        amax = amaxes if amaxes is None or count == 1 else cursor.call(aten.select.int, amaxes, 0, i)
        found.append((results[::width], results[1::2] if scales is None else [], amax))
    return node, found


def padding_of(value: MatrixValue, layout: Layout) -> list[int] | None:
    """Arguments of `constant_pad_nd` for what an FP8 copy has more than the matrix; None if sizes are dynamic."""
    outer, inner = (value.cols, value.rows) if layout.columnwise else (value.rows, value.cols)
    padded = (pad_to_alignment(outer) if layout.pads_outer else outer, pad_to_alignment(inner))
    extra: list[int] = []
    for have, want in zip(padded, (outer, inner), strict=True):
        if same_size(have, want):
            extra.append(0)
        elif isinstance(have, int) and isinstance(want, int):
            extra.append(have - want)
        else:
            return None
    return [0, extra[1], 0, extra[0]]


def transposed_data(cursor: Cursor, made: Quantized, layout: Layout) -> fx.Node:
    """The data of the other orientation of a copy, of static sizes, in this layout: the same bytes, and padding of its own."""
    value, columnwise = made.copy.value, made.copy.columnwise
    data, first = made.data, value_of(made.data).dim() - 2
    sizes = (value.cols, value.rows) if columnwise else (value.rows, value.cols)
    for dim, size in enumerate(sizes, first):
        if value_of(data).shape[dim] != size:
            data = cursor.call(aten.slice.Tensor, data, dim, 0, size)
    if first == 0 and not layout.pads_outer:
        return cursor.call(torch.ops.lowering.transposed_copy.default, data)
    data = cursor.call(aten.view.dtype, data, torch.uint8)
    data = cursor.call(aten.permute.default, data, [*range(first), first + 1, first])
    return as_operand(cursor, data, value, layout, made.copy.dtype)


def as_operand(cursor: Cursor, data: fx.Node, value: MatrixValue, layout: Layout, dtype: torch.dtype) -> fx.Node:
    """FP8 bytes [outer, inner] of the whole matrix as a GEMM reads them: padded and contiguous."""
    padding = padding_of(value, layout)
    if padding and any(padding):
        data = cursor.call(aten.constant_pad_nd.default, data, padding, 0)
    data = cursor.call(aten.clone.default, data, memory_format=torch.contiguous_format)
    return cursor.call(aten.view.dtype, data, dtype)
