"""One E8M0 scale, a power of two, per 32 values along K.

What happens in a graph: `blocks.py`. Scales are uint8 there (NOTE [E8M0] in lowering/scaling.py).
"""

from __future__ import annotations

from collections.abc import Sequence
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
from fp8pass.schemes.copies import Quantized
from fp8pass.schemes.scheme import Product
from lowering import hardware
from lowering.formats import E4M3, Granularity

aten = torch.ops.aten
ops = torch.ops.lowering

OPERATIONS = BlockOperations(
    casts=register(CastFamily(cast=ops.cast_mxfp8.default, scales_out=True)),
    gemm_ready=ops.gemm_ready_mxfp8.default,
)


class MXFP8Scheme(BlockScheme):
    """Blocks of 32, with E8M0 scales."""

    scale_bytes: ClassVar[int] = 1
    operations: ClassVar[BlockOperations] = OPERATIONS

    def obstacle(self, site: GemmSite, quantizations: Sequence[Quantization]) -> Reason | None:
        device = value_of(site.node).device
        is_grouped = site.form is not None
        gemm = hardware.Gemm(E4M3, E4M3, Granularity.BLOCK_1X32, Granularity.BLOCK_1X32, is_grouped=is_grouped)
        refusal = hardware.refusal(gemm, device)
        if refusal is None:
            return None
        instead = "; use the recipe 'blockwise' there" if hardware.has_fp8_tensor_cores(device) else ""
        return Reason(ReasonKind.HARDWARE, f"{refusal}{instead}")

    def kind(self, quantization: Quantization) -> dict[str, Any]:
        return {"square": quantization.square}

    def scale_values(self, cursor: Cursor, made: Quantized) -> fx.Node:
        return cursor.call(ops.scale_values_mxfp8.default, made.data, made.scale_inv)

    def matmul(self, cursor: Cursor, a: Quantized, b: Quantized, product: Product) -> fx.Node:
        transposed = cursor.call(aten.permute.default, b.data, [1, 0])
        args = (a.data, transposed, a.scale_inv, b.scale_inv, product.bias)
        return cursor.call(ops.scaled_mm_mxfp8.default, *args, out_dtype=product.out_dtype)
