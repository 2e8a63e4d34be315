"""Estimate: the expected speed-up of every GEMM of a plan over bfloat16, by the cost model. Reads only."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fp8pass import cost
from fp8pass.errors import Reason, ReasonKind
from fp8pass.graph.gathers import is_gathered
from fp8pass.graph.gemms import is_attention, is_matmul
from fp8pass.graph.values import value_of
from fp8pass.rewrite.plan import Decision, HighPrecision, KeptWeight, Plan, Rewritten, read_dtype
from fp8pass.schemes import scheme_of
from fp8pass.schemes.copies import QuantizedTensor
from fp8pass.weights.cache import WeightTensor
from lowering import hardware
from lowering.formats import Granularity
from lowering.paths import GemmPath, path_of


def estimate(plan: Plan, device: cost.Device | None) -> Plan:
    """The plan with an estimate for every GEMM whose sizes are known. A cast counts once over the GEMMs that read it, and not
    at all if its copies are kept from step to step. device: whose constants are used; None: those of the device that each GEMM
    is on."""
    casts = _casts(plan)
    paths = {d.site.node: path for d in plan.rewritten if (path := _path(d, device))}
    found = {d.site.node: expected for d in plan.decisions if (expected := _of(d, casts, device, paths))}
    return dataclasses.replace(plan, estimates=found, paths=paths)


def slow(plan: Plan, min_speedup: float, named: set[fx.Node]) -> dict[fx.Node, Reason]:
    """The GEMMs of an estimated plan that are expected to gain less than `min_speedup`, but for those that a rule named."""
    found = {}
    for decision in plan.rewritten:
        node = decision.site.node
        expected = plan.estimates.get(node)
        if expected is not None and expected.speedup < min_speedup and node not in named:
            detail = (
                f"expected speed-up {expected.speedup:.2f} is below min_speedup={min_speedup}; a rule that names it decides"
            )
            found[node] = Reason(ReasonKind.SLOW, detail)
    return found


def device_of(plan: Plan) -> cost.Device:
    """The device whose constants the estimates of a plan are made with: that of its GEMMs."""
    devices = {value_of(d.site.node).device for d in plan.decisions if isinstance(value_of(d.site.node), torch.Tensor)}
    return cost.device_for(next(iter(devices), None))


def _of(
    decision: Decision,
    casts: Mapping[QuantizedTensor, Sequence[cost.CastShape]],
    device: cost.Device | None,
    paths: Mapping[fx.Node, GemmPath],
) -> cost.Estimate | None:
    site = decision.site
    value = site.node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not site.operands:
        return None
    device = device or cost.device_for(value.device)
    # Of a grouped GEMM the rows of all products together, and the mean K.
    out_bytes = value.element_size()
    m, k = site.m, site.k
    if site.form in ("batched", "sums"):
        m = site.groups * m
    if site.form == "sums" and isinstance(k, int):
        k = -(-k // site.groups)
    gemm = cost.GemmShape(m=m, n=site.n, k=k, groups=site.groups, out_bytes=out_bytes)
    if isinstance(decision, HighPrecision):
        in_groups = GemmPath.GROUPS if site.form in ("rows", "sums") else None
        seconds = cost.gemm_seconds(gemm, device, "bf16", path=in_groups)
        return None if seconds is None else cost.Estimate(seconds, seconds)
    granularity = Granularity.finest(c.quantization.granularity for c in decision.copies)
    reads = [cast for copy in decision.copies for cast in casts[copy.tensor]]
    fast_accum = decision.recipe.fast_accum(site.role)
    found = cost.estimate_gemm(gemm, reads, device, granularity, fast_accum=fast_accum, path=paths.get(site.node))
    bf16 = cost.gemm_seconds(gemm, device, "bf16") if site.form == "batched" else None  # torch.bmm, which is cuBLAS's
    return found if found is None or bf16 is None else dataclasses.replace(found, bf16_seconds=bf16)


def _path(decision: Rewritten, device: cost.Device | None) -> GemmPath | None:
    """The implementation of a GEMM on the device that estimates are for."""
    value = decision.site.node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    a, b = (copy.quantization for copy in decision.copies)
    is_grouped = decision.site.form is not None
    gemm = hardware.Gemm(a.dtype, b.dtype, a.granularity, b.granularity, value.dtype, is_grouped=is_grouped)
    platform = (device or cost.device_for(value.device)).platform
    return path_of(gemm, platform, fast_accum=decision.recipe.fast_accum(decision.site.role))


def _casts(plan: Plan) -> dict[QuantizedTensor, list[cost.CastShape]]:
    """The casts behind the copies of each tensor, in a step of one microbatch."""
    readers: Counter[QuantizedTensor] = Counter(t for d in plan.rewritten for t in {c.tensor for c in d.copies})
    in_bytes = {c.tensor: read_dtype(c, d.site).itemsize for d in reversed(plan.rewritten) for c in d.copies}
    kept = {weight.tensor: weight for weight in plan.weights if isinstance(weight.kept, WeightTensor)}
    found = {}
    for tensor, copies in plan.copies.items():
        scheme = scheme_of(tensor.quantization)
        cast = cost.CastShape(
            elements=tensor.value.num_elements,
            in_bytes=in_bytes[tensor],
            copies=len(copies),
            transposes=any(c.columnwise for c in copies),
            reads=scheme.num_reads,
            fused_with_producer=scheme.fuses_with_producer(tensor) and _is_made_by_fused_code(tensor.value.root),
            num_readers=readers[tensor],
        )
        found[tensor] = casts_of_kept(cast, kept[tensor]) if tensor in kept else [cast]
    return found


def casts_of_kept(cast: cost.CastShape, weight: KeptWeight) -> list[cost.CastShape]:
    """The casts that are left of a weight whose copies are kept: those of one that trains are made again in each step, those of
    a gathered one of each rank's shard. The graph transposes the others, which are FP8 bytes."""
    made = dataclasses.replace(cast, copies=len(weight.layouts), transposes=any(a.columnwise for a in weight.layouts))
    turned = dataclasses.replace(cast, in_bytes=1, copies=1, transposes=True, reads=1, fused_with_producer=False)
    casts = [turned] * (cast.copies - made.copies)
    if weight.sharded is not None:
        ranks = weight.sharded.num_ranks
        elements = -(-cast.elements // ranks) if isinstance(cast.elements, int) else cast.elements
        return [dataclasses.replace(made, elements=elements), *casts]
    return casts if weight.is_static else [made, *casts]


def _is_made_by_fused_code(root: fx.Node) -> bool:
    """Tell whether generated code makes a value, not an input of the graph, a GEMM, attention or a collective."""
    while root.op == "call_function" and not isinstance(root.target, torch._ops.OpOverload):
        root = root.all_input_nodes[0]
    return not (root.op != "call_function" or is_matmul(root) or is_attention(root) or is_gathered(root))
