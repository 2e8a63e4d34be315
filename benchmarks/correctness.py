"""Correctness gates: nothing is timed whose numbers are not those of the plain model."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from benchmarks.isolation import Bench
from fp8pass import inspect

#: Largest relative error, in the Frobenius norm, of a GEMM with a bfloat16 result, without and with fast accumulation
#: (tests/tolerances.py).
GEMM_ERROR, FAST_ERROR = 1e-2, 2e-2
#: dB. Noise of a block of seven GEMMs, the gradients' operands in E5M2 (tests/tolerances.py).
BLOCK_DB = {"output_db": 18.0, "gradient_db": 12.0}
#: Share of the largest gradient's norm up to which a gradient's error is compared with that share.
_NEGLIGIBLE = 1e-3


class Step(NamedTuple):
    """The results of one forward and backward."""

    output: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    """Gradients of the input, "x", and of every parameter."""


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
    bench: Bench,
    *,
    output_db: float,
    gradient_db: float,
    residual: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """The output and every gradient have at least these signal-to-noise ratios, in dB.

    residual: what the model adds to its result unchanged, such as its input, and what the gradient of the input has of the
    output's for that. Both are subtracted first: with them, a model that computed nothing would score 19 and 14 dB. The
    signal of a small gradient is _NEGLIGIBLE of the largest, so that rounding alone does not fail it.
    """
    if residual is not None:
        expected, found = _without(expected, *residual), _without(found, *residual)
    error = sqnr(expected.output, found.output)
    about = "output" if residual is None else "output less its residual"
    bench.require(error >= output_db, f"{what}: SQNR of the {about} {error:.1f} dB >= {output_db:g}")
    bench.require(
        expected.gradients.keys() == found.gradients.keys(), f"{what}: gradients of {len(expected.gradients)} tensors"
    )
    least = _NEGLIGIBLE * max(float(gradient.double().norm()) for gradient in expected.gradients.values())
    errors = {name: sqnr(gradient, found.gradients[name], least) for name, gradient in expected.gradients.items()}
    worst = min(errors, key=lambda name: (errors[name] == errors[name], errors[name]))  # NaN first
    text = f"{what}: SQNR of gradients, least {errors[worst]:.1f} dB ({worst}) >= {gradient_db:g}"
    bench.require(errors[worst] >= gradient_db, text)


def _without(step: Step, residual: torch.Tensor, gradient: torch.Tensor) -> Step:
    """A step less what the residual adds to the output and to the gradient of "x"."""
    x = step.gradients["x"].float() - gradient.float()
    return Step(step.output.float() - residual.detach().float(), {**step.gradients, "x": x})


def sqnr(expected: torch.Tensor, found: torch.Tensor, least: float = sys.float_info.min) -> float:
    """Signal to quantization noise of a result, in dB, computed in float64. least: the signal of a smaller one."""
    expected, found = expected.detach().double(), found.detach().double()
    noise = float((expected - found).norm())
    return math.inf if noise == 0 else 20 * math.log10(max(float(expected.norm()), least) / noise)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """In the Frobenius norm, computed in float64."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def require_fp8(what: str, compiled: Any, num_gemms: int, bench: Bench) -> None:
    """A compiled model has so many GEMMs, all of them in FP8: one that fell back would be timed as FP8."""
    gemms = inspect(compiled).gemms
    in_fp8 = sum(gemm.quantized for gemm in gemms)
    bench.require(in_fp8 == len(gemms) == num_gemms, f"{what}: {in_fp8} of {num_gemms} GEMMs in FP8")
