"""What the plan says of a cast, checked in the graph: what it reads, how it scales, where it stands.

Expectations come from the plan and from the names of arguments in the operations' schemas, never from what inserted the nodes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fp8pass.errors import InvariantError
from fp8pass.graph.calls import arguments_of, maker_of
from fp8pass.graph.casts import CastNode, Layout
from fp8pass.graph.cursor import is_pinned
from fp8pass.graph.gathers import Gather
from fp8pass.graph.scales import Place, inverse_at, place_of, scale_at
from fp8pass.graph.values import Groups, MatrixValue, same_shape, value_of
from fp8pass.recipes.quantization import Quantization, ScaleFrom
from fp8pass.rewrite.apply import Applied
from fp8pass.rewrite.plan import Launch, Plan
from fp8pass.rewrite.verify_moves import (
    are_of_columns,
    check_padding,
    check_slots,
    check_travelled,
    check_turned,
    reduced_of,
)
from fp8pass.schemes import scheme_of
from fp8pass.schemes.copies import Cast, Copy, FromCopy, FromGather, FromInput, FromValue, Quantized, QuantizedTensor

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ops = torch.ops.lowering
prims = torch.ops.prims

_AMAXES = (ops.amax.default, ops.multi_amax.default)


def check_arguments(node: fx.Node, **wanted: Any) -> None:
    """Raise InvariantError if an argument of a call that has one of these names has another value."""
    for name, found in arguments_of(node).items():
        if name in wanted and found != wanted[name]:
            raise InvariantError(f"{node.name}: {name} is {found}, the plan says {wanted[name]}")


def options_of(quantization: Quantization) -> dict[str, Any]:
    """What arguments with these names are, of operations that quantize so."""
    block = quantization.block
    return {
        "dtype": quantization.dtype,
        "granularity": quantization.granularity.value,
        "square": quantization.square,
        "power_of_2": quantization.power_of_2,
        "epsilon": quantization.epsilon,
        "inverse": quantization.inverse,
        "margin": quantization.margin,
        "block": None if block is None else list(block),
    }


def layout_options(layouts: tuple[Layout, ...]) -> dict[str, bool]:
    """The same for operations that make copies of these layouts."""
    pads = {layout.columnwise: layout.pads_outer for layout in layouts}
    return {
        "rowwise": False in pads,
        "columnwise": True in pads,
        "pad_rows": pads.get(False, False),
        "pad_cols": pads.get(True, False),
        "pad_outer": layouts[0].pads_outer,
    }


@dataclasses.dataclass(frozen=True)
class CastChecks:
    """The checks of all casts of a plan."""

    plan: Plan
    applied: Applied
    nodes: frozenset[fx.Node]
    slots: Mapping[QuantizedTensor, int]
    """Of each tensor whose scale comes from the state."""

    @classmethod
    def of(cls, plan: Plan, applied: Applied, nodes: frozenset[fx.Node]) -> CastChecks:
        """Those of one graph."""
        slots: dict[QuantizedTensor, int] = {}
        for recipe in dict.fromkeys(c.recipe for d in plan.rewritten for c in d.copies):
            next_slot = 0
            for tensor in plan.tensors_in_state(recipe):
                slots[tensor] = next_slot
                next_slot += tensor.entries
        return cls(plan, applied, nodes, slots)

    def launch(self, launch: Launch) -> fx.Node | None:
        """Check a launch; the cast of a graph that it is, if it reads the values themselves."""
        first = launch.casts[0]
        match first.source:
            case FromInput():
                self._check_given(first, first.source)
                return None
            case FromCopy(copy):
                if first.copies[0] in self.plan.turned:
                    check_turned(first, self.applied.copies[first.copies[0]], self.applied.copies[copy])
                else:
                    self._check_moved(first, copy)
                return None
            case FromGather(gather):
                self._check_travelled(first, gather)
                return None
        makers = list(dict.fromkeys(_written_by(self.applied.copies[c].data)[0] for cast in launch.casts for c in cast.copies))
        if len(makers) != 1:
            names = ", ".join(sorted(n.name for n in makers))
            raise InvariantError(f"a launch of {len(launch.casts)} casts became {len(makers)} operations, {names}")
        (maker,) = makers
        cast = CastNode.read(maker)
        if maker not in self.nodes or cast is None:
            raise InvariantError(f"{maker.name} makes {first.tensor.name}, but is not a cast in the graph")
        self._check_launch(launch, cast)
        return maker

    def _check_given(self, cast: Cast, source: FromInput) -> None:
        """A copy that is kept between calls is an input of the graph, and so are its scale and the amax that is recorded."""
        (copy,) = cast.copies
        made = self.applied.copies[copy]
        if (made.data, made.scale_inv) != (source.data, source.scale_inv):
            found = f"{made.data.name}, {made.scale_inv.name}"
            raise InvariantError(f"{copy.name} is {found}, the plan says {source.data.name}, {source.scale_inv.name}")
        given = [node for node in (source.data, source.scale_inv, source.amax) if node is not None]
        computed = next((node for node in given if node.op != "placeholder"), None)
        if computed is not None:
            raise InvariantError(f"{computed.name} is computed, the plan takes {copy.name} from inputs of the graph")

    # -- values

    def _check_launch(self, launch: Launch, cast: CastNode) -> None:
        first, node = launch.casts[0], cast.node
        if len(cast.matrices) != len(launch.casts):
            raise InvariantError(f"{node.name} quantizes {len(cast.matrices)} tensors, the plan says {len(launch.casts)}")
        for position, (planned, matrix) in enumerate(zip(launch.casts, cast.matrices, strict=True)):
            self._check_read(node, planned, matrix)
            self._check_scale(node, planned, cast.scale_place(position), position)
            self._check_outputs(cast, planned, position)
        shares_scale = first.tensor.value.groups is not None and scheme_of(first.tensor.quantization).has_one_scale
        # With one scale for all rows the columnwise copy of rows in groups is moved out of a rowwise one.
        if cast.orientations != tuple(layout.columnwise and not shares_scale for layout in first.layouts):
            raise InvariantError(f"{node.name} makes copies {cast.orientations} (columnwise?), the plan says {first.layouts}")
        if cast.dtype != first.tensor.dtype:
            raise InvariantError(f"{node.name} casts to {cast.dtype}, the plan says {first.tensor.dtype}")
        is_rowwise_in_groups = first.tensor.value.groups is not None and False in cast.orientations
        layouts = (Layout(False),) if is_rowwise_in_groups else first.layouts
        check_arguments(node, **options_of(first.tensor.quantization), **layout_options(layouts))
        if first.tensor.value.groups is not None and first.layouts[0].columnwise:
            self._check_groups(first.copies[0], self.applied.copies[first.copies[0]].data if shares_scale else node)
        self._check_side(launch, node)

    def _check_outputs(self, cast: CastNode, planned: Cast, position: int) -> None:
        """Each copy, and its scales if the cast computes them, are the outputs that they are said to be."""
        is_many = isinstance(cast.node.args[0], (list, tuple))
        count, width = (len(cast.matrices) if is_many else 1), (2 if cast.family.scales_out else 1)
        for i, copy in enumerate(planned.copies):
            made = self.applied.copies[copy]
            for part, found in enumerate((made.data, made.scale_inv)[:width]):
                output = (i * width + part) * count + (position if is_many else 0)
                if _written_by(found) != (made.maker, output):
                    raise InvariantError(f"{found.name} is not output {output} of {made.maker.name}")
                check_slots(copy, found)

    def _check_side(self, launch: Launch, node: fx.Node) -> None:
        first = launch.casts[0]
        tag = str(node.meta.get("partitioner_tag", ""))
        if tag and ("backward" in tag) != first.at.is_backward:
            place = first.at.node.name
            raise InvariantError(f"{node.name} is tagged {tag}, the plan quantizes {first.tensor.name} before {place}")
        if tag and is_pinned(node) != any(cast.is_pinned for cast in launch.casts):
            raise InvariantError(f"{node.name} is tagged {tag}, the plan says {'pinned' if first.is_pinned else 'not pinned'}")

    def _check_read(self, node: fx.Node, cast: Cast, matrix: fx.Node) -> None:
        """The matrix is the planned value through moves alone, in the planned shape and dtype, masked if the plan says so."""
        value = cast.tensor.value
        found, is_masked = self._behind_forms(matrix, value)
        if found is not self._now(value.root):
            name = self.applied.gemms.get(value.root, value.root).name
            raise InvariantError(f"{node.name} quantizes {matrix.name}, the plan says {name}")
        if isinstance(cast.source, FromValue) and is_masked != cast.source.masked:
            said = "zeros" if cast.source.masked else "as they are"
            raise InvariantError(f"{node.name} quantizes {matrix.name}, in which rows that no group reads are not {said}")
        shape = (value.rows, value.cols) if value.batch is None else (value.batch, value.rows, value.cols)
        held = value_of(matrix)
        if held.dtype != cast.reads:
            raise InvariantError(f"{node.name} reads {matrix.name} in {held.dtype}, the plan says {cast.reads}")
        if not same_shape(held.shape[-len(shape) :], shape):
            raise InvariantError(f"{node.name} reads {matrix.name} {list(held.shape)}, the plan says {list(shape)}")

    def _check_mask(self, where: fx.Node, groups: Groups | None) -> None:
        column, _, zero = where.all_input_nodes
        valid = column.all_input_nodes[0] if column.target is aten.unsqueeze.default else column
        read = arguments_of(valid)
        if groups is None or valid.target is not ops.valid_rows.default or (read["offs"], read["index"]) != groups_of(groups):
            raise InvariantError(f"{where.name} masks by {column.name}, which are not the rows of the planned groups")
        if where.args[0] is not column or zero.target is not aten.full.default or arguments_of(zero)["fill_value"] != 0:
            raise InvariantError(f"{where.name} does not put zeros into the rows that no group reads")

    # -- scales

    def _check_scale(self, node: fx.Node, cast: Cast, given: Place | None, position: int) -> None:
        """What the cast multiplies with is what the GEMMs divide by: the amax or the slot of the same tensor."""
        if given is None:
            return
        place = scale_at(given)
        for copy in cast.copies:
            if inverse_at(self.applied.scales[copy]) != place:
                scale_inv = self.applied.scales[copy][0].name
                raise InvariantError(
                    f"{node.name} quantizes {cast.tensor.name} by another scale than that of which {scale_inv} is the"
                    f" reciprocal"
                )
        self._check_origin(node, cast, place, functools.partial(self._is_amax_of, cast, position))

    def _check_origin(self, node: fx.Node, cast: Cast, place: Place, is_amax: Callable[[Any, Any], bool]) -> None:
        maker, index = place
        tensor, quantization = cast.tensor, cast.tensor.quantization
        comes_from_state = quantization.scale_from is ScaleFrom.STATE
        if comes_from_state and maker.target is aten.where.self:  # the first step: loaded, or its own if that is 0
            is_empty, own, loaded = (argument for argument in maker.args)
            test = arguments_of(is_empty)
            if is_empty.target is not aten.eq.Scalar or test["self"] is not loaded or test["other"] != 0:
                raise InvariantError(f"{maker.name} does not ask whether {loaded.name} is 0")
            self._check_slot(node, tensor, self._loaded(loaded, index))
            self._check_amax(node, tensor, own, ops.scale_from_amax.default, index, is_amax)
        elif comes_from_state:
            self._check_slot(node, tensor, self._loaded(maker, index))
        else:
            self._check_amax(node, tensor, maker, ops.scales_from_amax.default, index, is_amax)

    def _loaded(self, node: fx.Node, index: Any) -> Any:
        """The slot that a scale is loaded from: a number, a range for a batch, None where it comes from elsewhere."""
        if node.target is ops.load_scales.default:
            return index
        if node.target is ops.take.default:
            taken: Any = node.args[1]
            source, slot = scale_at((node.args[0], taken[index]))
        else:
            source, slot = scale_at(place_of(node))
        return slot if source.target is ops.load_scales.default else None

    def _check_slot(self, node: fx.Node, tensor: QuantizedTensor, found: Any) -> None:
        first = self.slots[tensor]
        wanted: Any = first if tensor.entries == 1 else (0, first, first + tensor.entries)
        if found != wanted:
            raise InvariantError(f"{node.name} quantizes {tensor.name} by the scale of slot {found}, the plan says {wanted}")

    def _check_amax(
        self, node: fx.Node, tensor: QuantizedTensor, maker: Any, target: Any, index: Any, is_amax: Callable[[Any, Any], bool]
    ) -> None:
        if maker.target is not target:
            raise InvariantError(f"{node.name} quantizes {tensor.name} by {maker.name}, which is not the scale of an amax")
        check_arguments(maker, **options_of(tensor.quantization))
        if not is_amax(maker.args[0], index):
            raise InvariantError(f"{node.name} quantizes {tensor.name} by the scale of {maker.args[0].name}, another's amax")

    def _is_amax_of(self, cast: Cast, position: int, amax: fx.Node, index: Any) -> bool:
        """Whether an amax, or one of a vector, is that of the value of the cast at this position of a launch."""
        read: Any = amax.args[0]
        if (group := self.plan.fused.get(cast.tensor)) is not None:
            return self._is_largest_of(group, amax, index)
        if amax.target not in _AMAXES:
            return False
        if amax.target is ops.multi_amax.default and arguments_of(amax)["per_matrix"]:
            if len(read) != 1 or index is not None:
                return False
            (read,) = read
        elif amax.target is ops.multi_amax.default:
            if cast.is_first and index != position:
                return False
            read = read[index]
        elif index is not None:
            return False
        value = cast.tensor.value
        found, is_masked = self._behind_forms(read, value)
        return found is self._now(value.root) and is_masked == (value.groups is not None)

    def _is_largest_of(self, group: tuple[QuantizedTensor, ...], amax: fx.Node, index: Any) -> bool:
        """Whether an amax is the largest of those of weights that share a scale, and of nothing else."""
        amaxes: Any = amax.args[0]
        if amax.target is not aten.amax.default or amaxes.target is not ops.multi_amax.default or index is not None:
            return False
        pairs = list(zip(amaxes.args[0], group, strict=False))
        is_own = all(self._behind_forms(m, t.value)[0] is self._now(t.value.root) for m, t in pairs)
        return is_own and len(amaxes.args[0]) == len(group)

    def _now(self, node: fx.Node) -> fx.Node:
        return self.applied.results.get(node, node)

    def _behind_forms(self, matrix: fx.Node, value: MatrixValue) -> tuple[fx.Node, bool]:
        """What a matrix is made of by moves alone, as far as the value's root, and whether rows of no group were masked."""
        wanted, found, is_masked = self._now(value.root), matrix, False
        forms = (aten.reshape.default, aten.unsqueeze.default, prims.convert_element_type.default)
        while found is not wanted and (found.target in forms or found.target is aten.where.self):
            if found.target is aten.where.self:
                is_masked = True
                self._check_mask(found, value.groups)
            found = found.all_input_nodes[1 if found.target is aten.where.self else 0]
        return found, is_masked

    # -- copies that travelled, or were moved

    def _check_travelled(self, cast: Cast, gather: Gather) -> None:
        for maker in dict.fromkeys(self.applied.copies[copy].maker for copy in cast.copies):
            read = arguments_of(maker)
            if maker not in self.nodes or _behind_reshape(maker.all_input_nodes[0]) is not gather.source:
                raise InvariantError(f"{maker.name} does not quantize {gather.source.name}, the shard of {cast.tensor.name}")
            check_arguments(maker, **options_of(cast.tensor.quantization), pad_rows=False, pad_cols=False, compact=True)
            if "amaxes" in read:
                check_arguments(maker, rowwise=False, columnwise=True)
                if not are_of_columns(read["amaxes"], gather):
                    raise InvariantError(
                        f"{maker.name} scales columns of {gather.source.name} by amaxes of other tensors or ranks"
                    )
            elif "scale" in read:
                self._check_shard_scale(cast, gather, maker, place_of(read["scale"], read.get("scale_index")))
            elif "scales" in read:
                check_arguments(maker, rowwise=True, columnwise=False)
                (scale,), (index,) = read["scales"], read.get("scales_index") or [None]
                self._check_shard_scale(cast, gather, maker, place_of(scale, index))
        for copy, layout in zip(cast.copies, cast.layouts, strict=True):
            made = self.applied.copies[copy]
            ready = maker_of(made.data)[0]
            if ready.target not in (aten.view.dtype, aten.clone.default):
                check_arguments(ready, **options_of(copy.quantization), **layout_options((layout,)))
            check_travelled(copy, made)
            parts = [made.data] if "scale" in arguments_of(made.maker) else [made.data, made.scale_inv]
            sent = [n for node in parts for n in _gathers_of(node)]
            if not sent or any(n.args[1:] != (gather.num_ranks, gather.group) for n in sent):
                names = ", ".join(n.name for n in sent) or "nothing"
                raise InvariantError(f"{made.data.name} travels by {names}, not as {gather.collective.name} did")

    def _check_shard_scale(self, cast: Cast, gather: Gather, maker: fx.Node, given: Place) -> None:
        place = scale_at(given)
        if any(inverse_at(self.applied.scales[copy]) != place for copy in cast.copies):
            raise InvariantError(f"{maker.name} quantizes {cast.tensor.name} by another scale than its GEMMs divide by")

        def is_largest(amax: Any, index: Any) -> bool:
            element = amax.args[2] if amax.target is aten.select.int else None  # of all Parameters' (`reductions.py`)
            reduced = reduced_of(amax if element is None else amax.args[0], gather)
            if element is not None and reduced is not None:
                reduced = reduced.args[0][element] if reduced.target is aten.stack.default else reduced
            if reduced is None or reduced.target is not aten.view.dtype:
                return False
            amax = reduced.args[0]
            return amax.target is ops.amax.default and _behind_reshape(amax.args[0]) is gather.source

        self._check_origin(maker, cast, place, is_largest)

    def _check_moved(self, cast: Cast, rows: Copy) -> None:
        """A columnwise copy, of rows in groups or of an input, has the bytes and the scale of the rowwise one."""
        (copy,) = cast.copies
        moved, source = self.applied.copies[copy], self.applied.copies[rows]
        node = moved.data
        if copy.value.groups is None:
            self._check_turned(cast, node, source.data)
        else:
            self._check_moved_rows(copy, node, source)
        if moved.scale_inv is not source.scale_inv:
            raise InvariantError(f"{node.name} has the scale {moved.scale_inv.name}, its bytes have {source.scale_inv.name}")
        tag = str(node.meta.get("partitioner_tag", ""))
        if tag and is_pinned(node) != cast.is_pinned:
            raise InvariantError(f"{node.name} is tagged {tag}, the plan says {'pinned' if cast.is_pinned else 'not pinned'}")

    def _check_turned(self, cast: Cast, node: fx.Node, rows: fx.Node) -> None:
        """Transposed once, between views as bytes and padding with zeros."""
        targets = []
        while node is not rows and node.all_input_nodes:
            targets.append(node.target)
            if node.target is aten.constant_pad_nd.default:
                check_padding(node, 0)
            node = node.all_input_nodes[0]
        allowed = {aten.view.dtype, aten.clone.default, aten.permute.default, aten.constant_pad_nd.default, aten.slice.Tensor}
        if node is not rows or not set(targets) <= allowed or targets.count(aten.permute.default) != 1:
            name = self.applied.copies[cast.copies[0]].data.name
            raise InvariantError(f"{name} is not {rows.name} transposed, the plan says it is")

    def _check_moved_rows(self, copy: Copy, node: fx.Node, source: Quantized) -> None:
        bytes_of = maker_of(node.all_input_nodes[0])
        if node.target is not ops.group_columns.default or bytes_of[0] is not source.maker or bytes_of[1] not in (None, 0):
            raise InvariantError(f"{node.name} is not moved out of {source.data.name}, the plan says it is")
        self._check_groups(copy, node)
        check_arguments(node, align=16)

    def _check_groups(self, copy: Copy, node: fx.Node) -> None:
        """What writes a columnwise copy of rows in groups has them where the plan says."""
        assert copy.value.groups is not None
        read = arguments_of(node)
        found, wanted = (read["offs"], read["index"]), groups_of(copy.value.groups)
        if found != wanted:
            raise InvariantError(f"{node.name} has the groups {found}, the plan says {wanted}")

    # -- amaxes

    def recorded(self, inserted: Iterable[fx.Node]) -> None:
        """Each amax that is recorded by one of these nodes is that of the tensor whose slot it goes to."""
        cast_of = {}
        for launch in self.plan.launches:
            for position, cast in enumerate(launch.casts):
                maker: fx.Node | None = self.applied.copies[cast.copies[0]].maker
                if isinstance(cast.source, FromInput):
                    maker = cast.source.amax if cast.is_first else None
                if maker is not None and cast.tensor in self.slots and not isinstance(cast.source, FromCopy):
                    cast_of[maker, position] = cast
        for node in inserted:
            if node.target is not ops.record_amax.default:
                continue
            read: Any = arguments_of(node)
            positions = read.get("observed_index") or [None] * len(read["index"])
            for observed, position, slot in zip(read["observed"], positions, read["index"], strict=True):
                found = self._cast_of_amax(cast_of, place_of(observed, position))
                if found is None or self.slots[found.tensor] != slot:
                    name = "no cast" if found is None else f"{found.tensor.name}, slot {self.slots[found.tensor]}"
                    raise InvariantError(f"{node.name} records {observed.name}, of {name}, in slot {slot}")

    def _cast_of_amax(self, cast_of: Mapping[tuple[fx.Node, int], Cast], place: Place) -> Cast | None:
        node, index = place
        if node.target is aten.where.self:  # experts without rows
            test, node, rest = node.args
            self._check_is_recorded(test, node, rest, cast_of)
        if node.target is aten.amax.default:  # of a batch with one scale
            node = node.all_input_nodes[0]
        if node.target is ops.amax.default:  # of a shard that its cast pads
            source = _behind_reshape(node.args[0])
            shards = (c for c in cast_of.values() if isinstance(c.source, FromGather) and c.source.gather.source is source)
            return next(shards, None)
        if node.op == "placeholder":
            return cast_of.get((node, 0)) if index is None else None
        maker, output = maker_of(node)
        num_results = len(maker.meta["val"]) if isinstance(maker.meta["val"], (list, tuple)) else 1
        is_amax = arguments_of(maker).get("with_amax", False) and output == num_results - 1
        return cast_of.get((maker, index or 0)) if is_amax else None

    def _check_is_recorded(self, test: Any, amaxes: fx.Node, rest: Any, cast_of: Mapping[tuple[fx.Node, int], Cast]) -> None:
        """Amaxes of experts count where the group has rows or, in a first step, where the history is empty; others are 0."""
        cast = self._cast_of_amax(cast_of, (amaxes, None))
        if cast is None or rest.target is not aten.full.default or rest.args != ([], 0):
            raise InvariantError(f"{test.name} chooses between {amaxes.name} and {rest.name}, which are no amaxes and 0")
        has_rows = test
        maker, _ = inverse_at(self.applied.scales[cast.copies[0]])  # none of a kept copy, which is made elsewhere
        is_first_step = None if maker is None else maker.target is aten.where.self
        if is_first_step not in (None, test.target is aten.logical_or.default):
            raise InvariantError(f"{test.name} asks in a first step alone whether a history is empty")
        if test.target is aten.logical_or.default:
            has_rows, is_empty = test.args
            if is_empty.target is not aten.eq.Scalar or is_empty.args[1] != 0:
                raise InvariantError(f"{is_empty.name} does not ask whether a history is empty")
            self._check_slot(test, cast.tensor, self._loaded(is_empty.args[0], None))
        offs = cast.at.offs
        starts = has_rows.args[1] if has_rows.target is aten.gt.Tensor and has_rows.args[0] is offs else None
        if starts is None or starts.target is not aten.constant_pad_nd.default or starts.args != (offs, [1, -1], 0):
            raise InvariantError(f"{test.name} does not ask which groups that end at {offs} have rows")


#: What moves the bytes of a copy whose rows are in groups.
_MOVES = (aten.index.Tensor, aten.permute.default, aten.select.int, aten.view.dtype, ops.group_columns.default)


def _written_by(part: fx.Node) -> tuple[fx.Node, int]:
    """The operation that wrote a copy or its scales, and as which output."""
    while part.target in _MOVES:
        part = part.all_input_nodes[0]
    maker, output = maker_of(part)
    return maker, output or 0


def groups_of(groups: Groups) -> tuple[fx.Node, fx.Node | None]:
    """The arguments of an operation that say which rows belong to which group."""
    return groups.offs, groups.index


def _behind_reshape(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0] if node.target is aten.reshape.default else node


def _gathers_of(node: fx.Node) -> list[fx.Node]:
    """The all-gathers that a node is made of, the last on every way."""
    found, pending, seen = [], [node], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target is c10d.all_gather_into_tensor.default:
            found.append(node)
        elif CastNode.read(node) is None:
            pending += node.all_input_nodes
    return found
