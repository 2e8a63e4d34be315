"""Measured figures beside what the cost model of `fp8pass` expects of the GPU that they were measured on."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from benchmarks.gemm_layer import LINEARS, TOKENS
from benchmarks.models import LlamaBlock
from benchmarks.train_step import BLOCKS, sequences
from fp8pass import estimate
from fp8pass.cost import Device, device_named

#: Share of an estimate that a figure has to reach: norms, activations and gaps between kernels are not in it.
SLACK = 0.9
#: Share by which a copy may differ from what the estimates assume.
_COPY_SLACK = 0.1


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A measured figure and its estimate. More is better."""

    what: str
    measured: float
    expected: float

    @property
    def passes(self) -> bool:
        return self.measured >= SLACK * self.expected


def _rows(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def verdicts(out: pathlib.Path, names: Collection[str]) -> tuple[list[Verdict], list[str]]:
    """Every figure with an estimate, of those that these benchmarks wrote into a folder; and what has no verdict, with the
    reason. Speed-ups are compared where a copy is as fast as the estimates assume, casts with the machine's own copy."""
    lines = [json.loads(line) for path in out.glob("part0.jsonl") for line in path.read_text().splitlines()]
    records = [json.loads(path.read_text()) for path in sorted(out.glob("*-gpu.json"))]
    machines = [record["machine"]["device"] for record in [*records, *lines] if "machine" in record]
    if not machines:
        return [], []
    device = device_named(machines[0], (0, 0))
    casts = {what: row for what, row in _rows(out / "casts-gpu.json").items() if "of copy" in row}
    copies = [line["TB/s"] for line in lines if line.get("case") == "copy" and "TB/s" in line]
    copy = max(copies or [row["copy GB/s"] / 1e3 for row in casts.values()], default=None)
    found, unjudged = [], []
    if "casts" in names:
        for what, row in casts.items():
            if row["one kernel"] == "yes":
                found.append(Verdict(f"share of copy speed, {what}", row["of copy"], share_of_copy(row, device)))
    reason = _obstacle(machines[0], device, copy)
    for name, measure in (("gemm_layer", _layer), ("train_step", _block)):
        if name in names and reason is None:
            found += measure(out, device)
        elif name in names:
            unjudged.append(f"{name}: {reason}")
    return found, unjudged


def _obstacle(name: str, device: Device, copy: float | None) -> str | None:
    """Why no estimate is for this machine, or None. copy: TB/s of a plain copy on it, if that was measured."""
    if device.note:
        return f"there are no estimates for the {name}"
    expected = device.memory_bandwidth / 1e12
    if copy is None or abs(copy / expected - 1) <= _COPY_SLACK:
        return None
    return f"it copies at {copy:.2f} TB/s, and the estimates are for a {device.name} that copies at {expected:.2f}"


def share_of_copy(row: dict[str, Any], device: Device) -> float:
    """The share of a plain copy's speed that a cast of `benchmarks.casts` should reach."""
    return device.transpose_bandwidth / device.memory_bandwidth if row["transposes"] == "yes" else 1.0


def _layer(out: pathlib.Path, device: Device) -> list[Verdict]:
    measured = _rows(out / "gemm_layer-gpu.json").get("speed-up", {})
    with torch.device("meta"):
        linears = [nn.Linear(*sizes, bias=False, dtype=torch.bfloat16) for sizes in LINEARS.values()]
        models = [(linear, torch.empty(TOKENS, linear.in_features, dtype=torch.bfloat16)) for linear in linears]
    found = {recipe: measured[f"{recipe} ms"] for recipe in _RECIPES if f"{recipe} ms" in measured}
    return [Verdict(f"speed-up of 12 GEMMs, {r}", value, expected_speedup(models, r, device)) for r, value in found.items()]


def _block(out: pathlib.Path, device: Device) -> list[Verdict]:
    rows, (dim, ffn, heads, kv_heads) = _rows(out / "train_step-gpu.json"), BLOCKS["8B"]
    with torch.device("meta"):
        model = LlamaBlock(dim, ffn, heads, kv_heads).bfloat16()
        models = [(model, torch.empty(*sequences(16384), dim, dtype=torch.bfloat16))]
    measured = {recipe: rows.get(f"8B 16384 {recipe}", {}).get("speed-up") for recipe in _RECIPES}
    found = {recipe: value for recipe, value in measured.items() if value is not None}
    return [Verdict(f"speed-up of the 8B block, {r}", value, expected_speedup(models, r, device)) for r, value in found.items()]


_RECIPES = ("delayed", "current", "blockwise", "rowwise")


def expected_speedup(models: list[tuple[nn.Module, torch.Tensor]], recipe: str, device: Device) -> float:
    """The speed-up of the GEMMs and the attention of training steps of all models together. Inputs get gradients, too."""
    bf16 = fp8 = 0.0
    for model, x in models:
        found = estimate(model, x.requires_grad_(), device=device, recipe=recipe).recipes[recipe]
        known = [gemm.expected for gemm in found.gemms if gemm.expected is not None]
        bf16 += found.attention_seconds + sum(gemm.bf16_seconds for gemm in known)
        fp8 += found.attention_seconds + sum(gemm.fp8_seconds for gemm in known)
    return bf16 / fp8
