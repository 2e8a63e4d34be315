"""FP8 quantization, its kernels and its GEMMs as torch operations. Knows nothing of models, recipes or graphs."""

from lowering.ops import (
    amax,
    cast_transpose_amax,
    quantize,
    scale_from_amax,
    scaled_mm,
    update_scales,
)

__all__ = [
    "amax",
    "cast_transpose_amax",
    "quantize",
    "scale_from_amax",
    "scaled_mm",
    "update_scales",
]
