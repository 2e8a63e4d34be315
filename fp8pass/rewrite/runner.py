"""The four phases in order, on one graph."""

from __future__ import annotations

import dataclasses
import logging
import time

from torch import fx

from fp8pass.graph.names import TensorName
from fp8pass.graph.sites import GraphContext
from fp8pass.recipes import Recipe
from fp8pass.rewrite.apply import ApplyOptions, StateNodes, apply, recipe_of_scale
from fp8pass.rewrite.discover import discover
from fp8pass.rewrite.gather import GatherRecord, merge_equal_gathers, quantize_before_gathers
from fp8pass.rewrite.group import group_casts
from fp8pass.rewrite.plan import make_plan
from fp8pass.rewrite.remake import remade_in_backward
from fp8pass.rewrite.report import GemmRecord, StateTensor, gemm_records, state_tensors
from fp8pass.rewrite.verify import scaled_gemms, verify
from fp8pass.rules import Rules

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """What the pass did to one graph."""

    gemms: list[GemmRecord]
    tensors: dict[Recipe, list[StateTensor]]
    """Per delayed recipe the tensors whose scales the graph takes from the state, in the order of its slots."""
    aliases: tuple[tuple[TensorName, TensorName], ...]
    """(another name, the name) of shared tensors."""
    gathers: list[GatherRecord]
    """The all-gathers that feed FP8 GEMMs."""
    before: fx.Graph
    after: fx.Graph
    seconds: float


class CapacityExceeded(Exception):
    """The graph quantizes more tensors than its state placeholders hold; compile it again with `needed` entries."""

    def __init__(self, needed: int):
        super().__init__(f"{needed} tensors are quantized with delayed scaling")
        self.needed = needed


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph with its metadata, to look at later."""
    copy = fx.Graph()
    value, old = copy.graph_copy(graph, {}, return_output_node=True)
    copy.output(value).meta.update(old.meta)
    return copy


def rewrite(
    graph: fx.Graph, context: GraphContext, rules: Rules, state: dict[Recipe, StateNodes], options: ApplyOptions
) -> Rewrite:
    """Discover, plan, apply and verify; changes `graph` in place. Running it again changes nothing."""
    start = time.perf_counter()
    before = copy_graph(graph)
    merge_equal_gathers(graph)
    devices = {nodes.scale.meta["val"].device for nodes in state.values()}
    plan = make_plan(discover(graph, context), rules, next(iter(devices), None))
    gemms = gemm_records(plan)
    tensors = {recipe: state_tensors(plan, recipe) for recipe in state}
    needed = max((len(t) for t in tensors.values()), default=0)
    if any(needed > nodes.slots.meta["val"].shape[0] for nodes in state.values()):
        raise CapacityExceeded(needed)
    num_before = len(scaled_gemms(graph))
    apply(graph, plan, state, options, remade_in_backward(graph, plan))
    gathers = quantize_before_gathers(graph, context, lambda scale: recipe_of_scale(scale, state))
    group_casts(graph)
    verify(graph, plan, num_before)
    seconds = time.perf_counter() - start
    log.info("rewrote %s of %s GEMMs in %.3f s", len(plan.rewritten), len(gemms), seconds)
    return Rewrite(gemms, tensors, plan.names.aliases, gathers, before, copy_graph(graph), seconds)
