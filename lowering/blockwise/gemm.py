"""Who computes a blockwise GEMM: DeepGEMM, cuBLASLt, Triton, the reference, or what `IMPLEMENTATIONS` is told of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from lowering.blockwise import cublaslt, deep_gemm, reference
from lowering.blockwise.arguments import BlockwiseGemm
from lowering.hardware import FP8_CAPABILITY, cuda_capability, runs_kernels
from lowering.trials import trusted


def scaled_mm_blockwise(*operands: Any, implementation: str = "auto", **scaling: Any) -> torch.Tensor:
    """`reference.scaled_mm_blockwise`, by the requested implementation."""
    gemm = BlockwiseGemm(*operands, **scaling)
    return implementation_of(gemm, implementation).compute(gemm)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Something that computes blockwise GEMMs."""

    compute: Callable[[BlockwiseGemm], torch.Tensor]
    require: Callable[[BlockwiseGemm], None] = lambda gemm: None
    """Raises for a GEMM that it cannot compute."""


def implementation_of(gemm: BlockwiseGemm, name: str) -> Implementation:
    """The requested implementation of a blockwise GEMM; raises where that cannot compute it, and never replaces it."""
    if name == "auto":
        name = chosen(gemm)
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {name!r}; use one of auto, {', '.join(IMPLEMENTATIONS)}")
    found = IMPLEMENTATIONS[name]
    found.require(gemm)
    return found


def chosen(gemm: BlockwiseGemm) -> str:
    """The implementation that "auto" stands for."""
    if not gemm.a.is_cuda:
        return "reference"
    return trusted(LIBRARIES, gemm) or "triton"


def _by_triton(gemm: BlockwiseGemm) -> torch.Tensor:
    from lowering.blockwise.kernels import gemm as kernel  # imports Triton

    return kernel.scaled_mm_blockwise(gemm)


def _require_triton(gemm: BlockwiseGemm) -> None:
    device = gemm.a.device
    if not gemm.a.is_cuda:
        raise ValueError(f"implementation='triton' needs CUDA tensors, a is on {device}; use 'reference' there")
    if not runs_kernels(device):
        raise NotImplementedError(
            f"{torch.cuda.get_device_name(device)} has no FP8 tensor cores (compute capability"
            f" {cuda_capability(device)}, needed is {FP8_CAPABILITY}), or Triton is not installed;"
            " implementation='reference' emulates the GEMM in float32"
        )


def _require(name: str, library: Any, gemm: BlockwiseGemm) -> None:
    reason = library.refusal(gemm)
    if reason is not None:
        raise ValueError(f"{name} cannot compute this blockwise GEMM: {reason}; use implementation='triton'")


def _by_reference(gemm: BlockwiseGemm) -> torch.Tensor:
    return reference.scaled_mm_blockwise(**vars(gemm))


#: Those that "auto" takes after a trial, in this order.
LIBRARIES = {"deep_gemm": deep_gemm, "cublaslt": cublaslt}
#: By name; more are added by files that know what this room does not.
IMPLEMENTATIONS = {
    "triton": Implementation(_by_triton, _require_triton),
    "deep_gemm": Implementation(deep_gemm.scaled_mm_blockwise, functools.partial(_require, "DeepGEMM", deep_gemm)),
    "cublaslt": Implementation(cublaslt.scaled_mm_blockwise, functools.partial(_require, "cuBLASLt", cublaslt)),
    "reference": Implementation(_by_reference),
}
