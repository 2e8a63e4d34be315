"""The examples run under torchrun, learn, and resume from their checkpoint."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.distributed.support import ROOT

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.exhaustive]


def run(example, *options):
    """What it prints on two ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [*launcher, "--nproc-per-node", "2", str(ROOT / "examples" / example), *options, "--backend", "aot_eager"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("options", "num_gathers"),
    [(["ddp"], 0), (["fsdp2"], 6), (["simple-fsdp"], 6), (["tp", "--sequence-parallel"], 5)],
    ids=["ddp", "fsdp2", "simple-fsdp", "tp"],
)
def test_training_follows_high_precision(tmp_path, options, num_gathers):
    # Half of the width is not thin.
    size = ["--steps", "10", "--layers", "1", "--width", "64", "--head-width", "16", "--context", "16", "--device", "cpu"]
    paths = ["--out", str(tmp_path), "--checkpoint", str(tmp_path / "checkpoint")]
    run("train_distributed.py", "--parallel", *options, *size, *paths)
    result = json.loads((tmp_path / "result.json").read_text())
    assert abs(result["difference_percent"]) < 1
    assert result["num_ranks"] == 2
    assert [g["quantized"] for g in result["gathers"]] == [True] * num_gathers


def test_a_pipeline_learns():
    printed = run("train_pipeline.py", "--steps", "5")
    assert all(f"rank {rank}: 12 of 12 GEMMs in FP8" in printed for rank in (0, 1))
    first, last = map(float, re.search(r"loss (\S+) -> (\S+)", printed).groups())
    assert last < first
