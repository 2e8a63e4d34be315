"""Measured figures beside the estimates that were made without a GPU."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Collection
from typing import Any

from benchmarks.common import RESULTS

#: The Triton of the GPU machine, whose cubins the estimates were made from; the newest that there is otherwise.
_PREFERRED = "triton-3.6.0"
#: Share of the estimate that a cast may miss: the model adds up limits whose overlap it does not know.
_CAST_SLACK = 0.9


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A measured figure and its estimate. More is better."""

    what: str
    measured: float
    low: float
    high: float

    @property
    def passes(self) -> bool:
        """Whether it reaches the lower estimate."""
        return self.measured >= self.low


def _rows(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def _estimates(name: str) -> dict[str, dict[str, Any]]:
    paths = sorted(RESULTS.glob(f"{name}-triton-*.json"), key=lambda path: _PREFERRED in path.name)
    return _rows(paths[-1]) if paths else {}


def verdicts(out: pathlib.Path, names: Collection[str]) -> list[Verdict]:
    """Every figure that has an estimate, of those that these benchmarks wrote into a folder."""
    makers = {"gemm_layer": _layer, "train_step": _block, "casts": _casts}
    return [verdict for name, make in makers.items() if name in names for verdict in make(out)]


def _layer(out: pathlib.Path) -> list[Verdict]:
    measured = _rows(out / "gemm_layer-gpu.json").get("speed-up", {})
    return _speedups("12 GEMMs", "12 GEMMs", lambda recipe: measured.get(f"{recipe} ms"))


def _block(out: pathlib.Path) -> list[Verdict]:
    measured = _rows(out / "train_step-gpu.json")
    return _speedups("8B block", "the 8B block", lambda recipe: measured.get(f"8B 16384 {recipe}", {}).get("speed-up"))


def _speedups(workload: str, title: str, measured: Callable[[str], float | None]) -> list[Verdict]:
    """The speed-up of every recipe that was estimated and measured."""
    found = []
    for what, row in _estimates("layer_cost").items():
        recipe = what.removeprefix(f"{workload} ")
        value = None if recipe in (what, "bf16") else measured(recipe)
        if value is not None:
            found.append(Verdict(f"speed-up of {title}, {recipe}", value, row["speed-up, low"], row["speed-up, high"]))
    return found


def _casts(out: pathlib.Path) -> list[Verdict]:
    measured = _rows(out / "casts-gpu.json")
    found = []
    for what, row in _estimates("kernel_cost").items():
        of_copy = [r["of copy"] for name, r in measured.items() if name.rpartition(" ")[0] == what and r["one kernel"] == "yes"]
        if of_copy:
            share = row["share of copy"]
            found.append(Verdict(f"share of copy speed, {what}", max(of_copy), _CAST_SLACK * share, share))
    return found
