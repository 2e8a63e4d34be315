"""Grouped GEMMs by CUTLASS, by way of `torch._scaled_grouped_mm` (SM90).

It takes E4M3 by E4M3 alone, with a scale per line, and is preferred where fast accumulation is allowed: its kernel without is
slow (lowering/rowwise/kernels/gemm.py). It is trusted after a trial (lowering/trials.py). The grad_weight form
is left to Triton: whether an expert without tokens gets zeros there is not documented.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from lowering import hardware
from lowering.formats import E4M3, Granularity
from lowering.grouped import reference
from lowering.grouped.arguments import GroupedGemm
from lowering.trials import fault_of, in_words, is_trusted

log = logging.getLogger(__name__)

#: Sizes of the groups, K and N of the trial; and the largest relative error, in the Frobenius norm, that FP8 tensor cores and
#: the rounding of the output may make (docs/numerics.md).
_SIZES, _K, _N, _TAIL = (128, 0, 5, 300, 1), 512, 256, 13
_TOLERANCE = 1e-2


def refusal(given: GroupedGemm) -> str | None:
    """Why CUTLASS does not compute this GEMM, or None where it can."""
    a, b = given.a, given.b
    if b.dim() != 3:
        return "groups of columns are left to Triton"
    bias_dtype = None if given.bias is None else given.bias.dtype
    gemm = dataclasses.replace(given.gemm, bias_dtype=bias_dtype, n=b.shape[2], k=b.shape[1], num_groups=b.shape[0])
    reason = hardware.cutlass_refusal(gemm, a.device)
    if reason is not None:
        return reason
    if not given.fast_accum:
        return "without fast accumulation CUTLASS is slow"
    if a.dim() == 2 and given.scale_inv_a.numel() not in (1, a.shape[0]):
        return "rows have a scale per group"
    if a.stride(-1) != 1 or b.stride(1) != 1 or any(s % 16 for s in (*a.stride()[:-1], b.stride(0), b.stride(2))):
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
    return torch._scaled_grouped_mm(
        a,
        b,
        _per_line(scale_inv_a, a.shape[:-1]),
        _per_line(scale_inv_b, (b.shape[0], b.shape[2])),
        offs=offs,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


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
    has_rows: bool

    def __str__(self) -> str:
        form = "rows in groups" if self.has_rows else "stacks"
        return f"{' by '.join(g.label for g in self.granularities)} scales of {form} on {self.device}"


_TRIED: dict[_Kind, bool] = {}


def is_right(given: GroupedGemm) -> bool:
    """Whether CUTLASS computes GEMMs like this one as the reference does."""
    kind = _Kind(given.a.device, given.granularities, given.has_rows)
    return is_trusted(kind, given.a.device, _TRIED, _fault, log, "torch's grouped GEMM")


def trials() -> dict[str, bool]:
    """What this process has tried so far, in words, and whether CUTLASS is used for it."""
    return in_words(_TRIED)


def _fault(kind: _Kind) -> str | None:
    """What is wrong with CUTLASS' results, or None."""
    generator = torch.Generator().manual_seed(0)  # the user's random numbers are left alone
    num_groups, rows = len(_SIZES), sum(_SIZES) + _TAIL
    shape = (rows, _K) if kind.has_rows else (num_groups, 144, _K)
    a = torch.randn(shape, generator=generator).to(E4M3)
    b = torch.randn((num_groups, _N, _K), generator=generator).to(E4M3)
    scale_a, scale_b = (
        _scales(granularity, lines, generator)
        for granularity, lines in zip(kind.granularities, (shape[:-1], (num_groups, _N)), strict=True)
    )
    offs = torch.tensor(_SIZES).cumsum(0).to(torch.int32) if kind.has_rows else None
    granularities: dict[str, Any] = {"granularity_a": kind.granularities[0].value, "granularity_b": kind.granularities[1].value}
    expected = reference.scaled_grouped_mm(a, b.mT, scale_a, scale_b, offs, **granularities, out_dtype=torch.float32)
    given: list[Any] = [None if x is None else x.to(kind.device) for x in (a, b, scale_a, scale_b, offs)]
    valid = slice(0, sum(_SIZES) if kind.has_rows else None)
    return fault_of(lambda: scaled_grouped_mm(given[0], given[1].mT, *given[2:]), expected, _TOLERANCE, valid)


def _scales(granularity: Granularity, lines: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Powers of two for lines [S] or [E, N]: each its own, or one per matrix."""
    per_tensor = lines[:1] if len(lines) == 2 else ()
    shape = (*lines, 1) if granularity is Granularity.ROW_WISE else per_tensor
    return torch.exp2(torch.randint(-4, 5, tuple(shape), generator=generator).float())
