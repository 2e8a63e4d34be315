"""The operations as registered, kind of scaling by kind: the specification, checks, shapes for tracing, and kernels of each.

Triton kernels run on CUDA devices with FP8 instructions and are imported when such a device's tensor arrives; the eager
reference runs everywhere else, and for MXFP8's grouped casts, for which no GPU has a GEMM yet. `gemm.py` chooses what
computes a GEMM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lowering import casts, gemm, state
from lowering.blockwise import saved
from lowering.checks import check_each, check_input, check_inverse, check_product
from lowering.copies import CastOptions, copies_of, empty_copy, num_blocks, num_matrices
from lowering.formats import BLOCK, E4M3, MX_BLOCK, Granularity, fp8_max, pad_to_alignment
from lowering.grouped import gemm as groups_gemm
from lowering.grouped import reference as groups
from lowering.hardware import runs_kernels
from lowering.mxfp8 import reference as mx
from lowering.operation import Operation, operation
from lowering.rowwise import reference as rows
from lowering.tensorwise import reference as tensors
from lowering.triton.trial import Arguments, tried

P = ParamSpec("P")
R = TypeVar("R")
Pair = tuple[Tensor, Tensor]


def _registered(
    reference: Callable[P, R],
    fake: Callable[..., Any] | None = None,
    kernels: str | None = None,
    wrap: Callable[[Callable[P, R], Callable[P, R]], Callable[P, R]] | None = None,
    **options: Any,
) -> Operation[P, R]:
    """An operation with its shape function, and with kernels: the module of `lowering` that has them."""
    made = operation(reference, **options)
    if fake is not None:
        made.fake(fake)
    if kernels is not None:
        made.lazy_provider(runs_kernels, f"lowering.{kernels}", wrap)
    return made


def _floats(like: Tensor, *shape: Any) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


# -- one scale per tensor

amaxes = _registered(
    tensors.amaxes,
    lambda xs, per_matrix: _floats(xs[0], *([num_matrices(xs)] if per_matrix else [len(xs)] if len(xs) > 1 else [])),
    "tensorwise.kernels",
    checks=[check_each],
)

multi_scales = _registered(
    tensors.multi_scales,
    lambda xs: (_floats(xs[0], len(xs)), _floats(xs[0], len(xs))),
    "tensorwise.kernels",
    checks=[fp8_max, check_each],
)


scales_from_amax = _registered(
    tensors.scales_from_amax,
    lambda amax: (torch.empty_like(amax, dtype=torch.float32), torch.empty_like(amax, dtype=torch.float32)),
    "tensorwise.kernels",
    checks=[fp8_max, check_inverse, tensors.check_margin],
)

quantize = _registered(
    tensors.quantize,
    lambda x, dtype: torch.empty_like(x, dtype=dtype),
    "tensorwise.kernels",
    tried,
    checks=[fp8_max, check_input, tensors.check_scale],
)


def _cast(xs: list[Tensor], dtype: torch.dtype, **options: bool) -> list[Tensor]:
    wanted = CastOptions(**options)  # type: ignore[arg-type]
    copies = [empty_copy(x, dtype, *side) for side in wanted.wanted for x in xs]
    if not wanted.with_amax:
        return copies
    if wanted.in_parts:
        return [*copies, _floats(xs[0], tensors.num_parts(xs[0], wanted.rowwise, wanted.columnwise))]
    return [*copies, _floats(xs[0]) if len(xs) == 1 and xs[0].dim() == 2 else _floats(xs[0], num_matrices(xs))]


cast = _registered(tensors.cast, _cast, "tensorwise.kernels", tried, checks=[tensors.check_casts], indexed=["scales"])

# -- one scale per row


def _amaxes(xs: list[Tensor], rowwise: bool, columnwise: bool) -> Tensor:
    return _floats(xs[0], sum((x.shape[0] if rowwise else 0) + (x.shape[1] if columnwise else 0) for x in xs))


amax_rowwise = _registered(rows.amax_rowwise, _amaxes, "rowwise.kernels", checks=[rows.check_lines])


def _cast_lines(xs: list[Tensor], dtype: torch.dtype, **options: Any) -> list[Tensor]:
    wanted = CastOptions(**options)
    _, length = rows.scale_slices([x.shape for x in xs], wanted)
    return [*(empty_copy(x, dtype, *side) for side in wanted.wanted for x in xs), _floats(xs[0], length)]


def _with_own_amaxes(xs: list[Tensor], amaxes: Tensor, dtype: torch.dtype, **options: Any) -> Arguments:
    lines = {name: options[name] for name in ("rowwise", "columnwise")}
    return (xs, rows.amax_rowwise(xs, **lines), dtype), options


cast_lines_rowwise = _registered(
    rows.cast_lines_rowwise,
    _cast_lines,
    "rowwise.kernels",
    functools.partial(tried, adjust=_with_own_amaxes),
    checks=[rows.check_amaxes],
)


# -- scales of lines and of blocks, which the cast computes


def _cast_with_scales(xs: list[Tensor], dtype: torch.dtype, **options: Any) -> list[Tensor]:
    checked = {name: value for name, value in options.items() if name not in ("pad_rows", "pad_cols", "epsilon")}
    casts.check_casts(xs, dtype, **checked)
    how = CastOptions(**options)
    empty = casts.ROOMS[Granularity(how.granularity)].empty
    return copies_of(xs, how, lambda x, *side: empty(x, dtype, how, *side))


cast_with_scales = _registered(casts.cast_with_scales, _cast_with_scales, "kernels", tried, checks=[casts.check_casts])


def _gemm_ready(q: Tensor, granularity: str, square: bool, columnwise: bool, pad_outer: bool) -> Pair:
    how = CastOptions(granularity=granularity, square=square)
    pair: Pair = casts.room_of_blocks(granularity).empty(q, q.dtype, how, columnwise, pad_outer)
    return pair


gemm_ready = _registered(casts.gemm_ready, _gemm_ready, checks=[casts.check_compact])

# -- activations that are kept for the backward

save_activation = _registered(
    saved.save_activation,
    lambda x, as_bytes: (x.new_empty(x.shape, dtype=torch.uint8 if as_bytes else E4M3), _floats(x, *saved.scales_shape(x))),
    checks=[saved.check_save],
)

load_activation = _registered(
    saved.load_activation, lambda q, dtype: q.new_empty(q.shape, dtype=dtype), checks=[saved.check_load]
)

# -- MXFP8


scale_values_mxfp8 = _registered(
    mx.scale_values_mxfp8, lambda q: _floats(q, *mx.compact_scale_shape(q.shape[0], q.shape[1], False)), checks=[mx.check_scale]
)


# -- GEMMs, and what is in groups


def _product(
    a: Tensor, b: Tensor, bias: Tensor | None, granularity_a: str, granularity_b: str, out_dtype: torch.dtype
) -> Tensor:
    gemm.check_kinds(granularity_a, granularity_b)
    if Granularity(granularity_a).block is not None:
        check_product(a, b, bias, out_dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


scaled_mm = _registered(gemm.scaled_mm, _product, indexed=["scale_inv_a", "scale_inv_b"])
scaled_mm.provider(lambda device: True)(gemm.by_decision)  # which checks: NOTE [one decision]


def _grouped_product(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, offs: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return a.new_empty(groups.GroupedGemm(a, b, scale_inv_a, scale_inv_b, offs).shape, dtype=out_dtype)


scaled_grouped_mm = _registered(groups.scaled_grouped_mm, _grouped_product, checks=[groups.check_gemm, groups.check_scales])
scaled_grouped_mm.provider(lambda device: True)(groups_gemm.scaled_grouped_mm)

valid_rows = _registered(
    groups.valid_rows,
    lambda offs, num_rows: offs.new_empty((num_rows,), dtype=torch.bool),
    checks=[groups.check_offs, groups.check_index],
    sizes=["num_rows"],
)


def _columns(x: Tensor, offs: Tensor, index: Tensor | None, align: int, dtype: torch.dtype, pad_outer: bool = False) -> Tensor:
    num_rows = x.shape[0] if index is None else index.shape[0]
    outer = pad_to_alignment(x.shape[1]) if pad_outer else x.shape[1]
    return x.new_empty((outer, groups.padded_width(num_rows, offs.shape[0], align)), dtype=dtype)


transposed_copy = _registered(
    groups.transposed_copy,
    lambda q, offs, index, align: (
        _columns(q, offs, index, align, q.dtype) if offs is not None else empty_copy(q, q.dtype, True, False)
    ),
    "kernels",
    checks=[groups.check_columns],
)


def _cast_columns(
    x: Tensor, dtype: torch.dtype, offs: Tensor, index: Tensor | None, granularity: str, pad_outer: bool, rowwise: bool
) -> list[Tensor]:
    kind = Granularity(granularity)
    q = _columns(x, offs, index, groups.alignment(kind), dtype, pad_outer)
    outer, width = q.shape
    if kind is Granularity.ROW_WISE:
        return [q, _floats(x, offs.shape[0], outer, 1)]
    if kind is Granularity.BLOCK_1X32:
        return [q, x.new_empty((outer, width // MX_BLOCK), dtype=torch.uint8)]
    made = [q, _floats(x, width // BLOCK, outer).t()]
    return (
        [empty_copy(x, dtype, False, False), _floats(x, num_blocks(x.shape[1], BLOCK), x.shape[0]).t(), *made]
        if rowwise
        else made
    )


cast_columns = _registered(groups.cast_columns, _cast_columns, "grouped.column_kernels", checks=[groups.check_cast_columns])

# -- the state of delayed scaling

load_scales = _registered(
    state.load_scales, lambda scale, count: (scale.new_empty((count,)), scale.new_empty((count,))), "state_kernels"
)

take = _registered(state.take, lambda x, index: x.new_empty((len(index),)))

record_amax = _registered(state.record_amax, None, "state_kernels", mutates=["amax"], indexed=["observed"])

update_scales = operation(
    state.update_scales, mutates=["amax_history", "scale", "num_non_finite"], checks=[state.check_algo, state.check_history]
)
update_scales.provider(lambda device: device.type == "cpu")(state.update_scales_on_cpu)
update_scales.lazy_provider(runs_kernels, "lowering.state_kernels")
