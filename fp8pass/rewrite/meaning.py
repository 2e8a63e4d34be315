"""Meaning: the term that each node of a rewritten graph denotes, by one rule per operation.

A term says what was computed from which values of the graph: a copy of x, the reciprocal of the scale of the amax of x. It does
not depend on how the graph spells that: elements of vectors, bytes, padding and row-major reshapes leave no trace. What puts
elements elsewhere does, as the term's moves. `verify.py` compares the terms of a graph with those of its plan.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fp8pass.errors import InvariantError
from fp8pass.graph.cursor import arguments_of
from fp8pass.graph.values import PERMUTES, RESHAPES, operation_name, permutation, value_of
from lowering.operation import NAMESPACE

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ops = torch.ops.lowering
prims = torch.ops.prims

TRANSPOSE = ("transpose",)  # The move that swaps the last two dimensions.
STORED = ("stored",)  # Written to memory of its own, contiguous.
_COLUMNS = {"rowwise": False, "columnwise": True}
#: Arguments that say how an operation scales or rounds, in the order in which terms have them.
_OPTIONS = ("dtype", "granularity", "square", "power_of_2", "epsilon", "inverse", "margin", "compact")


@dataclasses.dataclass(frozen=True)
class Term:
    """A value: what was computed, of what, and how its elements were moved since."""

    name: str
    args: tuple[Any, ...]
    moves: tuple[tuple[Any, ...], ...] = ()

    def moved(self, *moves: tuple[Any, ...]) -> Term:
        """The term after more moves; two transposes in a row cancel."""
        found = list(self.moves)
        for move in moves:
            if move == TRANSPOSE and found[-1:] == [TRANSPOSE]:
                found.pop()
            else:
                found.append(move)
        return dataclasses.replace(self, moves=tuple(found))

    def __str__(self) -> str:
        text = str(self.args[0]) if self.name == "value" else f"{self.name}{_text(self.args)}"
        return " ".join([text, *map(_text, itertools.chain(*self.moves))])


@dataclasses.dataclass(frozen=True)
class Vector:
    """Several terms in one tensor, one behind the other."""

    items: tuple[Any, ...]
    ends: tuple[int, ...]  # The position where each ends.

    @classmethod
    def of(cls, items: Collection[Any], sizes: Collection[int] | None = None) -> Vector:
        """Scalars, or terms of these sizes."""
        return cls(tuple(items), tuple(itertools.accumulate(sizes or [1] * len(items))))

    def part(self, start: int, end: int) -> Any:
        """The term from `start` to `end`; of scalars from the state all those between."""
        starts = (0, *self.ends[:-1])
        found = self.items[starts.index(start) : self.ends.index(end) + 1]
        return found[0] if len(found) == 1 else _joined(found)


def value(node: fx.Node) -> Term:
    """A value of the graph that no rule looks into."""
    return Term("value", (node,))


def how(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The options of an operation that are part of its terms: `_OPTIONS`."""
    return tuple((name, options[name]) for name in _OPTIONS if name in options)


def inverse(scale: Term) -> Term:
    """The reciprocal of a scale."""
    return Term("1 /", (scale,))


def slot(start: int, end: int) -> Term:
    """Scales of the state, from slot `start` to `end`."""
    return Term("slot", (start, end))


def copy(maker: fx.Node, x: Term, options: tuple[Any, ...], columnwise: bool, scale: Term) -> Term:
    """The data of an FP8 copy."""
    return Term("copy", (maker, x, options, columnwise, scale))


def own_scale(maker: fx.Node, x: Term, options: tuple[Any, ...], columnwise: bool, *amaxes: Term) -> Term:
    """The scales that a cast computes itself: of the amaxes of x, or given ones."""
    return Term("own scale", (maker, x, options, columnwise, *amaxes))


def difference(found: Any, planned: Any) -> str:
    """The innermost part in which a term differs from the planned one, as text."""
    if isinstance(found, Term) and isinstance(planned, Term) and found.name == planned.name not in ("value", "slot"):
        if found.args != planned.args:
            return difference(found.args, planned.args)
        found, planned = (" ".join(map(_text, itertools.chain(*t.moves))) or "no moves" for t in (found, planned))
    if isinstance(found, tuple) and isinstance(planned, tuple) and len(found) == len(planned):
        if len(found) == 2 and found[0] == planned[0] and isinstance(found[0], str):  # an option
            found, planned = (f"{name}={value}" for name, value in (found, planned))
        else:
            return difference(*next((a, b) for a, b in zip(found, planned, strict=True) if a != b))
    return f"has {_text(found)}, the plan says {_text(planned)}"


def _text(found: Any) -> str:
    return f"({', '.join(map(_text, found))})" if isinstance(found, (list, tuple)) else str(found)


class Meaning:
    """The terms of a graph's nodes. Each is computed once, when its first reader asks."""

    def __init__(self, values: Collection[fx.Node], given: Mapping[fx.Node, Term]):
        """values: nodes that denote themselves. given: terms of others."""
        self._values, self._terms = values, dict(given)

    def __call__(self, read: Any) -> Any:
        """The term of a node; of a list those of its nodes, of anything else itself."""
        if isinstance(read, (list, tuple)):
            return tuple(map(self, read))
        if not isinstance(read, fx.Node):
            return read
        if read not in self._terms:
            is_value = read in self._values or read.op != "call_function"
            self._terms[read] = value(read) if is_value else self.computed(read)
        return self._terms[read]

    def computed(self, node: fx.Node) -> Any:
        """The term that the rule of a node's operation gives."""
        is_wait = node.target is c10d.wait_tensor.default
        for read in node.all_input_nodes:
            if (read.target in _COLLECTIVES) != is_wait:
                raise InvariantError(f"{node.name} {'waits for' if is_wait else 'reads'} {read.name}")
        try:
            if node.target is operator.getitem:
                made, index = map(self, node.args)
                return made[index] if isinstance(made, tuple) else Term("item", (made, index))
            given = self.arguments(node)
            rule = _RULES.get(node.target)
            if rule is None:
                return Term(operation_name(node), tuple(given.values()))
            return rule(node, **given)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise InvariantError(f"{node.name} does not fit its arguments, {_text(self(list(node.args)))}: {error}") from error

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        """The terms of a call's arguments, by name."""
        given = {name: self(read) for name, read in arguments_of(node).items()}
        operation = NAMESPACE.find(node.target)
        for name in () if operation is None else operation.indexed:
            given[name] = _picked(node, name, given[name], given.pop(f"{name}_index"))
        return given


def _picked(node: fx.Node, name: str, read: Any, index: Any) -> Any:
    """Elements of vectors instead of vectors and positions."""
    if index is None:
        return read
    if isinstance(read, tuple):
        return tuple(_picked(node, name, one, i) for one, i in zip(read, index, strict=True))
    if index >= 0 and not (isinstance(read, Vector) and index < len(read.items)):
        raise InvariantError(f"{node.name} reads position {index} of {name}, {_text(read)}")
    return read if index < 0 else read.items[index]


# -- rules: (node, its arguments by name, as terms) -> the term of its result, or a tuple of those of its results

_COLLECTIVES = (c10d.all_gather_into_tensor.default, c10d.all_reduce.default)


def _each(rule: Callable[..., Any], *terms: Any) -> Any:
    """Apply a rule to scalars, or to the elements of vectors."""
    vectors = [term for term in terms if isinstance(term, Vector)]
    if not vectors:
        return rule(*terms)
    rows = zip(*(t.items if isinstance(t, Vector) else [t] * len(vectors[0].items) for t in terms), strict=True)
    return dataclasses.replace(vectors[0], items=tuple(rule(*row) for row in rows))


def _joined(items: tuple[Term, ...]) -> Term:
    """Consecutive scales of the state, or their reciprocals, as one term."""
    if items and all(item.name == "1 /" for item in items):
        return inverse(_joined(tuple(item.args[0] for item in items)))
    if not items or any(item.name != "slot" for item in items):
        raise ValueError("only scales of the state are read together")
    return slot(items[0].args[0], items[-1].args[1])


def permuted(term: Term, order: Sequence[int]) -> Term:
    """A term whose dimensions are read in an order."""
    last = len(order) - 1
    is_transpose = list(order) == [*range(last - 1), last, last - 1]
    return term.moved(TRANSPOSE if is_transpose else ("permute", tuple(order)))


def _slice(node: fx.Node, self: Any, dim: int, start: Any, end: Any, step: int) -> Any:
    """Cutting padding off the end leaves no trace; slices of scales name no positions, as blocks count otherwise."""
    if isinstance(self, Vector):
        return self.part(start, end)
    if self.name == "packed" and dim == 1:
        return self.args[0].part(start, end).moved(*self.moves)
    if start == 0 and step == 1:
        return self
    return self.moved(("slice", dim) if self.name == "1 /" else ("slice", dim, start, end, step))


def _select(node: fx.Node, self: Any, dim: int, index: Any) -> Any:
    if isinstance(self, Vector):
        return self.part(index, index + 1)
    is_only = (dim, index) == (0, 0) and value_of(node.all_input_nodes[0]).shape[0] == 1
    return self if is_only else self.moved(("select", dim, index))


def _cat(node: fx.Node, tensors: tuple[Term, ...], dim: int = 0) -> Any:
    if tensors[0].name in ("amax", "amaxes of columns"):
        return Vector.of(tensors, [value_of(read).shape[0] for read in node.args[0]])  # type: ignore[union-attr, arg-type]
    if any((t.name, t.args) != (tensors[0].name, tensors[0].args) for t in tensors):
        raise ValueError("not all are of one tensor")
    moves = [t.moves for t in tensors]
    common = len(list(itertools.takewhile(lambda each: len(set(each)) == 1, zip(*moves, strict=False))))
    parts = tuple(each[common:] for each in moves)
    return dataclasses.replace(tensors[0], moves=(*moves[0][:common], ("cat", dim, parts)))


def _pad(node: fx.Node, self: Term, pad: tuple[int, ...], value: float) -> Term:
    """Padding behind the end leaves no trace: zeros, and for rows of them the scale 1."""
    is_padding = not any(pad[::2]) and value == (1 if self.name == "1 /" and len(pad) == 4 else 0)
    return self if is_padding else Term("padded", (self, pad, value))


def _index(node: fx.Node, self: Term, indices: tuple[Any, ...]) -> Term:
    """Rows, also where they are the columns of a transposed tensor."""
    (dim,) = (i for i, index in enumerate(indices) if index is not None)
    if self.moves[-1:] == (TRANSPOSE,) and dim == 1:
        return self.moved(TRANSPOSE, ("rows", indices[dim]), TRANSPOSE)
    return self.moved(("rows", indices[dim]) if dim == 0 else ("columns of", indices[dim]))


def _transposed_copy(node: fx.Node, q: Term, offs: Term | None, index: Term | None, align: int) -> Term:
    columns = ("columns", offs, index, *[align] * (align != 16))
    return q.moved(TRANSPOSE, STORED) if offs is None else q.moved(columns)


def _gemm_ready(
    node: fx.Node, q: Term, scale_inv: Term, columnwise: bool, pad_outer: bool, **options: Any
) -> tuple[Term, Term]:
    move = ("ready", columnwise, *how(options))
    return q.moved(move), scale_inv.moved(move)


def _all_gather(node: fx.Node, input: Term, group_size: int, group_name: Any) -> Term:
    moves = input.moves[:-1] if input.moves[-1:] == (STORED,) else input.moves  # data that is sent is stored anyway
    return dataclasses.replace(input, moves=(*moves, ("gather", group_size, group_name)))


def _all_reduce(node: fx.Node, input: Any, reduce_op: str, group_name: Any) -> Any:
    if value_of(node).dtype is not torch.int32:  # as bits amaxes are ordered with NaN on top
        raise ValueError(f"{value_of(node).dtype} is reduced, not the bits of amaxes")
    return _each(lambda x: dataclasses.replace(x, args=(*x.args, reduce_op, group_name)), input)


def _packed(node: fx.Node, parts: tuple[Term, ...]) -> Term:
    values: Any = node.all_input_nodes[0].meta["val"]
    return Term("packed", (Vector.of(parts, [v.numel() * v.element_size() for v in values]),))


def _load_scales(node: fx.Node, count: int, **_: Any) -> tuple[Vector, Vector]:
    scales = Vector.of([slot(i, i + 1) for i in range(count)])
    return scales, _each(inverse, scales)


def _amaxes(node: fx.Node, xs: tuple[Term, ...], per_matrix: bool) -> Any:
    found = [Term("amax", (x,)) for x in xs]
    return Term("amaxes", xs) if per_matrix else Vector.of(found) if len(xs) > 1 else found[0]


def _largest(node: fx.Node, self: Any, dim: tuple[int, ...], **_: Any) -> Term:
    if isinstance(self, Vector):
        return Term("largest", self.items)
    return Term("amax", self.args) if self.name == "amaxes" else Term("largest", (self, dim))


def _scale(node: fx.Node, amax: Any, **options: Any) -> Any:
    scale = _each(lambda x: Term("scale", (x, how(options))), amax)
    return scale, _each(inverse, scale)


def _scale_values(node: fx.Node, q: Term, scale: Term) -> Term:
    if scale != inverse(q.args[-1]).moved(*q.moves):
        raise ValueError("the scales are not those of the data")
    return scale


def _cast(node: fx.Node, xs: tuple[Term, ...], rowwise: bool, columnwise: bool, **given: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    options, amaxes = how(given), [given["amaxes"]] if "amaxes" in given else []
    for side in [False] * rowwise + [True] * columnwise:
        scales = given.get("scales") or [own_scale(node, x, options, side, *amaxes) for x in xs]
        found += [copy(node, x, options, side, scale) for x, scale in zip(xs, scales, strict=True)]
        found += [] if "scales" in given else [inverse(scale) for scale in scales]
    if given.get("with_amax"):
        is_batch = value_of(node.args[0][0]).dim() == 3  # type: ignore[index, arg-type]
        measured = [Term("amaxes" if is_batch else "amax", (x,)) for x in xs]
        found.append(measured[0] if len(xs) == 1 else Vector.of(measured))
    return tuple(found)


def _save(node: fx.Node, x: Term, as_bytes: bool, **options: Any) -> tuple[Term, Term]:
    scale = own_scale(node, x, how(options), False)
    return copy(node, x, how(options), False, scale), inverse(scale)


def loaded(data: Term, scale_inv: Term, dtype: torch.dtype) -> Term:
    """The values of a copy, rounded to a dtype."""
    return Term("mul", (data, scale_inv)).moved(("to", dtype))


def _cast_columns(node: fx.Node, x: Term, offs: Term, index: Term | None, rowwise: bool, **options: Any) -> tuple[Term, ...]:
    scale, move = own_scale(node, x, how(options), True), ("columns", offs, index)
    found = copy(node, x, how(options), True, scale).moved(move), inverse(scale).moved(move)
    if not rowwise:
        return found
    of_rows = own_scale(node, x, how(options), False)
    return copy(node, x, how(options), False, of_rows), inverse(of_rows), *found


_RULES: dict[Any, Callable[..., Any]] = {
    # moves
    **dict.fromkeys((*RESHAPES, aten.alias.default, aten.detach.default), lambda node, self, **_: self),
    **dict.fromkeys((aten.view.dtype, aten.expand.default), lambda node, self, **_: self),
    aten.clone.default: lambda node, self, **_: self.moved(STORED),
    prims.convert_element_type.default: lambda node, a, dtype: a.moved(("to", dtype)) if a.name == "value" else a,
    **dict.fromkeys(PERMUTES, lambda node, self, **_: permuted(self, permutation(node) or [])),
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    **dict.fromkeys(
        (aten.split.Tensor, aten.split_with_sizes.default),
        lambda node, self, dim, **_: tuple(self.moved(("part", dim, i)) for i in range(len(node.meta["val"]))),
    ),
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten.index.Tensor: _index,
    ops.transposed_copy.default: _transposed_copy,
    ops.gemm_ready.default: _gemm_ready,
    # between ranks
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.all_reduce.default: _all_reduce,
    c10d.wait_tensor.default: lambda node, tensor: tensor,
    ops.packed.default: _packed,
    # scales
    ops.load_scales.default: _load_scales,
    ops.take.default: lambda node, x, index: Vector.of([x.part(i, i + 1) for i in index]),
    ops.amaxes.default: _amaxes,
    aten.amax.default: _largest,
    ops.amax_rowwise.default: lambda node, xs, **sides: Term("amaxes of columns" if sides == _COLUMNS else str(sides), xs),
    ops.scales_from_amax.default: _scale,
    aten.reciprocal.default: lambda node, self: _each(inverse, self),
    aten.eq.Scalar: lambda node, self, other: _each(lambda x: Term("equals", (x, other)), self),
    aten.where.self: lambda node, **read: _each(lambda *x: Term("where", x), *read.values()),
    aten.full.default: lambda node, size, fill_value, **_: Term("full", (size, fill_value)),
    ops.valid_rows.default: lambda node, offs, index, **_: Term("rows of groups", (offs, index)),
    ops.scale_values_mxfp8.default: _scale_values,
    # casts
    **dict.fromkeys((ops.cast.default, ops.cast_with_scales.default, ops.cast_lines_rowwise.default), _cast),
    ops.quantize.default: lambda node, x, scale, dtype: copy(node, x, how({"dtype": dtype}), False, scale),
    ops.cast_columns.default: _cast_columns,
    # activations
    ops.save_activation.default: _save,
    ops.load_activation.default: lambda node, q, scale_inv, dtype: loaded(q, scale_inv, dtype),
}
CASTS = frozenset({ops.quantize.default, ops.cast_columns.default, *(op for op, rule in _RULES.items() if rule is _cast)})
"""The operations that quantize."""
