"""The values that the forward saves for the backward, in FP8 if pointwise code and norms alone read them: `saved_activations`.

This stage comes after the partitioner, which alone knows what is saved: checkpointing, memory budgets and other partitioners
have had their say, and the plan, a decision per saved value, is about exactly these values. `apply_saved` casts a value where
the forward has made it, or takes the copy that a GEMM reads (`saved_copies.py`), and saves this E4M3 copy and its scales.
Everything in the backward then reads what the copy is worth, also the code that computes operands of GEMMs again. So each
value has one meaning in the backward.

NOTE [who may read a rounded value] Rounding errors of 2**-4 that enter a sum or a product are like those of an FP8 operand. An
exponential turns them into factors, attention forms one of products of what it reads, and a forward that checkpointing runs
again would no longer be the forward that ran. Such values are saved as they are, unless a rule with the role `saved` names a
recipe for them. GEMMs in high precision read operands as they are; operands computed again from saved values are theirs, too.

NOTE [statistics] The gradient of a norm is orthogonal to its input only if mean and variance are those of the very values that
the backward reads. With statistics of the exact values, every step has a small part along the input: the loss of a small GPT
was 0.4 % higher, with those of the rounded ones 0.01 %. So small values that are computed from values saved in FP8 alone are
not saved: the backward computes them again from the copies.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, ClassVar

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from fp8pass.errors import Reason, ReasonKind, RecipeError
from fp8pass.graph.cursor import Cursor, maker_of
from fp8pass.graph.gemms import GraphContext, is_attention, is_matmul, is_scaled_gemm
from fp8pass.graph.origin import Path, TensorName, is_tangent, maker_path, source_line
from fp8pass.graph.values import PERMUTES, RESHAPES, depends_on, made_only_of, recorded_size, same_size, size_hint, value_of
from fp8pass.inputs import InputsMissing, MonitorRow
from fp8pass.recipes import Quantization, Recipe, ScaleFrom
from fp8pass.rewrite.meaning import CASTS
from fp8pass.rewrite.saved_copies import SAME_ORDER, SharedCopy, copy_of, shared_copies
from fp8pass.rules import SAVED, Rules
from lowering.formats import BLOCK, E4M3, FORMAT_NAMES, FP8_MAX, HIGH_PRECISION_DTYPES, Granularity, fp8_max
from lowering.hardware import has_fp8_tensor_cores, short
from lowering.operation import NAMESPACE

aten = torch.ops.aten
prims = torch.ops.prims
ops = torch.ops.lowering

SMALL = 1024  # Values of at most so many elements are saved as they are.
SMALLER = 16  # And those that are so many times smaller than the largest value that is saved, such as statistics of rows.

_MOVES = (
    RESHAPES
    | PERMUTES
    | {
        operator.getitem,
        aten.alias.default,
        aten.cat.default,
        aten.constant_pad_nd.default,
        aten.detach.default,
        aten.expand.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
    }
)
_CONVERSIONS = {prims.convert_element_type.default, aten._to_copy.default, aten.clone.default}
#: Pointwise operations that ATen does not tag as such, norms, and operations that make factors of errors, by name.
_POINTWISE = """
    elu_backward glu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward
    mish_backward rrelu_with_noise_backward softplus_backward softshrink_backward
"""
_NORMS = """
    amax amin batch_norm_backward cudnn_batch_norm_backward _fused_rms_norm _fused_rms_norm_backward linalg_vector_norm mean
    native_batch_norm native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm
    native_layer_norm_backward sum var var_mean
"""
_SENSITIVE = """
    cos cosh exp exp2 expm1 logsumexp _log_softmax _log_softmax_backward_data sin sinh _softmax _softmax_backward_data tan
"""
_POINTWISE_NAMES, _NORM_NAMES, _SENSITIVE_NAMES = (frozenset(names.split()) for names in (_POINTWISE, _NORMS, _SENSITIVE))


@dataclasses.dataclass(frozen=True, eq=False)
class SavedValue:
    """The decision about one value that the forward saves for the backward."""

    node: fx.Node  # The node of the forward graph that holds it.
    read: fx.Node  # The input of the backward graph that it is.
    position: int  # Its place among the results of the forward graph.
    module: str  # Path of the module that made it.
    recipe: Recipe | None  # That of the rules; None where they keep high precision.
    quantization: Quantization | None  # None: in high precision.
    reason: Reason | None  # Why in high precision.
    order: tuple[int, ...]  # Its dimensions, as they lie in memory.
    bytes_before: Any  # Bytes that saving it takes in high precision: none where another value holds its memory.
    bytes_after: Any  # Bytes that are saved for it: none for a copy that is saved anyway.
    shared: SharedCopy | None = None  # The copy that it is saved as, if a GEMM reads one.
    computed_of: frozenset[fx.Node] = frozenset()  # Nodes of the backward, which computes it again from them; none if saved.


@dataclasses.dataclass(frozen=True)
class SavedRecord:
    """A `SavedValue` as it is reported to the user, without nodes."""

    role: ClassVar[str] = SAVED
    module: str  # Path of the module in the user's model that made it.
    op: str  # The operation that made it, such as "mul".
    shape: tuple[int | str, ...]
    dtype: str  # As it was, such as "bfloat16".
    bytes_before: int | str  # Bytes in high precision; a string for dynamic sizes, 0 where another value holds its memory.
    bytes_after: int | str  # Bytes that are saved, scales included; 0 for a copy that is saved for a GEMM anyway.
    quantized: bool  # It is saved in FP8.
    format: str | None  # Such as "e4m3 1x128"; None in high precision.
    shared_with: str | None  # The module whose FP8 GEMM reads the copy; None for a copy that is made to be saved.
    reason: str | None  # Why it is not: the kind of reason and the details.
    source: str  # The place in the user's code: `file:line`.
    path: Path | None = dataclasses.field(default=None, repr=False)  # The module as the compiled frame names it.


# -- plan


def plan_saved(
    forward: fx.Graph, backward: fx.Graph, num_outputs: int, rules: Rules, context: GraphContext, may_multiply: bool = False
) -> tuple[SavedValue, ...]:
    """Decide about each value that a partitioned graph saves, besides its inputs and outputs. Reads only. num_outputs: how many
    of the forward's results are the user's, the first ones. may_multiply: GEMMs in high precision may read what is computed
    again of rounded values, as they may where no recipe has GEMMs."""
    results: Any = forward.output_node().args[0]
    placeholders = {node.name: node for node in backward.find_nodes(op="placeholder")}
    held = saved_memory(results, forward.find_nodes(op="placeholder"), num_outputs)
    groups: dict[StorageWeakRef, list[tuple[int, fx.Node]]] = {_storage(node): [] for node, _ in held}
    for position, node in enumerate(results):
        if position >= num_outputs and _is_tensor(node) and _storage(node) in groups and node.name in placeholders:
            groups[_storage(node)].append((position, node))
    largest = max((size_hint(value_of(node).numel()) for node, _ in held), default=0)
    gradients = depends_on(backward, {node for node in backward.find_nodes(op="placeholder") if is_tangent(node)})
    may_multiply = may_multiply or not rules.default.has_gemms
    of_readers = functools.partial(_obstacle_of_readers, gradients=gradients, may_multiply=may_multiply)
    copies = shared_copies(forward, backward, context)
    kept: list[Any] = list(results)
    weights = made_only_of(forward, {n for n, given in context.given(forward).items() if given.is_weight})
    found: list[SavedValue] = []
    for (holder, size), members in zip(held, groups.values(), strict=True):
        decided = []
        for _, node in members:
            read = placeholders[node.name]
            reason = _own_obstacle(node, read, largest, weights)
            decided.append(_decide(node, read, reason, of_readers, rules, context))
        reasons = [reason for *_, reason in decided if reason is not None]
        orders = [_order(value_of(node)) for _, node in members]
        shared = [copy_of(copies, node, order) for (_, node), order in zip(members, orders, strict=True)]
        after: list[Any] = []
        for (_, node), order, copy in zip(members, orders, shared, strict=True):
            after.append(_bytes(value_of(node), order) if copy is None else copy.bytes_added(kept))
        if not reasons and not size_hint(sum(after)) <= 0.75 * size_hint(size):
            reasons.append(Reason(ReasonKind.BYTES, f"{sum(after)} bytes with the scales, for {size}"))
        for (position, node), choice, order, fp8, copy in zip(members, decided, orders, after, shared, strict=True):
            module, recipe, quantization, reason = choice
            why = reason or (reasons[0] if reasons else None)
            if why is None and copy is not None:
                kept += (copy.data, copy.scale_inv)
            before = size if node is holder else 0
            given = None if why else quantization
            read = placeholders[node.name]
            sizes = before, before if why else fp8
            found.append(SavedValue(node, read, position, module, recipe, given, why, order, *sizes, None if why else copy))
    counts = Counter(_storage(value.node) for value in found)
    alone = {value.node for value in found if counts[_storage(value.node)] == 1}
    return tuple(_computed(sorted(found, key=lambda value: value.position), alone, backward))


def _computed(plan: Sequence[SavedValue], alone: Set[fx.Node], backward: fx.Graph) -> Iterator[SavedValue]:
    """Plan to compute small values again, unless a rule keeps them: NOTE [statistics]. alone: those that share no memory."""
    rounded = depends_on(backward, {value.read for value in plan if value.quantization is not None})
    small = {saved.read for saved in plan if saved.reason is not None and saved.reason.kind is ReasonKind.SMALL}
    here = {node.name: node for node in backward.nodes if node.op != "output" and node not in small}
    for saved in plan:
        if saved.read in small and saved.recipe is not None and saved.node in alone and value_of(saved.node).dim():
            sources = _sources(saved.node, saved.read, here)
            if any(here[n] in rounded for n in sources):
                reason = Reason(ReasonKind.DERIVED, "computed again from values that are saved in FP8")
                found = frozenset(here[n] for n in sources)
                yield dataclasses.replace(saved, reason=reason, bytes_after=0, computed_of=found)
                continue
        yield saved


#: Norms that return statistics -> the positions of their Parameters, which the statistics do not depend on.
_WITH_STATISTICS: dict[Any, tuple[int, ...]] = {
    aten.native_layer_norm.default: (2, 3),
    aten.native_group_norm.default: (1, 2),
    aten._fused_rms_norm.default: (2,),
}
_MOST_NODES = 16


def _sources(node: fx.Node, read: fx.Node, here: Mapping[str, fx.Node]) -> set[str]:
    """The names of nodes from which alone pointwise code and reductions of rows compute a value, and that the backward has
    before it reads the value; none if there are others. here: the backward's nodes."""
    first_read = min(read.users)
    found: set[str] = set()
    seen: set[fx.Node] = set()
    pending = [node]
    while pending:
        made = pending.pop()
        known = here.get(made.name)
        if known is not None and (known.op == "placeholder" or known < first_read):
            found.add(made.name)
        elif made not in seen:
            seen.add(made)
            reads = _inputs(made)
            if not reads or len(seen) > _MOST_NODES:
                return set()
            pending += reads
    return found


def _inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node of pointwise code, of a reduction of rows, or of a norm's statistics; none of every other node."""
    target, tags = node.target, getattr(node.target, "tags", ())
    if target is operator.getitem and isinstance(made := node.args[0], fx.Node):
        is_statistic = bool(node.args[1]) if made.target in _WITH_STATISTICS else _name(made) == "var_mean"
        return [made] if is_statistic else []
    if target in _WITH_STATISTICS:
        return [given for given in without_parameters(node) if isinstance(given, fx.Node)]  # sizes, too
    if _name(node) in ("mean", "sum", "var", "var_mean"):
        dims: Any = node.args[1] if len(node.args) > 1 else None
        num_dims = value_of(node.all_input_nodes[0]).dim()
        return node.all_input_nodes if isinstance(dims, Sequence) and dims and all(dim % num_dims for dim in dims) else []
    is_plain = (target in SAME_ORDER or _is_pointwise(node)) and torch.Tag.nondeterministic_seeded not in tags
    return node.all_input_nodes if is_plain and _name(node) not in _SENSITIVE_NAMES else []


def without_parameters(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node; of a norm that returns statistics, without its Parameters."""
    unread = _WITH_STATISTICS.get(node.target, ())
    return tuple(None if i in unread else given for i, given in enumerate(node.args))


def saved_memory(results: Sequence[Any], inputs: Iterable[Any], num_outputs: int) -> list[tuple[Any, int]]:
    """The results that a forward graph with so many outputs of the model saves for the backward, those that hold memory which
    is neither an output's nor an input's, each with its bytes. Nodes are a graph's or a snapshot's."""
    others = {*_memory(results[:num_outputs]), *_memory(inputs)}
    return [held for storage, held in _memory(results[num_outputs:]).items() if storage not in others]


def _memory(nodes: Iterable[Any]) -> dict[StorageWeakRef, tuple[Any, int]]:
    """The storages behind the values of nodes, and the node that holds most of each, with its bytes."""
    found: dict[StorageWeakRef, tuple[Any, int]] = {}
    for node in nodes:
        if _is_tensor(node):
            value, storage = node.meta["val"], _storage(node)
            size = value.numel() * value.element_size()
            if storage not in found or size_hint(size) > size_hint(found[storage][1]):
                found[storage] = (node, size)
    return found


def _is_tensor(node: Any) -> bool:
    return hasattr(node, "meta") and isinstance(node.meta.get("val"), torch.Tensor)


def _storage(node: Any) -> StorageWeakRef:
    return StorageWeakRef(node.meta["val"].untyped_storage())


def _decide(
    node: fx.Node,
    read: fx.Node,
    reason: Reason | None,
    of_readers: Callable[[fx.Node], Reason | None],
    rules: Rules,
    context: GraphContext,
) -> tuple[str, Recipe | None, Quantization | None, Reason | None]:
    """The module of a value, its recipe and quantization, and the reason if it is saved as it is. read: the backward's input.
    reason: that of the value itself. of_readers: finds that of what reads an input."""
    module = context.name_module(maker_path(node))
    rule = rules.find(module, SAVED)
    recipe = rules.default if rule is None else rule.recipe
    if reason is None and recipe is None:
        assert rule is not None
        reason = Reason(ReasonKind.RULE, f"{rule.pattern!r} keeps high precision")
    if reason is None and (rule is None or rule.role != SAVED):
        reason = of_readers(read)
    if reason is not None or recipe is None:
        return module, recipe, None, reason
    return module, recipe, checked(recipe.saved(), type(recipe).__name__), None


def checked(quantization: Quantization, name: str) -> Quantization:
    """The quantization of saved values by the recipe of this name. Raises RecipeError unless it is E4M3 per 1x128."""
    is_right = quantization.dtype is E4M3 and quantization.granularity is Granularity.BLOCK_1X128
    if not is_right or quantization.scale_from is not ScaleFrom.VALUE or quantization.inverse is not None:
        raise RecipeError(f"{name}.saved() is {quantization}; values are saved as E4M3 with BLOCK_1X128 scales of their own")
    return quantization


def _own_obstacle(node: fx.Node, read: fx.Node, largest: int, weights: Set[fx.Node]) -> Reason | None:
    """The obstacle of a value itself, which no rule overrides. weights: what is computed from Parameters only."""
    value, maker = value_of(node), maker_of(node)
    if not read.users:
        return Reason(ReasonKind.READERS, "nothing reads it")
    if node in weights:
        return Reason(ReasonKind.DERIVED, "computed from Parameters only")
    if value.dtype in FP8_MAX:
        return Reason(ReasonKind.DTYPE, f"{short(value.dtype)}: an FP8 copy already")
    if maker[0].target in CASTS:
        return Reason(ReasonKind.DTYPE, f"{short(value.dtype)}: scales of an FP8 copy")
    if value.dtype not in HIGH_PRECISION_DTYPES:
        return Reason(ReasonKind.DTYPE, f"{short(value.dtype)}; only float32, bfloat16 and float16 can become FP8")
    if is_attention(maker[0]) and maker[1]:
        return Reason(ReasonKind.SENSITIVE, "statistics of attention, or the state of its random numbers")
    count = size_hint(value.numel())
    if not value.dim() or count <= SMALL or count * SMALLER <= largest:
        return Reason(ReasonKind.SMALL, f"{value.numel()} elements")
    made_of = [n for n in node.all_input_nodes if _is_tensor(n)]
    if made_of and all(value_of(n).device != value.device for n in made_of):
        return Reason(ReasonKind.DEVICE, f"offloaded to {value.device}")
    return None


def _order(value: Any) -> tuple[int, ...]:
    """The dimensions of a dense tensor as they lie in memory; as they are for any other."""
    plain = tuple(range(value.dim()))
    strides = [size_hint(s) for s in value.stride()]
    order = tuple(sorted(plain, key=lambda dim: -strides[dim]))
    return order if not _lies_in(value, plain) and _lies_in(value, order) else plain


def _lies_in(value: Any, order: Sequence[int]) -> bool:
    """Tell whether a tensor is known to lie in memory without gaps, its dimensions in this order. Adds no guard."""
    step: Any = 1
    for dim in reversed(order):
        if not same_size(value.shape[dim], 1):
            if not same_size(value.stride()[dim], step):
                return False
            step = step * value.shape[dim]
    return True


def _bytes(value: Any, order: Sequence[int]) -> Any:
    """Bytes of a value in E4M3, and of its scales."""
    if not value.dim():
        return value.numel()
    last = value.shape[order[-1]]
    lines = 1
    for dim in order[:-1]:
        lines = lines * value.shape[dim]
    return value.numel() + 4 * lines * ((last + BLOCK - 1) // BLOCK)


def _obstacle_of_readers(saved: fx.Node, gradients: Set[fx.Node], may_multiply: bool) -> Reason | None:
    """The reader in a backward graph because of which a value is saved as it is: NOTE [who may read a rounded value].
    gradients: what depends on a tangent. may_multiply: that of `plan_saved`."""
    seen: set[fx.Node] = set()
    pending = [(saved, True)]
    while pending:
        node, is_same = pending.pop()
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            name = _name(user)
            if user.op == "output":
                return Reason(ReasonKind.READERS, "it is a result of the backward itself")
            if name in _SENSITIVE_NAMES and not _is_gaussian(user):
                return Reason(ReasonKind.SENSITIVE, f"{name} reads it, which makes factors of its errors")
            if is_attention(user):
                return Reason(ReasonKind.READERS, "attention reads it")
            is_ours = NAMESPACE.find(user.target) is not None
            if user.target in _MOVES:
                stays_same = is_same
            elif is_ours and (user in gradients or not is_scaled_gemm(user)):  # casts, and GEMMs that read copies
                stays_same = False
            elif _is_pointwise(user) or name in _NORM_NAMES:
                stays_same = is_same and user.target in _CONVERSIONS
            elif user not in gradients:
                return Reason(ReasonKind.READERS, f"{name} of the forward runs again in the backward")
            elif is_same or not (may_multiply and is_matmul(user)):
                return Reason(ReasonKind.READERS, f"{name} reads it in high precision")
            else:
                continue
            if user not in gradients:
                pending.append((user, stays_same))
    return None


def _is_gaussian(node: fx.Node) -> bool:
    """Tell whether a node is the exponential of a square, as GELU's gradient has it, which is below 1 and falls with x."""
    read: Any = node.args[0]
    while isinstance(read, fx.Node):
        factors = [x for x in read.args if isinstance(x, fx.Node)]
        if read.target is aten.mul.Tensor and len(factors) == 2:
            return node.target is aten.exp.default and factors[0] is factors[1]
        if not (read.target in _CONVERSIONS or (read.target in (aten.mul.Tensor, aten.neg.default) and len(factors) == 1)):
            return False
        read = factors[0]
    return False


def _name(node: fx.Node) -> str:
    """The name of an operation, without its overload."""
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    if target in _CONVERSIONS or _name(node) in _POINTWISE_NAMES:
        return True
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


# -- apply


@dataclasses.dataclass(frozen=True)
class AppliedSaved:
    """The nodes that a value saved in FP8 became."""

    data: fx.Node  # In the forward graph, as the next one.
    scale_inv: fx.Node
    data_input: fx.Node  # In the backward graph, as the next ones.
    scale_input: fx.Node
    loaded: fx.Node  # The value that is read there instead.
    added: tuple[tuple[fx.Node, fx.Node], ...]
    """The results of the forward, with the inputs of the backward, that take the place of the value; those of a shared copy
    may be saved anyway."""


def apply_saved(
    forward: fx.Graph, backward: fx.Graph, plan: Sequence[SavedValue]
) -> tuple[dict[SavedValue, AppliedSaved], dict[SavedValue, fx.Node]]:
    """Carry out a plan, in place. Returns the values that became copies, and those that are not saved, each with the node of
    the backward that it is there. Nodes of the forward that nothing reads any more are left."""
    applied: dict[SavedValue, AppliedSaved] = {}
    readers = {value.read: list(value.read.users) for value in plan}
    for value in plan:
        for source in value.computed_of & readers.keys():
            readers[source] += value.read.users
    placeholders = {node.name: node for node in backward.find_nodes(op="placeholder")}
    inputs = {n: placeholders[n.name] for n in forward.output_node().all_input_nodes if n.name in placeholders}
    for value in plan:
        if value.quantization is not None:
            shared = value.shared
            pair = _save(forward, value, value.quantization) if shared is None else (shared.data, shared.scale_inv)
            added = {}
            for node, suffix in zip(pair, ("e4m3", "scale_inv"), strict=True):
                if node not in inputs:
                    added[node] = inputs[node] = _input(backward, value.read, node, suffix)
            data_input, scale_input = (inputs[node] for node in pair)
            loaded = _load(backward, value, data_input, scale_input, min(readers[value.read]))
            applied[value] = AppliedSaved(*pair, data_input, scale_input, loaded, tuple(added.items()))
    computed = _compute(backward, plan, {value.read: made.loaded for value, made in applied.items()})
    if applied:
        added_results = {value.position: [n for n, _ in made.added] for value, made in applied.items()}
        _replace_results(forward, added_results | {value.position: [] for value in computed})
    return applied, computed


def _compute(backward: fx.Graph, plan: Sequence[SavedValue], loaded: Mapping[fx.Node, fx.Node]) -> dict[SavedValue, fx.Node]:
    """Compute values that are not saved where they are first read. loaded: inputs of the backward that were replaced."""
    made: dict[str, fx.Node] = {node.name: loaded.get(node, node) for value in plan for node in value.computed_of}
    values = [value for value in plan if value.computed_of]
    for value in sorted(values, key=lambda value: min(value.read.users)):
        cursor = Cursor.start(backward).at(min(value.read.users), True)

        def again(node: fx.Node, cursor: Cursor = cursor) -> fx.Node:
            if node.name not in made:
                args, kwargs = fx.map_arg((without_parameters(node), node.kwargs), again)
                made[node.name] = cursor.call(node.target, *args, **kwargs)
            return made[node.name]

        value.read.replace_all_uses_with(again(value.node))
        backward.erase_node(value.read)
    return {value: made[value.node.name] for value in values}


def _save(forward: fx.Graph, value: SavedValue, quantization: Quantization) -> tuple[fx.Node, fx.Node]:
    """Cast a value where it has been made."""
    node = value.node
    cursor = Cursor.start(forward).at(node.next, False)
    matrix = node if value.order == tuple(range(len(value.order))) else cursor.call(aten.permute.default, node, [*value.order])
    options = {"power_of_2": quantization.power_of_2, "epsilon": quantization.epsilon}
    made = cursor.call(ops.save_activation.default, matrix, **options, as_bytes=as_bytes(node))
    return cursor.item(made, 0), cursor.item(made, 1)


def as_bytes(node: fx.Node) -> bool:
    """Tell whether a copy is saved as uint8: on a device without FP8 instructions."""
    device = value_of(node).device
    return device.type != "cpu" and not has_fp8_tensor_cores(device)


def _input(backward: fx.Graph, read: fx.Node, saved: fx.Node, suffix: str) -> fx.Node:
    with backward.inserting_before(read):
        node = backward.placeholder(f"{read.name}_{suffix}")
    node.target = node.name  # another node may have the name
    node.meta = {"val": saved.meta["val"]}
    return node


def _load(backward: fx.Graph, value: SavedValue, data: fx.Node, scale_inv: fx.Node, first: fx.Node) -> fx.Node:
    """Dequantize a copy before `first`, the first node that needs it, and let all readers of the value read the result."""
    read = value.read
    cursor = Cursor.start(backward).at(first, True)
    held = value_of(read)
    if value.shared is None:
        made = cursor.call(ops.load_activation.default, data, scale_inv, dtype=held.dtype)
    else:
        made = value.shared.load(cursor, data, scale_inv, [held.shape[dim] for dim in value.order], held.dtype)
    if value.order != tuple(range(len(value.order))):
        back = sorted(range(len(value.order)), key=value.order.__getitem__)
        made = cursor.call(aten.permute.default, made, back)
    read.replace_all_uses_with(made)
    backward.erase_node(read)
    return made


def _replace_results(forward: fx.Graph, replaced: Mapping[int, Sequence[fx.Node]]) -> None:
    """Let the forward return copies and scales in the places of values; AOTAutograd counts what is saved."""
    output = forward.output_node()
    results: Any = output.args[0]
    described = output.meta.get("desc") or [None] * len(results)
    made: list[Any] = []
    labels: list[Any] = []
    count = 0
    for position, (node, label) in enumerate(zip(results, described, strict=True)):
        nodes = replaced.get(position, (node,))
        for new in nodes:
            made.append(new)
            is_saved = "SavedForBackwards" in type(label).__name__
            labels.append(dataclasses.replace(label, idx=count) if is_saved else label)
            count += is_saved
            if new is not node and node.meta.get(_UNCHECKED):
                new.meta[_UNCHECKED] = True
    output.args = (type(results)(made),)
    if "desc" in output.meta:
        output.meta["desc"] = labels


_UNCHECKED = "saved_tensor_with_no_vc_check"  # AOTAutograd's mark of saved values without version checks; they are the last.


# -- measured steps


def measure_saved(forward: fx.Graph, plan: Sequence[SavedValue], buffer: fx.Node, first: int) -> list[MonitorRow]:
    """Let a forward measure what casting each value loses, into the rows from `first` on of an input of the graph. Returns what
    the rows are. Raises InputsMissing where the input has fewer."""
    rows: list[MonitorRow] = []
    vectors: list[fx.Node] = []
    counts: Counter[str] = Counter()
    for value in plan:
        if (given := value.quantization) is None or value.shared is not None:
            continue  # a copy that a GEMM reads is measured as its operand
        cursor = Cursor.start(forward).at(value.node.next, False)
        counts[value.module] += 1
        name = TensorName(value.module, "saved", counts[value.module], path=maker_path(value.node))
        scaling, format_ = given.granularity.label, FORMAT_NAMES[given.dtype]
        rows.append(MonitorRow(name, SAVED, "tensor", value.recipe, fp8_max(given.dtype), format_, scaling, False))
        lines = cursor.call(aten.permute.default, value.node, [*value.order])
        width = cursor.size(lines, value_of(lines).dim() - 1)
        matrix = cursor.call(aten.reshape.default, lines, [-1, width])
        options = {"granularity": given.granularity.value, "power_of_2": given.power_of_2, "epsilon": given.epsilon}
        made = cursor.call(ops.quantization_statistics.default, matrix, given.dtype, rowwise=True, columnwise=False, **options)
        vectors.append(cursor.item(made, 0))
    if first + len(rows) > value_of(buffer).shape[0]:
        raise InputsMissing(entries=first + len(rows))
    if rows:
        cursor = Cursor.start(forward).at(forward.output_node(), False)
        cursor.call(ops.record_statistics.default, buffer, vectors, [*range(first, first + len(rows))])
    return rows


# -- records


def saved_records(plan: Sequence[SavedValue]) -> list[SavedRecord]:
    """The decisions of a plan as records. To be taken before the plan is applied, which removes nodes."""
    return [_record(value) for value in plan]


def _record(value: SavedValue) -> SavedRecord:
    held, maker = value_of(value.node), value.node
    while maker.target in _MOVES | _CONVERSIONS and maker.all_input_nodes:
        maker = maker.all_input_nodes[0]
    given = value.quantization if value.shared is None else value.shared.quantization
    return SavedRecord(
        module=value.module,
        op=_name(maker),
        shape=tuple(map(recorded_size, held.shape)),
        dtype=short(held.dtype),
        bytes_before=recorded_size(value.bytes_before),
        bytes_after=recorded_size(value.bytes_after),
        quantized=given is not None,
        format=None if given is None else f"{FORMAT_NAMES[given.dtype]} {given.granularity.label}",
        shared_with=None if value.shared is None else value.shared.module,
        reason=None if value.reason is None else str(value.reason),
        source=source_line(maker),
        path=maker_path(value.node),
    )
