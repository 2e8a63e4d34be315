"""A search on several ranks of data-parallel training: each measures its own batch, and all of them find the same.

The loss is the mean of the losses, so effects on it are means, too. Every rank adds the numbers of all in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8pass.errors import OptionError

if TYPE_CHECKING:
    from fp8pass.tools.search.probe import Probe


def num_ranks() -> int:
    """Of the default process group; 1 where there is none."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this is the rank that prints."""
    import torch.distributed as dist

    return num_ranks() == 1 or dist.get_rank() == 0


def check_ranks(model: nn.Module) -> None:
    """Raises OptionError on every rank unless all of them have the model, whole and with the same parameters."""
    if num_ranks() == 1:
        return
    from torch.distributed.tensor import DTensor

    is_wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    sums = [float(p.detach().double().sum()) for p in model.parameters() if not isinstance(p, DTensor)]
    found = _of_all((is_wrapped, sharded[:1], sums))
    if any(wrapped for wrapped, _, _ in found):
        raise OptionError("model is a DistributedDataParallel; pass its module, and suggest_rules averages over the ranks")
    if any(names for _, names, _ in found):
        name = next(names[0] for _, names, _ in found if names)
        raise OptionError(f"the parameter {name} is sharded; run suggest_rules on the whole model, before it is sharded")
    if any(str(other) != str(found[0][2]) for _, _, other in found):
        raise OptionError(
            "parameters differ between ranks; suggest_rules needs the same model on each, such as before DDP trains"
        )


def mean_of(value: float) -> float:
    """The mean of the ranks' values."""
    return value if num_ranks() == 1 else sum(_of_all(value)) / num_ranks()


def average(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The mean of the ranks' gradients, each a new tensor; one that a rank does not have counts as zeros."""
    import torch.distributed as dist

    if num_ranks() == 1:
        return list(gradients)
    described = _of_all([None if g is None else (g.shape, g.dtype) for g in gradients])
    found: list[torch.Tensor | None] = []
    device = next((g.device for g in gradients if g is not None), torch.device("cpu"))
    for g, of_ranks in zip(gradients, zip(*described, strict=True), strict=True):
        known = next((one for one in of_ranks if one is not None), None)
        if known is None:
            found.append(None)
            continue
        total = torch.zeros(known[0], device=device) if g is None else g.detach().to(torch.float32, copy=True)
        dist.all_reduce(total)
        found.append((total / num_ranks()).to(known[1]))
    return found


def average_effects(probe: Probe) -> None:
    """Give each rank's probe the effects on the mean loss, and the FLOPs of all ranks."""
    if num_ranks() == 1:
        return
    from fp8pass.tools.search.probe import Effect

    own = {key: (dataclasses.astuple(effect), probe.flops[key], key in probe.unknown) for key, effect in probe.effects.items()}
    of_ranks = _of_all(own)
    for key in dict.fromkeys(key for of_rank in of_ranks for key in of_rank):
        parts = [of_rank[key] for of_rank in of_ranks if key in of_rank]
        total = sum(effect[0] for effect, _, _ in parts) / num_ranks()
        squares = sum(effect[1] for effect, _, _ in parts) / num_ranks() ** 2
        probe.effects[key] = Effect(total, squares, any(effect[2] for effect, _, _ in parts))
        probe.flops[key] = sum(flops for _, flops, _ in parts)
        if any(is_unknown for _, _, is_unknown in parts):
            probe.unknown.add(key)


def _of_all(value: Any) -> list[Any]:
    """The ranks' values, by rank."""
    import torch.distributed as dist

    found: list[Any] = [None] * num_ranks()
    dist.all_gather_object(found, value)
    return found
