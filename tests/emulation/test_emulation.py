"""What Inductor generates for an H200 computes what the rewritten graph says: shown without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowering import hardware
from tests.emulation import cases

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def emulated() -> dict[str, str | None]:
    """What each case raised in a process of its own, which Triton's interpreter needs."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.emulation.cases"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")
@pytest.mark.parametrize("name", cases.NAMES)
def test_generated_code_computes_the_rewritten_graph(emulated, name):
    assert emulated[name] is None, emulated[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.NAMES)
def test_on_a_gpu(name):
    cases.check_on_gpu(name)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise", "rowwise"])
def test_cuda_graphs(recipe):
    cases.check_cuda_graphs(f"llama-{recipe}")
