"""Times of contestants, taken in turns, and the GPU's clocks meanwhile."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.gpu_clocks import Sampler, sampled
from benchmarks.isolation import Bench

#: About 10 ms of an H200's clock.
_HEAD_START_CYCLES = 20_000_000
_WARM_UPS = 3
#: Bytes that are written between two measurements: several times the L2 cache.
_FLUSH = 256 << 20
#: Seconds that each contestant runs back to back on a GPU, in so many windows: clocks follow power within some 0.3 s.
STEADY_SECONDS, WINDOWS = 2.1, 3
#: Calls whose time says how many calls fill a window.
_PROBE = 3


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one call."""

    ms: float
    """Median; on a GPU the device's time alone, between events, with a cold L2 cache: the device waits until the call is
    enqueued, so that the host's time does not count."""
    back_to_back_ms: float
    """Mean of calls that follow each other for `STEADY_SECONDS`, the host's time included, as in a training
    loop, at the clocks of steady power. Median of the windows."""
    clocks: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Medians while it ran back to back, by unit (`benchmarks.gpu_clocks`)."""


def in_turns(
    functions: Mapping[str, Callable[[], Any]],
    on: torch.device,
    bench: Bench,
    name_of: Callable[[str], str],
    repeat: int = 20,
    seconds: Mapping[str, float] | None = None,
) -> dict[str, Timing]:
    """Time functions, one call of each after the other, `repeat` times: a clock that drops, drops for everyone. Then back to
    back, each for `STEADY_SECONDS` on a GPU, but for those that `seconds` names, and for two calls elsewhere.

    A function that raises, at whatever call, has no time, and a row named `name_of(its name)` says why.
    """
    steady = STEADY_SECONDS if on.type == "cuda" else 0.0
    seconds = dict.fromkeys(functions, steady) | dict(seconds or {})
    left = dict(functions)

    def of_each(measure: Callable[[str], float]) -> dict[str, float]:
        """The measurement of each function that is left."""
        found = {}
        for name in list(left):
            value = bench(name_of(name), lambda name=name: measure(name))  # type: ignore[misc]
            if value is None:
                del left[name]
            else:
                found[name] = value
        return found

    of_each(lambda name: mean_seconds(left[name], on, _WARM_UPS))
    flush = torch.empty(_FLUSH, dtype=torch.uint8, device=on) if on.type == "cuda" else None
    single = [of_each(lambda name: _once(left[name], flush)) for _ in range(repeat)]
    flush = None
    probe = of_each(lambda name: mean_seconds(left[name], on, _PROBE))
    num_calls = {name: max(2, math.ceil(seconds[name] / WINDOWS / max(t, 1e-9))) for name, t in probe.items()}
    with sampled() as sampler:
        queued = [of_each(lambda name: _window(name, left[name], on, num_calls[name], sampler)) for _ in range(WINDOWS)]
    return {
        name: Timing(
            1e3 * statistics.median(times[name] for times in single),
            1e3 * statistics.median(times[name] for times in queued),
            sampler.medians.get(name, {}),
        )
        for name in left
    }


def _once(function: Callable[[], Any], flush: torch.Tensor | None) -> float:
    """Seconds of one call: the device's where there is memory to flush its cache with, the host's otherwise."""
    if flush is None:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    torch.cuda._sleep(_HEAD_START_CYCLES)
    before.record()
    function()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


def _window(name: str, function: Callable[[], Any], on: torch.device, calls: int, sampler: Sampler) -> float:
    with sampler.window(name):
        return mean_seconds(function, on, calls)


def mean_seconds(function: Callable[[], Any], on: torch.device, calls: int) -> float:
    """The mean time of so many calls that follow each other."""
    _wait(on)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    _wait(on)
    return (time.perf_counter() - start) / calls


def _wait(on: torch.device) -> None:
    if on.type == "cuda":
        torch.cuda.synchronize(on)


def columns(label: str, timing: Timing) -> dict[str, float]:
    """The columns of one of several contestants in a row: times, and the clocks that they were measured at."""
    found = {f"{label} ms": timing.ms, f"{label} back-to-back ms": timing.back_to_back_ms}
    return found | {f"{label} {unit}": value for unit, value in timing.clocks.items() if unit in ("SM MHz", "W")}
