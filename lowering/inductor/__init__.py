"""Inductor lowerings of the operations: those of each room, registered once by `register_lowerings`, which the backend calls.
Importing this package imports neither Inductor nor Triton.

Operations without a lowering run as they are, by the short way of `buffers.call_operation`: Inductor's own for operations that
it does not know takes four times as long.

On the CPU all of them do: more generated C++ would make no step faster there, for the emulated GEMMs take the time, but
Inductor's work on it and g++ made compilation half as long again.

NOTE [reductions of blocks] Inductor holds reductions in registers up to 64 elements, or where the reduced dimension is
contiguous. Here it does so for blocks of 128, whichever dimension is contiguous, with 32 lines and eight warps.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lowering.formats import BLOCK, Granularity
from lowering.operation import NAMESPACE

#: Casts, whose first results are copies of their matrices, one of each.
CASTS = (torch.ops.lowering.cast.default, torch.ops.lowering.cast_with_scales.default)


@functools.cache
def lowerings() -> dict[Any, Callable[..., Any]]:
    """Operation -> its lowering, of all kinds of scaling."""
    from torch._inductor.lowering import make_pointwise

    from lowering.inductor import blockwise, elementwise, gemm, rowwise, statistics, tensorwise

    rooms: list[Any] = [tensorwise, rowwise, blockwise, gemm, statistics]
    found = {operation: function for room in rooms for operation, function in room.LOWERINGS.items()}
    return found | {torch.ops.lowering.sigmoid.default: make_pointwise(elementwise.sigmoid)}


@functools.cache
def register_lowerings() -> None:
    """Tell Inductor how to generate code for the operations; safe to call again."""
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fake_tensors, register_lowering

    from lowering.inductor.buffers import call_operation, with_sources, with_strides

    for operation, function in lowerings().items():
        function = _on_gpus(operation, with_sources(function) if operation in CASTS else function)
        function = with_strides(function) if operation is torch.ops.lowering.scaled_mm.default else function
        register_lowering(operation, type_promotion_kind=None)(function)
    for overload in (operation.overload for operation in NAMESPACE.operations.values()):
        if overload not in lowerings():
            register_lowering(overload, type_promotion_kind=None)(call_operation(overload, is_read=False))
            add_layout_constraint(overload, constrain_to_fake_tensors)  # as for any operation that Inductor does not know
    _register_choices()


def prepare(graph: fx.Graph) -> None:
    """Prepare a graph for Inductor, in place: the cheaper sigmoid instead of aten's, the kernels of operations that have no
    lowering, which threads compile meanwhile, and statistics that read a copy of their matrix: NOTE [nothing else changes]."""
    from lowering.inductor import ahead

    ours = [n for n in graph.nodes if n.op == "call_function" and NAMESPACE.find(n.target) is not None]
    for node in ours:
        if node.target not in lowerings():
            ahead.of_node(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.lowering.quantization_statistics.default):
        copy = _copy_of(node.args[0], node)
        if copy is not None:
            node.update_arg(0, copy)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default) if ours else ():
        x = node.meta.get("val")
        if isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.device.type == "cuda":
            node.target = torch.ops.lowering.sigmoid.default


def _copy_of(matrix: fx.Node, reader: fx.Node) -> fx.Node | None:
    """A result of a cast, before `reader`, that on a GPU knows this matrix (`buffers.with_sources`)."""
    value = matrix.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
        return None
    batches = [user for user in matrix.users if user.target is torch.ops.aten.unsqueeze.default]  # of one: rows in groups
    for given, cast in [(x, user) for x in (matrix, *batches) for user in x.users]:
        is_generated = cast.target in CASTS and cast.kwargs.get("granularity") != Granularity.BLOCK_1X32
        if is_generated and given in cast.args[0] and cast < reader:
            position = list(cast.args[0]).index(given)
            for copy in cast.users:
                if copy.target is operator.getitem and copy.args[1] == position and copy < reader:
                    return copy
    return None


def _on_gpus(operation: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering where the first tensor is on a GPU, with elements of vectors picked; elsewhere the operation itself."""
    from torch._inductor.lowering import lowerings

    from lowering.inductor.buffers import call_operation

    call, known = call_operation(operation), NAMESPACE.find(operation)
    assert known is not None

    def element(vector: Any, position: int) -> Any:
        return lowerings[torch.ops.aten.select.int](vector, 0, position)

    @functools.wraps(function)
    def lower(*args: Any, **options: Any) -> Any:
        tensor = args[0][0] if isinstance(args[0], list) else args[0]
        if tensor.get_device() == torch.device("cpu"):
            return call(*args, **options)
        args, options = known.picked(args, options, element)
        return function(*args, **options)

    return lower


def _register_choices() -> None:
    """Decide for kernels with reductions of blocks among Inductor's own choices, process-wide, as lowerings are registered;
    every other kernel is left to them. To be called once."""
    from torch._inductor.choices import InductorChoices

    from lowering.inductor.buffers import OrderedBuffer

    theirs = InductorChoices.should_use_persistent_reduction

    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        is_ours = any(isinstance(node.node, OrderedBuffer) for node in features.reduction_nodes())
        return (is_ours and bool(features.reduction_numel == BLOCK)) or bool(theirs(features, cooperative_reduction))

    InductorChoices.should_use_persistent_reduction = staticmethod(should_use_persistent_reduction)  # type: ignore[method-assign]
