"""Rowwise scaling: one scale per row of a and per column of b. Source: torchao's recipes "rowwise" and "rowwise_with_gw_hp".

What happens in a graph: `fp8pass/schemes/rowwise.py`.
"""

from __future__ import annotations

from typing import ClassVar

from fp8pass.errors import Reason, ReasonKind
from fp8pass.graph.gemms import GemmSite
from fp8pass.graph.values import Operand
from fp8pass.recipes.quantization import Quantization, ScaleFrom
from fp8pass.recipes.recipe import BackwardOverride, Recipe, check_options, named, recipe
from lowering.formats import E4M3, Granularity


@named("rowwise_with_gw_hp", high_precision_grad_weight=True)
@named(
    "rowwise",
    words="axiswise row row_wise per_row per_token per_channel channelwise float8rowwisescaling",
)
@recipe
class Float8RowwiseScaling(Recipe):
    """One scale per row of the first operand of a GEMM and per column of the second, E4M3 everywhere. Source: torchao."""

    name: ClassVar[str] = "rowwise"

    use_power_2_scales: bool = True
    """Round scales down to powers of two."""
    amax_epsilon: float = 0.0
    """Amaxes below this value are replaced by it."""
    high_precision_grad_weight: bool = False
    """Keep grad_weight in high precision, and let grad_input read weights with one scale per tensor. The preset
    "rowwise_with_gw_hp" sets it: each tensor then needs one row-wise copy."""
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
        check_options(self, high_precision_grad_weight=False)

    def quantization(self, operand: Operand, role: str) -> Quantization:
        is_shared = self.high_precision_grad_weight and role == "grad_input" and operand.kind == "weight"
        return Quantization(
            E4M3,
            Granularity.ROW_WISE,
            scale_from=ScaleFrom.SHARED if is_shared else ScaleFrom.VALUE,
            power_of_2=self.use_power_2_scales,
            epsilon=self.amax_epsilon,
        )

    def obstacle(self, site: GemmSite) -> Reason | None:
        if self.high_precision_grad_weight and site.role == "grad_weight":
            return Reason(ReasonKind.RECIPE, "high_precision_grad_weight=True keeps grad_weight in high precision")
        return super().obstacle(site)
