"""Inductor IR: where a value comes from, and buffers whose loops keep the order that we give them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import constrain_to_fake_tensors
from torch._inductor.virtualized import V, ops
from torch.fx.operator_schemas import normalize_function
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lowering.formats import FP8_MAX
from lowering.inductor import ahead

Lines = tuple[str, Callable[[Any], Any]]
"""The loops of a copy with a scale per line, which code that measures it joins, and the scale of a line. Loops are "rows": over
rows and all of their columns; "blocks": over `blockwise.lines_of`; "": none to be joined."""


@dataclasses.dataclass
class Facts:
    """Knowledge of lowerings about a result, a buffer or the graph, which Inductor's IR does not have."""

    source: ir.TensorBox | None = None  # The matrix that an FP8 copy was made of.
    loops: str = ""  # The loops of a copy with one scale: "tiles", "rows", or "" where none could be joined.
    lines: dict[bool, Lines] = dataclasses.field(default_factory=dict)
    """Columnwise or not -> the loops of a cast's copy with a scale per line; known of its first result."""
    amax_of: list[ir.TensorBox] | None = None  # The tensors whose amax it is, computed by a hand-written kernel.
    amax_parts: ir.TensorBox | None = None  # The partial amaxes that it is the largest of.
    elements: dict[Any, ir.TensorBox] = dataclasses.field(default_factory=dict)  # Offset -> an element as a buffer of its own.
    spread: ir.StorageBox | None = None  # The same vector with elements further apart: `spread_out`.
    ones: dict[torch.device, ir.TensorBox] = dataclasses.field(default_factory=dict)  # The graph's scalars 1.0.


def facts_of(node: Any) -> Facts:
    """The one value of each node, empty at first."""
    known: Facts = node.__dict__.setdefault("fp8_facts", Facts())
    return known


class OrderedBuffer(ir.ComputedBuffer):
    """A computed buffer whose loops keep the order they were written in. Inductor reorders loops by the strides of what they
    read and write, each buffer for itself. Buffers that are to become one kernel over the same tile must not be pulled apart
    like that."""

    @staticmethod
    def _apply_loop_reordering(
        index_vars: Sequence[Any],
        support_vars: Sequence[Any],
        sizes: Sequence[Any],
        memory_addrs: list[Any],
        priority_idx: list[int] | None = None,
    ) -> tuple[list[Any], Callable[..., Any], Callable[..., Any]]:
        order = list(range(len(sizes)))
        return list(sizes), ir.same_reorder(order), ir.inverse_reorder(order)


def realize_ordered(loops: ir.Loops, strides: Sequence[Any]) -> ir.StorageBox:
    """A buffer that holds what `loops` compute, at the given strides."""
    layout = ir.FixedLayout(loops.get_device(), loops.get_dtype(), loops.get_size(), list(strides))
    buffer = OrderedBuffer(name=None, layout=layout, data=loops)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)
    buffer.origins = loops.origins
    buffer.origin_node = loops.get_origin_node()
    buffer.traceback = loops.get_traceback()
    return ir.StorageBox(buffer)


def as_matrix(storage: ir.StorageBox, rows: Any, cols: Any) -> ir.TensorBox:
    """A dense buffer as a contiguous matrix."""
    layout = ir.FixedLayout(storage.get_device(), storage.get_dtype(), [rows, cols], [cols, 1])
    return ir.TensorBox(ir.ReinterpretView(data=storage, layout=layout))


def _storage(value: Any) -> Any:
    """The loops not yet realized, or the buffer, behind boxes and views."""
    while isinstance(value, (ir.TensorBox, ir.StorageBox, ir.BaseView)):
        value = value.data
    return value


def is_computed(x: ir.TensorBox) -> bool:
    """True if pointwise or reduction code of this graph computes x, so that its consumers can fuse with it."""
    return isinstance(_storage(x), (ir.Loops, ir.ComputedBuffer))


def is_in_memory(x: ir.TensorBox) -> bool:
    """True if x is written to memory whatever its consumers do."""
    return isinstance(_storage(x), ir.Buffer)


def needs_row_reduction(x: ir.TensorBox, rows: Any, cols: Any) -> bool:
    """True if a reduction over the rows of the matrix x, in this graph, goes into x: x is then available in that kernel."""
    numel = rows * cols
    seen: set[str] = set()
    storage = _storage(x)
    data = storage.data if isinstance(storage, ir.ComputedBuffer) else storage
    pending = [data if isinstance(data, ir.Loops) else None]
    while pending:
        loops = pending.pop()
        if loops is None:
            continue
        for name in loops.get_read_names() - seen:
            seen.add(name)
            buffer = V.graph.try_get_buffer(name)
            if not isinstance(buffer, ir.ComputedBuffer):
                continue
            per_row = V.graph.sizevars.statically_known_equals(buffer.get_numel(), rows)
            if per_row and isinstance(buffer.data, ir.Reduction):
                return True
            if per_row or V.graph.sizevars.statically_known_equals(buffer.get_numel(), numel):
                pending.append(buffer.data)
    return False


class _ElementView(ir.NopKernel):
    """One element of a buffer as a buffer of its own, at its address: no launch, no copy."""

    def should_allocate(self) -> bool:
        return True  # which writes the view into the wrapper's code

    def get_inputs_that_alias_output(self) -> Sequence[str]:
        return [self.input_name(0)]


def as_own_input(scalar: ir.TensorBox) -> ir.TensorBox:
    """A scalar within a larger buffer, as a pointer that generated kernels receive. Read through the larger buffer, its
    position would be a constant in their code, and equal layers would get different kernels. Its address is taken for
    unaligned, whatever the position, for alignment is in their code, too."""
    view = scalar.data
    if not isinstance(view, ir.ReinterpretView):
        if isinstance(_storage(scalar), ir.InputBuffer):  # saved by forward, from any position
            V.graph.unaligned_buffers.add(scalar.get_name())
        return scalar
    storage, layout = view.data, view.get_layout()
    base = _storage(storage)
    known = facts_of(base).elements
    if layout.offset not in known:
        element = ir.FixedLayout(layout.device, layout.dtype, [], [], layout.offset)
        owner = ir.ReinterpretView(data=storage, layout=element)
        buffer = _ElementView(name=None, layout=ir.NonOwningLayout(owner), inputs=[base])
        buffer.name = V.graph.register_buffer(buffer)
        V.graph.register_operation(buffer)
        V.graph.unaligned_buffers.add(buffer.name)
        V.graph.never_reuse_buffers.add(buffer.name)
        known[layout.offset] = ir.TensorBox(ir.StorageBox(buffer))
    return known[layout.offset]


#: Elements of the largest vector that `spread_out` copies: more than any launch has scales.
MOST_SPREAD = 65536


def spread_out(element: ir.ReinterpretView, step: int) -> ir.StorageBox | None:
    """The vector that a scalar is an element of, with `step` elements from each of its own to the next: one small copy for all
    of its scalars. None where it is large or dynamic."""
    base = _storage(element)
    known, layout = facts_of(base), base.get_layout()
    if not V.graph.sizevars.statically_known_leq(layout.storage_size(), MOST_SPREAD):
        return None
    if known.spread is None:
        whole = ir.FixedLayout(layout.device, layout.dtype, [layout.storage_size()], [1])
        load = ir.ReinterpretView(data=ir.StorageBox(base), layout=whole).make_loader()
        known.spread = realize_ordered(pointwise(layout.device, layout.dtype, load, whole.size), [step])
    return known.spread


class _Call(ir.FallbackKernel):
    """A call whose results are known from tracing where its arguments have the strides that they had there. Inductor makes a
    fake tensor of each argument and runs the operation on them, which takes longer than all else of a call."""

    @classmethod
    def process_kernel(cls, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten({"args": args, "kwargs": kwargs})
        is_tensor = [isinstance(x, ir.IRNode) for x in leaves]
        tensors = [cls.realize_input(x) for x in leaves if isinstance(x, ir.IRNode)]
        for x in tensors:
            if ir.is_storage_and_layout(x):
                ir.as_storage_and_layout(x, freeze=True)
        if not _are_as_traced(kernel, tensors):
            return super().process_kernel(kernel, *args, **kwargs)

        def unflattened(new_tensors: Sequence[Any], others: Sequence[Any]) -> tuple[Any, Any]:
            given, rest = iter(new_tensors), iter(others)
            found = tree_unflatten([next(given if is_one else rest) for is_one in is_tensor], spec)
            return found["args"], found["kwargs"]

        others = [x for x in leaves if not isinstance(x, ir.IRNode)]
        return V.current_node.meta.get("val"), tensors, others, unflattened, None


def _are_as_traced(kernel: Any, tensors: Sequence[ir.IRNode]) -> bool:
    """True if the node that is lowered calls `kernel` on tensors of these sizes and strides, all of them numbers."""
    node = V.current_node
    if node.target is not kernel:
        return False
    traced = [n.meta.get("val") for n in tree_leaves((node.args, node.kwargs)) if isinstance(n, torch.fx.Node)]
    return len(traced) == len(tensors) and all(
        isinstance(fake, torch.Tensor)
        and all(isinstance(size, int) for size in (*fake.shape, *fake.stride()))
        and ([*x.get_size(), *x.get_stride()] == [*fake.shape, *fake.stride()] or _is_element(x, fake))
        for x, fake in zip(tensors, traced, strict=True)
    )


def _is_element(x: ir.IRNode, fake: torch.Tensor) -> bool:
    """True if x is an element of the vector that was traced, picked by the lowering. No result's size depends on it."""
    return not x.get_size() and fake.dim() == 1


def call_operation(operation: Any, is_read: bool = True, is_traced: bool = True) -> Callable[..., Any]:
    """The lowering that calls an operation instead of generating code for it. is_read: whether something will read its results,
    so that it will not be removed. is_traced: whether the node that is lowered has these options; then its
    results are known."""
    call = _Call if is_traced else ir.FallbackKernel

    def lower(*args: Any, **options: Any) -> Any:
        made = tree_map_only(ir.IRNode, _boxed, call.create(operation, *args, **options))
        if is_read:
            ahead.of_boxes(operation, args, options)  # their strides are settled now
        return made

    return lower


def _boxed(result: ir.IRNode) -> ir.TensorBox:
    """A result of an operation. On a CPU no assertions about it are generated: tests hold every operation to its strides, and
    Python would take a third more time to load the code in a warm start."""
    if isinstance(result, ir.MultiOutput) and result.get_device() == torch.device("cpu"):
        result.skip_size_stride_alignment_checks = True
    return ir.TensorBox.create(result)


def with_sources(lower: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering of a cast, the first results of which know the matrices that they are copies of; see `source_of`."""

    def cast(xs: list[ir.TensorBox], *args: Any, **options: Any) -> Any:
        made = lower(xs, *args, **options)
        for copy, x in zip(made, xs, strict=False):
            facts_of(copy).source = x
        return made

    return cast


def with_strides(lower: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering of a GEMM whose operands, with scales of blocks, have the strides of the user's call, as Inductor gives them
    to an operation that it does not know."""

    def gemm(*args: Any, **options: Any) -> Any:
        node = V.current_node
        if "eager_input_vals" in node.meta and str(options.get("granularity_a")).startswith("block"):
            normalized = functools.partial(normalize_function, node.target)
            args, options = constrain_to_fake_tensors(*normalized(args, options), *normalized(*node.meta["eager_input_vals"]))
        return lower(*args, **options)

    return gemm


def source_of(x: ir.TensorBox) -> ir.TensorBox:
    """The matrix that an FP8 copy was made of; x itself where it is none."""
    if x.get_dtype() not in FP8_MAX:
        return x
    source = facts_of(x).source
    if source is None:
        raise RuntimeError(f"{x.get_name()} is an FP8 copy, and no lowering of a cast has made it")
    return source


def is_measured_columnwise() -> bool:
    """True if a statistics operation reads the columnwise copy of the cast that is lowered."""
    operation = torch.ops.lowering.quantization_statistics.default
    readers = (user for result in V.current_node.users for user in result.users)
    return any(user.target is operation and user.kwargs["columnwise"] for user in readers)


def graph_calls(operation: Any, granularities: Collection[str] = ()) -> bool:
    """True if the graph that is lowered calls an operation, where any are given with one of these granularities."""
    calls = V.current_node.graph.find_nodes(op="call_function", target=operation)
    return any(not granularities or node.kwargs["granularity"] in granularities for node in calls)


def is_multiple_of(size: Any, divisor: int) -> bool:
    """True if a size is known to be a multiple."""
    return V.graph.sizevars.statically_known_multiple_of(size, divisor)


def is_empty(x: ir.TensorBox) -> bool:
    """True if x is known to have no elements."""
    return any(V.graph.sizevars.statically_known_equals(size, 0) for size in x.get_size())


def max_reduction(
    device: torch.device,
    dtype: torch.dtype,
    inner: Callable[[Any, Any], Any],
    ranges: Sequence[Any],
    reduced: Sequence[Any],
    hint: Any,
) -> ir.Reduction:
    """A maximum, not split any further by Inductor."""
    return ir.Reduction(
        device=device,
        dtype=dtype,
        inner_fn=inner,
        ranges=list(ranges),
        reduction_ranges=list(reduced),
        reduction_type="max",
        src_dtype=dtype,
        reduction_hint=hint,
    )


def as_float32(storage: ir.StorageBox) -> ir.TensorBox:
    """A realized buffer of int32 as float32 of the same bits."""
    layout = storage.get_layout()
    seen = ir.FixedLayout(layout.device, torch.float32, layout.size, layout.stride)
    return ir.TensorBox(ir.ReinterpretView(data=storage, layout=seen))


def pointwise(device: torch.device, dtype: torch.dtype, inner: Callable[[Any], Any], ranges: Sequence[Any]) -> ir.Pointwise:
    """Loops over `ranges`, not realized."""
    return ir.Pointwise(device=device, dtype=dtype, inner_fn=inner, ranges=list(ranges))


def pointwise_like(like: ir.TensorBox, inner: Callable[[Any], Any], ranges: Sequence[Any]) -> ir.TensorBox:
    """A float32 tensor of `ranges` on the device of `like`, not realized."""
    return ir.Pointwise.create(device=like.get_device(), dtype=torch.float32, inner_fn=inner, ranges=list(ranges))


def one(device: torch.device) -> ir.TensorBox:
    """The scalar 1.0 in memory, for GEMMs without scales: one buffer in a graph."""
    made = facts_of(V.graph).ones
    if device not in made:
        made[device] = ir.TensorBox(
            realize_ordered(pointwise(device, torch.float32, lambda _: ops.constant(1.0, torch.float32), []), [])
        )
    return made[device]
