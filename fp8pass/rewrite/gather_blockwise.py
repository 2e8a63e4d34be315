"""The quantized all-gather of blockwise scaling: copies travel in the compact format, their scales beside them.

A block of scales commutes with the gather if no block crosses a shard: 1x128 blocks along rows always do, blocks that
span 128 rows (the columnwise copy, 128x128) where each shard has a multiple of 128 rows. In 1D rowwise and columnwise
copy have different values, so each travels in its own right; in 2D one copy serves both.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from fp8pass.graph.values import value_of
from fp8pass.rewrite.insertion import Inserter, inherit_recomputation
from fp8pass.rewrite.moves import keeps_blocks, replay, replay_on_scales, scale_shape
from lowering.formats import BLOCK, Granularity

aten = torch.ops.aten
ops = torch.ops.lowering

CASTS = frozenset({ops.cast_blockwise.default, ops.cast_transpose_blockwise.default})


@dataclasses.dataclass(frozen=True)
class Sent:
    """One copy that has to travel."""

    dtype: torch.dtype
    granularity: str
    columnwise: bool
    """Whether 1x128 blocks run along columns; False in 2D, where both orientations share the copy."""
    power_of_2: bool
    epsilon: float

    @property
    def height(self) -> int:
        """Rows of the tensor that share a row of scales."""
        return BLOCK if self.granularity == Granularity.BLOCK_128X128 or self.columnwise else 1

    @property
    def bytes_per_element(self) -> Fraction:
        """A byte, and its share of a float32 scale."""
        return 1 + Fraction(4, math.prod(Granularity(self.granularity).block or ()))


@dataclasses.dataclass(frozen=True)
class _Output:
    """One orientation that a cast makes and somebody reads."""

    sent: Sent
    columnwise: bool
    pad_outer: bool
    items: tuple[tuple[int, fx.Node], ...]
    """(0 for the data, 1 for its scales; the node that takes it)."""


def sent_for(cast: fx.Node) -> set[Sent]:
    """The copies that a cast of a gathered tensor needs."""
    return {output.sent for output in _outputs(cast)}


def _outputs(cast: fx.Node) -> list[_Output]:
    kwargs: Any = cast.kwargs
    if cast.target is ops.cast_blockwise.default:
        columnwise = [bool(kwargs.get("columnwise"))]
        paddings = [bool(kwargs.get("pad_outer"))]
    else:
        columnwise, paddings = [False, True], [bool(kwargs.get("pad_rows")), bool(kwargs.get("pad_cols"))]
    found = []
    for i, (is_columnwise, pads) in enumerate(zip(columnwise, paddings, strict=True)):
        items = tuple((user.args[1] - 2 * i, user) for user in cast.users if user.args[1] // 2 == i)
        granularity = kwargs["granularity"]
        options = (bool(kwargs.get("power_of_2", True)), float(kwargs.get("epsilon", 0.0)))
        is_own = is_columnwise and granularity == Granularity.BLOCK_1X128
        sent = Sent(cast.args[1], granularity, is_own, *options)
        if items:
            found.append(_Output(sent, is_columnwise, pads, items))
    return found


def keeps_blocks_of(cast: fx.Node, wait: fx.Node, source: fx.Node) -> bool:
    """Whether each block of the cast's scales lies within one rank's shard, and is moved as a whole."""
    matrix: Any = cast.args[0]
    heights = {sent.height for sent in sent_for(cast)}
    shard = value_of(source).shape
    return all(
        keeps_blocks(matrix, wait, height) and isinstance(shard[-2], int) and shard[-2] % height == 0 for height in heights
    )


def move_cast(
    insert: Inserter,
    wait: fx.Node,
    source: fx.Node,
    cast: fx.Node,
    copies: dict[Sent, tuple[fx.Node, fx.Node]],
    travel: Callable[[fx.Node, Callable[..., fx.Node]], fx.Node],
    backward: bool,
) -> None:
    """Replace a cast of the gathered tensor `wait` by one of the shard `source`. `copies`: what has travelled already;
    `travel` gathers a tensor."""

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = insert.call(cast, target, *args, backward=backward, **kwargs)
        inherit_recomputation(node, cast)
        return node

    matrix: Any = cast.args[0]
    outputs = _outputs(cast)
    needs_columns = any(output.sent.columnwise for output in outputs)
    for output in outputs:
        sent = output.sent
        if sent not in copies:
            data, scales = _quantize(source, sent, needs_columns, call)
            copies[sent] = travel(call(aten.view.dtype, data, torch.uint8), call), travel(scales, call)
        data, scales = copies[sent]
        data = replay(matrix, {wait: data}, call)
        scales = replay_on_scales(matrix, {wait: scales}, sent.height, value_of(scales).shape[-1], call)
        ready = call(
            ops.gemm_ready_blockwise.default,
            call(aten.view.dtype, data, sent.dtype),
            scales,
            granularity=sent.granularity,
            columnwise=output.columnwise,
            pad_outer=output.pad_outer,
        )
        for part, node in output.items:
            node.replace_all_uses_with(insert.item(cast, ready, part, backward))


def _quantize(source: fx.Node, sent: Sent, needs_columns: bool, call: Callable[..., fx.Node]) -> tuple[fx.Node, fx.Node]:
    """Data in the shard's shape, and scales in the shape that the moves can be repeated on. With `needs_columns` one op makes
    the rowwise and the columnwise copy of one read."""
    shape = list(value_of(source).shape)
    matrix = source if len(shape) == 2 else call(aten.reshape.default, source, [-1, shape[-1]])
    options = {"power_of_2": sent.power_of_2, "epsilon": sent.epsilon}
    if needs_columns:
        made = call(ops.compact_blockwise.default, matrix, sent.dtype, granularity=sent.granularity, **options)
    else:
        made = call(ops.quantize_blockwise.default, matrix, sent.dtype, [sent.height, BLOCK], **options)
    first = 2 if sent.columnwise else 0
    data, scales = (call(operator.getitem, made, first + i) for i in (0, 1))
    if len(shape) != 2:
        data = call(aten.reshape.default, data, shape)
        scales = call(aten.reshape.default, scales, scale_shape(source, sent.height, value_of(scales).shape[-1]))
    return data, scales
