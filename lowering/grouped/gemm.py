"""The choice of a grouped GEMM: CUTLASS, DeepGEMM, Triton or the reference."""

from __future__ import annotations

from typing import Any

import torch

from lowering.grouped import cutlass, deep_gemm, reference
from lowering.grouped.reference import GroupedGemm
from lowering.hardware import refusal
from lowering.trials import Decisions, layout_of, trusted

#: The libraries that are taken after a trial, in this order.
LIBRARIES = {"cutlass": cutlass, "deep_gemm": deep_gemm}
DECISIONS: Decisions[str] = Decisions()


def scaled_grouped_mm(*operands: Any, **options: Any) -> torch.Tensor:
    """`reference.scaled_grouped_mm`, by what the device has."""
    given = GroupedGemm(*operands, **options)
    if not given.a.is_cuda:
        return reference.scaled_grouped_mm(*operands, **options)
    key = (given.a.device, *(layout_of(x) if isinstance(x, torch.Tensor) else x for x in vars(given).values()))
    name = DECISIONS.kept(key)
    if name is None:
        name = decided(given)
        DECISIONS.keep(key, name, given.a)
    if name == "deep_gemm" and deep_gemm.alignment_refusal() is not None:  # which users may change
        name = chosen(given)
    return computed_by(name, given)


def decided(given: GroupedGemm) -> str:
    """The choice for operands like these, as NOTE [one decision] in `lowering/blockwise/gemm.py` says."""
    reason = refusal(given.gemm, given.a.device)
    if reason is not None:
        raise NotImplementedError(f"{reason}; on the CPU every grouped GEMM is emulated")
    return chosen(given)


def chosen(given: GroupedGemm) -> str:
    """The choice on a GPU that has grouped GEMMs."""
    return trusted(LIBRARIES, given) or "triton"


def computed_by(name: str, given: GroupedGemm) -> torch.Tensor:
    """The product, by a library that does not refuse it, or by Triton."""
    from lowering.grouped.kernels import gemm as kernel  # imports Triton

    if name == "triton":
        return kernel.scaled_grouped_mm(given)
    out = LIBRARIES[name].scaled_grouped_mm(given)
    return kernel.clear_rows_of_no_group(out, given.offs) if given.offs is not None and given.has_rows else out
