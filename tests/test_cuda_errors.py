"""One CUDA error costs one test: those behind it run in another worker."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

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
    """What pytest printed, its exit status, and the tags of what came of each case."""
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "test_gpu.py").write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", "-c", "/dev/null"]
    command += [*options, "--junitxml", str(folder / "junit.xml"), str(folder)]
    # Without what says that this test itself runs in a worker.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    cases = ElementTree.parse(folder / "junit.xml").iter("testcase")
    return done.stdout, done.returncode, {str(case.get("name")): [child.tag for child in case] for case in cases}


def test_a_worker_is_replaced(tmp_path):
    pytest.importorskip("xdist")
    printed, _, outcomes = run(tmp_path, "-n", "1")
    assert [name for name, tags in outcomes.items() if {"failure", "error"} & set(tags) and "[3]" not in name] == [], printed
    assert {f"test_on_a_gpu[{i}]" for i in range(8)} <= outcomes.keys()
    assert "7 passed" in printed
    assert "test_on_a_gpu[3]" in printed


def test_without_workers_pytest_ends_with_what_it_has(tmp_path):
    printed, status, outcomes = run(tmp_path, "-p", "no:xdist")
    assert status == SPOILT
    assert "a CUDA error has spoilt the process, later tests would fail falsely" in printed
    assert len(outcomes) == 4
    assert sum("failure" in tags for tags in outcomes.values()) == 1
