"""Distinct kernels that Inductor generates for an H200 for stacks of Llama blocks: what has to be compiled. Any CPU.

The stacks are those of `benchmarks.compile_time`. "launches" are all besides GEMMs and attention, those of hand-written kernels
among them: they grow with the layers, distinct kernels should not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import Result, main, require
from benchmarks.compile_time import TINY
from benchmarks.peers import RECIPES, contestants
from tests.support.distinct_kernels import distinct, reports_of_stack

LAYERS = (2, 8, 24)


def _rows(layers: int, recipes: tuple[str, ...], checks: list[str]) -> Iterator[dict[str, Any]]:
    dim, ffn, tokens = TINY
    base = None
    for name, compile_model in contestants(recipes, with_peers=False).items():
        forward, backward = reports_of_stack(compile_model, layers, (dim, ffn, dim // 64, tokens))
        kernels = [kernel for graph in (forward, backward) for kernel in graph.kernels]
        gemms = [kernel.name for kernel in kernels if kernel.is_gemm and "attention" not in kernel.name]
        in_fp8 = sum("scaled_mm" in gemm for gemm in gemms)
        expected = 0 if name == "bf16" else 21 * layers
        text = f"{layers} layers, {name}: {len(gemms)} GEMMs in both graphs, {in_fp8} in FP8"
        require((len(gemms), in_fp8) == (21 * layers, expected), text, checks)
        counts = {"forward": distinct(forward.code), "backward": distinct(backward.code)}
        total = sum(counts.values())
        base = base or total
        launches = sum(not kernel.is_gemm for kernel in kernels)
        yield {
            "what": f"{layers} layers {name}",
            **counts,
            "kernels": total,
            "kernels / bf16": total / base,
            "launches": launches,
        }


def run(quick: bool) -> Result:
    """`quick`: 2 and 3 layers, bf16 and delayed scaling alone."""
    checks: list[str] = []
    layers, recipes = ((2, 3), ("delayed",)) if quick else (LAYERS, RECIPES)
    rows = (row for count in layers for row in _rows(count, recipes, checks))
    notes = [f"layers are of dim, ffn, tokens {TINY}; hand-written kernels are launches, but no distinct kernels"]
    return Result(rows, "bf16", checks, notes)


if __name__ == "__main__":
    main("distinct_kernels", run)
