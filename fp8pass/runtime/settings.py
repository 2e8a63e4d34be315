"""What decides about a compiled graph besides the graph itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fp8pass.inputs import InputProvider, Watch
from fp8pass.rewrite.plan import WeightCopies
from fp8pass.rules import Rules

#: Why Inductor's C++ wrapper is refused.
NO_CPP_WRAPPER = (
    "torch's C++ wrapper (cpp_wrapper) crashes at operations that take a list of one tensor, as the casts of fp8pass do"
    " (pytorch/pytorch#190551)"
)


@dataclasses.dataclass(frozen=True)
class Form:
    """What is asked of every graph for a while. One graph of Dynamo's is compiled once per form: NOTE [a switch] in
    `forms.py`."""

    rules: Rules
    watch: Watch | None = None
    """What is measured, in a step that is."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides about a graph besides the graph itself."""

    rules: Rules
    inner: str
    """"inductor" or "aot_eager"."""
    patches: dict[str, Any]
    """Inductor's settings."""
    amax_reduction_group: dist.ProcessGroup | None = None
    weight_copies: WeightCopies = "auto"
    """Whether FP8 copies of weights that only backward reads are saved by forward or recomputed in backward."""
    fsdp_gather: bool = False
    """Whether graphs take the FP8 copies of weights that FSDP2 gathers."""
    release_frozen: bool = False
    """Whether frozen weights give their values back once they are quantized."""
    providers: tuple[Callable[[], InputProvider], ...] = ()
    """What gives graphs further inputs besides the state of recipes: makes one per compiled model. Equal ones give equal
    inputs, because models with equal settings share graphs."""
