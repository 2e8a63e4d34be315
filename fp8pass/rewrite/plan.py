"""Plan: sites x rules x the limits of FP8 tensor cores -> a decision or a typed reason, per GEMM. Pure."""

from __future__ import annotations

import dataclasses
import enum

import torch

from fp8pass.graph.names import TensorName
from fp8pass.graph.sites import GRAD_OUTPUT, GemmSite, TensorNames, name_tensors
from fp8pass.graph.values import MatrixValue, Operand, value_of
from fp8pass.recipes import DelayedScaling, Recipe
from fp8pass.rules import Rules
from lowering.formats import E5M2, HIGH_PRECISION_DTYPES, pad_to_alignment


class ReasonKind(enum.Enum):
    """Why a GEMM stays in high precision."""

    RULE = "rule"
    SHAPE = "shape"
    DTYPE = "dtype"
    DEVICE = "device"
    OPERAND_FORMATS = "operand formats"
    UNSUPPORTED_OP = "unsupported op"


@dataclasses.dataclass(frozen=True)
class Reason:
    """A typed reason with its particulars."""

    kind: ReasonKind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.detail}"


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A value quantized under one recipe into one FP8 dtype; blockwise also in one granularity."""

    value: MatrixValue
    dtype: torch.dtype
    recipe: Recipe
    block_dims: int
    """Dimensions of a block: 1 or 2 in blockwise scaling, 0 for one scale per tensor."""
    name: TensorName = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Copy:
    """One FP8 copy of a quantized tensor, contiguous along K of the GEMMs that read it."""

    tensor: QuantizedTensor
    columnwise: bool


@dataclasses.dataclass(frozen=True)
class Decision:
    """What happens to one GEMM: FP8 copies for both operands, or a reason."""

    site: GemmSite
    recipe: Recipe | None
    reason: Reason | None
    a: Copy | None = None
    b: Copy | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The decisions of one graph, and what they need."""

    decisions: tuple[Decision, ...]
    names: TensorNames
    padded: frozenset[Copy]
    """Copies whose outer dimension is padded with zeros, because it is the N of a GEMM."""

    @property
    def rewritten(self) -> list[Decision]:
        """Decisions for FP8, in graph order."""
        return [d for d in self.decisions if d.reason is None]

    def tensors_of(self, recipe: Recipe) -> list[QuantizedTensor]:
        """The tensors quantized under a recipe, in order of first use: their order in the state."""
        copies = (c for d in self.rewritten for c in (d.a, d.b) if c is not None)
        return list(dict.fromkeys(c.tensor for c in copies if c.tensor.recipe == recipe))

    def slot_names(self, recipe: Recipe) -> list[TensorName]:
        """Names of `tensors_of(recipe)` in the state; a value in a second FP8 dtype has a history of its own."""
        names: dict[TensorName, None] = {}
        for tensor in self.tensors_of(recipe):
            is_second = tensor.name in names
            names[dataclasses.replace(tensor.name, format=_short(tensor.dtype)) if is_second else tensor.name] = None
        return list(names)

    @property
    def copies(self) -> dict[QuantizedTensor, list[Copy]]:
        """Which copies each tensor needs."""
        needed: dict[QuantizedTensor, list[Copy]] = {}
        for decision in self.rewritten:
            for copy in (decision.a, decision.b):
                if copy is not None and copy not in needed.setdefault(copy.tensor, []):
                    needed[copy.tensor].append(copy)
        return needed


def make_plan(sites: list[GemmSite], rules: Rules, state_device: torch.device | None) -> Plan:
    """Decide every GEMM of a graph whose state of delayed scaling, if it has one, is on `state_device`."""
    names = name_tensors(sites)
    decisions = tuple(_decide(site, rules, names, state_device) for site in sites)
    padded = frozenset(d.b for d in decisions if d.b is not None and not _is_aligned(d.site.n))
    return Plan(decisions, names, padded)


def _is_aligned(size: object) -> bool:
    return isinstance(size, int) and pad_to_alignment(size) == size


def _decide(site: GemmSite, rules: Rules, names: TensorNames, state_device: torch.device | None) -> Decision:
    rule = rules.find(site.module, site.role)
    recipe = rules.default if rule is None else rule.recipe
    if recipe is None:
        assert rule is not None
        return Decision(site, None, Reason(ReasonKind.RULE, f"{rule.pattern!r} keeps high precision"))
    reason = _obstacle(site) or _format_obstacle(site, recipe)
    if reason is None and isinstance(recipe, DelayedScaling):
        reason = _device_obstacle(site, state_device)
    if reason is not None:
        return Decision(site, recipe, reason)
    assert site.a is not None
    assert site.b is not None
    a = Copy(_quantized(site.a, recipe, names), columnwise=site.a.transposed)
    b = Copy(_quantized(site.b, recipe, names), columnwise=not site.b.transposed)
    return Decision(site, recipe, None, a, b)


def _obstacle(site: GemmSite) -> Reason | None:
    if site.within:
        return Reason(ReasonKind.UNSUPPORTED_OP, f"{site.op} in a branch or body of {site.within}, which is not rewritten")
    if not site.operands:
        why = "torch has no batched FP8 GEMM" if site.is_batched else "no FP8 GEMM stands in for this operation"
        return Reason(ReasonKind.UNSUPPORTED_OP, f"{site.op}: {why}")
    scaled = {k: v for k, v in site.node.kwargs.items() if k in ("alpha", "beta") and v != 1}
    if scaled:
        return Reason(ReasonKind.UNSUPPORTED_OP, f"{site.op} with {', '.join(f'{k}={v}' for k, v in scaled.items())}")
    dtypes = [o.value.dtype for o in site.operands] + [value_of(site.node).dtype]
    wrong = next((d for d in dtypes if d not in HIGH_PRECISION_DTYPES), None)
    if wrong is not None:
        return Reason(ReasonKind.DTYPE, f"{_short(wrong)}; FP8 stands in for float32, bfloat16 and float16 only")
    empty = next((n for n, s in (("M", site.m), ("N", site.n), ("K", site.k)) if isinstance(s, int) and s == 0), None)
    return Reason(ReasonKind.SHAPE, f"{empty} is 0, nothing to multiply") if empty else None


def _device_obstacle(site: GemmSite, state_device: torch.device | None) -> Reason | None:
    device = value_of(site.node).device
    if device == state_device:
        return None
    return Reason(ReasonKind.DEVICE, f"on {device}; the amax histories of this graph are on {state_device}")


def _format_obstacle(site: GemmSite, recipe: Recipe) -> Reason | None:
    formats = [_format(o, recipe) for o in site.operands]
    if formats == [E5M2, E5M2]:
        return Reason(ReasonKind.OPERAND_FORMATS, "E5M2 by E5M2 is no FP8 GEMM")
    if [_block_dims(o, recipe) for o in site.operands] == [2, 2]:
        return Reason(ReasonKind.OPERAND_FORMATS, "128x128 by 128x128 blocks is no FP8 GEMM")
    return None


def _quantized(operand: Operand, recipe: Recipe, names: TensorNames) -> QuantizedTensor:
    return QuantizedTensor(
        operand.value, _format(operand, recipe), recipe, _block_dims(operand, recipe), names.of_value[operand.value]
    )


def _format(operand: Operand, recipe: Recipe) -> torch.dtype:
    return recipe.fp8_format.backward if operand.kind == GRAD_OUTPUT else recipe.fp8_format.forward


def _block_dims(operand: Operand, recipe: Recipe) -> int:
    if not recipe.is_blockwise:
        return 0
    by_kind = {
        "input": recipe.x_block_scaling_dim,
        "weight": recipe.w_block_scaling_dim,
        GRAD_OUTPUT: recipe.grad_block_scaling_dim,
    }
    return by_kind[operand.kind]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
