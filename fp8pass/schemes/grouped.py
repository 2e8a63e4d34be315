"""What schemes share for grouped GEMMs: the copies of rows in groups.

In a graph: the rowwise copy is made as that of a matrix. With one scale for all rows, those that belong to no group become
zeros before, so that they reach no amax; with a scale per row they spoil nothing but themselves. A gathered source is cast
once, and its bytes and scales are gathered. The columnwise copy, which grad_weight reads, has every group at a padded offset
(lowering/grouped/reference.py): with one scale per tensor it is moved out of the rowwise one, else it is made of the tensor.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8pass.graph.casts import ColumnFamily, register
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.values import value_of
from fp8pass.schemes.copies import Cast, Quantized
from fp8pass.schemes.scheme import GroupNodes, scaling

aten = torch.ops.aten
ops = torch.ops.lowering

COLUMNS = register(ColumnFamily(ops.cast_columns.default))


def in_slots(cursor: Cursor, data: fx.Node, groups: GroupNodes) -> fx.Node:
    """The rows of a copy, or of its scales, in the order of the slots: bytes, which every device indexes. Scales that lie by
    blocks stay so."""
    if groups.index is None:
        return data
    value = value_of(data)
    dtype = value.dtype
    if value.shape[1] > 1 and value.stride(0) == 1:
        blocks = cursor.call(aten.permute.default, data, [1, 0])
        return cursor.call(aten.permute.default, cursor.call(aten.index.Tensor, blocks, [None, groups.index]), [1, 0])
    if dtype.is_floating_point and dtype.itemsize == 1:
        data = cursor.call(aten.view.dtype, data, torch.uint8)
        return cursor.call(aten.view.dtype, cursor.call(aten.index.Tensor, data, [groups.index]), dtype)
    return cursor.call(aten.index.Tensor, data, [groups.index])


def zero(cursor: Cursor, like: fx.Node) -> fx.Node:
    """A scalar 0 of a node's dtype and device."""
    value = value_of(like)
    return cursor.call(aten.full.default, [], 0, dtype=value.dtype, device=value.device)


def moved_columns(cursor: Cursor, rows: fx.Node, groups: GroupNodes) -> fx.Node:
    """The columnwise copy that holds the bytes of a rowwise one, which is not gathered."""
    return cursor.call(ops.group_columns.default, rows, groups.offs, groups.index)


def cast_columns(cursor: Cursor, cast: Cast, matrix: fx.Node, groups: GroupNodes) -> Quantized:
    """The columnwise copy made of the tensor, which the cast gathers; rows that no group reads are not read."""
    (copy,), (layout,) = cast.copies, cast.layouts
    options = {"granularity": copy.quantization.granularity.value, "pad_outer": layout.pads_outer, **scaling(copy.quantization)}
    made = cursor.call(COLUMNS.cast, matrix, copy.dtype, groups.offs, groups.index, **options)
    data, scales = cursor.items(made)
    return Quantized(data, scales, copy, made)
