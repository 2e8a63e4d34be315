"""Bytes and kernels besides GEMMs of Qwen3-30B-A3B's experts in a training step, in Inductor's code for an H200. Any CPU.

transformers' own code: 128 experts of 2048 x 768, 8 per token. "weights" are the kernels that read the experts' weights: their
bytes do not grow with the tokens, and with expert parallelism a rank holds a share of the experts and as many rows.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.common import Result, SkipBenchmark, has_torchao, main, require
from fp8pass import fp8_compile
from tests.support.moe_traffic import Traffic, reports_of, torchao_rowwise, traffic_of
from tests.support.traffic import steady

#: Rows per expert are TOKENS / 16 on average.
TOKENS = 32768
RECIPES = ("delayed", "current", "rowwise", "blockwise")


def _ours(recipe: str) -> Callable[[nn.Module], Any]:
    return lambda model: fp8_compile(model, steady(recipe))


def _row(name: str, found: Traffic, base: Traffic) -> dict[str, Any]:
    return {
        "what": name,
        "MB": found.num_bytes / 1e6,
        "MB weights": found.weight_bytes / 1e6,
        "kernels": found.kernels,
        "GEMMs": found.gemms,
        "MB / bf16": found.num_bytes / base.num_bytes,
        "without weights / bf16": found.other_bytes / base.other_bytes,
    }


def _rows(quick: bool, checks: list[str]) -> Iterator[dict[str, Any]]:
    tokens = 1024 if quick else TOKENS
    contestants: dict[str, Callable[[nn.Module], Any]] = {"bf16": torch.compile}
    contestants |= {recipe: _ours(recipe) for recipe in RECIPES[: 1 if quick else None]}
    if has_torchao() and not quick:
        contestants["torchao rowwise"] = torch.compile
    base = None
    for name, compile_model in contestants.items():
        with torchao_rowwise() if name.startswith("torchao") else contextlib.nullcontext():
            found = traffic_of(reports_of(compile_model, tokens))
        base = base or found
        require(found.gemms == base.gemms, f"{name}: {found.gemms} GEMMs, as many as bf16's", checks)
        yield _row(name, found, base)


def run(quick: bool) -> Result:
    """`quick`: fewer tokens, bf16 and delayed scaling alone."""
    if importlib.util.find_spec("transformers") is None:
        raise SkipBenchmark("needs transformers")
    checks: list[str] = []
    notes = [f"{1024 if quick else TOKENS} tokens, {(1024 if quick else TOKENS) // 16} rows per expert on average"]
    notes.append("torchao's groups must be multiples of 16, which is not counted; a two-pass kernel counts what it reads once")
    return Result(_rows(quick, checks), "bf16", checks, notes)


if __name__ == "__main__":
    main("moe_traffic", run)
