"""Times of contestants, taken in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from benchmarks.isolation import Bench

#: About 10 ms of an H200's clock.
_HEAD_START_CYCLES = 20_000_000
_WARM_UPS = 3
#: Bytes that are written between two measurements: several times the L2 cache.
_FLUSH = 256 << 20
#: Seconds that each contestant runs back to back on a GPU, in so many windows: clocks follow power within some 0.3 s.
STEADY_SECONDS, WINDOWS = 2.1, 3


class Timing(NamedTuple):
    """Milliseconds of one call."""

    ms: float
    """Median; on a GPU the device's time alone, between events, with a cold L2 cache: the device waits until the call is
    enqueued, so that the host's time does not count."""
    back_to_back_ms: float
    """Mean of calls that follow each other for `STEADY_SECONDS`, the host's time included, as in a training
    loop, at the clocks of steady power. Median of the windows."""


def in_turns(
    functions: Mapping[str, Callable[[], Any]],
    on: torch.device,
    bench: Bench,
    name_of: Callable[[str], str],
    repeat: int = 20,
    seconds: Mapping[str, float] | None = None,
) -> dict[str, Timing]:
    """Time functions, one call of each after the other, `repeat` times: a clock that drops, drops for everyone. Then back to
    back, each for `STEADY_SECONDS` on a GPU, but for those that `seconds` names, and for two calls elsewhere. A function that
    raises, at whatever call, has no time, and a row named `name_of(its name)` says why."""
    seconds = dict.fromkeys(functions, STEADY_SECONDS if on.type == "cuda" else 0.0) | dict(seconds or {})
    left = dict(functions)

    def of_each(measure: Callable[[str], float]) -> dict[str, float]:
        """The measurement of each function that is left."""
        found = {name: bench(name_of(name), measure, name) for name in left}
        for name in (name for name, value in found.items() if value is None):
            del left[name]
        return {name: value for name, value in found.items() if value is not None}

    of_each(lambda name: mean_seconds(left[name], on, _WARM_UPS))
    single = [of_each(lambda name: _once(left[name], on)) for _ in range(repeat)]
    probe = of_each(lambda name: mean_seconds(left[name], on, _WARM_UPS))
    num_calls = {name: max(2, math.ceil(seconds[name] / WINDOWS / max(t, 1e-9))) for name, t in probe.items()}
    queued = [of_each(lambda name: mean_seconds(left[name], on, num_calls[name])) for _ in range(WINDOWS)]
    return {
        name: Timing(*(1e3 * statistics.median(times[name] for times in each) for each in (single, queued))) for name in left
    }


def _once(function: Callable[[], Any], on: torch.device) -> float:
    """Seconds of one call: the GPU's own, with a cold cache; elsewhere the host's."""
    if on.type != "cuda":
        return mean_seconds(function, on, 1)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.zeros(_FLUSH, dtype=torch.uint8, device=on)
    torch.cuda._sleep(_HEAD_START_CYCLES)
    before.record()
    function()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


def mean_seconds(function: Callable[[], Any], on: torch.device, calls: int) -> float:
    """The mean time of so many calls that follow each other."""
    wait = torch.cuda.synchronize if on.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    wait()
    return (time.perf_counter() - start) / calls
