"""Recording amaxes: one kernel takes the partial amaxes of every tensor of a graph, whatever their number and sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler

from lowering import grouped  # noqa: F401 (registers the op)
from lowering.inductor.casts import parts_of


def lower_record_amax(amax: ir.TensorBox, slots: ir.TensorBox, observed: list[ir.TensorBox], index: list[int]) -> Any:
    """The op that takes partial amaxes: nothing finishes them one by one, nothing is stacked."""
    parts = [parts_of(o) for o in observed]
    fallback = fallback_handler(torch.ops.lowering.record_partial_amax.default, add_to_fallback_set=False)
    return fallback(amax, slots, parts, index)
