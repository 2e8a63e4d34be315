"""Bytes of weights that a Llama block moves in a microbatch and in an evaluation, in Inductor's code for an H200."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import Result, main, require
from benchmarks.contestants import RECIPES, steady
from benchmarks.isolation import Attempts
from tests.support.traffic import evaluation, llama_block, microbatches

MICROBATCHES = 8


def _rows(quick: bool, checks: list[str], attempts: Attempts) -> Iterator[dict[str, Any]]:
    parameters = sum(p.numel() for p in llama_block().parameters() if p.dim() == 2)
    for name in ("current",) if quick else RECIPES:
        for copies in ("auto", "cache"):

            def row(name: str = name, copies: str = copies) -> dict[str, Any]:
                one, outside, compared = microbatches(steady(name), copies, MICROBATCHES)
                require((copies == "cache") == (outside == 7), f"{name}, {copies}: casts outside of graphs", checks)
                require((copies == "cache") == (compared > 0), f"{name}, {copies}: content is compared", checks)
                found = evaluation(steady(name), copies)
                return {
                    "what": f"{name}, {copies}",
                    "casts, MB per microbatch": one.casts / 1e6,
                    "weights cast outside, per step": outside,
                    "a comparison of content, bytes per parameter": compared / parameters,
                    # Each GEMM reads its copy once, also one that the graph makes, which is none of its inputs.
                    "evaluation, bytes per parameter": found.casts / parameters + 1,
                }

            result = attempts(f"{name}, {copies}", row)
            if result is not None:
                yield result


def run(quick: bool) -> Result:
    """`quick`: one recipe."""
    checks: list[str] = []
    attempts = Attempts()
    notes = [f"a step has {MICROBATCHES} microbatches of 2048 tokens; casts: kernels that read a weight, with what they write"]
    return Result(_rows(quick, checks, attempts), "auto", checks, attempts, notes)


if __name__ == "__main__":
    main("weight_traffic", run)
