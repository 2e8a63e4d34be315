"""MXFP8: one E8M0 scale, a power of two, per 32 values along K. Source: TransformerEngine's MXFP8BlockScaling.

What happens in a graph: `fp8pass/schemes/blocks.py`.
"""

from __future__ import annotations

from typing import ClassVar

from fp8pass.graph.values import Operand
from fp8pass.recipes.quantization import Quantization
from fp8pass.recipes.recipe import BackwardOverride, Format, Recipe, check_options, fp8_dtype, named, recipe
from lowering.formats import Granularity


@named("mxfp8", words="mx mx_fp8 microscaling 1x32 mxfp8blockscaling mxfp8_rceil")
@recipe
class MXFP8BlockScaling(Recipe):
    """One power of two per 32 values along K, applied by Blackwell's tensor cores. Source: TransformerEngine."""

    name: ClassVar[str] = "mxfp8"

    fp8_format: Format = Format.E4M3
    """FP8 formats of forward tensors and of gradients."""
    enable_2d_quantization: bool = False
    """Weights have a scale per 32x32 tile, so that forward and backward read the same values of them."""
    backward_override: BackwardOverride | None = None
    """"high_precision": backward GEMMs multiply the original operands. "dequantized": they multiply the output gradient by the
    FP8 copies that the forward GEMM read, converted back. None: they run in FP8."""

    def __post_init__(self) -> None:
        check_options(self)

    def quantization(self, operand: Operand, role: str) -> Quantization:
        is_square = self.enable_2d_quantization and operand.kind == "weight"
        return Quantization(fp8_dtype(self, operand), Granularity.BLOCK_1X32, square=is_square)
