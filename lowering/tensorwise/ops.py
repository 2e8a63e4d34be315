"""The operations with one scale per tensor as registered: checks, fakes and providers of each.

Triton kernels run on CUDA devices with FP8 instructions, the eager reference everywhere else. They are imported when
such a device's tensor arrives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.checks import check_each, check_input, check_inverse, check_operands
from lowering.copies import empty_copy, num_matrices
from lowering.formats import fp8_max
from lowering.hardware import runs_kernels
from lowering.operation import operation
from lowering.tensorwise import reference
from lowering.tensorwise.reference import check_casts, check_margin, check_rowwise, check_scale
from lowering.triton.trial import tried

_KERNELS = "lowering.tensorwise.kernels"


amax = operation(reference.amax, checks=[check_input])
amax.lazy_provider(runs_kernels, _KERNELS)


@amax.fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


multi_amax = operation(reference.multi_amax, checks=[check_each])
multi_amax.lazy_provider(runs_kernels, _KERNELS)


@multi_amax.fake
def _(xs: list[Tensor], per_matrix: bool) -> Tensor:
    return xs[0].new_empty((num_matrices(xs) if per_matrix else len(xs),), dtype=torch.float32)


multi_scales = operation(reference.multi_scales, checks=[fp8_max, check_each])
multi_scales.lazy_provider(runs_kernels, _KERNELS)


@multi_scales.fake
def _(xs: list[Tensor]) -> tuple[Tensor, Tensor]:
    scales, inverses = (xs[0].new_empty((len(xs),), dtype=torch.float32) for _ in range(2))
    return scales, inverses


scale_from_amax = operation(reference.scale_from_amax, checks=[fp8_max])


@scale_from_amax.fake
def _(amax: Tensor) -> Tensor:
    return torch.empty_like(amax, dtype=torch.float32)


scales_from_amax = operation(reference.scales_from_amax, checks=[fp8_max, check_inverse, check_margin])


@scales_from_amax.fake
def _(amax: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(amax, dtype=torch.float32), torch.empty_like(amax, dtype=torch.float32)


quantize = operation(reference.quantize, checks=[fp8_max, check_input, check_scale])
quantize.lazy_provider(runs_kernels, _KERNELS, tried)


@quantize.fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


cast = operation(reference.cast, checks=[check_casts], indexed=["scales"])
cast.lazy_provider(runs_kernels, _KERNELS, tried)


@cast.fake
def _(xs: list[Tensor], dtype: torch.dtype, **options: bool) -> list[Tensor]:
    wanted = reference.Cast(**options)
    copies = [empty_copy(x, dtype, *side) for side in wanted.wanted for x in xs]
    if not wanted.with_amax:
        return copies
    if wanted.in_parts:
        shape = [reference.num_parts(xs[0], wanted.rowwise, wanted.columnwise)]
    else:
        shape = [] if len(xs) == 1 and xs[0].dim() == 2 else [num_matrices(xs)]
    return [*copies, xs[0].new_empty(shape, dtype=torch.float32)]


transposed_copy = operation(reference.transposed_copy, checks=[check_rowwise])
transposed_copy.lazy_provider(runs_kernels, _KERNELS)


@transposed_copy.fake
def _(rowwise: Tensor) -> Tensor:
    return empty_copy(rowwise, rowwise.dtype, True, False)


scaled_mm = operation(reference.scaled_mm, checks=[check_operands], indexed=["scale_inv_a", "scale_inv_b"])
scaled_mm.lazy_provider(runs_kernels, "lowering.tensor_cores")


@scaled_mm.fake
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
