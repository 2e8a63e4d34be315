"""The cost model against published measurements: how often it names the faster one, and how far off its speed-ups are."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common import Result, main
from fp8pass.cost import H100, H200, Gemm, gemm_seconds
from tests.support import published_speedups as published

_NOTES = [
    "columns 4 to 6: expected / published",
    "the H100's rates and GEMM latencies come from the square GEMMs, so their rows show the shape of the curve only",
    "torchao's rows: casts at bandwidths reported for Inductor's kernels on torchao's machine, which in row-wise scaling are"
    " far below the H100's own constants, those of hand-written casts (tests/support/published_speedups.py)",
]


def run(quick: bool) -> Result:
    """`quick` changes nothing: no GPU is needed."""
    rows = [
        _row("torchao tensor-wise, M = K = N", published.TORCHAO_TENSOR_WISE, published.expected_tensor_wise),
        _row("torchao row-wise", published.TORCHAO_ROW_WISE, published.expected_row_wise),
        _row(
            "TransformerEngine, layer on an H200", published.TE_LAYER, lambda recipe: published.expected_te_layer(recipe, H200)
        ),
    ]
    kinds = (("bf16", True), ("tensor_wise", True), ("tensor_wise", False))
    for i, (kind, fast) in enumerate(kinds):
        ratios = [
            gemm_seconds(Gemm(m=size, n=size, k=size), H100, kind, fast_accum=fast) / (1e-6 * times[i])
            for size, times in published.TORCHAO_GEMMS.items()
        ]
        rows.append({"what": f"torchao square GEMMs, {kind}{'' if fast else ', accurate'}: seconds"} | _spread(ratios))
    return Result(rows, "the published figure", ["nothing is timed: figures of a model"], _NOTES)


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
