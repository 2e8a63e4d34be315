"""The choice of a grouped GEMM: CUTLASS, DeepGEMM, Triton or the reference."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from lowering.grouped import cutlass, deep_gemm, reference
from lowering.grouped.reference import GroupedGemm
from lowering.hardware import refusal
from lowering.trials import keep, layout_of, trusted

#: The libraries that are taken after a trial, in this order.
LIBRARIES = {"cutlass": cutlass, "deep_gemm": deep_gemm}
Compute = Callable[..., torch.Tensor]  # a, b, their scales, the ends of groups and the bias -> the product.

DECISIONS: dict[Hashable, tuple[str, Compute]] = {}  # NOTE [one decision] in `lowering/gemm.py`: who computes, and how.


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """`reference.scaled_grouped_mm`, by what the device has."""
    operands = a, b, scale_inv_a, scale_inv_b, offs, bias
    if not a.is_cuda:
        return reference.scaled_grouped_mm(*operands, **options)
    key = (a.device, *(None if x is None else layout_of(x) for x in operands), *options.items())
    made = DECISIONS.get(key)
    if made is None:
        made = decided(GroupedGemm(*operands, **options))
        keep(DECISIONS, key, made, a)
    name, compute = made
    if name == "deep_gemm" and deep_gemm.alignment_refusal() is not None:  # which users may change
        given = GroupedGemm(*operands, **options)
        compute = prepared(chosen(given), given)
    return compute(*operands)


def decided(given: GroupedGemm) -> tuple[str, Compute]:
    """The choice for operands like these; raises where a GPU has none."""
    reason = refusal(given.gemm, given.a.device)
    if reason is not None:
        raise NotImplementedError(f"{reason}; on the CPU every grouped GEMM is emulated")
    name = chosen(given)
    return name, prepared(name, given)


def chosen(given: GroupedGemm) -> str:
    """The choice on a GPU that has grouped GEMMs."""
    return trusted(LIBRARIES, given) or "triton"


def prepared(name: str, given: GroupedGemm) -> Compute:
    """The function that computes products like this one, by Triton, or by a library that does not refuse them."""
    from lowering.grouped import gemm_kernels as kernel  # imports Triton

    if name == "triton":
        return kernel.prepare(given)
    multiply, clears = LIBRARIES[name].scaled_grouped_mm, given.offs is not None and given.has_rows
    options: dict[str, Any] = {
        each: getattr(given, each) for each in ("granularity_a", "granularity_b", "out_dtype", "fast_accum")
    }

    def compute(*operands: Any) -> torch.Tensor:
        out: torch.Tensor = multiply(GroupedGemm(*operands, **options))
        return kernel.clear_rows_of_no_group(out, operands[4]) if clears else out

    return compute
