"""The code that Inductor generates for an H200 computes what the rewritten graph says: shown without a GPU.

`python -m tests.emulation.test_emulation`, with TRITON_INTERPRET=1, prints as JSON what each check returned, or the
traceback of what it raised.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from lowering import hardware
from lowering.inductor import register_lowerings
from tests.emulation import cases, casts, statistics

CHECKS = casts.CHECKS | statistics.CHECKS | cases.CHECKS


def run() -> dict[str, Any]:
    """The result of each check, in an empty folder, or what it raised."""
    register_lowerings()
    results: dict[str, Any] = {}
    for name, check in CHECKS.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            try:
                results[name] = check(Path(folder))
            except Exception:
                results[name] = traceback.format_exc()
    return results


@functools.cache
def results() -> dict[str, Any]:
    """Of one process of Triton's interpreter: half of what a few checks take is imports."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.emulation.test_emulation"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.timeout(2400)  # all of them run before the first is reported
@pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")
@pytest.mark.parametrize("name", CHECKS)
def test_generated_code_computes_what_the_reference_or_the_rewritten_graph_says(name):
    found = results()[name]
    assert found is None if name in cases.CHECKS else isinstance(found, int) and found > 2, found


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.NAMES)
def test_on_a_gpu(name):
    cases.check_on_gpu(name)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise", "rowwise"])
def test_cuda_graphs(recipe):
    cases.check_cuda_graphs(f"llama-{recipe}")


if __name__ == "__main__":
    json.dump(run(), sys.stdout)
