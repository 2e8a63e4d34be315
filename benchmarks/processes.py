"""Commands in a session of their own, which end with all that they have started."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any


def start(command: Sequence[str], output: Any, **options: Any) -> subprocess.Popen[bytes]:
    """Start a command as the leader of a session; both of its streams go to `output`."""
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, **options)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and all processes that it has started: workers of pytest outlive it otherwise, and those of Inductor's
    compiler, which are sessions of their own."""
    started = _started_by(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def raise_on_sigterm() -> None:
    """Let SIGTERM unwind this process, so that it ends what it has started: sessions of their own would run on."""

    def ended(*_: Any) -> None:
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, ended)


def _started_by(pid: int) -> list[int]:
    """The children of a process, theirs, and so on, as far as /proc knows them."""
    children: dict[int, list[int]] = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it is over
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(pid, ()))
    for child in found:
        found += children.get(child, ())
    return found


def run(command: Sequence[str], log: IO[bytes], seconds: float) -> int | None:
    """Run a command; its exit status, or None where it was ended after so many seconds. Its output goes to a log and to this
    process's, as it comes."""
    process = start(command, subprocess.PIPE)
    is_over = threading.Event()
    reader = threading.Thread(target=_tee, args=(process.stdout, log, is_over), daemon=True)
    reader.start()
    try:
        status: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        end(process)
        reader.join(1)  # whatever outlives the command in a session of its own holds the stream, and is not waited for
        is_over.set()
    return status


def _tee(stream: IO[bytes], log: IO[bytes], is_over: threading.Event) -> None:
    with stream:
        for line in stream:
            if is_over.is_set():
                return
            log.write(line)
            log.flush()
            sys.stdout.buffer.write(line)
            sys.stdout.flush()


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def share(num_processes: int) -> dict[str, str]:
    """The environment of one of so many processes: torch computes and Inductor compiles with its part of the cores."""
    threads = str(max(1, num_cores() // num_processes))
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), threads)
