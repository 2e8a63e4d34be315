"""What benchmarks share: the command line, timing, the record of where figures come from, tables and JSON."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lowering import hardware

#: About 10 ms of an H200's clock.
_HEAD_START_CYCLES = 20_000_000
RESULTS = pathlib.Path(__file__).parent / "results"


@dataclasses.dataclass
class Result:
    """Figures of one run."""

    rows: list[dict[str, Any]]
    """One line of the table each; numbers with the unit in the key."""
    baseline: str
    """What the ratios compare with, measured in the same run."""
    checks: list[str]
    """What was verified before anything was timed."""
    notes: list[str] = dataclasses.field(default_factory=list)
    where: str = ""
    """What the figures belong to, in the file's name; the kind of device if empty."""


class SkipBenchmark(Exception):
    """The machine cannot run it; the text says what is missing."""


def has_gpu() -> bool:
    """Whether there is a CUDA device with FP8 tensor cores."""
    return torch.cuda.is_available() and hardware.has_fp8_tensor_cores(torch.device("cuda"))


def device(quick: bool) -> torch.device:
    """The GPU, or the CPU for a smoke run; SkipBenchmark where figures of the CPU would mean nothing."""
    if has_gpu():
        return torch.device("cuda")
    if quick:
        return torch.device("cpu")
    raise SkipBenchmark("needs a CUDA device with FP8 tensor cores (--quick: a smoke run on the CPU)")


def has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


def milliseconds(function: Callable[[], Any], on: torch.device, repeat: int = 20) -> float:
    """Median time of a call; on a GPU by events, with the L2 cache flushed in between, and without the host's share: the
    device sleeps until the whole call is enqueued (`overhead` measures the host)."""
    for _ in range(3):
        function()
    if on.type != "cuda":
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=on)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for start, end in events:
        flush.zero_()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def sqnr(reference: torch.Tensor, x: torch.Tensor) -> float:
    """Signal to quantization noise in dB."""
    reference, x = reference.double(), x.double()
    return float(20 * torch.log10(reference.norm() / (reference - x).norm()))


def require(condition: bool, text: str, checks: list[str]) -> None:
    """The correctness gate: no figure without it."""
    if not condition:
        raise AssertionError(f"not correct, so not timed: {text}")
    checks.append(text)


def _machine() -> dict[str, Any]:
    packages = ("triton", "torchao", "transformer_engine")
    versions = {p: _version(p) for p in packages if importlib.util.find_spec(p) is not None}
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **versions,
    }


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _table(name: str, result: Result) -> Table:
    table = Table(title=f"{name} (baseline: {result.baseline})")
    columns = list(dict.fromkeys(key for row in result.rows for key in row))
    for column in columns:
        table.add_column(column, justify="left" if isinstance(result.rows[0].get(column), str) else "right")
    for row in result.rows:
        table.add_row(*(_text(row.get(column)) for column in columns))
    return table


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 100
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def record_of(name: str, command: str) -> dict[str, Any]:
    """Where figures come from: the command, the date and the machine."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"benchmark": name, "command": command, "date": date, "machine": _machine()}


def run_and_report(name: str, run: Callable[[bool], Result], quick: bool) -> pathlib.Path:
    """Run, print the table, write the JSON; returns its path."""
    result = run(quick)
    console = Console(width=140)
    console.print(_table(name, result))
    for note in result.notes:
        console.print(f"note: {note}")
    figures = {name: value for name, value in dataclasses.asdict(result).items() if name != "where"}
    record = record_of(name, f"python -m benchmarks.{name}" + (" --quick" if quick else "")) | figures
    where = result.where or ("gpu" if torch.cuda.is_available() else "cpu")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{where}{'-quick' if quick else ''}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"wrote {path.relative_to(pathlib.Path.cwd()) if path.is_relative_to(pathlib.Path.cwd()) else path}")
    return path


def main(name: str, run: Callable[[bool], Result]) -> None:
    """The command line of one benchmark."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=sys.modules["__main__"].__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: small sizes, few repetitions, CPU allowed")
    quick = parser.parse_args().quick
    try:
        run_and_report(name, run, quick)
    except SkipBenchmark as skipped:
        print(f"{name}: skipped, {skipped}")
