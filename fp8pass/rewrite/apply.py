"""Apply: edits a graph as a Plan says. Before it only `simplify.py` edits the graph, after it only `fold.py`.

Per launch, before the first GEMM that reads one of its copies: the scales, and the operation that writes the copies. Per GEMM:
one scaled GEMM. What these nodes are is the recipe's business (`Emitter`); where they stand, which side of the partition
they belong to and what is recomputed is decided in the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx

from fp8pass.graph.casts import maker_of
from fp8pass.graph.cursor import Cursor, always_recompute, inherit_recomputation, never_recompute, pin
from fp8pass.graph.kinds import addend_of, operand_positions, operands_of
from fp8pass.graph.moves import is_gathered
from fp8pass.graph.sites import GemmSite
from fp8pass.graph.values import Groups, same_size, value_of
from fp8pass.recipes.grouped import zero
from fp8pass.recipes.recipe import (
    Cast,
    Copy,
    Emitter,
    Epilogue,
    GroupNodes,
    Quantized,
    QuantizedTensor,
    Recipe,
    Scope,
    StateNodes,
)
from fp8pass.rewrite.launches import in_graph_order
from fp8pass.rewrite.plan import Decision, Launch, Options, Plan
from lowering.formats import Granularity, pad_to_alignment

aten = torch.ops.aten
prims = torch.ops.prims

#: Reshapes whose arguments say the sizes.
_SIZED = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


@dataclasses.dataclass(frozen=True)
class Applied:
    """What became of the plan's items: nodes of the rewritten graph."""

    gemms: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)
    """Rewritten GEMM, which is no longer in the graph -> the scaled GEMM in its place."""
    copies: dict[Copy, Quantized] = dataclasses.field(default_factory=dict)
    dequantized: dict[tuple[fx.Node, int], fx.Node] = dataclasses.field(default_factory=dict)
    """GEMM in high precision and operand -> the float32 values of the FP8 copy that it reads."""
    emitters: tuple[Emitter, ...] = ()


def apply(graph: fx.Graph, plan: Plan, state: Mapping[Recipe, StateNodes], options: Options) -> Applied:
    """Carry out a plan, in place. `state`: the placeholders of each recipe that keeps state."""
    if not plan.rewritten:
        return Applied()
    rewriter = _Rewriter(graph, plan, state, options)
    rewriter.run()
    return dataclasses.replace(rewriter.applied, emitters=tuple(rewriter.emitters.values()))


class _Rewriter:
    """The edits of one graph. Invariant: a node is inserted after everything it reads."""

    def __init__(self, graph: fx.Graph, plan: Plan, state: Mapping[Recipe, StateNodes], options: Options):
        self.graph = graph
        self.plan = plan
        self.options = options
        self.start = Cursor.start(graph)
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.applied = Applied()
        self.emitters: dict[Recipe, Emitter] = {}
        for recipe in dict.fromkeys((*state, *(c.tensor.recipe for d in plan.rewritten for c in d.copies))):
            scope = Scope(tuple(plan.tensors_of(recipe)), state.get(recipe), options.trains, options.starts)
            self.emitters[recipe] = recipe.emitter(scope)
        self.launch_of = {copy: launch for launch in plan.launches for cast in launch.casts for copy in cast.copies}
        self.replaced: dict[fx.Node, fx.Node] = {}
        """Rewritten GEMM -> the node that took its place; plans still name the former."""
        self.reshapes: list[fx.Node] = []
        """Reshapes of values that backward computes again."""
        self.valid: dict[Hashable, fx.Node] = {}
        """Groups, number of rows, side of the partition -> which rows belong to some group."""

    def run(self) -> None:
        for emitter in self.emitters.values():
            emitter.begin(self.start)
        for decision in in_graph_order(self.graph, self.plan.rewritten):
            self._rewrite(decision)
        for decision in self.plan.decisions:
            for position, copy in decision.dequantized:
                self._dequantize(decision.site, position, copy)
        output = next(iter(self.graph.find_nodes(op="output")))
        for emitter in self.emitters.values():
            for backward in (False, True):
                emitter.end(self.start.at(output, backward))
        for node in (*self.reshapes, *(n for chain in self.plan.recomputed.values() for n in chain)):
            always_recompute(node)
        self._remove_dead_nodes()

    def _remove_dead_nodes(self) -> None:
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
        first = launch.casts[0]
        if first.is_moved:
            self._copy(dataclasses.replace(first.copies[0], columnwise=False))
        cursor = self.start.at(first.at.node, first.at.is_backward).sharing(first.tensor.value.root, first.at.node)
        for cast in launch.casts:
            self._hoist(self._root(cast.tensor), first.at.node)
        matrices = [self._matrix(cast, cursor) for cast in launch.casts]
        emitter = self.emitters[first.tensor.recipe]
        if first.gather is not None:
            made = [emitter.quantize_shard(cursor, first, first.gather, matrices[0])]
        elif first.tensor.value.stack is not None:
            made = [emitter.quantize_stack(cursor, first, matrices[0])]
        elif first.tensor.value.groups is not None:
            groups = self._groups(cursor, first, first.tensor.value.groups, matrices[0])
            made = [(emitter.quantize_rows(cursor, first, matrices[0], groups),)]
        else:
            made = emitter.quantize(cursor, launch.casts, matrices)
        for cast, quantized in zip(launch.casts, made, strict=True):
            self.applied.copies.update(zip(cast.copies, quantized, strict=True))
            if cast.is_pinned:
                for copy in quantized:
                    pin(copy.data if cast.is_moved else maker_of(copy.data), cast.at.is_backward)

    def _groups(self, cursor: Cursor, cast: Cast, groups: Groups, matrix: fx.Node) -> GroupNodes:
        """The groups of rows, with the matrix in which rows that no group reads are zeros: elsewhere they may be anything, NaN
        included, and would reach amaxes."""
        key = (groups, str(cast.tensor.value.rows), cast.at.is_backward)
        if key not in self.valid:
            rows = cursor.size(matrix, 0)
            plain = cursor.sharing(groups.offs)
            self.valid[key] = plain.call(torch.ops.lowering.valid_rows.default, groups.offs, rows, groups.index)
        column = cursor.call(aten.unsqueeze.default, self.valid[key], 1)
        masked = cursor.call(aten.where.self, column, matrix, zero(cursor, matrix))
        return GroupNodes(groups.offs, groups.index, masked)

    def _hoist(self, node: fx.Node, before: fx.Node) -> None:
        """Move a chain of views in front of a launch that needs it earlier than its own GEMM does."""
        if self.order.get(node, -1) > self.order[before]:
            for read in node.all_input_nodes:
                self._hoist(read, before)
            before.prepend(node)
            del self.order[node]

    def _root(self, tensor: QuantizedTensor) -> fx.Node:
        return self.replaced.get(tensor.value.root, tensor.value.root)

    def _matrix(self, cast: Cast, cursor: Cursor) -> fx.Node:
        """The high-precision value as a matrix node."""
        tensor = cast.tensor
        value, root = tensor.value, self._root(tensor)
        dtype = value_of(cast.at.node).dtype
        is_in_memory = root.op == "placeholder" or is_gathered(root)
        if tensor.recipe.reads_gemm_dtype and not is_in_memory and value_of(root).dtype.itemsize > dtype.itemsize:
            root = cursor.sharing(root).call(prims.convert_element_type.default, root, dtype)
        if value.reshape is None:
            return root
        num_dims = 2 if value.stack is None else 3
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

    def _rewrite(self, decision: Decision) -> None:
        assert decision.a is not None
        assert decision.b is not None
        site = decision.site
        if site.form is not None:
            self._rewrite_grouped(decision, self._copy(decision.a), self._copy(decision.b))
            return
        node = site.node
        a, b = self._copy(decision.a), self._copy(decision.b)
        cursor = self.start.at(node, site.is_backward).sharing(node)
        has_spare_rows = not same_size(value_of(a.data).shape[0], site.m)
        cuts_operand = has_spare_rows and a.quantization.granularity is Granularity.TENSOR_WISE  # its scale fits any rows
        first, second = operands_of(node)
        if cuts_operand:
            rows = cursor.call(aten.slice.Tensor, a.data, 0, 0, cursor.size(first, -2))
            a = dataclasses.replace(a, data=rows)
        is_padded = not same_size(value_of(b.data).shape[0], site.n)
        bias, rest = self._bias(cursor, node, is_padded, b.data)
        emitter = self.emitters[decision.a.tensor.recipe]
        out = emitter.matmul(cursor, a, b, Epilogue(site.role, value_of(node).dtype, bias))
        self._take_place(out, site)
        if has_spare_rows and not cuts_operand:
            out = cursor.call(aten.slice.Tensor, out, 0, 0, cursor.size(first, -2))
        if is_padded:
            out = cursor.call(aten.slice.Tensor, out, 1, 0, cursor.size(second, -1))
            if self.options.contiguous_outputs:
                out = cursor.call(aten.clone.default, out, memory_format=torch.contiguous_format)
        if rest is not None:
            out = cursor.call(aten.add.Tensor, out, rest)
        if value_of(node).dim() == 3:
            out = cursor.call(aten.unsqueeze.default, out, 0)
        node.replace_all_uses_with(out)
        self.replaced[node] = out

    def _take_place(self, gemm: fx.Node, site: GemmSite) -> None:
        self.applied.gemms[site.node] = gemm
        if "recompute" in site.node.meta:
            inherit_recomputation(gemm, site.node)
        elif not site.is_backward:
            never_recompute(gemm)

    def _rewrite_grouped(self, decision: Decision, a: Quantized, b: Quantized) -> None:
        """A grouped GEMM: rows of the result that belong to no group are zeros."""
        site = decision.site
        node = site.node
        cursor = self.start.at(node, site.is_backward).sharing(node)
        emitter = self.emitters[decision.copies[0].tensor.recipe]
        out = emitter.grouped_matmul(cursor, a, b, site.offs, Epilogue(site.role, value_of(node).dtype, None))
        self._take_place(out, site)
        wanted, is_cut = value_of(node), False
        for dim in range(wanted.dim()):
            if not same_size(value_of(out).shape[dim], wanted.shape[dim]):  # padding
                out = cursor.call(aten.slice.Tensor, out, dim, 0, wanted.shape[dim])
                is_cut = True
        if is_cut and self.options.contiguous_outputs:
            out = cursor.call(aten.clone.default, out, memory_format=torch.contiguous_format)
        addend = addend_of(node)
        if addend is not None:
            out = cursor.call(aten.add.Tensor, out, addend)
        node.replace_all_uses_with(out)
        self.replaced[node] = out

    def _dequantize(self, site: GemmSite, position: int, copy: Copy) -> None:
        """Let a GEMM in high precision read the values of an FP8 copy. They are made in backward, so that the copy is saved."""
        node, operand = site.node, site.operands[position]
        read = operands_of(node)[position]
        cursor = self.start.at(node, site.is_backward).sharing(node)
        emitter = self.emitters[copy.tensor.recipe]
        values = emitter.dequantize(cursor, self.applied.copies[copy])
        self.applied.dequantized[node, position] = values
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

    def _bias(self, cursor: Cursor, node: fx.Node, is_padded: bool, b: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
        """What a GEMM adds: (a vector [N] for the epilogue, anything else to add afterwards)."""
        bias = addend_of(node)
        if bias is None:
            return None, None
        if value_of(bias).dim() != 1 or not same_size(value_of(bias).shape[0], value_of(node).shape[1]):
            return None, bias
        if is_padded:
            if not isinstance(value_of(b).shape[0], int):
                return None, bias
            extra = pad_to_alignment(value_of(bias).shape[0]) - value_of(bias).shape[0]
            return cursor.call(aten.constant_pad_nd.default, bias, [0, extra], 0.0), None
        return bias, None
