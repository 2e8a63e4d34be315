"""Whom we compare with: ways to compile a model for training, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.common import has_torchao
from fp8pass import DelayedScaling, fp8_compile

RECIPES = ("delayed", "current", "blockwise", "rowwise", "mxfp8")


def steady(recipe: str) -> Any:
    """A recipe as it is from the second step on: the first step of delayed scaling runs a graph of its own."""
    return DelayedScaling(initial_scale="one") if recipe == "delayed" else recipe


def _torchao(model: nn.Module, recipe: str, mode: str | None) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return torch.compile(convert_to_float8_training(copy.deepcopy(model), config=config), mode=mode)


def contestants(
    recipes: tuple[str, ...], with_peers: bool = True, mode: str | None = None
) -> dict[str, Callable[[nn.Module], Any]]:
    """name -> a function that compiles a copy of a model. "bf16" (plain torch.compile) comes first. mode: torch.compile's."""
    found: dict[str, Callable[[nn.Module], Any]] = {"bf16": lambda model: torch.compile(copy.deepcopy(model), mode=mode)}
    for recipe in recipes:
        found[recipe] = lambda model, recipe=recipe: fp8_compile(copy.deepcopy(model), steady(recipe), mode=mode)
    if with_peers and has_torchao():
        found["torchao tensorwise"] = lambda model: _torchao(model, "tensorwise", mode)
        found["torchao rowwise"] = lambda model: _torchao(model, "rowwise", mode)
    return found


def replayed(compiled: Any) -> Any:
    """A model compiled with CUDA graphs: each call starts a step, so that its results may be overwritten by the next."""

    def call(x: torch.Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(x)

    call.named_parameters = compiled.named_parameters  # type: ignore[attr-defined]
    return call
