"""The inspection of a compiled model: the records of all its graphs, the table of GEMMs, and the remarks below it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from fp8pass.cost import Estimate, graph_speedup
from fp8pass.errors import preview
from fp8pass.graph.origin import ADAPTER, family
from fp8pass.rewrite.plan import Siblings, place_among_siblings
from fp8pass.rewrite.report import GatherRecord, GemmRecord, KeptRecord
from fp8pass.rewrite.saved import SavedRecord
from fp8pass.rules import ROLES, Rule
from fp8pass.runtime.instances import ROOT, Placement, without_wrappers, wrapper_paths
from fp8pass.runtime.records import (
    Uses,
    eager_records,
    gemms_of_session,
    placed,
    placed_gathers,
    saved_of_session,
    without_repetition,
)
from fp8pass.runtime.session import CompiledGraph, Part
from fp8pass.runtime.snapshots import extra_placeholders, snapshot_of, summary_of
from fp8pass.runtime.warn import Decided, deciding, remark_on, unmatched
from fp8pass.scales.view import Fp8State
from fp8pass.tools.monitoring import Measurement
from fp8pass.tools.tables import as_html, as_text, counted, folded_path, make_table, shape_text, terminal_width
from fp8pass.weights.releases import Release
from lowering.blockwise import gemm as blockwise
from lowering.formats import Granularity
from lowering.grouped import gemm as grouped
from lowering.mxfp8 import gemm as mxfp8
from lowering.paths import GemmPath
from lowering.trials import libraries_of, reasons_of

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("module", "role", "m x n x k", "recipe", "formats", "speed-up", "why not FP8")
#: In a narrower terminal, reasons are numbered and below the table; elsewhere those that are longer and in several rows.
NARROW, REPEATED = 130, 80
#: The library whose GEMM runs where no other one is trusted, which is slower.
TRITON = "Triton"
_MX_LIBRARIES = {"cublaslt": mxfp8}
_MX = Granularity.BLOCK_1X32.label
_NAMES = {"deep_gemm": "DeepGEMM", "cublaslt": "cuBLASLt", "cutlass": "CUTLASS", "triton": TRITON}
#: The paths on which no library computes a GEMM as it is.
_WITHOUT_LIBRARY = {path.value for path in GemmPath if path.name.endswith(("_AFTERWARDS", "_BY_TRITON", "_BY_MXFP8"))}


# -- one compiled graph


class GraphRecord:
    """One compiled graph. The fx graphs are copies to read, for example with `print_readable()`, not the graphs that run."""

    def __init__(self, compiled: CompiledGraph, uses: Uses, name: str):
        rewritten = compiled.rewrite
        self.compiled: CompiledGraph = compiled
        self.name: str = name
        self.gemms: list[GemmRecord] = [] if rewritten is None else placed(rewritten.gemms, uses)
        """Its matmuls, for every module instance that the graph serves."""
        self.gathers: list[GatherRecord] = [] if rewritten is None else placed_gathers(rewritten.gathers, uses)
        """The all-gathers that feed FP8 GEMMs: what they send, and the reason if it is not FP8. With `fsdp_gather`, those of
        FSDP2's too, for every module instance that the graph serves."""
        self.kept: list[KeptRecord] = [] if rewritten is None else placed(rewritten.kept, uses)
        """The weights that the graph does not train (with weight_copies="cache", all), for every module instance that it
        serves: whether their FP8 copies are kept between calls, and the reason if not."""
        self.saved: list[SavedRecord] = [] if rewritten is None else placed(rewritten.saved, uses)
        """With `saved_activations`, the values that the forward saves for the backward, for every module instance that the
        graph serves: their bytes before and after, and why they are not saved in FP8. Empty without the option."""
        self.estimates: list[Estimate | None] = (
            [] if rewritten is None else rewritten.estimates * sum(len(places) for _, places in uses)
        )
        """Expected seconds of each of `gemms`, in bfloat16 and as they run; None where a size is dynamic."""
        self.estimated_for: str = "" if rewritten is None else rewritten.estimated_for
        """The device that the estimates are for."""
        self.trains: bool = compiled.trains
        """The graph has a backward."""
        self.cache: str = compiled.cache
        """The use of AOTAutograd's cache: "hit", "miss" (then the cache has it from its first backward on, in inference at
        once), or "bypassed: ..." with the reason."""

    @property
    def speedup(self) -> float | None:
        """Expected speed-up over bfloat16 of its GEMMs together, with their casts: an estimate. None if there is none."""
        return graph_speedup(self.estimates)

    @functools.cached_property
    def before(self) -> fx.GraphModule | None:
        """The joint graph (in inference: the forward graph) as captured."""
        return self._module("before")

    @functools.cached_property
    def after(self) -> fx.GraphModule | None:
        """The joint graph (in inference: the forward graph) rewritten."""
        return self._module("after")

    @functools.cached_property
    def forward(self) -> fx.GraphModule | None:
        """The forward graph that the partitioner produced."""
        return self._module("forward")

    @property
    def backward(self) -> fx.GraphModule | None:
        """The backward graph that the partitioner produced; None in inference."""
        return self._module("backward")

    @functools.cached_property
    def state_inputs(self) -> list[str]:
        """Names of the placeholders of the extra inputs in `before` and `after`, such as the state of delayed scaling."""
        return list(summary_of(self.compiled)[0])

    @property
    def saved_bytes(self) -> int:
        """Bytes that the forward saves for the backward: the memory of those results of the forward graph that are neither
        outputs of the model nor inputs of the graph. 0 in inference."""
        return sum(self.saved_dtypes.values())

    @property
    def saved_bytes_before(self) -> int:
        """`saved_bytes` without `saved_activations`: the same values in high precision. Dynamic sizes count as traced."""
        return self.saved_bytes + sum(
            s.bytes_before - s.bytes_after
            for s in (self.compiled.rewrite.saved if self.compiled.rewrite else ())
            if isinstance(s.bytes_before, int) and isinstance(s.bytes_after, int)
        )

    @functools.cached_property
    def saved_dtypes(self) -> dict[str, int]:
        """`saved_bytes` by dtype, such as {"float8_e4m3fn": 65536, "bfloat16": 32768}, the largest first."""
        return dict(summary_of(self.compiled)[1])

    def _module(self, side: Literal["before", "after", "forward", "backward"]) -> fx.GraphModule | None:
        snapshot = snapshot_of(self.compiled, side)
        if snapshot is None:
            return None
        graph = snapshot.restore()
        for node, name in extra_placeholders(graph.nodes, self.compiled):
            node._rename(name)
            node.target = name
        constants = torch.nn.Module()  # empty ones, so that the copy can be built and printed
        for node in graph.find_nodes(op="get_attr"):
            setattr(constants, str(node.target), None)
        return fx.GraphModule(constants, graph, self.name)


# -- the model


@dataclasses.dataclass(frozen=True, repr=False)
class Inspection:
    """The rewrite of a compiled model as of the call of `inspect`: graphs are compiled at the first calls of the model."""

    gemms: list[GemmRecord]
    """Every matrix multiplication. A graph that was compiled again for other shapes adds only its new ones."""
    graphs: list[GraphRecord]
    """Every compiled graph, in the order of compilation."""
    unmatched_rules: list[str]
    """Patterns of rules without effect so far: they match no GEMM, an earlier rule matches the same ones, or theirs run in high
    precision under any rule, such as those of a module that ran eagerly."""
    outside: list[str] = dataclasses.field(default_factory=list)
    """Linears of the model that no compiled graph has a GEMM of. They have not run so far, or run in high precision, as
    part of another operation or eagerly because of a graph break, such as those between the blocks of FSDP2."""
    ran_eagerly: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Path of each module that ran eagerly in a call, so in high precision -> why; "self" for a call that ran no compiled graph
    at all. Empty, so false, where everything ran compiled. A module that ran compiled in other calls has rows for both.
    `Fp8FallbackWarning` names them when they are found, but for those under `torch.compiler.disable`."""
    rules: tuple[Rule, ...] = dataclasses.field(default=(), repr=False)
    """The rules, in order."""
    libraries: dict[str, str] = dataclasses.field(default_factory=dict)
    """Kind of FP8 GEMM -> the library that computes it, of kinds this process has tried: "DeepGEMM", "cuBLASLt", "CUTLASS",
    or "Triton" where libraries gave wrong results. Per-tensor and rowwise GEMMs are torch's `_scaled_mm`, without a trial."""
    library_remarks: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """The reasons why libraries did not compute kinds of these GEMMs that they were asked for."""
    is_in_place: bool = False
    """The model, or modules of it, are compiled in place: then `model.forward(x)` runs eagerly, in high precision."""
    rule_remarks: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """A remark for each of `unmatched_rules`: why it has no effect, and what to write instead."""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """The other options that decide, as text: "recipe", "select", "min_speedup" and "device", which the estimates are for."""
    parts: tuple[Part, ...] = dataclasses.field(default=(), repr=False)
    """The compiled parts of the model: where the page finds scales and amax histories."""
    released: dict[str, Release] = dataclasses.field(default_factory=dict)
    """With `release_frozen=True`: the name of each frozen weight that GEMMs read in FP8 -> whether its values were freed."""
    matched: tuple[str, ...] = ()
    """Engines that forward operands match: fp8_compile's `match`."""
    eager_calls: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """The paths of parts of which a call ran no graph at all."""
    awaits_rules: bool = dataclasses.field(default=False, repr=False)
    """Other rules, which `use_rules` was given, begin at the next step boundary."""

    @property
    def cache(self) -> dict[str, str]:
        """Name of each graph -> "hit", "miss", or "bypassed: ..." with the reason: whether AOTAutograd's cache had it."""
        return {graph.name: graph.cache for graph in self.graphs}

    def to_dict(self) -> dict[str, Any]:
        """The inspection as plain lists, dicts, strings and numbers."""
        return {
            **self.decisions(),
            "graphs": [
                {
                    "name": g.name,
                    "gemms": len(g.gemms),
                    **{name: getattr(g, name) for name in ("cache", "state_inputs", "speedup")},
                    **{name: getattr(g, name) for name in ("saved_bytes", "saved_bytes_before", "saved_dtypes")},
                    "saved": [_as_dict(s) for s in g.saved],
                    "gathers": [_as_dict(r) for r in g.gathers],
                    "kept": [_as_dict(w) for w in g.kept],
                }
                for g in self.graphs
            ],
            **{name: getattr(self, name) for name in ("speedup", "unmatched_rules", "outside")},
            "released": {
                name: {"bytes": r.bytes, "reason": None if r.reason is None else str(r.reason)}
                for name, r in self.released.items()
            },
            "distrusted": self.distrusted,
            "libraries": self.libraries,
            "ran_eagerly": dict(self.ran_eagerly),
            "rule_remarks": dict(zip(self.unmatched_rules, self.rule_remarks, strict=True)),
        }

    def decisions(self) -> dict[str, Any]:
        """The part of `to_dict()` that two inspections are compared by: each GEMM with the pattern of the rule that decided it,
        the rules, the other options, and the versions of fp8pass, torch and Triton."""
        return {
            "gemms": [
                _as_dict(g) | {"rule": None if (rule := deciding(self.rules, g)) is None else rule.pattern} for g in self.gemms
            ],
            "rules": {rule.pattern: None if rule.recipe is None else _recipe(rule.recipe) for rule in self.rules},
            "options": dict(self.options),
            "versions": self.versions,
        }

    def __str__(self) -> str:
        rows, is_wide = rows_of(self.gemms), terminal_width() >= NARROW
        counts = Counter(row[-1] for row in rows if row[-1])
        below = [reason for reason, count in counts.items() if not is_wide or (count > 2 and len(reason) > REPEATED)]
        numbers = {reason: f"({i})" for i, reason in enumerate(below, 1)}
        rows = [[*row[:-1], numbers.get(row[-1], row[-1])] for row in rows]
        notes = [f"{number} {reason}" for reason, number in numbers.items()]
        return as_text([make_table(COLUMNS, rows) if is_wide else _narrow(rows), *notes, *self.remarks()])

    def __repr__(self) -> str:
        """The table, as a REPL prints it."""
        return str(self).rstrip("\n")

    def __rich__(self) -> Table:
        return make_table(COLUMNS, rows_of(self.gemms))

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        return as_html(COLUMNS, rows_of(self.gemms), self.remarks())

    @property
    def versions(self) -> dict[str, str]:
        """The versions of fp8pass, torch and Triton."""
        import fp8pass

        found = {"fp8pass": fp8pass.__version__, "torch": str(torch.__version__)}
        with contextlib.suppress(metadata.PackageNotFoundError):  # the CPU builds of torch bring none
            found["triton"] = metadata.version("triton")
        return found

    @property
    def distrusted(self) -> list[str]:
        """Kinds of FP8 GEMMs that libraries have, and that gave wrong results when this process tried them. Triton's run
        instead, which are slower."""
        return [kind for kind, library in self.libraries.items() if library == TRITON]

    @property
    def speedup(self) -> float | None:
        """Expected speed-up over bfloat16 of all GEMMs together, an estimate; GEMMs in high precision count as they are. None
        if nothing is compiled, if all sizes are dynamic, or if a GEMM failed its trial (`distrusted`): the estimate is not for
        Triton's."""
        return None if self.distrusted else graph_speedup([e for graph in self.graphs for e in graph.estimates])

    def _speedup_remark(self) -> list[str]:
        if self.distrusted:
            slower = "with Triton's, which run instead, FP8 may be slower than bfloat16"
            return [f"Expected speed-up: unknown. FP8 GEMMs of libraries failed their self-test here; {slower}."]
        if (expected := self.speedup) is None:
            return []
        device = next(g.estimated_for for g in self.graphs if any(g.estimates))  # a graph without GEMMs has no device
        return [f"Expected speed-up of all GEMMs, with their casts: {expected:.2f} (an estimate; {device})."]

    def _eager_remarks(self) -> list[str]:
        lines = []
        if self.graphs and self.eager_calls:
            lines.append("A call ran no compiled graph: torch.compile ran it eagerly, in high precision (Fp8FallbackWarning).")
        if self.graphs and (modules := [path for path in self.ran_eagerly if path not in self.eager_calls]):
            count = counted(len(modules), "module was", "modules were")
            lines.append(f"{count} left out of the compiled graphs in a call or more: {preview(modules)}.")
        return lines

    def to_html(self, path: str | os.PathLike[str], measured: Measurement | None = None) -> None:
        """Write the inspection as one page that any browser opens from disk: it loads nothing else.

        It has a summary, the table of GEMMs to sort and filter, heat maps by layer, the graph of one layer before and after as
        a picture, the bytes of gathers, and current scales and amax histories of delayed scaling. With a monitor it also has
        the SQNR and the underflow of each tensor.

        measured: `latest` of a monitor; by default that of the monitor that watches the model, if there is one.

        Raises ImportError without Jinja2 (`pip install 'fp8pass[html]'`), OSError if `path` cannot be written.
        """
        from fp8pass.tools.page import page

        monitors = (part.session.monitor for part in self.parts)
        measured = measured or next((found for m in monitors if m is not None and (found := m.latest) is not None), None)
        text = page(self, Fp8State(self.parts) if self.parts else None, measured)
        pathlib.Path(path).write_text(text, encoding="utf-8")

    def remarks(self) -> list[str]:
        """The lines below the table, about the model as a whole."""
        quantized = sum(g.quantized for g in self.gemms)
        count = counted(len(self.graphs), "graph", "graphs")
        lines = [*self._speedup_remark(), f"{quantized} of {len(self.gemms)} GEMMs run in FP8, in {count}."]
        if self.eager_calls and not self.graphs:
            lines = ["No compiled graph has run: torch.compile ran the model eagerly, in high precision (Fp8FallbackWarning)."]
        elif not self.graphs:
            lines = ["Nothing is compiled yet: call the compiled model, then backward; the original runs in high precision."]
            if self.is_in_place:
                lines = [
                    "Nothing is compiled yet: call the model once, then its backward.",
                    "It is compiled in place, so call model(x): model.forward(x) runs eagerly, in high precision, and is not"
                    " recorded here.",
                ]
        elif not self.gemms:
            lines = ["No compiled graph has a matmul."]
        lines += _gather_remarks([graph.gathers for graph in self.graphs])
        lines += _saved_remarks(self.graphs)
        lines += _weight_remarks([w for graph in self.graphs for w in graph.kept])
        lines += _release_remarks(self.released)
        if self.graphs and (outside := [path for path in self.outside if path not in self.ran_eagerly]):
            lines.append(f"No GEMM belongs to {preview(outside)}: not run so far, or running in high precision.")
        if self.awaits_rules:
            lines.append("Other rules take effect at the next step boundary (use_rules): the table shows those in force.")
        lines += self._eager_remarks()
        lines += [
            f"{kind}: the library's GEMM failed its self-test, so Triton's runs; no speed-up is known."
            if library == TRITON
            else f"{kind}: {library}'s GEMM runs."
            for kind, library in self.libraries.items()
        ]
        lines += [*_path_remarks(self.gemms), *self.library_remarks, *_shared_remarks(self.gemms)]
        lines += [
            f"match={engine!r}: operands of forward GEMMs in FP8 equal the engine's. Attention, the KV cache, the order of sums"
            f" and GEMMs in high precision may differ."
            for engine in self.matched
        ]
        return [*lines, *self.rule_remarks]


def make_inspection(parts: Sequence[Part], model: object = None, is_in_place: bool = False) -> Inspection:
    """The inspection of a model as of now: of all of its parts that are compiled, together. model: what the paths of the parts
    begin at, if it is an nn.Module. is_in_place: whether only calls of modules run FP8, and not calls of their `forward`."""
    uses: dict[CompiledGraph, list[tuple[Part, Collection[Placement]]]] = {}
    for part in parts:
        for compiled, placements in part.session.graphs.items():
            uses.setdefault(compiled, []).append((part, placements))
    graphs = [GraphRecord(compiled, held, f"graph_{i}") for i, (compiled, held) in enumerate(uses.items())]
    gemms = [_as_it_runs(gemm) for gemm in without_repetition([graph.gemms for graph in graphs])]
    outside = _outside(model, gemms)
    gemms += [row for part in parts for row in eager_records(part, gemms)]
    rules = (rule for part in parts for rule in part.session.rules.rules)
    remarks = _unmatched(parts)
    quantized = [g for g in gemms if g.quantized]
    engines = (getattr(recipe, "match", None) for part in parts for recipe in part.session.rules.recipes)
    eager_calls = {part.outer(ROOT): why for part in parts if (why := part.session.seen.eager_call) is not None}
    return Inspection(
        gemms,
        graphs,
        list(remarks),
        outside,
        ran_eagerly=eager_calls
        | {part.outer(p): r.reason.detail for part in parts for p, r in part.session.eager.found.items()},
        rules=tuple(dict.fromkeys(rules)),
        libraries=_libraries(quantized),
        library_remarks=_library_remarks(quantized),
        is_in_place=is_in_place,
        rule_remarks=tuple(remarks.values()),
        options=_options(parts, next((g.estimated_for for g in graphs if any(g.estimates)), "")),
        parts=tuple(parts),
        released=_released(parts),
        matched=tuple(dict.fromkeys(engine for engine in engines if engine)),
        eager_calls=tuple(part.outer(ROOT) for part in parts if part.session.seen.eager_call is not None),
        awaits_rules=any(part.session.awaits_rules for part in parts),
    )


def _options(parts: Sequence[Part], device: str) -> dict[str, str]:
    """The options besides the rules; parts of a model that were compiled differently have several values."""
    rules = [part.session.rules for part in parts]
    found: dict[str, list[str]] = {
        "recipe": [_recipe(r.default) for r in rules],
        "select": [r.select for r in rules],
        "min_speedup": [str(r.min_speedup) for r in rules],
        "device": [device],
    }
    return {name: ", ".join(dict.fromkeys(values)) for name, values in found.items()}


def _recipe(recipe: object) -> str:
    """A recipe as it is written, without the options that have their defaults."""
    if isinstance(recipe, type) or not dataclasses.is_dataclass(recipe):
        return repr(recipe)
    held = ((f.name, getattr(recipe, f.name)) for f in dataclasses.fields(recipe) if getattr(recipe, f.name) != f.default)
    given = (f"{name}={value.name if isinstance(value, Enum) else repr(value)}" for name, value in held)
    return f"{type(recipe).__name__}({', '.join(given)})"


def _unmatched(parts: Sequence[Part]) -> dict[str, str]:
    """Pattern -> remark, of rules without effect in any part that has them and that has run."""
    remarks: dict[str, str] = {}
    matched: set[str] = set()
    for part in parts:
        rules, gemms = part.session.rules.rules, gemms_of_session(part.session)
        decided: list[Decided] = [*gemms, *saved_of_session(part.session)]
        root = part.session.root()
        none = {rule.pattern: remark_on(rule, rules, decided, root) for rule in unmatched(rules, decided)} if decided else {}
        remarks = {**none, **remarks}
        matched |= {rule.pattern for rule in rules if decided and rule.pattern not in none}
    return {pattern: text for pattern, text in remarks.items() if pattern not in matched}


def _as_it_runs(gemm: GemmRecord) -> GemmRecord:
    """The record without its estimate, if a library's GEMM that the estimate is for failed its trial."""
    return dataclasses.replace(gemm, speedup=None) if gemm.quantized and TRITON in _libraries([gemm]).values() else gemm


def _libraries(quantized: list[GemmRecord]) -> dict[str, str]:
    """The library of each kind of GEMMs that these could be of, by the trials so far."""
    one = {_scales_as_run(g) for g in quantized if g.groups == 1}
    several = {(g.a_scaling, g.b_scaling) for g in quantized if g.groups != 1}
    found = {f"blockwise GEMMs, {kind}": name for kind, name in libraries_of(blockwise.LIBRARIES, one).items()}
    found |= {f"grouped GEMMs, {kind}": name for kind, name in libraries_of(grouped.LIBRARIES, several).items()}
    # Triton's replace blockwise GEMMs that run as those of MXFP8; nothing replaces those of the recipe "mxfp8".
    runs_blocks = any(_scales_as_run(g) != (g.a_scaling, g.b_scaling) for g in quantized)
    mx = libraries_of(_MX_LIBRARIES, one).items()
    found |= {f"MXFP8 GEMMs, {kind}": name for kind, name in mx if name != "triton" or runs_blocks}
    return {kind: _NAMES[name] for kind, name in found.items()}


def _scales_as_run(gemm: GemmRecord) -> tuple[str | None, str | None]:
    """The scales that the operands of a GEMM have where it runs: blocks of 128 may run as blocks of 32."""
    return (_MX, _MX) if gemm.computed_by == GemmPath.BLOCKS_BY_MXFP8.value else (gemm.a_scaling, gemm.b_scaling)


def _library_remarks(quantized: list[GemmRecord]) -> tuple[str, ...]:
    """The reasons why libraries that were asked do not compute kinds of GEMMs that these could be of."""
    found = []
    one = [g for g in quantized if g.groups == 1]
    for word, libraries, records in (
        ("blockwise", blockwise.LIBRARIES, one),
        ("MXFP8", _MX_LIBRARIES, one),
        ("grouped", grouped.LIBRARIES, [g for g in quantized if g.groups != 1]),
    ):
        for kind, reasons in reasons_of(libraries, {_scales_as_run(g) for g in records}).items():
            why = "; ".join(f"not {_NAMES[name]}: {reason}" for name, reason in reasons.items())
            found.append(f"{word} GEMMs, {kind}: {why}.")
    return tuple(found)


def _outside(model: object, gemms: list[GemmRecord]) -> list[str]:
    if not isinstance(model, torch.nn.Module):
        return []
    seen, wrapped = {g.module for g in gemms}, wrapper_paths(model)
    linears = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    names = (without_wrappers(path, wrapped) for path in linears)
    return [name for name in names if name and name not in seen]


def _released(parts: Sequence[Part]) -> dict[str, Release]:
    """The releases of frozen weights, by the names of the model's Parameters, of functions by number."""
    found = {}
    for part in parts:
        root = part.session.root()
        wrapped = frozenset[str]() if root is None else wrapper_paths(root)
        names = {} if root is None else {id(p): without_wrappers(n, wrapped) for n, p in root.named_parameters()}
        for i, (parameter, release) in enumerate(part.session.weights.releases.found.items()):
            found[part.outer(names.get(parameter, f"Parameter {i}"))] = release
    return found


def _as_dict(record: GemmRecord | KeptRecord | GatherRecord | SavedRecord) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name not in ("path", "until_changed")}


# -- remarks


def _path_remarks(gemms: Sequence[GemmRecord]) -> list[str]:
    found = Counter(g.computed_by for g in gemms if g.quantized and g.computed_by in _WITHOUT_LIBRARY)
    place = "On the GPU that speed-ups are estimated for"
    return [f"{place}, {counted(n, 'GEMM is', 'GEMMs are')} computed by {how}." for how, n in found.items()]


def _gather_remarks(graphs: Iterable[list[GatherRecord]]) -> list[str]:
    """The bytes that a rank receives in all-gathers per step, and one line per reason for high precision. A gather that graphs
    have in common, such as that of a Parameter that FSDP2 gathers for each of them, counts once."""
    counts: Counter[GatherRecord] = Counter()
    for records in graphs:
        counts |= Counter(records)
    gathers = list(counts.elements())
    moved = [g for g in gathers if g.quantized]
    lines = []
    if moved:
        before, after = _total(g.bytes_before for g in moved), _total(g.bytes_after for g in moved)
        lines.append(f"{len(moved)} all-gathers send FP8: {after} bytes per rank instead of {before}, each time.")
    for reason, count in Counter(g.reason for g in gathers if g.reason).items():
        lines.append(f"{count} all-gathers send high precision: {reason}.")
    return lines


def _saved_remarks(graphs: Iterable[GraphRecord]) -> list[str]:
    """The bytes that are saved for the backward, with and without FP8, and the largest values that are not in FP8."""
    saving = [graph for graph in graphs if graph.saved]
    if not saving:
        return []
    values = [value for graph in saving for value in graph.saved]
    before, after = sum(g.saved_bytes_before for g in saving), sum(g.saved_bytes for g in saving)
    count = counted(sum(v.quantized for v in values), "value", "values")
    lines = [f"Saved for the backward: {after:,} bytes instead of {before:,}, {count} of {len(values)} in FP8."]
    shared: dict[str, list[str]] = {}
    for module in dict.fromkeys(v.shared_with for v in values if v.shared_with is not None):
        shared.setdefault(family(module), []).append(module)
    if shared:
        lines.append(f"Saved in FP8 copies of {', '.join(map(folded_path, shared.values()))}, which GEMMs read, too.")
    rows = [f"{module} {op}, {shape} {dtype}: {size:,} bytes, {why}" for module, op, shape, dtype, size, why in left(values)]
    return [*lines, *(f"Not in FP8: {row}." for row in rows[:LARGEST])]


LARGEST = 5  # Values that are named in the text, of those that are not saved in FP8.


def left(values: Iterable[SavedRecord]) -> list[tuple[str, str, str, str, int, str]]:
    """The values that are not saved in FP8, equal layers in one row, the largest first, with bytes of all layers and reason."""
    groups: dict[tuple[str, ...], list[SavedRecord]] = {}
    for value in values:
        is_left = not value.quantized and not value.dtype.startswith("float8")
        if is_left and isinstance(value.bytes_after, int) and value.bytes_after:
            key = (family(value.module), value.op, shape_of(value), value.dtype, value.reason or "")
            groups.setdefault(key, []).append(value)
    rows = []
    for (_, op, shape, dtype, reason), same in groups.items():
        size = sum(v.bytes_after for v in same if isinstance(v.bytes_after, int))
        rows.append((folded_path(list(dict.fromkeys(v.module for v in same))), op, shape, dtype, size, reason))
    return sorted(rows, key=lambda row: -row[4])


def shape_of(value: SavedRecord) -> str:
    """Such as "4096 x 128"."""
    return " x ".join(map(str, value.shape))


def _total(sizes: Iterable[int | str]) -> str:
    sizes = list(sizes)
    known = f"{sum(s for s in sizes if isinstance(s, int)):,}"
    return " + ".join([known, *(s for s in sizes if isinstance(s, str))])


def _shared_remarks(gemms: Iterable[GemmRecord]) -> list[str]:
    """The weights that have one scale together: siblings in braces, equal layers once."""
    groups: dict[Siblings, list[str]] = {}
    for gemm in gemms:
        place = place_among_siblings(gemm.module) if gemm.shares_scale else None
        if place is not None and place[1] not in groups.setdefault(place[0], []):
            groups[place[0]].append(place[1])
    counts = Counter(family(f"{before}{{{','.join(names)}}}{behind}") for (before, behind, _), names in groups.items())
    texts = [f"{name} (x{count})" if count > 1 else name for name, count in counts.items()]
    return [f"Weights that share a scale, because the engine fuses them: {', '.join(texts)}."] if texts else []


def _weight_remarks(weights: list[KeptRecord]) -> list[str]:
    """The weights that are quantized once, with the memory of their copies; one line per reason for a cast at each call."""
    kept: dict[bool, dict[object, int]] = {True: {}, False: {}}
    reasons: dict[str, set[object]] = {}
    for weight in weights:
        tensor = weight.module, weight.shape
        if weight.kept:  # graphs share the copies that they have in common
            known = kept[weight.until_changed]
            known[tensor] = max(weight.bytes, known.get(tensor, 0))
        elif weight.reason:
            reasons.setdefault(weight.reason, set()).add(tensor)
    lines = []
    for until_changed, sizes in kept.items():
        count, size = counted(len(sizes), "weight is", "weights are"), f"{sum(sizes.values()):,} bytes of FP8 copies"
        if sizes and until_changed:
            lines.append(
                f"{count} quantized when changed, not at each call: {size} are kept."
                " weight_copies='cache' compares them with their weights at step boundaries."
            )
        elif sizes:
            lines.append(f"{count} read as {size}, kept if the weight is released and made at each call otherwise.")
    every_call = ((counted(len(same), "weight is", "weights are"), reason) for reason, same in reasons.items())
    return [*lines, *(f"{count} quantized at each call: {reason}." for count, reason in every_call)]


def _release_remarks(released: Mapping[str, Release]) -> list[str]:
    """The memory that was given back, and a line per reason why the rest was not."""
    sizes = [r.bytes for r in released.values() if r.reason is None]
    count = counted(len(sizes), "frozen weight is", "frozen weights are")
    lines = [f"{count} released: {sum(sizes):,} bytes of high precision are free."] if sizes else []
    for reason, number in Counter(str(r.reason) for r in released.values() if r.reason is not None).items():
        lines.append(f"{counted(number, 'frozen weight keeps', 'frozen weights keep')} high precision: {reason}.")
    return lines


# -- the table of GEMMs


def rows_of(gemms: Iterable[GemmRecord]) -> list[list[str]]:
    """Table rows. Layers that are equal in all columns and differ in numbers of their paths are folded into one. So are the
    roles of a module that are in high precision for one reason, with the sizes of its first role, and LoRA's adapters."""
    rows: dict[tuple[Any, ...], list[GemmRecord]] = {}
    for g in gemms:
        formats = f"{g.a_format} x {g.b_format}" if g.quantized else "high precision"
        shape = "" if _is_folded_adapter(g) else shape_text(g.m, g.n, g.k, g.groups)
        key = (_folded(g), g.role, shape, g.recipe if g.quantized else None, formats, g.reason)
        rows.setdefault(key, []).append(g)
    folded: dict[tuple[Any, ...], tuple[list[str], list[GemmRecord]]] = {}
    for (name, role, shape, recipe, formats, reason), same in rows.items():
        modules = tuple(sorted(g.module for g in same)) if shape else name
        alike = (modules, reason) if reason else (name, role, shape, recipe, formats)
        folded.setdefault((alike, recipe, formats), ([], same))[0].append(role)
    found = []
    for (_, recipe, formats), (roles, same) in folded.items():
        is_adapter = _is_folded_adapter(same[0])
        path = f"{_folded(same[0])} (x{len(same)})" if is_adapter else folded_path([g.module for g in same])
        role = "all" if set(roles) == set(ROLES) else ", ".join(dict.fromkeys(roles))
        shape = shape_text(*(_range([getattr(g, name) for g in same]) for name in ("m", "n", "k", "groups")))
        found.append([path, role, shape, recipe or "-", formats, _speedups(same), same[0].reason or ""])
    return found


def _is_folded_adapter(gemm: GemmRecord) -> bool:
    """True for adapters in high precision: those of all layers share a row, whatever their sizes."""
    return ADAPTER in gemm.module and not gemm.quantized


def _folded(gemm: GemmRecord) -> str:
    """The path without what differs between the layers of a row: their numbers; of an adapter, the layer that it adapts."""
    return f"*{gemm.module[gemm.module.index(ADAPTER) :]}" if _is_folded_adapter(gemm) else family(gemm.module)


def _range(sizes: Sequence[int | str]) -> int | str:
    """The one size of several layers, or the least and the greatest."""
    numbers = [size for size in sizes if isinstance(size, int)]
    return sizes[0] if len(set(sizes)) == 1 else f"{min(numbers)}-{max(numbers)}" if len(numbers) == len(sizes) else "?"


def _speedups(gemms: list[GemmRecord]) -> str:
    """The expected speed-up, or the range of it: equal layers may share their casts with different GEMMs."""
    known = sorted({f"{g.speedup:.2f}" for g in gemms if g.speedup is not None})
    return "-" if not known else known[0] if len(known) == 1 else f"{known[0]}-{known[-1]}"


def _narrow(rows: Iterable[list[str]]) -> Table:
    """The table without a frame, with short cells: paths, roles and formats are folded, a note stands for high precision."""
    columns = {c.replace(" x ", "x"): {"no_wrap": c not in ("module", "role", "formats")} for c in COLUMNS[:-1]}
    cells = [
        (module, role, shape.replace(" x ", "x"), recipe, "-" if note else formats.replace(" x ", "x"), speedup, note)
        for module, role, shape, recipe, formats, speedup, note in rows
    ]
    return make_table({**columns, "why": {"no_wrap": True, "overflow": "ellipsis"}}, cells, is_plain=True)
