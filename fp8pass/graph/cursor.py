"""Inserting nodes into a traced graph: with a fake value, and with the metadata that later passes need."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass.errors import InvariantError
from fp8pass.graph.origin import MODULE_FQN, annotated_module
from fp8pass.graph.values import same_shape
from lowering.operation import NAMESPACE

aten = torch.ops.aten

# Copied by allow-list: a mutating node must never inherit `recompute`, nor any node a tag whose meaning it does not share.
_ORIGIN_KEYS = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr", "source_fn_stack", "fwd_source_fn_stack")
_RECOMPUTE_KEYS = ("recompute", "ac_graph_id")
_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclasses.dataclass(frozen=True)
class Cursor:
    """A place in a graph where nodes are inserted. Every new node carries a fake value, its origin and a partitioner tag."""

    graph: fx.Graph
    before: fx.Node  # New nodes come before this one, and have its origin.
    backward: bool  # The side of the partition that new nodes belong to.
    like: fx.Node | None = None  # If activation checkpointing recomputes this node, it recomputes the new ones, too.
    fake_mode: Any = None
    is_joint: bool = False
    results: dict[Hashable, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """A call of one of our operations, by the forms of its arguments -> its results: layers repeat each other."""

    @classmethod
    def start(cls, graph: fx.Graph) -> Cursor:
        """A cursor at the first node that is not a placeholder."""
        placeholders = graph.find_nodes(op="placeholder")
        values = [n.meta["val"] for n in placeholders if "val" in n.meta]
        fake_mode = detect_fake_mode(values) or contextlib.nullcontext()
        first = next(n for n in graph.nodes if n.op != "placeholder")
        is_joint = any("tangents" in str(n.target) or n.meta.get("partitioner_tag") for n in placeholders)
        return cls(graph, first, False, None, fake_mode, is_joint)

    def at(self, before: fx.Node, backward: bool) -> Cursor:
        """Another place in the graph."""
        return dataclasses.replace(self, before=before, backward=backward, like=None)

    def sharing(self, *others: fx.Node) -> Cursor:
        """A cursor at this place whose new nodes are recomputed if one of `others` is."""
        return dataclasses.replace(self, like=next((n for n in others if is_recomputed(n)), None))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call of `target`."""
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        value = self._value(target, *fx.map_arg((args, kwargs), lambda n: n.meta["val"]))
        if value is not None:  # the partitioner asks for the size of what has a value
            node.meta["val"] = value
        for key in _ORIGIN_KEYS:
            if key in self.before.meta:
                node.meta[key] = self.before.meta[key]
        if (module := annotated_module(self.before)) is not None:
            node.meta["custom"] = {MODULE_FQN: module}
        if self.is_joint:
            node.meta["partitioner_tag"] = "is_backward" if self.backward else "is_forward"
        if self.like is not None:
            inherit_recomputation(node, self.like)
        return node

    def _value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The fake value of a call."""
        if target is operator.getitem:
            return args[0][args[1]]
        key = form_of_call(target, args, kwargs) if NAMESPACE.find(target) is not None else None
        with self.fake_mode, torch.no_grad():
            if key is None:
                return target(*args, **kwargs)
            if key in self.results:
                return _empty_like(self.results[key])
            return self.results.setdefault(key, target(*args, **kwargs))

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """Element `index` of a node that returns a tuple; shares its recomputation."""
        item = self.call(operator.getitem, node, index)
        inherit_recomputation(item, node)
        return item

    def items(self, node: fx.Node) -> list[fx.Node]:
        """All outputs of a node: itself where it returns one tensor."""
        if isinstance(node.meta["val"], torch.Tensor):
            return [node]
        return [self.item(node, i) for i in range(len(node.meta["val"]))]

    def size(self, node: fx.Node, dim: int) -> Any:
        """A size as an int, or as a node where it is symbolic."""
        shape = node.meta["val"].shape
        if isinstance(shape[dim], int):
            return shape[dim]
        return dataclasses.replace(self, like=None).call(aten.sym_size.int, node, dim % len(shape))


def _empty_like(made: Any) -> Any:
    """New fake tensors that look like these, which are no views. To be called in their mode."""
    if isinstance(made, torch.Tensor):
        return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=made.device)
    return None if made is None else type(made)(map(_empty_like, made))


def form_of_call(target: Any, args: Any, kwargs: Any) -> Hashable | None:
    """All that decides the forms of a call's results, None where a size is symbolic; positions in vectors of scales do not."""
    operation = NAMESPACE.find(target)
    unread = () if operation is None else operation.index_names
    key = target, _form(args), _form({name: value for name, value in kwargs.items() if name not in unread})
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _form(value: Any) -> Any:
    """The properties of a value that decide the shape of an operation's result."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, tuple(value.shape), value.stride()
    if isinstance(value, dict):
        return tuple((name, _form(item)) for name, item in value.items())
    return tuple(map(_form, value)) if isinstance(value, (list, tuple)) else (type(value), value)


def is_recomputed(node: fx.Node) -> bool:
    """Tell whether activation checkpointing recomputes the node in backward."""
    return node.meta.get("recompute") in _RECOMPUTED


def recomputation_of(node: fx.Node) -> tuple[Any, ...]:
    """Side of the partition and recomputation of a node: nodes with equal ones may share an operation."""
    return tuple(str(node.meta.get(key)) for key in ("partitioner_tag", *_RECOMPUTE_KEYS))


def inherit_recomputation(node: fx.Node, other: fx.Node) -> None:
    """Let checkpointing treat `node` as it treats `other`."""
    for key in _RECOMPUTE_KEYS:
        if key in other.meta:
            node.meta[key] = other.meta[key]


def never_recompute(*nodes: fx.Node) -> None:
    """Save the nodes' values for backward if backward needs them."""
    for node in nodes:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def always_recompute(node: fx.Node) -> None:
    """Compute the node again in backward instead of saving its value."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def pin(node: fx.Node, backward: bool) -> None:
    """Keep a node on its side of the partition."""
    if "partitioner_tag" in node.meta:
        node.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"


def is_pinned(node: fx.Node) -> bool:
    """Tell whether `pin` was called for the node."""
    return str(node.meta.get("partitioner_tag")).startswith("must_be_in")


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults of those that are not given; none for other nodes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    names, defaults = _parameters(node.target)
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


@functools.cache
def _parameters(target: torch._ops.OpOverload) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of an operation's arguments, and the defaults of those that have one."""
    known = target._schema.arguments
    return tuple(a.name for a in known), {a.name: a.default_value for a in known if a.has_default_value()}


def maker_of(node: fx.Node) -> tuple[fx.Node, Any]:
    """The operation of which a node is a result, and which: None for all of it."""
    if node.target is operator.getitem:
        made: Any = node.args[0]
        return made, node.args[1]
    return node, None


# -- the values of nodes, checked


def check_values(graph: fx.Graph, known: set[fx.Node]) -> None:
    """Every inserted node has the shapes, strides, dtypes and devices that its operation gives it."""
    mode = Cursor.start(graph).fake_mode
    made_of: dict[Any, Any] = {}  # Operation and forms of its arguments -> what it gives: layers repeat each other.
    for node in graph.nodes:
        if node in known or node.op != "call_function":
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        said = node.meta.get("val")
        if node.target is operator.getitem and said is args[0][args[1]]:
            continue
        key = form_of_call(node.target, args, kwargs) or node
        try:
            if key not in made_of:
                with mode, torch.no_grad():
                    made_of[key] = node.target(*args, **kwargs)
        except Exception as error:
            raise InvariantError(f"{node.name} cannot run on its arguments: {error}") from error
        made = made_of[key]
        if not is_like(said, made):
            raise InvariantError(f"{node.name} gives {described(made)}, the graph says {described(said)}")


def is_like(said: Any, made: Any) -> bool:
    if isinstance(said, (list, tuple)) and isinstance(made, (list, tuple)):
        return len(said) == len(made) and all(map(is_like, said, made))
    if not isinstance(said, torch.Tensor) or not isinstance(made, torch.Tensor):
        return type(said) is type(made)
    is_alike = said.dtype == made.dtype and said.device == made.device and same_shape(said.shape, made.shape)
    return is_alike and same_shape(said.stride(), made.stride())


def described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(described, value))})"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} {list(value.shape)} {list(value.stride())} on {value.device}"
