"""Plan the casts: which copies are made together, before which GEMM, and which casts share a launch. Reads only.

Weights are inputs of the graph, and the gradients of q, k and v come from one attention kernel: hand-written kernels quantize
them, and a kernel per matrix would be as many launches. What is ready together is quantized together.
"""

from __future__ import annotations

import dataclasses
import heapq
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Set
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.graph.cursor import is_recomputed, recomputation_of
from fp8pass.graph.gathers import Gather
from fp8pass.graph.gemms import GemmSite, is_attention, operation_of
from fp8pass.graph.origin import is_tangent
from fp8pass.graph.values import PERMUTES, RESHAPES, depends_on, holds_tensor, row_gather, size_hint, value_of
from fp8pass.options import WeightCopies
from fp8pass.rewrite.plan import Launch, Plan, Rewritten, epilogue_of, read_dtype
from fp8pass.schemes import scheme_of
from fp8pass.schemes.copies import Cast, Copy, Layout, QuantizedTensor
from lowering.formats import E4M3

#: Matrices of one launch. Each of a node's results is a node that reads all of them: passes that look at what nodes read, such
#: as Inductor's updates of fake tensors, take time with the square of their number.
MOST_CASTS = 16

_VIEWS = RESHAPES | PERMUTES | {operator.getitem}


def plan_casts(graph: fx.Graph, plan: Plan) -> Plan:
    """The plan with every cast that its GEMMs need, a launch each or with those whose scale it shares, and with epilogues."""
    gathers = {t: g.gather for g in plan.gathers if g.reason is None for t in g.tensors}
    in_forward = {c for d in plan.rewritten if not d.site.is_backward for c in d.copies}
    made: set[Copy] = set()
    launches: list[Launch] = []
    needed, layouts = plan.copies, plan.layouts
    for decision in in_graph_order(graph, plan.rewritten):
        for copy in decision.copies:
            if copy in made:
                continue
            tensor = copy.tensor
            copies = needed[tensor]
            is_recomputed_input = tensor.name.kind != "weight" and tensor.value.root in plan.recomputed
            splits = tensor in plan.recomputed_weights or is_recomputed_input or is_gathered_twice(tensor, gathers.get(tensor))
            moves = tensor.value.groups is not None and scheme_of(tensor.quantization).has_one_scale
            if splits or moves:  # the copies of this side of the partition
                here = not decision.site.is_backward
                copies = [c for c in copies if (c in in_forward) == here and c not in made]
            is_first = made.isdisjoint(needed[tensor])
            reads, is_late = read_dtype(copy, decision.site), decision.site.is_backward
            rows = dataclasses.replace(copy, columnwise=False)
            kept = plan.kept.get(copy)
            if kept is None and rows in plan.kept:
                if rows not in made:
                    launches.append((Cast((rows,), (Layout(False),), decision.site, plan.kept[rows], reads, is_first),))
                    made.add(rows)
                kept = rows  # saved is the input alone, which FSDP2 frees meanwhile
            if kept is not None:
                is_moved = isinstance(kept, Copy)
                pair = (is_first and not is_moved, is_moved and is_late)
                launches.append((Cast((copy,), (layouts[copy],), decision.site, kept, reads, *pair),))
                made.add(copy)
                continue
            if tensor in plan.fused:
                casts = [_whole(needed[t], layouts, decision) for t in plan.fused[tensor]]
                launches.append(tuple(casts))
                made.update(copy for cast in casts for copy in cast.copies)
                continue
            is_pinned = splits and is_late  # left to the partitioner it would be made in forward and saved
            if tensor.value.groups is not None:
                known = {c for c in made if c.tensor == tensor} if moves and not splits else set()
                of_rows = _casts_of_rows(copies, layouts, decision.site, is_first, is_pinned, known)
                launches += [(cast,) for cast in of_rows]
            else:
                source = gathers.get(tensor)
                forms = tuple(layouts[c] for c in copies)
                launches.append((Cast(tuple(copies), forms, decision.site, source, reads, is_first, is_pinned),))
            made.update(copies)
    epilogues = {d.site.node: epilogue_of(d, layouts) for d in plan.rewritten}
    return dataclasses.replace(plan, launches=tuple(launches), epilogues=epilogues)


def _whole(copies: list[Copy], layouts: dict[Copy, Layout], decision: Rewritten) -> Cast:
    """The cast of a weight that shares a scale with others, before the GEMM that needs one of them first."""
    forms = tuple(layouts[copy] for copy in copies)
    return Cast(tuple(copies), forms, decision.site, None, read_dtype(copies[0], decision.site))


def _casts_of_rows(
    copies: list[Copy], layouts: dict[Copy, Layout], site: GemmSite, is_first: bool, is_pinned: bool, known: set[Copy]
) -> list[Cast]:
    """A cast for each copy of rows in groups, rowwise first, or one for both. A columnwise copy moves the bytes of the rowwise
    one, if the recipe does that and there is one: made here, or by forward (`known`). Then only that one is saved."""
    first = copies[0]
    if len(copies) == 2 and scheme_of(first.quantization).reads_rows_once(first.tensor):
        forms = tuple(layouts[copy] for copy in copies)
        return [Cast(tuple(copies), forms, site, None, read_dtype(first, site), is_first, is_pinned)]
    found: list[Cast] = []
    for copy in copies:
        has_one_scale = scheme_of(copy.quantization).has_one_scale
        is_moved = copy.columnwise and has_one_scale and bool(found or known)
        is_late = is_moved and bool(known) and site.is_backward
        is_new = is_first and not found
        rows = dataclasses.replace(copy, columnwise=False)
        source, masked = (rows, False) if is_moved else (None, has_one_scale and is_new)
        dtype = read_dtype(copy, site)
        found.append(Cast((copy,), (layouts[copy],), site, source, dtype, is_new, is_pinned or is_late, masked))
    return found


def plan_launches(plan: Plan) -> Plan:
    """The plan with casts that are ready together in one launch, at the place of the first of them."""
    groups: dict[Hashable, list[Cast]] = {}
    layers = _layers([cast for launch in plan.launches for cast in launch])
    for launch in plan.launches:
        for cast in launch:
            shares_scale = cast.tensor in plan.fused and cast.source is None
            key: Hashable | None = launch if shares_scale else _key(cast, layers.get(cast))
            groups.setdefault(key if key is not None else cast, []).append(cast)
    parts = (tuple(casts[i : i + MOST_CASTS]) for casts in groups.values() for i in range(0, len(casts), MOST_CASTS))
    return dataclasses.replace(plan, launches=tuple(parts))


def is_gathered_twice(tensor: QuantizedTensor, source: Gather | None) -> bool:
    """Tell whether backward gathers a tensor again: then the gather of each side brings what that side reads."""
    has_one = scheme_of(tensor.quantization).has_one_copy(tensor.quantization)
    return source is not None and not has_one and is_recomputed(source.collective)


def in_graph_order(graph: fx.Graph, decisions: list[Rewritten]) -> list[Rewritten]:
    """Decisions in the order of their GEMMs."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    return sorted(decisions, key=lambda d: order[d.site.node])


def _layers(casts: list[Cast]) -> dict[Cast, str]:
    """The layers of casts to one copy: of weights, the other copy of which is made when it is needed, or not at all, and of
    what backward quantizes again. They are grouped by layer, so that the copies of one layer exist at a time. A layer is what
    the longest part of a module's path that ends in a number, and that other weights share, stands for: `model.layers.3` for
    `model.layers.3.mlp.0`, if `model.layers.3.mlp` is a Sequential with one linear for each number."""
    single = [cast for cast in casts if len(cast.copies) == 1]
    paths = {cast: cast.tensor.name.module for cast in single if cast.is_pinned or cast.tensor.name.kind == "weight"}
    layers = layers_of(set(paths.values()))
    return {cast: layers[path] for cast, path in paths.items()}


def layers_of(paths: Set[str]) -> dict[str, str]:
    """The layer of each module; empty where its path has no number that others share."""
    prefixes = {path: _numbered_prefixes(path) for path in paths}
    members = Counter(prefix for found in prefixes.values() for prefix in found)
    return {path: next((p for p in found if members[p] > 1), "") for path, found in prefixes.items()}


def _numbered_prefixes(path: str) -> list[str]:
    """The parts of a path that end in a number, longest first."""
    names = path.split(".")
    return [".".join(names[: i + 1]) for i in reversed(range(len(names))) if names[i].isdigit()]


def _key(cast: Cast, layer: str | None) -> Hashable | None:
    """Casts with equal keys can share a launch; None if this one cannot."""
    tensor = cast.tensor
    is_matrix = cast.source is None and tensor.value.groups is None and tensor.value.batch is None
    own = scheme_of(tensor.quantization).launch_key(cast) if is_matrix else None
    root = tensor.value.root
    source = _source(root)
    if cast.is_pinned and isinstance(source, fx.Node):
        source = "input"  # forward's attention: for backward it is there from the start, as its inputs are
    if own is None or source is None:
        return None
    like = next((n for n in (root, cast.at.node) if is_recomputed(n)), None)
    tags = None if like is None else recomputation_of(like)[1:]
    alike = (tensor.recipe, tensor.quantization, own)
    return (source, value_of(root).device, alike, cast.at.is_backward, cast.is_pinned, tags, layer)


def _source(x: fx.Node) -> fx.Node | str | None:
    """The source of x: "input" for inputs of the graph, or an attention node; None for what codegen may fuse with."""
    while x.target in _VIEWS:
        x = x.all_input_nodes[0]
    if x.op == "placeholder":
        return "input"
    return x if is_attention(x) else None


aten = torch.ops.aten
prims = torch.ops.prims

_FREE = RESHAPES | PERMUTES | {aten.alias.default, aten.detach.default, aten.expand.default, aten.select.int, aten.slice.Tensor}
#: Besides what ATen tags as pointwise: casts, copies and views, which Inductor fuses as well.
_FUSIBLE = _FREE | {prims.convert_element_type.default, aten._to_copy.default, aten.clone.default}


# -- Plan recomputation: which FP8 copies backward makes itself, because what they are made of is available there. Reads only.
#
# Forward saves tensors for backward in high precision anyway: the inputs of a norm or an activation for their own
# gradients, q, k, v and the result of attention. A columnwise copy that only grad_weight reads and that pointwise code makes of
# such tensors costs nothing to keep: backward computes the value again, fused with the gradient's own code, and quantizes it
# there with forward's scale. Saving it would cost one byte per element.


#: A tensor this many times smaller than what is made of it, such as a norm's rstd, costs nothing to save.
_SMALL = 16

#: weight_copies="auto": from this M on the copy of a weight is recomputed. Estimated (no GPU has run it: 4.3 TB/s, 1300
#: TFLOP/s) reading a bfloat16 weight once more takes an H200 2.5 % of the time that its three FP8 GEMMs take at M = 4096, and
#: half of that whenever M doubles; saving the copy takes one byte per parameter until backward.
#: Copies of experts' weights are recomputed in any case: an expert has few rows, but the experts have most of a model's
#: parameters, and a byte for each would be more than everything else that is saved.
MANY_ROWS = 4096


def plan_recomputation(graph: fx.Graph, plan: Plan, weight_copies: WeightCopies, with_operands: bool) -> Plan:
    """The plan with the values whose backward-only copies are made in backward. None in inference. with_operands: also the
    operands of the GEMMs that `recipe=None` keeps in high precision, which are written once more."""
    tangents = {n for n in graph.find_nodes(op="placeholder") if is_tangent(n)}
    if not tangents:
        return plan
    moved = {t for g in plan.gathers if g.reason is None for t in g.tensors}
    kept = {copy.tensor for copy in plan.kept}
    tensors = [t for t in plan.copies if t not in moved and t not in kept]
    weights = frozenset(_recomputed_weights(plan, tensors, weight_copies))
    if any(is_recomputed(n) for n in graph.nodes):  # the user's own activation checkpointing takes precedence
        return dataclasses.replace(plan, recomputed_weights=weights)
    gradients, gemms = depends_on(graph, tangents), _gemms_in_fp8(plan, with_operands)
    nodes_of = _tracer_of(graph, gradients, gemms)
    chains: dict[fx.Node, frozenset[fx.Node]] = {}
    for tensor in tensors:
        chain = None if tensor.name.kind == "weight" else nodes_of(tensor.value.root)
        if chain is None or (with_operands and _is_saved_as_copy(tensor, gradients, gemms)):
            continue
        is_written = not scheme_of(tensor.quantization).fuses_with_producer(tensor) and any(
            n.target not in _FREE for n in chain
        )
        if is_written and tensor.value.groups is None:
            continue  # the value would be written in high precision once more; rows in groups are larger, with their padding
        chains[tensor.value.root] = chain
    sites = [d.site for d in plan.decisions if d.site.node in gemms and d.reason is not None and d.site.is_backward]
    for value in dict.fromkeys(o.value for site in sites for o in site.operands if o.kind == "input"):
        if value.root not in chains and (chain := nodes_of(value.root)):
            chains[value.root] = chain
    return dataclasses.replace(plan, recomputed=chains, recomputed_weights=weights)


def _recomputed_weights(plan: Plan, tensors: list[QuantizedTensor], choice: WeightCopies) -> list[QuantizedTensor]:
    """Backward has Parameters, but not those that were gathered from other ranks."""
    rows = {d.copies[1].tensor: size_hint(d.site.m) for d in plan.rewritten if d.site.role == "output"}
    weights = [t for t in tensors if t.name.kind == "weight" and t.value.root.op == "placeholder"]
    return [
        t
        for t in weights
        if choice == "recompute" or (choice != "save" and (t.value.batch is not None or rows.get(t, 0) >= MANY_ROWS))
    ]


def _gemms_in_fp8(plan: Plan, with_operands: bool) -> set[fx.Node]:
    """The GEMMs whose operands nobody needs in high precision, pairs of gradients that one operation computes among them."""
    gemms = {d.site.node for d in plan.decisions if d.reason is None or (with_operands and d.has_no_recipe)}
    return gemms | {pair for pair in map(operation_of, gemms) if all(user in gemms for user in pair.users)}


def _tracer_of(graph: fx.Graph, gradients: Set[fx.Node], gemms: Set[fx.Node]) -> Callable[[fx.Node], frozenset[fx.Node] | None]:
    """A function that follows a value of the forward back to what is available in backward: to the nodes to compute again, or
    None if that would need a tensor that backward does not have."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    # What backward reads besides FP8 copies, and what pointwise code makes it of: the partitioner saves it, or something of its
    # size.
    readers = [n for n in gradients - gemms if n.op != "output"]
    waiting = [n for reader in readers for n in reader.all_input_nodes if n not in gradients]
    kept: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in kept and holds_tensor(node):
            kept.add(node)
            if _is_fusible(node):
                waiting += node.all_input_nodes

    def serves_only(node: fx.Node, chain: Set[fx.Node] = frozenset()) -> bool:
        """Tell whether nothing in forward reads a node but the chain and FP8 GEMMs: a residual sum, say, is saved and not
        summed up again."""
        return all(user in chain or user in gradients or leads_to_gemms(user) for user in node.users)

    def leads_to_gemms(node: fx.Node) -> bool:
        passes = node.target in _FUSIBLE or row_gather(node) is not None
        return node in gemms or (passes and bool(node.users) and serves_only(node))

    def nodes_of(root: fx.Node) -> frozenset[fx.Node] | None:
        if root in gradients:
            return None
        size = value_of(root).numel()
        chain: set[fx.Node] = set()
        pending = [(-position[root], root)]  # latest first: all readers of a node within the chain come before it
        while pending:
            _, node = heapq.heappop(pending)
            if node in chain:
                continue
            if _is_fusible(node) and serves_only(node, chain):
                chain.add(node)
                for read in node.all_input_nodes:
                    heapq.heappush(pending, (-position[read], read))
            elif not (node in kept or _is_small(node, size)):
                return None
        return frozenset(chain)

    return nodes_of


def _is_saved_as_copy(tensor: QuantizedTensor, gradients: Set[fx.Node], gemms: Set[fx.Node]) -> bool:
    """Tell whether pointwise code of the backward reads a value itself, such as tanh's result, and not what it is made of. With
    `saved_activations` it is then saved as its columnwise copy (`saved_copies.py`), and neither is made again."""

    def readers_of(node: fx.Node) -> list[fx.Node]:
        """The nodes of the backward that read a value, besides FP8 GEMMs; views are looked through, of what is read, too."""
        while node.target in _FREE:
            node = node.all_input_nodes[0]
        found: list[fx.Node] = []
        pending = list(node.users)
        while pending:
            user = pending.pop()
            if user.target in _FREE and user not in gradients:
                pending += user.users
            elif user in gradients and user not in gemms:
                found.append(user)
        return found

    root = tensor.value.root
    is_matrix = tensor.value.groups is None and tensor.value.batch is None
    if not (is_matrix and tensor.dtype is E4M3 and _is_fusible(root) and root.target not in _FREE):
        return False
    readers = readers_of(root)
    is_pointwise = all(_is_fusible(node) and node.target not in _FREE for node in readers)
    return bool(readers) and is_pointwise and not any(map(readers_of, root.all_input_nodes))


def _is_fusible(node: fx.Node) -> bool:
    """Tell whether Inductor fuses the node into its readers, with the same result each time. Masks are not looked through: they
    are smaller than what they are made of, which may be random."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not holds_tensor(node):
        return False
    tags = node.target.tags
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return value_of(node).dtype is not torch.bool and (is_pointwise or node.target in _FUSIBLE)


def _is_small(node: fx.Node, size: Any) -> bool:
    return not holds_tensor(node) or bool(statically_known_true(value_of(node).numel() * _SMALL <= size))
