"""Recipes: how tensors are scaled. One file per recipe: its options, its decisions and its names.

A new one is its file, its import here and its name in `RecipeName`. The rest is what a wrong recipe is told, such as the
equivalent of another project's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

from fp8pass.errors import RecipeError, nearest
from fp8pass.recipes.blockwise import Float8BlockScaling as Float8BlockScaling
from fp8pass.recipes.current import Float8CurrentScaling as Float8CurrentScaling
from fp8pass.recipes.delayed import DelayedScaling as DelayedScaling
from fp8pass.recipes.mxfp8 import MXFP8BlockScaling as MXFP8BlockScaling
from fp8pass.recipes.mxfp8_with_gw_hp import MXFP8HighPrecisionGradWeight as MXFP8HighPrecisionGradWeight
from fp8pass.recipes.quantization import Quantization as Quantization
from fp8pass.recipes.quantization import ScaleFrom as ScaleFrom
from fp8pass.recipes.recipe import NAMED, WORDS, home_of
from fp8pass.recipes.recipe import NO_RECIPE as NO_RECIPE
from fp8pass.recipes.recipe import Format as Format
from fp8pass.recipes.recipe import Recipe as Recipe
from fp8pass.recipes.rowwise import Float8RowwiseScaling as Float8RowwiseScaling
from lowering.formats import Granularity as Granularity

RecipeName = Literal[
    "delayed",
    "current",
    "blockwise",
    "rowwise",
    "rowwise_with_gw_hp",
    "mxfp8",
    "mxfp8_with_gw_hp",
]
"""A recipe with the options that its file gives this name."""

PRESETS: dict[RecipeName, Callable[[], Recipe]] = {name: NAMED[name] for name in get_args(RecipeName)}

#: Classes that TransformerEngine has, too.
_TRANSFORMER_ENGINE = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)
#: Its options for GEMMs -> ours, which say the opposite of `use_split_accumulator`.
_GEMMS = {
    "fp8_gemm_fprop": "fast_accum_output",
    "fp8_gemm_dgrad": "fast_accum_grad_input",
    "fp8_gemm_wgrad": "fast_accum_grad_weight",
}
_PAGES = {"transformer_engine": "docs/coming-from-transformer-engine.md", "torchao": "docs/coming-from-torchao.md"}


def as_recipe(value: object) -> Recipe:
    """The recipe that `value` is or names; raises RecipeError otherwise."""
    if isinstance(value, Recipe):
        try:
            hash(value)
        except TypeError as error:
            raise RecipeError(f"the recipe {value!r} is not hashable: {error}; make it a frozen dataclass") from error
        return value
    if (advice := _advice_on(value)) is not None:
        raise RecipeError(advice)
    if isinstance(value, str):
        if value in NAMED:
            return NAMED[value]()
        raise RecipeError(f"no recipe is called {value!r}.{nearest(value, PRESETS, WORDS)} Use one of {', '.join(PRESETS)}")
    if isinstance(value, type) and issubclass(value, Recipe):
        raise RecipeError(f"recipe is the class {value.__name__}; write {value.__name__}()")
    raise RecipeError(f"recipe is {value!r}, a {type(value).__name__}; use a recipe object or one of {', '.join(PRESETS)}")


def _advice_on(value: object) -> str | None:
    """Advice for a class, an object or a function of TransformerEngine or torchao; None for everything else."""
    home = home_of(value)
    if home is None:
        return None
    kind = value.__name__ if isinstance(value, type) else type(value).__name__
    known = _of_transformer_engine(value, kind) if home == "transformer_engine" else _of_torchao(value, kind)
    ours = f"the equivalent is {known}" if known else "it has no equivalent here"
    return f"recipe is a {kind} of {home}; {ours} ({_PAGES[home]} lists every option)"


def _of_transformer_engine(value: Any, kind: str) -> str | None:
    ours: type[Recipe] | None = next((each for each in _TRANSFORMER_ENGINE if each.__name__ == kind), None)
    if ours is not None:
        return _written(ours, {} if isinstance(value, type) else _options(value, ours))
    if kind == "CustomRecipe":
        return "a class with a method `quantization` (docs/recipes.md)"
    return None


def _options(value: Any, ours: type[Recipe]) -> dict[str, Any]:
    """The options of ours that differ from their defaults."""
    fields: Any = ours
    found = {}
    for field in dataclasses.fields(fields):
        given = getattr(value, field.name, field.default)
        if field.name == "fp8_format":
            given = Format.__members__.get(getattr(given, "name", ""), field.default)
        found[field.name] = given
    for theirs, name in _GEMMS.items():
        split = getattr(getattr(value, theirs, None), "use_split_accumulator", None)
        if isinstance(split, bool) and name in found:
            found[name] = not split
    return {f.name: found[f.name] for f in dataclasses.fields(fields) if found[f.name] != f.default}


def _written(ours: type[Recipe], options: dict[str, Any]) -> str:
    try:
        ours(**options)
    except RecipeError as error:
        return f"fp8pass.{ours.__name__}(), but not with these options: {error}"
    texts = {name: f"fp8pass.{value}" if isinstance(value, Format) else repr(value) for name, value in options.items()}
    texts |= {name: getattr(value, "__name__", "...") for name, value in options.items() if callable(value)}
    return f"fp8pass.{ours.__name__}({', '.join(f'{name}={text}' for name, text in texts.items())})"


def _of_torchao(value: Any, kind: str) -> str | None:
    word = str(getattr(value, "value", ""))
    if kind.startswith("MX"):
        return "'mxfp8_with_gw_hp'" if getattr(value, "wgrad_with_hp", False) is True else repr(WORDS.get(word, "mxfp8"))
    if kind == "Float8LinearRecipeName" and word:
        return repr(WORDS.get(word, word))
    cast = getattr(value, "cast_config_weight", value)
    granularity = getattr(getattr(cast, "scaling_granularity", None), "name", "TENSORWISE")
    for_grad_weight = getattr(value, "cast_config_input_for_grad_weight", None)
    if getattr(getattr(for_grad_weight, "scaling_type", None), "name", "") == "DISABLED":
        return "'rowwise_with_gw_hp'"
    if granularity == "TENSORWISE" and getattr(value, "round_scales_to_power_of_2", False) is True:
        return _written(Float8CurrentScaling, {"use_power_2_scales": True})
    return {"TENSORWISE": "'current'", "AXISWISE": "'rowwise'"}.get(granularity)
