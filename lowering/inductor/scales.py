"""Lowerings of the scalar operations: scales of amaxes, scales by value with their reciprocals."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings
from torch._inductor.virtualized import ops

from lowering.inductor import elementwise
from lowering.inductor.buffers import is_computed


def _pointwise(like: ir.TensorBox, inner: Any, size: list[Any]) -> ir.TensorBox:
    return ir.Pointwise.create(device=like.get_device(), dtype=torch.float32, inner_fn=inner, ranges=size)


def lower_scale_from_amax(
    amax: ir.TensorBox, dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> ir.TensorBox:
    """Pointwise: joins the last reduction of the amax."""
    amax.realize()
    load, amax_dtype = amax.make_loader(), amax.get_dtype()

    def inner(index: Any) -> Any:
        value = elementwise.to_float32(load(index), amax_dtype)
        return elementwise.scale_from_amax(value, dtype, margin, epsilon, power_of_2)

    return _pointwise(amax, inner, list(amax.get_size()))


def lower_scales_from_amax(
    amax: ir.TensorBox, dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> tuple[ir.TensorBox, ir.TensorBox]:
    """Two scalars that join the reduction of the amax; where an extern kernel made it, one buffer for both, because two
    kernels that share but four bytes are not fused. On the CPU always one buffer, and none where it would be a C++
    kernel of its own."""
    amax.realize()
    on_cpu = amax.get_device().type == "cpu"
    if on_cpu and not is_computed(amax):
        eager = fallback_handler(torch.ops.lowering.scales_from_amax.default, add_to_fallback_set=False)
        return tuple(eager(amax, dtype, margin=margin, epsilon=epsilon, power_of_2=power_of_2))
    load, amax_dtype, size = amax.make_loader(), amax.get_dtype(), list(amax.get_size())

    def scale_at(index: Any) -> Any:
        value = elementwise.to_float32(load(index), amax_dtype)
        return elementwise.scale_from_amax(value, dtype, margin, epsilon, power_of_2)

    def inverse_at(index: Any) -> Any:
        return elementwise.reciprocal(scale_at(index))

    def either_at(index: Any) -> Any:
        which, *rest = index
        is_scale = ops.eq(ops.index_expr(which, torch.int32), ops.constant(0, torch.int32))
        return ops.where(is_scale, scale_at(rest), inverse_at(rest))

    if is_computed(amax) and not on_cpu:
        boxes = _pointwise(amax, scale_at, size), _pointwise(amax, inverse_at, size)
        for box in boxes:
            box.realize()
        return boxes
    both = _pointwise(amax, either_at, [2, *size])
    both.realize()
    select = lowerings[torch.ops.aten.select.int]
    return select(both, 0, 0), select(both, 0, 1)


def lower_load_scales(scale: ir.TensorBox, slots: ir.TensorBox, count: int) -> tuple[ir.TensorBox, ir.TensorBox]:
    """One kernel for the scales of a whole graph."""
    load_scale, load_slot = scale.make_loader(), slots.make_loader()

    def taken(index: Any) -> Any:
        slot = ops.indirect_indexing(load_slot(index), scale.get_size()[0])
        return load_scale([slot])

    boxes = _pointwise(scale, taken, [count]), _pointwise(scale, lambda i: elementwise.reciprocal(taken(i)), [count])
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

    box = _pointwise(x, inner, [len(index)])
    box.realize()
    return box
