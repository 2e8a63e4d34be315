"""Current scaling: one scale per tensor, from the tensor itself. Source: TransformerEngine's Float8CurrentScaling.

What happens in a graph: `fp8pass/schemes/tensorwise.py`.
"""

from __future__ import annotations

from typing import ClassVar

from fp8pass.graph.values import Operand
from fp8pass.recipes.quantization import Quantization
from fp8pass.recipes.recipe import BackwardOverride, Format, Recipe, check_options, fp8_dtype, named, recipe
from lowering.formats import Granularity


@named(
    "current",
    words="tensorwise tensor_wise tensor per_tensor pertensor dynamic dynamic_scaling current_scaling float8currentscaling",
)
@recipe
class Float8CurrentScaling(Recipe):
    """One scale per tensor, from the tensor itself: its amax is read first. Source: TransformerEngine."""

    name: ClassVar[str] = "current"

    fp8_format: Format = Format.HYBRID
    """FP8 formats of forward tensors and of gradients."""
    use_power_2_scales: bool = False
    """Round scales down to powers of two."""
    amax_epsilon: float = 0.0
    """Amaxes below this value are replaced by it."""
    backward_override: BackwardOverride | None = None
    """"high_precision": backward GEMMs multiply the original operands. "dequantized": they multiply the output gradient by the
    FP8 copies that the forward GEMM read, converted back. None: they run in FP8."""
    fast_accum_output: bool = True
    """The forward GEMM may use the tensor cores' faster, less precise accumulator."""
    fast_accum_grad_input: bool = False
    """The grad_input GEMM may use it."""
    fast_accum_grad_weight: bool = False
    """The grad_weight GEMM may use it."""

    def __post_init__(self) -> None:
        check_options(self)

    def quantization(self, operand: Operand, role: str) -> Quantization:
        return Quantization(
            fp8_dtype(self, operand), Granularity.TENSOR_WISE, power_of_2=self.use_power_2_scales, epsilon=self.amax_epsilon
        )
