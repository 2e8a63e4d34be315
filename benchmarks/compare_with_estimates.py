"""Measured figures beside the estimates that were made without a GPU, for the GPU that they were measured on."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Collection
from typing import Any

from benchmarks import h100_model
from benchmarks.common import RESULTS
from fp8pass.cost import Device

#: Share of the estimate that a cast may miss: the model adds up limits whose overlap it does not know.
_CAST_SLACK = 0.9
#: Share by which a copy may differ from what the estimates assume.
_COPY_SLACK = 0.1


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A measured figure and its estimate. More is better."""

    what: str
    measured: float
    low: float
    high: float

    @property
    def passes(self) -> bool:
        """True if it reaches the lower estimate."""
        return self.measured >= self.low


def _rows(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def _estimates(name: str) -> dict[str, dict[str, Any]]:
    """The rows that were made with the newest Triton."""
    paths = sorted(RESULTS.glob(f"{name}-triton-*.json"))
    return _rows(paths[-1]) if paths else {}


@dataclasses.dataclass(frozen=True)
class Machine:
    """The GPU that something was measured on, as far as the results know it."""

    device: Device | None
    """Its constants, which the estimates are made of; None for a GPU that there are no estimates for."""
    name: str
    copy_bandwidth: float | None
    """Bytes per second of a plain copy, as measured."""

    @property
    def obstacle(self) -> str | None:
        """Why no estimate is for this machine, or None."""
        if self.device is None:
            return f"there are no estimates for the {self.name}"
        if self.copy_bandwidth is None:
            return None
        expected = self.device.memory_bandwidth
        if abs(self.copy_bandwidth / expected - 1) <= _COPY_SLACK:
            return None
        return (
            f"it copies at {self.copy_bandwidth / 1e12:.2f} TB/s, and the estimates are for a {self.device.name}"
            f" that copies at {expected / 1e12:.2f}"
        )


def machine_of(out: pathlib.Path) -> Machine | None:
    """The machine whose results are in a folder; None if none are. The copy is part 0's, or the fastest beside a cast."""
    records = [json.loads(path.read_text()) for path in sorted(out.glob("*-gpu.json"))]
    lines = [json.loads(line) for line in _lines(out / "part0.jsonl")]
    names = [record["machine"]["device"] for record in [*records, *lines] if "machine" in record]
    if not names:
        return None
    copies = [1e12 * line["TB/s"] for line in lines if line.get("case") == "copy" and "TB/s" in line]
    copies = copies or [
        max((1e9 * row["copy GB/s"] for row in _rows(out / "casts-gpu.json").values() if "copy GB/s" in row), default=0)
    ]
    device = next((device for label, device in h100_model.DEVICES.items() if label in names[0]), None)
    return Machine(device, names[0], copies[0] or None)


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def verdicts(out: pathlib.Path, names: Collection[str]) -> tuple[list[Verdict], list[str]]:
    """Every figure that has an estimate, of those that these benchmarks wrote into a folder; and what has no verdict, with the
    reason: estimates are for H100 and H200, and hold where a copy is as fast as they assume."""
    makers = {"gemm_layer": _layer, "train_step": _block, "casts": _casts}
    wanted = [name for name in makers if name in names]
    machine = machine_of(out)
    if machine is None or not wanted:
        return [], []
    found: list[Verdict] = []
    unjudged: list[str] = []
    for name in wanted:
        reason = _no_copy(machine) if name == "casts" else machine.obstacle
        if reason is None:
            found += makers[name](out, machine)
        else:
            unjudged.append(f"{name}: {reason}")
    return found, unjudged


def _no_copy(machine: Machine) -> str | None:
    """Casts are compared with the copy of the machine itself, whatever it is called."""
    return None if machine.copy_bandwidth else f"no copy was measured on the {machine.name}"


def _layer(out: pathlib.Path, machine: Machine) -> list[Verdict]:
    measured = _rows(out / "gemm_layer-gpu.json").get("speed-up", {})
    return _speedups("12 GEMMs", "12 GEMMs", machine, lambda recipe: measured.get(f"{recipe} ms"))


def _block(out: pathlib.Path, machine: Machine) -> list[Verdict]:
    measured = _rows(out / "train_step-gpu.json")

    def speedup(recipe: str) -> float | None:
        return measured.get(f"8B 16384 {recipe}", {}).get("speed-up")

    return _speedups("8B block", "the 8B block", machine, speedup)


def _speedups(workload: str, title: str, machine: Machine, measured: Callable[[str], float | None]) -> list[Verdict]:
    """The speed-up of every recipe that was estimated for this GPU and measured."""
    found = []
    estimates = _estimates("layer_cost")
    label = next(label for label, device in h100_model.DEVICES.items() if device is machine.device)
    of_another = "" if label == "H200" else f", {label}"
    for what, row in estimates.items():
        recipe = what.removeprefix(f"{workload} ").removesuffix(of_another)
        is_of_device = what == f"{workload} {recipe}{of_another}"
        value = None if recipe == "bf16" or not is_of_device else measured(recipe)
        if value is not None and "speed-up, low" in row:
            found.append(Verdict(f"speed-up of {title}, {recipe}", value, row["speed-up, low"], row["speed-up, high"]))
    return found


def _casts(out: pathlib.Path, machine: Machine) -> list[Verdict]:
    assert machine.copy_bandwidth is not None
    measured = [row for row in _rows(out / "casts-gpu.json").items() if "of copy" in row[1]]
    found = []
    for what, row in _estimates("kernel_cost").items():
        of_copy = [r["of copy"] for name, r in measured if name.rpartition(" ")[0] == what and r["one kernel"] == "yes"]
        if of_copy:
            share = share_of_copy(row, machine.copy_bandwidth)
            found.append(Verdict(f"share of copy speed, {what}", max(of_copy), _CAST_SLACK * share, share))
    return found


def share_of_copy(row: dict[str, Any], bandwidth: float) -> float:
    """The share that a row of `benchmarks.kernel_cost`, made for an H200, says of a GPU that copies at another speed."""
    programs = row["programs / SM"]
    warps = row["warps / SM"] // programs
    loaded = row["KB in flight"] * 1024 / programs
    program = h100_model.Program(row["registers"], round(row["shared KB"] * 1024), warps, row["executed"], loaded, 0)
    moved = h100_model.issue_clocks(program) / row["issue / memory"] / h100_model.memory_clocks(1)
    return h100_model.share_of_copy(dataclasses.replace(program, store_bytes=moved - loaded), bandwidth)
