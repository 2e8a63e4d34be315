"""`benchmarks.gpu`: what it needs and does without, its parts, what it leaves behind, and its figures beside estimates."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import compare_with_estimates, cost_model, gpu, preflight, processes
from benchmarks.preflight import Lack, compiler_obstacle, missing
from fp8pass import estimate
from fp8pass.cost import H200
from lowering import hardware
from tests.support import minimal
from tests.support.models import LlamaBlock

ROOT = Path(__file__).parents[1]
needs_compiler = pytest.mark.skipif(compiler_obstacle() is not None, reason="needs a C compiler and Python.h")
needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton")
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")


# -- what is missing


def lack(text):
    """The one whose text begins so."""
    (found,) = [each for each in missing() if str(each).startswith(text)]
    return found


@needs_compiler
def test_a_compiler_is_looked_for_where_triton_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    assert compiler_obstacle() == f"a C compiler that runs ({tmp_path / 'nothing'}: No such file or directory)"
    fails = tmp_path / "cc"
    fails.write_text("#!/bin/sh\necho 'cannot find ld' >&2\nexit 1\n")
    fails.chmod(0o755)
    monkeypatch.setenv("CC", str(fails))
    assert compiler_obstacle() == f"a C compiler that compiles ({fails}: cannot find ld)"
    monkeypatch.delenv("CC")
    found = shutil.which("gcc") or shutil.which("clang")
    monkeypatch.setenv("PATH", "/nowhere")
    assert compiler_obstacle() == "a C compiler (gcc, clang, or the one that CC names)"
    assert lack("a C compiler").is_fatal
    if found is not None:
        monkeypatch.setenv("CC", found)
        assert "that runs" not in str(compiler_obstacle())


@needs_triton
def test_no_ptxas_is_fatal_and_an_old_one_is_a_note(monkeypatch):
    def none(arch):
        raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(preflight.assembler, "choose", none)
    assert lack("ptxas (RuntimeError: Cannot find ptxas)").is_fatal
    old = preflight.assembler.Assembler("/there", (12, 8), "Triton's")
    monkeypatch.setattr(preflight.assembler, "choose", lambda arch: old)
    assert not lack("ptxas 13.0 or newer: kernels are assembled by ptxas 12.8 (Triton's: /there)").is_fatal


def test_everything_that_is_missing_is_named_what_is_fatal_first(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    for compiler in ("CC", "CXX"):
        monkeypatch.delenv(compiler, raising=False)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(preflight, "has_gpu", lambda: False)
    monkeypatch.setattr(preflight.hardware, "triton_available", lambda: False)
    fatal = ["a CUDA device with FP8 tensor cores", "a C compiler", "numpy", "triton"]
    found = [(each.what.split(" (")[0], each.is_fatal) for each in missing()]
    assert found[: len(fatal)] == [(what, True) for what in fatal]
    assert set(found[len(fatal) :]) == {(what, False) for what in (*preflight._OPTIONAL, "nvidia-smi", "a C++ compiler")}


def run_gpu(monkeypatch, out, *options):
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(out), *options])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    return ended.value.code


def test_a_run_stops_with_all_that_is_fatal(monkeypatch, tmp_path):
    lacks = [Lack("a GPU", "no", is_fatal=True), Lack("cc", "none", is_fatal=True), Lack("rich", "")]
    monkeypatch.setattr(gpu, "missing", lambda: lacks)
    stopped = run_gpu(monkeypatch, tmp_path / "out")
    assert stopped.splitlines()[:3] == ["benchmarks.gpu cannot measure here without:", "- a GPU: no", "- cc: none"]
    assert "make gpu DRY=1" in stopped
    assert not (tmp_path / "out").exists()


def test_tests_are_left_out_where_pytest_is_missing(monkeypatch, tmp_path, capsys):
    """And the run is right."""
    monkeypatch.setattr(gpu, "pytest_obstacle", lambda: "pytest is missing")
    assert run_gpu(monkeypatch, tmp_path, "--cpu", "--part", "2") == 0
    assert "part 2, all other GPU tests: skipped, pytest is missing" in capsys.readouterr().out
    assert "| skipped, pytest is missing |" in (tmp_path / "gpu-part2-dry.md").read_text()


def run(environment, *command):
    command = [sys.executable, "-m", *command]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@without_a_gpu
def test_a_dry_run_with_torch_triton_and_numpy_alone(tmp_path):
    """Casts and a recipe of part 0, and a benchmark, in processes that find nothing else."""
    environment, out = minimal.environment(tmp_path), tmp_path / "out"
    dry = ("benchmarks.gpu", "--cpu", "--out", str(out))
    printed = run(environment, *dry, "--part", "0", "--group", "casts state", "recipe current")
    for package in ("rich", "pytest", "pytest_timeout", "xdist", "hypothesis", "torchao"):
        assert f"missing: {package}: " in printed
    rows = [json.loads(line) for line in (out / "part0.jsonl").read_text().splitlines()]
    assert {row["status"] for row in rows[1:]} == {"right"}
    run(environment, "benchmarks.cost_model", "--quick", "--out", str(out))
    assert "skipped, pytest is missing" in run(environment, *dry, "--part", "1")


# -- parts


def test_parts_name_files_and_benchmarks_that_exist():
    assert sorted(gpu.ORDER) == sorted(gpu.PARTS)
    assert gpu.ORDER[0] == 0
    for part in gpu.PARTS.values():
        for command in (*part.commands, *part.dry):
            paths = [word.removeprefix("--ignore=") for word in command if "tests" in word]
            assert all((ROOT / path).exists() for path in paths), command
            if command[1].startswith("benchmarks."):
                assert importlib.util.find_spec(command[1]) is not None


@without_a_gpu
def test_a_dry_part_ends_with_what_is_missing(tmp_path):
    run(os.environ, "benchmarks.gpu", "--part", "3", "--cpu", "--out", str(tmp_path))
    report = (tmp_path / "gpu-part3-dry.md").read_text()
    assert f"part 3, casts: `python3 -m benchmarks.casts --out {tmp_path}`" in report
    assert report.index("Missing here:") < report.index("a CUDA device with FP8 tensor cores")
    assert "| 3 | `python3 -m benchmarks.casts --quick" in report
    assert "wrote " in (tmp_path / "part3.log").read_text()
    assert json.loads((tmp_path / "casts-cpu-quick.json").read_text())["is_complete"]
    assert "benchmarks.gpu --part 3 --cpu" in json.loads((tmp_path / "gpu-part3-dry.json").read_text())["command"]


#: Starts a process of its own session, as Inductor starts its compilers, which starts one more; both sleep.
_SLEEPERS = """
import subprocess, sys, time
inner = "import subprocess, sys, time  # {mark}\\n"
inner += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)  # {mark}'])\\ntime.sleep(300)"
subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
print("begun", flush=True)
time.sleep(300)
"""


def test_a_part_ends_at_its_limit_with_all_that_it_started(monkeypatch, tmp_path):
    mark = f"mark-{tmp_path.name}"
    monkeypatch.setattr(gpu, "PARTS", {1: gpu.Part("slow", (("-c", _SLEEPERS.replace("{mark}", mark)),), ())})
    monkeypatch.setattr(gpu, "LIMIT", 5)
    monkeypatch.setattr(gpu, "_complete", lambda command, *rest: [sys.executable, *command])
    (record,) = gpu.run_part(1, False, tmp_path)
    assert record["status"] == "stopped after 5 s of its part"
    assert "begun" in (tmp_path / "part1.log").read_text()
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in read(path)] == []
    verdict = compare_with_estimates.Verdict("a", 1.0, 2.0)
    text = gpu.summary([record], [verdict], [Lack("a GPU", "no kernel runs")], False, tmp_path, ["b: broken"], ["c: why"])
    places = [text.index(part) for part in ("stopped after", "Missing here", "b: broken", "c: why", "**fail**")]
    assert places == sorted(places), "verdicts come last"


def read(path):
    try:
        return path.read_text()
    except OSError:  # it is over
        return ""


_SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"


def test_what_outlives_a_command_is_not_waited_for(tmp_path):
    """A process in a session of its own, which holds the command's output: it would hold up all parts behind it."""
    command = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {_SLEEPER!r}], start_new_session=True)"
    with (tmp_path / "log").open("wb") as file:
        assert processes.run([sys.executable, "-c", command + "; time.sleep(1)"], file, 60) == 0
    process = int((tmp_path / "log").read_text())
    assert Path(f"/proc/{process}").exists(), "it was not waited for"
    os.kill(process, signal.SIGKILL)


def test_sigterm_ends_what_was_started(tmp_path):
    """It is in a session of its own, and would keep the GPU busy."""
    script = "import pathlib, sys; from benchmarks import processes; processes.raise_on_sigterm(); "
    script += f"processes.run([sys.executable, '-c', {_SLEEPER!r}], pathlib.Path({str(tmp_path / 'log')!r}).open('wb'), 300)"
    started = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    process = int(started.stdout.readline())
    started.terminate()
    started.communicate(timeout=60)
    assert started.returncode == 128 + signal.SIGTERM
    assert not Path(f"/proc/{process}").exists()


# -- figures beside estimates


def write(path, rows, device="NVIDIA H200"):
    path.write_text(json.dumps({"machine": {"device": device}, "rows": rows}))


@pytest.fixture
def known_estimates(monkeypatch):
    """In the place of those of tracing, which takes seconds."""
    known = lambda models, recipe, device: 1.5 if device is H200 else 1.3  # noqa: E731
    monkeypatch.setattr(compare_with_estimates, "expected_speedup", known)


ALL = {"gemm_layer", "train_step", "casts"}


@pytest.mark.usefixtures("known_estimates")
def test_verdicts(tmp_path):
    """Casts are judged by the copy of the machine itself, those that transpose by less of it."""
    assert compare_with_estimates.verdicts(tmp_path, ALL) == ([], [])
    write(tmp_path / "gemm_layer-gpu.json", [{"what": "speed-up", "delayed ms": 1.55}])
    rows = [{"what": "8B 16384 current", "speed-up": 1.3}, {"what": "8B 16384 bf16", "failed": "x"}]
    write(tmp_path / "train_step-gpu.json", rows)
    kinds = {"cast": ("yes", "no", 0.8), "cast_transpose": ("yes", "yes", 0.8), "two passes": ("no", "yes", 0.3)}
    rows = [
        {"what": name, "one kernel": alone, "transposes": transposes, "of copy": share, "copy GB/s": 4300.0}
        for name, (alone, transposes, share) in kinds.items()
    ]
    write(tmp_path / "casts-gpu.json", [*rows, {"what": "cast e5m2", "failed": "RuntimeError"}])
    found, unjudged = compare_with_estimates.verdicts(tmp_path, ALL)
    assert unjudged == []
    assert {v.what: (v.measured, v.passes) for v in found} == {
        "speed-up of 12 GEMMs, delayed": (1.55, True),
        "speed-up of the 8B block, current": (1.3, False),
        "share of copy speed, cast": (0.8, False),
        "share of copy speed, cast_transpose": (0.8, True),
    }


@pytest.mark.usefixtures("known_estimates")
@pytest.mark.parametrize(
    ("device", "copied", "expected", "why"),
    [
        ("NVIDIA H200", 4.2, 1.5, None),
        ("NVIDIA H200", None, 1.5, None),
        ("NVIDIA H100 80GB HBM3", 2.9, 1.3, None),
        ("NVIDIA H100 80GB HBM3", 4.3, None, "copies at 4.30 TB/s, and the estimates are for a NVIDIA H100 that"),
        ("NVIDIA A100", 1.5, None, "there are no estimates for the NVIDIA A100"),
    ],
)  # fmt: skip
def test_a_gpu_is_judged_by_its_own_estimates(tmp_path, device, copied, expected, why):
    write(tmp_path / "gemm_layer-gpu.json", [{"what": "speed-up", "delayed ms": 1.4}], device)
    lines = [{"status": "run", "machine": {"device": device}}, {"case": "copy"} | ({"TB/s": copied} if copied else {})]
    (tmp_path / "part0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found, unjudged = compare_with_estimates.verdicts(tmp_path, {"gemm_layer"})
    assert [v.expected for v in found] == ([] if expected is None else [expected])
    assert [why in text for text in unjudged] == ([] if why is None else [True])


def test_estimates_of_a_layer_and_of_a_block_are_the_cost_models(tmp_path):
    """With the casts of their operands; attention takes as long in any precision."""
    write(tmp_path / "gemm_layer-gpu.json", [{"what": "speed-up", "delayed ms": 1.55}])
    write(tmp_path / "train_step-gpu.json", [{"what": "8B 16384 delayed", "speed-up": 1.4}])
    layer, block = (verdict.expected for verdict in compare_with_estimates.verdicts(tmp_path, ALL)[0])
    assert layer == pytest.approx(cost_model.expected_te_layer("delayed", H200), rel=0.1)
    with torch.device("meta"):
        model, x = LlamaBlock(4096, 14336, 32, 8).bfloat16(), torch.empty(2, 8192, 4096, dtype=torch.bfloat16)
    assert block == pytest.approx(
        estimate(model, x.requires_grad_(), recipe="delayed").recipes["delayed"].speedup_with_attention
    )
