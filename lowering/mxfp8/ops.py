"""The MXFP8 operations as registered: checks, fakes and providers of each.

Triton kernels quantize on devices with FP8 instructions, the eager reference elsewhere; who computes a GEMM is decided
in `gemm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.copies import copies_of, empty_copy
from lowering.formats import MX_BLOCK
from lowering.hardware import runs_kernels
from lowering.mxfp8 import gemm, reference
from lowering.operation import operation
from lowering.triton.trial import tried

Pair = tuple[Tensor, Tensor]

cast_mxfp8 = operation(reference.cast_mxfp8, checks=[reference.check_casts])
cast_mxfp8.lazy_provider(runs_kernels, "lowering.mxfp8.kernels", tried)


@cast_mxfp8.fake
def _(xs: list[Tensor], dtype: torch.dtype, **options: bool) -> list[Tensor]:
    cast = reference.Cast(**options)
    reference.check_casts(xs, dtype, cast.rowwise, cast.columnwise, cast.compact)
    square, compact = cast.square, cast.compact
    return copies_of(xs, cast, lambda x, columnwise, pad_outer: _copy(x, dtype, square, columnwise, pad_outer, compact))


def _copy(x: Tensor, dtype: torch.dtype, square: bool, columnwise: bool, pad_outer: bool, compact: bool = False) -> Pair:
    """Shapes of one copy."""
    q = x.new_empty(x.shape, dtype=dtype) if compact else empty_copy(x, dtype, columnwise, pad_outer, MX_BLOCK)
    return q, x.new_empty(reference.scale_shape(x, square, columnwise, pad_outer, compact), dtype=torch.uint8)


gemm_ready_mxfp8 = operation(reference.gemm_ready_mxfp8, checks=[reference.check_compact])


@gemm_ready_mxfp8.fake
def _(q: Tensor, columnwise: bool, pad_outer: bool) -> Pair:
    return _copy(q, q.dtype, False, columnwise, pad_outer)


scale_values_mxfp8 = operation(reference.scale_values_mxfp8, checks=[reference.check_scale])


@scale_values_mxfp8.fake
def _(q: Tensor) -> Tensor:
    return q.new_empty(reference.compact_scale_shape(q.shape[0], q.shape[1], False), dtype=torch.float32)


e8m0_scales = operation(reference.e8m0_scales, checks=[reference.check_scales_of_128], sizes=["m", "n", "k"])
e8m0_scales.lazy_provider(runs_kernels, "lowering.mxfp8.kernels")


@e8m0_scales.fake
def _(scale_inv_a: Tensor, scale_inv_b: Tensor, m: int, n: int, k: int) -> Pair:
    shapes = (reference.gemm_ready_scale_shape(outer, k) for outer in (m, n))
    a, b = (scale_inv_a.new_empty(shape, dtype=torch.uint8) for shape in shapes)
    return a, b


scaled_mm_mxfp8 = operation(reference.scaled_mm_mxfp8, checks=[reference.check_gemm, reference.check_scales])
scaled_mm_mxfp8.provider(lambda device: True)(gemm.scaled_mm_mxfp8)


@scaled_mm_mxfp8.fake
def _(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    reference.check_gemm(a, b, bias, out_dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
