"""What a recipe is: options, decisions about tensors, and the nodes that quantize and multiply them.

The rewrite asks a recipe and never asks which one it is. `Recipe` is frozen data with the decisions; its `Emitter` makes
the nodes of one graph.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import fx

from fp8pass.errors import InvariantError
from fp8pass.graph.casts import CastOutputs, Layout
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather
from fp8pass.graph.names import TensorName
from fp8pass.graph.sites import GemmSite
from fp8pass.graph.values import MatrixValue, Operand
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.options import BackwardOverride
from lowering.formats import Granularity

aten = torch.ops.aten
prims = torch.ops.prims


@dataclasses.dataclass(frozen=True)
class Quantization:
    """What a tensor becomes."""

    dtype: torch.dtype
    granularity: Granularity


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A value quantized under one recipe, to one FP8 dtype, in one granularity."""

    value: MatrixValue
    quantization: Quantization
    recipe: Recipe
    name: TensorName = dataclasses.field(compare=False)

    @property
    def dtype(self) -> torch.dtype:
        """The FP8 dtype."""
        return self.quantization.dtype

    @property
    def entries(self) -> int:
        """How many scales and amax histories the tensor has where a recipe keeps them: one per matrix of a stack of weights."""
        stack = self.value.stack
        return stack if self.name.kind == "weight" and isinstance(stack, int) else 1


@dataclasses.dataclass(frozen=True)
class Copy:
    """One FP8 copy of a quantized tensor, contiguous along K of the GEMMs that read it."""

    tensor: QuantizedTensor
    columnwise: bool


@dataclasses.dataclass(frozen=True)
class Cast:
    """The quantization of one tensor, to one copy or to both, before the GEMM that needs it first."""

    copies: tuple[Copy, ...]
    """Rowwise first."""
    layouts: tuple[Layout, ...]
    """One per copy."""
    at: GemmSite
    """The GEMM that needs it first: it gives the place and the side of the partition."""
    is_first: bool = True
    """Whether no earlier cast has quantized this tensor: its scale is computed here, its amax recorded."""
    is_pinned: bool = False
    """Whether it stays in the backward, although the forward could make it: its copies are recomputed."""
    gather: Gather | None = None
    """The all-gather that its FP8 copies travel through; None where the tensor itself is read."""
    is_moved: bool = False
    """Whether the copy, a columnwise one of rows in groups, is moved out of the rowwise copy; the tensor is not read."""

    @property
    def tensor(self) -> QuantizedTensor:
        """What is quantized."""
        return self.copies[0].tensor


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A tensor and its scale, in a graph.

    Invariants: `data` is [outer, inner], of a stack [stack, outer, inner], contiguous, of dtype `quantization.dtype`, inner
    along K of its GEMMs; `scale_inv` is float32, or E8M0 codes in uint8, and multiplies what `data` holds, laid out as the GEMM
    of this granularity reads it.
    """

    data: fx.Node
    scale_inv: fx.Node
    quantization: Quantization

    @classmethod
    def made_by(cls, outputs: CastOutputs, quantization: Quantization) -> tuple[Quantized, ...]:
        """The copies that a cast of one matrix made, with the scales that it computed."""
        found = []
        for copy in outputs.copies:
            assert copy.scale_inv is not None
            found.append(cls(copy.data, copy.scale_inv, quantization))
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What a GEMM does besides multiplying."""

    role: str
    out_dtype: torch.dtype
    bias: fx.Node | None
    """[N], added before the one rounding."""


@dataclasses.dataclass(frozen=True)
class GroupNodes:
    """The groups of a matrix's rows, in a graph that is being rewritten."""

    offs: fx.Node
    """[groups] int32: where each group ends, counted in slots."""
    index: fx.Node | None
    """[slots]: the row that each slot reads; None: slot i reads row i."""
    masked: fx.Node
    """The matrix with zeros in the rows that no group reads; what is there may be anything."""


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


@dataclasses.dataclass(frozen=True)
class StateNodes:
    """The placeholders through which the state of a recipe enters a graph."""

    scale: fx.Node
    amax: fx.Node
    """Where the forward records."""
    grad_amax: fx.Node
    """Where the backward records: the same memory, but for a recomputed forward, which must not record again."""
    slots: fx.Node


@dataclasses.dataclass(frozen=True)
class Scope:
    """What an emitter knows of its graph."""

    tensors: tuple[QuantizedTensor, ...]
    """The tensors quantized under the recipe, in the order of their slots."""
    state: StateNodes | None
    """None for recipes that keep none."""
    trains: bool
    """Whether the graph has a backward: inference records nothing."""
    starts: bool = False
    """Whether the graph is for calls that meet empty histories."""


class Emitter(abc.ABC):
    """Makes the nodes of one recipe in one graph. What is not abstract does nothing here, and need not do anything."""

    def begin(self, cursor: Cursor) -> None:  # noqa: B027
        """Called before the first GEMM, with a cursor at the start of the graph."""

    @abc.abstractmethod
    def quantize(self, cursor: Cursor, casts: Sequence[Cast], matrices: Sequence[fx.Node]) -> list[tuple[Quantized, ...]]:
        """Quantize matrices, all in one launch; for each the copies of its cast. Several casts have equal `launch_key`s."""

    @abc.abstractmethod
    def quantize_shard(self, cursor: Cursor, cast: Cast, gather: Gather, matrix: fx.Node) -> tuple[Quantized, ...]:
        """Quantize this rank's shard, gather the FP8 copies, and give the copies of the gathered tensor.

        `matrix` is the gathered tensor as the GEMMs read it: the moves that lead to it from `gather.wait` are repeated.
        """

    @abc.abstractmethod
    def matmul(self, cursor: Cursor, a: Quantized, b: Quantized, epilogue: Epilogue) -> fx.Node:
        """The scaled GEMM of a [M, K] and b [N, K]: [M, N]."""

    def quantize_stack(self, cursor: Cursor, cast: Cast, stack: fx.Node) -> tuple[Quantized, ...]:
        """Quantize a stack of matrices [stack, rows, cols]: the copies of its cast. Only for recipes with `has_groups`."""
        raise InvariantError(f"{type(self).__name__} has no grouped GEMMs")

    def quantize_rows(self, cursor: Cursor, cast: Cast, matrix: fx.Node, groups: GroupNodes) -> Quantized:
        """Quantize the rows of groups: the rowwise copy in the order of the slots, or the columnwise one with each group at a
        padded offset. Only for recipes with `has_groups`."""
        raise InvariantError(f"{type(self).__name__} has no grouped GEMMs")

    def grouped_matmul(self, cursor: Cursor, a: Quantized, b: Quantized, offs: fx.Node | None, epilogue: Epilogue) -> fx.Node:
        """The grouped GEMM; `offs` is None where each matrix of a stack meets one of another. Only for recipes with
        `has_groups`."""
        raise InvariantError(f"{type(self).__name__} has no grouped GEMMs")

    def dequantize(self, cursor: Cursor, copy: Quantized) -> fx.Node:
        """float32 values of a copy, [outer, inner] with its padding."""
        values = cursor.call(prims.convert_element_type.default, copy.data, torch.float32)
        return cursor.call(aten.mul.Tensor, values, self.scales_of_values(cursor, copy))

    def scales_of_values(self, cursor: Cursor, copy: Quantized) -> fx.Node:
        """What the values of a copy are multiplied by, float32: of its shape, or of one that broadcasts to it."""
        return copy.scale_inv

    def end(self, cursor: Cursor) -> None:  # noqa: B027
        """Called once per side of the partition after the last GEMM, with a cursor before the graph's output."""

    def verify(self, graph: fx.Graph) -> None:  # noqa: B027
        """Raise InvariantError if the graph does not use the recipe's state as it must."""


class Recipe(abc.ABC):
    """The options of a recipe and what it decides. Subclasses are frozen dataclasses and hashable."""

    name: ClassVar[str]
    """The name that `recipe=` takes."""
    keeps_state: ClassVar[bool] = False
    """Whether scales and amax histories of its tensors live in the state."""
    has_groups: ClassVar[bool] = False
    """Whether its emitter makes grouped GEMMs."""
    moves_columns: ClassVar[bool] = False
    """Whether both copies of a tensor hold the same values, so that one is made of the other's bytes."""

    reads_gemm_dtype: ClassVar[bool] = False
    """Whether casts read a value in the dtype in which the GEMM would have read it. Otherwise they read it as it was computed,
    such as a norm's float32 result."""

    backward_override: BackwardOverride | None = None
    """What backward GEMMs read in high precision, if they do: TransformerEngine's option. A field of recipes that have it."""
    reads: ClassVar[int] = 1
    """How often a cast reads its input: 2 where the amax is read first. For estimates."""

    def fuses_with_producer(self, tensor: QuantizedTensor) -> bool:
        """Whether casts of the tensor join the code that makes it. Otherwise it is written first, and is not recomputed in
        backward if that takes more than a view."""
        return True

    def fast_accum(self, role: str) -> bool:
        """Whether the GEMM of a role may accumulate in the tensor cores' shorter accumulator."""
        return False

    @abc.abstractmethod
    def quantization(self, operand: Operand, role: str) -> Quantization:
        """What an operand of a GEMM of this role becomes."""

    def obstacle(self, site: GemmSite) -> Reason | None:
        """Why this GEMM cannot run under the recipe, besides what holds for every FP8 GEMM."""
        if self.backward_override is None or site.role == "output":
            return None
        return Reason(ReasonKind.RECIPE, f"backward_override={self.backward_override!r} keeps high precision")

    def launch_key(self, cast: Cast) -> Hashable | None:
        """Casts with equal keys that are ready together can share a launch; None if this one cannot share."""
        return None

    @abc.abstractmethod
    def gathered(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> GatheredCopies:
        """How copies of a gathered tensor can travel."""

    @abc.abstractmethod
    def emitter(self, scope: Scope) -> Emitter:
        """What makes the recipe's nodes in one graph."""


def fp8_dtype(recipe: Any, operand: Operand) -> torch.dtype:
    """The FP8 dtype of an operand by the recipe's `fp8_format`."""
    formats = recipe.fp8_format
    dtype: torch.dtype = formats.backward if operand.kind == "grad_output" else formats.forward
    return dtype
