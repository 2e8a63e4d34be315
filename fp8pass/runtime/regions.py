"""Regions of `torch.compiler.nested_compile_region`, written out: each call of a region becomes nodes of the graph around it.

torch compiles a region once for all calls. In FP8 each call has scales, names and rows of its own, so the body is copied to
every call, under the names of the modules whose Parameters that call passes.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fp8pass.graph.origin import Path, parse_path


def without_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """One of Dynamo's graphs without regions: itself, unchanged, where it has none, else a copy."""
    return _Writer().written(gm) if _has_region(gm) else gm


def _has_region(gm: fx.GraphModule) -> bool:
    """Whether a region is called, in a branch or body as well."""
    held = (_attribute(gm, node) for node in gm.graph.find_nodes(op="get_attr"))
    bodies = [x for x in held if isinstance(x, fx.GraphModule)]
    return any(_is_region(node) for node in gm.graph.nodes) or any(map(_has_region, bodies))


def _is_region(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.higher_order.invoke_subgraph


def _attribute(gm: fx.GraphModule, node: Any) -> Any:
    return operator.attrgetter(str(node.target))(gm)


Moves = tuple[dict[Path, Path], ...]
"""Where code was traced -> where a call runs it, of the innermost call first."""


class _Writer:
    """Copies graphs. Invariant: what Dynamo made stays as it is, for its guards."""

    def __init__(self) -> None:
        self._traced: dict[fx.GraphModule, list[Path | None]] = {}
        """Region -> where the arguments of its first call are in the model: those with which it was traced."""

    def written(self, gm: fx.GraphModule, given: Sequence[Path | None] | None = None, moves: Moves = ()) -> fx.GraphModule:
        """A copy of a graph with its regions written out. given: where its inputs were in the model as it was traced, if they
        do not say so."""
        target = _Target()
        copies: dict[fx.Node, Any] = {}
        placeholders = gm.graph.find_nodes(op="placeholder")
        for node in placeholders:
            copy = copies[node] = target.graph.node_copy(node)
            copy._dynamo_source = getattr(node, "_dynamo_source", None)
        places = dict(zip(placeholders, map(_path_of, placeholders) if given is None else given, strict=True))
        result = self._write(gm, target, copies, places, moves)
        target.graph.output(result).meta.update(gm.graph.output_node().meta)
        written = fx.GraphModule(target.attributes, target.graph)
        written.meta.update(gm.meta)
        if hasattr(gm, "_param_name_to_source"):
            written._param_name_to_source = gm._param_name_to_source
        return written

    def _write(
        self, gm: fx.GraphModule, target: _Target, copies: dict[fx.Node, Any], places: dict[fx.Node, Path | None], moves: Moves
    ) -> Any:
        """Copy the nodes of a graph behind its inputs, and return its results. places: of its inputs, as it was traced."""
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "output") or (node.op == "get_attr" and all(map(_is_region, node.users))):
                continue
            if _is_region(node):
                name, _, *operands = node.args
                values = [copies[x] if isinstance(x, fx.Node) else x for x in operands]
                copies[node] = self._region(_attribute(gm, name), target, values, _places(operands, places), moves)
            elif node.target is operator.getitem and isinstance(copies[node.args[0]], (tuple, list)):
                copies[node] = copies[node.args[0]][node.args[1]]
            else:
                copies[node] = copy = target.graph.node_copy(node, copies.__getitem__)
                _place(copy, moves)
                if node.op == "get_attr":
                    copy.target = f"attribute_{len(target.attributes)}"
                    target.attributes[copy.target] = self._held(gm, node, places, moves)
        return fx.map_arg(gm.graph.output_node().args[0], copies.__getitem__)

    def _region(self, body: fx.GraphModule, target: _Target, values: list[Any], given: list[Path | None], moves: Moves) -> Any:
        """The results of one call."""
        traced = self._traced.setdefault(body, given)
        placeholders = body.graph.find_nodes(op="placeholder")
        copies, places = (dict(zip(placeholders, each, strict=True)) for each in (values, traced))
        return self._write(body, target, copies, places, (_moves(traced, given), *moves))

    def _held(self, gm: fx.GraphModule, node: fx.Node, places: dict[fx.Node, Path | None], moves: Moves) -> Any:
        """What a node reads: a graph without regions, if it is a graph."""
        held = _attribute(gm, node)
        if not isinstance(held, fx.GraphModule) or not (moves or _has_region(held)):
            return held
        operands = [x for x in next(iter(node.users)).args if isinstance(x, fx.Node) and x.op != "get_attr"]
        num_inputs = len(held.graph.find_nodes(op="placeholder"))
        given = _places(operands, places) if len(operands) == num_inputs else [None] * num_inputs
        return self.written(held, given, moves)


class _Target:
    """The graph that is written."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}


def _places(operands: Sequence[Any], places: dict[fx.Node, Path | None]) -> list[Path | None]:
    return [places.get(x) if isinstance(x, fx.Node) else None for x in operands]


def _path_of(placeholder: fx.Node) -> Path | None:
    source: Any = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return parse_path(str(name() if callable(name) else name))  # a method before torch 2.12


def _moves(traced: Sequence[Path | None], given: Sequence[Path | None]) -> dict[Path, Path]:
    """Where a region was traced -> where a call runs it: the paths of its Parameters without their common end. Of tied ones the
    path is that of the first module that has them, so most decide."""
    found: dict[Path, Counter[Path]] = {}
    for before, after in zip(traced, given, strict=True):
        if before is None or after is None or before == after:
            continue
        old, new = before.below.split("."), after.below.split(".")
        while old and new and old[-1] == new[-1]:
            old.pop()
            new.pop()
        found.setdefault(Path(before.root, ".".join(old)), Counter())[Path(after.root, ".".join(new))] += 1
    return {old: places.most_common(1)[0][0] for old, places in found.items()}


def _place(node: fx.Node, moves: Moves) -> None:
    """Name the modules that a node's metadata is about as its call does."""
    stack = node.meta.get("nn_module_stack")
    if moves and stack:
        node.meta["nn_module_stack"] = {key: (_moved(path, moves), *rest) for key, (path, *rest) in stack.items()}


def _moved(text: str, moves: Moves) -> str:
    path = parse_path(text)
    if path is None:
        return text
    for found in moves:
        path = _moved_by(path, found)
    return f"L['{path.root}']" + (f".{path.below}" if path.below else "")


def _moved_by(path: Path, found: dict[Path, Path]) -> Path:
    fits = [old for old in found if old.root == path.root and (not old.below or f"{path.below}.".startswith(f"{old.below}."))]
    if not fits:
        return path
    old = max(fits, key=lambda p: len(p.below))
    new, rest = found[old], path.below[len(old.below) :].lstrip(".")
    return Path(new.root, ".".join(part for part in (new.below, rest) if part))
