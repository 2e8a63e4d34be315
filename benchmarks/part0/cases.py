"""Cases of part 0: a name, a function, and what it found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.common import Run, device
from benchmarks.isolation import Bench, Row

Found = dict[str, Any]


class SkipCase(Exception):
    """This machine cannot run a case; the text says what is missing."""


class Case(NamedTuple):
    """Something that is right or wrong by itself."""

    name: str
    run: Callable[[], Found]
    """Raises where it is wrong; AssertionError for wrong numbers. Returns figures with the unit in the key."""


def within(error: float, bound: float) -> Found:
    """The gate of what need not be equal bit for bit; NaN is not within."""
    if not error <= bound:
        raise AssertionError(f"relative error {error:.2e} > {bound:g}")
    return {"error": error}


def skip_if(reason: str | None) -> None:
    """Leave a case out for a reason, if there is one."""
    if reason is not None:
        raise SkipCase(reason)


def as_benchmark(cases: Callable[[torch.device], Iterable[Case]]) -> Run:
    """A benchmark with a row per case. The name of each is printed when it begins: of one that hangs, it is the last one."""

    def row(case: Case) -> Row:
        print(case.name, flush=True)
        start = time.perf_counter()
        try:
            found = case.run()
        except SkipCase as skipped:
            found = {"skipped": str(skipped)}
        return {"what": case.name, **found, "seconds": round(time.perf_counter() - start, 3)}

    def run(bench: Bench) -> Iterator[Row]:
        bench.baseline = "references in high precision"
        torch.manual_seed(0)
        for case in cases(device(bench.quick)):
            yield from bench.row(case.name, row, case)

    return run
