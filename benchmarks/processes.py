"""Commands that end in time, and the machine's cores."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import IO


def run(command: Sequence[str], log: IO[bytes], seconds: float) -> int | None:
    """Run a command, whose output goes to a file; its exit status, or None where it was ended after so many seconds, with the
    workers of pytest that it has started."""
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def share(num_processes: int) -> dict[str, str]:
    """The environment of one of so many processes: torch computes and Inductor compiles with its part of the cores."""
    threads = str(max(1, num_cores() // num_processes))
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), threads)
