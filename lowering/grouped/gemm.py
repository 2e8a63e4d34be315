"""Who computes a grouped GEMM: CUTLASS, Triton or the reference."""

from __future__ import annotations

from typing import Any

import torch

from lowering.formats import Granularity
from lowering.grouped import cutlass, reference
from lowering.hardware import Gemm, refusal


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    granularity_a: str = "tensor_wise",
    granularity_b: str = "tensor_wise",
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> torch.Tensor:
    """`reference.scaled_grouped_mm`, by what the device has."""
    operands = a, b, scale_inv_a, scale_inv_b, offs, bias
    options: dict[str, Any] = {"granularity_a": granularity_a, "granularity_b": granularity_b}
    options |= {"out_dtype": out_dtype, "fast_accum": fast_accum}
    if not a.is_cuda:
        return reference.scaled_grouped_mm(*operands, **options)
    gemm = Gemm(a.dtype, b.dtype, Granularity(granularity_a), Granularity(granularity_b), out_dtype, is_grouped=True)
    reason = refusal(gemm, a.device)
    if reason is not None:
        raise NotImplementedError(f"{reason}; on the CPU every grouped GEMM is emulated")
    from lowering.grouped.kernels import gemm as kernel  # imports Triton

    form = (a, b, scale_inv_a, bias, granularity_a, granularity_b, out_dtype, fast_accum)
    if cutlass.refusal(*form) is None and cutlass.is_right(a, granularity_a, granularity_b):
        out = cutlass.scaled_grouped_mm(a, b, scale_inv_a, scale_inv_b, offs)
        return out if offs is None else kernel.clear_rows_of_no_group(out, offs)
    return kernel.scaled_grouped_mm(*operands, **options)
