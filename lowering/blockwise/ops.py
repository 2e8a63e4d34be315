"""The blockwise operations as registered: checks, fakes and providers of each.

Triton kernels quantize on devices with FP8 instructions, the eager reference elsewhere; who computes a GEMM is decided
in `gemm.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.blockwise import checks, gemm, reference
from lowering.formats import Granularity, pad_to_alignment
from lowering.hardware import runs_kernels
from lowering.operation import operation

_CASTS = "lowering.blockwise.kernels.cast"
_MULTI = "lowering.blockwise.kernels.multi_cast"

Pair = tuple[torch.Tensor, torch.Tensor]
Quadruple = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

quantize_blockwise = operation(reference.quantize_blockwise, checks=[checks.check_quantize, checks.check_block])
quantize_blockwise.lazy_provider(runs_kernels, _CASTS)


@quantize_blockwise.fake
def _(x: torch.Tensor, dtype: torch.dtype, block: Sequence[int]) -> Pair:
    checks.check_quantize(x, dtype)
    checks.check_block(block)
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    shape = reference.compact_scale_shape(rows, x.shape[-1], Granularity.of_block(block))
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=torch.float32)


def _copy(x: torch.Tensor, dtype: torch.dtype, granularity: str, columnwise: bool, pad_outer: bool) -> Pair:
    """Shapes of one GEMM-ready copy."""
    outer, inner = (x.shape[1], x.shape[0]) if columnwise else x.shape
    outer = pad_to_alignment(outer) if pad_outer else outer
    scale_shape = reference.gemm_ready_scale_shape(outer, inner, granularity)
    return x.new_empty((outer, pad_to_alignment(inner)), dtype=dtype), x.new_empty(scale_shape, dtype=torch.float32)


cast_blockwise = operation(reference.cast_blockwise, checks=[checks.check_matrix])
cast_blockwise.lazy_provider(runs_kernels, _CASTS)


@cast_blockwise.fake
def _(x: torch.Tensor, dtype: torch.dtype, granularity: str, columnwise: bool, pad_outer: bool) -> Pair:
    checks.check_matrix(x, dtype, granularity)
    return _copy(x, dtype, granularity, columnwise, pad_outer)


cast_transpose_blockwise = operation(reference.cast_transpose_blockwise, checks=[checks.check_matrix])
cast_transpose_blockwise.lazy_provider(runs_kernels, _CASTS)


@cast_transpose_blockwise.fake
def _(x: torch.Tensor, dtype: torch.dtype, granularity: str, pad_rows: bool, pad_cols: bool) -> Quadruple:
    checks.check_matrix(x, dtype, granularity)
    return *_copy(x, dtype, granularity, False, pad_rows), *_copy(x, dtype, granularity, True, pad_cols)


multi_cast_blockwise = operation(reference.multi_cast_blockwise)
multi_cast_blockwise.lazy_provider(runs_kernels, _MULTI)


@multi_cast_blockwise.fake
def _(xs: list[torch.Tensor], dtype: torch.dtype, granularity: str, columnwise: bool, pad_outer: bool) -> list[torch.Tensor]:
    copies = [_copy(x, dtype, granularity, columnwise, pad_outer) for x in xs]
    return [copy[part] for part in (0, 1) for copy in copies]


multi_cast_transpose_blockwise = operation(reference.multi_cast_transpose_blockwise)
multi_cast_transpose_blockwise.lazy_provider(runs_kernels, _MULTI)


@multi_cast_transpose_blockwise.fake
def _(xs: list[torch.Tensor], dtype: torch.dtype, granularity: str, pad_rows: bool, pad_cols: bool) -> list[torch.Tensor]:
    of_all = [
        [_copy(x, dtype, granularity, columnwise, pad) for x in xs] for columnwise, pad in ((False, pad_rows), (True, pad_cols))
    ]
    return [copy[part] for copies in of_all for part in (0, 1) for copy in copies]


compact_blockwise = operation(reference.compact_blockwise, checks=[checks.check_matrix])
compact_blockwise.lazy_provider(runs_kernels, _CASTS)


@compact_blockwise.fake
def _(x: torch.Tensor, dtype: torch.dtype, granularity: str) -> Quadruple:
    checks.check_matrix(x, dtype, granularity)
    a, b = x.shape
    shapes = (
        reference.compact_scale_shape(a, b, granularity),
        reference.compact_scale_shape(b, a, granularity)[::-1],
    )
    copies = [(x.new_empty((a, b), dtype=dtype), x.new_empty(s, dtype=torch.float32)) for s in shapes]
    return *copies[0], *copies[1]


gemm_ready_blockwise = operation(reference.gemm_ready_blockwise, checks=[checks.check_compact])


@gemm_ready_blockwise.fake
def _(q: torch.Tensor, granularity: str, columnwise: bool, pad_outer: bool) -> Pair:
    checks.check_granularity("granularity", granularity)
    return _copy(q, q.dtype, granularity, columnwise, pad_outer)


scaled_mm_blockwise = operation(reference.scaled_mm_blockwise, checks=[checks.check_gemm, checks.check_scales])
scaled_mm_blockwise.provider(lambda device: True)(gemm.scaled_mm_blockwise)


@scaled_mm_blockwise.fake
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    granularity_a: str,
    granularity_b: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    checks.check_gemm(a, b, bias, granularity_a, granularity_b, out_dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
