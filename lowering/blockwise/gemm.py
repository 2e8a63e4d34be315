"""The choice of a blockwise GEMM: DeepGEMM, cuBLASLt, Triton, the reference, or what `IMPLEMENTATIONS` is told of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lowering.blockwise import cublaslt, deep_gemm, reference
from lowering.hardware import FP8_CAPABILITY, cuda_capability, runs_kernels
from lowering.products import Compute, Product, as_told
from lowering.trials import trusted


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


#: The libraries that "auto" takes after a trial, in this order.
LIBRARIES = {"deep_gemm": deep_gemm, "cublaslt": cublaslt}
IMPLEMENTATIONS: dict[str, Callable[[Product], Compute]] = {
    "triton": _by_triton,
    "deep_gemm": functools.partial(_by_library, "DeepGEMM", deep_gemm),
    "cublaslt": functools.partial(_by_library, "cuBLASLt", cublaslt),
    "reference": as_told(reference.multiply),
}
"""Name -> a function from a GEMM to what computes those that differ from it in their values alone; raises for a GEMM that it
cannot compute. More are added by files that know what this room does not."""
