"""Verify: a rewritten graph is what the plan and the hardware say. A violation is our defect and names the node.

GEMMs       every GEMM of the plan is a scaled GEMM now, with the planned arguments and epilogue; no other one came or went
operands    each reads the planned copies, through views only, in the planned formats, as the hardware takes them
dequantized each operand that a GEMM in high precision reads from an FP8 copy is made of that copy and its scale
casts       `verify_casts.py`
moves       `verify_moves.py`: what lies between a cast and a GEMM moves, and does nothing else
recomputed  what backward makes itself is tagged so
gathers     what travels in FP8 is gathered in high precision no more; what travels as bytes arrives as it was sent
state       each emitter checks what it reads from the state and records there (`Emitter.verify`)
values      every inserted node has the shapes, strides and dtypes that its operation gives it

It runs last, on the graph that is compiled, and can run on one as `apply` left it.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass.errors import InvariantError
from fp8pass.graph.calls import arguments_of
from fp8pass.graph.casts import CastNode
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather
from fp8pass.graph.kinds import is_matmul, is_scaled_gemm, operands_of
from fp8pass.graph.permutations import Scatter
from fp8pass.graph.scales import place_of
from fp8pass.graph.values import same_shape, value_of
from fp8pass.rewrite.apply import Applied
from fp8pass.rewrite.plan import Decision, Epilogue, Plan
from fp8pass.rewrite.verify_casts import CastChecks, check_arguments
from fp8pass.rewrite.verify_moves import check_dequantized, check_padding, check_permuted, check_reads
from fp8pass.rewrite.wire import check_bytes
from fp8pass.schemes.copies import Copy
from lowering import hardware

aten = torch.ops.aten

_VIEWS = (aten.permute.default, aten.slice.Tensor)
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


def verify(
    graph: fx.Graph,
    plan: Plan,
    applied: Applied,
    known: Iterable[fx.Node],
    permuted: Mapping[fx.Node, Scatter] = types.MappingProxyType({}),
    sent_as_bytes: Sequence[Gather] = (),
) -> None:
    """Raise InvariantError if the graph is not what the plan says. known: the nodes that it had before. permuted: gathers, each
    with the scatter whose place it took before the plan was made. sent_as_bytes: gathers that send uint8, as they were."""
    graph.lint()
    nodes, known = set(graph.nodes), set(known)
    _check_gemms(graph, plan, applied, nodes, known)
    for decision in plan.rewritten:
        _check_operands(decision, applied)
        _check_epilogue(decision, plan.epilogues[decision.site.node], applied, nodes)
    for decision in plan.decisions:
        _check_dequantized(decision, applied)
    check_permuted(permuted, nodes, applied.results)
    check_reads(node for node in graph.nodes if node not in known)
    checks = _check_casts(graph, plan, applied, nodes, known)
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
    check_bytes(sent_as_bytes)
    for emitter in applied.emitters:
        emitter.verify(graph)
    checks.recorded(node for node in graph.nodes if node not in known)
    _check_values(graph, known - {gather.wait for gather in sent_as_bytes})


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
        index: Any = node.kwargs.get(f"scale_inv_{name}_index")
        given = place_of(args[2 + position], index)
        if given != applied.scales[decision.copies[position]]:
            raise InvariantError(f"{node.name}: the scale of {name} is {args[2 + position]}, not that of its data")
    if decision.site.form is not None and args[4] is not decision.site.offs:
        raise InvariantError(f"{node.name}: its groups end at {args[4]}, the plan says {decision.site.offs}")
    a, b = (value_of(args[i]) for i in (0, 1))
    for value, copy, name in ((a, decision.copies[0], "a"), (b, decision.copies[1], "b")):
        if value.dtype != copy.dtype:
            raise InvariantError(f"{node.name}: {name} is {value.dtype}, the plan says {copy.dtype}")
    if a.stride(-1) != 1 or b.stride(-2) != 1:
        raise InvariantError(f"{node.name}: a must be row-major and b column-major, strides are {a.stride()}, {b.stride()}")
    first, second = (copy.quantization.granularity for copy in decision.copies)
    gemm = hardware.Gemm(
        a.dtype, b.dtype, first, second, n=b.shape[-1], k=a.shape[-1], is_grouped=decision.site.form is not None
    )
    refusal = hardware.refusal(gemm, None)
    if refusal is not None:
        raise InvariantError(f"{node.name}: {refusal}")


def _check_epilogue(decision: Decision, epilogue: Epilogue, applied: Applied, nodes: set[fx.Node]) -> None:
    """The GEMM's own arguments, and what lies between it and the result whose place it took."""
    site, gemm = decision.site, applied.gemms[decision.site.node]
    granularities = [copy.quantization.granularity.value for copy in decision.copies]
    check_arguments(
        gemm,
        out_dtype=epilogue.out_dtype,
        fast_accum=epilogue.fast_accum,
        granularity_a=granularities[0],
        granularity_b=granularities[1],
    )
    if "implementation" in arguments_of(gemm):
        check_arguments(gemm, implementation="mxfp8" if hardware.has_mx_scaled_mm(value_of(gemm).device) else "auto")
    addend = None if epilogue.addend is None else applied.results.get(epilogue.addend, epilogue.addend)
    bias = arguments_of(gemm)["bias"]
    if bias is not None and bias.target is aten.constant_pad_nd.default and epilogue.cuts_columns:
        check_padding(bias, 0)
        bias = bias.args[0]
    if bias is not (addend if epilogue.is_bias else None):
        raise InvariantError(f"{gemm.name}: the bias is {bias}, the plan says {addend if epilogue.is_bias else None}")
    if (arguments_of(gemm)["a"].target is aten.slice.Tensor) != (epilogue.cuts_rows == "operand"):
        raise InvariantError(f"{gemm.name} reads {arguments_of(gemm)['a'].name}, the plan cuts rows of {epilogue.cuts_rows}")
    result = applied.results[site.node]
    found = _steps(gemm, result, applied)
    wanted: list[Any] = [aten.slice.Tensor] * ((epilogue.cuts_rows == "result") + epilogue.cuts_columns)
    wanted += [aten.add.Tensor] if addend is not None and not epilogue.is_bias else []
    wanted += [aten.unsqueeze.default] if site.form is None and value_of(site.node).dim() == 3 else []
    if [n.target for n in found if n.target is not aten.clone.default] != wanted:
        raise InvariantError(f"{gemm.name} becomes {result.name} by {[n.name for n in found]}, the plan says {epilogue}")
    for node in found:
        if node.target is aten.add.Tensor and (node.args[1] is not addend or node.kwargs):
            raise InvariantError(f"{node.name} adds {node.args[1]}, the plan says {addend}")
        if node.target is aten.slice.Tensor and node.args[2] != 0:
            raise InvariantError(f"{node.name} cuts off what is no padding")
    old, new = value_of(site.node), value_of(result)
    if old.dtype != new.dtype or not same_shape(old.shape, new.shape):
        raise InvariantError(f"{result.name} is {_described(new)} in the place of {_described(old)}")
    dequantizing = {reader for reader, _ in applied.dequantized}
    for reader in applied.readers[site.node]:
        if reader in nodes and reader not in dequantizing and result not in reader.all_input_nodes:
            raise InvariantError(f"{reader.name} does not read {result.name}, in the place of {site.node.name}")


def _steps(gemm: fx.Node, result: fx.Node, applied: Applied) -> list[fx.Node]:
    """The nodes from a scaled GEMM to its result, without the GEMM."""
    found: list[fx.Node] = []
    while result is not gemm:
        found.insert(0, result)
        if not result.all_input_nodes or len(found) > len(_RESULTS):
            raise InvariantError(f"{found[-1].name} is not made of {gemm.name}")
        result = result.all_input_nodes[0]
    return found


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
        check_dequantized(f"{node.name}: operand {position}", read, wanted)
        if place_of(wanted.scale_inv) != applied.scales[copy]:
            raise InvariantError(
                f"{node.name}: operand {position} has the scale {wanted.scale_inv.name}, not that of {copy.name}"
            )


def _behind_views(node: fx.Node) -> fx.Node:
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def _check_casts(graph: fx.Graph, plan: Plan, applied: Applied, nodes: set[fx.Node], known: set[fx.Node]) -> CastChecks:
    checks = CastChecks.of(plan, applied, frozenset(nodes))
    makers = {checks.launch(launch) for launch in plan.launches}
    shards = {g.gather.source for g in plan.gathers if g.reason is None}
    for cast in casts(graph):
        of_shard = any(_behind_reshape(m) in shards for m in cast.matrices)
        if cast.node not in makers and cast.node not in known and not of_shard:
            raise InvariantError(f"{cast.node.name} quantizes, the plan has no such cast")
    _check_made_once(plan)
    return checks


def _check_made_once(plan: Plan) -> None:
    """No copy is made twice."""
    seen: set[Copy] = set()
    for copy in (copy for launch in plan.launches for cast in launch.casts for copy in cast.copies):
        if copy in seen:
            raise InvariantError(f"the plan makes {'columnwise' if copy.columnwise else 'rowwise'} {copy.name} twice")
        seen.add(copy)


def _check_values(graph: fx.Graph, known: set[fx.Node]) -> None:
    """Every inserted node has the shapes, strides, dtypes and devices that its operation gives it."""
    mode = Cursor.start(graph).fake_mode
    made_of: dict[Any, Any] = {}
    """Operation and forms of its arguments -> what it gives: layers repeat each other."""
    for node in graph.nodes:
        if node in known or node.op != "call_function":
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        said, made = node.meta.get("val"), None
        if node.target is operator.getitem and said is args[0][args[1]]:
            continue
        key = (node.target, _form(args), _form(kwargs))
        is_static = _is_hashable(key)
        if is_static and key in made_of:
            made = made_of[key]
        else:
            try:
                with mode, torch.no_grad():
                    made = node.target(*args, **kwargs)
            except Exception as error:
                raise InvariantError(f"{node.name} cannot run on its arguments: {error}") from error
        if is_static:
            made_of[key] = made
        if not _is_like(said, made):
            raise InvariantError(f"{node.name} gives {_described(made)}, the graph says {_described(said)}")


def _form(value: Any) -> Any:
    """What decides the shape of a result that an operation makes of a value."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, tuple(value.shape), value.stride(), value.storage_offset()
    if isinstance(value, dict):
        return tuple((name, _form(item)) for name, item in value.items())
    return tuple(map(_form, value)) if isinstance(value, (list, tuple)) else (type(value), value)


def _is_hashable(key: Any) -> bool:
    """False where a size is symbolic."""
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _is_like(said: Any, made: Any) -> bool:
    if isinstance(said, (list, tuple)) and isinstance(made, (list, tuple)):
        return len(said) == len(made) and all(map(_is_like, said, made))
    if not isinstance(said, torch.Tensor) or not isinstance(made, torch.Tensor):
        return type(said) is type(made)
    is_alike = said.dtype == made.dtype and said.device == made.device and same_shape(said.shape, made.shape)
    return is_alike and same_shape(said.stride(), made.stride())


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_described, value))})"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} {list(value.shape)} {list(value.stride())} on {value.device}"


def _behind_reshape(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0] if node.target is aten.reshape.default else node
