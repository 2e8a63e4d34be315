"""Bytes and kernels besides GEMMs of a Llama block's training step, in Inductor's code for an H200. Runs on any CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import Result, main, require
from benchmarks.peers import RECIPES, contestants
from tests.support.traffic import TOKENS, elementwise_kernels, megabytes, traffic_of

#: From MANY_ROWS on, copies of weights are recomputed in backward by default.
MANY_ROWS = 4096


def _rows(tokens: int, quick: bool, checks: list[str], notes: list[str]) -> Iterator[dict[str, Any]]:
    base = None
    for name, compile_model in contestants(RECIPES).items():
        if quick and name.startswith("torchao"):
            continue
        try:
            reports = traffic_of(compile_model, tokens)
        except Exception as error:
            if not name.startswith("torchao"):
                raise
            notes.append(f"{name} failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        gemms = sum(k.is_gemm for r in reports for k in r.kernels)
        require(gemms >= 21, f"{name}, {tokens} rows: {gemms} GEMMs and attention kernels in both graphs", checks)
        kernels = len(elementwise_kernels(reports))
        moved = megabytes(reports)
        base = base or moved
        row = {"what": name, "rows": tokens, "MB": moved, "kernels": kernels, "GEMMs": gemms}
        yield row | {"MB / bf16": moved / base}


def run(quick: bool) -> Result:
    """`quick` leaves other projects and the larger size out."""
    checks: list[str] = []
    notes = ["an operation of ours counts as one kernel; some launch a second, small one"]
    sizes = (TOKENS,) if quick else (TOKENS, MANY_ROWS)
    rows = (row for tokens in sizes for row in _rows(tokens, quick, checks, notes))
    return Result(rows, "bf16", checks, notes)


if __name__ == "__main__":
    main("traffic", run)
