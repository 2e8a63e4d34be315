"""The grouped operations as registered: checks, fakes and providers of each.

Triton kernels quantize on CUDA devices with FP8 instructions, the eager reference everywhere else; so it does with MXFP8, for
which no GPU has a grouped GEMM yet. Who computes a GEMM is decided in `gemm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowering.formats import BLOCK, MX_BLOCK, Granularity, pad_to_alignment
from lowering.grouped import cast_reference, checks, gemm, reference
from lowering.grouped.layouts import alignment, padded_inner, padded_width, scale_shape
from lowering.hardware import runs_kernels
from lowering.operation import operation

Pair = tuple[Tensor, Tensor]
Quadruple = tuple[Tensor, Tensor, Tensor, Tensor]

# -- the GEMM

scaled_grouped_mm = operation(reference.scaled_grouped_mm, checks=[checks.check_gemm, checks.check_scales])
scaled_grouped_mm.provider(lambda device: True)(gemm.scaled_grouped_mm)


@scaled_grouped_mm.fake
def _(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    granularity_a: str,
    granularity_b: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    if a.dim() == 2 and b.dim() == 3:
        return a.new_empty((a.shape[0], b.shape[2]), dtype=out_dtype)
    num_groups = b.shape[0] if offs is None else offs.shape[0]
    return a.new_empty((num_groups, a.shape[-2], b.shape[-1]), dtype=out_dtype)


# -- casts of stacks

_STACKS, _LINES = "lowering.grouped.kernels.stacks", "lowering.grouped.kernels.line_stacks"


def _copies(x: Tensor, dtype: torch.dtype, granularity: str, columnwise: bool, pad_outer: bool) -> Pair:
    """Shapes of one copy of each matrix of a stack, and of its scales where they are not per tensor."""
    outer, inner = (x.shape[2], x.shape[1]) if columnwise else (x.shape[1], x.shape[2])
    stored = pad_to_alignment(outer) if pad_outer else outer
    is_square = granularity == Granularity.BLOCK_128X128
    scales = scale_shape(outer if is_square else stored, inner, granularity)
    scale_dtype = torch.uint8 if granularity == Granularity.BLOCK_1X32 else torch.float32
    q = x.new_empty((x.shape[0], stored, padded_inner(inner, granularity)), dtype=dtype)
    return q, x.new_empty((x.shape[0], *scales), dtype=scale_dtype)


def _tensorwise(x: Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> Tensor:
    return _copies(x, dtype, Granularity.TENSOR_WISE, columnwise, pad_outer)[0]


def _per_matrix(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0],), dtype=torch.float32)


amax_stack = operation(cast_reference.amax_stack, checks=[checks.check_stack])
amax_stack.lazy_provider(runs_kernels, _STACKS)
amax_stack.fake(_per_matrix)

_SCALED = (checks.check_stack_dtype, checks.check_stack_scale)

cast_stack = operation(cast_reference.cast_stack, checks=_SCALED)
cast_stack.lazy_provider(runs_kernels, _STACKS)
cast_stack.fake(_tensorwise)

cast_stack_amax = operation(cast_reference.cast_stack_amax, checks=_SCALED)
cast_stack_amax.lazy_provider(runs_kernels, _STACKS)


@cast_stack_amax.fake
def _(x: Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> Pair:
    return _tensorwise(x, dtype, columnwise, pad_outer), _per_matrix(x)


cast_transpose_stack = operation(cast_reference.cast_transpose_stack, checks=_SCALED)
cast_transpose_stack.lazy_provider(runs_kernels, _STACKS)


@cast_transpose_stack.fake
def _(x: Tensor, dtype: torch.dtype, pad_rows: bool, pad_cols: bool) -> Pair:
    return _tensorwise(x, dtype, False, pad_rows), _tensorwise(x, dtype, True, pad_cols)


cast_transpose_stack_amax = operation(cast_reference.cast_transpose_stack_amax, checks=_SCALED)
cast_transpose_stack_amax.lazy_provider(runs_kernels, _STACKS)


@cast_transpose_stack_amax.fake
def _(x: Tensor, dtype: torch.dtype, pad_rows: bool, pad_cols: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _tensorwise(x, dtype, False, pad_rows), _tensorwise(x, dtype, True, pad_cols), _per_matrix(x)


cast_stack_rowwise = operation(cast_reference.cast_stack_rowwise, checks=[checks.check_stack_dtype])
cast_stack_rowwise.lazy_provider(runs_kernels, _LINES)


@cast_stack_rowwise.fake
def _(x: Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> Pair:
    return _copies(x, dtype, Granularity.ROW_WISE, columnwise, pad_outer)


cast_transpose_stack_rowwise = operation(cast_reference.cast_transpose_stack_rowwise, checks=[checks.check_stack_dtype])
cast_transpose_stack_rowwise.lazy_provider(runs_kernels, _LINES)


@cast_transpose_stack_rowwise.fake
def _(x: Tensor, dtype: torch.dtype, pad_rows: bool, pad_cols: bool) -> Quadruple:
    kind = Granularity.ROW_WISE
    return *_copies(x, dtype, kind, False, pad_rows), *_copies(x, dtype, kind, True, pad_cols)


_BLOCKWISE = (checks.check_stack_dtype, checks.check_block_granularity)

cast_stack_blockwise = operation(cast_reference.cast_stack_blockwise, checks=_BLOCKWISE)
cast_stack_blockwise.lazy_provider(runs_kernels, _LINES)


@cast_stack_blockwise.fake
def _(x: Tensor, dtype: torch.dtype, granularity: str, columnwise: bool, pad_outer: bool) -> Pair:
    return _copies(x, dtype, granularity, columnwise, pad_outer)


cast_transpose_stack_blockwise = operation(cast_reference.cast_transpose_stack_blockwise, checks=_BLOCKWISE)
cast_transpose_stack_blockwise.lazy_provider(runs_kernels, _LINES)


@cast_transpose_stack_blockwise.fake
def _(x: Tensor, dtype: torch.dtype, granularity: str, pad_rows: bool, pad_cols: bool) -> Quadruple:
    return *_copies(x, dtype, granularity, False, pad_rows), *_copies(x, dtype, granularity, True, pad_cols)


cast_stack_mxfp8 = operation(cast_reference.cast_stack_mxfp8, checks=[checks.check_stack_dtype])


@cast_stack_mxfp8.fake
def _(x: Tensor, dtype: torch.dtype, columnwise: bool, pad_outer: bool) -> Pair:
    return _copies(x, dtype, Granularity.BLOCK_1X32, columnwise, pad_outer)


cast_transpose_stack_mxfp8 = operation(cast_reference.cast_transpose_stack_mxfp8, checks=[checks.check_stack_dtype])


@cast_transpose_stack_mxfp8.fake
def _(x: Tensor, dtype: torch.dtype, pad_rows: bool, pad_cols: bool) -> Quadruple:
    kind = Granularity.BLOCK_1X32
    return *_copies(x, dtype, kind, False, pad_rows), *_copies(x, dtype, kind, True, pad_cols)


# -- columnwise copies of rows in groups

_COLUMNS_OF_GROUPS = "lowering.grouped.kernels.columns"


def _columns(x: Tensor, offs: Tensor, index: Tensor | None, align: int, dtype: torch.dtype, pad_outer: bool = False) -> Tensor:
    num_rows = x.shape[0] if index is None else index.shape[0]
    outer = pad_to_alignment(x.shape[1]) if pad_outer else x.shape[1]
    return x.new_empty((outer, padded_width(num_rows, offs.shape[0], align)), dtype=dtype)


valid_rows = operation(reference.valid_rows, checks=[checks.check_offs, checks.check_index], sizes=["num_rows"])


@valid_rows.fake
def _(offs: Tensor, num_rows: int) -> Tensor:
    return offs.new_empty((num_rows,), dtype=torch.bool)


group_columns = operation(reference.group_columns, checks=[checks.check_columns])
group_columns.lazy_provider(runs_kernels, _COLUMNS_OF_GROUPS)


@group_columns.fake
def _(q: Tensor, offs: Tensor, index: Tensor | None, align: int) -> Tensor:
    return _columns(q, offs, index, align, q.dtype)


cast_columns_rowwise = operation(reference.cast_columns_rowwise, checks=[checks.check_cast_columns])
cast_columns_rowwise.lazy_provider(runs_kernels, _COLUMNS_OF_GROUPS)


@cast_columns_rowwise.fake
def _(x: Tensor, dtype: torch.dtype, offs: Tensor, index: Tensor | None, pad_outer: bool) -> Pair:
    q = _columns(x, offs, index, alignment(Granularity.ROW_WISE), dtype, pad_outer)
    return q, x.new_empty((offs.shape[0], q.shape[0], 1), dtype=torch.float32)


cast_columns_blockwise = operation(reference.cast_columns_blockwise, checks=[checks.check_cast_columns])
cast_columns_blockwise.lazy_provider(runs_kernels, _COLUMNS_OF_GROUPS)


@cast_columns_blockwise.fake
def _(x: Tensor, dtype: torch.dtype, offs: Tensor, index: Tensor | None, pad_outer: bool) -> Pair:
    q = _columns(x, offs, index, BLOCK, dtype, pad_outer)
    return q, x.new_empty((q.shape[0], q.shape[1] // BLOCK), dtype=torch.float32)


cast_columns_mxfp8 = operation(reference.cast_columns_mxfp8, checks=[checks.check_cast_columns])


@cast_columns_mxfp8.fake
def _(x: Tensor, dtype: torch.dtype, offs: Tensor, index: Tensor | None, pad_outer: bool) -> Pair:
    q = _columns(x, offs, index, MX_BLOCK, dtype, pad_outer)
    return q, x.new_empty((q.shape[0], q.shape[1] // MX_BLOCK), dtype=torch.uint8)
