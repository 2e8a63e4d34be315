"""The operations with one scale per row as registered: checks, fakes and providers of each.

Triton kernels quantize on devices with FP8 instructions, torch multiplies there; the eager reference runs elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.formats import pad_to_alignment
from lowering.hardware import runs_kernels
from lowering.operation import operation
from lowering.rowwise import checks, reference

_CASTS = "lowering.rowwise.kernels.cast"

Pair = tuple[Tensor, Tensor]


amax_rowwise = operation(reference.amax_rowwise, checks=[checks.check_lines])
amax_rowwise.lazy_provider(runs_kernels, _CASTS)


@amax_rowwise.fake
def _(xs: list[Tensor], rowwise: bool, columnwise: bool) -> Tensor:
    lines = sum((x.shape[0] if rowwise else 0) + (x.shape[1] if columnwise else 0) for x in xs)
    return xs[0].new_empty((lines,), dtype=torch.float32)


def _copy(x: Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> Pair:
    """Shapes of one copy and of its scales."""
    outer, inner = (x.shape[1], x.shape[0]) if columnwise else (x.shape[0], x.shape[1])
    outer = pad_to_alignment(outer) if pad_outer else outer
    return x.new_empty((outer, pad_to_alignment(inner)), dtype=dtype), x.new_empty((outer, 1), dtype=torch.float32)


cast_lines_rowwise = operation(reference.cast_lines_rowwise, checks=[checks.check_amaxes])
cast_lines_rowwise.lazy_provider(runs_kernels, _CASTS)


@cast_lines_rowwise.fake
def _(xs: list[Tensor], dtype: torch.dtype, rowwise: bool, columnwise: bool, pad_rows: bool, pad_cols: bool) -> list[Tensor]:
    row = [_copy(x, dtype, False, pad_rows)[0] for x in xs] if rowwise else []
    col = [_copy(x, dtype, True, pad_cols)[0] for x in xs] if columnwise else []
    _, length = reference.scale_slices([x.shape for x in xs], rowwise, columnwise, pad_rows, pad_cols)
    return [*row, *col, xs[0].new_empty((length,), dtype=torch.float32)]


quantize_rowwise = operation(reference.quantize_rowwise, checks=[checks.check_rows])
quantize_rowwise.lazy_provider(runs_kernels, _CASTS)


@quantize_rowwise.fake
def _(x: Tensor, dtype: torch.dtype) -> Pair:
    checks.check_rows(x, dtype)
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((rows, 1), dtype=torch.float32)


cast_rowwise = operation(reference.cast_rowwise, checks=[checks.check_cast])
cast_rowwise.fake(_copy)
cast_rowwise.lazy_provider(runs_kernels, _CASTS)

cast_transpose_rowwise = operation(reference.cast_transpose_rowwise, checks=[checks.check_cast])
cast_transpose_rowwise.lazy_provider(runs_kernels, _CASTS)


@cast_transpose_rowwise.fake
def _(x: Tensor, dtype: torch.dtype, pad_rows: bool, pad_cols: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_copy(x, dtype, False, pad_rows), *_copy(x, dtype, True, pad_cols)


multi_cast_rowwise = operation(reference.multi_cast_rowwise, checks=[checks.check_casts])
multi_cast_rowwise.lazy_provider(runs_kernels, _CASTS)


@multi_cast_rowwise.fake
def _(xs: list[Tensor], dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> list[Tensor]:
    copies = [_copy(x, dtype, columnwise, pad_outer) for x in xs]
    return [copy[part] for part in (0, 1) for copy in copies]


multi_cast_transpose_rowwise = operation(reference.multi_cast_transpose_rowwise, checks=[checks.check_casts])
multi_cast_transpose_rowwise.lazy_provider(runs_kernels, _CASTS)


@multi_cast_transpose_rowwise.fake
def _(xs: list[Tensor], dtype: torch.dtype, pad_rows: bool, pad_cols: bool) -> list[Tensor]:
    copies = [(_copy(x, dtype, False, pad_rows), _copy(x, dtype, True, pad_cols)) for x in xs]
    return [pair[which][part] for which, part in ((0, 0), (0, 1), (1, 0), (1, 1)) for pair in copies]


scaled_mm_rowwise = operation(reference.scaled_mm_rowwise, checks=[checks.check_gemm])
scaled_mm_rowwise.lazy_provider(runs_kernels, "lowering.rowwise.kernels.gemm")


@scaled_mm_rowwise.fake
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
