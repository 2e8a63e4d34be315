"""Which lowering belongs to which operation.

elementwise   arithmetic of one element, in Inductor's virtualized ops
buffers       Inductor IR: where values come from, buffers with a fixed loop order
casts         cast, cast_amax, cast_transpose, cast_transpose_amax, amax
scales        scale_from_amax, scales_from_amax, load_scales, take
record        record_amax
gemm          scaled_mm
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def register_all() -> None:
    """Register every lowering once."""
    from torch._inductor.lowering import register_lowering

    from lowering import grouped  # noqa: F401 (registers operations)
    from lowering.inductor import casts, gemm, record, scales

    ops = torch.ops.lowering
    functions = {
        ops.amax.default: casts.lower_amax,
        ops.cast.default: casts.lower_cast,
        ops.cast_amax.default: casts.lower_cast_amax,
        ops.cast_transpose.default: casts.lower_cast_transpose,
        ops.cast_transpose_amax.default: casts.lower_cast_transpose_amax,
        ops.scale_from_amax.default: scales.lower_scale_from_amax,
        ops.scales_from_amax.default: scales.lower_scales_from_amax,
        ops.load_scales.default: scales.lower_load_scales,
        ops.take.default: scales.lower_take,
        ops.record_amax.default: record.lower_record_amax,
        ops.scaled_mm.default: gemm.lower_scaled_mm,
    }
    for op, function in functions.items():
        register_lowering(op, type_promotion_kind=None)(function)
