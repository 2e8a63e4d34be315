"""The pipeline example: two ranks with a stage each, whose GEMMs run in FP8, and a loss that falls."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.distributed.support import ROOT

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_two_stages_learn():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [*launcher, "--nproc-per-node", "2", str(ROOT / "examples/train_pipeline.py"), "--backend", "aot_eager"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in (0, 1):
        assert f"rank {rank}: 12 of 12 GEMMs in FP8" in run.stdout
    first, last = map(float, re.search(r"loss (\S+) -> (\S+)", run.stdout).groups())
    assert last < 0.5 * first
