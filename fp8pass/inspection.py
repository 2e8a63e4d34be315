"""`inspect(compiled)`: what was rewritten, what was not and why, as records, as a table, and as graphs."""

from __future__ import annotations

import dataclasses
import functools
import io
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from fp8pass.capture.instances import without_wrappers, wrapper_paths
from fp8pass.capture.placeholders import KINDS
from fp8pass.capture.session import CompiledGraph, GraphUse, Session
from fp8pass.errors import nearest, preview
from fp8pass.graph.origin import input_index, is_gradient
from fp8pass.rewrite.gather import GatherRecord
from fp8pass.rewrite.report import GemmRecord
from fp8pass.rewrite.runner import copy_graph

_NUMBER = re.compile(r"(?<![^.#])\d+(?![^.])")


class GraphRecord:
    """One compiled graph. Graphs are printable with `print_readable()`; they are copies and not what runs."""

    def __init__(self, use: GraphUse, name: str):
        self._compiled = compiled = use.compiled
        self.name: str = name
        self.gemms: list[GemmRecord] = _gemms_of(use)
        """Its matmuls, for every module instance that the graph serves."""
        self.gathers: list[GatherRecord] = compiled.rewrite.gathers if compiled.rewrite else []
        """The all-gathers that feed FP8 GEMMs: what they send, and why if not FP8."""
        self.trains: bool = compiled.backward is not None
        """Whether the graph has a backward that has been compiled."""

    @functools.cached_property
    def before(self) -> fx.GraphModule | None:
        """The joint graph (in inference: the forward graph) as captured."""
        return self._module(self._compiled.rewrite and self._compiled.rewrite.before)

    @functools.cached_property
    def after(self) -> fx.GraphModule | None:
        """The same graph rewritten."""
        return self._module(self._compiled.rewrite and self._compiled.rewrite.after)

    @functools.cached_property
    def forward(self) -> fx.GraphModule | None:
        """The forward that the partitioner made of it."""
        return self._module(self._compiled.forward)

    @property
    def backward(self) -> fx.GraphModule | None:
        """The backward that the partitioner made of it; None in inference, and with Inductor before the first backward."""
        return self._module(self._compiled.backward)

    @functools.cached_property
    def state_inputs(self) -> list[str]:
        """Names of the placeholders through which the state of delayed scaling enters `before` and `after`."""
        if self.after is None:
            return []
        names = _state_names(self.after.graph, self._compiled)
        return [n.name for n in self.after.graph.find_nodes(op="placeholder") if n.name in names.values()]

    @functools.cached_property
    def saved_bytes(self) -> int:
        """Bytes that the forward saves for the backward: the memory behind outputs of the forward graph that belongs to none of
        the model's outputs and to no input. 0 in inference."""
        forward, rewritten = self._compiled.forward, self._compiled.rewrite
        if forward is None or rewritten is None:
            return 0
        (output,) = rewritten.after.find_nodes(op="output")
        num_outputs = sum(not is_gradient(d) for d in output.meta["desc"])
        (results,) = forward.find_nodes(op="output")[0].args
        others = {*_memory(results[:num_outputs]), *_memory(forward.find_nodes(op="placeholder"))}
        saved = _memory(results[num_outputs:])
        return sum(size for storage, size in saved.items() if storage not in others)

    def _module(self, graph: fx.Graph | None) -> fx.GraphModule | None:
        if graph is None:
            return None
        graph = copy_graph(graph)
        for node, name in _state_nodes(graph, self._compiled):
            node._rename(name)
            node.target = name
        return fx.GraphModule(torch.nn.Module() if not _attributes(graph) else _constants(graph), graph, self.name)


def _memory(nodes: Iterable[Any]) -> dict[StorageWeakRef, int]:
    """The storages behind the values of nodes, and how many bytes of each they hold; views of one tensor share one."""
    found: dict[StorageWeakRef, int] = {}
    for node in nodes:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.Tensor):
            storage = StorageWeakRef(value.untyped_storage())
            found[storage] = max(found.get(storage, 0), int(value.numel()) * value.element_size())
    return found


def _gemms_of(use: GraphUse) -> list[GemmRecord]:
    gemms = use.compiled.rewrite.gemms if use.compiled.rewrite else []
    return [dataclasses.replace(g, module=p.name_module(g.path)) for p in use.placements for g in gemms]


def _attributes(graph: fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "get_attr"]


def _constants(graph: fx.Graph) -> torch.nn.Module:
    """A module with an empty attribute for each constant that the graph reads, so that the copy can be built and printed."""
    holder = torch.nn.Module()
    for name in _attributes(graph):
        setattr(holder, name, None)
    return holder


def _state_nodes(graph: fx.Graph, compiled: CompiledGraph) -> list[tuple[fx.Node, str]]:
    found = []
    for node in graph.find_nodes(op="placeholder"):
        index = input_index(node)
        if index is not None and 0 <= (position := index - compiled.state_start) < len(KINDS) * len(compiled.capacities):
            recipe, kind = divmod(position, len(KINDS))
            found.append((node, f"fp8_{KINDS[kind]}" + (f"_{recipe}" if recipe else "")))
    return found


def _state_names(graph: fx.Graph, compiled: CompiledGraph) -> dict[int, str]:
    return {i: node.name for i, (node, _) in enumerate(_state_nodes(graph, compiled))}


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What was done to a compiled model, as far as it has been compiled: graphs are made at the first calls."""

    gemms: list[GemmRecord]
    """Every matmul, without repetition over graphs that were compiled for other shapes."""
    graphs: list[GraphRecord]
    """Every compiled graph, in the order of compilation."""
    unmatched_rules: list[str]
    """Patterns of rules that have matched no GEMM so far."""
    outside: list[str] = dataclasses.field(default_factory=list)
    """Linears of the model that no compiled graph holds: not run so far, or run eagerly where Dynamo broke the graph, as
    FSDP2's hooks make it do around each block."""

    def to_dict(self) -> dict[str, Any]:
        """The same for machines: plain lists, dicts, strings and numbers."""
        return {
            "gemms": [_as_dict(g) for g in self.gemms],
            "graphs": [
                {
                    "name": g.name,
                    "gemms": len(g.gemms),
                    "state_inputs": g.state_inputs,
                    "saved_bytes": g.saved_bytes,
                    "gathers": [dataclasses.asdict(r) for r in g.gathers],
                }
                for g in self.graphs
            ],
            "unmatched_rules": self.unmatched_rules,
            "outside": self.outside,
        }

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=160, color_system=None)
        console.print(self._table())
        for line in self._remarks():
            console.print(line)
        return console.file.getvalue()

    def __rich__(self) -> Table:
        return self._table()

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        from html import escape

        head, rows = _columns(), _rows(self.gemms)
        cells = "".join(f"<th>{escape(c)}</th>" for c in head)
        body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        remarks = "".join(f"<p>{escape(line)}</p>" for line in self._remarks())
        return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>{remarks}"

    def _table(self) -> Table:
        table = Table(title=None)
        for column in _columns():
            table.add_column(column, overflow="fold")
        for row in _rows(self.gemms):
            table.add_row(*row)
        return table

    def _remarks(self) -> list[str]:
        quantized = sum(g.quantized for g in self.gemms)
        count = "1 graph" if len(self.graphs) == 1 else f"{len(self.graphs)} graphs"
        lines = [f"{quantized} of {len(self.gemms)} GEMMs run in FP8, in {count}."]
        if not self.graphs:
            lines = ["Nothing is compiled yet: call the model once, then its backward."]
        elif not self.gemms:
            lines = ["The model has no matmul."]
        lines += _gather_remarks([g for graph in self.graphs for g in graph.gathers])
        if self.gemms and self.outside:
            lines.append(f"No compiled graph holds {preview(self.outside)}: not run so far, or run in high precision.")
        modules = sorted({g.module for g in self.gemms})
        lines += [
            f"The rule {pattern!r} has matched no GEMM.{nearest(pattern.partition(':')[0], modules)}"
            for pattern in self.unmatched_rules
        ]
        return lines


def _gather_remarks(gathers: list[GatherRecord]) -> list[str]:
    """What travels in all-gathers, in bytes that a rank receives per step; one line per reason to stay in high precision."""
    moved = [g for g in gathers if g.quantized]
    lines = []
    if moved:
        before, after = _total(g.bytes_before for g in moved), _total(g.bytes_after for g in moved)
        lines.append(f"{len(moved)} all-gathers send FP8: {after} bytes on the wire instead of {before}.")
    for reason, count in Counter(g.reason for g in gathers if g.reason).items():
        lines.append(f"{count} all-gathers send high precision: {reason}.")
    return lines


def _total(sizes: Iterable[int | str]) -> str:
    sizes = list(sizes)
    known = f"{sum(s for s in sizes if isinstance(s, int)):,}"
    return " + ".join([known, *(s for s in sizes if isinstance(s, str))])


def _as_dict(gemm: GemmRecord) -> dict[str, Any]:
    return {f.name: getattr(gemm, f.name) for f in dataclasses.fields(gemm) if f.name != "path"}


def _columns() -> list[str]:
    return ["module", "role", "m x n x k", "recipe", "formats", "reason to stay"]


def _rows(gemms: list[GemmRecord]) -> list[list[str]]:
    """Table rows; equal layers, which differ in one number of their path, are folded into one."""
    folded: dict[tuple[Any, ...], list[str]] = {}
    for g in gemms:
        family = _NUMBER.sub("*", g.module)
        formats = f"{g.a_format} x {g.b_format}" if g.quantized else "high precision"
        shape = f"{g.m} x {g.n} x {g.k}"
        key = (family, g.role, shape, g.recipe, formats, g.reason)
        folded.setdefault(key, []).append(g.module)
    return [
        [_folded_path(modules), role, shape, recipe or "-", formats, reason or ""]
        for (_, role, shape, recipe, formats, reason), modules in folded.items()
    ]


def _folded_path(modules: list[str]) -> str:
    if len(modules) == 1:
        return modules[0]
    numbers = [[int(n) for n in _NUMBER.findall(m)] for m in modules]
    parts = iter([sorted(set(column)) for column in zip(*numbers, strict=True)])

    def span(match: re.Match[str]) -> str:
        values = next(parts)
        if len(values) == 1:
            return str(values[0])
        consecutive = values == list(range(values[0], values[-1] + 1))
        return f"{values[0]}-{values[-1]}" if consecutive else "{" + ",".join(map(str, values)) + "}"

    return f"{_NUMBER.sub(span, modules[0])} (x{len(modules)})"


def make_inspection(session: Session) -> Inspection:
    """The inspection of a session as of now."""
    graphs = [GraphRecord(use, f"graph_{i}") for i, use in enumerate(session.uses.values())]
    gemms = _without_repetition([graph.gemms for graph in graphs])
    matched = {rule.pattern for g in gemms if (rule := session.rules.find(g.module, g.role)) is not None}
    unmatched = [rule.pattern for rule in session.rules.rules if rule.pattern not in matched]
    return Inspection(gemms, graphs, unmatched if gemms else [], _outside(session, gemms))


def _outside(session: Session, gemms: list[GemmRecord]) -> list[str]:
    root = session.root()
    if root is None:
        return []
    seen, wrapped = {g.module for g in gemms}, wrapper_paths(root)
    linears = [path for path, module in root.named_modules() if isinstance(module, torch.nn.Linear)]
    names = (without_wrappers(path, wrapped) for path in linears)
    return [name for name in names if name and name not in seen]


def _without_repetition(graphs: list[list[GemmRecord]]) -> list[GemmRecord]:
    """The GEMMs of all graphs; a graph compiled again (other shapes, evaluation) adds only what is new in it."""
    seen: Counter[tuple[object, ...]] = Counter()
    kept: list[GemmRecord] = []
    for gemms in graphs:
        here: Counter[tuple[object, ...]] = Counter()
        for g in gemms:
            key = (g.module, g.role, g.quantized, g.recipe)
            here[key] += 1
            if here[key] > seen[key]:
                kept.append(g)
        seen |= here
    return kept
