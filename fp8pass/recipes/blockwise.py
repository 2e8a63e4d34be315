"""Blockwise scaling: one scale per 1x128 values along K or per 128x128 tile. Source: TransformerEngine's Float8BlockScaling.

What happens in a graph: `blocks.py`. On SM100 its GEMMs are MXFP8's (lowering/blockwise/mxfp8.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from torch import fx

from fp8pass.errors import RecipeError
from fp8pass.graph.casts import CastFamily, ColumnFamily, register
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.sites import GemmSite
from fp8pass.graph.values import Operand, value_of
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.blocks import BlockEmitter, BlockOperations, BlockRecipe
from fp8pass.recipes.options import (
    BackwardOverride,
    Format,
    check,
    check_bools,
    check_epsilon,
    check_format,
    check_override,
    is_int,
    recipe,
)
from fp8pass.recipes.recipe import Cast, Emitter, Epilogue, Quantization, Quantized, QuantizedTensor, Scope, fp8_dtype
from lowering.blockwise.reference import num_blocks
from lowering.formats import BLOCK, Granularity
from lowering.hardware import has_mx_scaled_mm

aten = torch.ops.aten
ops = torch.ops.lowering

OPERATIONS = BlockOperations(
    casts=register(
        CastFamily(
            one=ops.cast_blockwise.default,
            both=ops.cast_transpose_blockwise.default,
            scales_out=True,
            many=ops.multi_cast_transpose_blockwise.default,
            many_one=ops.multi_cast_blockwise.default,
        )
    ),
    compact=ops.compact_blockwise.default,
    gemm_ready=ops.gemm_ready_blockwise.default,
    stacks=register(
        CastFamily(one=ops.cast_stack_blockwise.default, both=ops.cast_transpose_stack_blockwise.default, scales_out=True)
    ),
    columns=register(ColumnFamily(ops.cast_columns_blockwise.default)),
)
_GRANULARITIES = {1: Granularity.BLOCK_1X128, 2: Granularity.BLOCK_128X128}


@recipe
class Float8BlockScaling(BlockRecipe):
    """One scale per 128 values or per 128x128 tile (DeepSeek-V3). Source: TransformerEngine."""

    name: ClassVar[str] = "blockwise"
    scale_bytes: ClassVar[int] = 4

    fp8_format: Format = Format.E4M3
    """FP8 formats of forward tensors and of gradients."""
    x_block_scaling_dim: int = 1
    """1: inputs have a scale per 1x128 values along K; 2: per 128x128 tile."""
    w_block_scaling_dim: int = 2
    """The same for weights."""
    grad_block_scaling_dim: int = 1
    """The same for output gradients."""
    use_f32_scales: bool = False
    """Whether scales may be any float32 values; by default they are powers of two. Not available on SM100."""
    amax_epsilon: float = 0.0
    """Amaxes below this value are replaced by it."""
    backward_override: BackwardOverride | None = None
    """"high_precision": backward GEMMs multiply the original operands. "dequantized": they multiply the output gradient by the
    FP8 copies that the forward GEMM read, converted back. None: they run in FP8."""

    def __post_init__(self) -> None:
        check_format(self)
        check_epsilon(self)
        check_bools(self, "use_f32_scales")
        check_override(self, grad_block_scaling_dim=1)
        dims = {o: getattr(self, o) for o in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")}
        for option, value in dims.items():
            check(self, option, is_int(value) and value in (1, 2), "use 1 (1x128) or 2 (128x128)")
        two = [option for option, value in dims.items() if value == 2]
        if len(two) > 1:
            raise RecipeError(
                f"Float8BlockScaling({two[0]}=2, {two[1]}=2): these two tensors meet in one GEMM, and none takes 128x128 by"
                f" 128x128; set one of them to 1"
            )

    def quantization(self, operand: Operand, role: str) -> Quantization:
        dims = {
            "input": self.x_block_scaling_dim,
            "weight": self.w_block_scaling_dim,
            "grad_output": self.grad_block_scaling_dim,
        }
        return Quantization(fp8_dtype(self, operand), _GRANULARITIES[dims[operand.kind]])

    def fuses_with_producer(self, tensor: QuantizedTensor) -> bool:
        value, granularity = tensor.value, tensor.quantization.granularity
        is_matrix = value.stack is None and value.groups is None
        is_whole = all(isinstance(size, int) and size % BLOCK == 0 for size in (value.rows, value.cols))
        return is_matrix and is_whole and granularity is Granularity.BLOCK_1X128 and not self.use_f32_scales

    def block(self, quantization: Quantization) -> tuple[int, int]:
        block = quantization.granularity.block
        assert block is not None
        return block

    def obstacle(self, site: GemmSite) -> Reason | None:
        if site.offs is not None:
            rows = [o for o in site.operands if o.value.groups is not None]
            square = next((o for o in rows if self.quantization(o, site.role).granularity.is_square), None)
            if square is not None:
                option = "x_block_scaling_dim" if square.kind == "input" else "grad_block_scaling_dim"
                detail = f"128x128 blocks of the {square.kind} would span rows of several groups; {option}=1 runs"
                return Reason(ReasonKind.OPERAND_FORMATS, detail)
        if not (self.use_f32_scales and has_mx_scaled_mm(value_of(site.node).device)):
            return super().obstacle(site)
        detail = "blockwise GEMMs run as MXFP8 on this device, whose scales are powers of two; use_f32_scales=False runs"
        return Reason(ReasonKind.HARDWARE, detail)

    def launch_key(self, cast: Cast) -> Hashable | None:
        if cast.tensor.value.stack is not None:
            return None
        return (self, cast.tensor.quantization, cast.layouts)

    def emitter(self, scope: Scope) -> Emitter:
        return BlockwiseEmitter(self)


class BlockwiseEmitter(BlockEmitter):
    """Blocks of 128, with float32 scales."""

    def __init__(self, recipe: Float8BlockScaling):
        super().__init__(recipe, OPERATIONS)
        self.options = {"power_of_2": not recipe.use_f32_scales, "epsilon": recipe.amax_epsilon}

    @property
    def column_options(self) -> dict[str, Any]:
        return self.options

    def kind(self, quantization: Quantization) -> dict[str, Any]:
        return {"granularity": quantization.granularity.value}

    def scaling(self, quantization: Quantization) -> dict[str, Any]:
        return {**self.kind(quantization), **self.options}

    def quantize_compact(self, cursor: Cursor, matrix: fx.Node, quantization: Quantization) -> fx.Node:
        block = list(self.blocks.block(quantization))
        return cursor.call(ops.quantize_blockwise.default, matrix, quantization.dtype, block, **self.options)

    def scale_values(self, cursor: Cursor, copy: Quantized) -> fx.Node:
        outer, inner = (cursor.size(copy.data, dim) for dim in (0, 1))
        if copy.quantization.granularity is Granularity.BLOCK_1X128:
            return cursor.call(aten.permute.default, cursor.call(aten.slice.Tensor, copy.scale_inv, 1, 0, outer), [1, 0])
        if isinstance(inner, int):
            return cursor.call(aten.slice.Tensor, copy.scale_inv, 1, 0, num_blocks(inner))
        return copy.scale_inv  # the blocks beyond are cut with the values

    def matmul(self, cursor: Cursor, a: Quantized, b: Quantized, epilogue: Epilogue) -> fx.Node:
        transposed = cursor.call(aten.permute.default, b.data, [1, 0])
        args = (a.data, transposed, a.scale_inv, b.scale_inv, epilogue.bias)
        options = {"granularity_a": a.quantization.granularity.value, "granularity_b": b.quantization.granularity.value}
        if has_mx_scaled_mm(value_of(a.data).device):
            options["implementation"] = "mxfp8"
        return cursor.call(ops.scaled_mm_blockwise.default, *args, **options, out_dtype=epilogue.out_dtype)
