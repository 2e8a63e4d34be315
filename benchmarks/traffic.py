"""Bytes and kernels besides GEMMs of a Llama block's training step, in Inductor's code for an H200. Runs on any CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from benchmarks.attempts import Attempts
from benchmarks.common import Result, main, require
from benchmarks.peers import RECIPES, contestants
from tests.support.traffic import TOKENS, launches_of, megabytes

#: From MANY_ROWS on, copies of weights are recomputed in backward by default.
MANY_ROWS = 4096


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


def run(quick: bool) -> Result:
    """`quick` leaves other projects and the larger size out."""
    checks: list[str] = []
    attempts = Attempts()
    sizes = (TOKENS,) if quick else (TOKENS, MANY_ROWS)
    rows = (row for tokens in sizes for row in _rows(tokens, quick, checks, attempts))
    return Result(rows, "bf16", checks, attempts, ["kernels: every launch besides GEMMs and attention, on a GPU"])


if __name__ == "__main__":
    main("traffic", run)
