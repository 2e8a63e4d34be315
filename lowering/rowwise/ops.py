"""The operations with one scale per row as registered: checks, fakes and providers of each.

Triton kernels quantize on devices with FP8 instructions, torch multiplies there; the eager reference runs elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lowering.checks import check_inverse
from lowering.copies import copies_of, empty_copy
from lowering.hardware import runs_kernels
from lowering.operation import operation
from lowering.rowwise import reference
from lowering.triton.trial import Arguments, tried

_CASTS = "lowering.rowwise.kernels"

Pair = tuple[Tensor, Tensor]


amax_rowwise = operation(reference.amax_rowwise, checks=[reference.check_lines])
amax_rowwise.lazy_provider(runs_kernels, _CASTS)


@amax_rowwise.fake
def _(xs: list[Tensor], rowwise: bool, columnwise: bool) -> Tensor:
    lines = sum((x.shape[0] if rowwise else 0) + (x.shape[1] if columnwise else 0) for x in xs)
    return xs[0].new_empty((lines,), dtype=torch.float32)


def _copy(x: Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> Pair:
    """Shapes of one copy and of its scales."""
    q = empty_copy(x, dtype, columnwise, pad_outer)
    return q, x.new_empty((*q.shape[:-1], 1), dtype=torch.float32)


def _with_own_amaxes(xs: list[Tensor], amaxes: Tensor, dtype: torch.dtype, **options: Any) -> Arguments:
    lines = {name: options[name] for name in ("rowwise", "columnwise")}
    return (xs, reference.amax_rowwise(xs, **lines), dtype), options


cast_lines_rowwise = operation(reference.cast_lines_rowwise, checks=[reference.check_amaxes])
cast_lines_rowwise.lazy_provider(runs_kernels, _CASTS, functools.partial(tried, adjust=_with_own_amaxes))


@cast_lines_rowwise.fake
def _(xs: list[Tensor], dtype: torch.dtype, **options: Any) -> list[Tensor]:
    cast = reference.Cast(**options)
    _, length = reference.scale_slices([x.shape for x in xs], cast)
    return [*(empty_copy(x, dtype, *side) for side in cast.wanted for x in xs), xs[0].new_empty((length,), dtype=torch.float32)]


cast_rowwise = operation(reference.cast_rowwise, checks=[reference.check_casts, check_inverse])
cast_rowwise.lazy_provider(runs_kernels, _CASTS, tried)


@cast_rowwise.fake
def _(xs: list[Tensor], dtype: torch.dtype, inverse: str | None, **options: Any) -> list[Tensor]:
    return copies_of(xs, reference.Cast(**options), lambda x, columnwise, pad_outer: _copy(x, dtype, columnwise, pad_outer))


scaled_mm_rowwise = operation(reference.scaled_mm_rowwise, checks=[reference.check_gemm])
scaled_mm_rowwise.lazy_provider(runs_kernels, "lowering.tensor_cores")


@scaled_mm_rowwise.fake
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
