"""How processes that run side by side divide a machine."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def share(num_processes: int) -> dict[str, str]:
    """The environment of one of so many processes: torch computes and Inductor compiles with its part of the cores."""
    threads = str(max(1, num_cores() // num_processes))
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), threads)
