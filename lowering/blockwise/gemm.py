"""The choice of a blockwise GEMM: DeepGEMM, cuBLASLt, Triton, the reference, or what `IMPLEMENTATIONS` is told of.

NOTE [one decision] Checks, refusals, trials and what a library is told depend on shapes, strides, dtypes, alignment, device and
options alone. They are looked at once for each combination of these, and give a function of the tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

from lowering.blockwise import cublaslt, deep_gemm, reference
from lowering.blockwise.reference import Compute
from lowering.hardware import FP8_CAPABILITY, cuda_capability, runs_kernels
from lowering.products import Product
from lowering.trials import ALIGNMENT_BYTES, keep, layout_of, trusted


def scaled_mm_blockwise(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    granularity_a: str,
    granularity_b: str,
    out_dtype: torch.dtype = torch.bfloat16,
    implementation: str = "auto",
) -> torch.Tensor:
    """`reference.scaled_mm_blockwise`, by the requested implementation; see NOTE [one decision]."""
    of_bias = None if bias is None else layout_of(bias)
    # fmt: off
    key = (
        a.device, a.shape, a.stride(), a.dtype, a.data_ptr() % ALIGNMENT_BYTES,
        b.shape, b.stride(), b.dtype, b.data_ptr() % ALIGNMENT_BYTES,
        scale_inv_a.shape, scale_inv_a.stride(), scale_inv_a.dtype, scale_inv_a.data_ptr() % ALIGNMENT_BYTES,
        scale_inv_b.shape, scale_inv_b.stride(), scale_inv_b.dtype, scale_inv_b.data_ptr() % ALIGNMENT_BYTES,
        of_bias, granularity_a, granularity_b, out_dtype, implementation,
    )
    # fmt: on
    compute = DECISIONS.get(key)  # at each call of a model: written out, because functions and loops cost microseconds
    if compute is None:
        operands = a, b, scale_inv_a, scale_inv_b, bias
        compute = decided(operands, granularity_a, granularity_b, out_dtype, implementation)
        keep(DECISIONS, key, compute, a)
    return compute(a, b, scale_inv_a, scale_inv_b, bias)


def decided(operands: Any, granularity_a: str, granularity_b: str, out_dtype: torch.dtype, implementation: str) -> Compute:
    """The function that computes GEMMs of operands like these; raises where none can."""
    a, b, scale_inv_a, scale_inv_b, bias = operands
    reference.check_gemm(a, b, bias, granularity_a, granularity_b, out_dtype)
    reference.check_scales(a, b, scale_inv_a, scale_inv_b, granularity_a, granularity_b)
    gemm = Product(*operands, granularity_a=granularity_a, granularity_b=granularity_b, out_dtype=out_dtype)
    return prepared(gemm, implementation)


def prepared(gemm: Product, name: str) -> Compute:
    """The requested implementation of a blockwise GEMM; raises where that cannot compute it, and never replaces it."""
    if name == "auto":
        name = chosen(gemm)
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {name!r}; use one of auto, {', '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name](gemm)


def chosen(gemm: Product) -> str:
    """The implementation that "auto" stands for."""
    if not gemm.a.is_cuda:
        return "reference"
    return trusted(LIBRARIES, gemm) or "triton"


def _by_triton(gemm: Product) -> Compute:
    device = gemm.a.device
    if not gemm.a.is_cuda:
        raise ValueError(f"implementation='triton' needs CUDA tensors, a is on {device}; use 'reference' there")
    if not runs_kernels(device):
        raise NotImplementedError(
            f"{torch.cuda.get_device_name(device)} has no FP8 tensor cores (compute capability"
            f" {cuda_capability(device)}; {FP8_CAPABILITY} is required), or Triton is not installed;"
            " implementation='reference' emulates the GEMM in float32"
        )
    from lowering.blockwise import kernels  # imports Triton

    return kernels.prepare(gemm)


def _by_library(name: str, library: Any, gemm: Product) -> Compute:
    reason = library.refusal(gemm)
    if reason is not None:
        raise ValueError(f"{name} cannot compute this blockwise GEMM: {reason}; use implementation='triton'")
    return library.prepare(gemm)


def as_told(compute: Callable[[Product], torch.Tensor]) -> Callable[[Product], Compute]:
    """An implementation that decides nothing beforehand."""

    def prepare(gemm: Product) -> Compute:
        how: Any = {"granularity_a": gemm.granularity_a, "granularity_b": gemm.granularity_b, "out_dtype": gemm.out_dtype}
        return lambda *operands: compute(Product(*operands, **how))

    return prepare


def _by_reference(gemm: Product) -> torch.Tensor:
    operands = gemm.a, gemm.b, gemm.scale_inv_a, gemm.scale_inv_b, gemm.bias
    how: Any = {"granularity_a": gemm.granularity_a, "granularity_b": gemm.granularity_b, "out_dtype": gemm.out_dtype}
    return reference.scaled_mm_blockwise(*operands, **how)


DECISIONS: dict[Hashable, Compute] = {}

#: The libraries that "auto" takes after a trial, in this order.
LIBRARIES = {"deep_gemm": deep_gemm, "cublaslt": cublaslt}
IMPLEMENTATIONS: dict[str, Callable[[Product], Compute]] = {
    "triton": _by_triton,
    "deep_gemm": functools.partial(_by_library, "DeepGEMM", deep_gemm),
    "cublaslt": functools.partial(_by_library, "cuBLASLt", cublaslt),
    "reference": as_told(_by_reference),
}
"""Name -> a function from a GEMM to what computes those that differ from it in their values alone; raises for a GEMM that it
cannot compute. More are added by files that know what this room does not."""
