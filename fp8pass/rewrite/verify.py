"""Verify: what must hold in every rewritten graph. A violation is our defect and names the node."""

from __future__ import annotations

import torch
from torch import fx

from fp8pass.errors import InvariantError
from fp8pass.graph.sites import is_matrix_gemm
from fp8pass.graph.values import value_of
from fp8pass.rewrite.plan import Plan
from lowering.formats import Granularity
from lowering.hardware import Gemm, refusal

ops = torch.ops.lowering
_CASTS = (ops.cast, ops.cast_amax, ops.cast_transpose, ops.cast_transpose_amax)


def scaled_gemms(graph: fx.Graph) -> list[fx.Node]:
    """The FP8 GEMMs of a graph."""
    return [n for n in graph.nodes if n.target in (ops.scaled_mm.default, ops.scaled_mm_blockwise.default)]


def verify(graph: fx.Graph, plan: Plan, num_before: int) -> None:
    """Raise InvariantError if the graph, which held `num_before` FP8 GEMMs, is not what plan and hardware say."""
    graph.lint()
    gemms = scaled_gemms(graph)
    if len(gemms) != num_before + len(plan.rewritten):
        raise InvariantError(
            f"{len(plan.rewritten)} GEMMs were planned for FP8, {len(gemms) - num_before} were added to the graph"
        )
    kept = sum(d.reason is not None and is_matrix_gemm(d.site.node) for d in plan.decisions)
    left = sum(is_matrix_gemm(n) for n in graph.nodes)
    if left > kept:
        raise InvariantError(f"{left} GEMMs are in high precision, the plan keeps {kept}")
    for node in gemms:
        _check_gemm(node)
    _check_quantized_once(graph)


def _check_gemm(node: fx.Node) -> None:
    a, b = (value_of(n) for n in node.args[:2])
    scaling = {name: Granularity(value) for name, value in node.kwargs.items() if name.startswith("granularity")}
    reason = refusal(Gemm(a.dtype, b.dtype, **scaling, n=b.shape[1], k=a.shape[1]), None)
    if reason is not None:
        raise InvariantError(f"{node.name}: operands are {a.dtype} and {b.dtype}: {reason}")
    if a.stride(1) != 1 or b.stride(0) != 1:
        raise InvariantError(f"{node.name}: a must be row-major and b column-major, strides are {a.stride()}, {b.stride()}")


def _check_quantized_once(graph: fx.Graph) -> None:
    """Each layout of a tensor is made once per scale and format."""
    seen: dict[tuple[object, ...], fx.Node] = {}
    for node in graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if packet not in _CASTS:
            continue
        columnwise = node.kwargs.get("columnwise", False)
        layouts = (columnwise,) if packet in (ops.cast, ops.cast_amax) else (False, True)
        for layout in layouts:
            key = (*node.args[:3], layout)
            if key in seen:
                raise InvariantError(f"{node.name} quantizes {node.args[0]} again, after {seen[key].name}")
            seen[key] = node
