"""The operations that quantize, as one typed view: what each reads, and what its outputs are, in which order.

Schemes build casts with `emit` and `emit_many`; `CastNode.read` finds them in a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import fx

from fp8pass.graph.calls import arguments_of
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.scales import Place, place_of

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Layout:
    """One FP8 copy of a matrix, contiguous along K of the GEMMs that read it."""

    columnwise: bool
    """Whether it is the transpose of the matrix."""
    pads_outer: bool = False
    """Whether its outer dimension is padded with zeros, because it is the N of a GEMM."""


BOTH = (False, True)
"""Orientations of the copies of a cast that makes two, in the order of its outputs."""


@dataclasses.dataclass(frozen=True)
class CastFamily:
    """The operation that quantizes to one kind of scale: a list of matrices and batches, for each the copies asked for.

    Its results, each for all matrices: the data of the rowwise copies, their scales where `scales_out`, the same of the
    columnwise copies; then the amaxes, a scalar of one matrix, else a vector.
    """

    cast: Any
    """(matrices, dtype, rowwise, columnwise, pad_rows, pad_cols, ...), with the scales before dtype unless `scales_out`."""
    scales_out: bool = False
    """Whether the operation computes the scales."""

    @property
    def targets(self) -> tuple[Any, ...]:
        """The operation."""
        return (self.cast,)


@dataclasses.dataclass(frozen=True)
class ColumnFamily:
    """The operation that makes the columnwise copy of rows in groups, with scales of its own: (x, dtype, offs, index, ...)."""

    cast: Any
    scales_out: ClassVar[bool] = True

    @property
    def targets(self) -> tuple[Any, ...]:
        """The operation."""
        return (self.cast,)


Family = TypeVar("Family", CastFamily, ColumnFamily)
_FAMILY_OF: dict[Any, CastFamily | ColumnFamily] = {}
"""Of each operation."""


def register(family: Family) -> Family:
    """Let `CastNode.read` know a family; returns it. Raises ValueError where one of its operations is in another."""
    taken = [target for target in family.targets if target in _FAMILY_OF]
    if taken:
        raise ValueError(f"{taken[0]} is in a family already")
    _FAMILY_OF.update(dict.fromkeys(family.targets, family))
    return family


@dataclasses.dataclass(frozen=True)
class CopyNodes:
    """The nodes of one FP8 copy."""

    data: fx.Node
    scale_inv: fx.Node | None
    """None where the scale was an argument of the cast."""


@dataclasses.dataclass(frozen=True)
class CastOutputs:
    """What a cast made of one matrix."""

    copies: tuple[CopyNodes, ...]
    amax: fx.Node | None
    node: fx.Node
    """The cast itself."""


def emit(
    cursor: Cursor,
    family: CastFamily,
    matrix: fx.Node,
    dtype: torch.dtype,
    layouts: Sequence[Layout],
    scale: fx.Node | None = None,
    with_amax: bool = False,
    **options: Any,
) -> CastOutputs:
    """`emit_many` of one matrix, or of one batch."""
    return emit_many(cursor, family, [matrix], dtype, layouts, None if scale is None else [scale], with_amax, **options)[0]


def emit_many(
    cursor: Cursor,
    family: CastFamily,
    matrices: Sequence[fx.Node],
    dtype: torch.dtype,
    layouts: Sequence[Layout],
    scales: Sequence[fx.Node] | None = None,
    with_amax: bool = False,
    **options: Any,
) -> list[CastOutputs]:
    """Insert one cast of matrices to one copy or to both; `scales` has one for each, None where the operation computes them.
    `options`: the operation's own keyword arguments."""
    if with_amax:
        options["with_amax"] = True
    given = () if scales is None else (list(scales),)
    node = cursor.call(family.cast, list(matrices), *given, dtype, **options, **_layout_arguments(layouts))
    count, width, num_copies = len(matrices), 2 if family.scales_out else 1, len(layouts)
    amaxes = cursor.item(node, num_copies * width * count) if with_amax else None
    found = []
    for i in range(count):
        of_matrix = [cursor.item(node, position * count + i) for position in range(num_copies * width)]
        copies = tuple(
            CopyNodes(of_matrix[c * width], of_matrix[c * width + 1] if width == 2 else None) for c in range(num_copies)
        )
        amax = amaxes if amaxes is None or count == 1 else cursor.call(aten.select.int, amaxes, 0, i)
        found.append(CastOutputs(copies, amax, node))
    return found


def _layout_arguments(layouts: Sequence[Layout]) -> dict[str, bool]:
    """The arguments of a cast that say which copies it makes."""
    row, col = ([layout for layout in layouts if layout.columnwise == side] for side in BOTH)
    pads = {"pad_rows": any(x.pads_outer for x in row), "pad_cols": any(x.pads_outer for x in col)}
    return {"rowwise": bool(row), "columnwise": bool(col), **pads}


@dataclasses.dataclass(frozen=True)
class CastNode:
    """A cast in a graph."""

    node: fx.Node
    family: CastFamily | ColumnFamily

    @classmethod
    def read(cls, node: fx.Node) -> CastNode | None:
        """The view of a node; None if it is not a cast that GEMMs read: copies that travel are made ready for them later."""
        family = _FAMILY_OF.get(node.target)
        return None if family is None or node.kwargs.get("compact") else cls(node, family)

    @property
    def _args(self) -> Any:
        return self.node.args

    @property
    def matrices(self) -> tuple[fx.Node, ...]:
        """What is quantized."""
        first = self._args[0]
        return tuple(first) if isinstance(first, (list, tuple)) else (first,)

    @property
    def scale(self) -> tuple[fx.Node, ...] | None:
        """The scale of each matrix, or the vector of a batch's; None where the operation computes them."""
        if self.family.scales_out:
            return None
        return tuple(self._args[1])

    def scale_place(self, position: int) -> Place | None:
        """Where the scale of a matrix is, of a batch those of its matrices; None where the operation computes them."""
        scale = self.scale
        if scale is None:
            return None
        return place_of(scale[position], (arguments_of(self.node)["scales_index"] or [None] * len(scale))[position])

    @property
    def dtype(self) -> torch.dtype:
        """The FP8 dtype."""
        dtype: torch.dtype = next(a for a in self._args if isinstance(a, torch.dtype))
        return dtype

    @property
    def orientations(self) -> tuple[bool, ...]:
        """For each copy of a matrix whether it is columnwise."""
        if isinstance(self.family, ColumnFamily):
            return (True,)
        wanted = (self.node.kwargs.get("rowwise", True), self.node.kwargs.get("columnwise", False))
        return tuple(side for side, is_made in zip(BOTH, wanted, strict=True) if is_made)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that say how scales are made."""
        layout = {"rowwise", "columnwise", "pad_outer", "pad_rows", "pad_cols", "with_amax"}
        options = {k: v for k, v in self.node.kwargs.items() if k not in layout and not k.endswith("_index")}
        if isinstance(self.family, ColumnFamily):
            options["groups"] = self._args[2:]
        return options
