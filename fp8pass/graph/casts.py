"""The operations that quantize, as one typed view: what each reads, and what its outputs are, in which order.

Recipes build casts with `emit` and `emit_many`; `CastNode.read` finds them in a graph.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor
from lowering.grouped.ops import group_columns

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
    """The operations that quantize to one kind of scale.

    Their outputs, in this order: the data of each copy (rowwise first), each followed by its scales where `scales_out`; then
    the amax. `many` returns for each of these outputs those of all its matrices; the amaxes are one vector.
    """

    one: Any
    """Makes one copy."""
    both: Any
    """Makes the rowwise and the columnwise copy of one read."""
    scales_out: bool = False
    """Whether the operation computes the scales; otherwise its second argument is the scale."""
    one_amax: Any = None
    """`one` and the amax of the matrix."""
    both_amax: Any = None
    many: Any = None
    """`both_amax`, or `both` where `scales_out`, of several matrices in one launch. Scales are a list, here and below."""
    many_one: Any = None
    """`one` of several matrices in one launch."""
    many_one_amax: Any = None

    @property
    def targets(self) -> tuple[Any, ...]:
        """All operations of the family."""
        found = (self.one, self.both, self.one_amax, self.both_amax, self.many, self.many_one, self.many_one_amax)
        return tuple(t for t in found if t is not None)

    @property
    def single(self) -> tuple[Any, ...]:
        """Those that make one copy of a matrix."""
        return tuple(t for t in (self.one, self.one_amax, self.many_one, self.many_one_amax) if t is not None)


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
    """Insert a cast of one matrix to one copy or to both. `options`: the operation's own keyword arguments."""
    target = _target(family, len(layouts), with_amax)
    scales = () if scale is None else (scale,)
    node = cursor.call(target, matrix, *scales, dtype, **options, **_layout_arguments(layouts))
    outputs = cursor.items(node)
    width = 2 if family.scales_out else 1
    copies = [CopyNodes(outputs[i * width], outputs[i * width + 1] if family.scales_out else None) for i in range(len(layouts))]
    return CastOutputs(tuple(copies), outputs[-1] if with_amax else None, node)


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
    """Insert one cast of several matrices to one copy or to both; `scales` has one for each, None where the operation computes
    them. `options`: the operation's own keyword arguments."""
    if len(layouts) == 2:
        target = family.many
    else:
        target = family.many_one_amax if with_amax else family.many_one
    given = () if scales is None else (list(scales),)
    node = cursor.call(target, list(matrices), *given, dtype, **options, **_layout_arguments(layouts))
    count, width, num_copies = len(matrices), 2 if family.scales_out else 1, len(layouts)
    amaxes = cursor.item(node, num_copies * width * count) if with_amax else None
    found = []
    for i in range(count):
        of_matrix = [cursor.item(node, position * count + i) for position in range(num_copies * width)]
        copies = tuple(
            CopyNodes(of_matrix[c * width], of_matrix[c * width + 1] if width == 2 else None) for c in range(num_copies)
        )
        amax = None if amaxes is None else cursor.call(aten.select.int, amaxes, 0, i)
        found.append(CastOutputs(copies, amax, node))
    return found


#: What moves the bytes of a copy whose rows are in groups.
_MOVES = (
    aten.index.Tensor,
    aten.select.int,
    aten.view.dtype,
    group_columns.overload,
    operator.getitem,
)


def maker_of(data: fx.Node) -> fx.Node:
    """The cast that made a copy, from the node of its data."""
    while data.target in _MOVES:
        data = data.all_input_nodes[0]
    return data


def _target(family: CastFamily, num_copies: int, with_amax: bool) -> Any:
    if num_copies == 2:
        return family.both_amax if with_amax else family.both
    return family.one_amax if with_amax else family.one


def _layout_arguments(layouts: Sequence[Layout]) -> dict[str, bool]:
    """The arguments of a cast that say which copies it makes."""
    if len(layouts) == 2:
        return {"pad_rows": layouts[0].pads_outer, "pad_cols": layouts[1].pads_outer}
    return {"columnwise": layouts[0].columnwise, "pad_outer": layouts[0].pads_outer}


@dataclasses.dataclass(frozen=True)
class CastNode:
    """A cast in a graph."""

    node: fx.Node
    family: CastFamily | ColumnFamily

    @classmethod
    def read(cls, node: fx.Node) -> CastNode | None:
        """The view of a node; None if it is not a cast."""
        family = _FAMILY_OF.get(node.target)
        return None if family is None else cls(node, family)

    @property
    def _args(self) -> Any:
        return self.node.args

    @property
    def matrices(self) -> tuple[fx.Node, ...]:
        """What is quantized."""
        first = self._args[0]
        return tuple(first) if isinstance(first, (list, tuple)) else (first,)

    @property
    def scale(self) -> fx.Node | tuple[fx.Node, ...] | None:
        """The scale, that of each matrix, or the vector of a stack's; None where the operation computes them."""
        if self.family.scales_out:
            return None
        given = self._args[1]
        return given if isinstance(given, fx.Node) else tuple(given)

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
        if self.node.target in self.family.single:
            return (bool(self.node.kwargs.get("columnwise", False)),)
        return BOTH

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that say how scales are made."""
        layout = {"columnwise", "pad_outer", "pad_rows", "pad_cols"}
        options = {k: v for k, v in self.node.kwargs.items() if k not in layout}
        if isinstance(self.family, ColumnFamily):
            options["groups"] = self._args[2:]
        return options
