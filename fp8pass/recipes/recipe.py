"""What a recipe is: options, and decisions about operands and GEMMs. The nodes of all are made by `fp8pass.schemes`."""

from __future__ import annotations

import abc
import dataclasses
import enum
from typing import Any, ClassVar

import torch

from fp8pass.graph.sites import GemmSite
from fp8pass.graph.values import Operand
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.options import BackwardOverride
from fp8pass.recipes.quantization import Quantization


class Recipe(abc.ABC):
    """The options of a recipe and what it decides. Subclasses are frozen dataclasses and hashable.

    Only `name` and `quantization` are required. `fast_accum_output`, `fast_accum_grad_input` and `fast_accum_grad_weight` are
    read where a subclass has them as fields.
    """

    name: ClassVar[str]
    """The name in tables and records."""
    keeps_state: ClassVar[bool] = False
    """Whether scales and amax histories of its tensors live in the state: DelayedScaling and its subclasses."""
    backward_override: BackwardOverride | None = None
    """What backward GEMMs read in high precision, if they do: TransformerEngine's option. A field of recipes that have it."""

    @abc.abstractmethod
    def quantization(self, operand: Operand, role: str) -> Quantization:
        """What an operand of a GEMM becomes. role: "output", "grad_input" or "grad_weight"; the operand's `kind` is "input",
        "weight" or "grad_output"."""

    def fast_accum(self, role: str) -> bool:
        """Whether the GEMM of a role may accumulate in the tensor cores' shorter accumulator, where it has the choice."""
        chosen: bool = getattr(self, f"fast_accum_{role}", False)
        return chosen

    def obstacle(self, site: GemmSite) -> Reason | None:
        """Why this GEMM stays in high precision under the recipe, besides what holds for every GEMM with such scales."""
        if self.backward_override is None or site.role == "output":
            return None
        return Reason(ReasonKind.RECIPE, f"backward_override={self.backward_override!r} keeps high precision")


def fp8_dtype(recipe: Any, operand: Operand) -> torch.dtype:
    """The FP8 dtype of an operand by the recipe's `fp8_format`."""
    formats = recipe.fp8_format
    dtype: torch.dtype = formats.backward if operand.kind == "grad_output" else formats.forward
    return dtype


def in_words(recipe: Recipe, *, changed_only: bool = False) -> str:
    """A recipe with its options, in words equal in every process. changed_only: without those that are as by default."""
    fields: Any = recipe
    options = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(fields)}
    defaults = {f.name: f.default for f in dataclasses.fields(fields)}
    shown = {name: value for name, value in options.items() if not changed_only or value != defaults[name]}
    return f"{type(recipe).__name__}({', '.join(f'{name}={_text(value)}' for name, value in shown.items())})"


def _text(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    return str(getattr(value, "__qualname__", repr(value)))
