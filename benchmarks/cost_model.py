"""The cost model against published measurements: how often it names the faster one, and how far off its speed-ups are."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.common import Result, main
from benchmarks.isolation import Attempts
from fp8pass.cost import H100, H200, Gemm, gemm_seconds
from tests.support import published_speedups as published

_NOTES = [
    "columns 4 to 6: expected / published",
    "the H100's rates and GEMM latencies come from the square GEMMs, so their rows show the shape of the curve only",
    "torchao's rows: casts at bandwidths reported for Inductor's kernels on torchao's machine, which in row-wise scaling are"
    " far below the H100's own constants, those of hand-written casts (tests/support/published_speedups.py)",
]


def _rows(attempts: Attempts) -> Iterator[dict[str, Any]]:
    te_layer = functools.partial(published.expected_te_layer, device=H200)
    tables: tuple[tuple[str, dict[Any, float], Callable[..., float]], ...] = (
        ("torchao tensor-wise, M = K = N", published.TORCHAO_TENSOR_WISE, published.expected_tensor_wise),
        ("torchao row-wise", published.TORCHAO_ROW_WISE, published.expected_row_wise),
        ("TransformerEngine, layer on an H200", published.TE_LAYER, te_layer),
    )
    for what, table, expected in tables:
        row = attempts(what, functools.partial(_row, what, table, expected))
        if row is not None:
            yield row
    for i, (kind, fast) in enumerate((("bf16", True), ("tensor_wise", True), ("tensor_wise", False))):
        what = f"torchao square GEMMs, {kind}{'' if fast else ', accurate'}: seconds"
        spread = attempts(what, functools.partial(_square_gemms, i, kind, fast))
        if spread is not None:
            yield {"what": what, **spread}


def _square_gemms(column: int, kind: str, fast: bool) -> dict[str, float]:
    """Expected seconds over measured ones."""
    seconds = {
        size: gemm_seconds(Gemm(m=size, n=size, k=size), H100, kind, fast_accum=fast) for size in published.TORCHAO_GEMMS
    }
    return _spread([value / (1e-6 * published.TORCHAO_GEMMS[size][column]) for size, value in seconds.items() if value])


def run(quick: bool) -> Result:
    """`quick` changes nothing: no GPU is needed."""
    attempts = Attempts()
    checks = ["nothing is timed: figures of a model"]
    return Result(_rows(attempts), "the published figure", checks, attempts, _NOTES)


def _row(what: str, table: dict[Any, float], expected: Any) -> dict[str, Any]:
    def call(cell: Any) -> float:
        return expected(*cell) if isinstance(cell, tuple) else expected(cell)

    clear = {cell: speedup for cell, speedup in table.items() if not 0.95 <= speedup <= 1.05}
    right = sum((call(cell) > 1) == (speedup > 1) for cell, speedup in clear.items())
    return {"what": what, "clear cells": len(clear), "same verdict": right} | _spread([call(c) / s for c, s in table.items()])


def _spread(ratios: list[float]) -> dict[str, float]:
    ratios = sorted(ratios)
    at = (len(ratios) - 1) / 20
    return {"5 %": ratios[round(at)], "median": statistics.median(ratios), "95 %": ratios[round(19 * at)]}


if __name__ == "__main__":
    main("cost_model", run)
