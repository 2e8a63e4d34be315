"""The GPU's clocks, power and temperature while a contestant runs, as nvidia-smi samples them."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from typing import Any

import torch

#: The values queried, and the unit in which each goes into rows. MHz, W, degrees Celsius.
QUERY = {"clocks.sm": "SM MHz", "clocks.mem": "memory MHz", "power.draw": "W", "temperature.gpu": "°C"}
_SAMPLE_MS = 100
_TIMESTAMP = "%Y/%m/%d %H:%M:%S.%f"

Window = tuple[datetime.datetime, datetime.datetime]


class Sampler:
    """Times at which contestants run, and medians of the samples that fall into them."""

    def __init__(self) -> None:
        self._windows: dict[str, list[Window]] = {}
        self.medians: dict[str, dict[str, float]] = {}
        """Contestant -> unit -> median; filled when sampling ends. Nothing for a contestant that no sample fell on."""

    @contextlib.contextmanager
    def window(self, contestant: str) -> Iterator[None]:
        """While it is open, the contestant runs and nothing else does."""
        start = datetime.datetime.now()
        yield
        self._windows.setdefault(contestant, []).append((start, datetime.datetime.now()))

    def read(self, output: str) -> None:
        """Take nvidia-smi's samples."""
        found: dict[str, dict[str, list[float]]] = {name: {} for name in self._windows}
        for line in output.splitlines():
            time, *values = line.split(", ")
            try:
                at = datetime.datetime.strptime(time, _TIMESTAMP)
            except ValueError:  # a message, or a line that was cut off
                continue
            for name in (n for n, windows in self._windows.items() if any(start <= at <= end for start, end in windows)):
                for unit, text in zip(QUERY.values(), values, strict=False):
                    with contextlib.suppress(ValueError):  # "[N/A]"
                        value = float(text)
                        found[name].setdefault(unit, []).append(value)
        self.medians = {
            name: {unit: statistics.median(values) for unit, values in units.items()} for name, units in found.items() if units
        }


def _device_id() -> str:
    """The current device as nvidia-smi knows it, which counts devices that CUDA_VISIBLE_DEVICES hides."""
    return f"GPU-{torch.cuda.get_device_properties().uuid}" if torch.cuda.is_available() else "0"


@contextlib.contextmanager
def sampled() -> Iterator[Sampler]:
    """A sampler whose medians are there at the end; without nvidia-smi there are none."""
    sampler = Sampler()
    program = shutil.which("nvidia-smi")
    if program is None:
        yield sampler
        return
    command: list[Any] = [program, f"--query-gpu=timestamp,{','.join(QUERY)}", "--format=csv,noheader,nounits"]
    command += [f"--loop-ms={_SAMPLE_MS}", f"--id={_device_id()}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield sampler
    finally:
        process.terminate()
        output, _ = process.communicate()
        sampler.read(output)
