"""Delayed scaling: one scale per tensor, from the amaxes of earlier steps. Source: TransformerEngine's DelayedScaling.

What happens in a graph: `fp8pass/schemes/emitter.py`. `fp8pass.scales` turns recorded amaxes into the next step's scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch

from fp8pass.errors import nearest
from fp8pass.graph.values import Operand
from fp8pass.recipes.quantization import Quantization, ScaleFrom
from fp8pass.recipes.recipe import Format, Recipe, check, check_options, fp8_dtype, is_int, named, recipe
from lowering.formats import Granularity

#: The reduction of a history of amaxes to one.
AmaxAlgo = Literal["max", "most_recent"] | Callable[[torch.Tensor], torch.Tensor]


@named("delayed", words="fp8 float8 default delayedscaling delayed_scaling")
@recipe
class DelayedScaling(Recipe):
    """One scale per tensor, from the amaxes of earlier steps: each tensor is read once. Source: TransformerEngine."""

    name: ClassVar[str] = "delayed"
    keeps_state: ClassVar[bool] = True

    margin: int = 0
    """The scale leaves 2**margin of headroom: scale = fp8_max / 2**margin / amax."""
    fp8_format: Format = Format.HYBRID
    """FP8 formats of forward tensors and of gradients."""
    amax_history_len: int = 1024
    """Number of steps whose amaxes determine a scale, at least 1."""
    amax_compute_algo: AmaxAlgo = "max"
    """"max" or "most_recent" of the history, or a function amax_history[len, n] -> amax[n] (row 0: the current step)."""
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    """A function (amax[n], scale[n], fp8_max[n], recipe) -> scale[n], or None for the formula above."""
    initial_scale: Literal["current", "one"] = "current"
    """Scale of a tensor whose history is empty: "current" takes it from the tensor itself, as current scaling does, so that the
    model trains from the first step on; "one" starts with 1, as TransformerEngine does."""
    backward_override: None = None
    """None: as in TransformerEngine, delayed scaling has no backward override."""
    reduce_amax: bool = True
    """Reduce amaxes (MAX) over `amax_reduction_group` at each step boundary."""
    fast_accum_output: bool = True
    """The forward GEMM may use the tensor cores' faster, less precise accumulator."""
    fast_accum_grad_input: bool = False
    """The grad_input GEMM may use it."""
    fast_accum_grad_weight: bool = False
    """The grad_weight GEMM may use it."""

    def __post_init__(self) -> None:
        fix = "delayed scaling has none, as in TransformerEngine; use Float8CurrentScaling or another recipe"
        check(self, "backward_override", self.backward_override is None, fix)
        check_options(self)
        check(self, "margin", is_int(self.margin) and -100 <= self.margin <= 100, "use an int between -100 and 100")
        length = self.amax_history_len
        check(self, "amax_history_len", is_int(length) and length >= 1, "use an int of at least 1")
        algo = self.amax_compute_algo
        hint = nearest(algo, ("max", "most_recent")) if isinstance(algo, str) else ""
        is_algo = algo in ("max", "most_recent") if isinstance(algo, str) else callable(algo)
        check(self, "amax_compute_algo", is_algo, f"use 'max', 'most_recent' or a function.{hint}")
        factor = self.scaling_factor_compute_algo
        check(self, "scaling_factor_compute_algo", factor is None or callable(factor), "use a function or None")
        first = self.initial_scale
        hint = nearest(first, ("current", "one")) if isinstance(first, str) else ""
        check(self, "initial_scale", first in ("current", "one"), f"use 'current' or 'one'.{hint}")

    def quantization(self, operand: Operand, role: str) -> Quantization:
        return Quantization(
            fp8_dtype(self, operand),
            Granularity.TENSOR_WISE,
            scale_from=ScaleFrom.STATE,
            margin=self.margin,
            same_on_ranks=self.reduce_amax,
        )
