"""Inference engines whose online quantization the operands of forward GEMMs can equal, and their formulas.

An engine divides the amax by 448 and calls the quotient the scale; here that is scale_inv, rounded once. With scales that are
powers of two this makes no difference, and only the smallest amax is the engine's.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from fp8pass.errors import RecipeError
from fp8pass.graph.values import Operand
from fp8pass.recipes.blockwise import Float8BlockScaling
from fp8pass.recipes.current import Float8CurrentScaling
from fp8pass.recipes.quantization import Quantization, ScaleFrom
from fp8pass.recipes.recipe import Recipe, check, recipe
from fp8pass.recipes.rowwise import Float8RowwiseScaling
from lowering.formats import Granularity

Engine = Literal["vllm", "vllm-per-tensor", "deepgemm", "hf"]
"""vLLM's per-tensor quantization scales inputs per token where its CUTLASS GEMMs run, as on compute capability 9.0, and per
tensor elsewhere: "vllm" and "vllm-per-tensor" with the recipe "current"."""

Inverse = Literal["multiply", "divide"]
Formula = tuple[Inverse, float]
"""`inverse` and `epsilon` of a `Quantization` with scales in float32."""

_PER_TOKEN: Formula = ("divide", 1 / 512)
"""vLLM's smallest scale is 1 / (448 * 512). Source: csrc/quantization/w8a8/fp8/common.cu,
dynamic_per_token_scaled_fp8_quant_kernel_strided."""
_PER_TENSOR: Formula = ("multiply", 0.0)
"""Source: the same file, dynamic_scaled_fp8_quant: scaled_fp8_quant_kernel_strided_dynamic multiplies by 1 / scale. An amax of
0 counts as 1 here; there the scale is 0."""
_GROUP: Formula = ("divide", 1e-10)
"""Source: vLLM's csrc/quantization/w8a8/fp8/per_token_group_quant.cu."""
_DEEPGEMM: Formula = ("multiply", 1e-4)
"""Source: deep_gemm/utils/math.py, per_token_cast_to_fp8 and per_block_cast_to_fp8. For weights vLLM has the latter in
utils/deep_gemm.py."""
_TRANSFORMERS: Formula = ("divide", 0.0)
"""Source: transformers' integrations/compressed_tensors.py, quantize_fp8_per_row."""

#: Engine and name of a recipe -> the formulas of inputs and of weights, and options that the recipe gets.
_MATCHES: dict[tuple[str, str], tuple[Formula, Formula, dict[str, Any]]] = {
    ("vllm", "rowwise"): (_PER_TOKEN, _PER_TOKEN, {"use_power_2_scales": False}),
    ("vllm", "blockwise"): (_GROUP, _DEEPGEMM, {}),
    ("vllm", "current"): (_PER_TOKEN, _PER_TENSOR, {}),
    ("vllm-per-tensor", "current"): (_PER_TENSOR, _PER_TENSOR, {}),
    ("deepgemm", "blockwise"): (_DEEPGEMM, _DEEPGEMM, {}),
    # its GEMM does not ask for fast accumulation
    ("hf", "rowwise"): (_TRANSFORMERS, _TRANSFORMERS, {"use_power_2_scales": False, "fast_accum_output": False}),
}
#: Name of a recipe -> options that no engine has otherwise.
_NEEDED: dict[str, dict[str, Any]] = {
    "rowwise": {"use_power_2_scales": False},
    "blockwise": {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2},
    "current": {"use_power_2_scales": False},
}


@recipe
class MatchedRecipe(Recipe):
    """A recipe whose forward operands are an engine's. It comes before the recipe itself among the bases of a class."""

    match: Engine
    """The engine."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        fix = f"the engine's smallest amax is taken with match={self.match!r}; leave amax_epsilon at 0.0"
        check(self, "amax_epsilon", getattr(self, "amax_epsilon", 0.0) == 0.0, fix)
        for option, value in _NEEDED[self.name].items():
            check(self, option, getattr(self, option) == value, f"match={self.match!r} needs {option}={value!r}")
        if (self.match, self.name) == ("vllm", "blockwise"):
            fix = (
                "with UE8M0 scales vLLM's online quantization rounds weights twice, to float32 scales first and from their FP8"
                " values again; use use_f32_scales=True, or match='deepgemm'"
            )
            check(self, "use_f32_scales", getattr(self, "use_f32_scales", True), fix)

    def quantization(self, operand: Operand, role: str) -> Quantization:
        found: Quantization = super().quantization(operand, role)  # type: ignore[safe-super]
        if role != "output":
            return found
        of_input, of_weight, _ = _MATCHES[self.match, self.name]
        inverse, epsilon = of_weight if operand.kind == "weight" else of_input
        if self.name == "current":
            return self._current(found, operand, inverse, epsilon)
        return dataclasses.replace(found, inverse=None if found.power_of_2 else inverse, epsilon=epsilon)

    def _current(self, found: Quantization, operand: Operand, inverse: Inverse, epsilon: float) -> Quantization:
        """One scale per weight, which projections that the engine fuses share, and one per token or per tensor of inputs.
        Experts have one scale per expert, and their inputs one for all tokens. Source: vLLM's quantization/online/fp8.py,
        Fp8PerTensorOnlineLinearMethod and Fp8PerTensorOnlineMoEMethod, whose kFp8Dynamic...Sym say how inputs are scaled."""
        is_weight = operand.kind == "weight"
        if operand.value.batch is not None or operand.value.groups is not None:
            return dataclasses.replace(found, inverse=_PER_TENSOR[0], epsilon=_PER_TENSOR[1])
        if self.match == "vllm":
            scale_from = ScaleFrom.SHARED if is_weight else ScaleFrom.VALUE
            found = dataclasses.replace(found, granularity=Granularity.ROW_WISE, scale_from=scale_from)
        return dataclasses.replace(found, inverse=inverse, epsilon=epsilon, fused=is_weight)


@recipe
class EngineRowwiseScaling(MatchedRecipe, Float8RowwiseScaling):
    """Rowwise scaling whose forward operands are an engine's."""


@recipe
class EngineBlockScaling(MatchedRecipe, Float8BlockScaling):
    """Blockwise scaling whose forward operands are an engine's."""


@recipe
class EngineCurrentScaling(MatchedRecipe, Float8CurrentScaling):
    """Current scaling whose forward operands are an engine's."""


_MATCHED: dict[type[Recipe], type[MatchedRecipe]] = {
    Float8RowwiseScaling: EngineRowwiseScaling,
    Float8BlockScaling: EngineBlockScaling,
    Float8CurrentScaling: EngineCurrentScaling,
}


def matching(recipe: Recipe, engine: Engine) -> Recipe:
    """The recipe with forward operands as an engine quantizes; raises RecipeError where it does not quantize so."""
    if isinstance(recipe, MatchedRecipe) and recipe.match == engine:
        return recipe
    made: Any = _MATCHED.get(type(recipe))
    if made is None or (engine, recipe.name) not in _MATCHES:
        known = ", ".join(repr(name) for e, name in _MATCHES if e == engine)
        raise RecipeError(
            f"match={engine!r} with the recipe {recipe.name!r}: {_mismatch(engine, recipe.name)}. Recipes: {known}"
        )
    options = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(made) if f.name != "match"}
    found: Recipe = made(**(options | _MATCHES[engine, recipe.name][2]), match=engine)
    return found


def _mismatch(engine: str, recipe: str) -> str:
    """The reason why an engine does not quantize online as a recipe does."""
    if recipe == "delayed":
        return "online quantization takes no scales from earlier steps; export_fp8 writes them for engines"
    if recipe == "blockwise" and engine == "hf":
        return "its inputs are quantized by a kernel that is not part of transformers"
    return "it has no such online quantization"
