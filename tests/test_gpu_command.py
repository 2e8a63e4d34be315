"""`benchmarks.gpu`: what it needs and does without, its parts, what it leaves behind; the gates of its first parts."""

import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, preflight, processes
from benchmarks.part0 import operations, recipes
from benchmarks.part0.samples import samples
from benchmarks.preflight import missing
from lowering.operation import NAMESPACE
from tests.support import minimal

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")


# -- what is missing


def test_everything_that_is_missing_is_named_what_is_fatal_first(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(preflight, "has_gpu", lambda: False)
    monkeypatch.setattr(preflight.hardware, "triton_available", lambda: False)
    fatal = ["a CUDA device with FP8 tensor cores", "a C compiler", "numpy", "triton"]
    found = [(each.what.split(" (")[0], each.is_fatal) for each in missing()]
    assert found[: len(fatal)] == [(what, True) for what in fatal]
    assert set(preflight._OPTIONAL) <= {what for what, is_fatal in found if not is_fatal}


# -- parts


def test_parts_name_files_and_benchmarks_that_exist():
    named = set(re.findall(r"(?:tests|benchmarks)[\w./]*", repr(gpu.PARTS)))
    assert len(named) >= 5
    assert [n for n in named if not ((ROOT / n).exists() if "." not in n else importlib.util.find_spec(n))] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@without_a_gpu
def test_a_dry_run_with_torch_triton_and_numpy_alone(tmp_path):
    """Every operation, in processes that find nothing else."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--cpu", "--out", str(tmp_path / "out"), "--part", "0"]
    subprocess.run(command, cwd=ROOT, env=minimal.environment(tmp_path), timeout=1200, check=True)
    report = (tmp_path / "out/gpu-part0-dry.md").read_text()
    assert [name for name in preflight._OPTIONAL if f"- {name}: " not in report.partition("Missing here:")[2]] == []
    assert "`python3 -m benchmarks.part0 --what operations --out" in report
    (path,) = (tmp_path / "out").glob("*.json")
    assert [row["what"] for row in json.loads(path.read_text())["rows"]] == [case.name for case in operations.cases(CPU)]


def test_a_command_ends_at_its_limit_with_what_it_has_started(tmp_path):
    """And leaves what it has written."""
    inner = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    command = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {inner!r}]); time.sleep(300)"
    with (tmp_path / "log").open("wb") as log:
        assert processes.run([sys.executable, "-c", command], log, 3) is None
    running = Path(f"/proc/{int((tmp_path / 'log').read_text())}/stat")
    for _ in range(100):  # what is killed takes a moment, and stays as a zombie until somebody waits for it
        if not running.exists() or running.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("it runs on")


# -- what works


def test_every_operation_has_samples():
    names = [case.name for case in operations.cases(CPU)]
    assert len(set(names)) == len(names) > 100, "a row is known by its name"
    assert not any("no sample" in name for name in names)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@without_a_gpu
@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "mxfp8", "rowwise_with_gw_hp"])
def test_every_case_of_a_recipe(recipe):
    """The others' cases, which `delayed` and `rowwise_with_gw_hp` have as well, are left to GPUs."""
    cases = [case for case in recipes.cases(CPU) if case.name.startswith(f"{recipe},")]
    assert [bool(case.run()) for case in cases] == [True] * 3


def flipped(x):
    x.view(torch.uint8).view(-1)[-1] ^= 0x40  # a NaN becomes a number
    return x


def test_an_operation_that_computes_something_else_is_wrong(monkeypatch):
    """One bit of one result; one part in ten of a product; one result too many; another dtype, another layout."""
    wrong = {
        "transposed_copy": lambda out: flipped(out),
        "scaled_mm": lambda out: out * 1.1,
        "amax_rowwise": lambda out: [out, out],
        "multi_scales": lambda out: (out[0], out[1].double()),
        "gemm_ready": lambda out: (out[0].view(torch.uint8).t().contiguous().t().view(out[0].dtype), out[1]),
    }
    for name, change in wrong.items():
        operation = NAMESPACE.operations[name]
        monkeypatch.setattr(operation, "overload", lambda *a, o=operation, c=change, **k: c(o.reference(*a, **k)))
        # The wrong product of nothing is right.
        found = [sample for sample in samples(name, CPU) if "empty" not in sample.name]
        for sample in found[:3]:
            with pytest.raises(AssertionError):
                operations.compare(operation, sample, CPU)
        assert found
