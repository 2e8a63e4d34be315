"""Scales over several ranks: when they are equal, and how current scaling makes them equal.

A tensor that is sharded over ranks and gathered in FP8 must have one scale on all of them. Delayed scaling has it where
the amax reduction covers the ranks; current scaling gets it by an all-reduce of the amax in the graph. A tensor that no
other rank reads keeps a scale of its own, and nothing is communicated for it. Blockwise scales are local by nature.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from fp8pass.rewrite.insertion import Inserter, never_recompute

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def all_reduce_amax(insert: Inserter, amax: fx.Node, group: Any, before: fx.Node, backward: bool) -> list[fx.Node]:
    """Nodes that end in the largest of all ranks' amaxes.

    As int32 the bit patterns of magnitudes are ordered with NaN on top; as floats, MAX may lose NaN on some ranks.
    """

    def call(target: Any, *args: Any) -> fx.Node:
        return insert.call(before, target, *args, backward=backward)

    bits = call(aten.view.dtype, amax, torch.int32)
    reduced = call(c10d.all_reduce.default, bits, "max", group)
    waited = call(c10d.wait_tensor.default, reduced)
    nodes = [bits, reduced, waited, call(aten.view.dtype, waited, torch.float32)]
    for node in nodes:
        never_recompute(node)
    return nodes


def reduction_covers(amax_group: dist.ProcessGroup | None, group: Any) -> bool:
    """Whether the step boundary reduces amaxes over all ranks of a collective's group: then these have equal scales."""
    if amax_group is None:
        return True
    ranks = dist.get_process_group_ranks(resolve_group(group))
    return set(ranks) <= set(dist.get_process_group_ranks(amax_group))


def resolve_group(group: Any) -> dist.ProcessGroup:
    """The process group that a functional collective names."""
    if isinstance(group, dist.ProcessGroup):
        return group
    return dist.distributed_c10d._resolve_process_group(group)
