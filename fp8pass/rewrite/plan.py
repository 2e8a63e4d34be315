"""Plan: everything that the rewrite of a graph does, as data. Reads only.

`make_plan` decides the GEMMs: sites x rules x recipes x hardware -> FP8 or a typed reason. Other modules add to the plan:
`speedup.py` (estimates), `weights.py` (copies kept between calls), `gathers.py` (what travels in FP8) and `launches.py` (what
backward recomputes, the casts with their places and sources, launches, and what each GEMM adds and cuts off).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from fp8pass.cost import Device, Estimate
from fp8pass.errors import Reason, ReasonKind, RecipeError
from fp8pass.graph.gathers import Gather, is_gathered
from fp8pass.graph.gemms import (
    NO_FAST_PATH,
    GemmSite,
    Sharded,
    addend_of,
    has_group_bias,
    is_fast_path,
    name_tensors,
    operands_of,
)
from fp8pass.graph.origin import TensorName
from fp8pass.graph.values import MatrixValue, Operand, by_key, same_size, value_of
from fp8pass.inputs import USUAL, Measured
from fp8pass.options import CompileOptions
from fp8pass.recipes import Recipe
from fp8pass.recipes.quantization import Quantization
from fp8pass.rules import Rules
from fp8pass.schemes import scheme_of
from fp8pass.schemes.copies import Cast, Copy, FromInput, Layout, QuantizedTensor
from fp8pass.weights.cache import WeightTensor
from lowering import hardware
from lowering.formats import HIGH_PRECISION_DTYPES, pad_to_alignment
from lowering.paths import GemmPath


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the rewrite of one graph."""

    trains: bool  # The graph has a backward: others save nothing.
    contiguous_outputs: bool
    """Every result cut from a padded N is copied, for backends that take the strides of tracing for granted; otherwise those
    that the graph returns."""
    given: CompileOptions = dataclasses.field(default_factory=CompileOptions)  # The user's.
    watch: Measured | None = None  # The statistics that the graph measures; None: nothing.
    variants: frozenset[str] = USUAL  # Peculiarities of the calls that the graph is for: NOTE [variants] in `fp8pass.inputs`.
    device: Device | None = None  # Whose constants estimates are made with; None: those of the device that a GEMM is on.
    in_training: bool = False
    """The graph is a part of a model that trains, perhaps a frozen one: inference records no amax."""
    may_ask: bool = False  # The graph may be compiled again with inputs for cached copies: NOTE [two attempts] in `weights.py`.

    @property
    def records(self) -> bool:
        """True if calls of the graph record amaxes."""
        return self.trains or self.in_training


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A GEMM that runs in FP8."""

    site: GemmSite
    recipe: Recipe
    copies: tuple[Copy, Copy]  # The copies of its operands.
    reason: ClassVar[None] = None
    dequantized: ClassVar[tuple[tuple[int, Copy], ...]] = ()


@dataclasses.dataclass(frozen=True)
class HighPrecision:
    """A GEMM that is in high precision."""

    site: GemmSite
    recipe: Recipe | None  # None where a rule names none.
    reason: Reason
    dequantized: tuple[tuple[int, Copy], ...] = ()  # Operands, 0 or 1, read from FP8 copies of the forward GEMM.
    copies: ClassVar[tuple[()]] = ()

    @property
    def has_no_recipe(self) -> bool:
        """True if nothing but `recipe=None` keeps it in high precision."""
        return self.recipe is None and self.reason.kind is ReasonKind.RECIPE


Decision = Rewritten | HighPrecision


@dataclasses.dataclass(frozen=True)
class Gathered:
    """An all-gather whose result is quantized, and whether FP8 travels instead."""

    gather: Gather
    tensors: tuple[QuantizedTensor, ...]
    bytes_per_element: float  # Bytes that FP8 copies and their scales take per element of the tensor.
    reader: GemmSite  # The first GEMM that reads the gathered tensor.
    reason: Reason | None  # Why high precision travels; None if FP8 does.
    moves: tuple[tuple[Any, ...], ...]  # The moves that lead from the gather to each of the tensors, as in `meaning.py`.


@dataclasses.dataclass(frozen=True)
class KeptWeight:
    """A weight whose copies may be kept between calls, and whether they are."""

    tensor: QuantizedTensor
    layouts: tuple[Layout, ...]  # The layouts of its copies, rowwise first.
    kept: WeightTensor | Reason  # The copies that are cached, or why the weight is cast at each call.
    sharded: Sharded | None = None  # The gather of FSDP2: then `kept` is gathered in FP8, and lasts as long as the Parameter.
    bytes_per_element: float = 1.0  # Bytes per element that then travel, with the scales.
    is_static: bool = True  # The copies stay where they are from call to call: those of a weight that the graph trains do not.
    turned: tuple[Copy, ...] = ()  # Copies that the graph makes of the bytes of the one that is kept.


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The way of the product of two FP8 copies to the result of the GEMM whose place it takes."""

    out_dtype: torch.dtype
    fast_accum: bool  # The GEMM may accumulate in the tensor cores' shorter accumulator.
    bias: fx.Node | None  # A vector [N] that the GEMM adds before the one rounding.
    addend: fx.Node | None  # Anything else, which is added to the result.
    cuts_rows: Literal["operand", "result", "none"]
    """The place where rows of padding are cut off: the first operand's copy, if its scale fits any rows, or of the result."""
    cuts_columns: bool  # Columns of padding are cut off the result. A bias is padded as they are.


Launch = tuple[Cast, ...]  # Casts that are made by one operation, before the GEMM that needs the first of them.


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that is done to one graph."""

    decisions: tuple[Decision, ...]
    names: Mapping[MatrixValue, TensorName] = dataclasses.field(default_factory=dict)  # Of tensors, quantized or not.
    aliases: tuple[tuple[TensorName, TensorName], ...] = ()  # (another name, the name) of shared tensors.
    gathers: tuple[Gathered, ...] = ()  # Every all-gather that feeds FP8 GEMMs, in graph order.
    weights: tuple[KeptWeight, ...] = ()  # Every weight whose copies may be kept between calls.
    fused: Mapping[QuantizedTensor, tuple[QuantizedTensor, ...]] = dataclasses.field(default_factory=dict)
    """Weight -> those that have one scale together, itself among them, of weights that share one."""
    kept: Mapping[Copy, FromInput | Copy] = dataclasses.field(default_factory=dict)
    """Copies that inputs of the graph hold or that are transposed out of one, in backward where only backward reads them."""
    recomputed: Mapping[fx.Node, frozenset[fx.Node]] = dataclasses.field(default_factory=dict)
    """Node that holds a value whose backward-only copies are made in backward -> the nodes that are computed again for it."""
    recomputed_weights: frozenset[QuantizedTensor] = frozenset()  # Weights whose backward-only copies backward makes.
    estimates: Mapping[fx.Node, Estimate] = dataclasses.field(default_factory=dict)  # GEMM -> seconds in bfloat16 and planned.
    paths: Mapping[fx.Node, GemmPath] = dataclasses.field(default_factory=dict)
    """Rewritten GEMM -> what computes it on the device that the estimates are for."""
    launches: tuple[Launch, ...] = ()  # All casts, in the order in which they are needed.
    epilogues: Mapping[fx.Node, Epilogue] = dataclasses.field(default_factory=dict)  # Rewritten GEMM -> what follows it.

    @functools.cached_property
    def rewritten(self) -> list[Rewritten]:
        """Decisions for FP8, in the order of the sites."""
        return [d for d in self.decisions if isinstance(d, Rewritten)]

    @functools.cached_property
    def recipes(self) -> list[Recipe]:
        """The recipes under which something is quantized."""
        return list(dict.fromkeys(c.recipe for d in self.rewritten for c in d.copies))

    def tensors_of(self, recipe: Recipe) -> list[QuantizedTensor]:
        """The tensors quantized under a recipe, in order of first use."""
        copies = (c for d in self.rewritten for c in d.copies)
        return list(dict.fromkeys(c.tensor for c in copies if c.recipe == recipe))

    def tensors_in_state(self, recipe: Recipe) -> list[QuantizedTensor]:
        """The tensors of a recipe whose scales come from the state, in their order there."""
        return [t for t in self.tensors_of(recipe) if t.quantization.has_state]

    def slot_names(self, recipe: Recipe) -> list[TensorName]:
        """Names of `tensors_in_state(recipe)`; a value in a second FP8 dtype has a history of its own."""
        taken: set[TensorName] = set()
        names = []
        for tensor in self.tensors_in_state(recipe):
            name = tensor.name
            if name in taken:
                name = dataclasses.replace(name, format=hardware.short(tensor.dtype))
            taken.add(name)
            names.append(name)
        return names

    @functools.cached_property
    def copies(self) -> dict[QuantizedTensor, list[Copy]]:
        """The copies that each tensor needs, rowwise first."""
        needed = by_key(dict.fromkeys(c for d in self.rewritten for c in d.copies), lambda copy: copy.tensor)
        return {tensor: sorted(copies, key=lambda c: c.columnwise) for tensor, copies in needed.items()}

    @functools.cached_property
    def layouts(self) -> dict[Copy, Layout]:
        """The layout of each copy: its outer dimension is padded if it is the N of a GEMM and not a multiple of 16.
        Weights that share a scale are made by one operation, which pads all or none."""
        padded = {d.copies[1] for d in self.rewritten if not _is_aligned(d.site.n)}
        tensors = {tensor for copy in padded for tensor in self.fused.get(copy.tensor, ())}
        copies = (c for d in self.rewritten for c in d.copies)
        return {copy: Layout(copy.columnwise, copy in padded or copy.tensor in tensors) for copy in copies}


def make_plan(
    sites: list[GemmSite], rules: Rules, state_device: torch.device | None, selected: Mapping[fx.Node, Reason] | None = None
) -> Plan:
    """Decide every GEMM of a graph whose state of delayed scaling, if it has one, is on `state_device`. selected: the GEMMs
    that are in high precision unless a rule matches them, with the reason."""
    names, aliases = name_tensors(sites)
    decisions: dict[fx.Node, Decision] = {}
    for site in sites:  # the forward's first
        decision = _decide(site, rules, names, state_device, selected or {})
        forward = None if site.forward is None else decisions.get(site.forward)
        overrides = decision.recipe is not None and decision.recipe.backward_override == "dequantized"
        if isinstance(decision, HighPrecision) and isinstance(forward, Rewritten) and overrides and site.form is None:
            decision = dataclasses.replace(decision, dequantized=_dequantized(site, forward))
        decisions[site.node] = decision
    return Plan(tuple(decisions.values()), names, aliases)


def _dequantized(site: GemmSite, forward: Rewritten) -> tuple[tuple[int, Copy], ...]:
    """The operands of a backward GEMM that its forward GEMM read in FP8."""
    copies = {copy.value: copy for copy in forward.copies}
    return tuple((i, copies[o.value]) for i, o in enumerate(site.operands) if o.kind != "grad_output" and o.value in copies)


def _is_aligned(size: object) -> bool:
    return isinstance(size, int) and pad_to_alignment(size) == size


def _decide(
    site: GemmSite,
    rules: Rules,
    names: Mapping[MatrixValue, TensorName],
    state_device: torch.device | None,
    selected: Mapping[fx.Node, Reason],
) -> Decision:
    rule = rules.find(site.module, site.role)
    if rule is None:
        recipe, choice = rules.default, selected.get(site.node)
    elif rule.recipe is None:
        return HighPrecision(site, None, Reason(ReasonKind.RULE, f"{rule.pattern!r} keeps high precision"))
    else:
        recipe, choice = rule.recipe, None
    reason = _obstacle(site) or choice or _grouped_obstacle(site, recipe)
    if not recipe.has_gemms:
        reason = reason or recipe.obstacle(site)
    quantizations = () if reason else tuple(_quantization(o, site.role, recipe) for o in site.operands)
    for quantization in quantizations:
        reason = reason or scheme_of(quantization).obstacle(site, quantizations)
    reason = reason or recipe.obstacle(site) or _format_obstacle(site, quantizations)
    if reason is None and any(q.has_state for q in quantizations):
        reason = _device_obstacle(site, state_device)
    if reason is not None:
        return HighPrecision(site, recipe if recipe.has_gemms else None, reason)
    a, b = (
        Copy(operand.value, operand.transposed != is_second, quantization, recipe, names[operand.value])
        for operand, is_second, quantization in zip(site.operands, (False, True), quantizations, strict=True)
    )
    return Rewritten(site, recipe, (a, b))


def _quantization(operand: Operand, role: str, recipe: Recipe) -> Quantization:
    found = recipe.quantization(operand, role)
    if found.has_state and not recipe.keeps_state:
        raise RecipeError(
            f"{type(recipe).__name__}.quantization() takes a scale from the state, and the recipe keeps none; derive it from"
            f" DelayedScaling, or use another `scale_from`"
        )
    return found


def read_dtype(copy: Copy, site: GemmSite) -> torch.dtype:
    """The dtype in which a cast before a GEMM reads the value. What is in memory in a wider one is read as it is there."""
    root, gemm = copy.value.root, value_of(site.node).dtype
    is_in_memory = root.op == "placeholder" or is_gathered(root)
    reads_gemm_dtype = scheme_of(copy.quantization).reads_gemm_dtype or copy.quantization.inverse is not None  # as engines do
    is_rounded = reads_gemm_dtype and not is_in_memory
    return gemm if is_rounded and copy.value.dtype.itemsize > gemm.itemsize else copy.value.dtype


def _obstacle(site: GemmSite) -> Reason | None:
    if site.within:
        return Reason(ReasonKind.UNSUPPORTED_OP, f"{site.op} in a branch or body of {site.within}, which is not rewritten")
    if is_fast_path(site.node):
        why = f"all GEMMs of the layer in one operation, torch's fast path for inference. To run them in FP8: {NO_FAST_PATH}"
        return Reason(ReasonKind.UNSUPPORTED_OP, f"{site.op}: {why}")
    if not site.operands:
        why = "torch has no batched FP8 GEMM" if site.is_batched else "this operation has no FP8 counterpart"
        return Reason(ReasonKind.UNSUPPORTED_OP, f"{site.op}: {why}")
    if has_group_bias(site.node):
        return Reason(ReasonKind.UNSUPPORTED_OP, f"{site.op} with a bias; add it to the result")
    scaled = {k: v for k, v in site.node.kwargs.items() if k in ("alpha", "beta") and v != 1}
    if scaled:
        return Reason(ReasonKind.UNSUPPORTED_OP, f"{site.op} with {', '.join(f'{k}={v}' for k, v in scaled.items())}")
    dtypes = [o.value.dtype for o in site.operands] + [value_of(site.node).dtype]
    wrong = next((d for d in dtypes if d not in HIGH_PRECISION_DTYPES), None)
    if wrong is not None:
        return Reason(ReasonKind.DTYPE, f"{hardware.short(wrong)}; only float32, bfloat16 and float16 can become FP8")
    read = [value_of(n).dtype for n in (*operands_of(site.node), addend_of(site.node)) if n is not None]
    if len(set(read)) > 1:  # tracing lets it pass, and the GEMM itself raises: that error is the user's to see
        names = " and ".join(dict.fromkeys(map(hardware.short, read)))
        return Reason(ReasonKind.DTYPE, f"operands of {names}, which torch does not multiply; cast one of them")
    empty = next((n for n, s in (("M", site.m), ("N", site.n), ("K", site.k)) if isinstance(s, int) and s == 0), None)
    return Reason(ReasonKind.SHAPE, f"{empty} is 0, so there is nothing to multiply") if empty else None


def _grouped_obstacle(site: GemmSite, recipe: Recipe) -> Reason | None:
    if site.form is None:
        return None
    if not isinstance(site.groups, int):
        return Reason(ReasonKind.SHAPE, f"the number of groups, {site.groups}, is dynamic")
    if site.role != "output" and recipe.backward_override == "dequantized":
        detail = "backward_override='dequantized' keeps high precision; a grouped GEMM reads its original operands"
        return Reason(ReasonKind.RECIPE, detail)
    return None


def _device_obstacle(site: GemmSite, state_device: torch.device | None) -> Reason | None:
    device = value_of(site.node).device
    if device == state_device:
        return None
    return Reason(ReasonKind.DEVICE, f"on {device}; the amax histories of this graph are on {state_device}")


def _format_obstacle(site: GemmSite, quantizations: tuple[Quantization, ...]) -> Reason | None:
    """The hardware's refusal of the formats; sizes and biases are made to fit."""
    a, b = quantizations
    gemm = hardware.Gemm(a.dtype, b.dtype, a.granularity, b.granularity, is_grouped=site.form is not None)
    refusal = hardware.refusal(gemm, None)
    return Reason(ReasonKind.OPERAND_FORMATS, refusal) if refusal else None


# -- Weights that share a scale because inference engines fuse their projections: q, k and v; gate and up. Reads only.
#
# They are found by structure and by name: forward GEMMs of one graph that read one input with weights of sibling modules, whose
# names engines fuse. k and v of cross-attention, which read another input than q, are a pair. A weight that a model fuses
# itself is one tensor with one scale anyway.


#: Names of modules that engines fuse. Source: `packed_modules_mapping` of vLLM's models, and the names that torchtitan and Meta
#: give to the same weights.
NAMES: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        "q_proj k_proj v_proj",
        "query key value",
        "wq wk wv",
        "gate_proj up_proj",
        "w1 w3",
        "q_a_proj kv_a_proj_with_mqa",
    )
)
_GROUP_OF = {name: group for group in NAMES for name in group}


def share_scales(plan: Plan) -> Plan:
    """The plan with the weights that have one scale together."""
    found: dict[Hashable, dict[QuantizedTensor, None]] = {}
    copies = plan.copies
    for decision in plan.rewritten:
        if decision.site.role == "output":
            for weight, other in (decision.copies[::-1], decision.copies):
                place = place_among_siblings(decision.site.module)
                if weight.quantization.fused and place is not None and len(copies[weight.tensor]) == 1:
                    key = (place[0], other.value, weight.columnwise, weight.recipe, weight.quantization, _form(weight))
                    found.setdefault(key, {})[weight.tensor] = None
    groups = [tuple(tensors) for tensors in _joined(found.values()) if len(tensors) > 1]
    return dataclasses.replace(plan, fused={tensor: group for group in groups for tensor in group})


Siblings = tuple[str, str, frozenset[str]]
"""Modules that engines fuse: their path before and behind the name, such as peft's `base_layer`, and the names of all."""


def place_among_siblings(module: str) -> tuple[Siblings, str] | None:
    """The place of a module among those that engines fuse, and its own name; None for others."""
    parts = module.split(".")
    last = next((i for i in reversed(range(len(parts))) if parts[i] in _GROUP_OF), None)
    if last is None:
        return None
    before, behind = parts[:last], parts[last + 1 :]
    return ("".join(f"{part}." for part in before), "".join(f".{part}" for part in behind), _GROUP_OF[parts[last]]), parts[last]


def _form(weight: Copy) -> Hashable:
    """The properties that weights have in common if one operation measures them."""
    return weight.value.dtype, value_of(weight.value.root).device


def _joined(groups: Iterable[Iterable[QuantizedTensor]]) -> list[dict[QuantizedTensor, None]]:
    """Groups that have no weight in common: one that modules share is in the groups of all of them."""
    joined: list[dict[QuantizedTensor, None]] = []
    for group in groups:
        merged = dict.fromkeys(group)
        for other in [j for j in joined if not j.keys().isdisjoint(merged)]:
            merged = other | merged
            joined.remove(other)
        joined.append(merged)
    return joined


# -- Plan what becomes of a product: what the GEMM adds, and where padding is cut off. Reads only.
#
# The copies of a GEMM are larger than its operands where their outer dimension is padded to a multiple of 16: that of b always,
# that of a where the copy is the b of another GEMM or was moved out of a rowwise one.


def epilogue_of(decision: Rewritten, layouts: Mapping[Copy, Layout]) -> Epilogue:
    """The epilogue of a GEMM that is rewritten."""
    (a, b), site = decision.copies, decision.site
    has_spare_rows = _pads_outer(a, layouts[a]) and not same_size(pad_to_alignment(site.m), site.m)
    cuts_columns = _pads_outer(b, layouts[b]) and not same_size(pad_to_alignment(site.n), site.n)
    cuts_rows: Literal["operand", "result", "none"] = "none"
    if has_spare_rows:
        cuts_rows = "operand" if site.form is None and scheme_of(a.quantization).has_one_scale else "result"
    addend = addend_of(site.node)
    is_bias = addend is not None and site.form is None and _is_bias(addend, value_of(site.node).shape[-1], cuts_columns)
    bias, addend = (addend, None) if is_bias else (None, addend)
    has_blocks = any(copy.quantization.block is not None for copy in decision.copies)
    fast_accum = decision.recipe.fast_accum(site.role) and not has_blocks
    return Epilogue(value_of(site.node).dtype, fast_accum, bias, addend, cuts_rows, cuts_columns)


def _pads_outer(copy: Copy, layout: Layout) -> bool:
    """Tell whether the outer dimension of a copy is padded. Columns that are moved out of a rowwise copy of rows in groups are
    as many as that has, where they are the inner dimension, which is always padded."""
    is_moved = copy.columnwise and copy.value.groups is not None and scheme_of(copy.quantization).has_one_scale
    return layout.pads_outer or is_moved


def _is_bias(addend: fx.Node, columns: Any, cuts_columns: bool) -> bool:
    """A vector [N] fits the epilogue of an FP8 GEMM of two matrices, padded as N is, if that is a number."""
    is_vector = value_of(addend).dim() == 1 and same_size(value_of(addend).shape[0], columns)
    return is_vector and (not cuts_columns or isinstance(columns, int))
