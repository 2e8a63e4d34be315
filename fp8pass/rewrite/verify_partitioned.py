"""Verify what is edited in the two graphs that the partitioner makes: values that are saved in FP8, and what is prepared for
Inductor. A violation is our defect and names the node. `verify.py` checks the joint graph.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fp8pass.errors import InvariantError
from fp8pass.graph.cursor import check_values, described, is_like, maker_of
from fp8pass.graph.values import PERMUTES, value_of
from fp8pass.rewrite.meaning import (
    STORED,
    TRANSPOSE,
    Meaning,
    Term,
    Vector,
    copy,
    how,
    inverse,
    loaded,
    own_scale,
    permuted,
    value,
)
from fp8pass.rewrite.saved import AppliedSaved, SavedValue, as_bytes, without_parameters
from fp8pass.rewrite.saved_copies import SAME_ORDER, SharedCopy, operands
from fp8pass.rewrite.verify import check_arguments, compare, unstored
from lowering import inductor
from lowering.formats import Granularity

Arguments = Mapping[fx.Node, tuple[Any, Any]]  # The arguments of each node of a graph, by position and by name.


def arguments(graph: fx.Graph) -> Arguments:
    """The arguments of a graph's nodes, as they are now."""
    return {node: (node.args, node.kwargs) for node in graph.nodes}


def verify_saved(
    forward: fx.Graph,
    backward: fx.Graph,
    copies: Mapping[SavedValue, AppliedSaved],
    computed: Mapping[SavedValue, fx.Node],
    before: tuple[Arguments, Arguments],
) -> None:
    """Raise InvariantError unless the forward saves each planned value as its E4M3 copy and scales, the backward reads their
    product in its place, computes planned statistics from such products, and nothing else has changed. copies, computed: those
    of `apply_saved`. before: the arguments of both graphs' nodes."""
    replaced = {saved.read: made.loaded for saved, made in copies.items()} | {saved.read: n for saved, n in computed.items()}
    new = {saved.position: [n for n, _ in made.added] for saved, made in copies.items()}
    new |= {saved.position: [] for saved in computed}
    results: list[Any] = []
    for position, node in enumerate(before[0][forward.output_node()][0][0]):
        results += new.get(position, [node])
    _check_unchanged(forward, before[0], {}, results)
    _check_unchanged(backward, before[1], replaced, None)
    given: dict[fx.Node, Any] = {}
    saves = Meaning(before[0], {})
    for saved, made in copies.items():
        if saved.shared is not None:
            _check_shared(saved.shared, saved, forward, backward)
            continue
        assert saved.quantization is not None
        maker, x = maker_of(made.data)[0], _permuted(Term("value", (saved.node,)), saved.order)
        options = how({"power_of_2": saved.quantization.power_of_2, "epsilon": saved.quantization.epsilon})
        scale = own_scale(maker, x, options, False)
        planned = copy(maker, x, options, False, scale), inverse(scale)
        for node, term in zip((made.data, made.scale_inv), planned, strict=True):
            compare(node, "", saves(node), term)
        check_arguments(maker, as_bytes=as_bytes(saved.node))
        given |= dict(zip((made.data_input, made.scale_input), planned, strict=True))
    _check_inputs(backward, before[1], copies, computed)
    of_backward = set(before[1])
    for saved, made in copies.items():
        if saved.shared is None:
            terms, term = given, loaded(given[made.data_input], given[made.scale_input], value_of(saved.node).dtype)
        else:
            terms, term = _loaded_copy(saved.shared, made)
        back = sorted(range(len(saved.order)), key=saved.order.__getitem__)
        compare(made.loaded, "", unstored(Meaning(of_backward, terms)(made.loaded)), _permuted(term, back))
        if not is_like(value_of(made.loaded), value_of(saved.read)):
            raise InvariantError(f"{made.loaded.name} is {described(value_of(made.loaded))} instead of {saved.read.name}")
    known_here = {node.name: replaced.get(node, node) for node in before[1] if node.op != "output"}
    for saved, node in computed.items():
        _check_computed(saved.node, node, known_here)
    for graph, known in zip((forward, backward), before, strict=True):
        graph.lint()
        check_values(graph, set(known))


def _permuted(term: Term, order: Sequence[int]) -> Term:
    return term if list(order) == list(range(len(order))) else permuted(term, order)


def _check_unchanged(graph: fx.Graph, before: Arguments, replaced: Mapping[fx.Node, fx.Node], results: Any) -> None:
    """Check that nodes read what they read before, or what replaces it. results: those of the graph, where they change."""
    for node in graph.nodes:
        if node not in before:
            continue
        wanted = before[node] if node.op != "output" or results is None else ((type(before[node][0][0])(results),), {})
        if fx.map_arg(wanted, lambda n: replaced.get(n, n)) != (node.args, node.kwargs):
            raise InvariantError(f"{node.name} reads {node.args} {node.kwargs}, before values were saved in FP8 {wanted}")


def _check_computed(planned: Any, found: Any, known: Mapping[str, fx.Node], is_root: bool = True) -> None:
    """Check that the backward computes a value by the forward's operations, from what it has of the forward. known: by name."""
    if isinstance(planned, (list, tuple)) and isinstance(found, (list, tuple)) and len(planned) == len(found):
        for one, other in zip(planned, found, strict=True):
            _check_computed(one, other, known, False)
    elif not isinstance(planned, fx.Node):
        if planned != found or type(planned) is not type(found):
            raise InvariantError(f"a saved value is computed again with {found} instead of {planned}")
    elif is_root or found is not known.get(planned.name):
        is_call = isinstance(found, fx.Node) and found.op == "call_function" and found.target == planned.target
        wanted = without_parameters(planned)
        if not is_call or len(found.args) != len(wanted) or found.kwargs.keys() != planned.kwargs.keys():
            raise InvariantError(f"{planned.name} is computed again as {found}")
        for one, other in [*zip(wanted, found.args, strict=True), *((x, found.kwargs[k]) for k, x in planned.kwargs.items())]:
            _check_computed(one, other, known, False)


def _check_shared(shared: SharedCopy, saved: SavedValue, forward: fx.Graph, backward: fx.Graph) -> None:
    """Check that a GEMM reads this copy with these scales, and that it is a copy of the value as it lies in memory."""
    name = shared.data.name
    if (shared.data, shared.scale_inv, shared.index) not in [tuple(read) for _, *read in operands(forward, backward)]:
        raise InvariantError(f"no FP8 GEMM reads {name} with position {shared.index} of {shared.scale_inv.name}")
    moves = SAME_ORDER | PERMUTES
    meaning = Meaning({node for node in forward.nodes if node.target not in moves}, {})
    found, planned = meaning(shared.matrix), _permuted(meaning(saved.node), saved.order)
    if _unrounded(found) != _unrounded(planned):
        raise InvariantError(f"{name} is a copy of {found}, the plan says of {planned}")


def _unrounded(term: Term) -> Term:
    """A term without what says that it was rounded or stored."""
    return dataclasses.replace(term, moves=tuple(move for move in term.moves if move[0] not in ("to", *STORED)))


def _loaded_copy(shared: SharedCopy, made: AppliedSaved) -> tuple[dict[fx.Node, Any], Term]:
    """The terms of the inputs that are a GEMM's copy and its scales, and that of the matrix that the backward makes of them."""
    options = how({"granularity": shared.quantization.granularity, "square": shared.quantization.square})
    count = 1 if shared.index is None else value_of(made.scale_inv).shape[0]
    scales = [Term("scale", (made.scale_inv, i)) for i in range(count)]
    data = copy(maker_of(made.data)[0], value(shared.matrix), options, shared.columnwise, scales[shared.index or 0])
    scale_inv = inverse(scales[0]) if shared.index is None else Vector.of([inverse(scale) for scale in scales])
    is_by_column = shared.quantization.granularity is Granularity.BLOCK_1X128  # scales lie by block, then by row
    term = Term("mul", (data, inverse(data.args[-1]).moved(*[TRANSPOSE] * is_by_column)))
    given = {made.data_input: data.moved(*[TRANSPOSE] * shared.transposed), made.scale_input: scale_inv}
    return given, term.moved(*[TRANSPOSE] * shared.columnwise)


def _check_inputs(
    backward: fx.Graph, before: Arguments, applied: Mapping[SavedValue, AppliedSaved], computed: Mapping[SavedValue, fx.Node]
) -> None:
    """Check that the inputs of the backward are in the places of the forward's results, with their values."""
    added: dict[fx.Node, Any] = {saved.read: made.added for saved, made in applied.items()}
    added |= {saved.read: () for saved in computed}
    planned = [new for n in before if n.op == "placeholder" for new in ([i for _, i in added[n]] if n in added else [n])]
    found = backward.find_nodes(op="placeholder")
    if list(found) != planned:
        raise InvariantError(f"the backward reads {[n.name for n in found]}, the forward saves {[n.name for n in planned]}")
    for made in applied.values():
        for given, saved in ((made.data_input, made.data), (made.scale_input, made.scale_inv)):
            if not is_like(value_of(given), value_of(saved)):
                raise InvariantError(
                    f"{given.name} is {described(value_of(given))}, the forward saves {described(value_of(saved))}"
                )


# -- `lowering.inductor.prepare`


#: Operation -> the one that may take its place, on float32 tensors of a GPU.
_CHEAPER = {torch.ops.aten.sigmoid.default: torch.ops.lowering.sigmoid.default}


def prepare_checked(graph: fx.Graph, prepare: Callable[[fx.Graph], None]) -> None:
    """Prepare a graph. Raises InvariantError if more became of it than cheaper operations with the same arguments, and
    statistics of a matrix that are given its FP8 copy, whose lowering knows the matrix."""
    before = [(node, node.target, node.args, node.kwargs) for node in graph.nodes]
    prepare(graph)
    after = list(graph.nodes)
    if [node for node, *_ in before] != after:
        raise InvariantError("preparing the graph for Inductor added, removed or moved nodes")
    for node, target, args, kwargs in before:
        if (node.args, node.kwargs) != (args, kwargs) and not _reads_a_copy(node, args, kwargs):
            raise InvariantError(f"{node.name} reads {node.args} {node.kwargs}, before it was prepared {args} {kwargs}")
        if node.target == target:
            continue
        if _CHEAPER.get(target) != node.target:
            raise InvariantError(f"{node.name} calls {node.target} instead of {target}")
        value = value_of(node)
        if value.dtype != torch.float32 or value.device.type != "cuda":
            raise InvariantError(f"{node.name} calls {node.target} on {value.dtype} on {value.device}")


def _reads_a_copy(node: fx.Node, args: Any, kwargs: Any) -> bool:
    """Tell whether nothing but the matrix of statistics was replaced, by the result of a cast at the matrix' position."""
    is_measured = node.target is torch.ops.lowering.quantization_statistics.default
    if not is_measured or (node.args[1:], node.kwargs) != (args[1:], kwargs):
        return False
    copy = node.args[0]
    if not isinstance(copy, fx.Node) or copy.target is not operator.getitem:
        return False
    cast, position = copy.args
    matrices = cast.args[0] if isinstance(cast, fx.Node) and cast.target in inductor.CASTS else ()
    return isinstance(position, int) and isinstance(matrices, Sequence) and args[0] in matrices[position : position + 1]
