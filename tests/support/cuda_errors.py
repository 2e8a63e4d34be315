"""Tests behind one that runs into a CUDA error: an illegal access spoils the process, and all of them would fail in it."""

import os
import sys

import pytest

from benchmarks import isolation

SPOILT = 100


def end_if_spoilt() -> None:
    """Called behind every test. End the process if it has a CUDA error: pytest-xdist names the test and goes on in another
    worker. Without xdist there is no other: pytest ends, with what it has."""
    fault = isolation.cuda_error()
    if fault is None:
        return
    if os.environ.get("PYTEST_XDIST_WORKER") is None:
        pytest.exit(f"a CUDA error has spoilt the process, later tests would fail falsely: {fault}", SPOILT)
    print(fault, file=sys.stderr, flush=True)
    os._exit(SPOILT)
