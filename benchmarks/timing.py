"""Times of contestants, taken in turns, and the GPU's clocks meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

#: About 10 ms of an H200's clock.
_HEAD_START_CYCLES = 20_000_000
_WARM_UPS = 3
#: Bytes that are written between two measurements: several times the L2 cache.
_FLUSH = 256 << 20
_QUERY = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_SAMPLE_MS = 100


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one call."""

    ms: float
    """Median; on a GPU the device's time alone, between events, with a cold L2 cache: the device waits until the call is
    enqueued, so that the host's time does not count."""
    back_to_back_ms: float
    """Of calls that follow each other, the host's time included: what a training loop sees. The least of several runs."""


def in_turns(functions: Mapping[str, Callable[[], Any]], on: torch.device, repeat: int = 20) -> dict[str, Timing]:
    """Time functions, one call of each after the other, `repeat` times: a clock that drops, drops for everyone."""
    for function in functions.values():
        for _ in range(_WARM_UPS):
            function()
    measure = _device_times if on.type == "cuda" else _host_times
    times = measure(functions, on, repeat)
    queued = _back_to_back(functions, on, max(2, repeat // 4))
    return {name: Timing(statistics.median(times[name]), min(queued[name])) for name in functions}


def _host_times(functions: Mapping[str, Callable[[], Any]], on: torch.device, repeat: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeat):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def _device_times(functions: Mapping[str, Callable[[], Any]], on: torch.device, repeat: int) -> dict[str, list[float]]:
    flush = torch.empty(_FLUSH, dtype=torch.uint8, device=on)
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in functions}
    for _ in range(repeat):
        for name, function in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(_HEAD_START_CYCLES)
            start.record()
            function()
            end.record()
            events[name].append((start, end))
            torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def _back_to_back(functions: Mapping[str, Callable[[], Any]], on: torch.device, calls: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(3):
        for name, function in functions.items():
            _wait(on)
            start = time.perf_counter()
            for _ in range(calls):
                function()
            _wait(on)
            times[name].append(1e3 * (time.perf_counter() - start) / calls)
    return times


def _wait(on: torch.device) -> None:
    if on.type == "cuda":
        torch.cuda.synchronize(on)


def _device_id() -> str:
    """The current device as nvidia-smi knows it, which counts devices that CUDA_VISIBLE_DEVICES hides."""
    return f"GPU-{torch.cuda.get_device_properties().uuid}" if torch.cuda.is_available() else "0"


@contextlib.contextmanager
def clocks() -> Iterator[dict[str, Any]]:
    """A record of the GPU's clocks (MHz), power (W) and temperature (degrees Celsius) while a benchmark runs: least, median and
    largest of what nvidia-smi samples. Filled at the end; {"missing": why} where there is none to ask."""
    record: dict[str, Any] = {}
    program = shutil.which("nvidia-smi")
    if program is None:
        record["missing"] = "nvidia-smi is not installed"
        yield record
        return
    which = f"--id={_device_id()}"
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits", f"-lms={_SAMPLE_MS}", which]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield record
    finally:
        process.terminate()
        output, _ = process.communicate()
        record.update(summary(output))


def summary(output: str) -> dict[str, Any]:
    """Least, median and largest of each column of nvidia-smi's samples."""
    rows = [line.split(", ") for line in output.splitlines()]
    columns: dict[str, list[float]] = {name: [] for name in _QUERY}
    for row in rows:
        for name, text in zip(_QUERY, row, strict=False):
            with contextlib.suppress(ValueError):  # "[N/A]"
                columns[name].append(float(text))
    found = {name: [min(v), statistics.median(v), max(v)] for name, v in columns.items() if v}
    return found or {"missing": "nvidia-smi printed no samples"}
