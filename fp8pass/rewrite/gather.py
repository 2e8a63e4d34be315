"""Quantized all-gather: where gathered shards are only quantized afterwards, quantize them first, and let FP8 travel.

Runs on a rewritten graph. Quantizing with one scale per tensor is elementwise, so it commutes with the gather and with
every op that only moves elements; these are repeated on the FP8 bytes (uint8, which every communication library has).
The columnwise copy is transposed after the gather. Blockwise copies travel in the compact format with their scales
(`gather_blockwise`). Nothing is moved where ranks' scales may differ, or where somebody
reads the gathered tensor in high precision too; the record says so.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from fp8pass.graph.origin import module_path
from fp8pass.graph.sites import GraphContext
from fp8pass.graph.values import same_size, value_of
from fp8pass.recipes import DelayedScaling, Recipe
from fp8pass.rewrite import gather_blockwise as blockwise
from fp8pass.rewrite.insertion import Inserter, inherit_recomputation, never_recompute
from fp8pass.rewrite.moves import MOVES, is_gathered, moves_only, replay
from fp8pass.rewrite.parallel import all_reduce_amax
from lowering.formats import pad_to_alignment

aten = torch.ops.aten
ops = torch.ops.lowering
c10d = torch.ops._c10d_functional

#: Quantizing ops -> what their outputs are; `cast` has one, which is no tuple.
_CASTS = {
    ops.cast.default: ("data",),
    ops.cast_amax.default: ("data", "amax"),
    ops.cast_transpose.default: ("rowwise", "columnwise"),
    ops.cast_transpose_amax.default: ("rowwise", "columnwise", "amax"),
}


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
    """Bytes that it receives in fact."""
    quantized: bool
    """Whether FP8 travels."""
    reason: str | None
    """Why it does not."""


@dataclasses.dataclass
class _Gather:
    """A gather and everything that reads it."""

    wait: fx.Node
    casts: list[fx.Node]
    amaxes: list[fx.Node]
    others: list[fx.Node]

    @property
    def source(self) -> fx.Node:
        return self._call.args[0]

    @property
    def num_ranks(self) -> int:
        return self._call.args[1]

    @property
    def group(self) -> Any:
        return self._call.args[2]

    @property
    def num_sent(self) -> int:
        """How many FP8 copies have to travel: one per format and scale."""
        return len(self._sent)

    @property
    def bytes_sent(self) -> Fraction:
        """Bytes that travel per element."""
        return sum((s.bytes_per_element if isinstance(s, blockwise.Sent) else Fraction(1) for s in self._sent), Fraction())

    @property
    def _sent(self) -> set[Any]:
        per_tensor = {cast.args[1:3] for cast in self.casts if cast.target in _CASTS}
        return per_tensor.union(*(blockwise.sent_for(cast) for cast in self.casts if cast.target in blockwise.CASTS))

    @property
    def _call(self) -> Any:
        return self.wait.args[0]


def quantize_before_gathers(
    graph: fx.Graph, context: GraphContext, recipe_of: Callable[[fx.Node], Recipe | None]
) -> list[GatherRecord]:
    """Move quantization before every all-gather where that changes no number; a record per gather that feeds FP8 GEMMs.

    `recipe_of` gives the recipe of a scale that comes from the state, None for one that the graph computes.
    """
    insert = Inserter(graph)
    records: list[GatherRecord] = []
    moved: list[fx.Node] = []
    pending = [n for n in graph.nodes if n.target is c10d.wait_tensor.default and is_gathered(n)]
    while pending:
        gather = _readers(pending.pop())
        if not gather.casts:
            continue
        reason = _obstacle(gather, context, recipe_of)
        records.append(_record(gather, context, reason))
        if reason is None:
            _move(insert, gather)
            moved.append(gather.wait)
    graph.eliminate_dead_code()
    for wait in moved:  # collectives count as side effects, so that dead code elimination leaves them
        gathered = wait.args[0]
        graph.erase_node(wait)
        graph.erase_node(gathered)
    graph.eliminate_dead_code()
    return records[::-1]


def merge_equal_gathers(graph: fx.Graph) -> None:
    """Let readers of one shard share its gather: DTensor gathers it anew for each linear that reads it.

    So q, k and v have one input again, which is sent once and quantized once.
    """
    first: dict[Any, fx.Node] = {}
    merged: set[fx.Node] = set()
    for node in list(graph.nodes):
        starts = node.target is c10d.all_gather_into_tensor.default
        follows = node.target is c10d.wait_tensor.default or node.target in MOVES
        if not starts and not (follows and any(n in merged for n in node.all_input_nodes)):
            continue
        merged.add(node)
        tags = tuple(str(node.meta.get(key)) for key in ("partitioner_tag", "recompute", "ac_graph_id"))
        key = (node.target, _hashable(node.args), _hashable(tuple(node.kwargs.items())), tags)
        known = first.setdefault(key, node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, (list, tuple)) else value


def _readers(wait: fx.Node) -> _Gather:
    """What reads the gathered tensor, seen through moves."""
    gather = _Gather(wait, [], [], [])
    order = {node: i for i, node in enumerate(wait.graph.nodes)}
    seen: set[fx.Node] = set()
    queue = list(wait.users)
    while queue:
        node = queue.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if node.target in _CASTS or node.target in blockwise.CASTS:
            gather.casts.append(node)
        elif node.target is ops.amax.default:
            gather.amaxes.append(node)
        elif node.target in MOVES and moves_only(node, wait):
            queue += node.users
        else:
            gather.others.append(node)
    gather.casts.sort(key=lambda n: order[n])
    return gather


def _obstacle(gather: _Gather, context: GraphContext, recipe_of: Callable[[fx.Node], Recipe | None]) -> str | None:
    if gather.others:
        return f"readers: {_op_name(gather.others[0])} reads the gathered tensor in high precision"
    if gather.bytes_sent >= value_of(gather.wait).element_size():
        return f"bytes: FP8 copies with {gather.num_sent} different scales are no less than the tensor itself"
    for cast in gather.casts:
        if cast.target in blockwise.CASTS:
            if not blockwise.keeps_blocks_of(cast, gather.wait, gather.source):
                return "shape: blocks of scales end within a rank's shard, or its sizes are dynamic"
            continue
        recipe = recipe_of(cast.args[1])
        if isinstance(recipe, DelayedScaling) and not recipe.reduce_amax:
            return "scales: reduce_amax=False, so ranks scale the tensor differently"
        if recipe is not None and not context.shares_scales(gather.group):
            return "scales: amax_reduction_group does not hold all ranks of the gather"
        if recipe is None and not _is_scaled_by(cast.args[1], gather.amaxes):
            return "scales: the scale does not come from the gathered tensor"
        if any(_padding(out, cast, part) is None for part, out in _outputs(cast).items() if part != "amax"):
            return "shape: padding to multiples of 16 with dynamic sizes"
    return None


def _op_name(node: fx.Node) -> str:
    return "the model's output" if node.op == "output" else str(getattr(node.target, "_opname", node.target))


def _is_scaled_by(scale: Any, amaxes: list[fx.Node]) -> bool:
    return scale.target is ops.scale_from_amax.default and scale.args[0] in amaxes


def _outputs(cast: fx.Node) -> dict[str, fx.Node]:
    """The op's outputs that are read, by what they are."""
    names = _CASTS[cast.target]
    if len(names) == 1:
        return {_layout(cast): cast}
    found = {names[int(user.args[1])]: user for user in cast.users}
    return {_layout(cast) if name == "data" else name: node for name, node in found.items()}


def _layout(cast: fx.Node) -> str:
    return "columnwise" if cast.kwargs.get("columnwise") else "rowwise"


def _padding(output: fx.Node, cast: fx.Node, layout: str) -> list[int] | None:
    """How many zero columns and rows an FP8 copy has more than the matrix; None if that depends on dynamic sizes."""
    rows, cols = value_of(cast.args[0]).shape
    expected = (cols, rows) if layout == "columnwise" else (rows, cols)
    extra: list[int] = []
    for have, want in zip(value_of(output).shape, expected, strict=True):
        if same_size(have, want):
            extra.append(0)
        elif isinstance(have, int) and isinstance(want, int):
            extra.append(have - want)
        else:
            return None
    return [0, extra[1], 0, extra[0]]


def _move(insert: Inserter, gather: _Gather) -> None:
    for amax in gather.amaxes:
        backward = _is_backward(amax)
        matrix = _as_matrix(insert, gather.source, amax, backward)
        local = insert.call(amax, ops.amax.default, matrix, backward=backward)
        for node in (matrix, local):
            if node is not gather.source:
                inherit_recomputation(node, amax)
        amax.replace_all_uses_with(all_reduce_amax(insert, local, gather.group, amax, backward)[-1])
    sent: dict[Any, tuple[fx.Node, fx.Node | None]] = {}
    copies: dict[blockwise.Sent, tuple[fx.Node, fx.Node]] = {}
    travel = functools.partial(_travel, gather=gather)
    for cast in gather.casts:
        if cast.target in blockwise.CASTS:
            blockwise.move_cast(insert, gather.wait, gather.source, cast, copies, travel, _is_backward(cast))
        else:
            _move_cast(insert, gather, cast, sent)


def _move_cast(insert: Inserter, gather: _Gather, cast: fx.Node, sent: dict[Any, tuple[fx.Node, fx.Node | None]]) -> None:
    """Replace a cast of the gathered tensor. `sent` holds what has been gathered in FP8, and the shard's amax."""
    backward = _is_backward(cast)
    matrix, scale, dtype = cast.args[:3]
    outputs = _outputs(cast)

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = insert.call(cast, target, *args, backward=backward, **kwargs)
        inherit_recomputation(node, cast)
        return node

    if (scale, dtype) not in sent:
        source = _as_matrix(insert, gather.source, cast, backward)
        local, amax = _quantize(source, scale, dtype, "amax" in outputs, call)
        if source is not gather.source:
            inherit_recomputation(source, cast)
            shape = [insert.size(cast, gather.source, dim, backward) for dim in range(value_of(gather.source).dim())]
            local = call(aten.reshape.default, local, shape)
        sent[scale, dtype] = _travel(call(aten.view.dtype, local, torch.uint8), call, gather), amax
    waited, amax = sent[scale, dtype]
    moved = replay(matrix, {gather.wait: waited}, call)
    for layout, output in outputs.items():
        if layout == "amax":
            output.replace_all_uses_with(amax)
            continue
        data = moved
        if layout == "columnwise":
            data = call(aten.permute.default, data, [1, 0])
        padding = _padding(output, cast, layout)
        if padding and any(padding):
            data = call(aten.constant_pad_nd.default, data, padding, 0)
        data = call(aten.clone.default, data, memory_format=torch.contiguous_format)
        output.replace_all_uses_with(call(aten.view.dtype, data, dtype))


def _travel(local: fx.Node, call: Callable[..., fx.Node], gather: _Gather) -> fx.Node:
    """Gather other data the way the tensor was gathered."""
    gathered = call(c10d.all_gather_into_tensor.default, local, gather.num_ranks, gather.group)
    waited = call(c10d.wait_tensor.default, gathered)
    for node in (gathered, waited):
        if "recompute" not in node.meta:
            never_recompute(node)
    return waited


def _as_matrix(insert: Inserter, node: fx.Node, before: fx.Node, backward: bool) -> fx.Node:
    dims = value_of(node).dim()
    if dims == 2:
        return node
    columns = insert.size(before, node, dims - 1, backward)
    return insert.call(before, aten.reshape.default, node, [-1, columns], backward=backward)


def _quantize(
    matrix: fx.Node, scale: Any, dtype: torch.dtype, with_amax: bool, call: Callable[..., fx.Node]
) -> tuple[fx.Node, fx.Node | None]:
    """The FP8 values of a shard and, if asked for, its amax: from one read where the cast adds no padding."""
    columns = value_of(matrix).shape[1]
    if not (isinstance(columns, int) and pad_to_alignment(columns) == columns):
        data = call(ops.quantize.default, matrix, scale, dtype)
        return data, call(ops.amax.default, matrix) if with_amax else None
    if not with_amax:
        return call(ops.cast.default, matrix, scale, dtype), None
    both = call(ops.cast_amax.default, matrix, scale, dtype)
    return call(operator.getitem, both, 0), call(operator.getitem, both, 1)


def _is_backward(node: fx.Node) -> bool:
    return "backward" in node.meta.get("partitioner_tag", "")


def _record(gather: _Gather, context: GraphContext, reason: str | None) -> GatherRecord:
    shard = value_of(gather.source)
    count = shard.numel() * (gather.num_ranks - 1)
    before = count * shard.element_size()
    after = int(count * gather.bytes_sent) if isinstance(count, int) else count * round(gather.bytes_sent)
    path = module_path(gather.casts[0])
    return GatherRecord(
        module="matmul" if path is None else context.name_module(path),
        is_backward=_is_backward(gather.casts[0]),
        num_ranks=gather.num_ranks,
        bytes_before=_size(before),
        bytes_after=_size(before if reason else after),
        quantized=reason is None,
        reason=reason,
    )


def _size(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size)
