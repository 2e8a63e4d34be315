"""One CUDA error costs one test: those behind it run in another worker."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.cuda_errors import SPOILT

ROOT = Path(__file__).parents[1]

#: A stand-in for a GPU, which is spoilt in the process of the test that breaks it.
_CONFTEST = """
import pytest
from benchmarks import isolation
from tests.support.cuda_errors import end_if_spoilt

faults = []
isolation.cuda_error = lambda: faults[0] if faults else None

@pytest.fixture(autouse=True)
def behind_every_test():
    yield
    end_if_spoilt()

@pytest.fixture
def gpu():
    def use(breaks=False):
        if breaks:
            faults.append("RuntimeError: CUDA error: an illegal memory access was encountered")
        if faults:
            raise RuntimeError(faults[0])
    return use
"""
_TESTS = """
import pytest

@pytest.mark.parametrize("number", range(8))
def test_on_a_gpu(gpu, number):
    gpu(breaks=number == 3)
"""


def run(folder, *options):
    """What pytest printed, and its exit status."""
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "test_gpu.py").write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", "-c", "/dev/null"]
    # Without what says that this test itself runs in a worker.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT)
    command += [*options, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.stdout, done.returncode


def test_without_workers_pytest_ends_with_what_it_has(tmp_path):
    printed, status = run(tmp_path, "-p", "no:xdist")
    assert status == SPOILT
    assert "a CUDA error has spoilt the process, later tests would fail falsely" in printed
    assert "1 failed, 3 passed" in printed
