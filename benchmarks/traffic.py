"""Bytes and kernels besides GEMMs of a Llama block's training step, in Inductor's code for an H200. Runs on any CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from benchmarks.attempts import Attempts
from benchmarks.common import Result, main, require
from benchmarks.peers import RECIPES, contestants
from fp8pass import fp8_compile, monitor
from tests.support.traffic import TOKENS, launches_of, megabytes, steady, traffic_of, traffic_of_recipe

#: From MANY_ROWS on, copies of weights are recomputed in backward by default.
MANY_ROWS = 4096
#: What a measured step may move, of what others move.
MEASURED_STEP = 1.3


def _rows(tokens: int, quick: bool, checks: list[str], attempts: Attempts) -> Iterator[dict[str, Any]]:
    base = None
    for name, compile_model in contestants(RECIPES, with_peers=not quick).items():

        def row(name: str = name, compile_model: Callable[[nn.Module], Any] = compile_model) -> dict[str, Any]:
            reports, launches = launches_of(compile_model, tokens)
            gemms = sum(k.is_gemm for r in reports for k in r.kernels)
            require(gemms >= 21, f"{name}, {tokens} rows: {gemms} GEMMs and attention kernels in both graphs", checks)
            figures = {"MB": megabytes(reports), "kernels": launches, "GEMMs": gemms}
            return {"what": f"{name}, {tokens} rows", **figures}

        found = attempts(f"{name}, {tokens} rows", row)
        if found is not None:
            base = found["MB"] if name == "bf16" else base
            yield found if base is None else {**found, "MB / bf16": found["MB"] / base}


def _measured_rows(checks: list[str], attempts: Attempts) -> Iterator[dict[str, Any]]:
    """Steps that a monitor measures."""
    for recipe in RECIPES:

        def row(recipe: str = recipe) -> dict[str, Any]:
            reports = traffic_of(lambda model: _monitored(model, recipe))
            moved, usual = megabytes(reports), megabytes(traffic_of_recipe(recipe))
            require(moved <= MEASURED_STEP * usual, f"{recipe}, a measured step: {moved / usual:.2f} of other steps", checks)
            return {"what": f"{recipe}, a measured step, {TOKENS} rows", "MB": moved, "MB / other steps": moved / usual}

        found = attempts(f"{recipe}, a measured step", row)
        if found is not None:
            yield found


def _monitored(model: nn.Module, recipe: str) -> Any:
    compiled = fp8_compile(model, steady(recipe))
    monitor(compiled, every=1)
    return compiled


def run(quick: bool) -> Result:
    """`quick` leaves other projects, the larger size and measured steps out."""
    checks: list[str] = []
    attempts = Attempts()
    sizes = (TOKENS,) if quick else (TOKENS, MANY_ROWS)
    steps = (row for tokens in sizes for row in _rows(tokens, quick, checks, attempts))
    rows = steps if quick else itertools.chain(steps, _measured_rows(checks, attempts))
    return Result(rows, "bf16", checks, attempts, ["kernels: every launch besides GEMMs and attention, on a GPU"])


if __name__ == "__main__":
    main("traffic", run)
