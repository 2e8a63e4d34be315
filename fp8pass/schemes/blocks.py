"""One scale per block: one float32 scale per 1x128 or 128x128 values, or one power of two (E8M0) per 1x32 or 32x32 (MXFP8).

In a graph: one cast per tensor computes scales and copies. Through all-gathers copies travel in the compact format, with their
scales. A block of scales commutes with the gather if no block crosses a shard: blocks along rows always do, blocks that
span several rows (the columnwise copy, square blocks) where each shard has a multiple of so many rows. With blocks along one
dimension the rowwise and the columnwise copy have different values, so each travels in its own right; with square blocks one
copy serves both.

NOTE [one chain] Passes that look for the gathers of Parameters, PyTorch's and GraphTrainer's, follow a chain from an input of
the graph: operations that read one node each. Values and scales of a Parameter in square blocks depend on nothing else, so
they travel as the bytes of one buffer.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import fx

from fp8pass.errors import Reason, ReasonKind
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.gathers import Gather, keeps_blocks, replay, replay_on_scales, scale_shape, starts_at_input
from fp8pass.graph.gemms import GemmSite
from fp8pass.graph.values import MatrixValue, value_of
from fp8pass.recipes.quantization import Quantization
from fp8pass.schemes.copies import Cast, Layout, Quantized, QuantizedTensor
from fp8pass.schemes.scheme import Compact, Scheme, engine_obstacle, kind
from lowering import hardware
from lowering.copies import num_blocks
from lowering.formats import BLOCK, E4M3, SCALE_ALIGNMENT, Granularity

aten = torch.ops.aten
ops = torch.ops.lowering

#: The options of Float8BlockScaling that choose the blocks of operands whose rows may be in groups.
_OPTIONS = {"input": "x_block_scaling_dim", "grad_output": "grad_block_scaling_dim"}


def _block_of(quantization: Quantization) -> tuple[int, int]:
    """Rows and columns of a block, in the orientation of the copy."""
    block = quantization.block
    assert block is not None
    return block


class BlockScheme(Scheme):
    """One scale per block: float32 for blocks of 128, whose GEMMs are MXFP8's on SM100 (lowering/paths.py); with `is_mx` E8M0
    codes for blocks of 32, uint8 in graphs (NOTE [E8M0] in lowering/scaling.py)."""

    reads_gemm_dtype: ClassVar[bool] = True

    def __init__(self, is_mx: bool):
        self._is_mx = is_mx

    def has_one_copy(self, quantization: Quantization) -> bool:
        height, width = _block_of(quantization)
        return height == width

    def _columns(self, quantization: Quantization, layout: Layout) -> bool:
        """True if the compact copy that one of this layout is made of has blocks along columns; square blocks serve both."""
        return layout.columnwise and not self.has_one_copy(quantization)

    # -- tensors that are spread over ranks

    def sent(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> Mapping[Hashable, Fraction]:
        quantization = tensor.quantization
        sides = {self._columns(quantization, layout) for layout in layouts}
        return {(tensor.recipe, quantization, side): self._bytes_per_element(quantization) for side in sides}

    def _bytes_per_element(self, quantization: Quantization) -> Fraction:
        """A byte, and its share of a scale."""
        height, width = _block_of(quantization)
        return 1 + Fraction(1 if self._is_mx else 4, height * width)

    def gather_obstacle(self, tensor: QuantizedTensor, layouts: Sequence[Layout], gather: Gather) -> Reason | None:
        if (obstacle := engine_obstacle(tensor.quantization)) is not None:
            return obstacle
        matrix, rows = tensor.value.reshape or tensor.value.root, value_of(gather.source).shape[-2]
        block = _block_of(tensor.quantization)
        heights = {block[self._columns(tensor.quantization, layout)] for layout in layouts}
        wholes = (
            isinstance(rows, int) and rows % height == 0 and keeps_blocks(matrix, gather.wait, height) for height in heights
        )
        if all(wholes):
            return None
        detail = "a block of scales crosses the border between two ranks' shards, or sizes are dynamic"
        return Reason(ReasonKind.SHAPE, detail)

    def sharded(self, quantization: Quantization, rows: int, elements: int, is_even: bool) -> Fraction | Reason:
        if (obstacle := engine_obstacle(quantization)) is not None:
            return obstacle
        if rows % max(_block_of(quantization)) or not is_even:
            detail = f"a block of scales crosses the border between two ranks' shards of {rows} rows"
            return Reason(ReasonKind.SHAPE, detail)
        return self._bytes_per_element(quantization)

    def shard(self, cursor: Cursor, cast: Cast, gather: Gather, matrix: fx.Node) -> tuple[Quantized, ...]:
        quantization = cast.tensor.quantization
        block = _block_of(quantization)
        sides = [self._columns(quantization, layout) for layout in cast.layouts]
        is_packed = cast.tensor.name.kind == "weight" and len(set(sides)) == 1 and starts_at_input(gather.source)
        arrived: dict[bool, Compact] = {}
        found = []
        for copy, layout, side in zip(cast.copies, cast.layouts, sides, strict=True):
            if side not in arrived:
                send = self._send_packed if is_packed else self._send
                arrived[side] = send(cursor, gather, quantization, side, any(sides))
            made, data, scales = arrived[side]
            data = replay(matrix, {gather.wait: data}, cursor.call)
            width = value_of(scales).shape[-1]
            scales = replay_on_scales(matrix, {gather.wait: scales}, block[side], width, cursor.call)
            data = cursor.call(aten.view.dtype, data, quantization.dtype)
            found.append(Quantized(*self.ready(cursor, data, scales, quantization, cast.tensor.value, layout), copy, made))
        return tuple(found)

    def _send(self, cursor: Cursor, gather: Gather, quantization: Quantization, side: bool, needs_columns: bool) -> Compact:
        """The cast, and what arrives of its data, in the gathered tensor's shape, and of its scales, in the shape that the
        moves can be repeated on. With `needs_columns` the cast makes the columnwise copy of the same read."""
        shape = list(value_of(gather.source).shape)
        matrix = gather.source if len(shape) == 2 else cursor.call(aten.reshape.default, gather.source, [-1, shape[-1]])
        made = self._cast(cursor, matrix, quantization, columnwise=needs_columns)
        data, scales = (cursor.call(operator.getitem, made, 2 * side + i) for i in (0, 1))
        if len(shape) != 2:
            data = cursor.call(aten.reshape.default, data, shape)
            height, width = _block_of(quantization)[side], value_of(scales).shape[-1]
            scales = cursor.call(aten.reshape.default, scales, scale_shape(gather.source, height, width))
        data = gather.send(cursor, cursor.call(aten.view.dtype, data, torch.uint8))
        return made, data, gather.send(cursor, scales)

    def _send_packed(self, cursor: Cursor, gather: Gather, quantization: Quantization, side: bool, _: bool) -> Compact:
        """`_send` of one buffer: NOTE [one chain]."""
        matrix, shape = gather.shard_as_matrix(cursor), list(value_of(gather.wait).shape)
        made = self._cast(cursor, matrix, quantization, rowwise=not side, columnwise=side)
        arrived = gather.send(cursor, cursor.call(ops.packed.default, made))
        data, scales = made.meta["val"]
        sizes = [part.numel() * part.element_size() for part in (data, scales)]
        of_ranks = cursor.call(aten.reshape.default, arrived, [gather.num_ranks, sum(sizes)])
        parts = [cursor.call(aten.slice.Tensor, of_ranks, 1, *ends) for ends in ((0, sizes[0]), (sizes[0], sum(sizes)))]
        values = cursor.call(aten.reshape.default, parts[0], shape)
        factors = cursor.call(aten.reshape.default, parts[1], [-1, scales.shape[1] * scales.element_size()])
        if scales.dtype != torch.uint8:
            factors = cursor.call(aten.view.dtype, factors, scales.dtype)
        if len(shape) != 2:
            lines = scale_shape(gather.wait, _block_of(quantization)[side], scales.shape[1])
            factors = cursor.call(aten.reshape.default, factors, lines)
        return made, values, factors

    def _cast(self, cursor: Cursor, matrix: fx.Node, quantization: Quantization, **sides: bool) -> fx.Node:
        options = {**sides, "compact": True, **self.cast_options(quantization)}
        return cursor.call(self.casts, [matrix], quantization.dtype, **options)

    def compact(
        self, cursor: Cursor, x: fx.Node, quantization: Quantization, columnwise: bool, amaxes: fx.Node | None = None
    ) -> Compact:
        made = self._cast(cursor, x, quantization, rowwise=not columnwise, columnwise=columnwise)
        data, scales = cursor.items(made)
        return made, data, scales

    def ready(
        self, cursor: Cursor, data: fx.Node, scales: fx.Node, quantization: Quantization, value: MatrixValue, layout: Layout
    ) -> tuple[fx.Node, fx.Node]:
        sides = {"columnwise": layout.columnwise, "pad_outer": layout.pads_outer}
        ready = cursor.call(ops.gemm_ready.default, data, scales, **kind(quantization), **sides)
        return cursor.item(ready, 0), cursor.item(ready, 1)

    def compact_factors(self, cursor: Cursor, data: fx.Node, scales: fx.Node, quantization: Quantization) -> fx.Node:
        if value_of(scales).dtype != torch.float32:
            scales = cursor.call(aten.view.dtype, scales, torch.float8_e8m0fnu)
            scales = cursor.call(torch.ops.prims.convert_element_type.default, scales, torch.float32)
        sizes, block = value_of(data).shape, max(_block_of(quantization))
        rows, columns = (1 if have == size else block for have, size in zip(value_of(scales).shape, sizes, strict=True))
        return _spread(cursor, scales, sizes, (rows, columns))

    # -- casts and GEMMs

    def fuses_with_producer(self, tensor: QuantizedTensor) -> bool:
        value, quantization = tensor.value, tensor.quantization
        is_matrix = value.batch is None and value.groups is None
        is_whole = all(isinstance(size, int) and size % BLOCK == 0 for size in (value.rows, value.cols))
        return is_matrix and is_whole and quantization.granularity is Granularity.BLOCK_1X128 and quantization.power_of_2

    def reads_rows_once(self, tensor: QuantizedTensor) -> bool:
        groups, quantization = tensor.value.groups, tensor.quantization
        return groups is not None and groups.index is None and quantization.granularity is Granularity.BLOCK_1X128

    def obstacle(self, site: GemmSite, quantizations: Sequence[Quantization]) -> Reason | None:
        device = value_of(site.node).device
        if self._is_mx:
            mx = Granularity.BLOCK_1X32
            refusal = hardware.refusal(hardware.Gemm(E4M3, E4M3, mx, mx, is_grouped=site.form is not None), device)
            instead = "; use the recipe 'blockwise' there" if hardware.has_fp8_tensor_cores(device) else ""
            return None if refusal is None else Reason(ReasonKind.HARDWARE, f"{refusal}{instead}")
        if site.offs is not None:
            pairs = zip(site.operands, quantizations, strict=True)
            square = next((o for o, q in pairs if o.value.groups is not None and q.granularity.is_square), None)
            if square is not None:
                detail = (
                    f"128x128 blocks of the {square.kind} would span rows of several groups; {_OPTIONS[square.kind]}=1 runs"
                )
                return Reason(ReasonKind.OPERAND_FORMATS, detail)
        if all(q.power_of_2 for q in quantizations) or not hardware.has_mx_scaled_mm(device):
            return None
        detail = "blockwise GEMMs run as MXFP8 on this device, whose scales are powers of two; use_f32_scales=False runs"
        return Reason(ReasonKind.HARDWARE, detail)

    def launch_key(self, cast: Cast) -> Hashable | None:
        return None if self._is_mx else cast.layouts

    def gemm_options(self, device: torch.device) -> dict[str, Any]:
        return {"implementation": "mxfp8"} if not self._is_mx and hardware.has_mx_scaled_mm(device) else {}

    def ready_factors(self, cursor: Cursor, data: fx.Node, scale_inv: fx.Node, quantization: Quantization) -> fx.Node:
        block = quantization.granularity.block
        assert block is not None
        scales = self._scale_values(cursor, data, scale_inv, quantization)
        return _spread(cursor, scales, (cursor.size(data, 0), cursor.size(data, 1)), block)

    def _scale_values(self, cursor: Cursor, data: fx.Node, scale_inv: fx.Node, quantization: Quantization) -> fx.Node:
        """float32 scales of the blocks of a copy: an entry per row, or row of blocks, and block of its inner dimension."""
        if self._is_mx:
            return cursor.call(ops.scale_values_mxfp8.default, data, scale_inv)
        outer, inner = (cursor.size(data, dim) for dim in (0, 1))
        if quantization.granularity is Granularity.BLOCK_1X128:
            return cursor.call(aten.permute.default, _cut(cursor, scale_inv, 1, outer), [1, 0])
        # Of a dynamic width the blocks beyond are cut with the values.
        return _cut(cursor, scale_inv, 1, num_blocks(inner, BLOCK)) if isinstance(inner, int) else scale_inv

    def can_transpose(self, quantization: Quantization) -> bool:
        return quantization.granularity is Granularity.BLOCK_128X128

    def transposed_scales(self, cursor: Cursor, made: Quantized) -> fx.Node:
        """The grid of blocks, transposed: GEMM-ready, for batches as their casts leave it."""
        value, columnwise = made.copy.value, made.copy.columnwise
        blocks = num_blocks(value.rows if columnwise else value.cols, BLOCK)
        first = value_of(made.scale_inv).dim() - 2
        grid = cursor.call(aten.slice.Tensor, made.scale_inv, first + 1, 0, blocks)
        grid = cursor.call(aten.permute.default, grid, [*range(first), first + 1, first])
        extra = -value_of(grid).shape[-1] % SCALE_ALIGNMENT if value.batch is None else 0
        if extra:
            grid = cursor.call(aten.constant_pad_nd.default, grid, [0, extra], 0)
        return cursor.call(aten.clone.default, grid, memory_format=torch.contiguous_format)


def _spread(cursor: Cursor, scales: fx.Node, sizes: tuple[Any, Any], block: tuple[int, int]) -> fx.Node:
    """Each scale, repeated over its block, of a copy of these sizes."""
    for dim in (1, 0):
        if block[dim] > 1:
            others = [cursor.size(scales, d) for d in (0, 1)]
            scales = cursor.call(aten.unsqueeze.default, scales, dim + 1)
            shape = [*others[: dim + 1], block[dim], *others[dim + 1 :]]
            scales = cursor.call(aten.expand.default, scales, shape)
            scales = cursor.call(aten.reshape.default, scales, [others[0], -1] if dim == 1 else [-1, others[1]])
            scales = _cut(cursor, scales, dim, sizes[dim])
    return scales


def _cut(cursor: Cursor, x: fx.Node, dim: int, size: Any) -> fx.Node:
    """The first entries along a dimension; x itself where that is all of it."""
    is_whole = isinstance(size, int) and cursor.size(x, dim) == size
    return x if is_whole else cursor.call(aten.slice.Tensor, x, dim, 0, size)
