"""Plan the kept copies: which weights a graph receives as FP8 copies instead of casting them at each call. Reads only.

`weight_copies="cache"` keeps those of all weights, on the user's word that they change as it can be told. Without it nothing is
kept that anybody else can write: weights are cast in the graph, but for frozen ones that are to be released, whose copies are
made anew at each call until they are.
NOTE [two attempts] Inputs of a graph exist before it is traced, and which copies its GEMMs read is known afterwards. So a first
attempt ends with `InputsMissing`, and the graph is traced again with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping
from typing import Any

from torch import fx

from fp8pass.errors import Reason, ReasonKind
from fp8pass.graph.cursor import is_recomputed
from fp8pass.graph.gathers import is_gathered
from fp8pass.graph.gemms import GraphContext, GraphInput, Sharded
from fp8pass.graph.origin import TensorName, input_index
from fp8pass.graph.values import operation_name, value_of
from fp8pass.inputs import ExtraInput, InputsMissing
from fp8pass.rewrite.gathers import high_precision_readers, read_in_high_precision
from fp8pass.rewrite.plan import KeptWeight, Options, Plan
from fp8pass.schemes import scheme_of
from fp8pass.schemes.copies import ROWWISE, Copy, FromInput, QuantizedTensor
from fp8pass.schemes.eager import CastKind, example
from fp8pass.weights.cache import WeightKey, WeightTensor


def plan_weights(plan: Plan, context: GraphContext, inputs: Collection[Hashable], options: Options) -> Plan:
    """The plan with a decision for every quantized weight whose copies may be cached. inputs: keys of the extra inputs."""
    asked, is_possible = options.given, options.may_ask or any(isinstance(key, WeightKey) for key in inputs)
    if not (asked.weight_copies == "cache" or asked.release_frozen or asked.fsdp_gather) or not is_possible:
        return plan
    slots = {
        t: n for recipe in plan.recipes for t, n in zip(plan.tensors_in_state(recipe), plan.slot_names(recipe), strict=True)
    }
    layouts = plan.layouts
    found = []
    for tensor, copies in plan.copies.items():
        root = tensor.value.root
        if tensor.name.kind != "weight" or is_gathered(root) or tensor.value.groups is not None:
            continue
        found_at = input_index(root) if root.op == "placeholder" else None
        index = len(context.inputs) if found_at is None else found_at
        given = context.inputs[index] if index < len(context.inputs) else None
        name = slots.get(tensor, tensor.name)
        if given is not None and given.sharded is not None:
            found.append(_gathered(plan, tensor, given.sharded, index, name, context))
            continue
        is_released = asked.release_frozen and given is not None and not given.requires_grad and not given.is_buffer
        if not is_released and asked.weight_copies != "cache":
            continue
        own = WeightTensor(index, tensor.value.shape, tensor.recipe, tensor.quantization, name)
        kept = _obstacle(root, given) or _size_obstacle(own.shape) or own
        is_static = given is not None and not (options.trains and given.requires_grad)
        turned = _turned(plan, tensor, copies) if is_released else ()
        held = tuple(layouts[c] for c in copies if c not in turned)
        found.append(KeptWeight(tensor, held, kept, is_static=is_static, turned=turned))
    return dataclasses.replace(plan, weights=tuple(_shared(plan, found)))


def _shared(plan: Plan, weights: list[KeptWeight]) -> list[KeptWeight]:
    """The weights, where those that have one scale together are cached together, or cast together."""
    indices = {w.tensor: w.kept.index for w in weights if isinstance(w.kept, WeightTensor) and w.sharded is None}
    found = []
    for weight in weights:
        group = plan.fused.get(weight.tensor, ())
        if isinstance(weight.kept, WeightTensor) and group:
            if all(tensor in indices for tensor in group):
                kept = dataclasses.replace(weight.kept, fused=tuple(indices[tensor] for tensor in group))
                weight = dataclasses.replace(weight, kept=kept)
            else:
                reason = Reason(ReasonKind.SCALES, "it shares its scale with a weight that is cast at each call")
                weight = dataclasses.replace(weight, kept=reason)
        found.append(weight)
    return found


def _turned(plan: Plan, tensor: QuantizedTensor, copies: list[Copy]) -> tuple[Copy, ...]:
    """The copies of a frozen weight that are made of the bytes of the one that its first GEMM, a forward one, reads."""
    if len(copies) != 2 or not scheme_of(tensor.quantization).can_transpose(tensor.quantization):
        return ()
    first = next(c for d in plan.rewritten for c in d.copies if c.tensor == tensor)
    return tuple(c for c in copies if c != first)


def _gathered(
    plan: Plan, tensor: QuantizedTensor, sharded: Sharded, index: int, name: TensorName, context: GraphContext
) -> KeptWeight:
    """A weight that FSDP2 gathers. With one scale, graphs make the columnwise copy of the rowwise one, which travels."""
    layouts, copies = plan.layouts, plan.copies
    of_root = [t for t in copies if t.value.root is tensor.value.root]
    scheme = scheme_of(tensor.quantization)
    reason = sharded.obstacle
    if reason is None and tuple(value_of(tensor.value.root).shape) != tensor.value.shape:
        reason = Reason(ReasonKind.SHAPE, f"GEMMs read it reshaped to {list(tensor.value.shape)}")
    is_even = tensor.value.rows == sharded.rows * sharded.num_ranks
    obstacle = None if scheme.has_one_copy(tensor.quantization) else _each_obstacle(plan, tensor)
    sent = obstacle or scheme.sharded(tensor.quantization, sharded.rows, sharded.elements, is_even)
    if reason is None and isinstance(sent, Reason):
        reason = sent
    if reason is None and len(of_root) > 1:
        reason = Reason(ReasonKind.BYTES, f"GEMMs read it with {len(of_root)} different scales")
    if reason is None and scheme.has_one_scale and any(layouts[c].pads_outer and not c.columnwise for c in copies[tensor]):
        reason = Reason(ReasonKind.SHAPE, f"its {tensor.value.rows} rows are not a multiple of 16")
    if reason is None:
        reason = scheme.shard_obstacle(tensor.quantization, context.shares_scales(sharded.ranks))
    kept = WeightTensor(index, tensor.value.shape, tensor.recipe, tensor.quantization, name, is_gathered=True)
    inputs = (ROWWISE,) if scheme.has_one_scale else tuple(layouts[c] for c in copies[tensor])
    share = 1.0 if isinstance(sent, Reason) else float(sent)
    return KeptWeight(tensor, inputs, reason or kept, sharded, share, is_static=False)


def _each_obstacle(plan: Plan, tensor: QuantizedTensor) -> Reason | None:
    """Why a weight cannot have one gather for each copy: the rowwise one in the forward, the columnwise in the backward."""
    for decision in plan.decisions:
        site = decision.site
        read = [c for c in (*decision.copies, *(c for _, c in decision.dequantized)) if c.tensor == tensor]
        for copy in read:
            if copy.columnwise != site.is_backward:
                detail = f"the {site.role} GEMM reads the {'columnwise' if copy.columnwise else 'rowwise'} copy"
                return Reason(ReasonKind.READERS, f"{detail}, which its gather does not send")
            if not site.is_backward and is_recomputed(site.node):
                return Reason(ReasonKind.READERS, "activation checkpointing reads the copy of the forward in the backward, too")
    return None


def refuse_readers(graph: fx.Graph, plan: Plan) -> Plan:
    """The plan without FP8 gathers of weights that anything reads in high precision."""
    roots = [w.tensor.value.root for w in plan.weights if w.sharded is not None and isinstance(w.kept, WeightTensor)]
    readers = high_precision_readers(graph, plan, roots) if roots else {}
    weights = [
        dataclasses.replace(w, kept=read_in_high_precision(readers[root]))
        if w.sharded is not None and isinstance(w.kept, WeightTensor) and (root := w.tensor.value.root) in readers
        else w
        for w in plan.weights
    ]
    return dataclasses.replace(plan, weights=tuple(weights))


def _obstacle(root: fx.Node, given: GraphInput | None) -> Reason | None:
    if root.op != "placeholder":
        return Reason(ReasonKind.DERIVED, f"{operation_name(root)} computes it from Parameters in each call")
    if given is None or not given.is_parameter:
        return Reason(ReasonKind.DERIVED, "an argument of the call, not a Parameter or buffer of a module")
    return given.not_kept


def _size_obstacle(shape: tuple[Any, ...]) -> Reason | None:
    if all(isinstance(size, int) for size in shape):
        return None
    return Reason(ReasonKind.SHAPE, f"its sizes {list(shape)} are dynamic")


def take_kept(plan: Plan, inputs: Mapping[Hashable, fx.Node], options: Options) -> Plan:
    """The plan with the inputs of the graph that hold the copies. A weight whose inputs are not there is cast in the graph.
    Raises InputsMissing where they can be asked for."""
    wanted = {w.tensor: inputs_of(w, w.kept, options.records) for w in plan.weights if isinstance(w.kept, WeightTensor)}
    missing = [given for needed in wanted.values() for given in needed if given.key not in inputs]
    if missing and options.may_ask:
        raise InputsMissing(inputs=tuple(given for needed in wanted.values() for given in needed))
    there = {t for t, needed in wanted.items() if all(given.key in inputs for given in needed)}
    sources: dict[Copy, FromInput | Copy] = {}
    for weight in plan.weights:
        if weight.tensor in there and isinstance(weight.kept, WeightTensor):
            held = [c for c in plan.copies[weight.tensor] if c not in weight.turned]
            sources |= _sources(plan, held, weight.kept, inputs)
            sources |= dict.fromkeys(weight.turned, held[0])
    return dataclasses.replace(plan, kept=sources)


def _sources(plan: Plan, copies: list[Copy], kept: WeightTensor, inputs: Mapping[Hashable, fx.Node]) -> dict[Copy, FromInput]:
    layouts = {copy: plan.layouts[copy] for copy in copies}
    if kept.is_gathered and scheme_of(kept.quantization).has_one_scale:
        layouts = {dataclasses.replace(copies[0], columnwise=False): ROWWISE}
    amax = inputs.get(WeightKey(kept, "amax", None))
    return {
        copy: FromInput(inputs[WeightKey(kept, "data", layout)], inputs[WeightKey(kept, "scale_inv", layout)], amax)
        for copy, layout in layouts.items()
    }


def inputs_of(weight: KeptWeight, kept: WeightTensor, with_amax: bool) -> list[ExtraInput]:
    """The inputs that a graph needs for the copies of a weight; with_amax: whether it records the amax of one with state."""
    value = value_of(weight.tensor.value.root)
    made = example(CastKind(kept.recipe, kept.quantization, weight.layouts, value.dtype, value.device), kept.shape)
    parts: list[tuple[WeightKey, Any]] = []
    for layout, data, scale_inv in zip(weight.layouts, made.data, made.scale_inv, strict=True):
        parts += [(WeightKey(kept, "data", layout), data), (WeightKey(kept, "scale_inv", layout), scale_inv)]
    if with_amax and made.amax is not None:
        parts.append((WeightKey(kept, "amax", None), made.amax))
    return [
        ExtraInput(key, _name(key), tuple(x.shape), x.dtype, tuple(x.stride()), is_static=weight.is_static) for key, x in parts
    ]


def _name(key: WeightKey) -> str:
    """The name of a placeholder: "fp8_weight_3_data", "fp8_weight_3_data_t" for the columnwise copy."""
    turned = "_t" if key.layout is not None and key.layout.columnwise else ""
    return f"fp8_weight_{key.tensor.index}_{key.part}{turned}"
