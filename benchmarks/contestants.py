"""Whom we compare with: ways to compile a model for training, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.common import has_torchao
from fp8pass import DelayedScaling, fp8_compile
from fp8pass.options import SavedActivations, WeightCopies

OURS = ("delayed", "current")
RECIPES = ("delayed", "current", "blockwise", "rowwise", "mxfp8")


def steady(recipe: str) -> Any:
    """A recipe as it is from the second step on: the first step of delayed scaling runs a graph of its own."""
    return DelayedScaling(initial_scale="one") if recipe == "delayed" else recipe


def _torchao(model: nn.Module, recipe: str, mode: str | None) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return torch.compile(convert_to_float8_training(copy.deepcopy(model), config=config), mode=mode)


def contestants(
    recipes: tuple[str, ...] = OURS,
    with_peers: bool = True,
    mode: str | None = None,
    weight_copies: WeightCopies = "auto",
    saved_activations: SavedActivations | None = None,
) -> dict[str, Callable[[nn.Module], Any]]:
    """name -> a function that compiles a copy of a model. "bf16" (plain torch.compile) comes first. mode: torch.compile's."""
    ours = {"mode": mode, "weight_copies": weight_copies, "saved_activations": saved_activations}
    found: dict[str, Callable[[nn.Module], Any]] = {"bf16": lambda model: torch.compile(copy.deepcopy(model), mode=mode)}
    for recipe in recipes:
        found[recipe] = lambda model, recipe=recipe: fp8_compile(copy.deepcopy(model), steady(recipe), **ours)
    if with_peers and has_torchao():
        found["torchao tensorwise"] = lambda model: _torchao(model, "tensorwise", mode)
        found["torchao rowwise"] = lambda model: _torchao(model, "rowwise", mode)
    return found


class Replayed:
    """A model compiled with CUDA graphs: each call starts a step, so that its results may be overwritten by the next."""

    def __init__(self, compiled: Any):
        self.compiled = compiled

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        out: torch.Tensor = self.compiled(x)
        return out

    def named_parameters(self) -> Any:
        return self.compiled.named_parameters()
