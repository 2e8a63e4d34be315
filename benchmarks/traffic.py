"""Bytes and kernels besides GEMMs of a Llama block's training step, in Inductor's code for an H200 and, where a recipe has
other code there, for other GPUs. Runs on any CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from benchmarks.common import Result, main, require
from benchmarks.contestants import RECIPES, contestants, steady
from benchmarks.cross_codegen import H200, H200_CUDA_12_8, RTX_4090, RTX_5090
from benchmarks.isolation import Attempts
from fp8pass import fp8_compile, monitor
from tests.support.traffic import TOKENS, megabytes, step_of, traffic_of, traffic_of_recipe

#: From MANY_ROWS on, copies of weights are recomputed in backward by default.
MANY_ROWS = 4096
#: What a measured step may move, of what others move.
MEASURED_STEP = 1.3

#: What runs other code elsewhere, by name: a recipe and a GPU. Other pairs have the H200's figures (tests/test_traffic.py).
OTHER_GPUS = {
    "rowwise, CUDA 12.8": ("rowwise", H200_CUDA_12_8),
    "rowwise, RTX 4090": ("rowwise", RTX_4090),
    "blockwise, RTX 5090": ("blockwise", RTX_5090),
}


def _contestants(tokens: int, quick: bool) -> Iterator[tuple[str, Callable[[nn.Module], Any], Any]]:
    """Each with its GPU."""
    for name, compile_model in contestants(RECIPES, with_peers=not quick).items():
        yield name, compile_model, H200
    if tokens == TOKENS and not quick:
        for name, (recipe, gpu) in OTHER_GPUS.items():
            yield name, lambda model, recipe=recipe: fp8_compile(model, steady(recipe)), gpu


def _rows(tokens: int, quick: bool, checks: list[str], attempts: Attempts) -> Iterator[dict[str, Any]]:
    base = None
    for name, compile_model, gpu in _contestants(tokens, quick):

        def row(name: str = name, compile_model: Callable[[nn.Module], Any] = compile_model, gpu: Any = gpu) -> dict[str, Any]:
            step = step_of(compile_model, tokens, gpu)
            require(step.gemms >= 21, f"{name}, {tokens} rows: {step.gemms} GEMMs and attention kernels in both graphs", checks)
            figures = {"MB": step.megabytes, "kernels": step.launches, "GEMMs": step.gemms}
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
