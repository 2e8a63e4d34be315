"""One orientation of an FP8 copy made of the bytes of the other, for scales that both share."""

from __future__ import annotations

import torch
from torch import fx

from fp8pass.graph.casts import Layout
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.values import MatrixValue, same_size, value_of
from fp8pass.schemes.copies import Quantized
from lowering.formats import pad_to_alignment

aten = torch.ops.aten


def padding_of(value: MatrixValue, layout: Layout) -> list[int] | None:
    """How many zero columns and rows an FP8 copy has more than the matrix; None if that depends on dynamic sizes."""
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


def turned_data(cursor: Cursor, made: Quantized, layout: Layout) -> fx.Node:
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
    padding = padding_of(value, layout)
    assert padding is not None
    if any(padding):
        data = cursor.call(aten.constant_pad_nd.default, data, padding, 0)
    data = cursor.call(aten.clone.default, data, memory_format=torch.contiguous_format)
    return cursor.call(aten.view.dtype, data, made.copy.dtype)
