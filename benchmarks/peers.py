"""Whom we compare with: ways to compile a model for training, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.common import has_torchao
from fp8pass import fp8_compile
from tests.support.traffic import steady

OURS = ("delayed", "current")


def _torchao(model: nn.Module, recipe: str) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return torch.compile(convert_to_float8_training(copy.deepcopy(model), config=config))


def contestants(recipes: tuple[str, ...] = OURS) -> dict[str, Callable[[nn.Module], Any]]:
    """name -> a function that compiles a copy of a model. "bf16" (plain torch.compile) comes first."""
    found: dict[str, Callable[[nn.Module], Any]] = {"bf16": lambda model: torch.compile(copy.deepcopy(model))}
    for recipe in recipes:
        found[recipe] = lambda model, recipe=recipe: fp8_compile(copy.deepcopy(model), steady(recipe))
    if has_torchao():
        found["torchao tensorwise"] = lambda model: _torchao(model, "tensorwise")
        found["torchao rowwise"] = lambda model: _torchao(model, "rowwise")
    return found
