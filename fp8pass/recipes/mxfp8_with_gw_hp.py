"""MXFP8 whose grad_weight GEMMs run in high precision. Source: torchao's MXFP8TrainingRecipe.MXFP8_RCEIL_WGRAD_WITH_HP.

grad_weight sums over tokens, so that MXFP8 quantizes inputs and output gradients a second time for it, in blocks along the
tokens. Without that each of them needs one copy, and gradients of weights have no FP8 rounding.
"""

from __future__ import annotations

from typing import ClassVar

from fp8pass.errors import Reason, ReasonKind
from fp8pass.graph.gemms import GemmSite
from fp8pass.recipes.mxfp8 import MXFP8BlockScaling
from fp8pass.recipes.recipe import check, named, recipe


@named("mxfp8_with_gw_hp", words="mxfp8_rceil_wgrad_with_hp mxfp8_wgrad_with_hp")
@recipe
class MXFP8HighPrecisionGradWeight(MXFP8BlockScaling):
    """MXFP8 for output and grad_input; grad_weight runs in high precision. Source: torchao."""

    name: ClassVar[str] = "mxfp8_with_gw_hp"

    backward_override: None = None
    """None: grad_input runs in FP8. `MXFP8BlockScaling(backward_override=...)` has no FP8 GEMM in the backward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = "no grad_weight runs in FP8 with backward_override either; use MXFP8BlockScaling(backward_override=...)"
        check(self, "backward_override", self.backward_override is None, fix)

    def obstacle(self, site: GemmSite) -> Reason | None:
        if site.role == "grad_weight":
            return Reason(ReasonKind.RECIPE, f"the recipe {self.name!r} keeps grad_weight in high precision")
        return super().obstacle(site)
