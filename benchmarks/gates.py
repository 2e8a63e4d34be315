"""Correctness gates: nothing is timed whose numbers are not those of the plain model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.common import require
from tests.support.numerics import sqnr

#: A gradient with less than this share of the largest gradient's norm is too small to be compared.
_NEGLIGIBLE = 1e-3


@dataclasses.dataclass(frozen=True)
class Step:
    """What one forward and backward computed."""

    output: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    """Of the input, "x", and of every parameter."""


def parameters_of(model: Any) -> dict[str, torch.Tensor]:
    """The parameters of a module or of what compiling made of it, by the module's own names."""
    return {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters()}


def run_step(model: Any, x: torch.Tensor, dy: torch.Tensor) -> Step:
    """One step of a module or a compiled one; leaves no gradient behind."""
    leaves = {"x": x, **parameters_of(model)}
    output = model(x)
    output.backward(dy)
    gradients = {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = None
    return Step(output.detach().clone(), gradients)


def require_step(
    what: str,
    expected: Step,
    found: Step,
    checks: list[str],
    *,
    output_db: float,
    gradient_db: float,
    residual: torch.Tensor | None = None,
) -> None:
    """The output and every gradient have at least these signal-to-noise ratios, in dB.

    residual: what the model adds to its result, such as its input. It is subtracted first: with it, a model that computed
    nothing would score 19 dB.
    """
    difference = 0.0 if residual is None else residual.detach()
    error = sqnr(expected.output - difference, found.output - difference)
    about = "output" if residual is None else "output less its residual"
    require(error >= output_db, f"{what}: SQNR of the {about} {error:.1f} dB >= {output_db:g}", checks)
    require(
        expected.gradients.keys() == found.gradients.keys(), f"{what}: gradients of {len(expected.gradients)} tensors", checks
    )
    largest = max(float(g.norm()) for g in expected.gradients.values())
    errors = {n: sqnr(g, found.gradients[n]) for n, g in expected.gradients.items() if g.norm() >= _NEGLIGIBLE * largest}
    worst = min(errors, key=lambda name: _nan_first(errors[name]))
    require(
        errors[worst] >= gradient_db,
        f"{what}: SQNR of gradients, least {errors[worst]:.1f} dB ({worst}) >= {gradient_db:g}",
        checks,
    )


def _nan_first(value: float) -> Any:
    return (value == value, value)
