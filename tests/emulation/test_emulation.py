"""The code that Inductor generates for an H200 computes what the rewritten graph says: shown without a GPU."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowering import hardware
from tests.emulation import block_casts, cases
from tests.emulation.__main__ import MODULES

ROOT = Path(__file__).parents[2]
#: All of them run before the first is reported.
pytestmark = pytest.mark.timeout(2400)


@functools.cache
def results() -> dict[str, dict[str, Any]]:
    """The findings of the checks of each module, in one process of Triton's interpreter: half of what a few checks take is
    imports."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.emulation"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


#: Results that the checks of each module compare; of tensors at least so many.
COMPARED = dict.fromkeys(block_casts.NAMES, 26) | {"groups": 3, "one scale": 7, "blocks": 4, "rows": 7, "training": 11}
CHECKS = [(name, check) for name, module in MODULES.items() for check in module.CHECKS]


@pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")
@pytest.mark.parametrize(("module", "name"), CHECKS)
def test_generated_code_computes_what_the_reference_or_the_rewritten_graph_says(module, name):
    found = results()[module][name]
    if module == "cases":
        assert found is None, found
    else:
        assert isinstance(found, int), found
        assert found >= 4 if module == "tensor_casts" else found == COMPARED[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.NAMES)
def test_on_a_gpu(name):
    cases.check_on_gpu(name)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise", "rowwise"])
def test_cuda_graphs(recipe):
    cases.check_cuda_graphs(f"llama-{recipe}")
