"""FP8 copies, and the casts that make them: data, which the plan decides and everything after it obeys."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import fx

from fp8pass.graph.casts import CastOutputs, Layout
from fp8pass.graph.gathers import Gather
from fp8pass.graph.names import TensorName
from fp8pass.graph.sites import GemmSite
from fp8pass.graph.values import MatrixValue
from fp8pass.recipes.quantization import Quantization
from fp8pass.recipes.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A value quantized in one way under one recipe: what has a scale, or one set of scales, and a history in the state."""

    value: MatrixValue
    quantization: Quantization
    recipe: Recipe
    name: TensorName = dataclasses.field(compare=False)

    def __hash__(self) -> int:  # cheaper than that of all fields, and as good: few tensors have one value
        return hash(self.value)

    @property
    def dtype(self) -> torch.dtype:
        """The FP8 dtype."""
        return self.quantization.dtype

    @property
    def entries(self) -> int:
        """How many scales and amax histories the tensor has where a recipe keeps them: one per matrix of batched weights."""
        batch = self.value.batch
        return batch if self.name.kind == "weight" and isinstance(batch, int) else 1


@dataclasses.dataclass(frozen=True)
class Copy:
    """One FP8 copy of a value, contiguous along K of the GEMMs that read it. Equal copies are made once. The rowwise and the
    columnwise copy of a value may differ in their quantizations; then they are two tensors, with a cast each."""

    value: MatrixValue
    columnwise: bool
    quantization: Quantization
    recipe: Recipe
    name: TensorName = dataclasses.field(compare=False)

    def __hash__(self) -> int:
        return hash((self.value, self.columnwise))

    @functools.cached_property
    def tensor(self) -> QuantizedTensor:
        """What it is a copy of: copies of one tensor share its scales, or the cast that computes them."""
        return QuantizedTensor(self.value, self.quantization, self.recipe, self.name)

    @property
    def dtype(self) -> torch.dtype:
        """The FP8 dtype."""
        return self.quantization.dtype


# -- sources: what a cast reads


@dataclasses.dataclass(frozen=True)
class FromValue:
    """The value itself, in high precision."""

    masked: bool = False
    """Whether rows that belong to no group are read as zeros: what is there may be anything, NaN included, and would reach the
    one amax of all rows."""


@dataclasses.dataclass(frozen=True)
class FromGather:
    """This rank's shard: FP8 copies of it travel through the all-gather instead of the value."""

    gather: Gather


@dataclasses.dataclass(frozen=True)
class FromCopy:
    """The bytes of another copy of the tensor, moved; the value is not read."""

    copy: Copy


@dataclasses.dataclass(frozen=True)
class FromInput:
    """Inputs of the graph, which hold the copy already: nothing is cast."""

    data: fx.Node
    scale_inv: fx.Node
    amax: fx.Node | None = None
    """The amax of the tensor, for a graph that records it."""


Source = FromValue | FromGather | FromCopy | FromInput


@dataclasses.dataclass(frozen=True)
class Cast:
    """The quantization of one tensor, to one copy or to both, before the GEMM that needs it first."""

    copies: tuple[Copy, ...]
    """Rowwise first; all of one tensor."""
    layouts: tuple[Layout, ...]
    """One per copy."""
    at: GemmSite
    """The GEMM that needs it first: it gives the place and the side of the partition."""
    source: Source
    reads: torch.dtype
    """The dtype in which the value is read: what was computed in a wider one is rounded to it first."""
    is_first: bool = True
    """Whether no earlier cast has quantized this tensor: its scale is computed here, its amax recorded."""
    is_pinned: bool = False
    """Whether it stays in the backward, although the forward could make it: its copies are recomputed."""

    @property
    def tensor(self) -> QuantizedTensor:
        """What is quantized."""
        return self.copies[0].tensor


# -- nodes


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A copy and its scale, in a graph.

    Invariants: `data` is [outer, inner], of a batch [batch, outer, inner], contiguous, of the copy's dtype, inner along K of
    its GEMMs; `scale_inv` is float32, or E8M0 codes in uint8, and multiplies what `data` holds, laid out as the GEMM of this
    granularity reads it.
    """

    data: fx.Node
    scale_inv: fx.Node
    copy: Copy
    maker: fx.Node
    """The operation that wrote the bytes: a cast, or what moved them. An input of the graph where nothing did."""

    @property
    def quantization(self) -> Quantization:
        """How it is quantized."""
        return self.copy.quantization

    @classmethod
    def made_by(cls, outputs: CastOutputs, copies: tuple[Copy, ...]) -> tuple[Quantized, ...]:
        """The copies that a cast of one matrix made, with the scales that it computed."""
        found = []
        for made, copy in zip(outputs.copies, copies, strict=True):
            assert made.scale_inv is not None
            found.append(cls(made.data, made.scale_inv, copy, outputs.node))
        return tuple(found)
