"""The operations with one scale per tensor as registered: checks, fakes and providers of each.

Triton kernels run on CUDA devices with FP8 instructions, the eager reference everywhere else. They are imported when
such a device's tensor arrives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.formats import fp8_max, pad_to_alignment
from lowering.hardware import runs_kernels
from lowering.operation import operation
from lowering.tensorwise import parts, reference
from lowering.tensorwise.checks import check_input, check_matrix, check_operands, check_rowwise, check_scale

_KERNELS = "lowering.tensorwise.kernels"


def _scalar_like(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


amax = operation(reference.amax, checks=[check_input])
amax.fake(_scalar_like)
amax.lazy_provider(runs_kernels, f"{_KERNELS}.amax")

multi_amax = operation(reference.multi_amax)
multi_amax.lazy_provider(runs_kernels, f"{_KERNELS}.multi_amax")


@multi_amax.fake
def _(xs: list[Tensor]) -> Tensor:
    return xs[0].new_empty((len(xs),), dtype=torch.float32)


multi_scales = operation(reference.multi_scales, checks=[fp8_max])
multi_scales.lazy_provider(runs_kernels, f"{_KERNELS}.multi_amax")


@multi_scales.fake
def _(xs: list[Tensor]) -> tuple[Tensor, Tensor]:
    scales, inverses = (xs[0].new_empty((len(xs),), dtype=torch.float32) for _ in range(2))
    return scales, inverses


scale_from_amax = operation(reference.scale_from_amax, checks=[fp8_max])


@scale_from_amax.fake
def _(amax: Tensor) -> Tensor:
    return torch.empty_like(amax, dtype=torch.float32)


scales_from_amax = operation(reference.scales_from_amax, checks=[fp8_max])


@scales_from_amax.fake
def _(amax: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(amax, dtype=torch.float32), torch.empty_like(amax, dtype=torch.float32)


quantize = operation(reference.quantize, checks=[fp8_max, check_input, check_scale])
quantize.lazy_provider(runs_kernels, f"{_KERNELS}.cast")


@quantize.fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


_CASTS = (fp8_max, check_matrix, check_scale)


def _copy(x: Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> Tensor:
    outer, inner = (x.shape[1], x.shape[0]) if columnwise else (x.shape[0], x.shape[1])
    return x.new_empty((pad_to_alignment(outer) if pad_outer else outer, pad_to_alignment(inner)), dtype=dtype)


def _parts(x: Tensor, rowwise: bool, columnwise: bool) -> Tensor:
    return x.new_empty((parts.num_parts(x, rowwise, columnwise),), dtype=torch.float32)


cast = operation(reference.cast, checks=_CASTS, indexed=["scale"])
cast.fake(_copy)
cast.lazy_provider(runs_kernels, f"{_KERNELS}.cast")

cast_amax = operation(reference.cast_amax, checks=_CASTS, indexed=["scale"])
cast_amax.lazy_provider(runs_kernels, f"{_KERNELS}.cast")


@cast_amax.fake
def _(x: Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> tuple[Tensor, Tensor]:
    return _copy(x, dtype, columnwise, pad_outer), _scalar_like(x)


cast_partial_amax = operation(reference.cast_partial_amax, checks=_CASTS)
cast_partial_amax.lazy_provider(runs_kernels, f"{_KERNELS}.cast")


@cast_partial_amax.fake
def _(x: Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> tuple[Tensor, Tensor]:
    return _copy(x, dtype, columnwise, pad_outer), _parts(x, not columnwise, columnwise)


cast_transpose = operation(reference.cast_transpose, checks=_CASTS, indexed=["scale"])
cast_transpose.lazy_provider(runs_kernels, f"{_KERNELS}.cast_transpose")


@cast_transpose.fake
def _(x: Tensor, dtype: torch.dtype, pad_rows: bool, pad_cols: bool) -> tuple[Tensor, Tensor]:
    return _copy(x, dtype, False, pad_rows), _copy(x, dtype, True, pad_cols)


cast_transpose_amax = operation(reference.cast_transpose_amax, checks=_CASTS, indexed=["scale"])
cast_transpose_amax.lazy_provider(runs_kernels, f"{_KERNELS}.cast_transpose")


@cast_transpose_amax.fake
def _(x: Tensor, dtype: torch.dtype, pad_rows: bool, pad_cols: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _copy(x, dtype, False, pad_rows), _copy(x, dtype, True, pad_cols), _scalar_like(x)


cast_transpose_partial_amax = operation(reference.cast_transpose_partial_amax, checks=_CASTS)
cast_transpose_partial_amax.lazy_provider(runs_kernels, f"{_KERNELS}.cast_transpose")


@cast_transpose_partial_amax.fake
def _(x: Tensor, dtype: torch.dtype, pad_rows: bool, pad_cols: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _copy(x, dtype, False, pad_rows), _copy(x, dtype, True, pad_cols), _parts(x, True, True)


transposed_copy = operation(reference.transposed_copy, checks=[check_rowwise])
transposed_copy.lazy_provider(runs_kernels, f"{_KERNELS}.transposed_copy")


@transposed_copy.fake
def _(rowwise: Tensor) -> Tensor:
    return _copy(rowwise, rowwise.dtype, True, False)


multi_cast_transpose_amax = operation(reference.multi_cast_transpose_amax, indexed=["scales"])
multi_cast_transpose_amax.lazy_provider(runs_kernels, f"{_KERNELS}.multi_cast_transpose")


@multi_cast_transpose_amax.fake
def _(xs: list[Tensor], dtype: torch.dtype, pad_rows: bool, pad_cols: bool) -> list[Tensor]:
    rowwise = [_copy(x, dtype, False, pad_rows) for x in xs]
    columnwise = [_copy(x, dtype, True, pad_cols) for x in xs]
    return [*rowwise, *columnwise, xs[0].new_empty((len(xs),), dtype=torch.float32)]


multi_cast = operation(reference.multi_cast, indexed=["scales"])
multi_cast.lazy_provider(runs_kernels, f"{_KERNELS}.multi_cast_transpose")


@multi_cast.fake
def _(xs: list[Tensor], dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> list[Tensor]:
    return [_copy(x, dtype, columnwise, pad_outer) for x in xs]


multi_cast_amax = operation(reference.multi_cast_amax, indexed=["scales"])
multi_cast_amax.lazy_provider(runs_kernels, f"{_KERNELS}.multi_cast_transpose")


@multi_cast_amax.fake
def _(xs: list[Tensor], dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> list[Tensor]:
    return [*(_copy(x, dtype, columnwise, pad_outer) for x in xs), xs[0].new_empty((len(xs),), dtype=torch.float32)]


scaled_mm = operation(reference.scaled_mm, checks=[check_operands], indexed=["scale_inv_a", "scale_inv_b"])
scaled_mm.lazy_provider(runs_kernels, f"{_KERNELS}.gemm")


@scaled_mm.fake
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
