"""Casts of matrices and batches: their layouts, and the order of their results.

The results of a cast, each for all matrices: the data of the rowwise copies, their scales where the operation computes them,
then both of the columnwise copies; then the amaxes, a scalar of one matrix, else a vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Layout:
    """One FP8 copy of a matrix, contiguous along K of the GEMMs that read it."""

    columnwise: bool
    """It is the transpose of the matrix."""
    pads_outer: bool = False
    """Its outer dimension is padded with zeros, because it is the N of a GEMM."""


BOTH = (False, True)
"""Orientations of the copies of a cast that makes two, in the order of its outputs."""


@dataclasses.dataclass(frozen=True)
class CopyNodes:
    """The nodes of one FP8 copy."""

    data: fx.Node
    scale_inv: fx.Node | None
    """None where the scale was an argument of the cast."""


@dataclasses.dataclass(frozen=True)
class CastOutputs:
    """The results of a cast for one matrix."""

    copies: tuple[CopyNodes, ...]
    amax: fx.Node | None
    node: fx.Node
    """The cast itself."""


def emit(
    cursor: Cursor,
    target: Any,
    matrix: fx.Node,
    dtype: torch.dtype,
    layouts: Sequence[Layout],
    scale: fx.Node | None = None,
    with_amax: bool = False,
    **options: Any,
) -> CastOutputs:
    """`emit_many` of one matrix, or of one batch."""
    return emit_many(cursor, target, [matrix], dtype, layouts, None if scale is None else [scale], with_amax, **options)[0]


def emit_many(
    cursor: Cursor,
    target: Any,
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
    node = cursor.call(target, list(matrices), *given, dtype, **options, **_layout_arguments(layouts))
    count, width, num_copies = len(matrices), 2 if scales is None else 1, len(layouts)
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
