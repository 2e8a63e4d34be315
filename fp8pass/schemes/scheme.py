"""What a scheme is: facts about one kind of scales, and the nodes that quantize and multiply with them.

The rewrite asks the scheme of a copy's quantization (`table.py`) and never asks which recipe decided it. A scheme has no state
and serves every graph; its `Emitter` makes the casts of one recipe in one graph.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import fx

from fp8pass.graph.casts import Layout
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather
from fp8pass.graph.sites import GemmSite
from fp8pass.graph.values import value_of
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.quantization import Quantization
from fp8pass.recipes.recipe import Recipe
from fp8pass.schemes.copies import Cast, Quantized, QuantizedTensor

aten = torch.ops.aten
prims = torch.ops.prims


@dataclasses.dataclass(frozen=True)
class GroupNodes:
    """The groups of a matrix's rows, in a graph that is being rewritten."""

    offs: fx.Node
    """[groups] int32: where each group ends, counted in slots."""
    index: fx.Node | None
    """[slots]: the row that each slot reads; None: slot i reads row i."""


@dataclasses.dataclass(frozen=True)
class Read:
    """What a cast reads, in a graph."""

    node: fx.Node
    """The matrix, or the batch. For `FromGather` the gathered tensor as the GEMMs read it: the moves that lead to it from the
    gather are repeated on the copies. For `FromCopy` the data of that copy."""
    groups: GroupNodes | None = None
    """Of a matrix whose rows are in groups."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """Something that travels through a gather instead of the tensor."""

    identity: Hashable
    """What travels once has one identity."""
    bytes_per_element: Fraction


@dataclasses.dataclass(frozen=True)
class GatheredCopies:
    """How the copies of a tensor travel through a gather: what is sent, and why that is not possible."""

    sent: tuple[Sent, ...]
    obstacle: Reason | None = None


def scaling(quantization: Quantization) -> dict[str, Any]:
    """The arguments of an operation that say how scales that are no E8M0 codes are made."""
    options: dict[str, Any] = {"power_of_2": quantization.power_of_2, "epsilon": quantization.epsilon}
    return options if quantization.inverse is None else {**options, "inverse": quantization.inverse}


def engine_obstacle(quantization: Quantization) -> Reason | None:
    """Why a tensor that is quantized as an inference engine does is gathered in high precision."""
    if quantization.inverse is None:
        return None
    return Reason(ReasonKind.SCALES, "match: casts as engines make them are of whole tensors")


def part_obstacle(tensor: QuantizedTensor, gather: Gather) -> Reason | None:
    """Why amaxes of shards are not those of a tensor that is a part of what is gathered.

    What DTensor cuts off where it has padded shards is fewer rows, or columns, than there are ranks, of zeros. Where sizes are
    dynamic, nothing is known.
    """
    value, whole = tensor.value, value_of(gather.wait)
    sizes = [*whole.shape, value.rows, value.cols, 1 if value.batch is None else value.batch]
    if not all(isinstance(size, int) for size in sizes) or not whole.numel():
        return None
    left_out = whole.numel() - math.prod(sizes[whole.dim() :])
    if left_out <= (gather.num_ranks - 1) * max(whole.numel() // whole.shape[0], sizes[-3]):
        return None
    return Reason(ReasonKind.SCALES, "a part of what is gathered has amaxes of its own, which shards do not have")


FIRST_STEP = "first_step"
"""The variant of a graph for calls that meet empty histories."""
STATE_KINDS = ("scale", "amax", "grad_amax", "slots")
"""The inputs of a graph per recipe that keeps state, in the order of `StateNodes`."""


@dataclasses.dataclass(frozen=True)
class StateKey:
    """The key of one of them."""

    recipe: Recipe
    kind: str


@dataclasses.dataclass(frozen=True)
class StateNodes:
    """The placeholders through which the state of a recipe enters a graph."""

    scale: fx.Node
    amax: fx.Node
    """Where the forward records."""
    grad_amax: fx.Node
    """Where the backward records: the same memory, but for a recomputed forward, which must not record again."""
    slots: fx.Node


def state_nodes(inputs: Mapping[Hashable, fx.Node]) -> dict[Recipe, StateNodes]:
    """The placeholders of each recipe that keeps state, among a graph's extra inputs by key."""
    recipes = dict.fromkeys(key.recipe for key in inputs if isinstance(key, StateKey))
    return {recipe: StateNodes(*(inputs[StateKey(recipe, kind)] for kind in STATE_KINDS)) for recipe in recipes}


@dataclasses.dataclass(frozen=True)
class Scope:
    """What an emitter knows of its graph."""

    tensors: tuple[QuantizedTensor, ...]
    """The tensors whose scales come from the recipe's state, in the order of their slots."""
    state: StateNodes | None
    """None for recipes that keep none."""
    trains: bool
    """Whether the graph has a backward: inference records nothing."""
    variants: frozenset[str] = frozenset()
    """What is unusual about the calls that the graph is for."""


@dataclasses.dataclass(frozen=True)
class Product:
    """What a GEMM does besides multiplying."""

    out_dtype: torch.dtype
    fast_accum: bool
    bias: fx.Node | None = None
    """[N], added before the one rounding."""


class Emitter(abc.ABC):
    """Makes the casts of one recipe with one scheme in one graph. What is not abstract does nothing here, and need not do
    anything."""

    def begin(self, cursor: Cursor) -> None:  # noqa: B027
        """Called before the first GEMM, with a cursor at the start of the graph."""

    @abc.abstractmethod
    def quantize(self, cursor: Cursor, casts: Sequence[Cast], reads: Sequence[Read]) -> list[tuple[Quantized, ...]]:
        """Make the copies of casts, all in one launch: those of each, rowwise first. Several casts have equal `launch_key`s
        and read matrices; a single one may have any source but `FromInput`."""

    def record(self, cursor: Cursor, cast: Cast, amax: fx.Node) -> None:  # noqa: B027
        """Take the amax of a tensor, for recipes that keep it."""

    def turned(self, cursor: Cursor, cast: Cast, rows: Quantized) -> tuple[Quantized, ...]:
        """The columnwise copy of a matrix with one scale, of the bytes of the rowwise one."""
        raise NotImplementedError(f"{type(self).__name__} has no copies with one scale")

    def share(self, cursor: Cursor, tensors: Sequence[QuantizedTensor], matrices: Sequence[fx.Node]) -> None:
        """Give tensors, before their casts, one scale: of the largest amax of the matrices, which are theirs and those of
        others that share it."""
        raise NotImplementedError(f"{type(self).__name__} has no scales of whole tensors")

    def pair_of(self, tensor: QuantizedTensor) -> tuple[fx.Node, fx.Node] | None:
        """Scale and reciprocal of a tensor that was cast with one scale, scalars or a vector; None where blocks have their
        own."""
        return None

    def end(self, cursor: Cursor) -> None:  # noqa: B027
        """Called once per side of the partition after the last GEMM, with a cursor before the graph's output."""

    def verify(self, graph: fx.Graph) -> None:  # noqa: B027
        """Raise InvariantError if the graph does not use the recipe's state as it must."""


class Scheme(abc.ABC):
    """How one kind of scales is computed, applied and sent."""

    has_one_scale: ClassVar[bool] = False
    """Whether all values of a matrix, or of the rows of groups, have one scale: then both copies hold the same values, one can
    be made of the other's bytes, and any rows can be cut off."""
    reads_gemm_dtype: ClassVar[bool] = False
    """Whether casts read a value in the dtype in which the GEMM would have read it. Otherwise they read it as it was computed,
    such as a norm's float32 result."""
    num_reads: ClassVar[int] = 1
    """How often a cast reads its input: 2 where the amax is read first. For estimates."""

    def fuses_with_producer(self, tensor: QuantizedTensor) -> bool:
        """Whether casts of the tensor join the code that makes it. Otherwise it is written first, and is not recomputed in
        backward if that takes more than a view."""
        return True

    def obstacle(self, site: GemmSite, quantizations: Sequence[Quantization]) -> Reason | None:
        """Why a GEMM whose operands are quantized so cannot run, besides what holds for every FP8 GEMM."""
        return None

    def launch_key(self, cast: Cast) -> Hashable | None:
        """Casts of matrices under one recipe, with equal quantizations and equal keys, that are ready together share a launch;
        None if this one cannot."""
        return None

    @abc.abstractmethod
    def gathered(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> GatheredCopies:
        """How copies of a gathered tensor can travel."""

    def shard_obstacle(self, quantization: Quantization, shares_scales: bool) -> Reason | None:
        """Why ranks could not quantize shards of a tensor with one scale, of schemes that have one. shares_scales: whether
        delayed scaling has equal scales on all of these ranks."""
        return None

    def sharded(self, quantization: Quantization, rows: int, is_even: bool) -> Sent | Reason:
        """What travels of a weight whose rows are spread over ranks, for both orientations together, or why it cannot. rows: of
        a shard. is_even: whether all ranks have as many."""
        return Reason(ReasonKind.BYTES, "forward and backward need copies with different scales")

    def has_one_copy(self, quantization: Quantization) -> bool:
        """Whether the rowwise and the columnwise copy have the same values and scales."""
        return self.has_one_scale

    def sharded_each(self, quantization: Quantization, rows: int, columns: int, is_even: bool) -> Sent | Reason:
        """What travels of a weight whose rows are spread over ranks, and that is gathered twice: the rowwise copy for the
        forward, the columnwise one for the backward; or why it cannot. The arguments are those of `sharded`."""
        return Reason(ReasonKind.BYTES, "forward and backward need copies with different scales")

    def scales_columns(self, quantization: Quantization) -> bool:
        """Whether a column of the columnwise copy has one scale, so that shards need the amaxes of all of them."""
        return False

    def compact(
        self, x: torch.Tensor, quantization: Quantization, *, columnwise: bool = False, amaxes: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of a copy as it travels, in the orientation of the matrix x [rows, columns]: eagerly. amaxes: of
        columns that have one scale; None: those of x."""
        raise NotImplementedError(f"{type(self).__name__} has no copies that travel with scales")

    def ready(self, data: torch.Tensor, scales: torch.Tensor, quantization: Quantization, layout: Layout) -> list[torch.Tensor]:
        """A copy as a GEMM reads it, and its scales, of a compact one: eagerly."""
        raise NotImplementedError(f"{type(self).__name__} has no copies that travel with scales")

    def values_of(self, data: torch.Tensor, scales: torch.Tensor, quantization: Quantization) -> torch.Tensor:
        """float32 values of a compact copy."""
        raise NotImplementedError(f"{type(self).__name__} has no copies that travel with scales")

    @abc.abstractmethod
    def emitter(self, scope: Scope) -> Emitter:
        """What makes the casts of one recipe in one graph."""

    @abc.abstractmethod
    def matmul(self, cursor: Cursor, a: Quantized, b: Quantized, product: Product) -> fx.Node:
        """The scaled GEMM of a [M, K] and b [N, K]: [M, N]."""

    def grouped_matmul(self, cursor: Cursor, a: Quantized, b: Quantized, offs: fx.Node | None, product: Product) -> fx.Node:
        """The grouped GEMM of operands whose inner dimensions come last, as their casts made them. `offs` is None where each
        matrix of a batch meets one of another."""
        order = [1, 0] if value_of(b.data).dim() == 2 else [0, 2, 1]
        transposed = cursor.call(aten.permute.default, b.data, order)
        return cursor.call(
            torch.ops.lowering.scaled_grouped_mm.default,
            a.data,
            transposed,
            a.scale_inv,
            b.scale_inv,
            offs,
            granularity_a=a.quantization.granularity.value,
            granularity_b=b.quantization.granularity.value,
            out_dtype=product.out_dtype,
            fast_accum=product.fast_accum,
        )

    def dequantize(self, cursor: Cursor, made: Quantized) -> fx.Node:
        """float32 values of a copy, [outer, inner] with its padding."""
        values = cursor.call(prims.convert_element_type.default, made.data, torch.float32)
        return cursor.call(aten.mul.Tensor, values, self.scales_of_values(cursor, made))

    def can_turn(self, quantization: Quantization) -> bool:
        """Whether a copy of a matrix or a batch has the bytes of the other orientation, and its scales."""
        return False

    def turned_scales(self, cursor: Cursor, made: Quantized) -> fx.Node:
        """`scale_inv` of the other orientation of a copy that can be turned."""
        return made.scale_inv

    def scales_of_values(self, cursor: Cursor, made: Quantized) -> fx.Node:
        """What the values of a copy are multiplied by, float32: of its shape, or of one that broadcasts to it."""
        return made.scale_inv
