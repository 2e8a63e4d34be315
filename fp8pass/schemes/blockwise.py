"""One float32 scale per 1x128 values along K or per 128x128 tile.

What happens in a graph: `blocks.py`. On SM100 its GEMMs are MXFP8's (lowering/paths.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from fp8pass.graph.casts import CastFamily, register
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.sites import GemmSite
from fp8pass.graph.values import value_of
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.quantization import Quantization
from fp8pass.schemes.blocks import BlockOperations, BlockScheme
from fp8pass.schemes.copies import Cast, Quantized, QuantizedTensor
from fp8pass.schemes.scheme import Product, scaling
from lowering.blockwise.reference import SCALE_ALIGNMENT
from lowering.copies import num_blocks
from lowering.formats import BLOCK, Granularity
from lowering.hardware import has_mx_scaled_mm

aten = torch.ops.aten
ops = torch.ops.lowering

OPERATIONS = BlockOperations(
    casts=register(CastFamily(cast=ops.cast_blockwise.default, scales_out=True)),
    gemm_ready=ops.gemm_ready_blockwise.default,
)
#: The options of Float8BlockScaling that choose the blocks of operands whose rows may be in groups.
_OPTIONS = {"input": "x_block_scaling_dim", "grad_output": "grad_block_scaling_dim"}


class BlockwiseScheme(BlockScheme):
    """Blocks of 128, with float32 scales."""

    scale_bytes: ClassVar[int] = 4
    operations: ClassVar[BlockOperations] = OPERATIONS

    def fuses_with_producer(self, tensor: QuantizedTensor) -> bool:
        value, quantization = tensor.value, tensor.quantization
        is_matrix = value.batch is None and value.groups is None
        is_whole = all(isinstance(size, int) and size % BLOCK == 0 for size in (value.rows, value.cols))
        return is_matrix and is_whole and quantization.granularity is Granularity.BLOCK_1X128 and quantization.power_of_2

    def obstacle(self, site: GemmSite, quantizations: Sequence[Quantization]) -> Reason | None:
        if site.offs is not None:
            pairs = zip(site.operands, quantizations, strict=True)
            square = next((o for o, q in pairs if o.value.groups is not None and q.granularity.is_square), None)
            if square is not None:
                detail = (
                    f"128x128 blocks of the {square.kind} would span rows of several groups; {_OPTIONS[square.kind]}=1 runs"
                )
                return Reason(ReasonKind.OPERAND_FORMATS, detail)
        if all(q.power_of_2 for q in quantizations) or not has_mx_scaled_mm(value_of(site.node).device):
            return None
        detail = "blockwise GEMMs run as MXFP8 on this device, whose scales are powers of two; use_f32_scales=False runs"
        return Reason(ReasonKind.HARDWARE, detail)

    def launch_key(self, cast: Cast) -> Hashable | None:
        return cast.layouts

    def kind(self, quantization: Quantization) -> dict[str, Any]:
        return {"granularity": quantization.granularity.value}

    def options(self, quantization: Quantization) -> dict[str, Any]:
        return scaling(quantization)

    def scale_values(self, cursor: Cursor, made: Quantized) -> fx.Node:
        outer, inner = (cursor.size(made.data, dim) for dim in (0, 1))
        if made.quantization.granularity is Granularity.BLOCK_1X128:
            return cursor.call(aten.permute.default, cursor.call(aten.slice.Tensor, made.scale_inv, 1, 0, outer), [1, 0])
        if isinstance(inner, int):
            return cursor.call(aten.slice.Tensor, made.scale_inv, 1, 0, num_blocks(inner, BLOCK))
        return made.scale_inv  # the blocks beyond are cut with the values

    def can_turn(self, quantization: Quantization) -> bool:
        return quantization.granularity is Granularity.BLOCK_128X128

    def turned_scales(self, cursor: Cursor, made: Quantized) -> fx.Node:
        """The grid of blocks, transposed: GEMM-ready, for batches as their casts leave it."""
        value, columnwise = made.copy.value, made.copy.columnwise
        blocks = num_blocks(value.rows if columnwise else value.cols, BLOCK)
        first = value_of(made.scale_inv).dim() - 2
        grid = cursor.call(aten.slice.Tensor, made.scale_inv, first + 1, 0, blocks)
        grid = cursor.call(aten.permute.default, grid, [*range(first), first + 1, first])
        extra = -value_of(grid).shape[-1] % SCALE_ALIGNMENT if value.batch is None else 0
        if extra:
            grid = cursor.call(aten.constant_pad_nd.default, grid, [0, extra], 0)
        return cursor.call(aten.clone.default, grid, memory_format=torch.contiguous_format)

    def matmul(self, cursor: Cursor, a: Quantized, b: Quantized, product: Product) -> fx.Node:
        transposed = cursor.call(aten.permute.default, b.data, [1, 0])
        args = (a.data, transposed, a.scale_inv, b.scale_inv, product.bias)
        options = {"granularity_a": a.quantization.granularity.value, "granularity_b": b.quantization.granularity.value}
        if has_mx_scaled_mm(value_of(a.data).device):
            options["implementation"] = "mxfp8"
        return cursor.call(ops.scaled_mm_blockwise.default, *args, **options, out_dtype=product.out_dtype)
