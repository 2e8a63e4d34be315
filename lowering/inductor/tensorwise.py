"""Which lowering belongs to which operation with one scale per tensor."""

from __future__ import annotations

import torch

from lowering.inductor import casts, gemm, scales

ops = torch.ops.lowering

LOWERINGS = {
    ops.amax.default: casts.lower_amax,
    ops.multi_amax.default: casts.lower_multi_amax,
    ops.cast.default: casts.lower_cast,
    ops.scale_from_amax.default: scales.lower_scale_from_amax,
    ops.scales_from_amax.default: scales.lower_scales_from_amax,
    ops.scaled_mm.default: gemm.lower_scaled_mm,
}
