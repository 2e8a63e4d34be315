"""Blockwise scaling: one scale per 1x128 values along K or per 128x128 tile. Source: TransformerEngine's Float8BlockScaling.

What happens in a graph: `fp8pass/schemes/blocks.py`.
"""

from __future__ import annotations

from typing import ClassVar

from fp8pass.errors import RecipeError
from fp8pass.graph.values import Operand
from fp8pass.recipes.quantization import Quantization
from fp8pass.recipes.recipe import BackwardOverride, Format, Recipe, check, check_options, fp8_dtype, is_int, named, recipe
from lowering.formats import E4M3, Granularity

_GRANULARITIES = {1: Granularity.BLOCK_1X128, 2: Granularity.BLOCK_128X128}


@named(
    "blockwise",
    words="deepseek deepseek_v3 deepseekv3 deepgemm deep_gemm block block_wise per_block groupwise 128x128 1x128"
    " float8blockscaling",
)
@recipe
class Float8BlockScaling(Recipe):
    """One scale per 128 values or per 128x128 tile (DeepSeek-V3). Source: TransformerEngine."""

    name: ClassVar[str] = "blockwise"

    fp8_format: Format = Format.E4M3
    """FP8 formats of forward tensors and of gradients."""
    x_block_scaling_dim: int = 1
    """1: inputs have a scale per 1x128 values along K; 2: per 128x128 tile."""
    w_block_scaling_dim: int = 2
    """1 or 2, for weights."""
    grad_block_scaling_dim: int = 1
    """1 or 2, for output gradients."""
    use_f32_scales: bool = False
    """Scales may be any float32 values; by default they are powers of two. Not available on SM100."""
    amax_epsilon: float = 0.0
    """Amaxes below this value are replaced by it."""
    backward_override: BackwardOverride | None = None
    """"high_precision": backward GEMMs multiply the original operands. "dequantized": they multiply the output gradient by the
    FP8 copies that the forward GEMM read, converted back. None: they run in FP8."""

    def __post_init__(self) -> None:
        check_options(self, grad_block_scaling_dim=1)
        dims = {o: getattr(self, o) for o in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")}
        for option, value in dims.items():
            check(self, option, is_int(value) and value in (1, 2), "use 1 (1x128) or 2 (128x128)")
        two = [option for option, value in dims.items() if value == 2]
        if len(two) > 1:
            raise RecipeError(
                f"Float8BlockScaling({two[0]}=2, {two[1]}=2): these two tensors meet in one GEMM, and none takes 128x128 by"
                f" 128x128; set one of them to 1"
            )

    def saved(self) -> Quantization:
        return Quantization(E4M3, Granularity.BLOCK_1X128, power_of_2=not self.use_f32_scales, epsilon=self.amax_epsilon)

    def quantization(self, operand: Operand, role: str) -> Quantization:
        dims = {
            "input": self.x_block_scaling_dim,
            "weight": self.w_block_scaling_dim,
            "grad_output": self.grad_block_scaling_dim,
        }
        return Quantization(
            fp8_dtype(self, operand),
            _GRANULARITIES[dims[operand.kind]],
            power_of_2=not self.use_f32_scales,
            epsilon=self.amax_epsilon,
        )
