"""Inputs that the pass adds to a graph, as data, and what provides them.

NOTE [extra inputs] What a graph needs besides the user's arguments, such as the scales of delayed scaling, enters it as inputs
behind them. They are inputs and not constants, so that one compiled graph serves many instances, functionalization leaves
them alone, and CUDA graphs treat them as static. A provider says before tracing which inputs a graph gets; passes and schemes
find the placeholders by their keys; for each module instance that a graph runs for, the provider binds the tensors once.

NOTE [variants] A call may need another graph than usual: the same one, rewritten with a set of names in `Options.variants` that
passes and schemes look at. "first_step" is one: some history is empty. The usual graph has the empty set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch

from fp8pass.graph.names import TensorName
from fp8pass.recipes import Recipe

USUAL: frozenset[str] = frozenset()
"""The variants of a usual call: none."""


class CapacityExceeded(Exception):
    """A graph needs more entries than its extra inputs have; compile it again with at least `needed`."""

    def __init__(self, needed: int):
        super().__init__(f"the tensors of a graph whose scales come from the state need {needed} entries")
        self.needed = needed


@dataclasses.dataclass(frozen=True)
class ExtraInput:
    """One input that the pass adds to a graph."""

    key: Hashable
    """By which passes and schemes find its placeholder. No two inputs of a graph have equal keys."""
    name: str
    """Of the placeholder."""
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """A tensor of a graph whose scale is kept in the state."""

    name: TensorName
    fp8_max: float
    entries: int = 1
    """Number of its scales: one per matrix of batched weights."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """A compiled graph for one module instance: what a provider binds its inputs to."""

    device: torch.device
    inputs: tuple[ExtraInput, ...]
    """Those that the provider gave the graph."""
    tensors: Mapping[Recipe, Sequence[StateTensor]]
    """Per recipe that keeps state the tensors whose scales the graph takes from it, in the order of its slots."""
    aliases: Sequence[tuple[TensorName, TensorName]]
    """(another name, the name) of shared tensors."""
    name_tensor: Callable[[TensorName], TensorName]
    """From a tensor's name in the graph to its name for this instance."""


class BoundInputs(Protocol):
    """The inputs of one provider for one graph and module instance."""

    @property
    def is_read(self) -> bool:
        """Whether the graph reads any of them. Where none of any provider are read, they have no content and no step ends."""

    @property
    def identity(self) -> Hashable:
        """Equal for graphs of one module that read the same things: by it a recomputation finds its first run."""

    def refresh(self) -> None:
        """Called before each call: what the inputs are part of may have been replaced."""

    def variants(self) -> frozenset[str]:
        """Of a call that is about to run."""

    def remember(self, variants: frozenset[str]) -> Any:
        """What a recomputation of the call that is about to run will have to see again; not None."""

    def tensors(self, records: bool, variants: frozenset[str], remembered: Any) -> Sequence[torch.Tensor]:
        """The tensors of a call, one per input. records: whether what the graph writes counts, as it does in training.
        remembered: of the call that this one repeats; None if it repeats none."""


class InputProvider(Protocol):
    """Gives graphs inputs: one per compiled model."""

    def inputs(self, device: torch.device, needed: int) -> Sequence[ExtraInput]:
        """Those of a graph on `device`, before it is traced. needed: entries, where an attempt raised CapacityExceeded; else
        0."""

    def bind(self, placed: Placed) -> BoundInputs:
        """The tensors for one module instance, at its first call of a graph."""

    def after_step(self) -> None:
        """The step boundary."""
