"""All-gathers: the plan of those in FP8, and two edits of what travels beside them, `merge_reductions` and `send_bytes`.

Where gathered shards are only quantized afterwards, they are quantized first. Nothing is moved where ranks' scales may differ,
where something else reads the gathered tensor in high precision, or where FP8 would not save a byte; the plan says so.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from fp8pass.errors import Reason, ReasonKind
from fp8pass.graph.cursor import Cursor, is_recomputed, never_recompute, recomputation_of
from fp8pass.graph.gathers import Gather, chain_from_input, largest_of_ranks, origins, starts_at_input, waits
from fp8pass.graph.gemms import GemmSite, GraphContext, addend_of
from fp8pass.graph.values import by_key, operation_name, value_of
from fp8pass.rewrite.meaning import Meaning, value
from fp8pass.rewrite.plan import Gathered, Plan
from fp8pass.schemes import scheme_of
from fp8pass.schemes.copies import Layout, QuantizedTensor

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def plan_gathers(graph: fx.Graph, plan: Plan, context: GraphContext) -> Plan:
    """The plan with a decision for every all-gather that feeds FP8 GEMMs."""
    if not plan.rewritten or not (found := waits(graph)):
        return plan
    layouts, copies, order = plan.layouts, plan.copies, {node: i for i, node in enumerate(graph.nodes)}
    first: dict[QuantizedTensor, tuple[int, GemmSite]] = {}  # The first GEMM that reads a copy of a tensor, behind its place.
    for decision in sorted(plan.rewritten, key=lambda d: order[d.site.node]):
        for copy in decision.copies:
            first.setdefault(copy.tensor, (order[decision.site.node], decision.site))
    read = [{c for d in plan.rewritten if d.site.is_backward == side for c in d.copies} for side in (False, True)]
    every, *of_sides = (
        {tensor: [layouts[c] for c in made if c in side] for tensor, made in copies.items()} for side in (set(layouts), *read)
    )
    rewritten, origin = {d.site.node for d in plan.rewritten}, origins(graph)
    reader_of = _reader_finder(graph, plan, origin)

    def decide(gather: Gather, tensors: tuple[QuantizedTensor, ...]) -> Gathered:
        sent = _sent(tensors, every, gather)
        if is_recomputed(gather.collective):  # there are two gathers anyway, and each brings what its side reads
            num_bytes = max(sum(_sent(tensors, here, gather).values(), Fraction()) for here in of_sides)
        else:
            num_bytes = sum(sent.values(), Fraction())
        reader = reader_of(gather.wait)
        reason: Reason | None = None
        if reader is not None:
            reason = read_in_high_precision(reader)
        elif gather.source in rewritten:
            reason = Reason(ReasonKind.READERS, "the shard is the result of an FP8 GEMM, with nothing in between")
        elif any(t.value.batch is not None or t.value.groups is not None for t in tensors):
            reason = Reason(ReasonKind.READERS, "a grouped GEMM reads it, whose operands are gathered in high precision")
        elif num_bytes >= value_of(gather.wait).element_size():
            detail = f"FP8 copies with {len(sent)} different scales would be no smaller than the tensor itself"
            reason = Reason(ReasonKind.BYTES, detail)
        else:
            ways = (scheme_of(t.quantization).gather_obstacle(t, every[t], gather) for t in tensors)
            reason = next((obstacle for obstacle in ways if obstacle is not None), None)
        _, site = min((first[t] for t in tensors), key=lambda found: found[0])
        meaning = Meaning((), {gather.wait: value(gather.wait)})
        moves = tuple(meaning(tensor.value.root).moves for tensor in tensors) if reason is None else ()
        return Gathered(gather, tensors, float(num_bytes), site, reason, moves)

    tensors_of = by_key(copies, lambda tensor: origin[tensor.value.root])
    gathered = [decide(Gather.read(w, context.shares_scales), tuple(tensors_of[w])) for w in found if w in tensors_of]
    return dataclasses.replace(plan, gathers=tuple(gathered))


def high_precision_readers(graph: fx.Graph, plan: Plan, tensors: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The tensors that something needs after all GEMMs of the plan are rewritten -> the first node that does."""
    reader_of = _reader_finder(graph, plan, origins(graph))
    return {node: reader for node in tensors if (reader := reader_of(node)) is not None}


def read_in_high_precision(reader: fx.Node) -> Reason:
    """Why a tensor is gathered as it is."""
    name = "the model's output" if reader.op == "output" else operation_name(reader)
    return Reason(ReasonKind.READERS, f"{name} reads the gathered tensor in high precision")


def _sent(
    tensors: Sequence[QuantizedTensor], layouts: Mapping[QuantizedTensor, Sequence[Layout]], gather: Gather
) -> dict[Hashable, Fraction]:
    """Bytes per element of everything that travels for these copies of the tensors."""
    found: dict[Hashable, Fraction] = {}
    for tensor in tensors:
        if layouts[tensor]:
            found |= scheme_of(tensor.quantization).sent(tensor, layouts[tensor], gather)
    return found


def _reader_finder(
    graph: fx.Graph, plan: Plan, origin: Mapping[fx.Node, fx.Node | None]
) -> Callable[[fx.Node], fx.Node | None]:
    """A function that finds the first node that needs a gathered tensor or an input, seen through moves, once all GEMMs of the
    plan are rewritten. What is live then is found once: a graph may have hundreds of gathers. Quantized tensors count as read,
    also those that will travel in FP8: that keeps nodes alive from which a gather is made, and the moves behind it, of which
    none is a reader in question. origin: `origins` of the graph."""
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

    def reader_of(wait: fx.Node) -> fx.Node | None:
        seen: set[fx.Node] = set()
        queue = deque(wait.users)
        while queue:
            node = queue.popleft()
            addend = addend_of(node) if node in reads else wait
            if node in seen or (addend is not wait and addend not in seen):
                continue
            seen.add(node)
            if origin[node] is wait:
                queue += node.users
            elif node in live:
                return node
        return None

    return reader_of


# -- Merge the reductions of amaxes over ranks: those of sharded Parameters are all known when a graph begins, and go as one.
#
# With one scale per tensor or per column, a shard is quantized by the largest amax of all ranks. An all-reduce of a few bytes
# costs a network's latency: one for all Parameters costs it once. An amax of an activation is known when its own tensor is, and
# is reduced alone.


#: Operations that make the amaxes: a scalar of a tensor, a vector of columns.
_AMAXES = (torch.ops.lowering.amaxes.default, torch.ops.lowering.amax_rowwise.default)


def merge_reductions(graph: fx.Graph) -> None:
    """In place: the all-reduces of amaxes of Parameters' shards become one per group of ranks."""
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        chain = _chain_to_amax(node)
        if node.args[1] == "max" and chain is not None:
            dims = value_of(node).dim()
            groups.setdefault((node.args[2], dims, recomputation_of(node.args[0])), []).append(node)
    for reductions in groups.values():
        if len(reductions) > 1:
            _merge(graph, reductions)


def _chain_to_amax(reduction: fx.Node) -> list[fx.Node] | None:
    """The nodes that lead from an input of the graph to the bits of an amax that is reduced; None for other reductions."""
    bits: Any = reduction.args[0]
    if bits.target is not aten.view.dtype or bits.args[0].target not in _AMAXES:
        return None
    return chain_from_input(bits)


def _merge(graph: fx.Graph, reductions: list[fx.Node]) -> None:
    first = reductions[0]
    position = {node: i for i, node in enumerate(graph.nodes)}
    for reduction in reductions[1:]:
        for node in _chain_to_amax(reduction) or ():
            if position[node] > position[first]:
                first.prepend(node)
    is_backward = "backward" in str(first.meta.get("partitioner_tag"))
    cursor = Cursor.start(graph).at(first, is_backward)
    parts: list[Any] = [reduction.args[0] for reduction in reductions]
    if not value_of(first).dim():
        parts = [cursor.call(aten.unsqueeze.default, part, 0) for part in parts]
    bits = cursor.call(aten.cat.default, parts)
    largest = largest_of_ranks(cursor, bits, first.args[2])
    start = 0
    for i, reduction in enumerate(reductions):
        (wait,) = reduction.users
        (alone,) = wait.users
        assert value_of(alone).dtype == torch.float32
        if value_of(first).dim():
            part = cursor.call(aten.slice.Tensor, largest, 0, start, start + value_of(alone).shape[0])
            start += value_of(alone).shape[0]
        else:
            part = cursor.call(aten.select.int, largest, 0, i)
        never_recompute(part)
        alone.replace_all_uses_with(part)
    for reduction in reversed(reductions):  # the cursor stands before the first
        (wait,) = reduction.users
        (alone,) = wait.users
        for node in (alone, wait, reduction):
            graph.erase_node(node)


# -- Gathers of Parameters beside those in FP8 send bytes, too.
#
# Passes that bucket FSDP's gathers put together what follows each other in one dtype. FP8 travels as uint8: a bias in bfloat16
# between two weights would end a bucket. So the other Parameters of these ranks are gathered as their bytes, by two views.
#
# The node that held a gathered tensor holds it afterwards, as a view of the bytes: what the plan says of it remains true.


def send_bytes(graph: fx.Graph, groups: Collection[Any]) -> tuple[Gather, ...]:
    """In place: all-gathers over these groups whose shards come from an input alone send uint8. Returns them as they were;
    their `wait` nodes are in the graph still, the collectives are not."""
    found = []
    for collective in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
        source: Any = collective.args[0]
        readers = [n for n in collective.users if n.target is c10d.wait_tensor.default]
        is_typed = value_of(source).dtype != torch.uint8 and value_of(source).dim() > 0
        is_read = len(readers) == len(collective.users) == 1 and bool(readers[0].users)
        if collective.args[2] in groups and is_read and is_typed and starts_at_input(source):
            gather = Gather.read(readers[0], lambda group: False)
            _send_bytes(graph, gather)
            found.append(gather)
    return tuple(found)


def _send_bytes(graph: fx.Graph, gather: Gather) -> None:
    collective, wait = gather.collective, gather.wait
    cursor = Cursor.start(graph).at(collective, "backward" in str(collective.meta.get("partitioner_tag")))
    sent = cursor.call(aten.view.dtype, gather.source, torch.uint8)
    gathered = cursor.call(c10d.all_gather_into_tensor.default, sent, *collective.args[1:])
    waited = cursor.at(wait, cursor.backward).call(c10d.wait_tensor.default, gathered)
    for new, old in ((gathered, collective), (waited, wait)):
        new.meta = {key: held for key, held in old.meta.items() if key != "tensor_meta"} | {"val": new.meta["val"]}
    wait.target, wait.args = aten.view.dtype, (waited, value_of(wait).dtype)
    min(wait.users).prepend(wait)  # the gather of a bucket may come behind all waits
    graph.erase_node(collective)
