"""The inspection of a compiled model: the records of all its graphs, and what to remark about them."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from rich.table import Table

from fp8pass.capture.instances import without_wrappers, wrapper_paths
from fp8pass.capture.session import Session
from fp8pass.cost import graph_speedup
from fp8pass.errors import nearest, preview
from fp8pass.inspection import table
from fp8pass.inspection.graphs import GraphRecord
from fp8pass.rewrite.report import GatherRecord, GemmRecord
from fp8pass.rules import Rule
from lowering.blockwise import cublaslt
from lowering.grouped import cutlass


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What the pass did to a compiled model, as far as it has been compiled: graphs are compiled at the first calls."""

    gemms: list[GemmRecord]
    """Every matrix multiplication. A graph that was compiled again for other shapes adds only what is new in it."""
    graphs: list[GraphRecord]
    """Every compiled graph, in the order of compilation."""
    unmatched_rules: list[str]
    """Patterns of rules that have decided no GEMM so far: they match none, or an earlier rule matches the same ones."""
    outside: list[str] = dataclasses.field(default_factory=list)
    """Linears of the model that have none of `gemms`: they have not run so far, or run in high precision, as part of another
    operation or eagerly because of a graph break, such as those between the blocks of FSDP2."""
    ran_eagerly: bool = False
    """Whether a call ran no compiled graph, so in high precision: `Fp8FallbackWarning` said so."""
    rules: tuple[Rule, ...] = dataclasses.field(default=(), repr=False)
    """The rules, in order."""
    distrusted: list[str] = dataclasses.field(default_factory=list)
    """Kinds of FP8 GEMMs that torch has, and that gave wrong results when this process tried them. Triton's run instead, which
    are slower."""

    def to_dict(self) -> dict[str, Any]:
        """The inspection as plain lists, dicts, strings and numbers."""
        return {
            "gemms": [_as_dict(g) for g in self.gemms],
            "graphs": [
                {
                    "name": g.name,
                    "gemms": len(g.gemms),
                    "state_inputs": g.state_inputs,
                    "saved_bytes": g.saved_bytes,
                    "speedup": g.speedup,
                    "gathers": [dataclasses.asdict(r) for r in g.gathers],
                }
                for g in self.graphs
            ],
            "speedup": self.speedup,
            "unmatched_rules": self.unmatched_rules,
            "outside": self.outside,
            "distrusted": self.distrusted,
            "ran_eagerly": self.ran_eagerly,
        }

    def __str__(self) -> str:
        return table.as_text(self.gemms, self._remarks())

    def __rich__(self) -> Table:
        return table.as_rich(self.gemms)

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        return table.as_html(self.gemms, self._remarks())

    @property
    def speedup(self) -> float | None:
        """Expected speed-up over bfloat16 of all GEMMs together, an estimate; GEMMs in high precision count as they are. None
        if nothing is compiled, if all sizes are dynamic, or if a GEMM failed its trial (`distrusted`): the estimate is not for
        Triton's."""
        return None if self.distrusted else graph_speedup([e for graph in self.graphs for e in graph.estimates])

    def _speedup_remark(self) -> list[str]:
        expected = self.speedup
        if self.distrusted:
            slower = "with Triton's, FP8 may be slower than bfloat16"
            return [f"Expected speed-up: none is known, because torch's GEMMs failed their trials; {slower}."]
        if expected is None:
            return []
        return [f"Expected speed-up of all GEMMs, with their casts: {expected:.2f} (an estimate; {self._estimated_for()})."]

    def _estimated_for(self) -> str:
        """The device of the first graph that has an estimate: one without GEMMs has no device."""
        return next(g.estimated_for for g in self.graphs if any(g.estimates))

    def _remarks(self) -> list[str]:
        quantized = sum(g.quantized for g in self.gemms)
        count = "1 graph" if len(self.graphs) == 1 else f"{len(self.graphs)} graphs"
        lines = [*self._speedup_remark(), f"{quantized} of {len(self.gemms)} GEMMs run in FP8, in {count}."]
        if self.ran_eagerly and not self.graphs:
            lines = ["No compiled graph has run: torch.compile ran the model eagerly, in high precision (Fp8FallbackWarning)."]
        elif not self.graphs:
            lines = ["Nothing is compiled yet: call the model once, then its backward."]
        elif not self.gemms:
            lines = ["No compiled graph has a matmul."]
        lines += _gather_remarks([g for graph in self.graphs for g in graph.gathers])
        if self.graphs and self.outside:
            lines.append(f"No GEMM belongs to {preview(self.outside)}: not run so far, or running in high precision.")
        if self.graphs and self.ran_eagerly:
            lines.append("A call ran no compiled graph: torch.compile ran it eagerly, in high precision (Fp8FallbackWarning).")
        lines += [
            f"{kind}: Triton's GEMM runs, because torch's failed its trial; it has no speed-up." for kind in self.distrusted
        ]
        lines += [_rule_remark(rule, self) for rule in self.rules if rule.pattern in self.unmatched_rules]
        return lines


def make_inspection(session: Session) -> Inspection:
    """The inspection of a session as of now."""
    graphs = [GraphRecord(use, f"graph_{i}") for i, use in enumerate(session.uses.values())]
    gemms = [_as_it_runs(gemm) for gemm in _without_repetition([graph.gemms for graph in graphs])]
    matched = {rule.pattern for g in gemms if (rule := session.rules.find(g.module, g.role)) is not None}
    unmatched = [rule.pattern for rule in session.rules.rules if rule.pattern not in matched]
    return Inspection(
        gemms,
        graphs,
        unmatched if gemms else [],
        _outside(session, gemms),
        session.warned_of_eager_run,
        session.rules.rules,
        _distrusted([g for g in gemms if g.quantized]),
    )


def _as_it_runs(gemm: GemmRecord) -> GemmRecord:
    """The record without its estimate, if a library's GEMM that the estimate is for failed its trial."""
    return dataclasses.replace(gemm, speedup=None) if gemm.quantized and _distrusted([gemm]) else gemm


def _distrusted(quantized: list[GemmRecord]) -> list[str]:
    """The kinds of GEMMs that failed their trials, of the libraries and of the scales that these could have used."""
    scales = {(g.a_scaling, g.b_scaling) for g in quantized if g.groups == 1}
    trials = {f"blockwise GEMMs, {kind}": right for kind, right in cublaslt.trials_of(scales).items()}
    if any(g.groups != 1 for g in quantized):
        trials |= {f"grouped GEMMs, {kind}": right for kind, right in cutlass.trials().items()}
    return [kind for kind, right in trials.items() if not right]


def _rule_remark(rule: Rule, report: Inspection) -> str:
    """Why a rule has decided no GEMM, and what to write instead."""
    same = [g for g in report.gemms if rule.matches(g.module, g.role)]
    if same:
        earlier = dict.fromkeys(next(r.pattern for r in report.rules if r.matches(g.module, g.role)) for g in same)
        return f"The rule {rule.pattern!r} decides nothing: its GEMMs match {preview(map(repr, earlier))} first."
    said = f"The rule {rule.pattern!r} has matched no GEMM."
    role = f":{rule.role}" if rule.role else ""
    modules = sorted({g.module for g in report.gemms})
    if any(dataclasses.replace(rule, role=None).matches(module, "") for module in modules):
        return f"{said} The module has none with the role {rule.role}."
    if fnmatch.filter(modules, below := f"{rule.module}.*"):
        return f"{said} It does not cover the modules inside; did you mean {below + role!r}?"
    return said + nearest(rule.module, modules)


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


def _as_dict(gemm: GemmRecord) -> dict[str, Any]:
    return {f.name: getattr(gemm, f.name) for f in dataclasses.fields(gemm) if f.name != "path"}


def _gather_remarks(gathers: list[GatherRecord]) -> list[str]:
    """What travels in all-gathers, in bytes that a rank receives per step; one line per reason for high precision."""
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
