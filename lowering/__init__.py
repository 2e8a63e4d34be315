"""FP8 quantization, its kernels and its GEMMs as torch operations. Knows nothing of models, recipes or graphs."""

from lowering import other_ops as _other_ops  # noqa: F401 (registers its operations)
from lowering import paths as _blockwise_by_mxfp8  # noqa: F401 (one more way to compute a blockwise GEMM)
from lowering import statistics as _statistics  # noqa: F401 (registers its operations)
from lowering.api import (
    amax,
    cast_blockwise,
    cast_transpose_amax,
    cast_transpose_blockwise,
    compact_blockwise,
    quantize_blockwise,
    quantize_mxfp8,
    quantize_rowwise,
    scaled_mm,
)
from lowering.formats import Granularity
from lowering.operation import NAMESPACE as _NAMESPACE
from lowering.ops import (
    gemm_ready,
    quantize,
    scaled_grouped_mm,
    transposed_copy,
    update_scales,
)
from lowering.scaling import scale_from_amax

_NAMESPACE.require_fakes()

__all__ = [
    "Granularity",
    "amax",
    "cast_blockwise",
    "cast_transpose_amax",
    "cast_transpose_blockwise",
    "compact_blockwise",
    "gemm_ready",
    "quantize",
    "quantize_blockwise",
    "quantize_mxfp8",
    "quantize_rowwise",
    "scale_from_amax",
    "scaled_grouped_mm",
    "scaled_mm",
    "transposed_copy",
    "update_scales",
]
