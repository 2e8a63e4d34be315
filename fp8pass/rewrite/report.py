"""Records of a rewrite: plain data that holds no graph node, so that nothing is kept alive by it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from fp8pass.errors import Reason, ReasonKind
from fp8pass.graph.gemms import Sharded
from fp8pass.graph.origin import Path, TensorName, input_index
from fp8pass.graph.values import recorded_size, value_of
from fp8pass.inputs import StateTensor
from fp8pass.options import WeightCopies
from fp8pass.recipes import Quantization, Recipe
from fp8pass.rewrite.plan import Decision, Gathered, KeptWeight, Plan, Rewritten
from fp8pass.schemes.copies import Copy, FromInput, Source
from fp8pass.weights.cache import WeightTensor
from lowering.formats import FORMAT_NAMES, fp8_max


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmRecord:
    """One matmul of a compiled graph, and the decision about it."""

    module: str
    """Path of the module in the user's model, such as "layers.0.attn.wq"."""
    role: str
    """"output", "grad_input" or "grad_weight"."""
    m: int | str
    """Rows of the result; a string such as "s0" where the size is dynamic."""
    n: int | str
    """Columns of the result."""
    k: int | str
    """Size of the dimension that is summed over."""
    groups: int | str
    """Number of products of a grouped GEMM, of which each has an n x k (or a result) of its own: the experts. They share m, in
    grad_weight k, where routing decides how much of it each has. 1 for a GEMM of two matrices."""
    quantized: bool
    """The GEMM runs in FP8."""
    reason: str | None
    """Why it does not: the kind of reason and the details, such as "shape: M is 0, so there is nothing to multiply"."""
    recipe: str | None = None
    """Name of the recipe, None where a rule keeps high precision."""
    a_format: str | None = None
    """Format of the first operand, such as "e4m3"; None in high precision."""
    b_format: str | None = None
    """Format of the second operand."""
    a_scaling: str | None = None
    """The granularity of scales: "tensor-wise", "row-wise", "1x32", "1x128" or "128x128"; None in high precision."""
    b_scaling: str | None = None
    """The granularity of the second operand's scales."""
    speedup: float | None = None
    """Expected speed-up over bfloat16, an estimate; the cost of each cast is shared among the GEMMs that read it. None in high
    precision, and where a size is dynamic."""
    source: str
    """The place in the user's code: `file:line`."""
    op: str
    """The ATen operation that was captured, such as "addmm"."""
    path: Path | None = dataclasses.field(default=None, repr=False)
    """The module as the compiled frame names it: a frame may serve many modules."""
    computed_by: str | None = None
    """The implementation on the device that the estimates are for, such as "torch, scales of rows"
    (`lowering.paths.GemmPath`). None in high precision."""
    shares_scale: bool = False
    """Its weight has one scale together with those of other projections, which an inference engine fuses."""
    looks_like_head: bool = False
    """It is, or looks like, the output embedding: see the reason `head`. It may run in FP8 nonetheless: by a rule, with
    select="all", and where the graph does not tell."""

    @property
    def is_empty(self) -> bool:
        """True if there was nothing to multiply, as in a batch without rows: other calls tell what becomes of such a GEMM."""
        return (self.reason or "").startswith(f"{ReasonKind.SHAPE.value}:") and 0 in (self.m, self.n, self.k)

    @property
    def flops(self) -> int | None:
        """Floating-point operations: two per product of elements. Groups of rows, or of a sum, share m or k; those of a batch
        do not. None where a size is dynamic."""
        sizes = [s for s in (self.m, self.n, self.k, self.groups) if isinstance(s, int)]
        if len(sizes) < 4:
            return None
        return 2 * math.prod(sizes if self.op in ("bmm", "baddbmm") else sizes[:3])


@dataclasses.dataclass(frozen=True)
class GatherRecord:
    """An all-gather whose result is quantized, and the bytes that it sends."""

    module: str
    """Path of the module whose GEMM reads the gathered tensor."""
    tensor: str
    """Name of the gathered tensor in the compiled frame, such as "layers.0.up:weight" for a Parameter that is sharded."""
    is_backward: bool
    num_ranks: int
    bytes_before: int | str
    """Bytes that a rank receives per call if the tensor is gathered in high precision; a string for dynamic sizes."""
    bytes_after: int | str
    """Bytes that it actually receives."""
    quantized: bool
    """FP8 is sent."""
    reason: str | None
    """Why it does not: "readers: ...", "bytes: ...", "scales: ..." or "shape: ..."."""
    path: Path | None = dataclasses.field(default=None, repr=False)
    """The module, as the compiled frame names it, of a Parameter that FSDP2 gathers before each graph that reads it."""


@dataclasses.dataclass(frozen=True)
class WeightRecord:
    """An input of a graph that a forward GEMM reads as its weight, directly or through casts and views."""

    input: int  # Position among the inputs of Dynamo's graph.
    shape: tuple[Any, ...]  # The shape of the matrix or the batch, as it is stored.
    dtype: torch.dtype  # In which the graph receives it.
    is_turned: bool  # The GEMM contracts the first dimension of the stored matrix and not the last.
    reason: str | None  # Why the GEMM runs in high precision; None if in FP8.
    recipe: Recipe | None = None
    weight: tuple[Quantization, TensorName | None] | None = None
    """Its quantization, and the name of its scale in the recipe's state, if it is there. None in high precision."""
    input_operand: tuple[Quantization, TensorName | None] | None = None
    fused: tuple[int | None, ...] = ()
    """The positions of the weights that have one scale together, its own among them; None for one that is no input."""


def weight_records(plan: Plan) -> list[WeightRecord]:
    """The weights of a plan's forward GEMMs."""
    names = {
        tensor: name
        for recipe in {d.recipe for d in plan.rewritten}
        for tensor, name in zip(plan.tensors_in_state(recipe), plan.slot_names(recipe), strict=True)
    }

    def operand(copy: Copy | None) -> tuple[Quantization, TensorName | None] | None:
        return None if copy is None else (copy.quantization, names.get(copy.tensor))

    found = []
    for decision in plan.decisions:
        pairs = zip(decision.site.operands, decision.copies or (None, None), strict=False)
        for i, (read, copy) in enumerate(pairs):
            value = read.value
            index = _input(value.root)
            if decision.site.role != "output" or read.kind != "weight" or index is None:
                continue
            other = decision.copies[1 - i] if isinstance(decision, Rewritten) else None
            is_turned = read.transposed if i == 0 else not read.transposed
            reason = None if decision.reason is None else str(decision.reason)
            group = () if copy is None else plan.fused.get(copy.tensor, ())
            fused = tuple(_input(tensor.value.root) for tensor in group)
            recipe, operands = decision.recipe, (operand(copy), operand(other))
            found.append(WeightRecord(index, value.shape, value.dtype, is_turned, reason, recipe, *operands, fused))
    return found


def _input(node: fx.Node) -> int | None:
    return input_index(node) if node.op == "placeholder" else None


@dataclasses.dataclass(frozen=True)
class KeptRecord:
    """A weight that a graph does not train, or any under `weight_copies="cache"`, and whether its FP8 copies are kept."""

    module: str
    """Path of the module of the first GEMM that reads it."""
    shape: tuple[int | str, ...]
    """[rows, columns], of experts [experts, rows, columns]; a string for a dynamic size."""
    kept: bool
    """Its copies are kept between calls. Otherwise it is cast at each call."""
    bytes: int
    """Memory of the kept copies, without their scales; 0 if none are."""
    reason: str | None
    """Why none are: "sharded: ...", "derived: ...", "untracked: ..." or "shape: ..."."""
    until_changed: bool = True
    """They are kept until a change is seen, as with `weight_copies="cache"`. Those of a frozen weight that
    `release_frozen` has not released are made again at each call."""
    path: Path | None = dataclasses.field(default=None, repr=False)
    """The module as the compiled frame names it."""


def gemm_records(plan: Plan, heads: Collection[fx.Node]) -> list[GemmRecord]:
    """The decisions of a plan as records. heads: the GEMMs that look like one."""
    return [_record(decision, plan, decision.site.node in heads) for decision in plan.decisions]


def _record(decision: Decision, plan: Plan, looks_like_head: bool) -> GemmRecord:
    site = decision.site
    expected = plan.estimates.get(site.node) if decision.reason is None else None
    formats = tuple(FORMAT_NAMES[c.dtype] for c in decision.copies) or (None, None)
    scalings = tuple(c.quantization.granularity.label for c in decision.copies) or (None, None)
    return GemmRecord(
        module=site.module,
        role=site.role,
        m=recorded_size(site.m),
        n=recorded_size(site.n),
        k=recorded_size(site.k),
        groups=recorded_size(site.groups),
        quantized=decision.reason is None,
        reason=None if decision.reason is None else str(decision.reason),
        recipe=None if decision.recipe is None else decision.recipe.name,
        a_format=formats[0],
        b_format=formats[1],
        a_scaling=scalings[0],
        b_scaling=scalings[1],
        speedup=None if expected is None else expected.speedup,
        source=site.source,
        op=site.op,
        path=site.path,
        computed_by=None if site.node not in plan.paths else plan.paths[site.node].value,
        shares_scale=any(copy.tensor in plan.fused for copy in decision.copies),
        looks_like_head=looks_like_head,
    )


def gather_records(plan: Plan) -> list[GatherRecord]:
    """The all-gathers of a plan as records. To be taken before the plan is applied, which removes gathers."""
    return [_gather_record(gathered) for gathered in plan.gathers] + [
        _sharded_record(weight, weight.sharded) for weight in plan.weights if weight.sharded is not None
    ]


def _sharded_record(weight: KeptWeight, sharded: Sharded) -> GatherRecord:
    name, count = weight.tensor.name, sharded.elements * (sharded.num_ranks - 1)
    before = count * value_of(weight.tensor.value.root).element_size()
    return GatherRecord(
        module=name.module,
        tensor=str(name),
        is_backward=False,
        num_ranks=sharded.num_ranks,
        bytes_before=before,
        bytes_after=round(count * weight.bytes_per_element) if isinstance(weight.kept, WeightTensor) else before,
        quantized=isinstance(weight.kept, WeightTensor),
        reason=_reason(weight),
        path=name.path,
    )


def _gather_record(gathered: Gathered) -> GatherRecord:
    gather = gathered.gather
    shard = value_of(gather.source)
    count = shard.numel() * (gather.num_ranks - 1)
    before = count * shard.element_size()
    per_element = gathered.bytes_per_element
    after = int(count * per_element) if isinstance(count, int) else count * round(per_element)
    return GatherRecord(
        module=gathered.reader.module,
        tensor=str(gathered.tensors[0].name),
        is_backward=gathered.reader.is_backward,
        num_ranks=gather.num_ranks,
        bytes_before=recorded_size(before),
        bytes_after=recorded_size(before if gathered.reason else after),
        quantized=gathered.reason is None,
        reason=None if gathered.reason is None else str(gathered.reason),
    )


def kept_records(plan: Plan, weight_copies: WeightCopies) -> list[KeptRecord]:
    """The weights of a plan as records."""
    is_cache = weight_copies == "cache"
    return [_kept_record(weight, plan.kept, is_cache) for weight in plan.weights if weight.sharded is None]


def _reason(weight: KeptWeight) -> str | None:
    return str(weight.kept) if isinstance(weight.kept, Reason) else None


def _kept_record(weight: KeptWeight, sources: Mapping[Copy, Source], until_changed: bool) -> KeptRecord:
    own = [source for copy, source in sources.items() if copy.tensor == weight.tensor]
    held = [value_of(source.data) for source in own if isinstance(source, FromInput)]
    name = weight.tensor.name
    return KeptRecord(
        module=name.module,
        shape=tuple(recorded_size(size) for size in weight.tensor.value.shape),
        kept=bool(held),
        bytes=sum(data.numel() * data.element_size() for data in held),
        reason=_reason(weight),
        until_changed=until_changed,
        path=name.path,
    )


def state_tensors(plan: Plan, recipe: Recipe) -> list[StateTensor]:
    """The tensors whose scales a graph takes from the state of `recipe`, in the order of its slots."""
    return [
        StateTensor(n, fp8_max(t.dtype), t.entries, _input(t.value.root) if n.kind == "weight" else None)
        for t, n in zip(plan.tensors_in_state(recipe), plan.slot_names(recipe), strict=True)
    ]
