"""Blockwise scaling: one scale per 1x128 values along K or per 128x128 tile. Source: TransformerEngine's Float8BlockScaling.

In a graph: one cast per tensor computes scales and copies. Through all-gathers copies travel in the compact format, with their
scales. A block of scales commutes with the gather if no block crosses a shard: 1x128 blocks along rows always do, blocks
that span 128 rows (the columnwise copy, 128x128) where each shard has a multiple of 128 rows. With 1x128 blocks the rowwise and
the columnwise copy have different values, so each travels in its own right; with 128x128 blocks one copy serves both.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import fx

from fp8pass.errors import RecipeError
from fp8pass.graph.casts import CastFamily, Layout, emit, register
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather
from fp8pass.graph.moves import keeps_blocks, replay, replay_on_scales, scale_shape
from fp8pass.graph.values import Operand, value_of
from fp8pass.reasons import Reason, ReasonKind
from fp8pass.recipes.options import Format, check, check_bools, check_epsilon, check_format, is_int, recipe
from fp8pass.recipes.recipe import (
    Cast,
    Emitter,
    Epilogue,
    GatheredCopies,
    Quantization,
    Quantized,
    QuantizedTensor,
    Recipe,
    Scope,
    Sent,
    fp8_dtype,
)
from lowering.formats import Granularity

aten = torch.ops.aten
ops = torch.ops.lowering

CASTS = register(CastFamily(one=ops.cast_blockwise.default, both=ops.cast_transpose_blockwise.default, scales_out=True))
_GRANULARITIES = {1: Granularity.BLOCK_1X128, 2: Granularity.BLOCK_128X128}


@recipe
class Float8BlockScaling(Recipe):
    """One scale per 128 values or per 128x128 tile (DeepSeek-V3). Source: TransformerEngine."""

    name: ClassVar[str] = "blockwise"
    fuses_with_producer: ClassVar[bool] = False

    fp8_format: Format = Format.E4M3
    """Formats of the forward's tensors and of gradients."""
    x_block_scaling_dim: int = 1
    """1: inputs have a scale per 1x128 values along K; 2: per 128x128 tile."""
    w_block_scaling_dim: int = 2
    """The same for weights."""
    grad_block_scaling_dim: int = 1
    """The same for output gradients."""
    use_f32_scales: bool = False
    """Whether scales may be any float32; by default they are powers of two."""
    amax_epsilon: float = 0.0
    """Smaller amaxes count as this one."""

    def __post_init__(self) -> None:
        check_format(self)
        check_epsilon(self)
        check_bools(self, "use_f32_scales")
        dims = {o: getattr(self, o) for o in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")}
        for option, value in dims.items():
            check(self, option, is_int(value) and value in (1, 2), "use 1 (1x128) or 2 (128x128)")
        two = [option for option, value in dims.items() if value == 2]
        if len(two) > 1:
            raise RecipeError(
                f"Float8BlockScaling({two[0]}=2, {two[1]}=2): these two tensors meet in one GEMM, and none takes 128x128 by"
                f" 128x128; set one of them to 1"
            )

    def quantization(self, operand: Operand, role: str) -> Quantization:
        dims = {
            "input": self.x_block_scaling_dim,
            "weight": self.w_block_scaling_dim,
            "grad_output": self.grad_block_scaling_dim,
        }
        return Quantization(fp8_dtype(self, operand), _GRANULARITIES[dims[operand.kind]])

    def gathered(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> GatheredCopies:
        copies = {_compact(tensor, layout) for layout in layouts}
        matrix = tensor.value.reshape or tensor.value.root
        shard = value_of(gather.source).shape
        heights = {copy.height for copy in copies}
        is_whole = all(
            keeps_blocks(matrix, gather.wait, height) and isinstance(shard[-2], int) and shard[-2] % height == 0
            for height in heights
        )
        obstacle = None
        if not is_whole:
            obstacle = Reason(ReasonKind.SHAPE, "blocks of scales end within a rank's shard, or its sizes are dynamic")
        return GatheredCopies(tuple(Sent((self, c), c.bytes_per_element) for c in copies), obstacle)

    def emitter(self, scope: Scope) -> Emitter:
        return BlockwiseEmitter(self)

    @property
    def scaling(self) -> dict[str, Any]:
        """The arguments of an operation that say how scales are made."""
        return {"power_of_2": not self.use_f32_scales, "epsilon": self.amax_epsilon}


@dataclasses.dataclass(frozen=True)
class _Compact:
    """A copy in the compact format, which travels."""

    quantization: Quantization
    columnwise: bool
    """Whether 1x128 blocks run along columns; False for 128x128, where both orientations share the copy."""

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block of the copy's own orientation."""
        block = self.quantization.granularity.block
        assert block is not None
        return block

    @property
    def height(self) -> int:
        """Rows of the tensor that share a row of scales."""
        return self.block[1] if self.columnwise else self.block[0]

    @property
    def bytes_per_element(self) -> Fraction:
        """A byte, and its share of a float32 scale."""
        return 1 + Fraction(4, self.block[0] * self.block[1])


def _compact(tensor: QuantizedTensor, layout: Layout) -> _Compact:
    return _Compact(tensor.quantization, layout.columnwise and not tensor.quantization.granularity.is_square)


class BlockwiseEmitter(Emitter):
    """Casts that compute their own scales."""

    def __init__(self, recipe: Float8BlockScaling):
        self.recipe = recipe

    def quantize(self, cursor: Cursor, casts: Sequence[Cast], matrices: Sequence[fx.Node]) -> list[tuple[Quantized, ...]]:
        return [self._quantize(cursor, cast, matrix) for cast, matrix in zip(casts, matrices, strict=True)]

    def _quantize(self, cursor: Cursor, cast: Cast, matrix: fx.Node) -> tuple[Quantized, ...]:
        quantization = cast.tensor.quantization
        options = {"granularity": quantization.granularity.value, **self.recipe.scaling}
        made = emit(cursor, CASTS, matrix, quantization.dtype, cast.layouts, **options)
        return tuple(_quantized(copy.data, copy.scale_inv, quantization) for copy in made.copies)

    def quantize_shard(self, cursor: Cursor, cast: Cast, gather: Gather, matrix: fx.Node) -> tuple[Quantized, ...]:
        quantization = cast.tensor.quantization
        travelled: dict[_Compact, tuple[fx.Node, fx.Node]] = {}
        needed = [_compact(cast.tensor, layout) for layout in cast.layouts]
        copies = []
        for layout, compact in zip(cast.layouts, needed, strict=True):
            if compact not in travelled:
                data, scales = self._cast_shard(cursor, gather.source, compact, any(c.columnwise for c in needed))
                data = gather.send(cursor, cursor.call(aten.view.dtype, data, torch.uint8))
                travelled[compact] = data, gather.send(cursor, scales)
            data, scales = travelled[compact]
            data = replay(matrix, {gather.wait: data}, cursor.call)
            width = value_of(scales).shape[-1]
            scales = replay_on_scales(matrix, {gather.wait: scales}, compact.height, width, cursor.call)
            ready = cursor.call(
                ops.gemm_ready_blockwise.default,
                cursor.call(aten.view.dtype, data, quantization.dtype),
                scales,
                granularity=quantization.granularity.value,
                columnwise=layout.columnwise,
                pad_outer=layout.pads_outer,
            )
            copies.append(_quantized(cursor.item(ready, 0), cursor.item(ready, 1), quantization))
        return tuple(copies)

    def _cast_shard(self, cursor: Cursor, source: fx.Node, compact: _Compact, needs_columns: bool) -> tuple[fx.Node, fx.Node]:
        """Data in the shard's shape, and scales in the shape that the moves can be repeated on. With `needs_columns` one op
        makes the rowwise and the columnwise copy of one read."""
        shape = list(value_of(source).shape)
        matrix = source if len(shape) == 2 else cursor.call(aten.reshape.default, source, [-1, shape[-1]])
        dtype, granularity = compact.quantization.dtype, compact.quantization.granularity
        if needs_columns:
            target = ops.compact_blockwise.default
            made = cursor.call(target, matrix, dtype, granularity=granularity.value, **self.recipe.scaling)
        else:
            made = cursor.call(ops.quantize_blockwise.default, matrix, dtype, list(compact.block), **self.recipe.scaling)
        first = 2 if compact.columnwise else 0
        data, scales = (cursor.call(operator.getitem, made, first + i) for i in (0, 1))
        if len(shape) != 2:
            data = cursor.call(aten.reshape.default, data, shape)
            width = value_of(scales).shape[-1]
            scales = cursor.call(aten.reshape.default, scales, scale_shape(source, compact.height, width))
        return data, scales

    def matmul(self, cursor: Cursor, a: Quantized, b: Quantized, epilogue: Epilogue) -> fx.Node:
        transposed = cursor.call(aten.permute.default, b.data, [1, 0])
        return cursor.call(
            ops.scaled_mm_blockwise.default,
            a.data,
            transposed,
            a.scale_inv,
            b.scale_inv,
            epilogue.bias,
            granularity_a=a.quantization.granularity.value,
            granularity_b=b.quantization.granularity.value,
            out_dtype=epilogue.out_dtype,
        )


def _quantized(data: fx.Node, scale_inv: fx.Node | None, quantization: Quantization) -> Quantized:
    assert scale_inv is not None
    return Quantized(data, scale_inv, quantization)
