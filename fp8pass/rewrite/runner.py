"""The runner: an explicit list of passes, run in order on one graph, with time and difference of operations for each.

Graphs before and after go to `torch._logging.trace_structured` (tlparse shows them), a line per GEMM to the log at debug level
(`TORCH_LOGS="+fp8pass"`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from torch import fx
from torch._logging._internal import trace_structured

from fp8pass.cost import Estimate
from fp8pass.errors import Reason
from fp8pass.graph.gathers import Gather, equal_gathers
from fp8pass.graph.gemms import GemmSite, GraphContext, offs_of
from fp8pass.graph.origin import TensorName
from fp8pass.graph.traces import Snapshot
from fp8pass.graph.values import operation_name
from fp8pass.inputs import InputsMissing, MonitorRow, StateTensor
from fp8pass.recipes import Recipe
from fp8pass.rewrite import apply as application
from fp8pass.rewrite import simplify
from fp8pass.rewrite.discover import discover
from fp8pass.rewrite.gathers import merge_reductions, plan_gathers, send_bytes
from fp8pass.rewrite.launches import plan_casts, plan_launches, plan_recomputation
from fp8pass.rewrite.plan import Options, Plan, make_plan, share_scales
from fp8pass.rewrite.report import (
    GatherRecord,
    GemmRecord,
    KeptRecord,
    WeightRecord,
    gather_records,
    gemm_records,
    kept_records,
    state_tensors,
    weight_records,
)
from fp8pass.rewrite.saved import SavedRecord, apply_saved, measure_saved, plan_saved, saved_records
from fp8pass.rewrite.select import select
from fp8pass.rewrite.simplify import RowsAndIndex, fold_elements, permuting_scatters, repeated_weights, shared_sigmoids
from fp8pass.rewrite.speedup import device_of, estimate, slow
from fp8pass.rewrite.verify import verify
from fp8pass.rewrite.verify_partitioned import arguments, verify_saved
from fp8pass.rewrite.watch import StatisticsInserter
from fp8pass.rewrite.weights import plan_weights, refuse_readers, take_kept
from fp8pass.rules import Rules
from fp8pass.scales.store import entries_for
from fp8pass.schemes.emitter import StateNodes, state_nodes

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Work:
    """The state that passes hand on: a pass reads it and returns it with its own results."""

    graph: fx.Graph
    context: GraphContext
    rules: Rules
    inputs: Mapping[Hashable, fx.Node]  # The placeholders of the graph's extra inputs, by key.
    options: Options
    known: frozenset[fx.Node]  # The nodes that the graph had before.
    permuted: Mapping[fx.Node, RowsAndIndex] = dataclasses.field(default_factory=dict)  # Gathers in place of scatters.
    sites: tuple[GemmSite, ...] = ()
    selected: Mapping[fx.Node, Reason] = dataclasses.field(default_factory=dict)  # GEMMs in high precision unless a rule says.
    heads: frozenset[fx.Node] = frozenset()  # GEMMs that look like a head.
    plan: Plan = dataclasses.field(default_factory=lambda: Plan(()))
    applied: application.Applied = dataclasses.field(default_factory=application.Applied)
    watched: tuple[MonitorRow, ...] = ()  # The statistics that the graph measures.
    sent_as_bytes: tuple[Gather, ...] = ()  # Gathers in high precision that send uint8, as they were before.

    @property
    def state(self) -> dict[Recipe, StateNodes]:
        """The placeholders of each recipe that keeps state."""
        return state_nodes(self.inputs)


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """The rewrite of one graph."""

    gemms: list[GemmRecord]
    tensors: dict[Recipe, list[StateTensor]]
    """Per recipe that keeps state the tensors whose scales the graph takes from the state, in the order of its slots."""
    aliases: tuple[tuple[TensorName, TensorName], ...]  # (another name, the name) of shared tensors.
    gathers: list[GatherRecord]  # The all-gathers that feed FP8 GEMMs.
    weights: list[WeightRecord]  # The inputs that forward GEMMs read as weights.
    kept: list[KeptRecord]  # The weights whose copies may be kept between calls.
    reads: dict[int, str]  # Inputs of Dynamo's graph that the rewritten graph itself reads -> the operation that does.
    estimates: list[Estimate | None]  # Expected seconds of each GEMM, in the order of `gemms`; None where a size is dynamic.
    estimated_for: str  # The device that the estimates are for, with a remark where it is not the graph's own.
    before: Snapshot
    after: Snapshot
    watched: tuple[MonitorRow, ...]  # The statistics that the graph measures, in the order of its rows.
    passes: dict[str, dict[str, int]]
    """Pass -> operation -> how many more (or fewer) of it the graph has; none for a pass that only reads."""
    saved: list[SavedRecord] = dataclasses.field(default_factory=list)
    """With `saved_activations`, the values that the forward saves for the backward, known when the graph is partitioned."""


# -- the passes


def _merge_gathers(work: Work) -> Work:
    simplify.merge_equal_gathers(equal_gathers(work.graph))
    return work


def _multiply_at_once(work: Work) -> Work:
    if not work.rules.has_gemms or not (repeated := repeated_weights(work.graph, work.context)):
        return work
    simplify.multiply_at_once(work.graph, repeated)
    return dataclasses.replace(work, known=frozenset(work.graph.nodes))


def _gather_permuted(work: Work) -> Work:
    if any(offs_of(node) is not None for node in work.graph.nodes):
        permuted = simplify.gather_permuted_rows(work.graph, permuting_scatters(work.graph))
        return dataclasses.replace(work, permuted=permuted)
    return work


def _select(work: Work) -> Work:
    selected, heads = select(work.graph, work.sites, work.context)
    return dataclasses.replace(work, selected=selected, heads=heads)


def _plan_gemms(work: Work) -> Work:
    state = work.state
    devices = {nodes.scale.meta["val"].device for nodes in state.values()}
    device, rules = next(iter(devices), None), work.rules
    selected: dict[fx.Node, Reason] = {} if rules.select == "all" else dict(work.selected)

    def planned() -> Plan:
        decided = make_plan(list(work.sites), rules, device, selected)
        kept = plan_weights(share_scales(decided), work.context, work.inputs, work.options)
        return estimate(kept, work.options.device)

    plan = planned()
    if rules.min_speedup is not None:
        named = {site.node for site in work.sites if rules.find(site.module, site.role) is not None}
        while found := slow(plan, rules.min_speedup, named):  # what is left alone with a cast bears all of its cost
            selected |= found
            plan = planned()
    needed = max((entries_for(sum(t.entries for t in plan.tensors_in_state(recipe))) for recipe in state), default=0)
    if any(needed > nodes.slots.meta["val"].shape[0] for nodes in state.values()):
        raise InputsMissing(entries=needed)
    return dataclasses.replace(work, plan=plan)


def _share_sigmoids(work: Work) -> Work:
    if work.plan.rewritten:
        simplify.share_sigmoids(work.graph, shared_sigmoids(work.graph))
    return work


def _take_kept(work: Work) -> Work:
    plan = take_kept(refuse_readers(work.graph, work.plan), work.inputs, work.options)
    is_as_estimated = plan.weights == work.plan.weights
    return dataclasses.replace(work, plan=plan if is_as_estimated else estimate(plan, work.options.device))


def _plan_recomputation(work: Work) -> Work:
    given = work.options.given
    plan = plan_recomputation(work.graph, work.plan, given.weight_copies, given.saved_activations is not None)
    return dataclasses.replace(work, plan=plan)


def _apply(work: Work) -> Work:
    watcher = None if work.options.watch is None or not work.inputs else StatisticsInserter(work.inputs, work.options.watch)
    applied = application.apply(work.graph, work.plan, work.state, work.options, watcher)
    return dataclasses.replace(work, applied=applied, watched=() if watcher is None else tuple(watcher.rows))


def _verify(work: Work) -> Work:
    verify(work.graph, work.plan, work.applied, work.known, work.permuted, work.sent_as_bytes)
    return work


def _merge_reductions(work: Work) -> Work:
    if any(g.reason is None for g in work.plan.gathers):
        merge_reductions(work.graph)
    return work


def _send_bytes(work: Work) -> Work:
    moved = [g for g in work.plan.gathers if g.reason is None and g.tensors[0].name.kind == "weight"]
    if not moved:
        return work
    return dataclasses.replace(work, sent_as_bytes=send_bytes(work.graph, {g.gather.group for g in moved}))


def _fold_elements(work: Work) -> Work:
    fold_elements(work.graph)
    return work


PASSES: tuple[tuple[str, Callable[[Work], Work]], ...] = (
    ("merge gathers", _merge_gathers),
    ("multiply at once", _multiply_at_once),
    ("gather permuted rows", _gather_permuted),
    ("discover", lambda work: dataclasses.replace(work, sites=tuple(discover(work.graph, work.context)))),
    ("select", _select),
    ("plan GEMMs", _plan_gemms),
    ("share sigmoids", _share_sigmoids),
    ("plan gathers", lambda work: dataclasses.replace(work, plan=plan_gathers(work.graph, work.plan, work.context))),
    ("take kept weights", _take_kept),
    ("plan recomputation", _plan_recomputation),
    ("plan casts", lambda work: dataclasses.replace(work, plan=plan_casts(work.graph, work.plan))),
    ("plan launches", lambda work: dataclasses.replace(work, plan=plan_launches(work.plan))),
    ("apply", _apply),
    ("merge reductions", _merge_reductions),
    ("fold elements", _fold_elements),
    ("send bytes", _send_bytes),
    ("verify", _verify),
)
#: Passes without which a graph is still right, only slower or larger.
OPTIONAL = frozenset(name for name, _ in PASSES) - {"discover", "select", "plan GEMMs", "plan casts", "apply"}

_left_out: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("left_out", default=frozenset())


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Leave optional passes out, in this thread: to see what they are good for. Raises ValueError for other names."""
    wrong = sorted(set(names) - OPTIONAL)
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not a pass that can be left out; those are {', '.join(sorted(OPTIONAL))}")
    token = _left_out.set(_left_out.get() | set(names))
    try:
        yield
    finally:
        _left_out.reset(token)


def left_out() -> frozenset[str]:
    """The passes that `without` leaves out in this thread."""
    return _left_out.get()


# -- the runner


def save_activations(
    forward: fx.Graph,
    backward: fx.Graph,
    num_outputs: int,
    rules: Rules,
    context: GraphContext,
    made: Rewrite,
    statistics: fx.Node | None = None,
) -> Rewrite:
    """The stage after the partitioner: plan what is saved in FP8, apply and verify, in place; returns the record of the rewrite
    with it. The first arguments are those of `plan_saved`. statistics: in measured steps, the input that the forward writes
    statistics into."""
    before = arguments(forward), arguments(backward)
    plan = plan_saved(forward, backward, num_outputs, rules, context)
    records = saved_records(plan)
    copies, computed = apply_saved(forward, backward, plan)
    if copies:
        verify_saved(forward, backward, copies, computed, before)
        forward.eliminate_dead_code()
    rows = [] if statistics is None else measure_saved(forward, plan, statistics, len(made.watched))
    log.info("saved %s of %s values in FP8", len(copies), len(plan))
    return dataclasses.replace(made, saved=records, watched=(*made.watched, *rows))


def planned(
    graph: fx.Graph, context: GraphContext, rules: Rules, inputs: Mapping[Hashable, fx.Node], options: Options
) -> tuple[list[GemmRecord], list[Estimate | None]]:
    """The decisions that `rewrite` would make about each GEMM, and its expected seconds. Changes the graph."""
    work = Work(graph, context, rules, inputs, options, frozenset(graph.nodes))
    for name, run in PASSES:
        work = run(work)
        if name == "plan GEMMs":
            break
    return gemm_records(work.plan, work.heads), [work.plan.estimates.get(d.site.node) for d in work.plan.decisions]


def rewrite(
    graph: fx.Graph, context: GraphContext, rules: Rules, inputs: Mapping[Hashable, fx.Node], options: Options
) -> Rewrite:
    """Run the passes; changes `graph` in place. Running them again changes nothing. inputs: see `Work`."""
    before = Snapshot.take(graph)
    _trace("before", graph)
    work = Work(graph, context, rules, inputs, options, frozenset(graph.nodes))
    passes: dict[str, dict[str, int]] = {}
    gathers: list[GatherRecord] = []
    weights: list[WeightRecord] = []
    counts, spent = _count(graph), 0.0
    for name, run in PASSES:
        if name in left_out():
            continue
        if name == "apply":  # which removes what the records describe
            gathers, weights = gather_records(work.plan), weight_records(work.plan)
        before_pass, start = counts, time.perf_counter()
        work = run(work)
        seconds, counts = time.perf_counter() - start, _count(graph)
        spent += seconds
        changed = counts.copy()
        changed.subtract(before_pass)
        passes[name] = {str(op): changed[op] for op in sorted(changed, key=str) if changed[op]}
        log.debug("%s: %.1f ms, %s", name, 1e3 * seconds, passes[name] or "reads only")
    _trace("after", graph)
    gemms = gemm_records(work.plan, work.heads)
    for gemm in gemms:
        log.debug("%s", gemm)
    num_quantized = sum(g.quantized for g in gemms)
    log.info("rewrote %s of %s GEMMs in %.3f s", num_quantized, len(gemms), spent)
    tensors = {recipe: state_tensors(work.plan, recipe) for recipe in work.state}
    estimates = [work.plan.estimates.get(d.site.node) for d in work.plan.decisions]
    device = options.device or device_of(work.plan)
    return Rewrite(
        gemms=gemms,
        tensors=tensors,
        aliases=work.plan.aliases,
        gathers=gathers,
        weights=weights,
        kept=kept_records(work.plan, work.options.given.weight_copies),
        reads=_reads(graph, context),
        estimates=estimates,
        estimated_for=device.note or device.name,
        before=before,
        after=Snapshot.take(graph),
        watched=work.watched,
        passes=passes,
    )


def _reads(graph: fx.Graph, context: GraphContext) -> dict[int, str]:
    read = [n for n in graph.find_nodes(op="placeholder") if n.users]
    return {i: operation_name(next(iter(n.users))) for n in read if (i := context.index_of(n)) is not None}


def _count(graph: fx.Graph) -> Counter[Any]:
    return Counter(n.target for n in graph.nodes if n.op == "call_function")


def _trace(when: str, graph: fx.Graph) -> None:
    """The graph as an artifact of torch's structured trace; nothing is printed where no trace is taken."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"fp8pass_joint_graph_{when}", "encoding": "string"},
        payload_fn=lambda: str(graph),
    )
