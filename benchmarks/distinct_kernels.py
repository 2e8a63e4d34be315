"""Distinct kernels that Inductor generates for an H200 for stacks of Llama blocks: what has to be compiled. Any CPU.

The stacks are those of `benchmarks.compile_time`. "launches" are all besides GEMMs and attention, those of hand-written kernels
among them: they grow with the layers, distinct kernels should not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from benchmarks.common import Result, main, require
from benchmarks.compile_time import TINY
from benchmarks.contestants import RECIPES, contestants
from benchmarks.isolation import Attempts
from tests.support.distinct_kernels import distinct, reports_of_stack

LAYERS = (2, 8, 24)


def _row(layers: int, name: str, compile_model: Callable[[nn.Module], Any], checks: list[str]) -> dict[str, Any]:
    dim, ffn, tokens = TINY
    forward, backward = reports_of_stack(compile_model, layers, (dim, ffn, dim // 64, tokens))
    kernels = [kernel for graph in (forward, backward) for kernel in graph.kernels]
    gemms = [kernel.name for kernel in kernels if kernel.is_gemm and "attention" not in kernel.name]
    in_fp8 = sum("scaled_mm" in gemm for gemm in gemms)
    expected = 0 if name == "bf16" else 21 * layers
    text = f"{layers} layers, {name}: {len(gemms)} GEMMs in both graphs, {in_fp8} in FP8"
    require((len(gemms), in_fp8) == (21 * layers, expected), text, checks)
    counts = {"forward": distinct(forward.code), "backward": distinct(backward.code)}
    launches = sum(not kernel.is_gemm for kernel in kernels)
    return {"what": f"{layers} layers {name}", **counts, "kernels": sum(counts.values()), "launches": launches}


def _rows(layers: int, recipes: tuple[str, ...], checks: list[str], attempts: Attempts) -> Iterator[dict[str, Any]]:
    base = None
    for name, compile_model in contestants(recipes, with_peers=False).items():
        row = attempts(f"{layers} layers {name}", functools.partial(_row, layers, name, compile_model, checks))
        if row is not None:
            base = row["kernels"] if name == "bf16" else base
            yield row if base is None else {**row, "kernels / bf16": row["kernels"] / base}


def run(quick: bool) -> Result:
    """`quick`: 2 and 3 layers, bf16 and delayed scaling alone."""
    checks: list[str] = []
    attempts = Attempts()
    layers, recipes = ((2, 3), ("delayed",)) if quick else (LAYERS, RECIPES)
    rows = (row for count in layers for row in _rows(count, recipes, checks, attempts))
    notes = [f"layers are of dim, ffn, tokens {TINY}; hand-written kernels are launches, but no distinct kernels"]
    return Result(rows, "bf16", checks, attempts, notes)


if __name__ == "__main__":
    main("distinct_kernels", run)
