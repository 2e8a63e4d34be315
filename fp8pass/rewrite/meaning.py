"""Meaning: the term that each node of a rewritten graph denotes, by one rule per operation.

A term says what was computed from which values of the graph: a copy of x, the reciprocal of the scale of the amax of x. It does
not depend on how the graph spells that: elements of vectors, bytes, padding and row-major reshapes leave no trace. What puts
elements elsewhere does, as the term's moves. `verify.py` compares the terms of a graph with those of its plan.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from fp8pass.errors import InvariantError
from fp8pass.graph.cursor import arguments_of
from fp8pass.graph.values import PERMUTES, RESHAPES, permutation, value_of
from lowering.operation import NAMESPACE

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ops = torch.ops.lowering
prims = torch.ops.prims

TRANSPOSE = ("transpose",)
"""The move that swaps the last two dimensions."""
STORED = ("stored",)
"""Written to memory of its own, contiguous."""
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
    ends: tuple[int, ...]
    """The position where each ends."""

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
    """The options of an operation that terms mention."""
    return tuple((name, options[name]) for name in _OPTIONS if name in options)


def inverse(scale: Term) -> Term:
    """The reciprocal of a scale."""
    return Term("1 /", (scale,))


def slot(start: int, end: int) -> Term:
    """Scales of the state."""
    return Term("slot", (start, end))


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
                return Term(str(getattr(node.target, "_opname", node.target)), tuple(given.values()))
            return rule(node, **given)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise InvariantError(f"{node.name} does not fit what it reads, {_text(self(list(node.args)))}: {error}") from error

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        """The terms of a call's arguments, by name."""
        given = {name: self(read) for name, read in arguments_of(node).items()}
        operation = NAMESPACE.find(node.target)
        for name in () if operation is None else operation.indexed:
            given[name] = _picked(node, name, given[name], given.pop(f"{name}_index"))
        return given


def _picked(node: fx.Node, name: str, read: Any, index: Any) -> Any:
    """Elements of vectors in the place of vectors and positions."""
    if index is None:
        return read
    if isinstance(read, tuple):
        return tuple(_picked(node, name, one, i) for one, i in zip(read, index, strict=True))
    if index >= 0 and not (isinstance(read, Vector) and index < len(read.items)):
        raise InvariantError(f"{node.name} reads position {index} of {name}, {_text(read)}")
    return read if index < 0 else read.items[index]


# -- rules: (node, its arguments by name, as terms) -> the term of its result, or a tuple of those of its results

_COLLECTIVES = (c10d.all_gather_into_tensor.default, c10d.all_reduce.default)
_RULES: dict[Any, Callable[..., Any]] = {}


def _rule(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(rule: Callable[..., Any]) -> Callable[..., Any]:
        _RULES.update(dict.fromkeys(targets, rule))
        return rule

    return add


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


# -- moves


@_rule(*RESHAPES, aten.alias.default, aten.detach.default, aten.view.dtype, aten.expand.default)
def _same(node: fx.Node, self: Any, **_: Any) -> Any:
    return self


@_rule(aten.clone.default)
def _clone(node: fx.Node, self: Term, memory_format: Any = None) -> Term:
    return self.moved(STORED)


@_rule(prims.convert_element_type.default)
def _convert(node: fx.Node, a: Term, dtype: torch.dtype) -> Term:
    return a.moved(("to", dtype)) if a.name == "value" else a


@_rule(*PERMUTES)
def _permute(node: fx.Node, self: Term, **_: Any) -> Term:
    order = permutation(node) or []
    last = len(order) - 1
    is_transpose = order == [*range(last - 1), last, last - 1]
    return self.moved(TRANSPOSE if is_transpose else ("permute", tuple(order)))


@_rule(ops.transposed_copy.default)
def _transposed(node: fx.Node, rowwise: Term) -> Term:
    return rowwise.moved(TRANSPOSE, STORED)


@_rule(aten.slice.Tensor)
def _slice(node: fx.Node, self: Any, dim: int, start: Any, end: Any, step: int) -> Any:
    """Padding is cut off the end; of scales the blocks of other rows differ, so their moves do not say which."""
    if isinstance(self, Vector):
        return self.part(start, end)
    if self.name == "packed" and dim == 1:
        return self.args[0].part(start, end).moved(*self.moves)
    if start == 0 and step == 1:
        return self
    return self.moved(("slice", dim) if self.name == "1 /" else ("slice", dim, start, end, step))


@_rule(aten.select.int)
def _select(node: fx.Node, self: Any, dim: int, index: Any) -> Any:
    if isinstance(self, Vector):
        return self.part(index, index + 1)
    is_only = (dim, index) == (0, 0) and value_of(node.all_input_nodes[0]).shape[0] == 1
    return self if is_only else self.moved(("select", dim, index))


@_rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(node: fx.Node, self: Term, dim: int = 0, **_: Any) -> tuple[Term, ...]:
    return tuple(self.moved(("part", dim, i)) for i in range(len(node.meta["val"])))


@_rule(aten.cat.default)
def _cat(node: fx.Node, tensors: tuple[Term, ...], dim: int = 0) -> Any:
    if tensors[0].name == "amaxes of columns":
        return Vector.of(tensors, [value_of(read).shape[0] for read in node.args[0]])  # type: ignore[union-attr, arg-type]
    if any((t.name, t.args) != (tensors[0].name, tensors[0].args) for t in tensors):
        raise ValueError("not all are of one tensor")
    return dataclasses.replace(tensors[0], moves=(("cat", dim, tuple(t.moves for t in tensors)),))


@_rule(aten.stack.default)
def _stack(node: fx.Node, tensors: tuple[Term, ...], **_: Any) -> Vector:
    return Vector.of(tensors)


@_rule(aten.constant_pad_nd.default)
def _pad(node: fx.Node, self: Term, pad: tuple[int, ...], value: float) -> Term:
    """Zeros behind the end, and the scale 1 for rows of them."""
    if not any(pad[::2]) and value == (1 if self.name == "1 /" and len(pad) == 4 else 0):
        return self
    return Term("padded", (self, pad, value))


@_rule(aten.index.Tensor)
def _index(node: fx.Node, self: Term, indices: tuple[Any, ...]) -> Term:
    """Rows, also where they are the columns of a transposed tensor."""
    *before, last = ((), *self.moves)
    (dim,) = (i for i, index in enumerate(indices) if index is not None)
    if last == TRANSPOSE and dim == 1:
        return dataclasses.replace(self, moves=(*before[1:], ("rows", indices[dim]), TRANSPOSE))
    return self.moved(("rows", indices[dim]) if dim == 0 else ("columns of", indices[dim]))


@_rule(ops.group_columns.default)
def _group_columns(node: fx.Node, q: Term, offs: Term, index: Term | None, align: int) -> Term:
    return q.moved(("columns", offs, index) if align == 16 else ("columns", offs, index, align))


@_rule(ops.gemm_ready_blockwise.default, ops.gemm_ready_mxfp8.default)
def _gemm_ready(node: fx.Node, q: Term, columnwise: bool, pad_outer: bool, **others: Any) -> tuple[Term, Term]:
    (scales,) = (x for x in others.values() if isinstance(x, Term))
    move = ("ready", columnwise, *how(others))
    return q.moved(move), scales.moved(move)


# -- between ranks


@_rule(c10d.all_gather_into_tensor.default)
def _all_gather(node: fx.Node, input: Term, group_size: int, group_name: Any) -> Term:
    """Data that is sent is stored anyway."""
    moves = input.moves[:-1] if input.moves[-1:] == (STORED,) else input.moves
    return dataclasses.replace(input, moves=moves).moved(("gather", group_size, group_name))


@_rule(c10d.all_reduce.default)
def _all_reduce(node: fx.Node, input: Any, reduce_op: str, group_name: Any) -> Any:
    """As bits amaxes are ordered with NaN on top."""
    if value_of(node).dtype is not torch.int32:
        raise ValueError(f"{value_of(node).dtype} is reduced, not the bits of amaxes")
    return _each(lambda x: dataclasses.replace(x, args=(*x.args, reduce_op, group_name)), input)


@_rule(c10d.wait_tensor.default)
def _wait(node: fx.Node, tensor: Any) -> Any:
    return tensor


@_rule(ops.packed.default)
def _packed(node: fx.Node, parts: tuple[Term, ...]) -> Term:
    values: Any = node.all_input_nodes[0].meta["val"]
    return Term("packed", (Vector.of(parts, [v.numel() * v.element_size() for v in values]),))


# -- scales


@_rule(ops.load_scales.default)
def _load_scales(node: fx.Node, scale: Any, slots: Any, count: int) -> tuple[Vector, Vector]:
    scales = Vector.of([slot(i, i + 1) for i in range(count)])
    return scales, _each(inverse, scales)


@_rule(ops.take.default)
def _take(node: fx.Node, x: Vector, index: tuple[int, ...]) -> Vector:
    return Vector.of([x.part(i, i + 1) for i in index])


@_rule(ops.amax.default)
def _amax(node: fx.Node, x: Term) -> Term:
    return Term("amax", (x,))


@_rule(ops.multi_amax.default)
def _multi_amax(node: fx.Node, xs: tuple[Term, ...], per_matrix: bool) -> Any:
    if not per_matrix:
        return Vector.of([Term("amax", (x,)) for x in xs])
    (batch,) = xs
    return Term("amaxes", (batch,))


@_rule(aten.amax.default)
def _largest(node: fx.Node, self: Any, dim: tuple[int, ...], keepdim: bool) -> Term:
    if isinstance(self, Vector):
        return Term("largest", self.items)
    return Term("amax", self.args) if self.name == "amaxes" else Term("largest", (self, dim))


@_rule(ops.amax_rowwise.default)
def _amax_rowwise(node: fx.Node, xs: tuple[Term, ...], rowwise: bool, columnwise: bool) -> Term:
    if (rowwise, columnwise, len(xs)) != (False, True, 1):
        raise ValueError("only columns of one matrix are measured before it is cast")
    return Term("amaxes of columns", xs)


@_rule(ops.scale_from_amax.default, ops.scales_from_amax.default)
def _scale(node: fx.Node, amax: Any, **options: Any) -> Any:
    scale = _each(lambda x: Term("scale", (x, how(options))), amax)
    return scale if node.target is ops.scale_from_amax.default else (scale, _each(inverse, scale))


@_rule(aten.reciprocal.default)
def _reciprocal(node: fx.Node, self: Any) -> Any:
    return _each(inverse, self)


@_rule(aten.eq.Scalar)
def _eq(node: fx.Node, self: Any, other: Any) -> Any:
    return _each(lambda x: Term("equals", (x, other)), self)


@_rule(aten.where.self)
def _where(node: fx.Node, condition: Any, self: Any, other: Any) -> Any:
    return _each(lambda *x: Term("where", x), condition, self, other)


@_rule(aten.full.default)
def _full(node: fx.Node, size: tuple[Any, ...], fill_value: Any, **_: Any) -> Term:
    return Term("full", (size, fill_value))


@_rule(ops.valid_rows.default)
def _valid_rows(node: fx.Node, offs: Term, num_rows: Any, index: Term | None) -> Term:
    return Term("rows of groups", (offs, index))


@_rule(ops.scale_values_mxfp8.default)
def _scale_values(node: fx.Node, q: Term, scale: Term) -> Term:
    if scale != inverse(q.args[-1]).moved(*q.moves):
        raise ValueError("the scales are not those of the data")
    return scale


# -- casts


_MATRICES = (ops.cast.default, ops.cast_rowwise.default, ops.cast_blockwise.default, ops.cast_mxfp8.default)
CASTS = frozenset({*_MATRICES, ops.cast_columns.default, ops.cast_lines_rowwise.default, ops.quantize.default})
"""The operations that quantize."""


@_rule(*_MATRICES)
def _cast(node: fx.Node, xs: tuple[Term, ...], rowwise: bool, columnwise: bool, **given: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for side in [False] * rowwise + [True] * columnwise:
        scales = given.get("scales") or [own_scale(node, x, how(given), side) for x in xs]
        found += [copy(node, x, how(given), side, scale) for x, scale in zip(xs, scales, strict=True)]
        found += [] if "scales" in given else [inverse(scale) for scale in scales]
    if given.get("with_amax"):
        is_batch = value_of(node.args[0][0]).dim() == 3  # type: ignore[index, arg-type]
        amaxes = [Term("amaxes" if is_batch else "amax", (x,)) for x in xs]
        found.append(amaxes[0] if len(xs) == 1 else Vector.of(amaxes))
    return tuple(found)


def copy(maker: fx.Node, x: Term, options: tuple[Any, ...], columnwise: bool, scale: Term) -> Term:
    """The data of an FP8 copy."""
    return Term("copy", (maker, x, options, columnwise, scale))


def own_scale(maker: fx.Node, x: Term, options: tuple[Any, ...], columnwise: bool, *amaxes: Term) -> Term:
    """The scales that a cast computes itself: of the amaxes of x, or given ones."""
    return Term("own scale", (maker, x, options, columnwise, *amaxes))


@_rule(ops.cast_lines_rowwise.default)
def _cast_lines(node: fx.Node, xs: tuple[Term, ...], amaxes: Term, rowwise: bool, columnwise: bool, **options: Any) -> Any:
    ((x,), (side,)) = xs, [False] * rowwise + [True] * columnwise
    scale = own_scale(node, x, how(options), side, amaxes)
    return copy(node, x, how(options), side, scale), inverse(scale)


@_rule(ops.quantize.default)
def _quantize(node: fx.Node, x: Term, scale: Term, dtype: torch.dtype) -> Term:
    return copy(node, x, how({"dtype": dtype}), False, scale)


@_rule(ops.cast_columns.default)
def _cast_columns(node: fx.Node, x: Term, offs: Term, index: Term | None, **options: Any) -> tuple[Term, Term]:
    scale = own_scale(node, x, how(options), True)
    found = copy(node, x, how(options), True, scale), inverse(scale)
    return found[0].moved(("columns", offs, index)), found[1].moved(("columns", offs, index))
