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
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import CodeType
from typing import Any, Literal

import torch

from fp8pass.graph.origin import Path, TensorName
from fp8pass.recipes import Recipe

USUAL: frozenset[str] = frozenset()  # The variants of a usual call: none.
STATISTICS = ("fp8_statistics", "fp8_grad_statistics")
"""The keys, and names, of the inputs that take statistics, [rows, WIDTH] float64, a row for each `MonitorRow` of the graph: in
forward and in backward. They are the same memory, but for a recomputed forward, which must not count again."""


Measured = Literal["tensors", "products"]
"""The scope of a measured step: every quantized tensor; or also the result of every FP8 GEMM, which costs a GEMM each."""


Records = Literal["all", "backward", "nothing"]
"""The writes of a call into its inputs that count; others are lost.

- "all": forward and backward, as in training.
- "backward": the backward alone, of a recomputation, whose first run has counted. Nothing in a call without gradients.
- "nothing": a pass with gradients that is not training, NOTE [dry passes] in `fp8pass.runtime.clock`.
"""


@dataclasses.dataclass(frozen=True)
class ExtraInput:
    """One input that the pass adds to a graph."""

    key: Hashable  # Passes and schemes find its placeholder by it. No two inputs of a graph have equal keys.
    name: str  # The name of the placeholder.
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None  # None: contiguous.
    is_static: bool = True  # Calls pass the same memory: CUDA graphs copy other inputs at each call.

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor without content."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclasses.dataclass(frozen=True)
class Needed:
    """The extra inputs that a graph asks for, or that earlier attempts to compile it did."""

    entries: int = 0  # Entries of the inputs of a state, or rows of those of statistics, at least.
    inputs: tuple[ExtraInput, ...] | None = None  # Those of values that are kept between calls; None where none is asked for.


class InputsMissing(Exception):
    """A graph needs more than its extra inputs; compile it again with what it asks for."""

    def __init__(self, *, entries: int = 0, inputs: tuple[ExtraInput, ...] | None = None):
        super().__init__(
            f"the tensors of a graph whose scales come from the state need {entries} entries"
            if inputs is None
            else f"{len(inputs)} values of the graph are kept between calls"
        )
        self.needed = Needed(entries, inputs)


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """A tensor of a graph whose scale is kept in the state."""

    name: TensorName
    fp8_max: float
    entries: int = 1  # Number of its scales: one per matrix of batched weights.
    input: int | None = None  # The position among the inputs of Dynamo's graph of a weight that is one of them.


@dataclasses.dataclass(frozen=True)
class MonitorRow:
    """The tensor, or the result of a GEMM, that one row of statistics describes."""

    name: TensorName  # The name of the tensor; for a GEMM that of its module, and the rest of the name has no meaning.
    role: str  # "output", "grad_input" or "grad_weight": of the GEMM, or of the first GEMM that reads the tensor.
    copy: str | None
    """"tensor" where both copies hold the same values, else "rowwise" or "columnwise"; None for the result of a GEMM."""
    recipe: Recipe | None
    fp8_max: float  # The largest value of the tensor's format; 0 for a GEMM.
    format: str
    granularity: str
    is_backward: bool  # It is measured in the backward.


@dataclasses.dataclass(frozen=True)
class Placed:
    """A compiled graph for one module instance, to which providers bind its inputs."""

    device: torch.device
    inputs: tuple[ExtraInput, ...]  # The inputs that the provider gave the graph.
    tensors: Mapping[Recipe, Sequence[StateTensor]]
    """Per recipe that keeps state the tensors whose scales the graph takes from it, in the order of its slots."""
    aliases: Sequence[tuple[TensorName, TensorName]]  # (another name, the name) of shared tensors.
    name_tensor: Callable[[TensorName], TensorName]  # From a tensor's name in the graph to its name for this instance.
    args: Sequence[Any] = ()
    """The arguments of the instance's first call. Its Parameters and buffers are the same in every call; nothing else is, and
    nothing of it may be kept alive."""
    trains: bool = False  # The graph has a backward.
    watched: Sequence[MonitorRow] = ()  # The rows of statistics that the graph writes, in order.
    frame: CodeType | None = None  # The code that Dynamo traced, where the graph is all of it.
    owners: Sequence[Path | None] = ()  # The paths by which the frame finds the modules that own its inputs.


class BoundInputs:
    """The inputs of one provider for one graph and module instance."""

    is_read: bool = True  # The graph reads any of them. Where none of any provider is read, they are empty and no step ends.
    identity: Hashable = None
    """Equal for graphs of one module that read the same things: a recomputation finds its first run by it. None if it tells
    nothing of the module."""

    def variants(self) -> frozenset[str]:
        """The variants of a call that is about to run. Called before each: the memory behind the inputs may have moved."""
        return USUAL

    def remember(self, variants: frozenset[str]) -> Any:
        """A record of what a recomputation of the call that is about to run has to see again; not None."""
        return ()

    def tensors(
        self, args: Sequence[Any], records: Records, variants: frozenset[str], remembered: Any
    ) -> Sequence[torch.Tensor]:
        """The tensors of a call on these arguments, one per input. records: the writes of the graph that count. remembered: the
        record of the call that this one repeats; None if it repeats none."""
        raise NotImplementedError

    def note_started(self) -> None:
        """Note that the forward of a call of a variant, or its backward, begins to write."""


class InputProvider:
    """Gives graphs inputs: one per compiled model and kind of input."""

    def inputs(self, device: torch.device, needed: Needed) -> Sequence[ExtraInput]:
        """The inputs of a graph on `device`, before it is traced. needed: what earlier attempts to compile it asked for."""
        raise NotImplementedError

    def bind(self, placed: Placed) -> BoundInputs:
        """Bind the inputs to one module instance, at its first call of a graph."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Take note of a step boundary."""


@functools.cache
def untraced(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """The function, kept from being traced by Dynamo; one object per function, so that it is found again."""
    return torch._dynamo.disable(function)


def listen(before: Sequence[Callable[[Any], None]], after: Sequence[Callable[[Any], None]] = ()) -> bool:
    """Have Dynamo call functions before and after it traces a frame, which `torch._dynamo.reset()` makes it forget; True if it
    did not know them. Dynamo calls them under a lock. They are never traced themselves: in a backward within a compiled region
    it would, and wait for that lock."""
    from torch._dynamo.callback import callback_handler as handler

    if untraced(before[0]) in handler.start_callbacks:
        return False
    for start in map(untraced, before):
        handler.register_start_callback(start)
    for end in map(untraced, after):
        handler.register_end_callback(end)
    return True


def in_backward() -> bool:
    """True in a thread that is inside a backward pass: a forward that runs here is a recomputation."""
    return torch._C._current_graph_task_id() != -1
