"""Recipes: how tensors are scaled. One file per recipe: its options and its decisions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

from fp8pass.errors import RecipeError, nearest
from fp8pass.recipes.blockwise import Float8BlockScaling
from fp8pass.recipes.current import Float8CurrentScaling
from fp8pass.recipes.delayed import DelayedScaling
from fp8pass.recipes.foreign import WORDS, advice_on
from fp8pass.recipes.mxfp8 import MXFP8BlockScaling
from fp8pass.recipes.quantization import Quantization, ScaleFrom
from fp8pass.recipes.recipe import NO_RECIPE, Format, Recipe
from fp8pass.recipes.rowwise import Float8RowwiseScaling
from lowering.formats import Granularity

__all__ = [
    "NO_RECIPE",
    "PRESETS",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "Granularity",
    "MXFP8BlockScaling",
    "Quantization",
    "Recipe",
    "RecipeName",
    "ScaleFrom",
    "as_recipe",
]

#: Recipes with their defaults.
RecipeName = Literal["delayed", "current", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]

PRESETS: dict[RecipeName, Callable[[], Recipe]] = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "blockwise": Float8BlockScaling,
    "rowwise": Float8RowwiseScaling,
    "rowwise_with_gw_hp": functools.partial(Float8RowwiseScaling, high_precision_grad_weight=True),
    "mxfp8": MXFP8BlockScaling,
}


def as_recipe(value: object) -> Recipe:
    """The recipe that `value` is or names; raises RecipeError otherwise."""
    if isinstance(value, Recipe):
        try:
            hash(value)
        except TypeError as error:
            raise RecipeError(f"the recipe {value!r} is not hashable: {error}; make it a frozen dataclass") from error
        return value
    if (advice := advice_on(value)) is not None:
        raise RecipeError(advice)
    if isinstance(value, str):
        for name, make in PRESETS.items():
            if name == value:
                return make()
        raise RecipeError(f"no recipe is called {value!r}.{nearest(value, PRESETS, WORDS)} Use one of {', '.join(PRESETS)}")
    if isinstance(value, type) and issubclass(value, Recipe):
        raise RecipeError(f"recipe is the class {value.__name__}; write {value.__name__}()")
    raise RecipeError(f"recipe is {value!r}, a {type(value).__name__}; use a recipe object or one of {', '.join(PRESETS)}")
