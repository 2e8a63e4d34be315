"""The benchmarks themselves: gates that can fail, turns, records that are written row by row, verdicts, and the dry run."""

import contextlib
import copy
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import common, compare_with_estimates, gpu, h100_model, kernel_cost, preflight, processes
from benchmarks.common import run_and_report
from benchmarks.correctness import Step, require_fp8, require_step, run_step
from benchmarks.isolation import Bench
from fp8pass import fp8_compile
from tests.support.models import LlamaBlock

ROOT = Path(__file__).parents[1]
BOUNDS = {"output_db": 18.0, "gradient_db": 12.0}


@pytest.fixture(scope="module")
def step():
    """A block, its input and output gradient, and what it computes in high precision."""
    torch.manual_seed(0)
    model = LlamaBlock(64, 128, 4).bfloat16()
    x = torch.randn(1, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    return model, x, dy, run_step(model, x, dy)


# -- gates


def test_what_is_right_passes(step):
    model, x, dy, expected = step
    compiled = fp8_compile(copy.deepcopy(model), "current", backend="aot_eager")
    bench = Bench()
    require_step("block", expected, run_step(compiled, x, dy), bench, **BOUNDS, residual=(x, dy))
    require_fp8("block", compiled, 21, bench)
    assert len(bench.checks) == 4
    assert all(p.grad is None for p in (x, *model.parameters(), *compiled.parameters()))


def test_the_input_is_no_output(step):
    """With the residual it would score more than the bound."""
    _, x, dy, expected = step
    found = Step(x.detach().clone(), expected.gradients)
    with pytest.raises(AssertionError, match="output less its residual"):
        require_step("block", expected, found, Bench(), **BOUNDS, residual=(x, dy))


def test_the_gradient_of_the_output_is_none_of_the_input(step):
    """A backward that computed nothing is refused in the same way."""
    _, x, dy, expected = step
    found = Step(expected.output, {**expected.gradients, "x": dy.clone()})
    require_step("block", expected, found, Bench(), **BOUNDS)
    with pytest.raises(AssertionError, match=r"SQNR of gradients.*\(x\)"):
        require_step("block", expected, found, Bench(), **BOUNDS, residual=(x, dy))


@pytest.mark.parametrize(("value", "passes"), [(0.0, True), (1e-5, True), (1e-2, False), (float("nan"), False)])
def test_small_gradients_are_held_to_what_is_negligible(value, passes):
    out = torch.randn(4)
    expected = Step(out, {"large": torch.ones(4), "small": torch.full((4,), 1e-5)})
    found = Step(out, {"large": torch.ones(4), "small": torch.full((4,), value)})
    with contextlib.nullcontext() if passes else pytest.raises(AssertionError, match=r"SQNR of gradients.*\(small\)"):
        require_step("two", expected, found, Bench(), **BOUNDS)


def test_a_model_in_high_precision_is_not_timed_as_fp8(step):
    model, x, dy, _ = step
    compiled = fp8_compile(copy.deepcopy(model), "current", rules={"gate": None}, backend="aot_eager")
    run_step(compiled, x, dy)
    with pytest.raises(AssertionError, match="18 of 21 GEMMs in FP8"):
        require_fp8("block", compiled, 21, Bench())


@pytest.mark.parametrize("wrong", ["x", "down.weight", "attn_norm.weight"])
def test_one_wrong_gradient_is_enough(step, wrong):
    _, x, dy, expected = step
    for value in (-expected.gradients[wrong], torch.full_like(expected.gradients[wrong], torch.nan)):
        found = Step(expected.output, {**expected.gradients, wrong: value})
        with pytest.raises(AssertionError, match=f"SQNR of gradients.*{wrong}"):
            require_step("block", expected, found, Bench(), **BOUNDS, residual=(x, dy))


def test_a_missing_gradient(step):
    _, x, dy, expected = step
    found = Step(expected.output, {k: v for k, v in expected.gradients.items() if k != "gate.weight"})
    with pytest.raises(AssertionError, match="gradients of 10 tensors"):
        require_step("block", expected, found, Bench(), **BOUNDS, residual=(x, dy))


# -- records


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_results_name_the_commit(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    assert common.commit_of(tmp_path) is None
    git("init")
    (tmp_path / "code.py").write_text("x = 1")
    git("add", ".")
    git("commit", "-m", "first")
    assert common.commit_of(tmp_path) == git("rev-parse", "HEAD")[:12]
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "new.json").write_text("{}")
    assert not common.commit_of(tmp_path).endswith("-dirty"), "results do not change the code"
    (tmp_path / "code.py").write_text("x = 2")
    assert common.commit_of(tmp_path).endswith("-dirty")


def test_rows_are_written_as_they_are_made(tmp_path):
    def rows():
        yield {"what": "first", "ms": 1.0}
        (path,) = tmp_path.glob("*.json")
        record = json.loads(path.read_text())
        assert (record["rows"], record["is_complete"]) == ([{"what": "first", "ms": 1.0}], False)
        yield {"what": "second", "ms": 2.0}
        if fails:
            raise RuntimeError("the machine went away")

    for fails in (True, False):
        try:
            run_and_report("casts", lambda bench: rows(), True, tmp_path)
        except RuntimeError:
            assert fails
        (path,) = tmp_path.glob("*.json")
        record = json.loads(path.read_text())
        assert [row["what"] for row in record["rows"]] == ["first", "second"]
        assert record["is_complete"] is not fails
        path.unlink()


# -- make gpu


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Estimates, and results of a GPU."""
    results, out = tmp_path / "results", tmp_path / "out"
    results.mkdir()
    out.mkdir()
    monkeypatch.setattr(compare_with_estimates, "RESULTS", results)
    for triton, low in (("3.6.0", 9.0), ("3.7.1", 1.5)):
        estimate = {"what": "12 GEMMs delayed", "speed-up, low": low, "speed-up, high": 1.6}
        h100 = {**estimate, "what": "12 GEMMs delayed, H100", "speed-up, low": low - 0.2}
        rows = [estimate, h100, {**estimate, "what": "8B block current"}, {**estimate, "what": "8B-wide block current"}]
        (results / f"layer_cost-triton-{triton}.json").write_text(json.dumps({"rows": rows}))
    return results, out


def write(path, rows, device="NVIDIA H200"):
    path.write_text(json.dumps({"machine": {"device": device}, "rows": rows}))


NAMES = {"gemm_layer", "train_step", "casts"}


def test_verdicts(folders):
    _, out = folders
    assert compare_with_estimates.verdicts(out, NAMES) == ([], [])
    write(out / "gemm_layer-gpu.json", [{"what": "speed-up", "delayed ms": 1.55}])
    write(
        out / "train_step-gpu.json", [{"what": "8B 16384 current", "speed-up": 1.4}, {"what": "8B 16384 bf16", "failed": "x"}]
    )
    found, unjudged = compare_with_estimates.verdicts(out, NAMES)
    assert {v.what: (v.measured, v.passes) for v in found} == {
        "speed-up of 12 GEMMs, delayed": (1.55, True),
        "speed-up of the 8B block, current": (1.4, False),
    }
    assert unjudged == ["casts: no copy was measured on the NVIDIA H200"]


@pytest.mark.parametrize(
    ("device", "copied", "low", "why"),
    [
        ("NVIDIA H200", 4.2, 1.5, None),
        ("NVIDIA H200", None, 1.5, None),
        ("NVIDIA H100 80GB HBM3", 2.9, 1.3, None),
        (
            "NVIDIA H100 80GB HBM3",
            4.3,
            None,
            "copies at 4.30 TB/s, and the estimates are for a NVIDIA H100 that copies at 2.75",
        ),
        ("NVIDIA B200", 6.9, None, "there are no estimates for the NVIDIA B200"),
    ],
)
def test_a_gpu_is_judged_by_its_own_estimates(folders, device, copied, low, why):
    _, out = folders
    write(out / "gemm_layer-gpu.json", [{"what": "speed-up", "delayed ms": 1.4}], device)
    copy = {"case": "copy"} | ({} if copied is None else {"TB/s": copied})
    (out / "part0.jsonl").write_text(
        json.dumps({"status": "run", "machine": {"device": device}}) + "\n" + json.dumps(copy) + "\n"
    )
    found, unjudged = compare_with_estimates.verdicts(out, {"gemm_layer"})
    assert [v.low for v in found] == ([] if low is None else [low])
    assert [why in text for text in unjudged] == ([] if why is None else [True])


def test_casts_are_judged_by_the_copy_of_the_machine(folders):
    """An instruction-bound cast keeps up with a slower memory."""
    results, out = folders
    program = h100_model.Program(registers=40, shared=8192, warps=8, instructions=700, load_bytes=16384, store_bytes=16384)
    write(results / "kernel_cost-triton-3.6.0.json", [kernel_cost._row("cast_transpose e4m3", program)])
    shares = {}
    for bandwidth in (2.75e12, 4.3e12):
        rows = [
            {"what": f"cast_transpose e4m3 {size}", "of copy": s, "one kernel": alone, "copy GB/s": bandwidth / 1e9}
            for size, s, alone in (("1x1", 0.5, "yes"), ("9x9", 0.75, "yes"), ("9x8", 0.9, "no"))
        ]
        write(out / "casts-gpu.json", [*rows, {"what": "cast e4m3 9x9", "failed": "RuntimeError"}])
        ((verdict,), unjudged) = compare_with_estimates.verdicts(out, {"casts"})
        assert (verdict.what, verdict.measured, unjudged) == ("share of copy speed, cast_transpose e4m3", 0.75, [])
        shares[bandwidth] = verdict.high
        assert verdict.high == pytest.approx(h100_model.share_of_copy(program, bandwidth))
    assert shares[2.75e12] > shares[4.3e12]


def test_every_estimate_of_a_kernel_has_a_figure_to_be_compared_with():
    """By name: a cast without a verdict would pass whatever it takes."""
    kernels = kernel_cost.hand_written(torch.empty(256, 256, dtype=torch.bfloat16))
    alone = {name for name, kernel in kernels.items() if kernel.position == 0 and "batch both" not in name}
    estimates = {name for name in compare_with_estimates._estimates("kernel_cost") if name in kernels}
    assert len(alone) > 60
    assert alone <= estimates
    rows = {f"{name} 256x256": {"what": f"{name} 256x256", "of copy": 0.5, "one kernel": "yes"} for name in alone}
    machine = compare_with_estimates.Machine(None, "a GPU", 4e12)
    with mock.patch.object(compare_with_estimates, "_rows", lambda path: rows if "casts" in path.name else estimates_of(path)):
        found = {v.what.removeprefix("share of copy speed, ") for v in compare_with_estimates._casts(Path(), machine)}
    assert found == alone


def estimates_of(path: Path) -> dict[str, dict]:
    return {row["what"]: row for row in json.loads(path.read_text())["rows"]}


def test_all_parts_run_once():
    assert sorted(gpu.ORDER) == sorted(gpu.PARTS)
    assert gpu.ORDER[0] == 0


def test_parts_name_files_and_benchmarks_that_exist():
    for part in gpu.PARTS.values():
        for command in (*part.commands, *part.dry):
            paths = [word.removeprefix("--ignore=") for word in command if "tests" in word]
            assert all((ROOT / path).exists() for path in paths), command
            if command[1].startswith("benchmarks."):
                assert importlib.util.find_spec(command[1]) is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_a_dry_part_ends_with_what_is_missing(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", "3", "--cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = (tmp_path / "gpu-part3-dry.md").read_text()
    assert f"part 3, casts: `python3 -m benchmarks.casts --out {tmp_path}`" in report
    assert report.index("Missing here:") < report.index("a CUDA device with FP8 tensor cores")
    assert "| 3 | `python3 -m benchmarks.casts --quick" in report
    assert "wrote " in (tmp_path / "part3.log").read_text()
    assert json.loads((tmp_path / "casts-cpu-quick.json").read_text())["is_complete"]
    command.remove("--cpu")
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode != 0
    assert "make gpu DRY=1" in refused.stderr
    record = json.loads((tmp_path / "gpu-part3-dry.json").read_text())
    assert "benchmarks.gpu --part 3 --cpu" in record["command"]


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
    slow = gpu.Part("slow", (("-c", _SLEEPERS.replace("{mark}", mark)),), ())
    monkeypatch.setattr(gpu, "PARTS", {1: slow})
    monkeypatch.setattr(gpu, "LIMIT", 5)
    monkeypatch.setattr(gpu, "_complete", lambda command, *rest: [sys.executable, *command])
    (record,) = gpu.run_part(1, False, tmp_path)
    assert record["status"] == "stopped after 5 s of its part"
    assert "begun" in (tmp_path / "part1.log").read_text()
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in read(path)]
    assert left == []
    text = gpu.summary(
        [record],
        [compare_with_estimates.Verdict("a", 1.0, 2.0, 3.0)],
        [preflight.Lack("a GPU", "no kernel runs")],
        False,
        tmp_path,
        ["b: broken"],
        ["c: why"],
    )
    places = [text.index(part) for part in ("stopped after", "Missing here", "b: broken", "c: why", "**fail**")]
    assert places == sorted(places), "verdicts come last"


def read(path):
    try:
        return path.read_text()
    except OSError:  # it is over
        return ""


def test_what_outlives_a_command_is_not_waited_for(tmp_path):
    """A process in a session of its own, which holds the command's output: it would hold up all parts behind it."""
    sleeper = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    command = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True)"
    log = tmp_path / "log"
    with log.open("wb") as file:
        assert processes.run([sys.executable, "-c", command + "; import time; time.sleep(1)"], file, 60) == 0
    process = int(log.read_text())
    assert Path(f"/proc/{process}").exists(), "it was not waited for"
    os.kill(process, signal.SIGKILL)


def test_sigterm_ends_what_was_started(tmp_path):
    """It is in a session of its own, and would keep the GPU busy."""
    sleeper = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    script = "import pathlib, sys; from benchmarks import processes; processes.raise_on_sigterm(); "
    script += f"processes.run([sys.executable, '-c', {sleeper!r}], pathlib.Path({str(tmp_path / 'log')!r}).open('wb'), 300)"
    run = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    process = int(run.stdout.readline())
    run.terminate()
    run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    assert not Path(f"/proc/{process}").exists()


def test_a_run_that_is_cut_short_has_the_report_of_the_parts_before(tmp_path, monkeypatch):
    def run_part(number, dry, out, groups):
        if number == gpu.ORDER[1]:
            raise KeyboardInterrupt
        return [{"part": number, "command": "first", "status": 0, "seconds": 1.0}]

    monkeypatch.setattr(gpu, "run_part", run_part)
    monkeypatch.setattr(sys, "argv", ["gpu", "--cpu", "--out", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    assert "| 0 | `first` | 0 | 1.0 |" in (tmp_path / "gpu-dry.md").read_text()


def test_tests_leave_a_log_and_a_junit_file(tmp_path, monkeypatch):
    command = gpu._complete(gpu.PARTS[1].commands[0], tmp_path, "part1", ())
    assert f"--junitxml={tmp_path / 'part1.xml'}" in command
    tests = tmp_path / "test_one.py"
    tests.write_text("def test_right():\n    print('seen')\n\ndef test_wrong():\n    assert False\n")
    find_spec = importlib.util.find_spec
    ours = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null", str(tests))
    monkeypatch.setattr(gpu, "PARTS", {1: gpu.Part("tests", (ours,), ())})
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name == "xdist" else find_spec(name))
    (record,) = gpu.run_part(1, False, tmp_path)
    assert record["status"] == 1
    assert 'failures="1"' in (tmp_path / "part1.xml").read_text()
    assert "1 failed, 1 passed" in (tmp_path / "part1.log").read_text()


def test_contestants_that_failed_are_named_in_the_summary(tmp_path):
    write(tmp_path / "casts-gpu.json", [{"what": "a", "failed": "RuntimeError: x"}, {"what": "b", "ms": 1.0}])
    assert gpu._failed(tmp_path, ["casts"], 0.0) == ["casts-gpu: a: RuntimeError: x"]
    assert gpu._failed(tmp_path, ["casts"], 1e12) == [], "of another run"


def test_tables_are_not_cut(tmp_path, capsys):
    row = {"what": "x" * 50} | {f"a column of some width {i}": 1234.5 for i in range(30)}
    run_and_report("casts", lambda bench: [row], True, tmp_path)
    printed = capsys.readouterr().out
    assert "x" * 50 in printed
    titles, rule, cells = printed.splitlines()[1:4]
    assert re.findall(r"a column of some width (\d+)\b", titles) == [str(i) for i in range(30)]
    assert len(titles) == len(rule) == len(cells)
    assert printed.count("1,234") + printed.count("1,235") == 30
