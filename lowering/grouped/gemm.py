"""Who computes a grouped GEMM: CUTLASS, Triton or the reference."""

from __future__ import annotations

from typing import Any

import torch

from lowering.grouped import cutlass, reference
from lowering.grouped.arguments import GroupedGemm
from lowering.hardware import refusal


def scaled_grouped_mm(*operands: Any, **options: Any) -> torch.Tensor:
    """`reference.scaled_grouped_mm`, by what the device has."""
    given = GroupedGemm(*operands, **options)
    if not given.a.is_cuda:
        return reference.scaled_grouped_mm(*operands, **options)
    reason = refusal(given.gemm, given.a.device)
    if reason is not None:
        raise NotImplementedError(f"{reason}; on the CPU every grouped GEMM is emulated")
    from lowering.grouped.kernels import gemm as kernel  # imports Triton

    if cutlass.refusal(given) is None and cutlass.is_right(given):
        out = cutlass.scaled_grouped_mm(given.a, given.b, given.scale_inv_a, given.scale_inv_b, given.offs)
        return kernel.clear_rows_of_no_group(out, given.offs) if given.offs is not None and given.has_rows else out
    return kernel.scaled_grouped_mm(given)
