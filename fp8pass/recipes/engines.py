"""Inference engines whose online quantization the operands of forward GEMMs can equal, and how each quantizes.

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
from fp8pass.recipes.options import check, recipe
from fp8pass.recipes.quantization import Quantization, ScaleFrom
from fp8pass.recipes.recipe import Recipe
from fp8pass.recipes.rowwise import Float8RowwiseScaling
from lowering.formats import Granularity

Engine = Literal["vllm", "vllm-per-tensor", "deepgemm", "hf"]
"""vLLM's per-tensor quantization scales inputs per token where its CUTLASS GEMMs run, as on compute capability 9.0, and per
tensor elsewhere: "vllm" and "vllm-per-tensor" with the recipe "current"."""


@dataclasses.dataclass(frozen=True)
class Formula:
    """How an engine quantizes an operand with scales in float32."""

    inverse: Literal["multiply", "divide"]
    epsilon: float
    """Amaxes below this value are replaced by it."""


_PER_TOKEN = Formula("divide", 1 / 512)
"""vLLM's smallest scale is 1 / (448 * 512). Source: csrc/quantization/w8a8/fp8/common.cu,
dynamic_per_token_scaled_fp8_quant_kernel_strided."""
_PER_TENSOR = Formula("multiply", 0.0)
"""Source: the same file, dynamic_scaled_fp8_quant: scaled_fp8_quant_kernel_strided_dynamic multiplies by 1 / scale. An amax of
0 counts as 1 here; there the scale is 0."""
_GROUP = Formula("divide", 1e-10)
"""Source: vLLM's csrc/quantization/w8a8/fp8/per_token_group_quant.cu."""
_DEEPGEMM = Formula("multiply", 1e-4)
"""Source: deep_gemm/utils/math.py, per_token_cast_to_fp8 and per_block_cast_to_fp8. For weights vLLM has the latter in
utils/deep_gemm.py."""
_TRANSFORMERS = Formula("divide", 0.0)
"""Source: transformers' integrations/compressed_tensors.py, quantize_fp8_per_row."""

#: Engine and name of a recipe -> the formulas of inputs and of weights.
FORMULAS: dict[tuple[str, str], tuple[Formula, Formula]] = {
    ("vllm", "rowwise"): (_PER_TOKEN, _PER_TOKEN),
    ("vllm", "blockwise"): (_GROUP, _DEEPGEMM),
    ("vllm", "current"): (_PER_TOKEN, _PER_TENSOR),
    ("vllm-per-tensor", "current"): (_PER_TENSOR, _PER_TENSOR),
    ("deepgemm", "blockwise"): (_DEEPGEMM, _DEEPGEMM),
    ("hf", "rowwise"): (_TRANSFORMERS, _TRANSFORMERS),
}


@recipe
class EngineRowwiseScaling(Float8RowwiseScaling):
    """Rowwise scaling whose forward operands are an engine's."""

    match: Engine
    """The engine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_match(self, use_power_2_scales=False)

    def quantization(self, operand: Operand, role: str) -> Quantization:
        return as_engine(super().quantization(operand, role), self.match, self.name, operand.kind, role)


@recipe
class EngineBlockScaling(Float8BlockScaling):
    """Blockwise scaling whose forward operands are an engine's."""

    match: Engine
    """The engine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_match(self, x_block_scaling_dim=1, w_block_scaling_dim=2)
        if self.match == "vllm":
            fix = (
                "with UE8M0 scales vLLM's online quantization rounds weights twice, to float32 scales first and from their FP8"
                " values again; use use_f32_scales=True, or match='deepgemm'"
            )
            check(self, "use_f32_scales", self.use_f32_scales, fix)

    def quantization(self, operand: Operand, role: str) -> Quantization:
        return as_engine(super().quantization(operand, role), self.match, self.name, operand.kind, role)


@recipe
class EngineCurrentScaling(Float8CurrentScaling):
    """One scale per weight, which projections that the engine fuses share, and one per token or per tensor of inputs. Experts
    have one scale per expert, and their inputs one for all tokens. Source: vLLM's quantization/online/fp8.py,
    Fp8PerTensorOnlineLinearMethod and Fp8PerTensorOnlineMoEMethod, whose kFp8Dynamic...Sym say how inputs are scaled."""

    match: Engine
    """The engine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_match(self, use_power_2_scales=False)

    def quantization(self, operand: Operand, role: str) -> Quantization:
        found = super().quantization(operand, role)
        is_weight = operand.kind == "weight"
        if role != "output":
            return found
        if operand.value.batch is not None or operand.value.groups is not None:
            return dataclasses.replace(found, inverse=_PER_TENSOR.inverse, epsilon=_PER_TENSOR.epsilon)
        if self.match == "vllm":
            scale_from = ScaleFrom.SHARED if is_weight else ScaleFrom.VALUE
            found = dataclasses.replace(found, granularity=Granularity.ROW_WISE, scale_from=scale_from)
        return dataclasses.replace(as_engine(found, self.match, self.name, operand.kind, role), fused=is_weight)


def check_match(recipe: Any, **needed: object) -> None:
    """No option contradicts the engine's formulas. needed: options and the values that they need."""
    engine = recipe.match
    fix = f"the engine's smallest amax is taken with match={engine!r}; leave amax_epsilon at 0.0"
    check(recipe, "amax_epsilon", recipe.amax_epsilon == 0.0, fix)
    for option, value in needed.items():
        check(recipe, option, getattr(recipe, option) == value, f"match={engine!r} needs {option}={value!r}")


def matching(recipe: Recipe, engine: Engine) -> Recipe:
    """The recipe with forward operands as an engine quantizes; raises RecipeError where it does not quantize so."""
    if isinstance(recipe, (EngineRowwiseScaling, EngineBlockScaling, EngineCurrentScaling)) and recipe.match == engine:
        return recipe
    options = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe) if f.name != "match"}  # type: ignore[arg-type]
    if (engine, recipe.name) in FORMULAS and type(recipe) is Float8RowwiseScaling:
        options["use_power_2_scales"] = False
        if engine == "hf":
            options["fast_accum_output"] = False  # its GEMM does not ask for it
        return EngineRowwiseScaling(**options, match=engine)
    if (engine, recipe.name) in FORMULAS and type(recipe) is Float8BlockScaling:
        return EngineBlockScaling(**options, match=engine)
    if (engine, recipe.name) in FORMULAS and type(recipe) is Float8CurrentScaling:
        return EngineCurrentScaling(**options, match=engine)
    known = ", ".join(repr(name) for e, name in FORMULAS if e == engine)
    raise RecipeError(f"match={engine!r} with the recipe {recipe.name!r}: {_mismatch(engine, recipe.name)}. Recipes: {known}")


def _mismatch(engine: str, recipe: str) -> str:
    """Why an engine does not quantize online as a recipe does."""
    if recipe == "delayed":
        return "online quantization takes no scales from earlier steps; export_fp8 writes them for engines"
    if recipe == "blockwise" and engine == "hf":
        return "its inputs are quantized by a kernel that is not part of transformers"
    return "it has no such online quantization"


def as_engine(quantization: Quantization, engine: Engine, recipe: str, kind: str, role: str) -> Quantization:
    """The quantization of an operand of this kind and role under a recipe that is to match an engine."""
    if role != "output":
        return quantization
    formula = FORMULAS[engine, recipe][kind == "weight"]
    inverse = None if quantization.power_of_2 else formula.inverse
    return dataclasses.replace(quantization, inverse=inverse, epsilon=formula.epsilon)
