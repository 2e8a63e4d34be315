"""Memory of a step, counted from outside: what the CPU's allocator gave and got back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocated(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that a call leaves allocated, what it returns among them, and the most that were allocated meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        held = run()
    kineto: Any = profiled.profiler
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    sums = list(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    del held
    return (sums[-1], max(sums)) if sums else (0, 0)
