"""The blockwise operations as registered: checks, fakes and providers of each.

Triton kernels quantize on devices with FP8 instructions, the eager reference elsewhere; who computes a GEMM is decided
in `gemm.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowering.blockwise import gemm, reference
from lowering.checks import check_inverse
from lowering.copies import copies_of, empty_copy
from lowering.hardware import runs_kernels
from lowering.operation import operation
from lowering.triton.trial import tried

Pair = tuple[Tensor, Tensor]

cast_blockwise = operation(reference.cast_blockwise, checks=[reference.check_casts, check_inverse])
cast_blockwise.lazy_provider(runs_kernels, "lowering.blockwise.kernels.cast", tried)


@cast_blockwise.fake
def _(xs: list[Tensor], dtype: torch.dtype, inverse: str | None, **options: Any) -> list[Tensor]:
    cast = reference.Cast(**options)
    reference.check_casts(xs, dtype, cast.granularity, cast.rowwise, cast.columnwise, cast.compact)
    granularity, compact = cast.granularity, cast.compact
    return copies_of(xs, cast, lambda x, columnwise, pad_outer: _copy(x, dtype, granularity, columnwise, pad_outer, compact))


def _copy(x: Tensor, dtype: torch.dtype, granularity: str, columnwise: bool, pad_outer: bool, compact: bool = False) -> Pair:
    """Shapes of one copy."""
    q = x.new_empty(x.shape, dtype=dtype) if compact else empty_copy(x, dtype, columnwise, pad_outer)
    return q, reference.empty_scales(x, granularity, columnwise, pad_outer, compact)


gemm_ready_blockwise = operation(reference.gemm_ready_blockwise, checks=[reference.check_compact])


@gemm_ready_blockwise.fake
def _(q: Tensor, granularity: str, columnwise: bool, pad_outer: bool) -> Pair:
    reference.check_granularity("granularity", granularity)
    return _copy(q, q.dtype, granularity, columnwise, pad_outer)


scaled_mm_blockwise = operation(reference.scaled_mm_blockwise)  # whose provider checks: NOTE [one decision]
scaled_mm_blockwise.provider(lambda device: True)(gemm.scaled_mm_blockwise)


@scaled_mm_blockwise.fake
def _(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    granularity_a: str,
    granularity_b: str,
    out_dtype: torch.dtype,
) -> Tensor:
    reference.check_gemm(a, b, bias, granularity_a, granularity_b, out_dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
