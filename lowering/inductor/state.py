"""Lowerings of the operations on the state: scales loaded by value, amaxes recorded.

One kernel takes the partial amaxes of every tensor of a graph, whatever their number and sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import ops

from lowering.inductor import elementwise
from lowering.inductor.buffers import as_it_is, pointwise_like
from lowering.inductor.casts import parts_of


def lower_load_scales(scale: ir.TensorBox, slots: ir.TensorBox, count: int) -> tuple[ir.TensorBox, ir.TensorBox]:
    """One kernel for the scales of a whole graph."""
    load_scale, load_slot = scale.make_loader(), slots.make_loader()

    def taken(index: Any) -> Any:
        slot = ops.indirect_indexing(load_slot(index), scale.get_size()[0])
        return load_scale([slot])

    boxes = pointwise_like(scale, taken, [count]), pointwise_like(scale, lambda i: elementwise.reciprocal(taken(i)), [count])
    for box in boxes:
        box.realize()
    return boxes


def lower_take(x: ir.TensorBox, index: list[int]) -> ir.TensorBox:
    """A slice; else the positions as arithmetic in the kernel: a table would be a tensor to copy to the device."""
    offsets = [position - i for i, position in enumerate(index)]
    steps = [(i, offset) for i, offset in enumerate(offsets) if i == 0 or offset != offsets[i - 1]]
    if len(steps) == 1:
        return lowerings[torch.ops.aten.slice.Tensor](x, 0, index[0], index[-1] + 1)
    load = x.make_loader()

    def inner(indices: Any) -> Any:
        i = ops.index_expr(indices[0], torch.int64)
        position = ops.add(i, ops.constant(steps[0][1], torch.int64))
        for start, offset in steps[1:]:
            moved = ops.add(i, ops.constant(offset, torch.int64))
            position = ops.where(ops.ge(i, ops.constant(start, torch.int64)), moved, position)
        return load([ops.indirect_indexing(position, x.get_size()[0])])

    box = pointwise_like(x, inner, [len(index)])
    box.realize()
    return box


def lower_record_amax(amax: ir.TensorBox, slots: ir.TensorBox, observed: list[ir.TensorBox], index: list[int]) -> Any:
    """Of partial amaxes: nothing finishes them one by one, nothing is stacked. Vectors stay vectors."""
    record = as_it_is(torch.ops.lowering.record_amax.default)
    if any(o.get_size() for o in observed):
        return record(amax, slots, observed, index)
    return record(amax, slots, [parts_of(o) for o in observed], index, in_parts=True)


LOWERINGS = {
    torch.ops.lowering.load_scales.default: lower_load_scales,
    torch.ops.lowering.take.default: lower_take,
    torch.ops.lowering.record_amax.default: lower_record_amax,
}
