"""The example runs under torchrun, learns, and resumes from its checkpoint."""

import json
import os
import subprocess
import sys

import pytest

from tests.distributed.support import ROOT

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize("options", [("ddp",), ("fsdp2",), ("simple-fsdp",), ("tp", "--sequence-parallel")])
def test_example_follows_high_precision(tmp_path, options):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [*launcher, "--nproc-per-node", "2", str(ROOT / "examples/train_distributed.py"), "--parallel", *options]
    # Half of the width is not thin.
    size = ["--steps", "10", "--layers", "1", "--width", "64", "--head-width", "16", "--context", "16"]
    paths = ["--out", str(tmp_path), "--checkpoint", str(tmp_path / "checkpoint")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [*command, *size, *paths, "--backend", "aot_eager", "--device", "cpu"],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert abs(result["difference_percent"]) < 1
    assert result["num_ranks"] == 2
    assert all(g["quantized"] for g in result["gathers"])
    assert len(result["gathers"]) == {"ddp": 0, "fsdp2": 6, "simple-fsdp": 6, "tp": 5}[options[0]]
