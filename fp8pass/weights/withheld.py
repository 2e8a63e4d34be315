"""What a Parameter holds while FSDP2 has gathered its FP8 copies alone.

NOTE [withheld values] Compiled graphs read the copies, and the values that these stand for are not the Parameter's own. So it
has none, and where torch's build can refuse every access to a storage (`CAN_REFUSE`), no memory either: reading it raises an
error. Builds without CUDA cannot refuse: there it is NaN. Between FSDP2's frees and gathers it has its usual memory again,
because a gather may come without our hooks, which other shards do not have.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fp8pass.weights.hollow import CAN_REFUSE, without_bytes

#: Where a Parameter holds its two memories.
_MEMORY = "_fp8pass_memory"

MESSAGE = (
    "this Parameter has no values now: fp8_compile(fsdp_gather='fp8') gathered only its FP8 copies, for the compiled graphs."
    " Read it between steps. To read it in a hook of its module, register the hook before the first forward: then the module's"
    " Parameters travel as they are. Where its module ran eagerly at the recompile limit, raise"
    " torch._dynamo.config.recompile_limit. Else leave fsdp_gather out"
)


@dataclasses.dataclass
class _Memory:
    own: torch.Tensor
    """What FSDP2 allocates, gathers into and frees."""
    nothing: torch.Tensor | None
    """Without bytes, where reading that raises."""
    is_withheld: bool = False


def withhold(parameter: torch.Tensor) -> None:
    """Let nobody read a gathered Parameter: see NOTE [withheld values]."""
    memory: _Memory | None = getattr(parameter, _MEMORY, None)
    if memory is None:
        memory = _Memory(parameter.detach(), without_bytes(parameter, MESSAGE) if CAN_REFUSE else None)
        setattr(parameter, _MEMORY, memory)
    memory.is_withheld = True
    if memory.nothing is not None:
        parameter.data = memory.nothing
    else:
        write(parameter, torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device))


def is_withheld(parameter: torch.Tensor) -> bool:
    """Whether only FP8 copies of a Parameter are gathered now."""
    memory: _Memory | None = getattr(parameter, _MEMORY, None)
    return memory is not None and memory.is_withheld


def give_back(parameter: torch.Tensor) -> None:
    """Let a Parameter have the memory again that FSDP2 gathers it into, allocated or not."""
    memory: _Memory | None = getattr(parameter, _MEMORY, None)
    if memory is not None and memory.is_withheld:
        memory.is_withheld = False
        if memory.nothing is not None:
            parameter.data = memory.own


def write(target: torch.Tensor, values: torch.Tensor) -> None:
    """As FSDP2 writes: a backward that saved the target is meant to find the new values."""
    autograd: Any = torch.autograd
    with autograd._unsafe_preserve_version_counter(target):
        target.copy_(values)
