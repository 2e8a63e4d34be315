"""Weights that share a scale because inference engines fuse their projections: q, k and v; gate and up. Reads only.

They are found by structure and by name: forward GEMMs of one graph that read one input with weights of sibling modules, whose
names engines fuse. k and v of cross-attention, which read another input than q, are a pair. A weight that a model fuses itself
is one tensor with one scale anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable

from fp8pass.graph.values import value_of
from fp8pass.rewrite.plan import Plan
from fp8pass.schemes.copies import Copy, QuantizedTensor

#: Names of modules that engines fuse. Source: `packed_modules_mapping` of vLLM's models, and the names that torchtitan and Meta
#: give to the same weights.
NAMES: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        "q_proj k_proj v_proj",
        "query key value",
        "wq wk wv",
        "gate_proj up_proj",
        "w1 w3",
        "q_a_proj kv_a_proj_with_mqa",
    )
)
_GROUP_OF = {name: group for group in NAMES for name in group}


def share_scales(plan: Plan) -> Plan:
    """The plan with the weights that have one scale together."""
    found: dict[Hashable, dict[QuantizedTensor, None]] = {}
    copies = plan.copies
    for decision in plan.rewritten:
        if decision.site.role == "output" and decision.a is not None and decision.b is not None:
            for weight, other in ((decision.b, decision.a), (decision.a, decision.b)):
                place = place_of(decision.site.module)
                if weight.quantization.fused and place is not None and len(copies[weight.tensor]) == 1:
                    key = (place.siblings, other.value, weight.columnwise, weight.recipe, weight.quantization, _form(weight))
                    found.setdefault(key, {})[weight.tensor] = None
    groups = [tuple(tensors) for tensors in _joined(found.values()) if len(tensors) > 1]
    return dataclasses.replace(plan, fused={tensor: group for group in groups for tensor in group})


@dataclasses.dataclass(frozen=True)
class Place:
    """A module that engines fuse with its siblings."""

    parent: str
    name: str
    """Its own name; empty for the place of all siblings."""
    group: frozenset[str]
    """The names of all."""
    rest: str
    """What follows the name in the module's path, such as peft's `base_layer`."""

    @property
    def siblings(self) -> Place:
        """The place that it has in common with them."""
        return dataclasses.replace(self, name="")

    def named(self, name: str) -> str:
        """The path with another name."""
        return ".".join(part for part in (self.parent, name, self.rest) if part)


def place_of(module: str) -> Place | None:
    """Where a module is among those that engines fuse; None for others."""
    parts = module.split(".")
    last = next((i for i in reversed(range(len(parts))) if parts[i] in _GROUP_OF), None)
    if last is None:
        return None
    return Place(".".join(parts[:last]), parts[last], _GROUP_OF[parts[last]], ".".join(parts[last + 1 :]))


def _form(weight: Copy) -> Hashable:
    """What weights have in common that one operation measures."""
    return weight.value.dtype, value_of(weight.value.root).device


def _joined(groups: Iterable[Iterable[QuantizedTensor]]) -> list[dict[QuantizedTensor, None]]:
    """Groups that have no weight in common: one that modules share is in the groups of all of them."""
    joined: list[dict[QuantizedTensor, None]] = []
    for group in groups:
        merged = dict.fromkeys(group)
        for other in [j for j in joined if not j.keys().isdisjoint(merged)]:
            merged = other | merged
            joined.remove(other)
        joined.append(merged)
    return joined
