"""MXFP8: one E8M0 scale, a power of two, per 32 values along K. Source: TransformerEngine's MXFP8BlockScaling.

What happens in a graph: `blocks.py`. Scales are uint8 there (NOTE [E8M0] in lowering/mxfp8/reference.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import fx

from fp8pass.graph.casts import CastFamily, ColumnFamily, register
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.sites import GemmSite
from fp8pass.graph.values import Operand, value_of
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.blocks import BlockEmitter, BlockOperations, BlockRecipe
from fp8pass.recipes.options import BackwardOverride, Format, check_bools, check_format, check_override, recipe
from fp8pass.recipes.recipe import Emitter, Epilogue, Quantization, Quantized, Scope, fp8_dtype
from lowering import hardware
from lowering.formats import E4M3, MX_BLOCK, Granularity

aten = torch.ops.aten
ops = torch.ops.lowering

OPERATIONS = BlockOperations(
    casts=register(CastFamily(one=ops.cast_mxfp8.default, both=ops.cast_transpose_mxfp8.default, scales_out=True)),
    compact=ops.compact_mxfp8.default,
    gemm_ready=ops.gemm_ready_mxfp8.default,
    stacks=register(CastFamily(one=ops.cast_stack_mxfp8.default, both=ops.cast_transpose_stack_mxfp8.default, scales_out=True)),
    columns=register(ColumnFamily(ops.cast_columns_mxfp8.default)),
)


@dataclasses.dataclass(frozen=True)
class _Square(Quantization):
    """32x32 values have one scale: for the cast. The GEMM reads it as 32 equal ones, of 1x32 blocks."""


@recipe
class MXFP8BlockScaling(BlockRecipe):
    """One power of two per 32 values along K, applied by Blackwell's tensor cores. Source: TransformerEngine."""

    name: ClassVar[str] = "mxfp8"
    scale_bytes: ClassVar[int] = 1

    fp8_format: Format = Format.E4M3
    """FP8 formats of forward tensors and of gradients."""
    enable_2d_quantization: bool = False
    """Whether weights have a scale per 32x32 tile, so that forward and backward read the same values of them."""
    backward_override: BackwardOverride | None = None
    """"high_precision": backward GEMMs multiply the original operands. "dequantized": they multiply the output gradient by the
    FP8 copies that the forward GEMM read, converted back. None: they run in FP8."""

    def __post_init__(self) -> None:
        check_format(self)
        check_bools(self, "enable_2d_quantization")
        check_override(self)

    def quantization(self, operand: Operand, role: str) -> Quantization:
        is_square = self.enable_2d_quantization and operand.kind == "weight"
        return (_Square if is_square else Quantization)(fp8_dtype(self, operand), Granularity.BLOCK_1X32)

    def block(self, quantization: Quantization) -> tuple[int, int]:
        return (MX_BLOCK if isinstance(quantization, _Square) else 1), MX_BLOCK

    def obstacle(self, site: GemmSite) -> Reason | None:
        device = value_of(site.node).device
        gemm = hardware.Gemm(E4M3, E4M3, Granularity.BLOCK_1X32, Granularity.BLOCK_1X32)
        refusal = hardware.refusal(gemm, device)
        if refusal is None:
            return super().obstacle(site)
        instead = "; use the recipe 'blockwise' there" if hardware.has_fp8_tensor_cores(device) else ""
        return Reason(ReasonKind.HARDWARE, f"{refusal}{instead}")

    def emitter(self, scope: Scope) -> Emitter:
        return MXFP8Emitter(self, OPERATIONS)


class MXFP8Emitter(BlockEmitter):
    """Blocks of 32, with E8M0 scales."""

    def kind(self, quantization: Quantization) -> dict[str, Any]:
        return {"square": isinstance(quantization, _Square)}

    def scaling(self, quantization: Quantization) -> dict[str, Any]:
        return self.kind(quantization)

    def quantize_compact(self, cursor: Cursor, matrix: fx.Node, quantization: Quantization) -> fx.Node:
        return cursor.call(ops.quantize_mxfp8.default, matrix, quantization.dtype, **self.kind(quantization))

    def scale_values(self, cursor: Cursor, copy: Quantized) -> fx.Node:
        return cursor.call(ops.scale_values_mxfp8.default, copy.data, copy.scale_inv)

    def matmul(self, cursor: Cursor, a: Quantized, b: Quantized, epilogue: Epilogue) -> fx.Node:
        transposed = cursor.call(aten.permute.default, b.data, [1, 0])
        args = (a.data, transposed, a.scale_inv, b.scale_inv, epilogue.bias)
        return cursor.call(ops.scaled_mm_mxfp8.default, *args, out_dtype=epilogue.out_dtype)
