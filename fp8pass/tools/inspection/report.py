"""The inspection of a compiled model: the records of all its graphs, and what to remark about them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from fp8pass.cost import graph_speedup
from fp8pass.errors import preview
from fp8pass.graph.names import family
from fp8pass.rewrite.fused import Place, place_of
from fp8pass.rewrite.report import GatherRecord, GemmRecord, KeptRecord
from fp8pass.rules import Rule, Rules
from fp8pass.runtime.instances import ROOT, without_wrappers, wrapper_paths
from fp8pass.runtime.parts import Part
from fp8pass.runtime.records import eager_records, gemms_of_session, without_repetition
from fp8pass.runtime.session import CompiledGraph, GraphUse
from fp8pass.runtime.warn import deciding, remark_on, unmatched
from fp8pass.scales.view import Fp8State
from fp8pass.tools.inspection import table
from fp8pass.tools.inspection.graphs import GraphRecord
from fp8pass.tools.monitoring.measurement import Measurement
from fp8pass.weights.releases import Release
from lowering.blockwise import gemm as blockwise
from lowering.grouped import gemm as grouped
from lowering.mxfp8 import gemm as mxfp8
from lowering.paths import GemmPath
from lowering.trials import libraries_of, reasons_of

if TYPE_CHECKING:
    from rich.table import Table

#: Whose GEMM runs where no library's is trusted, which is slower.
TRITON = "Triton"
_NAMES = {"deep_gemm": "DeepGEMM", "cublaslt": "cuBLASLt", "cutlass": "CUTLASS", "triton": TRITON}


@dataclasses.dataclass(frozen=True, repr=False)
class Inspection:
    """What the pass did to a compiled model, as far as it has been compiled: graphs are compiled at the first calls."""

    gemms: list[GemmRecord]
    """Every matrix multiplication. A graph that was compiled again for other shapes adds only what is new in it."""
    graphs: list[GraphRecord]
    """Every compiled graph, in the order of compilation."""
    unmatched_rules: list[str]
    """Patterns of rules that have decided no GEMM so far: they match none, or an earlier rule matches the same ones."""
    outside: list[str] = dataclasses.field(default_factory=list)
    """Linears of the model that no compiled graph has a GEMM of: they have not run so far, or run in high precision, as
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
    """Why libraries did not compute kinds of these GEMMs that they were asked for."""
    is_in_place: bool = False
    """Whether the model, or modules of it, are compiled in place: then `model.forward(x)` runs eagerly, in high precision."""
    rule_remarks: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """For each of `unmatched_rules` why it has decided nothing, and what to write instead."""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """What else decides, as text: "recipe", "select" and "min_speedup", and "device", which the estimates are for."""
    parts: tuple[Part, ...] = dataclasses.field(default=(), repr=False)
    """What was compiled of the model: where the page finds scales and amax histories."""

    released: dict[str, Release] = dataclasses.field(default_factory=dict)
    """With `release_frozen=True`: the name of each frozen weight that GEMMs read in FP8 -> what became of its values."""
    matched: tuple[str, ...] = ()
    """Engines that forward operands match: fp8_compile's `match`."""

    def to_dict(self) -> dict[str, Any]:
        """The inspection as plain lists, dicts, strings and numbers."""
        return {
            **self.decisions(),
            "graphs": [
                {
                    "name": g.name,
                    "gemms": len(g.gemms),
                    "state_inputs": g.state_inputs,
                    "saved_bytes": g.saved_bytes,
                    "speedup": g.speedup,
                    "gathers": [_as_dict(r) for r in g.gathers],
                    "kept": [_as_dict(w) for w in g.kept],
                }
                for g in self.graphs
            ],
            "speedup": self.speedup,
            "unmatched_rules": self.unmatched_rules,
            "outside": self.outside,
            "released": {name: _of_release(r) for name, r in self.released.items()},
            "distrusted": self.distrusted,
            "libraries": self.libraries,
            "ran_eagerly": dict(self.ran_eagerly),
        }

    def decisions(self) -> dict[str, Any]:
        """The part of `to_dict()` that two inspections are compared by: each GEMM with the pattern of the rule that decided it,
        the rules, the other options, and the versions of fp8pass, torch and Triton."""
        return {
            "gemms": [_as_dict(g) | {"rule": _pattern(deciding(self.rules, g))} for g in self.gemms],
            "rules": {rule.pattern: None if rule.recipe is None else _recipe(rule.recipe) for rule in self.rules},
            "options": dict(self.options),
            "versions": self.versions,
        }

    def __str__(self) -> str:
        return table.as_text(self.gemms, self.remarks())

    def __repr__(self) -> str:
        """The table, as a REPL prints it."""
        return str(self).rstrip("\n")

    def __rich__(self) -> Table:
        return table.as_rich(self.gemms)

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        return table.as_html(self.gemms, self.remarks())

    @property
    def versions(self) -> dict[str, str]:
        """Of fp8pass, torch and Triton."""
        return _versions()

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
        expected = self.speedup
        if self.distrusted:
            slower = "with Triton's, which run instead, FP8 may be slower than bfloat16"
            return [
                f"Expected speed-up: unknown. FP8 GEMMs of libraries gave wrong results when they were tried here; {slower}."
            ]
        if expected is None:
            return []
        return [f"Expected speed-up of all GEMMs, with their casts: {expected:.2f} (an estimate; {self._estimated_for()})."]

    @property
    def _eager_calls(self) -> list[str]:
        """The parts of which a call ran no graph at all."""
        return [part.outer(ROOT) for part in self.parts if part.session.eager_call is not None]

    def _eager_remarks(self) -> list[str]:
        lines = []
        if self.graphs and self._eager_calls:
            lines.append("A call ran no compiled graph: torch.compile ran it eagerly, in high precision (Fp8FallbackWarning).")
        if self.graphs and (modules := [path for path in self.ran_eagerly if path not in self._eager_calls]):
            what = "module was" if len(modules) == 1 else "modules were"
            lines.append(f"{len(modules)} {what} left out of the compiled graphs in a call or more: {preview(modules)}.")
        return lines

    def _estimated_for(self) -> str:
        """The device of the first graph that has an estimate: one without GEMMs has no device."""
        return next(g.estimated_for for g in self.graphs if any(g.estimates))

    def to_html(self, path: str | os.PathLike[str], measured: Measurement | None = None) -> None:
        """Write the inspection as one page that any browser opens from disk: it loads nothing else.

        It has a summary, the table of GEMMs to sort and filter, heat maps by layer, the graph of one layer before and after as
        a picture, what gathers send, and the scales and amax histories of delayed scaling as they are now. With a monitor it
        also has the SQNR and the underflow of each tensor.

        measured: `latest` of a monitor; by default that of the monitor that watches the model, if there is one.

        Raises ImportError without Jinja2 (`pip install 'fp8pass[html]'`), OSError if `path` cannot be written.
        """
        from fp8pass.tools.inspection.html import write_page

        watching = (part.session.monitor for part in self.parts)
        measured = measured or next((found for m in watching if m is not None and (found := m.latest) is not None), None)
        write_page(self, path, Fp8State(self.parts) if self.parts else None, measured)

    def remarks(self) -> list[str]:
        """What stands below the table: about the model as a whole."""
        quantized = sum(g.quantized for g in self.gemms)
        count = "1 graph" if len(self.graphs) == 1 else f"{len(self.graphs)} graphs"
        lines = [*self._speedup_remark(), f"{quantized} of {len(self.gemms)} GEMMs run in FP8, in {count}."]
        if self._eager_calls and not self.graphs:
            lines = ["No compiled graph has run: torch.compile ran the model eagerly, in high precision (Fp8FallbackWarning)."]
        elif not self.graphs:
            lines = ["Nothing is compiled yet: call the compiled model, then backward; the original runs in high precision."]
            if self.is_in_place:
                lines = [
                    "Nothing is compiled yet: call the model once, then its backward.",
                    "It is compiled in place, so call model(x): model.forward(x) runs eagerly, in high precision, and leaves no"
                    " trace here.",
                ]
        elif not self.gemms:
            lines = ["No compiled graph has a matmul."]
        lines += _gather_remarks([graph.gathers for graph in self.graphs])
        lines += _weight_remarks([w for graph in self.graphs for w in graph.kept])
        lines += _release_remarks(self.released)
        if self.graphs and (outside := [path for path in self.outside if path not in self.ran_eagerly]):
            lines.append(f"No GEMM belongs to {preview(outside)}: not run so far, or running in high precision.")
        if any(part.session.awaits_rules for part in self.parts):
            lines.append("Other rules take effect at the next step boundary (use_rules): the table shows those in force.")
        lines += self._eager_remarks()
        lines += [
            f"{kind}: the library's GEMM gave wrong results when it was tried here, so Triton's runs; no speed-up is known."
            if library == TRITON
            else f"{kind}: {library}'s GEMM runs."
            for kind, library in self.libraries.items()
        ]
        lines += [*_path_remarks(self.gemms), *self.library_remarks]
        lines += _shared_remarks(self.gemms)
        lines += [
            f"match={engine!r}: operands of forward GEMMs in FP8 equal the engine's. Attention, the KV cache, the order of sums"
            f" and GEMMs in high precision may differ."
            for engine in self.matched
        ]
        lines += self.rule_remarks
        return lines


def make_inspection(parts: Sequence[Part], model: object = None, is_in_place: bool = False) -> Inspection:
    """The inspection of a model as of now: of all of its parts that are compiled, together.

    model: what the paths of the parts begin at, if it is an nn.Module. is_in_place: whether only calls of modules run FP8, and
    not calls of their `forward`.
    """
    uses: dict[CompiledGraph, list[tuple[Part, GraphUse]]] = {}
    for part in parts:
        for use in part.session.uses.values():
            uses.setdefault(use.compiled, []).append((part, use))
    graphs = [GraphRecord(held, f"graph_{i}") for i, held in enumerate(uses.values())]
    gemms = [_as_it_runs(gemm) for gemm in without_repetition([graph.gemms for graph in graphs])]
    outside = _outside(model, gemms)
    gemms += [row for part in parts for row in eager_records(part, gemms)]
    rules = (rule for part in parts for rule in part.session.rules.rules)
    remarks = _unmatched(parts)
    return Inspection(
        gemms,
        graphs,
        list(remarks),
        outside,
        _ran_eagerly(parts),
        tuple(dict.fromkeys(rules)),
        _libraries([g for g in gemms if g.quantized]),
        _library_remarks([g for g in gemms if g.quantized]),
        is_in_place,
        tuple(remarks.values()),
        _options([part.session.rules for part in parts], next((g.estimated_for for g in graphs if any(g.estimates)), "")),
        tuple(parts),
        released=_released(parts),
        matched=tuple(
            dict.fromkeys(e for part in parts for r in part.session.rules.recipes if (e := getattr(r, "match", None)))
        ),
    )


def _ran_eagerly(parts: Sequence[Part]) -> dict[str, str]:
    calls = {part.outer(ROOT): why for part in parts if (why := part.session.eager_call) is not None}
    return calls | {part.outer(p): run.reason.detail for part in parts for p, run in part.session.eager.found.items()}


def _options(rules: Sequence[Rules], device: str) -> dict[str, str]:
    """What decides besides the rules; parts of a model that were compiled differently have several values."""
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
    held = ((f.name, getattr(recipe, f.name), f.default) for f in dataclasses.fields(recipe))
    given = (
        f"{name}={value.name if isinstance(value, Enum) else repr(value)}" for name, value, usual in held if value != usual
    )
    return f"{type(recipe).__name__}({', '.join(given)})"


def _versions() -> dict[str, str]:
    import fp8pass

    found = {"fp8pass": fp8pass.__version__, "torch": str(torch.__version__)}
    with contextlib.suppress(metadata.PackageNotFoundError):  # the CPU builds of torch bring none
        found["triton"] = metadata.version("triton")
    return found


def _pattern(rule: Rule | None) -> str | None:
    return None if rule is None else rule.pattern


def _unmatched(parts: Sequence[Part]) -> dict[str, str]:
    """Pattern -> remark, of rules that have decided nothing in any part that has them and that has run."""
    remarks: dict[str, str] = {}
    matched: set[str] = set()
    for part in parts:
        rules, gemms = part.session.rules.rules, gemms_of_session(part.session)
        left = {rule.pattern: remark_on(rule, rules, gemms) for rule in unmatched(rules, gemms)} if gemms else {}
        remarks = {**left, **remarks}
        matched |= {rule.pattern for rule in rules if gemms and rule.pattern not in left}
    return {pattern: text for pattern, text in remarks.items() if pattern not in matched}


def _as_it_runs(gemm: GemmRecord) -> GemmRecord:
    """The record without its estimate, if a library's GEMM that the estimate is for failed its trial."""
    return dataclasses.replace(gemm, speedup=None) if gemm.quantized and TRITON in _libraries([gemm]).values() else gemm


def _libraries(quantized: list[GemmRecord]) -> dict[str, str]:
    """Who computes the kinds of GEMMs that these could be of, by the trials so far."""
    one = {(g.a_scaling, g.b_scaling) for g in quantized if g.groups == 1}
    several = {(g.a_scaling, g.b_scaling) for g in quantized if g.groups != 1}
    found = {f"blockwise GEMMs, {kind}": name for kind, name in libraries_of(blockwise.LIBRARIES, one).items()}
    found |= {f"grouped GEMMs, {kind}": name for kind, name in libraries_of(grouped.LIBRARIES, several).items()}
    found |= {f"MXFP8 GEMMs, {kind}": name for kind, name in libraries_of({"cublaslt": mxfp8}, one).items()}
    return {kind: _NAMES[name] for kind, name in found.items()}


#: Where no library computes a GEMM as it is.
_WITHOUT_LIBRARY = {path.value for path in GemmPath if path.name.endswith(("_AFTERWARDS", "_BY_TRITON", "_BY_MXFP8"))}


def _path_remarks(gemms: Sequence[GemmRecord]) -> list[str]:
    found = Counter(g.computed_by for g in gemms if g.quantized and g.computed_by in _WITHOUT_LIBRARY)
    return [f"{'1 GEMM' if n == 1 else f'{n} GEMMs'} by {how}, on the device of the estimate." for how, n in found.items()]


def _library_remarks(quantized: list[GemmRecord]) -> tuple[str, ...]:
    """Why libraries do not compute kinds of GEMMs that these could be of, where they were asked."""
    found = []
    for word, libraries, records in (
        ("blockwise", blockwise.LIBRARIES, [g for g in quantized if g.groups == 1]),
        ("grouped", grouped.LIBRARIES, [g for g in quantized if g.groups != 1]),
    ):
        for kind, reasons in reasons_of(libraries, {(g.a_scaling, g.b_scaling) for g in records}).items():
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


def _as_dict(record: GemmRecord | KeptRecord | GatherRecord) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name not in ("path", "until_changed")}


def _gather_remarks(graphs: Iterable[list[GatherRecord]]) -> list[str]:
    """What travels in all-gathers, in bytes that a rank receives per step; one line per reason for high precision. What graphs
    have in common, such as a Parameter that FSDP2 gathers for each of them, counts once."""
    counts: Counter[GatherRecord] = Counter()
    for records in graphs:
        counts |= Counter(records)
    gathers = list(counts.elements())
    moved = [g for g in gathers if g.quantized]
    lines = []
    if moved:
        before, after = _total(g.bytes_before for g in moved), _total(g.bytes_after for g in moved)
        lines.append(f"{len(moved)} all-gathers send FP8: {after} bytes on the wire instead of {before}.")
    for reason, count in Counter(g.reason for g in gathers if g.reason).items():
        lines.append(f"{count} all-gathers send high precision: {reason}.")
    return lines


def _shared_remarks(gemms: Iterable[GemmRecord]) -> list[str]:
    """Which weights have one scale together: siblings in braces, equal layers once."""
    groups: dict[Place, list[str]] = {}
    for gemm in gemms:
        place = place_of(gemm.module) if gemm.shares_scale else None
        if place is not None and place.name not in groups.setdefault(place.siblings, []):
            groups[place.siblings].append(place.name)
    counts = Counter(family(place.named("{" + ",".join(names) + "}")) for place, names in groups.items())
    texts = [f"{name} (x{count})" if count > 1 else name for name, count in counts.items()]
    return [f"One scale together, as the engine fuses them, have the weights of {', '.join(texts)}."] if texts else []


def _weight_remarks(weights: list[KeptRecord]) -> list[str]:
    """Which weights are quantized once, with the memory of their copies; one line per reason for a cast at each call."""
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
        if not sizes:
            continue
        count = "1 weight is" if len(sizes) == 1 else f"{len(sizes)} weights are"
        size = f"{sum(sizes.values()):,} bytes of FP8 copies"
        if until_changed:
            lines.append(
                f"{count} quantized when changed, not at each call: {size} are kept."
                " weight_copies='cache' compares them with their weights at step boundaries."
            )
        else:
            lines.append(f"{count} read as {size}: kept where a weight was released, made at each call where not.")
    for reason, same in reasons.items():
        count = "1 weight is" if len(same) == 1 else f"{len(same)} weights are"
        lines.append(f"{count} quantized at each call: {reason}.")
    return lines


def _of_release(release: Release) -> dict[str, Any]:
    return {"bytes": release.bytes, "reason": None if release.reason is None else str(release.reason)}


def _released(parts: Sequence[Part]) -> dict[str, Release]:
    """What became of frozen weights, by the names of the model's Parameters, of functions by number."""
    found = {}
    for part in parts:
        root = part.session.root()
        wrapped = frozenset[str]() if root is None else wrapper_paths(root)
        names = {} if root is None else {id(p): without_wrappers(n, wrapped) for n, p in root.named_parameters()}
        for i, (parameter, release) in enumerate(part.session.weights.releases.found.items()):
            found[part.outer(names.get(parameter, f"Parameter {i}"))] = release
    return found


def _release_remarks(released: Mapping[str, Release]) -> list[str]:
    """How much was given back, and a line per reason why the rest was not."""
    sizes = [r.bytes for r in released.values() if r.reason is None]
    lines = []
    if sizes:
        count = "1 frozen weight has" if len(sizes) == 1 else f"{len(sizes)} frozen weights have"
        lines.append(f"{count} given {sum(sizes):,} bytes of high precision back.")
    for reason, number in Counter(str(r.reason) for r in released.values() if r.reason is not None).items():
        lines.append(f"{number} frozen {'weight keeps' if number == 1 else 'weights keep'} high precision: {reason}.")
    return lines


def _total(sizes: Iterable[int | str]) -> str:
    sizes = list(sizes)
    known = f"{sum(s for s in sizes if isinstance(s, int)):,}"
    return " + ".join([known, *(s for s in sizes if isinstance(s, str))])
