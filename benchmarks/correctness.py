"""Correctness gates: nothing is timed whose numbers are not those of the plain model."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.contestants import Replayed
from benchmarks.isolation import Bench
from fp8pass import inspect
from fp8pass.recipes import PRESETS

#: Largest relative error, in the Frobenius norm, of a GEMM with a bfloat16 result, without and with fast accumulation
#: (tests/tolerances.py).
GEMM_ERROR, FAST_ERROR = 1e-2, 2e-2
#: Share of the largest gradient's norm up to which a gradient's error is compared with that share.
_NEGLIGIBLE = 1e-3


@dataclasses.dataclass(frozen=True)
class Step:
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
    norms = {name: float(gradient.double().norm()) for name, gradient in expected.gradients.items()}
    least = _NEGLIGIBLE * max(norms.values())
    errors = {
        name: _db(max(norms[name], least), float((gradient.double() - found.gradients[name].double()).norm()))
        for name, gradient in expected.gradients.items()
    }
    worst = min(errors, key=lambda name: (errors[name] == errors[name], errors[name]))  # NaN first
    text = f"{what}: SQNR of gradients, least {errors[worst]:.1f} dB ({worst}) >= {gradient_db:g}"
    bench.require(errors[worst] >= gradient_db, text)


def _without(step: Step, residual: torch.Tensor, gradient: torch.Tensor) -> Step:
    """A step less what a residual adds to the output and to the gradient of "x"."""
    x = step.gradients["x"].float() - gradient.float()
    return Step(step.output.float() - residual.detach().float(), {**step.gradients, "x": x})


def sqnr(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Signal to quantization noise of a result, in dB, computed in float64."""
    expected, found = expected.detach().double(), found.detach().double()
    return _db(float(expected.norm()), float((expected - found).norm()))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """In the Frobenius norm, computed in float64."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _db(signal: float, noise: float) -> float:
    return math.inf if noise == 0 else 20 * math.log10(max(signal, sys.float_info.min) / noise)


def step_of(model: Any, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    """A training step without an optimizer."""
    leaves = [x, *parameters_of(model).values()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        model(x).backward(dy)

    return step


def ready(
    found: Mapping[str, Callable[[nn.Module], Any]],
    model: nn.Module,
    label: Callable[[str], str],
    expected: Step,
    x: torch.Tensor,
    dy: torch.Tensor,
    bench: Bench,
    *,
    num_gemms: int,
    replayed: bool = False,
    **bounds: Any,
) -> dict[str, Any]:
    """The contestants that compute what the model does, compiled: recipes of ours with so many GEMMs in FP8.

    replayed: they are compiled for CUDA graphs. Delayed scaling has its scales after one step."""

    def compiled_by(name: str, compile_model: Callable[[nn.Module], Any]) -> Any:
        compiled = compile_model(model)
        call = Replayed(compiled) if replayed else compiled
        for _ in range(2):
            run_step(call, x, dy)
        require_step(label(name), expected, run_step(call, x, dy), bench, **bounds)
        if name in PRESETS:
            require_fp8(label(name), compiled, num_gemms, bench)
        return call

    made = {name: bench(label(name), compiled_by, name, compile_model) for name, compile_model in found.items()}
    return {name: call for name, call in made.items() if call is not None}


def require_fp8(what: str, compiled: Any, num_gemms: int, bench: Bench) -> None:
    """A compiled model has so many GEMMs, all of them in FP8: one that fell back would be timed as FP8."""
    gemms = inspect(compiled).gemms
    in_fp8 = sum(gemm.quantized for gemm in gemms)
    bench.require(in_fp8 == len(gemms) == num_gemms, f"{what}: {in_fp8} of {num_gemms} GEMMs in FP8")
