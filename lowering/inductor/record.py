"""Recording amaxes: one kernel takes the partial amaxes of every tensor of a graph, whatever their number and sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler

from lowering import capability, reference
from lowering.inductor.casts import parts_of

_LIBRARY = torch.library.Library("lowering", "FRAGMENT")
_LIBRARY.define(
    "record_partial_amax(Tensor(a!) amax, Tensor slots, Tensor[] parts, int[] index) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _record_partial_amax(amax: torch.Tensor, slots: torch.Tensor, parts: list[torch.Tensor], index: list[int]) -> None:
    """`record_amax` of the largest of each tensor of parts, in place; float32, any shapes; NaN wins.

    The version counter of `amax` stays, as in `record_amax`: it is no input of any formula.
    """
    if capability.runs_kernels(amax.device):
        from lowering.kernels.record_partial import record_partial_amax

        record_partial_amax(amax.data, slots, parts, index)
    else:
        reference.record_amax(amax.data, slots, [reference.amax(p) for p in parts], index)


_LIBRARY.impl("record_partial_amax", _record_partial_amax, "CompositeExplicitAutograd")
torch.library.register_fake("lowering::record_partial_amax", lambda *args: None, lib=_LIBRARY)


def lower_record_amax(amax: ir.TensorBox, slots: ir.TensorBox, observed: list[ir.TensorBox], index: list[int]) -> Any:
    """The op that takes partial amaxes: nothing finishes them one by one, nothing is stacked."""
    parts = [parts_of(o) for o in observed]
    fallback = fallback_handler(torch.ops.lowering.record_partial_amax.default, add_to_fallback_set=False)
    return fallback(amax, slots, parts, index)
