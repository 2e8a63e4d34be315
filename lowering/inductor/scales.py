"""Lowerings of scale_from_amax and scales_from_amax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import ops

from lowering.inductor import elementwise
from lowering.inductor.buffers import as_it_is, is_computed, pointwise_like


def _scale_of(amax: ir.TensorBox, dtype: torch.dtype, margin: int, epsilon: float, power_of_2: bool) -> Callable[[Any], Any]:
    """The scale at an index."""
    load, amax_dtype = amax.make_loader(), amax.get_dtype()

    def scale_at(index: Any) -> Any:
        value = elementwise.to_float32(load(index), amax_dtype)
        return elementwise.scale_from_amax(value, dtype, margin, epsilon, power_of_2)

    return scale_at


def lower_scale_from_amax(
    amax: ir.TensorBox, dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> ir.TensorBox:
    """Pointwise: joins the last reduction of the amax."""
    amax.realize()
    return pointwise_like(amax, _scale_of(amax, dtype, margin, epsilon, power_of_2), list(amax.get_size()))


def lower_scales_from_amax(
    amax: ir.TensorBox,
    dtype: torch.dtype,
    *,
    margin: int = 0,
    epsilon: float = 0.0,
    power_of_2: bool = False,
    inverse: str | None = None,
) -> tuple[ir.TensorBox, ir.TensorBox]:
    """Two scalars that join the reduction of the amax; where an extern kernel made it, the operation that makes scales of
    tensors takes its place, or one buffer for both, because two kernels that share but four bytes are not fused. Scales as
    engines make them have no kernel."""
    amax.realize()
    if inverse is not None:
        of_engines = as_it_is(torch.ops.lowering.scales_from_amax.default, is_read=False)
        return of_engines(amax, dtype, epsilon=epsilon, inverse=inverse)
    tensors = getattr(amax, "fp8_amax_of", None)
    if tensors is not None:  # hand-written kernels, the second of which makes the scales; nothing reads amax
        fused = as_it_is(torch.ops.lowering.multi_scales.default)
        made = fused(tensors, dtype, margin=margin, epsilon=epsilon, power_of_2=power_of_2)
        return made if amax.get_size() else tuple(lowerings[torch.ops.aten.select.int](vector, 0, 0) for vector in made)
    scale_at, size = _scale_of(amax, dtype, margin, epsilon, power_of_2), list(amax.get_size())

    def inverse_at(index: Any) -> Any:
        return elementwise.reciprocal(scale_at(index))

    def either_at(index: Any) -> Any:
        which, *rest = index
        is_scale = ops.eq(ops.index_expr(which, torch.int32), ops.constant(0, torch.int32))
        return ops.where(is_scale, scale_at(rest), inverse_at(rest))

    if is_computed(amax):
        boxes = pointwise_like(amax, scale_at, size), pointwise_like(amax, inverse_at, size)
        for box in boxes:
            box.realize()
        return boxes
    both = pointwise_like(amax, either_at, [2, *size])
    both.realize()
    select = lowerings[torch.ops.aten.select.int]
    return select(both, 0, 0), select(both, 0, 1)
