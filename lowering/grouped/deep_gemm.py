"""Grouped GEMMs by DeepGEMM (SM90), where the package `deep_gemm` is installed, after a trial (lowering/trials.py).

E4M3 by E4M3, with scales per block:

    rows of experts    1x128 by 128x128, `m_grouped_fp8_gemm_nt_contiguous`. A tile of 128 rows meets the matrix of its first
                       row, so groups have to begin at multiples of 128: rows are copied there, and their products back
    batches             the same function; matrices of whole tiles are where they have to be
    batches' gradients  1x128 by 1x128, `k_grouped_fp8_gemm_nt_contiguous`, which adds to float32

The gradients of experts' weights, when rows are in groups, are left to Triton. `k_grouped_fp8_gemm_nt_contiguous` takes the
sizes of the groups as numbers of Python, for which the host would wait for the device, and of each group a matrix of its own,
where our columnwise copies hold all groups in one.

NOTE [what copies cost] Copies of rows read and write K bytes of each row before the GEMM and 2 N behind it. A float32 sum that
is cleared, added to and rounded moves 16 bytes per element more than the product in bfloat16. Where that takes longer, by
estimate, than DeepGEMM saves, Triton's kernel runs. The rates are estimates: instructions of the
cubin for Triton, fp8pass/cost.py for DeepGEMM and for copies on an H200.

Sources: csrc/apis/gemm.hpp, csrc/apis/layout.hpp, csrc/utils/layout.hpp, deep_gemm/include/deep_gemm/scheduler/gemm.cuh and
tests/generators.py of DeepGEMM (54e2261).
"""

from __future__ import annotations

import logging

import torch

from lowering import deep_gemm
from lowering.formats import BLOCK, Granularity
from lowering.grouped.reference import GroupedGemm
from lowering.grouped.trial import COLUMNS, ROWS, fault_of_kind, form_of, kind_of
from lowering.trials import ALIGNMENT_BYTES, Trial, is_aligned

log = logging.getLogger(__name__)

_BY_SQUARES = (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128)
_BY_LINES = (Granularity.BLOCK_1X128, Granularity.BLOCK_1X128)

#: FLOP/s of Triton's blockwise grouped GEMM and of DeepGEMM's, bytes per second of a copy; see NOTE [what copies cost].
_TRITON, _DEEP_GEMM, _COPY = 712e12, 1234e12, 4.3e12


def refusal(given: GroupedGemm) -> str | None:
    """Why DeepGEMM does not compute this GEMM, or None where it can."""
    kinds, form = given.granularities, form_of(given)
    if form == COLUMNS:
        return "its grad_weight takes the sizes of the groups from the host, and each group as a matrix of its own"
    if kinds != _BY_SQUARES and (form == ROWS or kinds != _BY_LINES):
        return f"it is used for 1x128 by 128x128 scales, not {' by '.join(g.label for g in kinds)}"
    if given.bias is not None or (kinds == _BY_SQUARES and given.out_dtype != torch.bfloat16):
        return "it has no bias and gives bfloat16"
    if not (is_aligned(given.a) and is_aligned(given.b)):
        return f"the addresses of a and b are not both multiples of {ALIGNMENT_BYTES}"
    return _size_refusal(given) or deep_gemm.refusal(given.a, given.b, _function(given)) or alignment_refusal()


def _function(given: GroupedGemm) -> str:
    return f"{'m' if given.granularities == _BY_SQUARES else 'k'}_grouped_fp8_gemm_nt_contiguous"


def _size_refusal(given: GroupedGemm) -> str | None:
    m, k, n = given.a.shape[-2], *given.b.shape[-2:]
    saved = 2 * k * n * (1 / _TRITON - 1 / _DEEP_GEMM)
    if given.granularities == _BY_LINES:
        bytes_per_element = 16 if given.out_dtype != torch.float32 else 8
        if k % BLOCK or m % 4 or n % 4:
            return f"K {k} is not a multiple of {BLOCK}, or M {m} and N {n} are not multiples of 4"
        if bytes_per_element * n / _COPY >= saved:
            return f"its float32 sum is estimated to take longer than it saves with K {k}"
        return None
    if form_of(given) != ROWS:
        return f"M {m} is not a multiple of {BLOCK}, the rows of a tile" if m % BLOCK else None
    if m < BLOCK * given.num_groups:
        return f"groups have fewer than {BLOCK} rows on average, the rows of a tile"
    if (2 * k + 4 * n) / _COPY >= saved:
        return f"copies of rows are estimated to take longer than it saves with K {k} and N {n}"
    return None


def alignment_refusal() -> str | None:
    """Releases differ in how they name the rows of a tile, which users may change."""
    package = deep_gemm.library()
    for name in ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout"):
        if hasattr(package, name):
            try:
                rows = getattr(package, name)()
            except Exception as error:
                return f"its {name} raises {type(error).__name__}: {error}"
            return None if BLOCK % rows == 0 else f"its tiles have {rows} rows, and groups begin at multiples of {BLOCK}"
    return "this release of deep_gemm does not say where groups have to begin"


def scaled_grouped_mm(given: GroupedGemm) -> torch.Tensor:
    """See `reference.scaled_grouped_mm`; only for arguments that `refusal` accepts. Rows that belong to no group are left as
    they are in memory: the caller clears them."""
    if given.granularities == _BY_LINES:
        return _gradients(given)
    return _rows(given) if form_of(given) == ROWS else _batches(given)


def _rows(given: GroupedGemm) -> torch.Tensor:
    from lowering.grouped import column_kernels as kernels  # imports Triton

    assert given.offs is not None
    rows, a, scale_inv_a, indices = kernels.padded_rows(given.a, given.scale_inv_a, given.offs)
    return kernels.rows_of_groups(_by_experts(given, a, scale_inv_a, indices), rows, given.a.shape[0])


def _batches(given: GroupedGemm) -> torch.Tensor:
    num_groups, m, _ = given.a.shape
    indices = torch.arange(num_groups, dtype=torch.int32, device=given.a.device)[:, None].expand(num_groups, m).flatten()
    out = _by_experts(given, given.a.flatten(0, 1), given.scale_inv_a.flatten(0, 1), indices)
    return out.view(given.shape)


def _by_experts(given: GroupedGemm, a: torch.Tensor, scale_inv_a: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """[P, N] of rows a [P, K] whose tiles belong to a group each, and scales [P, ceil(K/128)]; indices [P]: the groups, -1 for
    padding. DeepGEMM copies scales whose strides are not (1, P)."""
    out = torch.empty((a.shape[0], given.b.shape[-1]), dtype=torch.bfloat16, device=a.device)
    b = given.b.mT, given.scale_inv_b.contiguous()
    operands = (a, scale_inv_a), b, out, indices
    deep_gemm.call("m_grouped_fp8_gemm_nt_contiguous", a.device, *operands, recipe=deep_gemm.BY_SQUARES)
    return out


def _gradients(given: GroupedGemm) -> torch.Tensor:
    num_groups, _, k = given.a.shape
    sizes = torch.full((num_groups,), k, dtype=torch.int32, device=given.a.device)
    total = torch.zeros(given.shape, dtype=torch.float32, device=given.a.device)
    a, b = (
        (q.flatten(), scale_inv.mT.flatten(0, 1).t())  # [M, E * K/128], strides (1, M)
        for q, scale_inv in ((given.a, given.scale_inv_a), (given.b.mT, given.scale_inv_b))
    )
    operands = a, b, total, [k] * num_groups, sizes
    deep_gemm.call("k_grouped_fp8_gemm_nt_contiguous", total.device, *operands, c=total, recipe=deep_gemm.BY_LINES)
    return total.to(given.out_dtype)


trial = Trial(log, "DeepGEMM's grouped GEMM", kind_of, lambda kind: fault_of_kind(kind, scaled_grouped_mm))
