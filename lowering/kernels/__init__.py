"""Triton kernels of the per-tensor operations, and the functions that launch them. Importing this imports Triton.

amax                    amax
cast                    quantize, cast, cast_amax
cast_transpose          cast_transpose, cast_transpose_amax
multi_cast_transpose    multi_cast_transpose_amax: many matrices, one launch
record                  load_scales, record_amax
update_scales           update_scales
gemm                    scaled_mm
tile, launch            shared by the above: device functions; launch wrappers' helpers

Each function computes what the function of its name in `lowering.reference` says, bit for bit except for the sign of
NaN.
"""

from lowering.kernels.amax import amax
from lowering.kernels.cast import cast, cast_amax, quantize
from lowering.kernels.cast_transpose import cast_transpose, cast_transpose_amax
from lowering.kernels.gemm import scaled_mm
from lowering.kernels.multi_cast_transpose import multi_cast_transpose_amax
from lowering.kernels.record import load_scales, record_amax
from lowering.kernels.update_scales import update_scales

__all__ = [
    "amax",
    "cast",
    "cast_amax",
    "cast_transpose",
    "cast_transpose_amax",
    "load_scales",
    "multi_cast_transpose_amax",
    "quantize",
    "record_amax",
    "scaled_mm",
    "update_scales",
]
