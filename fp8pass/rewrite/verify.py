"""Verify: a rewritten graph is what the plan and the hardware say. A violation is our defect and names the node.

GEMMs       every GEMM of the plan is a scaled GEMM now, no other one came or went
operands    each reads the planned copies, through views only, in the planned formats, as the hardware takes them
dequantized each operand that a GEMM in high precision reads from an FP8 copy is made of that copy and its scale
scales      each cast multiplies by the scale of whose reciprocal the GEMMs read
casts       each launch is one operation on the planned tensors, on the planned side of the partition, with the planned copies;
            none is made twice
recomputed  what backward makes itself is tagged so
gathers     what travels in FP8 is gathered in high precision no more
state       each recipe checks what it reads from the state and records there (`Emitter.verify`)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass.errors import InvariantError
from fp8pass.graph.casts import CastNode, maker_of
from fp8pass.graph.cursor import is_pinned
from fp8pass.graph.kinds import is_matmul, is_scaled_gemm, operands_of
from fp8pass.graph.scales import place_of_inverse, place_of_scale
from fp8pass.graph.values import value_of
from fp8pass.recipes.recipe import Cast, Copy
from fp8pass.rewrite.apply import Applied
from fp8pass.rewrite.plan import Decision, Launch, Plan
from lowering import hardware

aten = torch.ops.aten

_VIEWS = (aten.permute.default, aten.slice.Tensor)
#: Between a tensor and its cast: sizes, and the dtype in which it is written.
_FORMS = (aten.reshape.default, aten.unsqueeze.default, torch.ops.prims.convert_element_type.default)
#: Between dequantized values and the GEMM in high precision that reads them.
_DEQUANTIZED = (*_VIEWS, aten.unsqueeze.default, torch.ops.prims.convert_element_type.default)
#: Between a scaled GEMM and the result of the GEMM whose place it took: padding cut off, an addend.
_RESULTS = (aten.slice.Tensor, aten.clone.default, aten.add.Tensor, aten.unsqueeze.default)


def scaled_gemms(graph: fx.Graph) -> list[fx.Node]:
    """The FP8 GEMMs of a graph."""
    return [n for n in graph.nodes if is_scaled_gemm(n)]


def casts(graph: fx.Graph) -> list[CastNode]:
    """The casts of a graph."""
    return [cast for n in graph.nodes if (cast := CastNode.read(n)) is not None]


def verify(graph: fx.Graph, plan: Plan, applied: Applied, known: Iterable[fx.Node]) -> None:
    """Raise InvariantError if the graph is not what the plan says. `known`: the nodes that it had before."""
    graph.lint()
    nodes, known = set(graph.nodes), set(known)
    _check_gemms(graph, plan, applied, nodes, known)
    for decision in plan.rewritten:
        _check_operands(decision, applied)
    for decision in plan.decisions:
        _check_dequantized(decision, applied)
    _check_casts(graph, plan, applied, nodes, known)
    for root, chain in plan.recomputed.items():
        for node in chain & nodes:
            if node.meta.get("recompute") is not CheckpointPolicy.MUST_RECOMPUTE:
                raise InvariantError(f"{node.name} is saved, the plan recomputes it for {root.name}")
    for gathered in plan.gathers:
        is_left = gathered.gather.wait in nodes
        if is_left == (gathered.reason is None):
            found = "in high precision" if is_left else "in FP8"
            name = gathered.gather.collective.name
            raise InvariantError(f"{name} gathers {found}, the plan says {gathered.reason or 'FP8'}")
    for emitter in applied.emitters:
        emitter.verify(graph)


def _check_gemms(graph: fx.Graph, plan: Plan, applied: Applied, nodes: set[fx.Node], known: set[fx.Node]) -> None:
    for decision in plan.rewritten:
        node = decision.site.node
        if node in nodes:
            raise InvariantError(f"{node.name} is in high precision, the plan rewrites it")
        if applied.gemms.get(node) not in nodes:
            raise InvariantError(f"{node.name} was planned for FP8, no scaled GEMM took its place")
    planned = {applied.gemms[d.site.node] for d in plan.rewritten}
    for node in scaled_gemms(graph):
        if node not in planned and node not in known:
            raise InvariantError(f"{node.name} multiplies in FP8, the plan has no such GEMM")
    kept = {d.site.node for d in plan.decisions if d.reason is not None}
    for node in graph.nodes:
        if is_matmul(node) and node not in kept:
            raise InvariantError(f"{node.name} multiplies in high precision, the plan does not keep it")
    for decision in plan.decisions:
        if decision.reason is not None and not decision.site.within and decision.site.node not in nodes:
            raise InvariantError(f"{decision.site.node.name} is gone, the plan keeps it: {decision.reason}")


def _check_operands(decision: Decision, applied: Applied) -> None:
    node = applied.gemms[decision.site.node]
    args: Any = node.args
    wanted = [applied.copies[copy] for copy in decision.copies]
    for position, name in enumerate("ab"):
        if _behind_views(args[position]) is not wanted[position].data:
            raise InvariantError(f"{node.name}: {name} is {args[position].name}, the plan says {wanted[position].data.name}")
        if args[2 + position] is not wanted[position].scale_inv:
            raise InvariantError(f"{node.name}: the scale of {name} is {args[2 + position]}, not that of its data")
    if decision.site.form is not None and args[4] is not decision.site.offs:
        raise InvariantError(f"{node.name}: its groups end at {args[4]}, the plan says {decision.site.offs}")
    a, b = (value_of(args[i]) for i in (0, 1))
    for value, copy, name in ((a, decision.copies[0], "a"), (b, decision.copies[1], "b")):
        if value.dtype != copy.tensor.dtype:
            raise InvariantError(f"{node.name}: {name} is {value.dtype}, the plan says {copy.tensor.dtype}")
    if a.stride(-1) != 1 or b.stride(-2) != 1:
        raise InvariantError(f"{node.name}: a must be row-major and b column-major, strides are {a.stride()}, {b.stride()}")
    first, second = (copy.tensor.quantization.granularity for copy in decision.copies)
    gemm = hardware.Gemm(
        a.dtype, b.dtype, first, second, n=b.shape[-1], k=a.shape[-1], is_grouped=decision.site.form is not None
    )
    refusal = hardware.refusal(gemm, None)
    if refusal is not None:
        raise InvariantError(f"{node.name}: {refusal}")


def _check_dequantized(decision: Decision, applied: Applied) -> None:
    node = decision.site.node
    for position, copy in decision.dequantized:
        wanted = applied.copies[copy]
        read = operands_of(node)[position]
        while read.target in _DEQUANTIZED:
            read = read.all_input_nodes[0]
        if read is not applied.dequantized.get((node, position)):
            raise InvariantError(
                f"{node.name}: operand {position} is {read.name}, the plan says {wanted.data.name}, dequantized"
            )
        sources = _sources(read)
        for source in (wanted.data, wanted.scale_inv):
            if source not in sources:
                raise InvariantError(
                    f"{node.name}: operand {position} is not made of {source.name}, which the plan dequantizes"
                )


def _sources(values: fx.Node) -> set[fx.Node]:
    """The nodes that dequantized values are made of, up to casts."""
    found: set[fx.Node] = set()
    pending = [values]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            if CastNode.read(node) is None:
                pending += node.all_input_nodes
    return found


def _behind_views(node: fx.Node) -> fx.Node:
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def _check_casts(graph: fx.Graph, plan: Plan, applied: Applied, nodes: set[fx.Node], known: set[fx.Node]) -> None:
    makers: set[fx.Node] = set()
    for launch in plan.launches:
        made = [(cast, copy, applied.copies[copy]) for cast in launch.casts for copy in cast.copies]
        found = {maker_of(quantized.data) for _, _, quantized in made}
        if launch.casts[0].gather is not None:
            continue  # bytes that travelled, not casts
        if launch.casts[0].is_moved:
            _check_moved(launch.casts[0], applied)
            continue
        if len(found) != 1:
            raise InvariantError(f"a launch of {len(launch.casts)} casts became {len(found)} operations, {_names(found)}")
        maker = found.pop()
        cast = CastNode.read(maker)
        if maker not in nodes or cast is None:
            raise InvariantError(f"{maker.name} makes {launch.casts[0].tensor.name}, but is not a cast in the graph")
        makers.add(maker)
        _check_launch(launch, cast, applied)
    shards = {g.gather.source for g in plan.gathers if g.reason is None}
    for cast in casts(graph):
        of_shard = any(_behind_reshape(m) in shards for m in cast.matrices)
        if cast.node not in makers and cast.node not in known and not of_shard:
            raise InvariantError(f"{cast.node.name} quantizes, the plan has no such cast")
    _check_made_once(casts(graph))


def _check_moved(cast: Cast, applied: Applied) -> None:
    """A columnwise copy of rows in groups has the bytes and the scale of the rowwise one."""
    (copy,) = cast.copies
    moved, rows = applied.copies[copy], applied.copies[dataclasses.replace(copy, columnwise=False)]
    node = moved.data
    if maker_of(node) is not maker_of(rows.data):
        raise InvariantError(f"{node.name} is not moved out of {rows.data.name}, the plan says it is")
    _check_groups(copy, node)
    if moved.scale_inv is not rows.scale_inv:
        raise InvariantError(f"{node.name} has the scale {moved.scale_inv.name}, its bytes have {rows.scale_inv.name}")
    tag = str(node.meta.get("partitioner_tag", ""))
    if tag and is_pinned(node) != cast.is_pinned:
        raise InvariantError(f"{node.name} is tagged {tag}, the plan says {'pinned' if cast.is_pinned else 'not pinned'}")


def _check_groups(copy: Copy, node: fx.Node) -> None:
    """What writes a columnwise copy of rows in groups has them where the plan says."""
    groups: Any = copy.tensor.value.groups
    cast = CastNode.read(node)
    found = node.args[1:3] if cast is None else cast.options.get("groups")
    if found != (groups.offs, groups.index):
        raise InvariantError(f"{node.name} has the groups {found}, the plan says {(groups.offs, groups.index)}")


def _check_launch(launch: Launch, cast: CastNode, applied: Applied) -> None:
    first = launch.casts[0]
    node = cast.node
    if len(cast.matrices) != len(launch.casts):
        raise InvariantError(f"{node.name} quantizes {len(cast.matrices)} tensors, the plan says {len(launch.casts)}")
    for planned, matrix in zip(launch.casts, cast.matrices, strict=True):
        root = planned.tensor.value.root
        if not _holds(matrix, root, applied):
            raise InvariantError(f"{node.name} quantizes {matrix.name}, the plan says {applied.gemms.get(root, root).name}")
    _check_scales(launch, cast, applied)
    shares_scale = first.tensor.value.groups is not None and first.tensor.recipe.moves_columns
    if shares_scale and first.is_first and cast.matrices[0].target is not aten.where.self:
        raise InvariantError(f"{node.name} quantizes {cast.matrices[0].name}, in which rows that no group reads are not zeros")
    # With one scale for all rows the columnwise copy of rows in groups is moved out of a rowwise one.
    if cast.orientations != tuple(layout.columnwise and not shares_scale for layout in first.layouts):
        raise InvariantError(f"{node.name} makes copies {cast.orientations} (columnwise?), the plan says {first.layouts}")
    if cast.dtype != first.tensor.dtype:
        raise InvariantError(f"{node.name} casts to {cast.dtype}, the plan says {first.tensor.dtype}")
    if first.tensor.value.groups is not None and first.layouts[0].columnwise:
        _check_groups(first.copies[0], applied.copies[first.copies[0]].data if shares_scale else node)
    tag = str(node.meta.get("partitioner_tag", ""))
    if tag and ("backward" in tag) != first.at.is_backward:
        raise InvariantError(f"{node.name} is tagged {tag}, the plan quantizes {first.tensor.name} before {first.at.node.name}")
    if tag and is_pinned(node) != _is_pinned(launch.casts):
        raise InvariantError(f"{node.name} is tagged {tag}, the plan says {'pinned' if first.is_pinned else 'not pinned'}")


def _check_scales(launch: Launch, cast: CastNode, applied: Applied) -> None:
    """What a GEMM multiplies with is the reciprocal of what the cast multiplied with."""
    if cast.scale is None:
        return
    for position, planned in enumerate(launch.casts):
        place = place_of_scale(cast.scale, position)
        for copy in planned.copies:
            scale_inv = applied.copies[copy].scale_inv
            if place_of_inverse(scale_inv) != place:
                name = planned.tensor.name
                raise InvariantError(
                    f"{cast.node.name} quantizes {name} by another scale than that of which {scale_inv.name} is the reciprocal"
                )


def _holds(matrix: fx.Node, root: fx.Node, applied: Applied) -> bool:
    """Whether a matrix is the value of `root`, which may be a GEMM that was rewritten."""
    gemm = applied.gemms.get(root)
    wanted, passed = (root, _FORMS) if gemm is None else (gemm, _FORMS + _RESULTS)
    while matrix is not wanted and (matrix.target in passed or matrix.target is aten.where.self):
        is_masked = matrix.target is aten.where.self  # rows that no group reads
        matrix = matrix.all_input_nodes[1 if is_masked else 0]
    return matrix is wanted


def _is_pinned(casts: Iterable[Cast]) -> bool:
    return any(cast.is_pinned for cast in casts)


def _check_made_once(found: list[CastNode]) -> None:
    """Each copy of a tensor is made once per format and way to scale."""
    seen: dict[tuple[object, ...], fx.Node] = {}
    for cast in found:
        for i, matrix in enumerate(cast.matrices):
            for columnwise in cast.orientations:
                options = tuple(sorted(cast.options.items()))
                key = (matrix, cast.dtype, columnwise, cast.scale, i if len(cast.matrices) > 1 else 0, options)
                if key in seen:
                    raise InvariantError(f"{cast.node.name} quantizes {matrix} again, after {seen[key].name}")
                seen[key] = cast.node


def _behind_reshape(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0] if node.target is aten.reshape.default else node


def _names(nodes: Iterable[fx.Node]) -> str:
    return ", ".join(sorted(n.name for n in nodes))
