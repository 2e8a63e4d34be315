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
from tests.emulation import block_casts, cases, statistics, tensor_casts

ROOT = Path(__file__).parents[2]
#: All of them run before the first is reported.
pytestmark = pytest.mark.timeout(2400)
needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")


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


@needs_triton
@pytest.mark.parametrize("name", tensor_casts.CHECKS)
def test_generated_casts_and_scales_equal_the_reference(name):
    compared = results()["tensor_casts"][name]
    assert isinstance(compared, int), compared
    assert compared >= 4


@needs_triton
@pytest.mark.parametrize("name", block_casts.NAMES)
def test_blockwise_casts_that_join_their_producers_equal_the_reference(name):
    compared = results()["block_casts"][name]
    assert compared == 26, compared


@needs_triton
def test_rows_in_groups_and_their_statistics_join_their_producer():
    compared = results()["block_casts"]["groups"]
    assert compared == 3, compared


@needs_triton
@pytest.mark.parametrize("name", statistics.CHECKS)
def test_statistics_that_join_casts_count_what_the_reference_counts(name):
    compared = results()["statistics"][name]
    assert compared == {"one scale": 7, "blocks": 4, "rows": 7, "training": 11}[name], compared


@needs_triton
@pytest.mark.parametrize("name", cases.NAMES)
def test_generated_code_computes_the_rewritten_graph(name):
    raised = results()["cases"][name]
    assert raised is None, raised


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.NAMES)
def test_on_a_gpu(name):
    cases.check_on_gpu(name)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise", "rowwise"])
def test_cuda_graphs(recipe):
    cases.check_cuda_graphs(f"llama-{recipe}")
