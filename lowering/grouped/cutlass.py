"""Grouped GEMMs by CUTLASS, by way of `torch._scaled_grouped_mm` (SM90).

It takes E4M3 by E4M3 alone, with a scale per line, and is preferred where fast accumulation is allowed: its kernel without is
slow (lowering/rowwise/kernels/gemm.py). It is trusted after a trial (lowering/trials.py). Whether the gradient of an expert
without tokens is zeros is not documented: the trial asks it, in memory that held NaN.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from lowering import hardware
from lowering.formats import E4M3, GEMM_ALIGNMENT, Granularity
from lowering.grouped import reference
from lowering.grouped.arguments import GroupedGemm
from lowering.grouped.layouts import padded_width
from lowering.grouped.reference import padded_ends
from lowering.trials import fault_of, in_words, is_trusted

log = logging.getLogger(__name__)

#: Sizes of the groups, K and N of the trial; and the largest relative error, in the Frobenius norm, that FP8 tensor cores and
#: the rounding of the output may make (docs/numerics.md).
_SIZES, _K, _N, _TAIL = (128, 0, 5, 300, 1), 512, 256, 13
_TOLERANCE = 1e-2


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
    return None


def scaled_grouped_mm(
    a: torch.Tensor, b: torch.Tensor, scale_inv_a: torch.Tensor, scale_inv_b: torch.Tensor, offs: torch.Tensor | None
) -> torch.Tensor:
    """See `reference.scaled_grouped_mm`, with fast accumulation and to bfloat16; only for arguments that `refusal` accepts.

    Rows that belong to no group are left as they are in memory: the caller clears them.
    """
    lines_a, lines_b = (*a.shape[:-1],), (*b.shape[:-2], b.shape[-1])
    if offs is not None and b.dim() == 2:
        lines_a, lines_b = (len(offs), *lines_a), (len(offs), *lines_b)
        offs = padded_ends(offs, GEMM_ALIGNMENT)
    scale_inv_a, scale_inv_b = _per_line(scale_inv_a, lines_a), _per_line(scale_inv_b, lines_b)
    if b.dim() == 2:
        scale_inv_a, scale_inv_b = scale_inv_a.reshape(-1), scale_inv_b.reshape(-1)
    return torch._scaled_grouped_mm(a, b, scale_inv_a, scale_inv_b, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True)


def _per_line(scale_inv: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The scales of one operand, dense, one per line; those per tensor or per matrix are repeated."""
    num_lines = math.prod(shape)
    if scale_inv.numel() != num_lines:
        scale_inv = scale_inv.reshape(-1, 1) if len(shape) == 2 else scale_inv
        scale_inv = scale_inv.expand(*shape)
    return scale_inv.reshape(*shape).contiguous()


@dataclasses.dataclass(frozen=True)
class _Kind:
    """GEMMs that are right or wrong together."""

    device: torch.device
    granularities: tuple[Granularity, Granularity]
    form: str
    """"rows in groups", "columns in groups" or "stacks"."""

    def __str__(self) -> str:
        return f"{' by '.join(g.label for g in self.granularities)} scales of {self.form} on {self.device}"


_TRIED: dict[_Kind, bool] = {}


def is_right(given: GroupedGemm) -> bool:
    """Whether CUTLASS computes GEMMs like this one as the reference does."""
    form = "stacks" if given.offs is None else "rows in groups" if given.has_rows else "columns in groups"
    kind = _Kind(given.a.device, given.granularities, form)
    return is_trusted(kind, given.a.device, _TRIED, _fault, log, "torch's grouped GEMM")


def trials() -> dict[str, bool]:
    """What this process has tried so far, in words, and whether CUTLASS is used for it."""
    return in_words(_TRIED)


def _fault(kind: _Kind) -> str | None:
    """What is wrong with CUTLASS' results, or None."""
    generator = torch.Generator().manual_seed(0)  # the user's random numbers are left alone
    num_groups, rows, m = len(_SIZES), sum(_SIZES) + _TAIL, 144
    offs = None if kind.form == "stacks" else torch.tensor(_SIZES).cumsum(0).to(torch.int32)
    valid = slice(0, sum(_SIZES) if kind.form == "rows in groups" else None)
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    lines: tuple[Sequence[int], Sequence[int]]
    if kind.form == "columns in groups":
        width = padded_width(rows, num_groups, GEMM_ALIGNMENT)
        shape_a, shape_b, lines = (m, width), (_N, width), ((num_groups, m), (num_groups, _N))
    else:
        shape_a, shape_b = ((rows, _K) if offs is not None else (num_groups, m, _K)), (num_groups, _N, _K)
        lines = (shape_a[:-1], shape_b[:-1])
    a, b = (torch.randn(shape, generator=generator).to(E4M3) for shape in (shape_a, shape_b))
    scale_a, scale_b = (_scales(*of, generator) for of in zip(kind.granularities, lines, strict=True))
    granularities: dict[str, Any] = {"granularity_a": kind.granularities[0].value, "granularity_b": kind.granularities[1].value}
    expected = reference.scaled_grouped_mm(a, b.mT, scale_a, scale_b, offs, **granularities, out_dtype=torch.float32)
    given: list[Any] = [None if x is None else x.to(kind.device) for x in (a, b, scale_a, scale_b, offs)]
    torch.full(
        expected.shape, torch.nan, dtype=torch.bfloat16, device=kind.device
    )  # freed at once: the result takes its memory
    return fault_of(lambda: scaled_grouped_mm(given[0], given[1].mT, *given[2:]), expected, _TOLERANCE, valid)


def _scales(granularity: Granularity, lines: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Powers of two for lines [S] or [E, N]: each its own, or one per matrix."""
    per_tensor = lines[:1] if len(lines) == 2 else ()
    shape = (*lines, 1) if granularity is Granularity.ROW_WISE else per_tensor
    return torch.exp2(torch.randint(-4, 5, tuple(shape), generator=generator).float())
