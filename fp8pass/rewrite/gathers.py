"""Plan the quantized all-gathers: where gathered shards are only quantized afterwards, they are quantized first. Reads only.

Nothing is moved where ranks' scales may differ, where something else reads the gathered tensor in high precision, or where FP8
would not save a byte; the plan says so.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from torch import fx

from fp8pass.graph.gathers import Gather, waits
from fp8pass.graph.kinds import addend_of
from fp8pass.graph.moves import MOVES, moves_only
from fp8pass.graph.sites import GemmSite, GraphContext
from fp8pass.graph.values import value_of
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.recipe import QuantizedTensor
from fp8pass.rewrite.plan import Gathered, Plan


def plan_gathers(graph: fx.Graph, plan: Plan, context: GraphContext) -> Plan:
    """The plan with a decision for every all-gather that feeds FP8 GEMMs."""
    tensors = list(plan.copies)
    if not tensors:
        return plan
    gathered: list[Gathered] = []
    for wait in reversed(waits(graph)):
        gather = Gather.read(wait, context.shares_scales)
        read = tuple(t for t in tensors if moves_only(t.value.root, wait))
        if read:
            gathered.append(_decide(plan, gather, read, _live(graph, plan, read)))
    return dataclasses.replace(plan, gathers=tuple(gathered[::-1]))


def _decide(plan: Plan, gather: Gather, tensors: tuple[QuantizedTensor, ...], live: set[fx.Node]) -> Gathered:
    copies, layouts = plan.copies, plan.layouts
    ways = [t.recipe.gathered(t, [layouts[c] for c in copies[t]], gather) for t in tensors]
    sent = {s for way in ways for s in way.sent}
    num_bytes = sum((s.bytes_per_element for s in sent), Fraction())
    reader = _high_precision_reader(plan, gather.wait, live)
    reason: Reason | None = None
    if reader is not None:
        reason = Reason(ReasonKind.READERS, f"{_op_name(reader)} reads the gathered tensor in high precision")
    elif any(t.value.stack is not None or t.value.groups is not None for t in tensors):
        reason = Reason(ReasonKind.READERS, "a grouped GEMM reads it, whose operands are gathered in high precision")
    elif num_bytes >= value_of(gather.wait).element_size():
        detail = f"FP8 copies with {len(sent)} different scales would be no smaller than the tensor itself"
        reason = Reason(ReasonKind.BYTES, detail)
    else:
        reason = next((way.obstacle for way in ways if way.obstacle is not None), None)
    return Gathered(gather, tensors, float(num_bytes), _first_reader(plan, tensors), reason)


def _first_reader(plan: Plan, tensors: tuple[QuantizedTensor, ...]) -> GemmSite:
    readers = [d.site for d in plan.rewritten if any(c.tensor in tensors for c in d.copies)]
    order = {node: i for i, node in enumerate(readers[0].node.graph.nodes)}
    return min(readers, key=lambda site: order[site.node])


def _high_precision_reader(plan: Plan, wait: fx.Node, live: set[fx.Node]) -> fx.Node | None:
    """The first node that needs the gathered tensor, seen through moves, after all GEMMs of the plan are rewritten."""
    rewritten = {d.site.node for d in plan.rewritten}
    seen: set[fx.Node] = set()
    queue = list(wait.users)
    while queue:
        node = queue.pop(0)
        if node in seen or (node in rewritten and addend_of(node) not in (*seen, wait)):
            continue
        seen.add(node)
        if node.target in MOVES and moves_only(node, wait):
            queue += node.users
        elif node in live:
            return node
    return None


def _live(graph: fx.Graph, plan: Plan, moved: tuple[QuantizedTensor, ...]) -> set[fx.Node]:
    """The nodes that something reads in high precision once the plan is carried out and `moved` tensors travel in FP8."""
    roots: dict[fx.Node, list[fx.Node]] = {}
    for decision in plan.rewritten:
        reads = [c.tensor.value.root for c in decision.copies if c.tensor not in moved]
        addend = addend_of(decision.site.node)
        roots[decision.site.node] = reads + ([] if addend is None else [addend])
    live: set[fx.Node] = set()
    pending = [n for n in graph.nodes if n.op == "output" or n.is_impure()]
    while pending:
        node = pending.pop()
        if node not in live:
            live.add(node)
            pending += roots.get(node, node.all_input_nodes)
    return live


def _op_name(node: fx.Node) -> str:
    return "the model's output" if node.op == "output" else str(getattr(node.target, "_opname", node.target))
