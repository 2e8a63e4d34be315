"""Apply: edits a graph as a Plan says. The only module that mutates graphs.

Per quantized tensor, before the first GEMM that reads it: its scale (from the state, or from its amax), then one op that
writes every FP8 copy that some GEMM of the joint graph needs, and, for delayed scaling in a graph that trains, its amax.
Per GEMM: one scaled GEMM. Per state and side of the partition: one op that records all amaxes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from fp8pass.graph.values import same_size, value_of
from fp8pass.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from fp8pass.rewrite.insertion import Inserter, always_recompute, inherit_recomputation, is_recomputed, never_recompute, pin
from fp8pass.rewrite.moves import is_gathered
from fp8pass.rewrite.plan import Copy, Decision, Plan, QuantizedTensor
from fp8pass.rewrite.remake import Chains
from lowering.formats import pad_to_alignment

aten = torch.ops.aten
prims = torch.ops.prims
ops = torch.ops.lowering


@dataclasses.dataclass(frozen=True)
class StateNodes:
    """The placeholders through which the state of one delayed recipe enters a graph."""

    scale: fx.Node
    amax: fx.Node
    """Where the forward records."""
    grad_amax: fx.Node
    """Where the backward records: the same memory, but for a recomputed forward, which must not record again."""
    slots: fx.Node


@dataclasses.dataclass(frozen=True)
class ApplyOptions:
    """What the backend needs from the edits."""

    trains: bool
    """Whether the graph has a backward: inference records no amax and saves nothing."""
    contiguous_outputs: bool
    """Whether outputs cut from a padded N are copied, for backends that take the strides of tracing for granted."""
    weight_copies: str = "auto"
    """Where FP8 copies of weights that only backward reads are made: "save", "recompute", or "auto" (`MANY_ROWS`)."""


#: weight_copies="auto": from this M on the copy of a weight is made again. By estimate (no GPU has run it: 4.3 TB/s, 1300
#: TFLOP/s) reading a bfloat16 weight once more takes an H200 2.5 % of the time that its three FP8 GEMMs take at M = 4096, and
#: half of that whenever M doubles; saving the copy takes one byte per parameter until backward.
MANY_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class _Quantized:
    """One FP8 copy in the graph, with the reciprocal of its scale."""

    data: fx.Node
    scale_inv: fx.Node


def apply(graph: fx.Graph, plan: Plan, state: dict[Recipe, StateNodes], options: ApplyOptions, remade: Chains) -> None:
    """Rewrite every GEMM that the plan sends to FP8. `remade`: the values whose backward-only copies are made in backward."""
    if plan.rewritten:
        _Rewriter(graph, plan, state, options, remade).run()


def recipe_of_scale(scale: Any, state: dict[Recipe, StateNodes]) -> Recipe | None:
    """The delayed recipe whose state a scale in a rewritten graph was taken from; None if the graph computes it."""
    if scale.target is not aten.select.int:
        return None
    loaded = scale.args[0].args[0]
    return next((recipe for recipe, nodes in state.items() if nodes.scale is loaded.args[0]), None)


class _Rewriter:
    """The edits of one graph. Invariant: a node is inserted after everything it reads."""

    def __init__(self, graph: fx.Graph, plan: Plan, state: dict[Recipe, StateNodes], options: ApplyOptions, remade: Chains):
        self.graph = graph
        self.plan = plan
        self.state = state
        self.options = options
        self.remade = remade
        self.insert = Inserter(graph)
        self.copies_needed = plan.copies
        self.quantized: dict[Copy, _Quantized] = {}
        self.scales: dict[Recipe, tuple[fx.Node, fx.Node]] = {}
        self.index = {t: i for recipe in state for i, t in enumerate(plan.tensors_of(recipe))}
        self.copies_of_forward = {c for d in plan.rewritten if not d.site.is_backward for c in (d.a, d.b)}
        self.rows = {d.b.tensor: _hint(d.site.m) for d in plan.rewritten if d.b is not None and d.site.role == "output"}
        self.scale_of: dict[QuantizedTensor, tuple[fx.Node, fx.Node]] = {}
        self.replaced: dict[fx.Node, fx.Node] = {}
        """Rewritten GEMM -> the node that took its place; plans still name the former."""
        self.recomputed: list[fx.Node] = []
        """Reshapes of values that backward computes again."""
        self.recorded: dict[tuple[Recipe, bool], list[tuple[fx.Node, int]]] = {}

    def run(self) -> None:
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        decisions = sorted(self.plan.rewritten, key=lambda d: order[d.site.node])
        for recipe in self.state:
            self._load_scales(recipe)
        for decision in decisions:
            self._rewrite(decision)
        self._record()
        for node in (*self.recomputed, *(n for chain in self.remade.values() for n in chain)):
            always_recompute(node)
        self.graph.eliminate_dead_code()

    # -- scales

    def _load_scales(self, recipe: Recipe) -> None:
        """The scales by value and their reciprocals, once per graph. Backward must see what forward saw, even after a
        step boundary has changed the state: so they are saved, never read again."""
        count = len(self.plan.tensors_of(recipe))
        if not count:
            return
        nodes = self.state[recipe]
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        loaded = self.insert.call(first, ops.load_scales.default, nodes.scale, nodes.slots, count, backward=False)
        taken = [self.insert.item(first, loaded, i, backward=False) for i in (0, 1)]
        for node in (loaded, *taken):
            never_recompute(node)
        self.scales[recipe] = (taken[0], taken[1])

    def _scale_of(self, tensor: QuantizedTensor, matrix: fx.Node, at: Decision) -> tuple[fx.Node, fx.Node]:
        """Scale and its reciprocal, float32 scalars."""
        before, backward = at.site.node, at.site.is_backward
        recipe = tensor.recipe
        if isinstance(recipe, DelayedScaling):
            index = self.index[tensor]
            scale, scale_inv = (
                self.insert.call(before, aten.select.int, vector, 0, index, backward=backward) for vector in self.scales[recipe]
            )
            return scale, scale_inv
        assert isinstance(recipe, Float8CurrentScaling)
        amax = self.insert.call(before, ops.amax.default, matrix, backward=backward)
        scale = self.insert.call(
            before,
            ops.scale_from_amax.default,
            amax,
            tensor.dtype,
            backward=backward,
            epsilon=recipe.amax_epsilon,
            power_of_2=recipe.use_power_2_scales,
        )
        scale_inv = self.insert.call(before, aten.reciprocal.default, scale, backward=backward)
        for node in (amax, scale, scale_inv):
            self._share_recomputation(node, tensor, at)
        return scale, scale_inv

    # -- quantization

    def _copy(self, copy: Copy, at: Decision) -> _Quantized:
        if copy not in self.quantized:
            copies = self._copies_now(copy, at)
            if isinstance(copy.tensor.recipe, Float8BlockScaling):
                self._quantize_blockwise(copy.tensor, copies, at)
            else:
                self._quantize(copy.tensor, copies, at)
        return self.quantized[copy]

    def _copies_now(self, copy: Copy, at: Decision) -> list[Copy]:
        """The copies to make where `copy` is needed first, rowwise first: all that are needed anywhere, or, where copies are
        remade, those of this side of the partition."""
        copies = sorted(self.copies_needed[copy.tensor], key=lambda c: c.columnwise)
        if self._is_remade(copy.tensor):
            is_made_in_forward = not at.site.is_backward
            copies = [c for c in copies if (c in self.copies_of_forward) == is_made_in_forward and c not in self.quantized]
        return copies

    def _is_remade(self, tensor: QuantizedTensor) -> bool:
        """Whether the copies that only backward reads are made there, because it has what they are made of. It has
        Parameters, but not those that were gathered from other ranks."""
        if tensor.name.kind != "weight":
            return tensor.value.root in self.remade
        if tensor.value.root.op != "placeholder" or not self.options.trains:
            return False
        choice = self.options.weight_copies
        return choice == "recompute" or (choice == "auto" and self.rows.get(tensor, 0) >= MANY_ROWS)

    def _layout(self, copies: list[Copy]) -> dict[str, bool]:
        """The arguments of a quantizing op that say which copies it makes."""
        padded = [c in self.plan.padded for c in copies]
        if len(copies) == 2:
            return {"pad_rows": padded[0], "pad_cols": padded[1]}
        return {"columnwise": copies[0].columnwise, "pad_outer": padded[0]}

    def _quantize(self, tensor: QuantizedTensor, copies: list[Copy], at: Decision) -> None:
        matrix = self._matrix(tensor, at)
        is_first = tensor not in self.scale_of
        if is_first:
            self.scale_of[tensor] = self._scale_of(tensor, matrix, at)
        scale, scale_inv = self.scale_of[tensor]
        records = is_first and self.options.trains and isinstance(tensor.recipe, DelayedScaling)
        name = ("cast_transpose" if len(copies) == 2 else "cast") + ("_amax" if records else "")
        outputs = self._outputs(name, (matrix, scale, tensor.dtype), self._layout(copies), tensor, at)
        if records:
            amaxes = self.recorded.setdefault((tensor.recipe, at.site.is_backward), [])
            amaxes.append((outputs[-1], self.index[tensor]))
        for copy, data in zip(copies, outputs, strict=False):
            self.quantized[copy] = _Quantized(data, scale_inv)

    def _quantize_blockwise(self, tensor: QuantizedTensor, copies: list[Copy], at: Decision) -> None:
        recipe = tensor.recipe
        assert isinstance(recipe, Float8BlockScaling)
        matrix = self._matrix(tensor, at)
        options = {
            "block_dims": tensor.block_dims,
            "power_of_2": not recipe.use_f32_scales,
            "epsilon": recipe.amax_epsilon,
            **self._layout(copies),
        }
        name = "cast_transpose_blockwise" if len(copies) == 2 else "cast_blockwise"
        outputs = self._outputs(name, (matrix, tensor.dtype), options, tensor, at)
        for copy, data, scale_inv in zip(copies, outputs[::2], outputs[1::2], strict=True):
            self.quantized[copy] = _Quantized(data, scale_inv)

    def _outputs(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: QuantizedTensor, at: Decision
    ) -> list[fx.Node]:
        """Call a quantizing op; its outputs as nodes."""
        before, backward = at.site.node, at.site.is_backward
        node = self.insert.call(before, getattr(ops, name).default, *args, backward=backward, **kwargs)
        self._share_recomputation(node, tensor, at)
        if backward and self._is_remade(tensor):
            pin(node, backward)  # left to the partitioner it would be made in forward and saved
        if isinstance(node.meta["val"], torch.Tensor):
            return [node]
        return [self.insert.item(before, node, i, backward) for i in range(len(node.meta["val"]))]

    def _matrix(self, tensor: QuantizedTensor, at: Decision) -> fx.Node:
        """The high-precision value as a matrix node."""
        value = tensor.value
        root = self.replaced.get(value.root, value.root)
        before, backward = at.site.node, at.site.is_backward
        dtype = value_of(before).dtype
        is_at_hand = root.op == "placeholder" or is_gathered(root)
        if tensor.recipe.is_blockwise and not is_at_hand and value_of(root).dtype.itemsize > dtype.itemsize:
            # Blockwise casts do not fuse with what they read. The value is written as the GEMM would have read it.
            root = self._keep(
                self.insert.call(before, prims.convert_element_type.default, root, dtype, backward=backward), root
            )
        if value.reshape is None:
            return root
        if value.reshape.target in _SIZED:
            sizes = value.reshape.args[1][-2:]
        else:
            sizes = [self.insert.size(before, value.reshape, dim, backward) for dim in (-2, -1)]
        node = self.insert.call(before, aten.reshape.default, root, sizes, backward=backward)
        self._share_recomputation(node, tensor, at)
        if root in self.remade:
            self.recomputed.append(node)
        return node

    def _share_recomputation(self, node: fx.Node, tensor: QuantizedTensor, at: Decision) -> None:
        """A tensor that checkpointing recomputes is quantized again; so is one that only a recomputed GEMM reads."""
        for other in (tensor.value.root, at.site.node):
            if is_recomputed(other):
                inherit_recomputation(node, other)
                return

    # -- GEMMs

    def _rewrite(self, decision: Decision) -> None:
        site, recipe = decision.site, decision.recipe
        assert decision.a is not None
        assert decision.b is not None
        assert recipe is not None
        node, backward = site.node, site.is_backward
        a, b = self._copy(decision.a, decision), self._copy(decision.b, decision)
        a_data, n = a.data, site.n
        is_blockwise = isinstance(recipe, Float8BlockScaling)
        has_spare_rows = not same_size(value_of(a_data).shape[0], site.m)
        if has_spare_rows and not is_blockwise:  # blockwise scales belong to all rows: there the result is cut
            m = self.insert.size(node, node.args[-2], -2, backward)
            a_data = self._keep(self.insert.call(node, aten.slice.Tensor, a_data, 0, 0, m, backward=backward), node)
        transposed = self._keep(self.insert.call(node, aten.permute.default, b.data, [1, 0], backward=backward), node)
        is_padded = not same_size(value_of(b.data).shape[0], n)
        bias, rest = self._bias(node, is_padded, b.data, backward)
        args = (a_data, transposed, a.scale_inv, b.scale_inv, bias)
        out_dtype = value_of(node).dtype
        if is_blockwise:
            dims = {"block_dims_a": decision.a.tensor.block_dims, "block_dims_b": decision.b.tensor.block_dims}
            target, options = ops.scaled_mm_blockwise.default, dims
        else:
            target, options = ops.scaled_mm.default, {"fast_accum": getattr(recipe, f"fast_accum_{site.role}")}
        out = self.insert.call(node, target, *args, backward=backward, out_dtype=out_dtype, **options)
        if "recompute" in node.meta:
            inherit_recomputation(out, node)
        elif not backward:
            never_recompute(out)
        if has_spare_rows and is_blockwise:
            height = self.insert.size(node, node.args[-2], -2, backward)
            out = self._keep(self.insert.call(node, aten.slice.Tensor, out, 0, 0, height, backward=backward), node)
        if is_padded:
            width = self.insert.size(node, node.args[-1], -1, backward)
            out = self._keep(self.insert.call(node, aten.slice.Tensor, out, 1, 0, width, backward=backward), node)
            if self.options.contiguous_outputs:
                contiguous = {"memory_format": torch.contiguous_format}
                out = self._keep(self.insert.call(node, aten.clone.default, out, backward=backward, **contiguous), node)
        if rest is not None:
            out = self._keep(self.insert.call(node, aten.add.Tensor, out, rest, backward=backward), node)
        if value_of(node).dim() == 3:
            out = self._keep(self.insert.call(node, aten.unsqueeze.default, out, 0, backward=backward), node)
        node.replace_all_uses_with(out)
        self.replaced[node] = out

    def _keep(self, node: fx.Node, like: fx.Node) -> fx.Node:
        if is_recomputed(like):
            inherit_recomputation(node, like)
        return node

    def _bias(self, node: fx.Node, is_padded: bool, b: fx.Node, backward: bool) -> tuple[Any, Any]:
        """What addmm adds: (a vector [N] for the GEMM's epilogue, anything else to add afterwards)."""
        if node.target is not aten.addmm.default:
            return None, None
        bias = node.args[0]
        is_vector = value_of(bias).dim() == 1 and same_size(value_of(bias).shape[0], value_of(node).shape[1])
        if not is_vector:
            return None, bias
        if is_padded:
            if not isinstance(value_of(b).shape[0], int):
                return None, bias
            extra = pad_to_alignment(value_of(bias).shape[0]) - value_of(bias).shape[0]
            padded = self.insert.call(node, aten.constant_pad_nd.default, bias, [0, extra], 0.0, backward=backward)
            return self._keep(padded, node), None
        return bias, None

    # -- state

    def _record(self) -> None:
        output = next(iter(self.graph.find_nodes(op="output")))
        for (recipe, backward), amaxes in self.recorded.items():
            state = self.state[recipe]
            node = self.insert.call(
                output,
                ops.record_amax.default,
                state.grad_amax if backward else state.amax,
                state.slots,
                [amax for amax, _ in amaxes],
                [index for _, index in amaxes],
                backward=backward,
            )
            pin(node, backward)


def _hint(size: Any) -> int:
    """A size, or what a symbolic one was when traced; 0 where nobody knows. Adds no guard."""
    return size if isinstance(size, int) else size.node.hint or 0


_SIZED = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
