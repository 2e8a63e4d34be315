"""The grouped operations as registered: checks, fakes and providers of each.

Triton kernels quantize on CUDA devices with FP8 instructions, the eager reference everywhere else; so it does with MXFP8, for
which no GPU has a grouped GEMM yet. Who computes a GEMM is decided in `gemm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.formats import BLOCK, MX_BLOCK, Granularity, pad_to_alignment
from lowering.grouped import gemm, reference
from lowering.grouped.reference import GroupedGemm, alignment, padded_width
from lowering.hardware import runs_kernels
from lowering.operation import operation

Pair = tuple[Tensor, Tensor]

# -- the GEMM

scaled_grouped_mm = operation(reference.scaled_grouped_mm, checks=[reference.check_gemm, reference.check_scales])
scaled_grouped_mm.provider(lambda device: True)(gemm.scaled_grouped_mm)


@scaled_grouped_mm.fake
def _(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, offs: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty(GroupedGemm(a, b, scale_inv_a, scale_inv_b, offs).shape, dtype=out_dtype)


# -- columnwise copies of rows in groups

_COLUMNS_OF_GROUPS = "lowering.grouped.kernels.columns"


def _columns(x: Tensor, offs: Tensor, index: Tensor | None, align: int, dtype: torch.dtype, pad_outer: bool = False) -> Tensor:
    num_rows = x.shape[0] if index is None else index.shape[0]
    outer = pad_to_alignment(x.shape[1]) if pad_outer else x.shape[1]
    return x.new_empty((outer, padded_width(num_rows, offs.shape[0], align)), dtype=dtype)


valid_rows = operation(reference.valid_rows, checks=[reference.check_offs, reference.check_index], sizes=["num_rows"])


@valid_rows.fake
def _(offs: Tensor, num_rows: int) -> Tensor:
    return offs.new_empty((num_rows,), dtype=torch.bool)


group_columns = operation(reference.group_columns, checks=[reference.check_columns])
group_columns.lazy_provider(runs_kernels, _COLUMNS_OF_GROUPS)


@group_columns.fake
def _(q: Tensor, offs: Tensor, index: Tensor | None, align: int) -> Tensor:
    return _columns(q, offs, index, align, q.dtype)


cast_columns = operation(reference.cast_columns, checks=[reference.check_cast_columns])
cast_columns.lazy_provider(runs_kernels, _COLUMNS_OF_GROUPS)


@cast_columns.fake
def _(x: Tensor, dtype: torch.dtype, offs: Tensor, index: Tensor | None, granularity: str, pad_outer: bool) -> Pair:
    kind = Granularity(granularity)
    q = _columns(x, offs, index, alignment(kind), dtype, pad_outer)
    outer, width = q.shape
    if kind is Granularity.ROW_WISE:
        return q, x.new_empty((offs.shape[0], outer, 1), dtype=torch.float32)
    if kind is Granularity.BLOCK_1X32:
        return q, x.new_empty((outer, width // MX_BLOCK), dtype=torch.uint8)
    return q, x.new_empty((width // BLOCK, outer), dtype=torch.float32).t()
