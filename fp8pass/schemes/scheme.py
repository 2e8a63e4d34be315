"""A scheme: facts about one kind of scales, and the nodes that only this kind has.

The rewrite asks the scheme of a copy's quantization and never asks which recipe decided it. A scheme has no state and serves
every graph; an `Emitter` (`emitter.py`) makes the casts of one recipe with one scheme in one graph. `cursor` inserts nodes, or
runs the same operations on tensors (`eager.py`).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import fx

from fp8pass.errors import Reason, ReasonKind
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather
from fp8pass.graph.gemms import GemmSite
from fp8pass.graph.values import MatrixValue, value_of
from fp8pass.recipes.quantization import Quantization
from fp8pass.schemes.copies import Cast, Layout, Quantized, QuantizedTensor

aten = torch.ops.aten
ops = torch.ops.lowering
prims = torch.ops.prims

Compact = tuple[fx.Node, fx.Node, fx.Node]  # A copy as it travels, as the matrix [rows, columns] lies: the cast, data, scales.


def scaling(quantization: Quantization) -> dict[str, Any]:
    """The arguments of an operation that say how scales that are no E8M0 codes are made."""
    options: dict[str, Any] = {"power_of_2": quantization.power_of_2, "epsilon": quantization.epsilon}
    return options if quantization.inverse is None else {**options, "inverse": quantization.inverse}


def kind(quantization: Quantization) -> dict[str, Any]:
    """The arguments of an operation that say which elements share a scale."""
    found: dict[str, Any] = {"granularity": quantization.granularity.value}
    return {**found, "square": True} if quantization.square else found


def engine_obstacle(quantization: Quantization) -> Reason | None:
    """Why a tensor under `match=` is gathered in high precision; None without `match=`."""
    if quantization.inverse is None:
        return None
    return Reason(ReasonKind.SCALES, "match=... quantizes as an inference engine does: whole tensors, not shards")


def part_obstacle(tensor: QuantizedTensor, gather: Gather) -> Reason | None:
    """The reason why amaxes of shards are not those of a tensor that is a part of what is gathered. What DTensor cuts off where
    it has padded shards is fewer rows, or columns, than there are ranks, of zeros. Where sizes are dynamic, nothing is
    known."""
    value, whole = tensor.value, value_of(gather.wait)
    sizes = [*whole.shape, value.rows, value.cols, 1 if value.batch is None else value.batch]
    if not all(isinstance(size, int) for size in sizes) or not whole.numel():
        return None
    left_out = whole.numel() - math.prod(sizes[whole.dim() :])
    if left_out <= (gather.num_ranks - 1) * max(whole.numel() // whole.shape[0], sizes[-3]):
        return None
    return Reason(ReasonKind.SCALES, "a part of the gathered tensor has amaxes of its own, which its shards do not have")


def _gemm_options(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast_accum: bool) -> dict[str, Any]:
    kinds = {f"granularity_{name}": one.quantization.granularity.value for name, one in (("a", a), ("b", b))}
    return {**kinds, "out_dtype": out_dtype, "fast_accum": fast_accum}


class Scheme(abc.ABC):
    """One kind of scales."""

    casts: ClassVar[Any] = ops.cast_with_scales.default  # The operation that quantizes.
    computes_scales: ClassVar[bool] = True  # It computes the scales too. Else they are its arguments.
    has_one_scale: bool = False
    """All values of a matrix, or of the rows of groups, have one scale: both copies hold the same values, one can be made of
    the other's bytes, and any rows can be cut off."""
    keeps_state: bool = False  # Scales come from the state, and amaxes are recorded in it.
    scales_columns: ClassVar[bool] = False  # A column of the columnwise copy has one scale, so that shards need all amaxes.
    reads_gemm_dtype: ClassVar[bool] = False
    """Casts read a value in the dtype in which the GEMM would have read it. Otherwise they read it as it was computed, such as
    a norm's float32 result."""
    num_reads: int = 1  # Number of times that a cast reads its input: 2 where the amax is read first. For estimates.

    # -- facts

    def fuses_with_producer(self, tensor: QuantizedTensor) -> bool:
        """True if casts of the tensor join the code that makes it. Otherwise it is written first, and is not recomputed in
        backward if that takes more than a view."""
        return True

    def obstacle(self, site: GemmSite, quantizations: Sequence[Quantization]) -> Reason | None:
        """The reason why a GEMM whose operands are quantized so cannot run, besides what holds for every FP8 GEMM."""
        return None

    def launch_key(self, cast: Cast) -> Hashable | None:
        """The key of a launch: casts of matrices under one recipe, with equal quantizations and equal keys, that are ready
        together share one; None if this one cannot."""
        return None

    def reads_rows_once(self, tensor: QuantizedTensor) -> bool:
        """True if one cast makes both copies of a matrix whose rows are in groups."""
        return False

    def has_one_copy(self, quantization: Quantization) -> bool:
        """True if the rowwise and the columnwise copy have the same values and scales."""
        return self.has_one_scale

    def can_transpose(self, quantization: Quantization) -> bool:
        """True if a copy of a matrix or a batch has the bytes of the other orientation, and its scales."""
        return False

    # -- tensors that are spread over ranks

    @abc.abstractmethod
    def sent(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> Mapping[Hashable, Fraction]:
        """Bytes per element of everything that travels through a gather instead of a tensor. Equal keys travel once."""

    @abc.abstractmethod
    def gather_obstacle(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> Reason | None:
        """The reason why copies of a gathered tensor cannot travel."""

    def shard_obstacle(self, quantization: Quantization, shares_scales: bool) -> Reason | None:
        """The reason why ranks could not quantize shards of a tensor with one scale, of schemes that have one. shares_scales:
        delayed scaling has equal scales on all of these ranks."""
        return None

    @abc.abstractmethod
    def sharded(self, quantization: Quantization, rows: int, elements: int, is_even: bool) -> Fraction | Reason:
        """Bytes per element that a gather sends of a weight whose rows are spread over ranks, or why it cannot: the only copy,
        or the rowwise one in the forward and the columnwise one in the backward. rows, elements: of a shard. is_even: all ranks
        have as many rows."""

    def shard(self, cursor: Cursor, cast: Cast, gather: Gather, matrix: fx.Node) -> tuple[Quantized, ...]:
        """Quantize this rank's shard, gather the copies, and make them ready for the GEMM. matrix: the gathered tensor as the
        GEMMs read it; the moves that lead to it from the gather are repeated on the copies."""
        raise NotImplementedError(f"{type(self).__name__} has no scales of its own casts")

    def compact(
        self, cursor: Cursor, x: fx.Node, quantization: Quantization, columnwise: bool, amaxes: fx.Node | None = None
    ) -> Compact:
        """A copy of x [rows, columns] as it travels. amaxes: of columns that have one scale; None: those of x."""
        raise NotImplementedError(f"{type(self).__name__} has no copies that travel with scales")

    def ready(
        self, cursor: Cursor, data: fx.Node, scales: fx.Node, quantization: Quantization, value: MatrixValue, layout: Layout
    ) -> tuple[fx.Node, fx.Node]:
        """A copy of a value as a GEMM reads it, and its scales, of a compact one."""
        raise NotImplementedError(f"{type(self).__name__} has no copies that travel with scales")

    def compact_factors(self, cursor: Cursor, data: fx.Node, scales: fx.Node, quantization: Quantization) -> fx.Node:
        """float32 factors of the values of a copy as it travels, [rows, columns], or what broadcasts to that."""
        return scales

    # -- casts and GEMMs

    def cast_options(self, quantization: Quantization) -> dict[str, Any]:
        """The arguments of a cast that say which elements share a scale, and how scales are made."""
        return {**kind(quantization), **scaling(quantization)}

    def gemm_options(self, device: torch.device) -> dict[str, Any]:
        """The arguments of a GEMM on a device that say what computes it."""
        return {}

    def matmul(
        self, cursor: Cursor, a: Quantized, b: Quantized, out_dtype: torch.dtype, fast_accum: bool, bias: fx.Node | None = None
    ) -> fx.Node:
        """The scaled GEMM of a [M, K] and b [N, K]: [M, N]. bias: [N], added before the one rounding."""
        transposed = cursor.call(aten.permute.default, b.data, [1, 0])
        options = {**_gemm_options(a, b, out_dtype, fast_accum), **self.gemm_options(value_of(a.data).device)}
        return cursor.call(ops.scaled_mm.default, a.data, transposed, a.scale_inv, b.scale_inv, bias, **options)

    def grouped_matmul(
        self, cursor: Cursor, a: Quantized, b: Quantized, offs: fx.Node | None, out_dtype: torch.dtype, fast_accum: bool
    ) -> fx.Node:
        """The grouped GEMM of operands whose inner dimensions come last, as their casts made them. `offs` is None where each
        matrix of a batch meets one of another."""
        order = [1, 0] if value_of(b.data).dim() == 2 else [0, 2, 1]
        transposed = cursor.call(aten.permute.default, b.data, order)
        options = _gemm_options(a, b, out_dtype, fast_accum)
        return cursor.call(ops.scaled_grouped_mm.default, a.data, transposed, a.scale_inv, b.scale_inv, offs, **options)

    def dequantize(self, cursor: Cursor, data: fx.Node, scale_inv: fx.Node, quantization: Quantization) -> fx.Node:
        """float32 values of a copy, [outer, inner] with its padding."""
        values = cursor.call(prims.convert_element_type.default, data, torch.float32)
        return cursor.call(aten.mul.Tensor, values, self.ready_factors(cursor, data, scale_inv, quantization))

    def transposed_scales(self, cursor: Cursor, made: Quantized) -> fx.Node:
        """`scale_inv` of the other orientation of a copy that can be transposed."""
        return made.scale_inv

    def ready_factors(self, cursor: Cursor, data: fx.Node, scale_inv: fx.Node, quantization: Quantization) -> fx.Node:
        """float32 factors of the values of a copy as a GEMM reads it, [outer, inner], or what broadcasts to that."""
        return scale_inv
