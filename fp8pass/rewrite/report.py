"""What a rewrite leaves behind: plain data that holds no graph node, so that nothing is kept alive by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from torch import fx

from fp8pass.graph.origin import Path
from fp8pass.graph.values import value_of
from fp8pass.inputs import StateTensor
from fp8pass.recipes import Recipe
from fp8pass.rewrite.plan import Decision, Gathered, Plan
from lowering.formats import fp8_max


@dataclasses.dataclass(frozen=True)
class GemmRecord:
    """One matmul of a compiled graph and what was decided about it."""

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
    """Whether the GEMM runs in FP8."""
    reason: str | None
    """Why it does not: the kind of reason and the details, such as "shape: M is 0, so there is nothing to multiply"."""
    recipe: str | None
    """Name of the recipe, None where a rule keeps high precision."""
    a_format: str | None
    """Format of the first operand, such as "e4m3"; None in high precision."""
    b_format: str | None
    """Format of the second operand."""
    a_scaling: str | None
    """What shares a scale: "tensor-wise", "row-wise", "1x32", "1x128" or "128x128"; None in high precision."""
    b_scaling: str | None
    """The same for the second operand."""
    speedup: float | None
    """Expected speed-up over bfloat16, an estimate; the cost of each cast is shared among the GEMMs that read it. None in high
    precision, and where a size is dynamic."""
    source: str
    """Where in the user's code: `file:line`."""
    op: str
    """The ATen operation that was captured, such as "addmm"."""
    path: Path | None = dataclasses.field(repr=False)
    """The module as the compiled frame names it: a frame may serve many modules."""
    looks_like_head: bool = False
    """Whether it is, or looks like, the output embedding: see the reason `head`. It may run in FP8 nonetheless: by a rule, with
    select="all", and where the graph alone does not tell."""


@dataclasses.dataclass(frozen=True)
class GatherRecord:
    """An all-gather whose result is quantized, and what it sends."""

    module: str
    """Path of the module whose GEMM reads the gathered tensor."""
    is_backward: bool
    num_ranks: int
    bytes_before: int | str
    """Bytes that a rank receives per call if the tensor is gathered in high precision; a string for dynamic sizes."""
    bytes_after: int | str
    """Bytes that it actually receives."""
    quantized: bool
    """Whether FP8 is sent."""
    reason: str | None
    """Why it does not: "readers: ...", "bytes: ...", "scales: ..." or "shape: ..."."""


def gemm_records(plan: Plan, heads: Collection[fx.Node]) -> list[GemmRecord]:
    """The decisions of a plan as records. heads: the GEMMs that look like one."""
    return [_record(decision, plan, decision.site.node in heads) for decision in plan.decisions]


def _record(decision: Decision, plan: Plan, looks_like_head: bool) -> GemmRecord:
    site = decision.site
    expected = plan.estimates.get(site.node) if decision.reason is None else None
    formats = [None if c is None else _format_name(c.dtype) for c in (decision.a, decision.b)]
    scalings = [None if c is None else c.quantization.granularity.label for c in (decision.a, decision.b)]
    return GemmRecord(
        module=site.module,
        role=site.role,
        m=_size(site.m),
        n=_size(site.n),
        k=_size(site.k),
        groups=_size(site.groups),
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
        looks_like_head=looks_like_head,
    )


def gather_records(plan: Plan) -> list[GatherRecord]:
    """The all-gathers of a plan as records. To be taken before the plan is applied, which removes gathers."""
    return [_gather_record(gathered) for gathered in plan.gathers]


def _gather_record(gathered: Gathered) -> GatherRecord:
    gather = gathered.gather
    shard = value_of(gather.source)
    count = shard.numel() * (gather.num_ranks - 1)
    before = count * shard.element_size()
    per_element = gathered.bytes_per_element
    after = int(count * per_element) if isinstance(count, int) else count * round(per_element)
    return GatherRecord(
        module=gathered.reader.module,
        is_backward=gathered.reader.is_backward,
        num_ranks=gather.num_ranks,
        bytes_before=_size(before),
        bytes_after=_size(before if gathered.reason else after),
        quantized=gathered.reason is None,
        reason=None if gathered.reason is None else str(gathered.reason),
    )


def _format_name(dtype: Any) -> str:
    return "e4m3" if "e4m3" in str(dtype) else "e5m2"


def _size(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size)


def state_tensors(plan: Plan, recipe: Recipe) -> list[StateTensor]:
    """The tensors whose scales a graph takes from the state of `recipe`, in the order of its slots."""
    tensors = plan.tensors_in_state(recipe)
    return [StateTensor(n, fp8_max(t.dtype), t.entries) for t, n in zip(tensors, plan.slot_names(recipe), strict=True)]
