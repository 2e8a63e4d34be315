"""Records of what a session has compiled, by the paths of the user's modules, for every instance that a graph serves."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from fp8pass.rewrite.report import GatherRecord, GemmRecord, KeptRecord
from fp8pass.rewrite.runner import Rewrite
from fp8pass.rewrite.saved import SavedRecord
from fp8pass.runtime.instances import Placement
from fp8pass.runtime.session import Part, Session

Uses = Sequence[tuple[Part, Collection[Placement]]]  # The parts of a model that run a graph, with places of instances.
Placeable = TypeVar("Placeable", GemmRecord, GatherRecord, SavedRecord, KeptRecord)


def placed(records: Iterable[Placeable], uses: Uses) -> list[Placeable]:
    """The records of a graph, by the paths of every module instance that it serves."""
    return [
        dataclasses.replace(record, module=part.outer(placement.name_module(record.path)))
        for part, placements in uses
        for placement in placements
        for record in records
    ]


def gemms_of_session(session: Session) -> list[GemmRecord]:
    """The matmuls of all graphs of a session, by their paths in its own model."""
    gemms = without_repetition([placed(made.gemms, uses) for made, uses in _rewritten(session)])
    return [*gemms, *eager_records(Part(session), gemms)]


def saved_of_session(session: Session) -> list[SavedRecord]:
    """The values that all graphs of a session save with `saved_activations`, by their paths in its own model."""
    return [record for made, uses in _rewritten(session) for record in placed(made.saved, uses)]


def _rewritten(session: Session) -> list[tuple[Rewrite, Uses]]:
    graphs, part = session.graphs.items(), Part(session)
    return [(graph.rewrite, [(part, placements)]) for graph, placements in graphs if graph.rewrite is not None]


def placed_gathers(records: Sequence[GatherRecord], uses: Uses) -> list[GatherRecord]:
    """The gathers in a graph, once, and those of Parameters before it, for every instance it serves."""
    before = placed([g for g in records if g.path is not None], uses)
    return [g for g in records if g.path is None] + [dataclasses.replace(g, tensor=f"{g.module}:weight") for g in before]


def without_repetition(graphs: Sequence[list[GemmRecord]]) -> list[GemmRecord]:
    """The GEMMs of all graphs; a graph compiled again (other shapes, evaluation) adds only what is new in it, and takes the
    place of one that had no rows."""
    seen: Counter[tuple[object, ...]] = Counter()
    kept: list[GemmRecord] = []
    for gemms in graphs:
        here: Counter[tuple[object, ...]] = Counter()
        for g in gemms:
            key = (g.module, g.role, g.quantized, g.recipe, g.is_empty)
            here[key] += 1
            if here[key] > seen[key]:
                kept.append(g)
        seen |= here
    known = {(g.module, g.role) for g in kept if not g.is_empty}
    return [g for g in kept if not (g.is_empty and (g.module, g.role) in known)]


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
                source=run.source or source,
                op="linear",
            )
        )
    return found
