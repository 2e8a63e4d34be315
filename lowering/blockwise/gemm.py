"""Who computes a blockwise GEMM: cuBLASLt, Triton, MXFP8 or the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowering.blockwise import cublaslt, mxfp8, reference
from lowering.hardware import FP8_CAPABILITY, cuda_capability, runs_kernels

IMPLEMENTATIONS = ("auto", "triton", "cublaslt", "mxfp8", "reference")


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
    """`reference.scaled_mm_blockwise`, by the requested implementation."""
    function = implementation_of(a, b, bias, granularity_a, granularity_b, out_dtype, implementation)
    scaling = {"granularity_a": granularity_a, "granularity_b": granularity_b}
    return function(a, b, scale_inv_a, scale_inv_b, bias, **scaling, out_dtype=out_dtype)


def implementation_of(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    granularity_a: str,
    granularity_b: str,
    out_dtype: torch.dtype,
    implementation: str,
) -> Callable[..., torch.Tensor]:
    """The function that computes a blockwise GEMM; raises where the requested one cannot, and never replaces it."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {implementation!r}; use one of {', '.join(IMPLEMENTATIONS)}")
    gemm = a, b, bias, granularity_a, granularity_b, out_dtype
    if implementation == "auto":
        implementation = _auto(*gemm)
    if implementation == "reference":
        return reference.scaled_mm_blockwise
    if implementation == "mxfp8":
        return mxfp8.scaled_mm_blockwise
    if implementation == "cublaslt":
        reason = cublaslt.refusal(*gemm)
        if reason is not None:
            raise ValueError(f"cuBLASLt cannot compute this blockwise GEMM: {reason}; use implementation='triton'")
        return cublaslt.scaled_mm_blockwise
    if not a.is_cuda:
        raise ValueError(f"implementation='triton' needs CUDA tensors, a is on {a.device}; use 'reference' there")
    if not runs_kernels(a.device):
        raise NotImplementedError(
            f"{torch.cuda.get_device_name(a.device)} has no FP8 tensor cores (compute capability"
            f" {cuda_capability(a.device)}, needed is {FP8_CAPABILITY}), or Triton is not installed;"
            " implementation='reference' emulates the GEMM in float32"
        )
    from lowering.blockwise.kernels import gemm as kernel  # imports Triton

    return kernel.scaled_mm_blockwise


def _auto(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    granularity_a: str,
    granularity_b: str,
    out_dtype: torch.dtype,
) -> str:
    """The implementation that "auto" stands for."""
    if not a.is_cuda:
        return "reference"
    gemm = a, b, bias, granularity_a, granularity_b, out_dtype
    return "cublaslt" if cublaslt.refusal(*gemm) is None and cublaslt.is_right(*gemm) else "triton"
