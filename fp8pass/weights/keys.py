"""Which FP8 copies of weights a graph receives as inputs: data, without a graph node."""

from __future__ import annotations

import dataclasses
from typing import Literal

from fp8pass.graph.casts import Layout
from fp8pass.graph.names import TensorName
from fp8pass.recipes.quantization import Quantization, ScaleFrom
from fp8pass.recipes.recipe import Recipe

Part = Literal["data", "scale_inv", "amax"]
"""What an input holds of a weight: the FP8 values of a copy, its scales, or the amax that a training graph records."""


@dataclasses.dataclass(frozen=True)
class WeightTensor:
    """A Parameter as a graph quantizes it."""

    index: int
    """Which input of Dynamo's graph the Parameter is."""
    shape: tuple[int, ...]
    """[rows, cols], or [batch, rows, cols]: the Parameter, or a row-major reshape of it."""
    recipe: Recipe
    quantization: Quantization
    name: TensorName
    """Where scales come from the state, the name of the tensor there."""
    is_gathered: bool = False
    """Whether FSDP2 gathers it in FP8: the copy lasts as long as the gathered Parameter."""
    fused: tuple[int, ...] = ()
    """The inputs of all weights that have one scale together, its own among them; empty for one that has a scale alone."""

    @property
    def has_state(self) -> bool:
        """Whether its scale comes from the state of delayed scaling."""
        return self.quantization.scale_from is ScaleFrom.STATE

    @property
    def entries(self) -> int:
        """How many scales it has in the state: one per matrix."""
        return self.shape[0] if len(self.shape) == 3 else 1


@dataclasses.dataclass(frozen=True)
class WeightKey:
    """The key of the extra input that holds one part of a weight's copies."""

    tensor: WeightTensor
    part: Part
    layout: Layout | None
    """Of which copy; None for the amax, which all copies share."""
