"""Rowwise scaling: one scale per row of a and per column of b. Source: torchao's recipes "rowwise" and "rowwise_with_gw_hp".

In a graph: one cast per tensor computes scales and copies. The scales run along K of each copy, so the two copies of a tensor
have different values. A rowwise copy travels through all-gathers with its scales, because every rank has whole rows; a column
lies on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import fx

from fp8pass.graph.casts import CastFamily, ColumnFamily, Layout, emit, emit_many, register
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather
from fp8pass.graph.moves import keeps_blocks, replay, replay_on_scales, scale_shape
from fp8pass.graph.sites import GemmSite
from fp8pass.graph.values import Operand, value_of
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.current import Float8CurrentScaling
from fp8pass.recipes.grouped import cast_columns, gathered, grouped_matmul
from fp8pass.recipes.options import FAST_ACCUM, BackwardOverride, Format, check_bools, check_epsilon, check_override, recipe
from fp8pass.recipes.recipe import (
    Cast,
    Emitter,
    Epilogue,
    GatheredCopies,
    GroupNodes,
    Quantization,
    Quantized,
    QuantizedTensor,
    Recipe,
    Scope,
    Sent,
)
from fp8pass.recipes.tensorwise import padding_of
from lowering.formats import E4M3, Granularity

aten = torch.ops.aten
ops = torch.ops.lowering

CASTS = register(
    CastFamily(
        one=ops.cast_rowwise.default,
        both=ops.cast_transpose_rowwise.default,
        many=ops.multi_cast_transpose_rowwise.default,
        many_one=ops.multi_cast_rowwise.default,
        scales_out=True,
    )
)


STACKS = register(
    CastFamily(one=ops.cast_stack_rowwise.default, both=ops.cast_transpose_stack_rowwise.default, scales_out=True)
)
COLUMNS = register(ColumnFamily(ops.cast_columns_rowwise.default))


@dataclasses.dataclass(frozen=True)
class _OneScale(Quantization):
    """All rows have the scale of the whole tensor: per tensor for the cast, row-wise for the GEMM."""


@recipe
class Float8RowwiseScaling(Recipe):
    """One scale per row of the first operand of a GEMM and per column of the second, E4M3 everywhere. Source: torchao."""

    name: ClassVar[str] = "rowwise"
    has_groups: ClassVar[bool] = True
    reads: ClassVar[int] = 2

    use_power_2_scales: bool = True
    """Whether scales are rounded down to powers of two."""
    amax_epsilon: float = 0.0
    """Amaxes below this value are replaced by it."""
    high_precision_grad_weight: bool = False
    """Whether grad_weight stays in high precision, and grad_input reads weights with one scale per tensor. The preset
    "rowwise_with_gw_hp" sets it: each tensor then needs one row-wise copy."""
    backward_override: BackwardOverride | None = None
    """"high_precision": backward GEMMs multiply the original operands. "dequantized": they multiply the output gradient by the
    FP8 copies that the forward GEMM read, converted back. None: they run in FP8."""
    fast_accum_output: bool = True
    """Whether the forward GEMM may use the tensor cores' faster, less precise accumulator."""
    fast_accum_grad_input: bool = False
    """The same for the grad_input GEMM."""
    fast_accum_grad_weight: bool = False
    """The same for the grad_weight GEMM."""

    def __post_init__(self) -> None:
        check_epsilon(self)
        check_bools(self, "use_power_2_scales", "high_precision_grad_weight", *FAST_ACCUM)
        check_override(self, high_precision_grad_weight=False)

    def quantization(self, operand: Operand, role: str) -> Quantization:
        is_shared = self.high_precision_grad_weight and role == "grad_input" and operand.kind == "weight"
        return (_OneScale if is_shared else Quantization)(E4M3, Granularity.ROW_WISE)

    def fast_accum(self, role: str) -> bool:
        chosen: bool = getattr(self, f"fast_accum_{role}")
        return chosen

    def obstacle(self, site: GemmSite) -> Reason | None:
        if self.high_precision_grad_weight and site.role == "grad_weight":
            return Reason(ReasonKind.RECIPE, "high_precision_grad_weight=True keeps grad_weight in high precision")
        return super().obstacle(site)

    def launch_key(self, cast: Cast) -> Hashable | None:
        """A rowwise copy alone takes a kernel that holds its row, and reads the matrix once; several in one launch read it
        twice."""
        if cast.tensor.value.stack is not None or not any(layout.columnwise for layout in cast.layouts):
            return None
        return (self, cast.tensor.quantization, cast.layouts)

    def gathered(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> GatheredCopies:
        if isinstance(tensor.quantization, _OneScale):
            return self.per_tensor.gathered(tensor, layouts, gather)
        columns = value_of(gather.wait).shape[-1]
        scale_bytes = Fraction(4, columns) if isinstance(columns, int) and columns else Fraction()
        sent = tuple(Sent((self, layout.columnwise), 1 + scale_bytes) for layout in layouts)
        matrix = tensor.value.reshape or tensor.value.root
        obstacle = None
        if any(layout.columnwise for layout in layouts):
            obstacle = Reason(ReasonKind.SCALES, "columns are spread over several ranks, and so are the amaxes that scale them")
        elif not keeps_blocks(matrix, gather.wait, 1) or any(padding_of(tensor, layout) is None for layout in layouts):
            obstacle = Reason(ReasonKind.SHAPE, "ranks hold parts of rows, or sizes are dynamic")
        return GatheredCopies(sent, obstacle)

    def emitter(self, scope: Scope) -> Emitter:
        return RowwiseEmitter(self, scope)

    @property
    def scaling(self) -> dict[str, Any]:
        """The arguments of an operation that say how scales are made."""
        return {"power_of_2": self.use_power_2_scales, "epsilon": self.amax_epsilon}

    @property
    def per_tensor(self) -> Float8CurrentScaling:
        """What scales the weights that have one scale."""
        return Float8CurrentScaling(
            fp8_format=Format.E4M3, use_power_2_scales=self.use_power_2_scales, amax_epsilon=self.amax_epsilon
        )


class RowwiseEmitter(Emitter):
    """Casts that compute their own scales."""

    def __init__(self, recipe: Float8RowwiseScaling, scope: Scope):
        self.recipe = recipe
        self.per_tensor = recipe.per_tensor.emitter(scope)

    def quantize(self, cursor: Cursor, casts: Sequence[Cast], matrices: Sequence[fx.Node]) -> list[tuple[Quantized, ...]]:
        first = casts[0]
        if isinstance(first.tensor.quantization, _OneScale):
            return self.per_tensor.quantize(cursor, casts, matrices)
        if len(casts) == 1:
            made = [emit(cursor, CASTS, matrices[0], first.tensor.dtype, first.layouts, **self.recipe.scaling)]
        else:
            made = emit_many(cursor, CASTS, matrices, first.tensor.dtype, first.layouts, **self.recipe.scaling)
        return [Quantized.made_by(outputs, cast.tensor.quantization) for cast, outputs in zip(casts, made, strict=True)]

    def quantize_shard(self, cursor: Cursor, cast: Cast, gather: Gather, matrix: fx.Node) -> tuple[Quantized, ...]:
        """The rowwise copy: rows are whole on every rank, so that their scales are known before the gather. Data travel as
        uint8, which every communication library has."""
        if isinstance(cast.tensor.quantization, _OneScale):
            return self.per_tensor.quantize_shard(cursor, cast, gather, matrix)
        (layout,) = cast.layouts
        made = cursor.call(ops.quantize_rowwise.default, gather.source, cast.tensor.dtype, **self.recipe.scaling)
        data, scales = cursor.items(made)
        scales = cursor.call(aten.reshape.default, scales, scale_shape(gather.source, 1, 1))
        data = gather.send(cursor, cursor.call(aten.view.dtype, data, torch.uint8))
        scales = gather.send(cursor, scales)
        data = replay(matrix, {gather.wait: data}, cursor.call)
        scales = replay_on_scales(matrix, {gather.wait: scales}, 1, 1, cursor.call)
        padding = padding_of(cast.tensor, layout)
        if padding and any(padding):
            data = cursor.call(aten.constant_pad_nd.default, data, padding, 0)
            scales = cursor.call(aten.constant_pad_nd.default, scales, [0, 0, 0, padding[3]], 1.0)
        dense = {"memory_format": torch.contiguous_format}
        data, scales = (cursor.call(aten.clone.default, node, **dense) for node in (data, scales))
        data = cursor.call(aten.view.dtype, data, cast.tensor.dtype)
        return (Quantized(data, scales, cast.tensor.quantization),)

    def quantize_stack(self, cursor: Cursor, cast: Cast, stack: fx.Node) -> tuple[Quantized, ...]:
        if isinstance(cast.tensor.quantization, _OneScale):
            return tuple(_per_row(cursor, made) for made in self.per_tensor.quantize_stack(cursor, cast, stack))
        outputs = emit(cursor, STACKS, stack, cast.tensor.dtype, cast.layouts, **self.recipe.scaling)
        return Quantized.made_by(outputs, cast.tensor.quantization)

    def quantize_rows(self, cursor: Cursor, cast: Cast, matrix: fx.Node, groups: GroupNodes) -> Quantized:
        """Each row has its own scale, and so does each column in each group."""
        tensor, (layout,) = cast.tensor, cast.layouts
        if layout.columnwise:
            return cast_columns(cursor, COLUMNS, cast, matrix, groups, **self.recipe.scaling)
        outputs = emit(cursor, CASTS, matrix, tensor.dtype, (Layout(False),), **self.recipe.scaling)
        (made,) = Quantized.made_by(outputs, tensor.quantization)
        data, scales = (gathered(cursor, node, groups) for node in (made.data, made.scale_inv))
        return Quantized(data, scales, tensor.quantization)

    def grouped_matmul(self, cursor: Cursor, a: Quantized, b: Quantized, offs: fx.Node | None, epilogue: Epilogue) -> fx.Node:
        return grouped_matmul(cursor, self.recipe, a, b, offs, epilogue)

    def matmul(self, cursor: Cursor, a: Quantized, b: Quantized, epilogue: Epilogue) -> fx.Node:
        transposed = cursor.call(aten.permute.default, b.data, [1, 0])
        args = (a.data, transposed, a.scale_inv, b.scale_inv, epilogue.bias)
        fast_accum = self.recipe.fast_accum(epilogue.role)
        return cursor.call(ops.scaled_mm_rowwise.default, *args, out_dtype=epilogue.out_dtype, fast_accum=fast_accum)


def _per_row(cursor: Cursor, made: Quantized) -> Quantized:
    """A stack whose matrices have one scale each, as a GEMM of rows reads them."""
    count, rows, _ = value_of(made.data).shape
    scales = cursor.call(aten.reshape.default, made.scale_inv, [-1, 1, 1])
    scales = cursor.call(aten.expand.default, scales, [count, rows, 1])
    dense = cursor.call(aten.clone.default, scales, memory_format=torch.contiguous_format)
    return dataclasses.replace(made, scale_inv=dense)
