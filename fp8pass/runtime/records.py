"""Records of what a session has compiled, by the paths of the user's modules, for every instance that a graph serves."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from fp8pass.rewrite.report import GatherRecord, GemmRecord, KeptRecord
from fp8pass.rewrite.saved import SavedRecord
from fp8pass.runtime.instances import Placement
from fp8pass.runtime.session import CompiledGraph, Part, Session


def gemms_of_session(session: Session) -> list[GemmRecord]:
    """The matmuls of all graphs of a session, by their paths in its own model."""
    gemms = without_repetition([gemms_of(*use, Part(session)) for use in session.graphs.items()])
    return [*gemms, *eager_records(Part(session), gemms)]


def gemms_of(graph: CompiledGraph, placements: Sequence[Placement], part: Part) -> list[GemmRecord]:
    """The matmuls of a graph, for every instance that it serves in a part of the model."""
    gemms = graph.rewrite.gemms if graph.rewrite else []
    return [dataclasses.replace(g, module=part.outer(p.name_module(g.path))) for p in placements for g in gemms]


def saved_of(graph: CompiledGraph, placements: Sequence[Placement], part: Part) -> list[SavedRecord]:
    """The values that a graph saves, with `saved_activations`, for every instance that it serves in a part of the model."""
    saved = graph.rewrite.saved if graph.rewrite else []
    return [dataclasses.replace(s, module=part.outer(p.name_module(s.path))) for p in placements for s in saved]


def saved_of_session(session: Session) -> list[SavedRecord]:
    """The values that all graphs of a session save, by their paths in its own model."""
    return [record for use in session.graphs.items() for record in saved_of(*use, Part(session))]


def gathers_of(graph: CompiledGraph, uses: Sequence[tuple[Part, Sequence[Placement]]]) -> list[GatherRecord]:
    """The gathers of a graph once; those before it of the Parameters of every instance that it serves."""
    records = graph.rewrite.gathers if graph.rewrite else []
    placed = [
        dataclasses.replace(g, module=name, tensor=f"{name}:weight")
        for part, placements in uses
        for p in placements
        for g in records
        if g.path is not None
        for name in (part.outer(p.name_module(g.path)),)
    ]
    return [g for g in records if g.path is None] + placed


def kept_of(graph: CompiledGraph, placements: Sequence[Placement], part: Part) -> list[KeptRecord]:
    """The weights of a graph whose copies may be kept, for every instance that it serves in a part of the model."""
    weights = graph.rewrite.kept if graph.rewrite else []
    return [dataclasses.replace(w, module=part.outer(p.name_module(w.path))) for p in placements for w in weights]


def without_repetition(graphs: Sequence[list[GemmRecord]]) -> list[GemmRecord]:
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


def eager_records(part: Part, known: Sequence[GemmRecord] = ()) -> list[GemmRecord]:
    """A row per GEMM of a part that ran eagerly, by the module's path in the whole model. known: the records of its graphs,
    which have the sizes of those that ran compiled before."""
    sizes = {gemm.module: gemm for gemm in reversed(known) if gemm.role == "output"}
    found = []
    for path, run in part.session.eager.found.items():
        if not run.is_gemm:
            continue
        module = part.outer(path)
        same = sizes.get(module)
        m, n, k, source = (run.m, run.n, run.k, run.source) if same is None else (same.m, same.n, same.k, same.source)
        found.append(
            GemmRecord(
                module=module,
                role="output",
                m=m,
                n=n,
                k=k,
                groups=1,
                quantized=False,
                reason=str(run.reason),
                recipe=None,
                a_format=None,
                b_format=None,
                a_scaling=None,
                b_scaling=None,
                speedup=None,
                source=run.source or source,
                op="linear",
                path=None,
            )
        )
    return found
