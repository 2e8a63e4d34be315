"""Plan the quantized all-gathers: where gathered shards are only quantized afterwards, they are quantized first. Reads only.

Nothing is moved where ranks' scales may differ, where something else reads the gathered tensor in high precision, or where FP8
would not save a byte; the plan says so.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction

from torch import fx

from fp8pass.errors import Reason, ReasonKind
from fp8pass.graph.casts import Layout
from fp8pass.graph.cursor import is_recomputed
from fp8pass.graph.gathers import Gather, waits
from fp8pass.graph.kinds import addend_of
from fp8pass.graph.moves import origins
from fp8pass.graph.sites import GemmSite, GraphContext
from fp8pass.graph.values import value_of
from fp8pass.rewrite.meaning import Meaning, value
from fp8pass.rewrite.plan import Gathered, Plan
from fp8pass.schemes import scheme_of
from fp8pass.schemes.copies import QuantizedTensor


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What every gather's decision reads of the graph and the plan, found once: a graph may have hundreds of gathers."""

    layouts: Mapping[QuantizedTensor, Sequence[Layout]]
    """Those of each tensor's copies."""
    sides: tuple[Mapping[QuantizedTensor, Sequence[Layout]], Mapping[QuantizedTensor, Sequence[Layout]]]
    """The same of copies that forward reads, and of those that backward does."""
    first_reader: Mapping[QuantizedTensor, int]
    """Place in the graph of the first GEMM that reads a copy of the tensor."""
    sites: Mapping[int, GemmSite]
    """GEMMs of the plan by their places."""
    rewritten: frozenset[fx.Node]
    origin: Mapping[fx.Node, fx.Node | None]
    """Node -> the one node of whose elements alone it consists (`origins`)."""
    live: frozenset[fx.Node]


def plan_gathers(graph: fx.Graph, plan: Plan, context: GraphContext) -> Plan:
    """The plan with a decision for every all-gather that feeds FP8 GEMMs."""
    if not plan.rewritten or not (found := waits(graph)):
        return plan
    facts = _facts(graph, plan)
    read: dict[fx.Node | None, list[QuantizedTensor]] = {}
    for tensor in facts.layouts:
        read.setdefault(facts.origin[tensor.value.root], []).append(tensor)
    gathered = [_decide(facts, Gather.read(w, context.shares_scales), tuple(read[w])) for w in found if w in read]
    return dataclasses.replace(plan, gathers=tuple(gathered))


def high_precision_readers(graph: fx.Graph, plan: Plan, tensors: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Of those that something needs after all GEMMs of the plan are rewritten: the first node that does."""
    facts = _facts(graph, plan)
    return {node: reader for node in tensors if (reader := _high_precision_reader(facts, node)) is not None}


def read_in_high_precision(reader: fx.Node) -> Reason:
    """Why a tensor is gathered as it is."""
    return Reason(ReasonKind.READERS, f"{_op_name(reader)} reads the gathered tensor in high precision")


def _facts(graph: fx.Graph, plan: Plan) -> _Facts:
    layouts = plan.layouts
    order = {node: i for i, node in enumerate(graph.nodes)}
    sites = {order[d.site.node]: d.site for d in plan.rewritten}
    first: dict[QuantizedTensor, int] = {}
    for decision in plan.rewritten:
        place = order[decision.site.node]
        for copy in decision.copies:
            first[copy.tensor] = min(place, first.get(copy.tensor, place))
    readers = [[d for d in plan.rewritten if d.site.is_backward == is_backward] for is_backward in (False, True)]
    read = [{copy for decision in side for copy in decision.copies} for side in readers]
    forward, backward = ({t: [layouts[c] for c in copies if c in side] for t, copies in plan.copies.items()} for side in read)
    return _Facts(
        {tensor: [layouts[c] for c in copies] for tensor, copies in plan.copies.items()},
        (forward, backward),
        first,
        sites,
        frozenset(site.node for site in sites.values()),
        origins(graph),
        _live(graph, plan),
    )


def _decide(facts: _Facts, gather: Gather, tensors: tuple[QuantizedTensor, ...]) -> Gathered:
    sent = _sent(tensors, facts.layouts, gather)
    if is_recomputed(gather.collective):  # there are two gathers anyway, and each brings what its side reads
        num_bytes = max(sum(_sent(tensors, layouts, gather).values(), Fraction()) for layouts in facts.sides)
    else:
        num_bytes = sum(sent.values(), Fraction())
    reader = _high_precision_reader(facts, gather.wait)
    reason: Reason | None = None
    if reader is not None:
        reason = read_in_high_precision(reader)
    elif gather.source in facts.rewritten:
        reason = Reason(ReasonKind.READERS, "the shard is the result of an FP8 GEMM, with nothing in between")
    elif any(t.value.batch is not None or t.value.groups is not None for t in tensors):
        reason = Reason(ReasonKind.READERS, "a grouped GEMM reads it, whose operands are gathered in high precision")
    elif num_bytes >= value_of(gather.wait).element_size():
        detail = f"FP8 copies with {len(sent)} different scales would be no smaller than the tensor itself"
        reason = Reason(ReasonKind.BYTES, detail)
    else:
        ways = (scheme_of(t.quantization).gather_obstacle(t, facts.layouts[t], gather) for t in tensors)
        reason = next((obstacle for obstacle in ways if obstacle is not None), None)
    first = facts.sites[min(facts.first_reader[t] for t in tensors)]
    meaning = Meaning((), {gather.wait: value(gather.wait)})
    moves = tuple(meaning(tensor.value.root).moves for tensor in tensors) if reason is None else ()
    return Gathered(gather, tensors, float(num_bytes), first, reason, moves)


def _sent(
    tensors: Sequence[QuantizedTensor], layouts: Mapping[QuantizedTensor, Sequence[Layout]], gather: Gather
) -> dict[Hashable, Fraction]:
    """Bytes per element of everything that travels for these copies of the tensors."""
    found: dict[Hashable, Fraction] = {}
    for tensor in tensors:
        if layouts[tensor]:
            found |= scheme_of(tensor.quantization).sent(tensor, layouts[tensor], gather)
    return found


def _high_precision_reader(facts: _Facts, wait: fx.Node) -> fx.Node | None:
    """The first node that needs a gathered tensor or an input, seen through moves, once all GEMMs of the plan are rewritten."""
    seen: set[fx.Node] = set()
    queue = deque(wait.users)
    while queue:
        node = queue.popleft()
        addend = addend_of(node) if node in facts.rewritten else wait
        if node in seen or (addend is not wait and addend not in seen):
            continue
        seen.add(node)
        if facts.origin[node] is wait:
            queue += node.users
        elif node in facts.live:
            return node
    return None


def _live(graph: fx.Graph, plan: Plan) -> frozenset[fx.Node]:
    """The nodes that something reads in high precision once the plan is carried out.

    Quantized tensors count as read, also those that will travel in FP8: that keeps nodes alive from which a gather is made, and
    the moves behind it, of which none is a reader in question.
    """
    reads: dict[fx.Node, list[fx.Node]] = {}
    for decision in plan.rewritten:
        addend = addend_of(decision.site.node)
        roots = [c.tensor.value.root for c in decision.copies]
        reads[decision.site.node] = roots + ([] if addend is None else [addend])
    live: set[fx.Node] = set()
    pending = [n for n in graph.nodes if n.op == "output" or n.is_impure()]
    while pending:
        node = pending.pop()
        if node not in live:
            live.add(node)
            pending += reads.get(node, node.all_input_nodes)
    return frozenset(live)


def _op_name(node: fx.Node) -> str:
    return "the model's output" if node.op == "output" else str(getattr(node.target, "_opname", node.target))
