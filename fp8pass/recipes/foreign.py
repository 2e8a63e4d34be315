"""Other projects' words for recipes and their recipe objects, with the equivalent of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fp8pass.errors import RecipeError
from fp8pass.recipes.blockwise import Float8BlockScaling
from fp8pass.recipes.current import Float8CurrentScaling
from fp8pass.recipes.delayed import DelayedScaling
from fp8pass.recipes.mxfp8 import MXFP8BlockScaling
from fp8pass.recipes.recipe import Format, Recipe, home_of

#: Words of torchao, TransformerEngine, vLLM, papers and configuration files -> names of ours.
WORDS: Mapping[str, str] = {
    word: name
    for name, words in {
        "delayed": "fp8 float8 default delayedscaling delayed_scaling",
        "current": "tensorwise tensor_wise tensor per_tensor pertensor dynamic dynamic_scaling current_scaling"
        " float8currentscaling",
        "rowwise": "axiswise row row_wise per_row per_token per_channel channelwise float8rowwisescaling",
        "blockwise": "deepseek deepseek_v3 deepseekv3 deepgemm deep_gemm block block_wise per_block"
        " groupwise 128x128 1x128 float8blockscaling",
        "mxfp8": "mx mx_fp8 microscaling 1x32 mxfp8blockscaling",
    }.items()
    for word in words.split()
}

_TRANSFORMER_ENGINE: Mapping[str, type[Recipe]] = {
    "DelayedScaling": DelayedScaling,
    "Float8CurrentScaling": Float8CurrentScaling,
    "Float8BlockScaling": Float8BlockScaling,
    "MXFP8BlockScaling": MXFP8BlockScaling,
}
#: Its options for GEMMs -> ours, which say the opposite of `use_split_accumulator`.
_GEMMS = {
    "fp8_gemm_fprop": "fast_accum_output",
    "fp8_gemm_dgrad": "fast_accum_grad_input",
    "fp8_gemm_wgrad": "fast_accum_grad_weight",
}
_PAGES = {"transformer_engine": "docs/coming-from-transformer-engine.md", "torchao": "docs/coming-from-torchao.md"}


def advice_on(value: object) -> str | None:
    """Advice for a class, an object or a function of TransformerEngine or torchao; None for everything else."""
    home = home_of(value)
    if home is None:
        return None
    kind = value.__name__ if isinstance(value, type) else type(value).__name__
    known = _of_transformer_engine(value, kind) if home == "transformer_engine" else _of_torchao(value, kind)
    ours = f"the equivalent is {known}" if known else "it has no equivalent here"
    return f"recipe is a {kind} of {home}; {ours} ({_PAGES[home]} lists every option)"


def _of_transformer_engine(value: Any, kind: str) -> str | None:
    ours = _TRANSFORMER_ENGINE.get(kind)
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
    if kind.startswith("MX"):
        return "'mxfp8'"
    if kind == "Float8LinearRecipeName" and isinstance(getattr(value, "value", None), str):
        return repr(WORDS.get(value.value, value.value))
    cast = getattr(value, "cast_config_weight", value)
    granularity = getattr(getattr(cast, "scaling_granularity", None), "name", "TENSORWISE")
    for_grad_weight = getattr(value, "cast_config_input_for_grad_weight", None)
    if getattr(getattr(for_grad_weight, "scaling_type", None), "name", "") == "DISABLED":
        return "'rowwise_with_gw_hp'"
    if granularity == "TENSORWISE" and getattr(value, "round_scales_to_power_of_2", False) is True:
        return _written(Float8CurrentScaling, {"use_power_2_scales": True})
    return {"TENSORWISE": "'current'", "AXISWISE": "'rowwise'"}.get(granularity)
