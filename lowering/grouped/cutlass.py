"""Grouped GEMMs by CUTLASS, by way of `torch._scaled_grouped_mm` (SM90).

It takes E4M3 by E4M3 alone, with a scale per line, and is preferred where fast accumulation is allowed: its kernel without is
slow (lowering/tensor_cores.py). It is trusted after a trial (lowering/trials.py).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

import torch

from lowering import hardware
from lowering.formats import GEMM_ALIGNMENT
from lowering.grouped.reference import GroupedGemm, padded_ends
from lowering.grouped.trial import fault_of_kind, kind_of
from lowering.trials import ALIGNMENT_BYTES, Trial, is_aligned

log = logging.getLogger(__name__)


def refusal(given: GroupedGemm) -> str | None:
    """Why CUTLASS does not compute this GEMM, or None where it can."""
    a, b = given.a, given.b
    k, n = b.shape[-2:]
    bias_dtype = None if given.bias is None else given.bias.dtype
    gemm = dataclasses.replace(given.gemm, bias_dtype=bias_dtype, n=n, k=k, num_groups=given.num_groups)
    reason = hardware.cutlass_refusal(gemm, a.device)
    if reason is not None:
        return reason
    if not given.fast_accum:
        return "without fast accumulation CUTLASS is slow"
    if given.has_rows and given.scale_inv_a.numel() not in (1, a.shape[0]):
        return "rows have a scale per group"
    if a.stride(-1) != 1 or b.stride(-2) != 1 or any(s % 16 for s in (*a.stride()[:-1], *b.stride()[:-2], b.stride(-1))):
        return f"strides of a {a.stride()} and b {b.stride()} are not row-major and column-major, of whole 16 bytes"
    if a.numel() == 0:
        return "a is empty"
    if not (is_aligned(a) and is_aligned(b)):
        return f"the addresses of a and b are not both multiples of {ALIGNMENT_BYTES}"
    return None


def scaled_grouped_mm(given: GroupedGemm) -> torch.Tensor:
    """See `reference.scaled_grouped_mm`; only for arguments that `refusal` accepts. Rows that belong to no group are left as
    they are in memory: the caller clears them."""
    a, b, offs, scale_inv_a, scale_inv_b = given.a, given.b, given.offs, given.scale_inv_a, given.scale_inv_b
    lines_a, lines_b = (*a.shape[:-1],), (*b.shape[:-2], b.shape[-1])
    if offs is not None and b.dim() == 2:
        lines_a, lines_b = (len(offs), *lines_a), (len(offs), *lines_b)
        offs = padded_ends(offs, GEMM_ALIGNMENT)
    scale_inv_a, scale_inv_b = _per_line(scale_inv_a, lines_a), _per_line(scale_inv_b, lines_b)
    if b.dim() == 2:
        scale_inv_a, scale_inv_b = scale_inv_a.reshape(-1), scale_inv_b.reshape(-1)
    return torch._scaled_grouped_mm(a, b, scale_inv_a, scale_inv_b, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True)


def _per_line(scale_inv: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The scales of one operand, dense, from an address of whole 16 bytes, one per line; those per tensor or per matrix are
    repeated."""
    num_lines = math.prod(shape)
    if scale_inv.numel() != num_lines:
        scale_inv = scale_inv.reshape(-1, 1) if len(shape) == 2 else scale_inv
        scale_inv = scale_inv.expand(*shape)
    scale_inv = scale_inv.reshape(*shape).contiguous()
    return scale_inv if is_aligned(scale_inv) else scale_inv.clone()


trial = Trial(log, "torch's grouped GEMM", kind_of, lambda kind: fault_of_kind(kind, scaled_grouped_mm, fast_accum=True))
