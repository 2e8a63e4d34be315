"""Verify: a rewritten graph is what the plan and the hardware say. A violation is our defect and names the node.

GEMMs       every GEMM of the plan is a scaled GEMM now, with the planned arguments and epilogue; no other one came or went
operands    each denotes the planned copy (`meaning.py`), divided by the scale of that copy, as the hardware reads it
casts       each launch of the plan is one operation, on its side of the partition; no others quantize
state       scales are read once, and the amax of each tensor is recorded in its slot
others      what is recomputed, dequantized, measured, gathered in FP8 or as bytes, or gathered instead of a scatter
values      every inserted node has the shapes, strides and dtypes that its operation gives it

It runs last, on the graph that is compiled, and can run on one as `apply` left it.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass.errors import InvariantError
from fp8pass.graph.cursor import arguments_of, check_values, described, is_pinned, maker_of
from fp8pass.graph.gathers import Gather
from fp8pass.graph.gemms import is_matmul, is_scaled_gemm, operands_of
from fp8pass.graph.values import same_shape, value_of
from fp8pass.recipes.quantization import ScaleFrom
from fp8pass.rewrite.apply import Applied
from fp8pass.rewrite.meaning import (
    CASTS,
    STORED,
    TRANSPOSE,
    Meaning,
    Term,
    copy,
    difference,
    how,
    inverse,
    own_scale,
    slot,
    value,
)
from fp8pass.rewrite.plan import Decision, HighPrecision, Launch, Plan, Rewritten
from fp8pass.rewrite.simplify import RowsAndIndex
from fp8pass.schemes.copies import Cast, Copy, FromInput, QuantizedTensor
from fp8pass.schemes.emitter import FIRST_STEP
from lowering import hardware
from lowering.formats import Granularity

aten = torch.ops.aten
ops = torch.ops.lowering

_VIEWS = (aten.permute.default, aten.slice.Tensor)


def verify(
    graph: fx.Graph,
    plan: Plan,
    applied: Applied,
    known: Iterable[fx.Node],
    permuted: Mapping[fx.Node, RowsAndIndex] = types.MappingProxyType({}),
    sent_as_bytes: Sequence[Gather] = (),
) -> None:
    """Raise InvariantError if the graph is not what the plan says. known: the nodes that it had before. permuted: gathers that
    took the place of scatters before the plan was made, with what those read. sent_as_bytes: gathers that send uint8, as they
    were."""
    graph.lint()
    nodes, known = set(graph.nodes), set(known)
    _check_gemms(graph, plan, applied, nodes, known)
    _check_casts(graph, plan, applied, nodes, known)
    for root, chain in plan.recomputed.items():
        for node in chain & nodes:
            if node.meta.get("recompute") is not CheckpointPolicy.MUST_RECOMPUTE:
                raise InvariantError(f"{node.name} is saved, the plan recomputes it for {root.name}")
    for gathered in plan.gathers:
        is_left = gathered.gather.wait in nodes
        if is_left == (gathered.reason is None):
            found = "in high precision" if is_left else "in FP8"
            name = gathered.gather.collective.name
            raise InvariantError(f"{name} gathers {found}, the plan says {gathered.reason or 'FP8'}")
    planned = _PlannedTerms(plan, applied)
    held = [(cast.copies[0], cast.source) for launch in plan.launches for cast in launch if isinstance(cast.source, FromInput)]
    given = {node: term for source in held for node, term in planned.given(*source)}
    meaning = Meaning(known | set(applied.gemms.values()) | set(applied.results.values()), given)
    for node in graph.nodes:
        meaning(node)
    for decision in plan.rewritten:
        _check_operands(decision, planned, meaning)
        _check_epilogue(decision, planned, nodes, meaning)
    for kept in plan.decisions:
        _check_dequantized(kept, planned, meaning)
    _check_state(planned, meaning)
    for node, (rows, index) in permuted.items():
        if node in nodes and node.args != (applied.now(rows), [index]):
            raise InvariantError(f"{node.name} gathers {node.args}, instead of rows of {rows.name}")
    for gather in sent_as_bytes:
        sent = value(gather.source).moved(("gather", gather.num_ranks, gather.group))
        compare(gather.wait, "", Meaning((), {gather.source: value(gather.source)}).computed(gather.wait), sent)
        if (dtype := value_of(gather.wait.all_input_nodes[0]).dtype) is not torch.uint8:
            raise InvariantError(f"{gather.wait.name} is sent as {dtype}, the plan says as bytes")
    check_values(graph, known - {gather.wait for gather in sent_as_bytes})


def compare(node: fx.Node, what: str, found: Any, planned: Any) -> None:
    if found != planned:
        raise InvariantError(f"{node.name}{what and f': {what}'} {difference(found, planned)}")


def check_arguments(node: fx.Node, **wanted: Any) -> None:
    """An argument of a call that has one of these names has this value."""
    for name, found in arguments_of(node).items():
        if name in wanted and found != wanted[name]:
            raise InvariantError(f"{node.name}: {name} is {found}, the plan says {wanted[name]}")


# -- what the plan says, as terms


class _PlannedTerms:
    """The terms of what a plan makes. Invariant: they come from the plan, never from what inserted the nodes; only which node
    wrote a copy is what `apply` says."""

    def __init__(self, plan: Plan, applied: Applied):
        self.plan, self.applied = plan, applied
        self.copy = functools.cache(self._copy)
        self.dequantizing = {decision.site.node for decision in plan.decisions if decision.dequantized}
        casts = [cast for launch in plan.launches for cast in launch]
        self.cast_of = {copy: cast for cast in casts for copy in cast.copies}
        self.first = {cast.tensor: cast for cast in reversed(casts)}
        self.slots: dict[QuantizedTensor, int] = {}
        for tensors in map(plan.tensors_in_state, plan.recipes):
            starts = itertools.accumulate((tensor.entries for tensor in tensors), initial=0)
            self.slots.update(zip(tensors, starts, strict=False))

    def given(self, copy_: Copy, source: FromInput) -> list[tuple[fx.Node, Term]]:
        """The terms of the inputs that hold a copy."""
        computed = [n.name for n in (source.data, source.scale_inv, source.amax) if n is not None and n.op != "placeholder"]
        if computed:
            raise InvariantError(f"{computed[0]} is computed, the plan takes {copy_.name} from inputs of the graph")
        x = value(copy_.value.root)
        scale = Term("scale", (source.scale_inv,))
        found = [(source.data, copy(source.data, x, (), copy_.columnwise, scale)), (source.scale_inv, inverse(scale))]
        return found if source.amax is None else [*found, (source.amax, Term(_amax_of(copy_.tensor), (x,)))]

    def value(self, cast: Cast, masked: bool) -> Term:
        """The term that a cast reads: the shard, or the value in the planned dtype, with zeros in rows of no group if
        `masked`."""
        if isinstance(cast.source, Gather):
            return value(cast.source.source)
        root, groups = self.applied.now(cast.tensor.value.root), cast.tensor.value.groups
        found = value(root) if value_of(root).dtype == cast.reads else value(root).moved(("to", cast.reads))
        if groups is None or not masked:
            return found
        valid = Term("rows of groups", (value(groups.offs), groups.index and value(groups.index)))
        return Term("where", (valid, found, Term("full", ((), 0))))

    def amax(self, tensor: QuantizedTensor) -> Term:
        """The amax of a tensor, or those of a batch's matrices: on this rank."""
        cast = self.first[tensor]
        return Term(_amax_of(tensor), (self.value(cast, masked=True),))

    def recorded(self, tensor: QuantizedTensor) -> Term:
        """The amax that the state receives: those of experts without rows count as 0, but in a first step."""
        offs, amax = self.first[tensor].at.offs, self.amax(tensor)
        if tensor.entries == 1 or offs is None:
            return amax
        has_rows = Term("gt", (value(offs), Term("padded", (value(offs), (1, -1), 0))))
        if FIRST_STEP in self.applied.variants:
            has_rows = Term("logical_or", (has_rows, Term("equals", (self.slot(tensor), 0))))
        return Term("where", (has_rows, amax, Term("full", ((), 0))))

    def slot(self, tensor: QuantizedTensor) -> Term:
        """The slots of a tensor's scales in the state."""
        return slot(self.slots[tensor], self.slots[tensor] + tensor.entries)

    def scale(self, cast: Cast) -> Term:
        """The scale of a tensor that has one, or one per matrix."""
        tensor, options = cast.tensor, _options(cast.tensor)
        if tensor in self.plan.fused:
            amax = Term("largest", tuple(map(self.amax, self.plan.fused[tensor])))
        elif isinstance(cast.source, Gather):
            amax = Term("amax", (self.value(cast, False), "max", cast.source.group))
        else:
            amax = self.amax(tensor)
        own = Term("scale", (amax, _how(ops.scales_from_amax.default, options)))
        if not tensor.quantization.has_state:
            return own
        if FIRST_STEP not in self.applied.variants:
            return self.slot(tensor)
        return Term("where", (Term("equals", (self.slot(tensor), 0)), own, self.slot(tensor)))

    def _copy(self, wanted: Copy) -> tuple[Term, Term]:
        """The data of a copy and what multiplies them, oriented as the first operand of a GEMM."""
        cast, source, groups = self.cast_of[wanted], self.cast_of[wanted].source, wanted.value.groups
        columns = None if groups is None else ("columns", value(groups.offs), groups.index and value(groups.index))
        if isinstance(source, FromInput):
            (_, data), (_, scale_inv), *_ = self.given(wanted, source)
            return data, scale_inv
        if isinstance(source, Copy):
            data, scale_inv = self.copy(source)
            if columns is not None:  # of the rows as they were before slots took them
                return Term(data.name, data.args, (columns,)), scale_inv
            has_blocks = wanted.quantization.block is not None
            return data.moved(TRANSPOSE, STORED), scale_inv.moved(*[TRANSPOSE, STORED] * has_blocks)
        maker, quantization, gather = self.applied.copies[wanted].maker, wanted.quantization, isinstance(source, Gather)
        has_one = quantization.has_one_scale
        x = self.value(cast, cast.masked)
        options = _how(maker.target, _options(cast.tensor, compact=gather and quantization.block is not None))
        is_square = quantization.block is not None and len(set(quantization.block)) == 1
        is_moved = (has_one and (gather or groups is not None)) or (gather and is_square)
        columnwise = wanted.columnwise and not is_moved
        if has_one:
            scale = self.scale(cast)
        elif isinstance(source, Gather) and quantization.granularity is Granularity.ROW_WISE and columnwise:
            scale = own_scale(maker, x, options, columnwise, Term("amaxes of columns", (x, "max", source.group)))
        else:
            scale = own_scale(maker, x, options, columnwise)
        data, scale_inv = copy(maker, x, options, columnwise, scale), inverse(scale)
        if isinstance(source, Gather):
            of_data, of_scales = self._travels(wanted, source, has_one)
        else:
            rows = [] if groups is None or groups.index is None else [("rows", value(groups.index))]
            of_data = of_scales = rows if columns is None or not wanted.columnwise else [columns]
        if has_one:  # a GEMM of rows reads the scales of matrices once per row
            is_repeated = quantization.scale_from is ScaleFrom.SHARED and wanted.value.batch is not None
            return data.moved(*of_data), scale_inv.moved(*[STORED] * is_repeated)
        return data.moved(*of_data), scale_inv.moved(*of_scales)

    def _travels(self, wanted: Copy, gather: Gather, has_one: bool) -> tuple[Sequence[Any], Sequence[Any]]:
        """The moves of a shard's copy, and of its scales, to a GEMM: gathered, then moved as the gathered tensor was."""
        sent = ("gather", gather.num_ranks, gather.group)
        (moves,) = (g.moves[g.tensors.index(wanted.tensor)] for g in self.plan.gathers if g.gather == gather)
        data, scales = [sent, *moves], [sent, *map(_without_sizes, moves)]
        if has_one:
            return [*data, *[TRANSPOSE] * wanted.columnwise, STORED], ()
        if wanted.quantization.block is None:
            return (
                ([TRANSPOSE, *data, TRANSPOSE, STORED], [STORED]) if wanted.columnwise else ([*data, STORED], [*scales, STORED])
            )
        target = maker_of(self.applied.copies[wanted].data)[0].target
        ready = ("ready", wanted.columnwise, *_how(target, _options(wanted.tensor)))
        return [*data, ready], [*scales, ready]


def _amax_of(tensor: QuantizedTensor) -> str:
    return "amax" if tensor.entries == 1 else "amaxes"


def _options(tensor: QuantizedTensor, **others: Any) -> dict[str, Any]:
    """The values of arguments with these names, of operations that quantize a tensor."""
    quantization = tensor.quantization
    names = ("dtype", "square", "power_of_2", "epsilon", "inverse", "margin")
    found = {name: getattr(quantization, name) for name in names}
    return {**found, "granularity": quantization.granularity.value, **others}


def _how(target: Any, options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The options of an operation with this overload that terms mention."""
    return how({a.name: options[a.name] for a in target._schema.arguments if a.name in options})


def _without_sizes(move: tuple[Any, ...]) -> tuple[Any, ...]:
    """A move of a tensor as it is of its scales."""
    if move[0] == "cat":
        return (*move[:2], tuple(tuple(map(_without_sizes, moves)) for moves in move[2]))
    return move[:2] if move[0] == "slice" else move


# -- GEMMs


def _check_gemms(graph: fx.Graph, plan: Plan, applied: Applied, nodes: set[fx.Node], known: set[fx.Node]) -> None:
    for decision in plan.rewritten:
        node = decision.site.node
        if node in nodes:
            raise InvariantError(f"{node.name} is in high precision, the plan rewrites it")
        if applied.gemms.get(node) not in nodes:
            raise InvariantError(f"{node.name} was planned for FP8, no scaled GEMM took its place")
    planned = {applied.gemms[d.site.node] for d in plan.rewritten}
    kept = {d.site.node: d for d in plan.decisions if isinstance(d, HighPrecision)}
    for node in graph.nodes:
        if is_scaled_gemm(node) and node not in planned and node not in known:
            raise InvariantError(f"{node.name} multiplies in FP8, the plan has no such GEMM")
        if is_matmul(node) and node not in kept:
            raise InvariantError(f"{node.name} multiplies in high precision, the plan does not keep it")
    for node, decided in kept.items():
        if not decided.site.within and node not in nodes:
            raise InvariantError(f"{node.name} is gone, the plan keeps it: {decided.reason}")


def _check_operands(decision: Rewritten, planned: _PlannedTerms, meaning: Meaning) -> None:
    applied, site = planned.applied, decision.site
    node = applied.gemms[site.node]
    given, terms = arguments_of(node), meaning.arguments(node)
    for position, (name, wanted) in enumerate(zip("ab", decision.copies, strict=True)):
        read, made = given[name], applied.copies[wanted]
        while read.target in _VIEWS:
            read = read.all_input_nodes[0]
        if read is not made.data:
            raise InvariantError(f"{node.name}: {name} is {given[name].name}, the plan says {made.data.name}")
        data, scale_inv = planned.copy(wanted)
        if (dtype := value_of(given[name]).dtype) != wanted.dtype:
            raise InvariantError(f"{node.name}: {name} is {dtype}, the plan says {wanted.dtype}")
        compare(node, name, terms[name], data.moved(TRANSPOSE) if position else data)
        compare(node, f"the scale of {name}", terms[f"scale_inv_{name}"], scale_inv)
    if site.form is not None and given["offs"] is not site.offs:
        raise InvariantError(f"{node.name}: its groups end at {given['offs']}, the plan says {site.offs}")
    a, b = (value_of(given[name]) for name in "ab")
    if a.stride(-1) != 1 or b.stride(-2) != 1:
        raise InvariantError(f"{node.name}: a must be row-major and b column-major, strides are {a.stride()}, {b.stride()}")
    first, second = (wanted.quantization.granularity for wanted in decision.copies)
    is_grouped = site.form is not None
    gemm = hardware.Gemm(a.dtype, b.dtype, first, second, n=b.shape[-1], k=a.shape[-1], is_grouped=is_grouped)
    if (refusal := hardware.refusal(gemm, None)) is not None:
        raise InvariantError(f"{node.name}: {refusal}")


def _check_epilogue(decision: Rewritten, planned: _PlannedTerms, nodes: set[fx.Node], meaning: Meaning) -> None:
    """The GEMM's own arguments, and the result whose place it took: the product, without padding, and what is added to it."""
    node, epilogue, applied = decision.site.node, planned.plan.epilogues[decision.site.node], planned.applied
    gemm, result = applied.gemms[node], applied.results[node]
    granularities = [wanted.quantization.granularity.value for wanted in decision.copies]
    has_128 = Granularity.BLOCK_1X128 in granularities
    check_arguments(
        gemm,
        out_dtype=epilogue.out_dtype,
        fast_accum=epilogue.fast_accum,
        granularity_a=granularities[0],
        granularity_b=granularities[1],
        implementation="mxfp8" if has_128 and hardware.has_mx_scaled_mm(value_of(gemm).device) else "auto",
    )
    bias, addend = (read and value(applied.now(read)) for read in (epilogue.bias, epilogue.addend))
    compare(gemm, "the bias", meaning(arguments_of(gemm)["bias"]), bias)
    if (arguments_of(gemm)["a"].target is aten.slice.Tensor) != (epilogue.cuts_rows == "operand"):
        raise InvariantError(f"{gemm.name} reads {arguments_of(gemm)['a'].name}, the plan cuts rows of {epilogue.cuts_rows}")
    wanted = value(gemm) if addend is None else Term("add", (1, value(gemm), addend))
    found = value(gemm) if result is gemm else meaning.computed(result)
    compare(result, "", unstored(found), wanted)
    old, new = value_of(node), value_of(result)
    if old.dtype != new.dtype or not same_shape(old.shape, new.shape):
        raise InvariantError(f"{result.name} is {described(new)} instead of {described(old)}")
    for reader in applied.readers[node]:
        if reader in nodes and reader not in planned.dequantizing and result not in reader.all_input_nodes:
            raise InvariantError(f"{reader.name} does not read {result.name}, instead of {node.name}")


def unstored(term: Any) -> Any:
    """A term without what says that the product was stored."""
    if not isinstance(term, Term):
        return term
    return Term(term.name, tuple(map(unstored, term.args)), tuple(move for move in term.moves if move != STORED))


def _check_dequantized(decision: Decision, planned: _PlannedTerms, meaning: Meaning) -> None:
    """Operands of a GEMM in high precision that are the data of a copy, times its scales."""
    node = decision.site.node
    for position, wanted in decision.dequantized:
        data, scale_inv = planned.copy(wanted)
        is_by_column = wanted.quantization.granularity is Granularity.BLOCK_1X128  # scales lie by block, then by row
        term = Term("mul", (data, scale_inv.moved(*[TRANSPOSE] * is_by_column)))
        is_turned = wanted.columnwise != decision.site.operands[position].transposed
        found = meaning(operands_of(node)[position])
        compare(node, f"operand {position}", found, term.moved(*[TRANSPOSE] * is_turned))


# -- casts


def _check_casts(graph: fx.Graph, plan: Plan, applied: Applied, nodes: set[fx.Node], known: set[fx.Node]) -> None:
    """Each launch is one operation, no copy is made twice, and nothing else is quantized."""
    seen: set[Copy] = set()
    makers: set[fx.Node] = set()
    for launch in plan.launches:
        first = launch[0]
        copies = [wanted for cast in launch for wanted in cast.copies]
        for wanted in copies:
            if wanted in seen:
                raise InvariantError(f"the plan makes {'columnwise' if wanted.columnwise else 'rowwise'} {wanted.name} twice")
            seen.add(wanted)
        if isinstance(first.source, FromInput):
            continue
        found = {applied.copies[wanted].maker: None for wanted in copies}
        makers.update(found)
        if isinstance(first.source, Gather):
            for wanted, layout in zip(first.copies, first.layouts, strict=True):
                check_arguments(applied.copies[wanted].maker, pad_rows=False, pad_cols=False)
                check_arguments(maker_of(applied.copies[wanted].data)[0], pad_outer=layout.pads_outer)
            continue
        if len(found) != 1:
            names = ", ".join(sorted(n.name for n in found))
            raise InvariantError(f"a launch of {len(launch)} casts became {len(found)} operations, {names}")
        (node,) = found
        if node not in nodes:
            raise InvariantError(f"{node.name} makes {first.tensor.name}, but is not in the graph")
        tag = str(node.meta.get("partitioner_tag", ""))
        if tag and ("backward" in tag) != first.at.is_backward:
            place = first.at.node.name
            raise InvariantError(f"{node.name} is tagged {tag}, the plan quantizes {first.tensor.name} before {place}")
        if tag and is_pinned(node) != any(cast.is_pinned for cast in launch):
            raise InvariantError(f"{node.name} is tagged {tag}, the plan says {'pinned' if first.is_pinned else 'not pinned'}")
        if first.source is None:
            _check_launch(node, launch)
    for node in graph.nodes:
        if node.target in CASTS and node not in makers and node not in known:
            raise InvariantError(f"{node.name} quantizes, the plan has no such cast")


def _check_launch(node: fx.Node, launch: Launch) -> None:
    """Check the matrices of a cast and the layouts of its copies."""
    first, given = launch[0], arguments_of(node)
    matrices = given["xs"] if "xs" in given else [given["x"]]
    if len(matrices) != len(launch):
        raise InvariantError(f"{node.name} quantizes {len(matrices)} tensors, the plan says {len(launch)}")
    pads = {layout.columnwise: layout.pads_outer for layout in first.layouts}
    if first.tensor.value.groups is not None and "xs" in given:  # columns are moved out of the rows
        pads = {False: False}
    check_arguments(
        node,
        rowwise=False in pads,
        columnwise=True in pads,
        pad_rows=pads.get(False, False),
        pad_cols=pads.get(True, False),
        pad_outer=first.layouts[-1].pads_outer,
        **_options(first.tensor),
    )
    for cast, matrix in zip(launch, matrices, strict=True):
        held, shape = value_of(matrix).shape, cast.tensor.value.shape
        if not same_shape(held[-len(shape) :], shape):
            raise InvariantError(f"{node.name} reads {matrix.name} {list(held)}, the plan says {list(shape)}")


# -- state


def _check_state(planned: _PlannedTerms, meaning: Meaning) -> None:
    """The live scales are read once, by value; in training every slot is recorded once, on the side that made the amax."""
    plan, applied = planned.plan, planned.applied
    for recipe in plan.recipes:
        tensors = plan.tensors_in_state(recipe)
        state, count = applied.state.get(recipe), sum(tensor.entries for tensor in tensors)
        if state is None or not tensors:
            continue
        for node in state.scale.users:
            if node.target is not ops.load_scales.default:
                raise InvariantError(f"{node.name} reads the live scales, which a boundary may change before backward runs")
            if node.args[1:] != (state.slots, count):
                raise InvariantError(f"{node.name} loads {node.args[2]} scales of {node.args[1]}, of {count} slots")
        tensor_at = {planned.slots[tensor]: tensor for tensor in tensors}
        pairs: list[tuple[fx.Node, int, Any]] = []
        for target, side in ((state.amax, "forward"), (state.grad_amax, "backward")):
            for node in target.users:
                tag = node.meta.get("partitioner_tag", "must_be_in_forward")  # A graph without a backward has no tags.
                if node.target is not ops.record_amax.default or tag != f"must_be_in_{side}":
                    raise InvariantError(f"{node.name} uses the staging row, but does not record amaxes in the {side}")
                given = arguments_of(node)
                if given["slots"] is not state.slots:
                    raise InvariantError(f"{node.name} records in the slots {given['slots']}, which are not slots of the state")
                pairs += [(node, i, amax) for i, amax in zip(given["index"], meaning.arguments(node)["observed"], strict=True)]
        wanted = sorted(tensor_at) if applied.records else []
        if (recorded := sorted(i for _, i, _ in pairs)) != wanted:
            raise InvariantError(f"amaxes of slots {recorded} are recorded, the plan quantizes {len(wanted)} tensors")
        for node, i, amax in pairs:
            compare(node, f"slot {i}", amax, planned.recorded(tensor_at[i]))
