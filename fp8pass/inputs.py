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
import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import CodeType
from typing import Any, Protocol

import torch

from fp8pass.graph.names import TensorName
from fp8pass.graph.origin import Path
from fp8pass.recipes import Recipe

USUAL: frozenset[str] = frozenset()
"""The variants of a usual call: none."""


class Records(enum.Enum):
    """What of a call counts: what it writes into its inputs elsewhere is lost."""

    ALL = "all"
    """Forward and backward, as in training."""
    BACKWARD = "backward"
    """The backward alone: of a recomputation, whose first run has counted. The same as nothing in a call without gradients."""
    NOTHING = "nothing"
    """Of a pass with gradients that is no training: NOTE [dry passes] in `fp8pass.runtime.dry`."""


class CapacityExceeded(Exception):
    """A graph needs more entries than its extra inputs have; compile it again with at least `needed`."""

    def __init__(self, needed: int):
        super().__init__(f"the tensors of a graph whose scales come from the state need {needed} entries")
        self.needed = needed


class InputsMissing(Exception):
    """A graph would rather read values that are kept between calls than compute them; compile it again with these inputs."""

    def __init__(self, inputs: tuple[ExtraInput, ...]):
        super().__init__(f"{len(inputs)} values of the graph are kept between calls")
        self.inputs = inputs


@dataclasses.dataclass(frozen=True)
class ExtraInput:
    """One input that the pass adds to a graph."""

    key: Hashable
    """By which passes and schemes find its placeholder. No two inputs of a graph have equal keys."""
    name: str
    """Of the placeholder."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None
    """None: contiguous."""
    is_static: bool = True
    """Whether calls pass the same memory: CUDA graphs copy other inputs at each call."""

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor without content."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclasses.dataclass(frozen=True)
class Needed:
    """What earlier attempts to compile a graph have asked for."""

    entries: int = 0
    """Of CapacityExceeded."""
    inputs: tuple[ExtraInput, ...] | None = None
    """Of InputsMissing; None where it was not raised."""


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """A tensor of a graph whose scale is kept in the state."""

    name: TensorName
    fp8_max: float
    entries: int = 1
    """Number of its scales: one per matrix of batched weights."""


@dataclasses.dataclass(frozen=True)
class Watch:
    """What is measured in a step, beside every quantized tensor."""

    products: bool = False
    """Whether the result of every FP8 GEMM is compared with that in high precision, which costs a GEMM each."""


@dataclasses.dataclass(frozen=True)
class WatchKey:
    """The key of an input that takes statistics: [rows, WIDTH] float64, a row for each `Watched` of the graph."""

    is_backward: bool
    """Whether the backward writes it: the same memory, but for a recomputed forward, which must not count again."""


@dataclasses.dataclass(frozen=True)
class Watched:
    """What the statistics in one row are of."""

    name: TensorName
    """Of the tensor. Of a GEMM its module; what else the name says means nothing."""
    role: str
    """"output", "grad_input" or "grad_weight": of the GEMM, or of the first GEMM that reads the tensor."""
    copy: str | None
    """"tensor" where both copies hold the same values, else "rowwise" or "columnwise"; None for the result of a GEMM."""
    recipe: Recipe | None
    fp8_max: float
    """Of the tensor's format; 0 for a GEMM."""
    format: str
    granularity: str
    is_backward: bool
    """Whether it is measured in the backward."""


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
    args: Sequence[Any] = ()
    """The arguments of the instance's first call. Its Parameters and buffers are the same in every call; nothing else is, and
    nothing of it may be kept alive."""
    trains: bool = False
    """Whether the graph has a backward."""
    watched: Sequence[Watched] = ()
    """What the graph measures, in the order of the rows."""
    frame: CodeType | None = None
    """What Dynamo traced, where the graph is all of it."""
    owners: Sequence[Path | None] = ()
    """Where the frame finds the modules that own its inputs."""


class BoundInputs(Protocol):
    """The inputs of one provider for one graph and module instance."""

    @property
    def is_read(self) -> bool:
        """Whether the graph reads any of them. Where none of any provider are read, they have no content and no step ends."""

    @property
    def identity(self) -> Hashable:
        """Equal for graphs of one module that read the same things: by it a recomputation finds its first run. None if it tells
        nothing of the module."""

    def refresh(self) -> None:
        """Called before each call: what the inputs are part of may have been replaced."""

    def variants(self) -> frozenset[str]:
        """Of a call that is about to run."""

    def remember(self, variants: frozenset[str]) -> Any:
        """What a recomputation of the call that is about to run will have to see again; not None."""

    def tensors(self, records: Records, variants: frozenset[str], remembered: Any) -> Sequence[torch.Tensor]:
        """The tensors of a call, one per input. records: what counts of what the graph writes. remembered: of the call that
        this one repeats; None if it repeats none."""


class InputProvider(Protocol):
    """Gives graphs inputs: one per compiled model."""

    def inputs(self, device: torch.device, needed: Needed) -> Sequence[ExtraInput]:
        """Those of a graph on `device`, before it is traced. needed: what earlier attempts to compile it asked for."""

    def bind(self, placed: Placed) -> BoundInputs:
        """The tensors for one module instance, at its first call of a graph."""

    def after_step(self) -> None:
        """The step boundary."""
