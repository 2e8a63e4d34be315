"""FP8 quantization, its kernels and its GEMMs as torch operations. Knows nothing of models, recipes or graphs."""

from lowering.blockwise import (
    cast_blockwise,
    cast_transpose_blockwise,
    compact_blockwise,
    gemm_ready_blockwise,
    quantize_blockwise,
    scaled_mm_blockwise,
)
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
    "cast_blockwise",
    "cast_transpose_amax",
    "cast_transpose_blockwise",
    "compact_blockwise",
    "gemm_ready_blockwise",
    "quantize",
    "quantize_blockwise",
    "scale_from_amax",
    "scaled_mm",
    "scaled_mm_blockwise",
    "update_scales",
]
