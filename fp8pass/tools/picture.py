"""A picture of one layer of a compiled graph: boxes in rows, an edge for each tensor, FP8 ones marked.

Reshapes, transposes and casts between high-precision dtypes are not drawn, nor are scales and amaxes. Operations that compute
from one box alone are drawn as one box with it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fp8pass.graph.origin import NUMBER, begins, input_index, module_path
from fp8pass.graph.traces import Snapshot
from fp8pass.rewrite.report import GemmRecord
from fp8pass.runtime.session import CompiledGraph
from fp8pass.runtime.snapshots import snapshot_of

#: More boxes than this are a wall, not a picture.
MAX_BOXES = 120
_RESHAPES = "view _unsafe_view reshape permute transpose t expand unsqueeze squeeze slice select"
_SEE_THROUGH = frozenset(f"{_RESHAPES} detach alias clone getitem convert_element_type _to_copy".split())
_GEMMS = frozenset(("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"))
_ROW, _GAP, _HEIGHT, _CHARACTER = 62, 18, 34, 6.6


@dataclasses.dataclass(eq=False)
class Box:
    """One operation, or several, or what comes from outside of the layer."""

    kind: str  # "gemm", "fp8" (a GEMM in FP8), "cast", "other", "input", or "bend": where an edge passes a row.
    labels: list[str]
    detail: str = ""
    row: int = 0
    x: float = 0.0

    @property
    def title(self) -> str:
        """The text in the box."""
        shown = list(dict.fromkeys(self.labels))
        return " ".join(shown[:3]) + (" ..." if len(shown) > 3 else "")

    @property
    def width(self) -> float:
        """In pixels."""
        return 6.0 if self.kind == "bend" else 18 + _CHARACTER * max(len(self.title), 0.9 * len(self.detail), 4)

    @property
    def y(self) -> float:
        """The position of its upper edge."""
        return float(self.row * _ROW + 4)


@dataclasses.dataclass(frozen=True)
class Picture:
    """The boxes and edges of one layer, placed."""

    title: str
    boxes: list[Box]
    lines: list[tuple[str, bool]]  # An edge as SVG's path, and whether it carries FP8.
    width: int
    height: int

    @property
    def num_fp8(self) -> int:
        """Edges that carry FP8."""
        return sum(is_fp8 for _, is_fp8 in self.lines)


def layer_of(gemms: Iterable[GemmRecord]) -> str:
    """The layer to draw, as the compiled frame names it: the first one of the family with the most GEMMs; "" for all."""
    layers: Counter[str] = Counter()
    firsts: dict[str, str] = {}
    for gemm in gemms:
        below = "" if gemm.path is None else gemm.path.below
        number = NUMBER.search(below)
        if number is not None and number.end() < len(below):
            layer = below[: number.end()]
            family = below[: number.start()]
            layers[family] += 1
            firsts.setdefault(family, layer)
    return firsts[layers.most_common(1)[0][0]] if layers else ""


def pictures(compiled: CompiledGraph) -> tuple[str, list[Picture]]:
    """The name of a layer, "" where the whole graph is drawn, and its graphs: forward and backward, before and after the
    rewrite. Those of too many boxes, and empty ones, are left out."""
    rewritten = compiled.rewrite
    if rewritten is None:
        return "", []
    layer = layer_of(rewritten.gemms)
    drawn = []
    before, after = snapshot_of(compiled, "before"), snapshot_of(compiled, "after")
    assert before is not None
    assert after is not None
    for side, is_backward in (("forward", False), ("backward", True)):
        for when, snapshot in (("before", before), ("after", after)):
            boxes, edges = _drawn(snapshot, compiled, layer, is_backward)
            if any(box.kind in ("gemm", "fp8") for box in boxes) and len(boxes) <= MAX_BOXES:
                drawn.append(_placed(f"{side}, {when}", boxes, edges))
    return layer, drawn


def _drawn(
    snapshot: Snapshot, compiled: CompiledGraph, layer: str, is_backward: bool
) -> tuple[list[Box], dict[tuple[Box, Box], bool]]:
    """The boxes of one side of a snapshot that an edge ends at, and its GEMMs; and the edges, each with whether it is FP8."""
    edges: dict[tuple[Box, Box], bool] = {}
    box_of: dict[str, Box | None] = {}
    shared_inputs: dict[str, Box] = {}
    assert compiled.rewrite is not None
    nodes = [n for n in snapshot.nodes if _is_gemm(n) and _is_backward(n) == is_backward]
    records = [g for g in compiled.rewrite.gemms if (g.role != "output") == is_backward]
    roles = {n.name: g.role for n, g in zip(nodes, records, strict=True)} if len(nodes) == len(records) else {}

    def is_in_layer(node: Any) -> bool:
        if _is_backward(node) != is_backward:
            return False
        path = module_path(node)
        return begins(layer, "" if path is None else path.below)

    def within(path: str) -> str:
        return path.removeprefix(layer).lstrip(".") if layer else path

    def short(node: Any) -> str:
        path = module_path(node)
        return within("" if path is None else path.below) or "self"

    def box_for(node: Any) -> Box | None:
        """The box that a node of the layer is in; None for what is not drawn."""
        if node.name in box_of:
            return box_of[node.name]
        box_of[node.name] = None
        name = _name(node)
        if name in _SEE_THROUGH or (_is_lowering(node) and not _is_gemm(node) and not _is_cast(node)):
            return None
        sources = [(read, source) for read in snapshot.inputs_of(node) if (source := source_of(read)) is not None]
        found = {source for _, source in sources if source.kind != "input"}
        only = next(iter(found)) if len(found) == 1 and all(s in found for _, s in sources) else None
        if _is_gemm(node):
            box = Box("fp8" if _is_lowering(node) else "gemm", [short(node)], roles.get(node.name, name))
        elif _is_cast(node):
            box = Box("cast", ["cast"], short(node))
        elif only is not None and only.kind == "other":
            only.labels.append(name)
            box_of[node.name] = only
            return only
        else:
            box = Box("other", ["attention" if "attention" in name else name])
        box_of[node.name] = box
        for read, source in sources:
            if not (_is_scale(read) and (_is_lowering(node) or source.kind == "cast")):
                is_fp8 = isinstance(value := read.meta.get("val"), torch.Tensor) and "float8" in str(value.dtype)
                edges[source, box] = is_fp8 or edges.get((source, box), False)
        return box

    def source_of(node: Any) -> Box | None:
        """The box that makes what a node holds."""
        while _name(node) in _SEE_THROUGH and (inputs := snapshot.inputs_of(node)):
            node = inputs[0]
        if node.op == "call_function" and is_in_layer(node):
            return box_for(node)
        if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            return None
        if _is_lowering(node) and not (_is_cast(node) or _is_gemm(node)):
            return None
        if node.name not in box_of:
            label = outside(node)
            box_of[node.name] = shared_inputs.setdefault(label, Box("input", [label]))
        return box_of[node.name]

    def outside(node: Any) -> str:
        """The text of a value from outside; those with equal texts share a box."""
        if node.op == "placeholder":
            index = input_index(node)
            given = compiled.inputs[index] if index is not None and index < len(compiled.inputs) else None
            if given is not None and given.path is not None and given.path.below:
                below = given.path.below
                return within(below) if not layer or below.startswith(f"{layer}.") else "of other layers"
            return "gradient" if "tangents" in node.name else "input"
        if _is_cast(node):
            return "casts elsewhere"
        return "from forward" if is_backward and not _is_backward(node) else "from outside"

    here = (box_for(node) for node in snapshot.nodes if node.op == "call_function" and is_in_layer(node))
    made = list(dict.fromkeys(box for box in here if box is not None))
    linked = dict.fromkeys(box for edge in edges for box in edge)  # in order: a page is the same in every process
    sources = [box for box in linked if box not in made]
    return sources + [box for box in made if box in linked or box.kind in ("gemm", "fp8")], edges


@functools.cache
def _full_name(target: Any) -> tuple[str, str]:
    """Namespace and name of an operation."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = str(target._schema.name).partition("::")
        return namespace, name
    return "", str(getattr(target, "__name__", target))


def _name(node: Any) -> str:
    return _full_name(node.target)[1]


def _is_lowering(node: Any) -> bool:
    return _full_name(node.target)[0] == "lowering"


def _is_gemm(node: Any) -> bool:
    namespace, name = _full_name(node.target)
    return name.startswith("scaled_") and "mm" in name if namespace == "lowering" else name in _GEMMS


def _is_cast(node: Any) -> bool:
    return _is_lowering(node) and any(word in _name(node) for word in ("cast", "quantize"))


def _is_backward(node: Any) -> bool:
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _is_scale(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() < 2


def _placed(title: str, boxes: list[Box], edges: dict[tuple[Box, Box], bool]) -> Picture:
    """Rows by the longest path; within a row, boxes near the mean of those that they read, then of those that read them."""
    before: dict[Box, list[Box]] = {box: [] for box in boxes}
    after: dict[Box, list[Box]] = {box: [] for box in boxes}
    for source, target in edges:
        before[target].append(source)
        after[source].append(target)
    waiting = {box: len(before[box]) for box in boxes}
    ready = [box for box in boxes if not waiting[box]]
    for box in ready:
        for reader in after[box]:
            reader.row = max(reader.row, box.row + 1)
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    for box in boxes:
        if not before[box] and after[box]:
            box.row = min(reader.row for reader in after[box]) - 1
    first = min(box.row for box in boxes)
    rows: dict[int, list[Box]] = {}
    for box in boxes:
        box.row -= first
        rows.setdefault(box.row, []).append(box)
    before, after = {}, {}
    chains = [(_chain(source, target, rows), is_fp8) for (source, target), is_fp8 in edges.items()]
    for chain, _ in chains:
        for upper, lower in itertools.pairwise(chain):
            after.setdefault(upper, []).append(lower)
            before.setdefault(lower, []).append(upper)
    for row in rows.values():
        _spread(row, {box: float(i) for i, box in enumerate(row)})
    for sweep in range(8):
        near = before if sweep % 2 == 0 else after
        for number in sorted(rows, reverse=sweep % 2 == 1):
            row = rows[number]
            _spread(row, {box: _mean([b.x for b in near.get(box, [])], box.x) for box in row})
    placed = [box for row in rows.values() for box in row]  # the bends, too
    left = min(box.x - box.width / 2 for box in placed)
    for box in placed:
        box.x += 8 - left
    width = max(box.x + box.width / 2 for box in placed) + 8
    lines = [("".join(_curve(*pair) for pair in itertools.pairwise(chain)), is_fp8) for chain, is_fp8 in chains]
    return Picture(title, boxes, lines, round(width), (max(rows) + 1) * _ROW - _ROW + _HEIGHT + 8)


def _chain(source: Box, target: Box, rows: dict[int, list[Box]]) -> list[Box]:
    """An edge with a bend in each row that it passes; puts the bends into the rows."""
    bends = [Box("bend", [], row=row) for row in range(source.row + 1, target.row)]
    for bend in bends:
        rows[bend.row].append(bend)
    return [source, *bends, target]


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _spread(row: list[Box], wanted: dict[Box, float]) -> None:
    """Place the boxes of a row side by side, as near as possible to where they are wanted."""
    row.sort(key=lambda box: wanted[box])
    end = float("-inf")
    for box in row:
        box.x = max(wanted[box], end + box.width / 2)
        end = box.x + box.width / 2 + _GAP
    shift = _mean([wanted[box] - box.x for box in row], 0.0)
    for box in row:
        box.x += shift


def _curve(source: Box, target: Box) -> str:
    """From the lower edge of a box to the upper edge of another; a bend is passed straight down."""
    x, y, to_x, to_y = round(source.x), round(source.y + _HEIGHT), round(target.x), round(target.y)
    half = (to_y - y) // 2
    below = f"V{to_y + _HEIGHT}" if target.kind == "bend" else ""
    return f"M{x} {y}C{x} {y + half} {to_x} {to_y - half} {to_x} {to_y}{below}"
