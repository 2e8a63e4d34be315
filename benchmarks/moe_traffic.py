"""Bytes and kernels besides GEMMs of Qwen3-30B-A3B's experts in a training step, in Inductor's code for an H200. Any CPU.

transformers' own code: 128 experts of 2048 x 768, 8 per token. "weights" are the kernels that read the experts' weights: their
bytes do not grow with the tokens, and with expert parallelism a rank holds a share of the experts and as many rows.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.common import Result, SkipBenchmark, has_torchao, main, require
from benchmarks.contestants import steady
from benchmarks.isolation import Attempts
from benchmarks.traffic import MEASURED_STEP
from fp8pass import fp8_compile, monitor
from tests.support.moe_traffic import Traffic, reports_of, torchao_rowwise, traffic_of

#: Rows per expert are TOKENS / 16 on average.
TOKENS = 32768
#: Three grouped GEMMs of two batches of weights each way; the router's three run too.
GEMMS = 9
RECIPES = ("delayed", "current", "rowwise", "blockwise")


def _ours(recipe: str) -> Callable[[nn.Module], Any]:
    return lambda model: fp8_compile(model, steady(recipe))


def _row(name: str, found: Traffic, base: Traffic | None) -> dict[str, Any]:
    row = {
        "what": name,
        "MB": found.num_bytes / 1e6,
        "MB weights": found.weight_bytes / 1e6,
        "kernels": found.kernels,
        "GEMMs": found.gemms,
    }
    if base is None:
        return row
    ratios = {"MB / bf16": found.num_bytes / base.num_bytes, "without weights / bf16": found.other_bytes / base.other_bytes}
    return row | ratios


def _measured_rows(checks: list[str], attempts: Attempts) -> Iterator[dict[str, Any]]:
    """Steps that a monitor measures. MXFP8's grouped GEMMs have no kernel yet; its casts are counted."""
    for recipe in (*RECIPES, "mxfp8"):

        def row(recipe: str = recipe) -> dict[str, Any]:
            usual = traffic_of(reports_of(_ours(recipe), TOKENS)).num_bytes
            moved = traffic_of(reports_of(lambda model: _monitored(model, recipe), TOKENS)).num_bytes
            require(moved <= MEASURED_STEP * usual, f"{recipe}, a measured step: {moved / usual:.2f} of other steps", checks)
            return {"what": f"{recipe}, a measured step", "MB": moved / 1e6, "MB / other steps": moved / usual}

        found = attempts(f"{recipe}, a measured step", row)
        if found is not None:
            yield found


def _monitored(model: nn.Module, recipe: str) -> Any:
    compiled = _ours(recipe)(model)
    monitor(compiled, every=1)
    return compiled


def _rows(quick: bool, checks: list[str], attempts: Attempts) -> Iterator[dict[str, Any]]:
    tokens = 1024 if quick else TOKENS
    contestants: dict[str, Callable[[nn.Module], Any]] = {"bf16": torch.compile}
    contestants |= {recipe: _ours(recipe) for recipe in RECIPES[: 1 if quick else None]}
    if has_torchao() and not quick:
        contestants["torchao rowwise"] = torch.compile
    base: Traffic | None = None
    for name, compile_model in contestants.items():

        def traffic(name: str = name, compile_model: Callable[[nn.Module], Any] = compile_model) -> Traffic:
            with torchao_rowwise() if name.startswith("torchao") else contextlib.nullcontext():
                found = traffic_of(reports_of(compile_model, tokens))
            require(found.gemms == GEMMS, f"{name}: {found.gemms} GEMMs", checks)
            return found

        found = attempts(name, traffic)
        if found is not None:
            base = found if name == "bf16" else base
            yield _row(name, found, base)


def run(quick: bool) -> Result:
    """`quick`: fewer tokens, bf16 and delayed scaling alone, no measured steps."""
    if importlib.util.find_spec("transformers") is None:
        raise SkipBenchmark("needs transformers")
    checks: list[str] = []
    attempts = Attempts()
    notes = [f"{1024 if quick else TOKENS} tokens, {(1024 if quick else TOKENS) // 16} rows per expert on average"]
    notes.append("torchao's groups must be multiples of 16, which is not counted; a two-pass kernel counts what it reads once")
    rows = _rows(quick, checks, attempts)
    rows = rows if quick else itertools.chain(rows, _measured_rows(checks, attempts))
    return Result(rows, "bf16", checks, attempts, notes)


if __name__ == "__main__":
    main("moe_traffic", run)
