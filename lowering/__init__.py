"""FP8 quantization, its kernels and its GEMMs as torch operations. Knows nothing of models, recipes or graphs.

checks      what arguments every kind of scaling refuses
conversion  the PTX that converts to FP8
blocks      scales of blocks, in plain torch
copies      shapes of FP8 copies, and what casts return in which order
formats     dtypes, their largest values, granularities of scales, alignment
hardware    what device, torch and Triton can do; why an FP8 GEMM cannot run
forward_mode  tangents, which are refused
operation   one object per operation: schema from its reference, fake, checks, providers
products    GEMMs in plain torch
scaling     the arithmetic that every kind of scaling shares
tensor_cores  torch's GEMM with scalar scales
trials      GEMMs of other libraries, trusted after a trial
decisions   what calls of a kind share, decided once
deep_gemm   the package of that name, and what it asks of every GEMM
paths       what computes a GEMM on a GPU, by its formats and the platform
triton      what the Triton kernels of all rooms share
tensorwise  a room: one scale per tensor
mxfp8       a room: one E8M0 scale per 1x32 block
blockwise   a room: one scale per 1x128 or 128x128 block
rowwise     a room: one scale per row
state       a room: histories and scales of delayed scaling
grouped     a room: one GEMM per group, for mixtures of experts
sigmoid     the logistic function, cheaper in compiled graphs
packing     several tensors as the bytes of one
blockwise_by_mxfp8  blockwise GEMMs on SM100
checksums   whether tensors have changed
statistics  what quantization does to a tensor, for monitoring
kernels     the same on GPUs, of what is in memory
casts       the public casts of one tensor
gemm        scaled_mm, whatever scales its operands have
inductor    lowerings of the operations for Inductor
"""

from lowering import blockwise_by_mxfp8 as _blockwise_by_mxfp8  # noqa: F401 (one more way to compute a blockwise GEMM)
from lowering import checksums as _checksums  # noqa: F401 (registers it)
from lowering import statistics as _statistics  # noqa: F401 (registers its operations)
from lowering.blockwise.ops import gemm_ready_blockwise, scaled_mm_blockwise
from lowering.casts import (
    cast_blockwise,
    cast_transpose_amax,
    cast_transpose_blockwise,
    compact_blockwise,
    quantize_blockwise,
    quantize_mxfp8,
    quantize_rowwise,
)
from lowering.formats import Granularity
from lowering.gemm import scaled_mm
from lowering.grouped.ops import group_columns, scaled_grouped_mm
from lowering.mxfp8.ops import gemm_ready_mxfp8, scaled_mm_mxfp8
from lowering.operation import NAMESPACE as _NAMESPACE
from lowering.packing import packed as _packed  # noqa: F401 (registers it)
from lowering.sigmoid import sigmoid as _sigmoid  # noqa: F401 (registers it)
from lowering.state.ops import update_scales
from lowering.tensorwise.ops import amax, quantize, scale_from_amax

_NAMESPACE.require_fakes()

__all__ = [
    "Granularity",
    "amax",
    "cast_blockwise",
    "cast_transpose_amax",
    "cast_transpose_blockwise",
    "compact_blockwise",
    "gemm_ready_blockwise",
    "gemm_ready_mxfp8",
    "group_columns",
    "quantize",
    "quantize_blockwise",
    "quantize_mxfp8",
    "quantize_rowwise",
    "scale_from_amax",
    "scaled_grouped_mm",
    "scaled_mm",
    "scaled_mm_blockwise",
    "scaled_mm_mxfp8",
    "update_scales",
]
