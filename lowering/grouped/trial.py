"""The trial of a library's grouped GEMM (lowering/trials.py): small products of every kind, held against the reference.

Whether the gradient of an expert without tokens is zeros is what libraries do not document: the trial asks it, in memory that
held NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowering.formats import BLOCK, E4M3, GEMM_ALIGNMENT, Granularity
from lowering.grouped import reference
from lowering.grouped.reference import GroupedGemm, padded_width
from lowering.scaling import scale_shape
from lowering.trials import TOLERANCES, ProductKind, fault_of

#: Sizes of the groups, rows that belong to none, and M of batches: whole tiles for scales per block, which pad those of others.
_SIZES, _TAIL, _M, _WHOLE_M = (128, 0, 5, 300, 1), 13, 144, 256
#: N and K, where blocks are whole and where they are not.
_WHOLE, _RAGGED = (256, 512), (272, 656)

ROWS, COLUMNS, BATCHES = "rows in groups", "columns in groups", "batches"


def form_of(given: GroupedGemm) -> str:
    """`ROWS`, `COLUMNS` or `BATCHES`."""
    return BATCHES if given.offs is None else ROWS if given.has_rows else COLUMNS


def kind_of(given: GroupedGemm) -> ProductKind:
    """The kind that a GEMM of E4M3 by E4M3 is of."""
    has_blocks = given.granularities[0].block is not None
    is_ragged = has_blocks and any(size % BLOCK for size in given.b.shape[-2:])
    return ProductKind(given.a.device, (E4M3, E4M3), given.granularities, None, given.out_dtype, is_ragged, form_of(given))


def fault_of_kind(kind: ProductKind, compute: Callable[[GroupedGemm], torch.Tensor], **options: Any) -> str | None:
    """The fault of a library's results, or None. options: of the GEMM that it is given."""
    generator = torch.Generator().manual_seed(0)  # the user's random numbers are left alone
    num_groups, rows = len(_SIZES), sum(_SIZES) + _TAIL
    n, k = _RAGGED if kind.is_ragged else _WHOLE
    if kind.granularities[1] is Granularity.BLOCK_1X128:  # gradients of batches contract tokens, of which libraries take blocks
        k = _WHOLE[1]
    m = _M if kind.granularities[0].block is None else _WHOLE_M
    groups: tuple[tuple[int, ...], tuple[int, ...]] = (num_groups,), (num_groups,)
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = (num_groups, m, k), (num_groups, n, k)
    if kind.form == COLUMNS:
        width = padded_width(rows, num_groups, GEMM_ALIGNMENT)
        shapes = (m, width), (n, width)
    elif kind.form == ROWS:
        groups, shapes = ((), (num_groups,)), ((rows, k), shapes[1])
    a, b = (torch.randn(shape, generator=generator).to(E4M3) for shape in shapes)
    scales = [_scales(*of, generator) for of in zip(kind.granularities, groups, shapes, strict=True)]
    offs = None if kind.form == BATCHES else torch.tensor(_SIZES).cumsum(0).to(torch.int32)
    names: dict[str, Any] = {"granularity_a": kind.granularities[0].value, "granularity_b": kind.granularities[1].value}
    operands: dict[str, Any] = {"a": a, "b": b.mT, "scale_inv_a": scales[0], "scale_inv_b": scales[1], "offs": offs}
    expected = reference.scaled_grouped_mm(**operands, **names, out_dtype=torch.float32)
    held = torch.full(expected.shape, torch.nan, dtype=kind.out_dtype, device=kind.device)
    del held  # at once: the result takes its memory
    there: dict[str, Any] = {name: None if x is None else x.to(kind.device) for name, x in operands.items()}
    given = GroupedGemm(**there, **names, out_dtype=kind.out_dtype, **options)
    valid = slice(0, sum(_SIZES) if kind.form == ROWS else None)
    return fault_of(lambda: compute(given), expected, TOLERANCES[kind.out_dtype], kind.device, valid)


def _scales(
    granularity: Granularity, groups: tuple[int, ...], shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """Powers of two of an operand: each its own."""
    own = () if granularity is Granularity.TENSOR_WISE else scale_shape(shape[-2], shape[-1], granularity)
    return torch.exp2(torch.randint(-4, 5, (*groups, *own), generator=generator).float())
