"""Lowerings of the scalar operations: scales of amaxes, scales by value with their reciprocals."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import ops

from lowering.inductor import elementwise


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


def lower_reciprocal(x: ir.TensorBox) -> ir.TensorBox:
    """Correctly rounded, unlike aten.reciprocal in Triton code."""
    load = x.make_loader()
    return _pointwise(x, lambda index: elementwise.reciprocal(load(index)), list(x.get_size()))


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
