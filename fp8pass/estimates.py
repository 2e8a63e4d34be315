"""`estimate`: what FP8 is expected to gain. What it needs is imported when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from fp8pass.recipes import Recipe, RecipeName

if TYPE_CHECKING:  # NOTE [a lean import] in `fp8pass.api`
    import torch

    from fp8pass.cost import Device
    from fp8pass.rewrite.plan import WeightCopies
    from fp8pass.rules import Select
    from fp8pass.tools.estimation import Estimation


def estimate(
    model: torch.nn.Module,
    *args: Any,
    device: str | Device = "h200",
    recipe: Recipe | RecipeName | Literal["all"] = "all",
    rules: Mapping[str, Recipe | RecipeName | None] | None = None,
    select: Select = "auto",
    weight_copies: WeightCopies = "auto",
    kwargs: Mapping[str, Any] | None = None,
) -> Estimation:
    """What FP8 is expected to gain in a training step of a model: an estimate, in seconds, without a GPU.

    The model is traced on tensors without content, wherever its own are: build a large one on the meta device. It is neither
    run nor changed. Of equal layers one of each kind is traced. Attention counts as one operation.

    Args:
        model: an nn.Module in training mode. Call it with what gives a loss, so that the head is recognized.
        args: what it is called with; of tensors only shape, dtype and strides count.
        device: "h100", "h200", "b200", "l40s", "rtx4090", "rtx5090", or a `fp8pass.cost.Device` with the rates of another one.
        recipe: "all", or one recipe as in `fp8_compile`.
        rules: as in `fp8_compile`.
        select: as in `fp8_compile`.
        weight_copies: as in `fp8_compile`.
        kwargs: keyword arguments of the call.

    Raises:
        OptionError: nothing is known of the device, it does not run the recipe, or another argument is invalid.
        RecipeError, RuleError: as in `fp8_compile`.
    """
    from fp8pass.tools.estimation import estimate_model

    return estimate_model(model, args, kwargs or {}, device, recipe, rules=rules, select=select, weight_copies=weight_copies)
