"""The MXFP8 operations as registered: checks, fakes and providers of each.

Triton kernels quantize on devices with FP8 instructions, the eager reference elsewhere; who computes a GEMM is decided
in `gemm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.copies import by_output, empty_copy, outer_and_inner
from lowering.formats import MX_BLOCK
from lowering.hardware import runs_kernels
from lowering.mxfp8 import checks, gemm, reference
from lowering.operation import operation
from lowering.triton.trial import tried

Pair = tuple[Tensor, Tensor]

cast_mxfp8 = operation(reference.cast_mxfp8, checks=[checks.check_casts])
cast_mxfp8.lazy_provider(runs_kernels, "lowering.mxfp8.kernels.cast", tried)


@cast_mxfp8.fake
def _(
    xs: list[Tensor],
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    pad_rows: bool,
    pad_cols: bool,
    square: bool,
    compact: bool,
) -> list[Tensor]:
    checks.check_casts(xs, dtype, rowwise, columnwise, compact)
    found = []
    for is_turned, is_wanted, pad_outer in ((False, rowwise, pad_rows), (True, columnwise, pad_cols)):
        if is_wanted and compact:
            found += by_output([_compact(x, dtype, is_turned, square) for x in xs])
        elif is_wanted:
            found += by_output([_copy(x, dtype, is_turned, pad_outer) for x in xs])
    return found


def _compact(x: Tensor, dtype: torch.dtype, columnwise: bool, square: bool) -> Pair:
    shape = reference.compact_scale_shape(*outer_and_inner(x, columnwise), square)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape[::-1] if columnwise else shape, dtype=torch.uint8)


def _copy(x: Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> Pair:
    """Shapes of one copy as GEMMs read it."""
    outer, inner = outer_and_inner(x, columnwise, pad_outer)
    if x.dim() == 3:
        scale_shape: tuple[int, ...] = (x.shape[0], *reference.compact_scale_shape(outer, inner, False))
    else:
        scale_shape = reference.gemm_ready_scale_shape(outer, inner)
    return empty_copy(x, dtype, columnwise, pad_outer, MX_BLOCK), x.new_empty(scale_shape, dtype=torch.uint8)


gemm_ready_mxfp8 = operation(reference.gemm_ready_mxfp8, checks=[checks.check_compact])


@gemm_ready_mxfp8.fake
def _(q: Tensor, columnwise: bool, pad_outer: bool) -> Pair:
    return _copy(q, q.dtype, columnwise, pad_outer)


scale_values_mxfp8 = operation(reference.scale_values_mxfp8, checks=[checks.check_scale])


@scale_values_mxfp8.fake
def _(q: Tensor) -> Tensor:
    return q.new_empty(reference.compact_scale_shape(q.shape[0], q.shape[1], False), dtype=torch.float32)


scaled_mm_mxfp8 = operation(reference.scaled_mm_mxfp8, checks=[checks.check_gemm, checks.check_scales])
scaled_mm_mxfp8.provider(lambda device: True)(gemm.scaled_mm_mxfp8)


@scaled_mm_mxfp8.fake
def _(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    checks.check_gemm(a, b, bias, out_dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
