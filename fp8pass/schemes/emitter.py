"""The emitter: makes the casts of one recipe with one scheme in one graph.

One scale per tensor: the scales come before the cast, from amaxes of the tensors; or from the state, by value: the amaxes of
earlier steps decided them. Then every cast gives the amax of what it reads, and one operation per side of the partition records
the amaxes, of which `fp8pass.scales` makes the next step's scales. Other scales are computed by the cast.

Rows in groups: the rowwise copy is made as that of a matrix. With one scale for all rows, those that belong to no group become
zeros before, so that they reach no amax; with a scale per row they spoil nothing but themselves. A gathered source is cast
once, and its bytes and scales are gathered. The columnwise copy, which grad_weight reads, has every group at a padded offset
(lowering/grouped/reference.py): with one scale per tensor it is moved out of the rowwise one, else it is made of the tensor. A
scheme may have one cast for both copies of rows that are not gathered.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor, never_recompute, pin
from fp8pass.graph.gathers import Gather, replay
from fp8pass.graph.values import Groups, same_size, value_of
from fp8pass.recipes.quantization import ScaleFrom
from fp8pass.recipes.recipe import Recipe
from fp8pass.schemes.blocks import BlockScheme
from fp8pass.schemes.copies import Cast, Copy, Layout, Quantized, QuantizedTensor, as_operand, insert_cast
from fp8pass.schemes.scheme import Scheme, scaling
from lowering.formats import pad_to_alignment

aten = torch.ops.aten
ops = torch.ops.lowering

COLUMNS = ops.cast_columns.default
_ROWS = (Layout(False),)

Pair = tuple[fx.Node, fx.Node]  # A scale and its reciprocal: float32 scalars, or vectors for a tensor with several `entries`.

# -- the state as inputs

FIRST_STEP = "first_step"  # The variant of a graph for calls that meet empty histories.
STATE_KINDS = ("scale", "amax", "grad_amax", "slots")  # The inputs of a graph per recipe with state, as in `StateNodes`.


@dataclasses.dataclass(frozen=True)
class StateKey:
    """The key of one of them."""

    recipe: Recipe
    kind: str


@dataclasses.dataclass(frozen=True)
class StateNodes:
    """The placeholders through which the state of a recipe enters a graph."""

    scale: fx.Node
    amax: fx.Node  # The vector in which the forward records.
    grad_amax: fx.Node
    """The vector in which the backward records: the same memory, but for a recomputed forward, which must not record again."""
    slots: fx.Node


def state_nodes(inputs: Mapping[Hashable, fx.Node]) -> dict[Recipe, StateNodes]:
    """The placeholders of each recipe that keeps state, among a graph's extra inputs by key."""
    recipes = dict.fromkeys(key.recipe for key in inputs if isinstance(key, StateKey))
    return {recipe: StateNodes(*(inputs[StateKey(recipe, kind)] for kind in STATE_KINDS)) for recipe in recipes}


# -- casts


class Emitter:
    """Makes the casts of one recipe with one scheme in one graph, or outside of graphs (`eager.py`)."""

    def __init__(
        self,
        scheme: Scheme,
        tensors: Sequence[QuantizedTensor] = (),
        state: StateNodes | None = None,
        *,
        records: bool = False,
        is_first: bool = False,
    ):
        """tensors: those whose scales come from the recipe's state, in the order of their slots. state: None for recipes that
        keep none. records: whether calls record amaxes, as in training. is_first: it is for calls that meet empty
        histories, whose tensors arrive with the scale 0 and take it from their own amax."""
        tensors = tuple(tensors) if scheme.keeps_state else ()
        self.scheme, self.tensors, self.state, self._is_first = scheme, tensors, state, is_first
        ends = list(itertools.accumulate(tensor.entries for tensor in tensors))
        self._num_entries = ends[-1] if ends else 0
        self._slot = {tensor: end - tensor.entries for tensor, end in zip(tensors, ends, strict=True)}
        """First entry of each tensor."""
        self.records = records and scheme.keeps_state  # The first cast of every tensor records its amax.
        self.loaded: Pair | None = None  # The scales in the state, and their reciprocals.
        self.scales: dict[QuantizedTensor, Pair] = {}
        self.amaxes: list[tuple[Cast, fx.Node]] = []  # Recorded amaxes of the casts so far.
        self._rows_of: dict[QuantizedTensor, fx.Node] = {}  # Rowwise copies of rows in groups, before they are gathered.

    def begin(self, cursor: Cursor) -> None:
        """Insert what comes before the first GEMM; cursor: at the start of the graph. The scales of the state by value and
        their reciprocals, once per graph. Backward must see what forward saw, even after a step boundary has changed the state:
        so they are saved, never read again."""
        if self.tensors:
            assert self.state is not None
            loaded = cursor.call(ops.load_scales.default, self.state.scale, self.state.slots, self._num_entries)
            self.loaded = cursor.item(loaded, 0), cursor.item(loaded, 1)
            never_recompute(loaded, *self.loaded)

    def quantize(self, cursor: Cursor, casts: Sequence[Cast], reads: Sequence[fx.Node]) -> list[tuple[Quantized, ...]]:
        """Make the copies of casts, all in one launch: those of each, rowwise first. Several casts have equal `launch_key`s and
        read matrices; a single one may have any source but `FromInput`. reads: the matrices or batches. For a `Gather` the
        gathered tensor as the GEMMs read it: the moves that lead to it from the gather are repeated on the copies. For a
        `Copy` its data."""
        cast, read = casts[0], reads[0]
        if isinstance(cast.source, Gather):
            shard = self.scheme.shard if self.scheme.computes_scales else self._shard
            return [shard(cursor, cast, cast.source, read)]
        if (groups := cast.tensor.value.groups) is not None:
            return [
                self._both_of_rows(cursor, cast, read, groups)
                if len(cast.copies) == 2
                else (self._rows(cursor, cast, read, groups),)
            ]
        made = self._cast(cursor, casts, reads, cast.layouts)
        if cast.tensor.quantization.scale_from is ScaleFrom.SHARED and cast.tensor.value.batch is not None:
            return [tuple(_per_row(cursor, copy) for copy in copies) for copies in made]
        return made

    def _cast(
        self, cursor: Cursor, casts: Sequence[Cast], reads: Sequence[fx.Node], layouts: Sequence[Layout]
    ) -> list[tuple[Quantized, ...]]:
        """One cast of matrices, or of one batch."""
        first, scheme = casts[0], self.scheme
        dtype, with_amax = first.tensor.dtype, self.records and first.is_first
        if scheme.computes_scales:
            options = scheme.cast_options(first.tensor.quantization)
            node, made = insert_cast(cursor, scheme.casts, reads, dtype, layouts, **options)
        else:
            self._find_scales(cursor, [cast.tensor for cast in casts], reads)
            scales = [self.scales[cast.tensor][0] for cast in casts]
            node, made = insert_cast(cursor, scheme.casts, reads, dtype, layouts, scales, with_amax)
        found = []
        for cast, (data, inverses, amax) in zip(casts, made, strict=True):
            if amax is not None:
                is_batched = cast.tensor.value.batch is not None
                per_tensor = is_batched and cast.tensor.entries == 1
                self.record(cursor, cast, cursor.call(aten.amax.default, amax) if per_tensor else amax)
            inverses = inverses if scheme.computes_scales else [self.scales[cast.tensor][1]] * len(data)
            found.append(tuple(Quantized(*one, node) for one in zip(data, inverses, cast.copies, strict=True)))
        return found

    def _both_of_rows(self, cursor: Cursor, cast: Cast, read: fx.Node, groups: Groups) -> tuple[Quantized, ...]:
        """Both copies of a matrix whose rows are in groups, not gathered, of one read."""
        of_rows, of_columns = cast.copies
        node, (row, of_row, column, of_column) = self._columns(cursor, of_columns, cast.layouts[1], read, groups, rowwise=True)
        return Quantized(row, of_row, of_rows, node), Quantized(column, of_column, of_columns, node)

    def _columns(
        self, cursor: Cursor, copy: Copy, layout: Layout, read: fx.Node, groups: Groups, **options: bool
    ) -> tuple[fx.Node, list[fx.Node]]:
        """The cast of a columnwise copy of rows in groups, of the tensor, which it gathers; and its results."""
        kind = {"granularity": copy.quantization.granularity.value, "pad_outer": layout.pads_outer}
        how = {**kind, **scaling(copy.quantization), **options}
        node = cursor.call(COLUMNS, read, copy.dtype, groups.offs, groups.index, **how)
        return node, cursor.items(node)

    def _rows(self, cursor: Cursor, cast: Cast, read: fx.Node, groups: Groups) -> Quantized:
        """The copy of a matrix whose rows are in groups."""
        tensor, (copy,), (layout,), scheme = cast.tensor, cast.copies, cast.layouts, self.scheme
        if isinstance(cast.source, Copy):
            moved = _moved_columns(cursor, self._rows_of[tensor], groups)
            return Quantized(moved, self.scales[tensor][1], copy, moved)
        if layout.columnwise and not scheme.has_one_scale:
            node, (data, scales) = self._columns(cursor, copy, layout, read, groups)
            return Quantized(data, scales, copy, node)
        is_compact = isinstance(scheme, BlockScheme)  # grouped GEMMs read blocks as a batch has them
        matrix = cursor.call(aten.unsqueeze.default, read, 0) if is_compact else read
        ((made,),) = self._cast(cursor, [cast], [matrix], _ROWS)
        data, scales = made.data, made.scale_inv
        if scheme.has_one_scale:
            if layout.columnwise:
                return dataclasses.replace(made, data=_moved_columns(cursor, data, groups))
            self._rows_of[tensor] = data
            return dataclasses.replace(made, data=_in_slots(cursor, data, groups))
        if is_compact:
            data, scales = (cursor.call(aten.select.int, node, 0, 0) for node in (data, scales))
        return dataclasses.replace(made, data=_in_slots(cursor, data, groups), scale_inv=_in_slots(cursor, scales, groups))

    def _shard(self, cursor: Cursor, cast: Cast, gather: Gather, matrix: fx.Node) -> tuple[Quantized, ...]:
        """`Scheme.shard` for one scale per tensor, which commutes with the gather and with all moves: they are repeated on the
        FP8 bytes (uint8, which every communication library has). The columnwise copy is transposed last."""
        tensor = cast.tensor
        if self.loaded is not None and not self._is_first:
            self.scales[tensor] = self._of_state(cursor, tensor)
        else:
            amax = cursor.call(ops.amaxes.default, [gather.shard_as_matrix(cursor)])
            self.scales[tensor] = self._pair(cursor, [tensor], gather.largest_of_ranks(cursor, amax))
        scale, scale_inv = self.scales[tensor]
        source = gather.shard_as_matrix(cursor)
        local, amax_of_shard = self._cast_shard(cursor, source, scale, tensor.dtype)
        if amax_of_shard is not None:
            self.record(cursor, cast, amax_of_shard)
        maker = local.all_input_nodes[0] if local.target is operator.getitem else local
        if source is not gather.source:
            shape = [cursor.size(gather.source, dim) for dim in range(value_of(gather.source).dim())]
            local = cursor.call(aten.reshape.default, local, shape)
        waited = gather.send(cursor, cursor.call(aten.view.dtype, local, torch.uint8))
        moved = replay(matrix, {gather.wait: waited}, cursor.call)
        copies = zip(cast.copies, cast.layouts, strict=True)
        return tuple(Quantized(_copy_of_bytes(cursor, moved, cast, layout), scale_inv, copy, maker) for copy, layout in copies)

    def _cast_shard(
        self, cursor: Cursor, matrix: fx.Node, scale: fx.Node, dtype: torch.dtype
    ) -> tuple[fx.Node, fx.Node | None]:
        """The FP8 values of a shard and, if it is recorded, its amax: from one read where the cast adds no padding."""
        columns = value_of(matrix).shape[1]
        if not (isinstance(columns, int) and pad_to_alignment(columns) == columns):
            data = cursor.call(ops.quantize.default, matrix, scale, dtype)
            return data, cursor.call(ops.amaxes.default, [matrix]) if self.records else None
        _, (((data,), _, amax),) = insert_cast(cursor, self.scheme.casts, [matrix], dtype, _ROWS, [scale], self.records)
        return data, amax

    def transposed(self, cursor: Cursor, cast: Cast, rows: Quantized) -> tuple[Quantized, ...]:
        """The columnwise copy of a matrix with one scale, of the bytes of the rowwise one."""
        (copy,), (layout,), data = cast.copies, cast.layouts, rows.data
        if not same_size(value_of(data).shape[1], cast.tensor.value.cols):  # padding
            data = cursor.call(aten.slice.Tensor, data, 1, 0, cast.tensor.value.cols)
        made = _copy_of_bytes(cursor, cursor.call(aten.view.dtype, data, torch.uint8), cast, layout)
        return (Quantized(made, rows.scale_inv, copy, made),)

    # -- one scale per tensor

    def pair_of(self, tensor: QuantizedTensor) -> Pair | None:
        """Scale and reciprocal of a tensor that was cast with one scale; None where blocks have their own."""
        return None if self.scheme.computes_scales else self.scales[tensor]

    def share(self, cursor: Cursor, tensors: Sequence[QuantizedTensor], matrices: Sequence[fx.Node]) -> None:
        """Give tensors, before their casts, one scale: of the largest amax of the matrices, theirs and the others'."""
        amaxes = cursor.call(ops.amaxes.default, list(matrices))
        self.scales.update(dict.fromkeys(tensors, self._pair(cursor, tensors, cursor.call(aten.amax.default, amaxes))))

    def _find_scales(self, cursor: Cursor, tensors: Sequence[QuantizedTensor], matrices: Sequence[fx.Node]) -> None:
        """Fill `scales` for a launch: matrices that are quantized alike, or one batch with a scale per entry."""
        if all(tensor in self.scales for tensor in tensors):
            return
        if self.loaded is not None and not self._is_first:
            self.scales.update((tensor, self._of_state(cursor, tensor)) for tensor in tensors)
        elif len(tensors) == 1:
            (tensor,), (matrix,) = tensors, matrices
            amax = cursor.call(ops.amaxes.default, [matrix], per_matrix=tensor.entries > 1)
            self.scales[tensor] = self._pair(cursor, tensors, amax)
        else:
            vectors = self._pair(cursor, tensors, cursor.call(ops.amaxes.default, list(matrices)))
            scales, inverses = ([cursor.call(aten.select.int, v, 0, i) for i in range(len(tensors))] for v in vectors)
            self.scales.update(zip(tensors, zip(scales, inverses, strict=True), strict=True))

    def _pair(self, cursor: Cursor, tensors: Sequence[QuantizedTensor], amax: fx.Node) -> Pair:
        """Scale and reciprocal from an amax, from those of several tensors vectors. In a first step only of tensors whose
        history is empty, which reads every tensor once more. Otherwise both come from one operation: Triton's float32 division,
        which is what Inductor makes of aten.reciprocal, does not round correctly."""
        quantization = tensors[0].quantization
        if self.loaded is None:
            pair = cursor.call(ops.scales_from_amax.default, amax, quantization.dtype, **scaling(quantization))
            return cursor.item(pair, 0), cursor.item(pair, 1)
        slots = [self._slot[tensor] for tensor in tensors]
        is_one = len(tensors) == 1
        loaded = (
            self._entries(cursor, self.loaded[0], tensors[0])
            if is_one
            else cursor.call(ops.take.default, self.loaded[0], slots)
        )
        own = cursor.call(ops.scales_from_amax.default, amax, quantization.dtype, margin=quantization.margin)
        scale = cursor.call(aten.where.self, cursor.call(aten.eq.Scalar, loaded, 0), cursor.item(own, 0), loaded)
        return scale, cursor.call(aten.reciprocal.default, scale)

    # -- the state

    def _of_state(self, cursor: Cursor, tensor: QuantizedTensor) -> Pair:
        assert self.loaded is not None
        scale, scale_inv = self.loaded
        return self._entries(cursor, scale, tensor), self._entries(cursor, scale_inv, tensor)

    def _entries(self, cursor: Cursor, vector: fx.Node, tensor: QuantizedTensor) -> fx.Node:
        """The part of a vector of the state that a tensor has."""
        first = self._slot[tensor]
        if tensor.entries > 1:
            return cursor.sharing().call(aten.slice.Tensor, vector, 0, first, first + tensor.entries)
        return cursor.sharing().call(aten.select.int, vector, 0, first)

    def record(self, cursor: Cursor, cast: Cast, amax: fx.Node) -> None:
        """Record the amax of a tensor, for recipes that keep it."""
        if not self.scheme.keeps_state:
            return
        if cast.tensor.entries > 1 and cast.at.offs is not None:
            amax = cursor.call(aten.where.self, self._is_recorded(cursor, cast, cast.at.offs), amax, zero(cursor, amax))
        self.amaxes.append((cast, amax))

    def _is_recorded(self, cursor: Cursor, cast: Cast, offs: fx.Node) -> fx.Node:
        """[entries] bool: an expert whose group is empty keeps its history, as a tensor does that a step did not read. An amax
        of 0 is none. In a first step every empty history gets its first entry, also that of an expert without tokens."""
        is_empty = None
        if self._is_first:
            assert self.loaded is not None
            is_empty = cursor.call(aten.eq.Scalar, self._entries(cursor, self.loaded[0], cast.tensor), 0)
        starts = cursor.call(aten.constant_pad_nd.default, offs, [1, -1], 0)
        has_rows = cursor.call(aten.gt.Tensor, offs, starts)
        return has_rows if is_empty is None else cursor.call(aten.logical_or.default, has_rows, is_empty)

    def end(self, cursor: Cursor) -> None:
        """Record the amaxes of one side of the partition; cursor: before the graph's output."""
        order = {node: i for i, node in enumerate(cursor.graph.nodes)}
        here = [(cast, amax) for cast, amax in self.amaxes if cast.at.is_backward == cursor.backward]
        if not here:
            return
        here.sort(key=lambda entry: (order[entry[0].at.node], self._slot[entry[0].tensor]))
        assert self.state is not None
        target = self.state.grad_amax if cursor.backward else self.state.amax
        for has_one in (True, False):  # scalars and vectors go by calls of their own
            entries = [entry for entry in here if (entry[0].tensor.entries == 1) == has_one]
            amaxes, slots = [amax for _, amax in entries], [self._slot[cast.tensor] for cast, _ in entries]
            if entries:
                pin(cursor.call(ops.record_amax.default, target, self.state.slots, amaxes, slots), cursor.backward)


def zero(cursor: Cursor, like: fx.Node) -> fx.Node:
    """A scalar 0 of a node's dtype and device."""
    value = value_of(like)
    return cursor.call(aten.full.default, [], 0, dtype=value.dtype, device=value.device)


def _copy_of_bytes(cursor: Cursor, data: fx.Node, cast: Cast, layout: Layout) -> fx.Node:
    """A copy for the GEMM, of the bytes of the whole matrix."""
    if layout.columnwise:
        data = cursor.call(aten.permute.default, data, [1, 0])
    return as_operand(cursor, data, cast.tensor.value, layout, cast.tensor.dtype)


def _in_slots(cursor: Cursor, data: fx.Node, groups: Groups) -> fx.Node:
    """The rows of a copy, or of its scales but those by blocks, in the order of the slots: bytes, which devices index."""
    if groups.index is None:
        return data
    value = value_of(data)
    dtype = value.dtype
    if value.shape[1] > 1 and value.stride(0) == 1:
        blocks = cursor.call(aten.permute.default, data, [1, 0])
        return cursor.call(aten.permute.default, cursor.call(aten.index.Tensor, blocks, [None, groups.index]), [1, 0])
    if dtype.is_floating_point and dtype.itemsize == 1:
        data = cursor.call(aten.view.dtype, data, torch.uint8)
        return cursor.call(aten.view.dtype, cursor.call(aten.index.Tensor, data, [groups.index]), dtype)
    return cursor.call(aten.index.Tensor, data, [groups.index])


def _moved_columns(cursor: Cursor, rows: fx.Node, groups: Groups) -> fx.Node:
    """The columnwise copy that holds the bytes of a rowwise one, which is not gathered."""
    return cursor.call(ops.transposed_copy.default, rows, groups.offs, groups.index)


def _per_row(cursor: Cursor, made: Quantized) -> Quantized:
    """A batch whose matrices have one scale each, as a GEMM of rows reads them."""
    count, rows, _ = value_of(made.data).shape
    scales = cursor.call(aten.reshape.default, made.scale_inv, [-1, 1, 1])
    scales = cursor.call(aten.expand.default, scales, [count, rows, 1])
    dense = cursor.call(aten.clone.default, scales, memory_format=torch.contiguous_format)
    return dataclasses.replace(made, scale_inv=dense)
