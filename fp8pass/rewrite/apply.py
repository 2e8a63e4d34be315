"""Apply: edits a graph as a Plan says. Before it only `simplify.py` edits the graph, after it also `gathers.py`.

Per launch, before the first GEMM that reads one of its copies: the scales, and the operation that writes the copies. Per GEMM:
one scaled GEMM. What these nodes are is the scheme's business; what they read and cut off, where they stand, which side of the
partition they belong to and what is recomputed is decided in the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fp8pass.graph.cursor import Cursor, always_recompute, inherit_recomputation, never_recompute, pin
from fp8pass.graph.gemms import GemmSite, operand_positions, operands_of
from fp8pass.graph.values import PERMUTES, RESHAPES, Groups, same_size, value_of
from fp8pass.recipes import Recipe
from fp8pass.rewrite.launches import in_graph_order
from fp8pass.rewrite.plan import Epilogue, Launch, Options, Plan, Rewritten
from fp8pass.rewrite.watch import StatisticsInserter
from fp8pass.schemes import scheme_of
from fp8pass.schemes.copies import Cast, Copy, FromInput, Quantized, transposed_data
from fp8pass.schemes.emitter import FIRST_STEP, Emitter, StateNodes, zero
from fp8pass.schemes.scheme import Scheme
from lowering.formats import pad_to_alignment

aten = torch.ops.aten
prims = torch.ops.prims

#: Reshapes whose arguments say the sizes.
_SIZED = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


@dataclasses.dataclass(frozen=True)
class Applied:
    """The nodes of the rewritten graph that the plan's items became."""

    gemms: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)  # Rewritten GEMM -> the scaled GEMM in its place.
    copies: dict[Copy, Quantized] = dataclasses.field(default_factory=dict)
    results: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)  # Rewritten GEMM -> what holds its result now.
    readers: dict[fx.Node, tuple[fx.Node, ...]] = dataclasses.field(default_factory=dict)
    """Rewritten GEMM -> the nodes that read its result."""
    state: Mapping[Recipe, StateNodes] = dataclasses.field(default_factory=dict)  # Placeholders per recipe that keeps state.
    records: bool = False  # Calls record amaxes.
    variants: frozenset[str] = frozenset()  # Peculiarities of the calls that the graph is for.

    def now(self, node: fx.Node) -> fx.Node:
        """The node that has the value of one which the plan names: it may be a GEMM that was rewritten."""
        return self.results.get(node, node)


def apply(
    graph: fx.Graph, plan: Plan, state: Mapping[Recipe, StateNodes], options: Options, watcher: StatisticsInserter | None = None
) -> Applied:
    """Carry out a plan, in place. `state`: the placeholders of each recipe that keeps state. watcher: measures the tensors."""
    if not plan.rewritten and not plan.recomputed:
        return Applied()
    rewriter = _Rewriter(graph, plan, state, options, watcher)
    rewriter.run()
    return rewriter.applied


class _Rewriter:
    """The edits of one graph. Invariant: a node is inserted after everything it reads."""

    def __init__(
        self,
        graph: fx.Graph,
        plan: Plan,
        state: Mapping[Recipe, StateNodes],
        options: Options,
        watcher: StatisticsInserter | None,
    ):
        self.watcher = watcher
        self.graph = graph
        self.plan = plan
        self.options = options
        self.start = Cursor.start(graph)
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.applied = Applied(state=state, records=options.records, variants=options.variants)
        self.emitters: dict[tuple[Recipe, Scheme], Emitter] = {}
        used = dict.fromkeys((c.recipe, scheme_of(c.quantization)) for d in plan.rewritten for c in d.copies)
        order = list(state)
        for recipe, scheme in sorted(used, key=lambda key: order.index(key[0]) if key[0] in order else len(order)):
            self.emitters[recipe, scheme] = Emitter(
                scheme,
                plan.tensors_in_state(recipe),
                state.get(recipe),
                records=options.records,
                is_first=FIRST_STEP in options.variants,
            )
        self.launch_of = {copy: launch for launch in plan.launches for cast in launch for copy in cast.copies}
        self.reshapes: list[fx.Node] = []  # Reshapes of values that backward computes again.
        self.valid: dict[Hashable, fx.Node] = {}  # Groups, number of rows, side of the partition -> rows of some group.

    def run(self) -> None:
        for emitter in self.emitters.values():
            emitter.begin(self.start)
        for decision in in_graph_order(self.graph, self.plan.rewritten):
            self._rewrite(decision)
        for kept in self.plan.decisions:
            for position, copy in kept.dequantized:
                self._dequantize(kept.site, position, copy)
        output = next(iter(self.graph.find_nodes(op="output")))
        for backward in (False, True):
            for emitter in self.emitters.values():
                emitter.end(self.start.at(output, backward))
            if self.watcher is not None:
                self.watcher.end(self.start.at(output, backward))
        for node in (*self.reshapes, *(n for chain in self.plan.recomputed.values() for n in chain)):
            always_recompute(node)
        self.graph.eliminate_dead_code()
        moved = [g.gather for g in self.plan.gathers if g.reason is None]
        for gather in moved:  # collectives count as side effects, so that dead code elimination leaves them
            self.graph.erase_node(gather.wait)
            self.graph.erase_node(gather.collective)
        if moved:
            self.graph.eliminate_dead_code()

    # -- quantization

    def _copy(self, copy: Copy) -> Quantized:
        if copy not in self.applied.copies:
            self._launch(self.launch_of[copy])
        return self.applied.copies[copy]

    def _launch(self, launch: Launch) -> None:
        first = launch[0]
        source = first.source
        made: list[tuple[Quantized, ...]]
        if isinstance(source, FromInput):
            made = [(Quantized(source.data, source.scale_inv, first.copies[0], source.data),)]
            if source.amax is not None and first.is_first:
                cursor = self.start.at(first.at.node, first.at.is_backward)
                self._emitter(first.copies[0]).record(cursor, first, source.amax)
        elif isinstance(source, Copy) and first.copies[0] in self.plan.kept:
            made = [(self._turned(first, source),)]
        else:
            if isinstance(source, Copy):
                self._copy(source)
            cursor = self.start.at(first.at.node, first.at.is_backward).sharing(first.tensor.value.root, first.at.node)
            for cast in launch:
                self._hoist(self.applied.now(cast.tensor.value.root), first.at.node)
            emitter = self._emitter(first.copies[0])
            reads = [self._read(cast, cursor) for cast in launch]
            if isinstance(source, Copy) and first.tensor.value.groups is None:
                made = [emitter.transposed(cursor, first, self._copy(source))]
            else:
                if first.tensor in self.plan.fused:
                    emitter.share(cursor, [cast.tensor for cast in launch], reads)
                made = emitter.quantize(cursor, launch, reads)
                if self.watcher is not None:
                    self.watcher.casts(cursor, launch, reads, emitter, made)
        for cast, quantized in zip(launch, made, strict=True):
            self.applied.copies.update(zip(cast.copies, quantized, strict=True))
            if cast.is_pinned:
                for copy in quantized:
                    pin(copy.maker, cast.at.is_backward)

    def _turned(self, cast: Cast, source: Copy) -> Quantized:
        """The other orientation of a copy. All of it is on the side of its GEMM: forward would save what it makes."""
        held, ((copy,), (layout,)) = self._copy(source), (cast.copies, cast.layouts)
        cursor = self.start.at(cast.at.node, cast.at.is_backward)
        before = cursor.before.prev
        data = transposed_data(cursor, held, layout)
        scale_inv = scheme_of(copy.quantization).transposed_scales(cursor, held)
        while cast.is_pinned and (before := before.next) is not cursor.before:
            pin(before, cast.at.is_backward)
        return Quantized(data, scale_inv, copy, data)

    def _emitter(self, copy: Copy) -> Emitter:
        return self.emitters[copy.recipe, scheme_of(copy.quantization)]

    def _read(self, cast: Cast, cursor: Cursor) -> fx.Node:
        """The node that a cast reads, in the dtype and with the rows that the plan says."""
        if isinstance(cast.source, Copy):
            return self.applied.copies[cast.source].data
        groups, matrix = cast.tensor.value.groups, self._matrix(cast, cursor)
        if groups is not None and cast.masked:
            matrix = self._masked(cursor, cast, groups, matrix)
        return matrix

    def _masked(self, cursor: Cursor, cast: Cast, groups: Groups, matrix: fx.Node) -> fx.Node:
        """The matrix with zeros in the rows that no group reads."""
        key = (groups, str(cast.tensor.value.rows), cast.at.is_backward)
        if key not in self.valid:
            rows = cursor.size(matrix, 0)
            plain = cursor.sharing(groups.offs)
            self.valid[key] = plain.call(torch.ops.lowering.valid_rows.default, groups.offs, rows, groups.index)
        column = cursor.call(aten.unsqueeze.default, self.valid[key], 1)
        return cursor.call(aten.where.self, column, matrix, zero(cursor, matrix))

    def _hoist(self, node: fx.Node, before: fx.Node) -> None:
        """Move a chain of views in front of a launch that needs it earlier than its own GEMM does."""
        if self.order.get(node, -1) > self.order[before]:
            for read in node.all_input_nodes:
                self._hoist(read, before)
            before.prepend(node)
            del self.order[node]

    def _matrix(self, cast: Cast, cursor: Cursor) -> fx.Node:
        """The high-precision value as a matrix node."""
        value, root = cast.tensor.value, self.applied.now(cast.tensor.value.root)
        if value_of(root).dtype != cast.reads:
            root = cursor.sharing(root).call(prims.convert_element_type.default, root, cast.reads)
        if value.reshape is None:
            return root
        num_dims = 2 if value.batch is None else 3
        if value.reshape.target in _SIZED:
            args: Any = value.reshape.args
            sizes = args[1][-num_dims:]
        else:
            self._hoist(value.reshape, cursor.before)
            sizes = [cursor.size(value.reshape, dim) for dim in range(-num_dims, 0)]
        for size in sizes:
            if isinstance(size, fx.Node):
                self._hoist(size, cursor.before)
        node = cursor.call(aten.reshape.default, root, sizes)
        if root in self.plan.recomputed:
            self.reshapes.append(node)
        return node

    # -- GEMMs

    def _rewrite(self, decision: Rewritten) -> None:
        site, node = decision.site, decision.site.node
        a, b = map(self._copy, decision.copies)
        epilogue, scheme = self.plan.epilogues[node], scheme_of(a.quantization)
        cursor = self.start.at(node, site.is_backward).sharing(node)
        if site.form is not None:
            out = scheme.grouped_matmul(cursor, a, b, site.offs, epilogue.out_dtype, epilogue.fast_accum)
            sizes = value_of(node).shape[-2:]  # the counts of groups and of slots are those of the operands
        else:
            sizes = [cursor.size(operand, dim) for operand, dim in zip(operands_of(node), (-2, -1), strict=True)]
            if epilogue.cuts_rows == "operand":
                a = dataclasses.replace(a, data=cursor.call(aten.slice.Tensor, a.data, 0, 0, sizes[0]))
            bias = None if epilogue.bias is None else self._bias(cursor, epilogue.bias, sizes[1], epilogue.cuts_columns)
            out = scheme.matmul(cursor, a, b, epilogue.out_dtype, epilogue.fast_accum, bias)
        self.applied.gemms[site.node] = out
        if "recompute" in site.node.meta:
            inherit_recomputation(out, site.node)
        elif not site.is_backward:
            never_recompute(out)
        out = self._cut(cursor, out, node, epilogue, sizes)
        addend = None if epilogue.addend is None else self.applied.now(epilogue.addend)
        if addend is not None:
            out = cursor.call(aten.add.Tensor, out, addend)
        if site.form is None and value_of(node).dim() == 3:
            out = cursor.call(aten.unsqueeze.default, out, 0)
        if self.watcher is not None:
            added = addend if epilogue.bias is None else self.applied.now(epilogue.bias)
            self.watcher.product(cursor, site, decision.recipe, out, added)
        self.applied.readers[node] = tuple(node.users)
        node.replace_all_uses_with(out)
        self.applied.results[node] = out

    def _cut(self, cursor: Cursor, out: fx.Node, node: fx.Node, epilogue: Epilogue, sizes: Sequence[Any]) -> fx.Node:
        """The result of a GEMM, `node` before, without its padding."""
        first = value_of(out).dim() - 2
        cuts = (epilogue.cuts_rows == "result", epilogue.cuts_columns)
        for dim, is_cut, size in zip((first, first + 1), cuts, sizes, strict=True):
            if is_cut:
                out = cursor.call(aten.slice.Tensor, out, dim, 0, size)
        has_gaps = cuts[1] or (cuts[0] and first > 0)
        if has_gaps and (self.options.contiguous_outputs or _is_returned(node)):
            out = cursor.call(aten.clone.default, out, memory_format=torch.contiguous_format)
        return out

    def _bias(self, cursor: Cursor, vector: fx.Node, columns: Any, is_padded: bool) -> fx.Node:
        """The vector that a GEMM adds, as wide as its product."""
        bias = self.applied.now(vector)
        extra = pad_to_alignment(columns) - columns if is_padded else 0
        return cursor.call(aten.constant_pad_nd.default, bias, [0, extra], 0.0) if extra else bias

    def _dequantize(self, site: GemmSite, position: int, copy: Copy) -> None:
        """Let a GEMM in high precision read the values of an FP8 copy. They are made in backward, so that the copy is saved."""
        node, operand = site.node, site.operands[position]
        read = operands_of(node)[position]
        cursor = self.start.at(node, site.is_backward).sharing(node)
        held = self.applied.copies[copy]
        values = scheme_of(copy.quantization).dequantize(cursor, held.data, held.scale_inv, copy.quantization)
        made = cursor.call(prims.convert_element_type.default, values, value_of(read).dtype)
        is_turned = copy.columnwise != operand.transposed
        for dim, of_read in enumerate((-1, -2) if is_turned else (-2, -1)):
            if not same_size(value_of(made).shape[dim], value_of(read).shape[of_read]):  # padding
                made = cursor.call(aten.slice.Tensor, made, dim, 0, cursor.size(read, of_read))
        if is_turned:
            made = cursor.call(aten.permute.default, made, [1, 0])
        if value_of(read).dim() == 3:
            made = cursor.call(aten.unsqueeze.default, made, 0)
        for new in (values, made):
            pin(new, site.is_backward)
        node.update_arg(operand_positions(node)[position], made)


def _is_returned(node: fx.Node) -> bool:
    """True if the graph returns a node, or a view of it: with the strides that the original model gives it."""
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user.op == "output":
                return True
            if user.target in RESHAPES or user.target in PERMUTES:
                pending.append(user)
    return False
