"""The MXFP8 operations as registered: checks, fakes and providers of each.

Triton kernels quantize on devices with FP8 instructions, the eager reference elsewhere; who computes a GEMM is decided
in `gemm.py`.
"""

from __future__ import annotations

import torch

from lowering.formats import MX_BLOCK, pad_to_alignment, round_up
from lowering.hardware import runs_kernels
from lowering.mxfp8 import checks, gemm, reference
from lowering.operation import operation

_CASTS = "lowering.mxfp8.kernels.cast"

Pair = tuple[torch.Tensor, torch.Tensor]
Quadruple = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

quantize_mxfp8 = operation(reference.quantize_mxfp8, checks=[checks.check_quantize])
quantize_mxfp8.lazy_provider(runs_kernels, _CASTS)


@quantize_mxfp8.fake
def _(x: torch.Tensor, dtype: torch.dtype, square: bool) -> Pair:
    checks.check_quantize(x, dtype)
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    shape = reference.compact_scale_shape(rows, x.shape[-1], square)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=torch.uint8)


def _copy(x: torch.Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> Pair:
    """Shapes of one GEMM-ready copy."""
    outer, inner = (x.shape[1], x.shape[0]) if columnwise else x.shape
    outer = pad_to_alignment(outer) if pad_outer else outer
    scale_shape = reference.gemm_ready_scale_shape(outer, inner)
    return x.new_empty((outer, round_up(inner, MX_BLOCK)), dtype=dtype), x.new_empty(scale_shape, dtype=torch.uint8)


cast_mxfp8 = operation(reference.cast_mxfp8, checks=[checks.check_matrix])
cast_mxfp8.lazy_provider(runs_kernels, _CASTS)


@cast_mxfp8.fake
def _(x: torch.Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> Pair:
    checks.check_matrix(x, dtype)
    return _copy(x, dtype, columnwise, pad_outer)


cast_transpose_mxfp8 = operation(reference.cast_transpose_mxfp8, checks=[checks.check_matrix])
cast_transpose_mxfp8.lazy_provider(runs_kernels, _CASTS)


@cast_transpose_mxfp8.fake
def _(x: torch.Tensor, dtype: torch.dtype, pad_rows: bool, pad_cols: bool) -> Quadruple:
    checks.check_matrix(x, dtype)
    return *_copy(x, dtype, False, pad_rows), *_copy(x, dtype, True, pad_cols)


compact_mxfp8 = operation(reference.compact_mxfp8, checks=[checks.check_matrix])
compact_mxfp8.lazy_provider(runs_kernels, _CASTS)


@compact_mxfp8.fake
def _(x: torch.Tensor, dtype: torch.dtype, square: bool) -> Quadruple:
    checks.check_matrix(x, dtype)
    a, b = x.shape
    shapes = reference.compact_scale_shape(a, b, square), reference.compact_scale_shape(b, a, square)[::-1]
    copies = [(x.new_empty((a, b), dtype=dtype), x.new_empty(s, dtype=torch.uint8)) for s in shapes]
    return *copies[0], *copies[1]


gemm_ready_mxfp8 = operation(reference.gemm_ready_mxfp8, checks=[checks.check_compact])


@gemm_ready_mxfp8.fake
def _(q: torch.Tensor, columnwise: bool, pad_outer: bool) -> Pair:
    return _copy(q, q.dtype, columnwise, pad_outer)


scale_values_mxfp8 = operation(reference.scale_values_mxfp8, checks=[checks.check_scale])


@scale_values_mxfp8.fake
def _(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(reference.compact_scale_shape(q.shape[0], q.shape[1], False), dtype=torch.float32)


scaled_mm_mxfp8 = operation(reference.scaled_mm_mxfp8, checks=[checks.check_gemm, checks.check_scales])
scaled_mm_mxfp8.provider(lambda device: True)(gemm.scaled_mm_mxfp8)


@scaled_mm_mxfp8.fake
def _(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    checks.check_gemm(a, b, bias, out_dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
