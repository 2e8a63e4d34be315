"""The benchmarks themselves: gates that can fail, turns, records that are written row by row, verdicts, and the dry run."""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import gpu, kernel_cost, peers, timing, verdicts
from benchmarks.common import Result, run_and_report
from benchmarks.gates import Step, require_fp8, require_step, run_step
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
    checks: list[str] = []
    require_step("block", expected, run_step(compiled, x, dy), checks, **BOUNDS, residual=(x, dy))
    require_fp8("block", compiled, 21, checks)
    assert len(checks) == 4
    assert all(p.grad is None for p in (x, *model.parameters(), *compiled.parameters()))


def test_the_input_is_no_output(step):
    """With the residual it would score more than the bound."""
    _, x, dy, expected = step
    found = Step(x.detach().clone(), expected.gradients)
    with pytest.raises(AssertionError, match="output less its residual"):
        require_step("block", expected, found, [], **BOUNDS, residual=(x, dy))


def test_the_gradient_of_the_output_is_none_of_the_input(step):
    """The same of a backward that computed nothing."""
    _, x, dy, expected = step
    found = Step(expected.output, {**expected.gradients, "x": dy.clone()})
    require_step("block", expected, found, [], **BOUNDS)
    with pytest.raises(AssertionError, match=r"SQNR of gradients.*\(x\)"):
        require_step("block", expected, found, [], **BOUNDS, residual=(x, dy))


@pytest.mark.parametrize(("value", "passes"), [(0.0, True), (1e-5, True), (1e-2, False), (float("nan"), False)])
def test_small_gradients_are_held_to_what_is_negligible(value, passes):
    out = torch.randn(4)
    expected = Step(out, {"large": torch.ones(4), "small": torch.full((4,), 1e-5)})
    found = Step(out, {"large": torch.ones(4), "small": torch.full((4,), value)})
    with contextlib.nullcontext() if passes else pytest.raises(AssertionError, match=r"SQNR of gradients.*\(small\)"):
        require_step("two", expected, found, [], **BOUNDS)


def test_a_model_in_high_precision_is_not_timed_as_fp8(step):
    model, x, dy, _ = step
    compiled = fp8_compile(copy.deepcopy(model), "current", rules={"gate": None}, backend="aot_eager")
    run_step(compiled, x, dy)
    with pytest.raises(AssertionError, match="18 of 21 GEMMs in FP8"):
        require_fp8("block", compiled, 21, [])


@pytest.mark.parametrize("wrong", ["x", "down.weight", "attn_norm.weight"])
def test_one_wrong_gradient_is_enough(step, wrong):
    _, x, dy, expected = step
    for value in (-expected.gradients[wrong], torch.full_like(expected.gradients[wrong], torch.nan)):
        found = Step(expected.output, {**expected.gradients, wrong: value})
        with pytest.raises(AssertionError, match=f"SQNR of gradients.*{wrong}"):
            require_step("block", expected, found, [], **BOUNDS, residual=(x, dy))


def test_a_missing_gradient(step):
    _, x, dy, expected = step
    found = Step(expected.output, {k: v for k, v in expected.gradients.items() if k != "gate.weight"})
    with pytest.raises(AssertionError, match="gradients of 10 tensors"):
        require_step("block", expected, found, [], **BOUNDS, residual=(x, dy))


# -- times


def test_contestants_take_turns():
    calls: list[str] = []
    times = timing.in_turns({name: (lambda name=name: calls.append(name)) for name in "ab"}, torch.device("cpu"), repeat=4)
    assert "".join(calls) == "aaabbb" + "abab" * 2 + "aabb" * 3
    assert all(t.ms >= 0 and t.back_to_back_ms >= 0 for t in times.values())


def test_clocks_are_summed_up():
    samples = "1980, 3201, 690.10, 60\n1755, 3201, [N/A], 62\n1200, 3201, 650.00, 61\n"
    assert timing.summary(samples) == {
        "clocks.sm": [1200, 1755, 1980],
        "clocks.mem": [3201, 3201, 3201],
        "power.draw": [650, 670.05, 690.1],
        "temperature.gpu": [60, 61, 62],
    }
    assert "missing" in timing.summary("")


def test_contestants_with_another_mode_compute_the_same(step):
    model, x, dy, expected = step
    notes: list[str] = []

    def check(compiled, name):
        require_step(name, expected, run_step(compiled, x, dy), [], **BOUNDS, residual=(x, dy))
        if name == "current":
            raise error

    error: Exception = RuntimeError("no CUDA graph")
    assert list(peers.replayed(model, ("current",), check, notes, with_peers=False)) == ["bf16"]
    assert notes == ["current with CUDA graphs failed: RuntimeError: no CUDA graph"]
    error = AssertionError("not correct, so not timed")
    with pytest.raises(AssertionError, match="not timed"):
        peers.replayed(model, ("current",), check, notes, with_peers=False)


# -- records


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
            run_and_report("casts", lambda quick: Result(rows(), "nothing", []), True, tmp_path)
        except RuntimeError:
            assert fails
        (path,) = tmp_path.glob("*.json")
        record = json.loads(path.read_text())
        assert [row["what"] for row in record["rows"]] == ["first", "second"]
        assert record["is_complete"] is not fails
        path.unlink()


# -- make gpu


def test_verdicts(tmp_path, monkeypatch):
    def write(folder, name, rows):
        (folder / name).write_text(json.dumps({"rows": rows}))

    results, out = tmp_path / "results", tmp_path / "out"
    results.mkdir()
    out.mkdir()
    monkeypatch.setattr(verdicts, "RESULTS", results)
    for triton, low in (("3.6.0", 1.5), ("3.7.1", 9.0)):
        estimate = {"what": "12 GEMMs delayed", "speed-up, low": low, "speed-up, high": 1.6}
        write(results, f"layer_cost-triton-{triton}.json", [estimate, {**estimate, "what": "8B block current"}])
    write(results, "kernel_cost-triton-3.6.0.json", [{"what": "cast_transpose e4m3", "share of copy": 0.8}])
    names = {"gemm_layer", "train_step", "casts"}
    assert verdicts.verdicts(out, names) == []
    write(out, "gemm_layer-gpu.json", [{"what": "speed-up", "delayed ms": 1.55}])
    write(out, "train_step-gpu.json", [{"what": "8B 16384 current", "speed-up": 1.4}])
    write(
        out,
        "casts-gpu.json",
        [
            {"what": f"cast_transpose e4m3 {size}", "of copy": s, "one kernel": alone}
            for size, s, alone in (("1x1", 0.5, "yes"), ("9x9", 0.75, "yes"), ("9x8", 0.9, "no"))
        ],
    )
    assert {v.what for v in verdicts.verdicts(out, {"casts"})} == {"share of copy speed, cast_transpose e4m3"}
    found = {v.what: (v.measured, v.passes) for v in verdicts.verdicts(out, names)}
    assert found == {
        "speed-up of 12 GEMMs, delayed": (1.55, True),
        "speed-up of the 8B block, current": (1.4, False),
        "share of copy speed, cast_transpose e4m3": (0.75, True),
    }


def test_every_estimate_of_a_kernel_has_a_figure_to_be_compared_with():
    """By name: a cast without a verdict would pass whatever it takes."""
    kernels = kernel_cost.hand_written(torch.empty(256, 256, dtype=torch.bfloat16))
    alone = {name for name, kernel in kernels.items() if kernel.position == 0 and "stack both" not in name}
    estimates = {name for name in verdicts._estimates("kernel_cost") if name in kernels}
    assert len(alone) > 60
    assert alone <= estimates
    rows = {f"{name} 256x256": {"what": f"{name} 256x256", "of copy": 0.5, "one kernel": "yes"} for name in alone}
    with mock.patch.object(verdicts, "_rows", lambda path: rows if "casts" in path.name else estimates_of(path)):
        found = {v.what.removeprefix("share of copy speed, ") for v in verdicts.verdicts(Path(), {"casts"})}
    assert found == alone


def estimates_of(path: Path) -> dict[str, dict]:
    return {row["what"]: row for row in json.loads(path.read_text())["rows"]}


def test_parts_name_files_and_benchmarks_that_exist():
    for part in gpu.PARTS.values():
        for command in (*part.commands, *part.dry):
            paths = [word.removeprefix("--ignore=") for word in command if "tests" in word]
            assert all((ROOT / path).exists() for path in paths), command
            if command[1].startswith("benchmarks."):
                assert (ROOT / command[1].replace(".", "/")).with_suffix(".py").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_a_dry_part_ends_with_what_is_missing(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", "3", "--dry", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = (tmp_path / "gpu-part3-dry.md").read_text()
    assert f"part 3, casts: `python -m benchmarks.casts --out {tmp_path}`" in report
    assert report.index("Missing here:") < report.index("a CUDA device with FP8 tensor cores")
    assert "| 3 | `python -m benchmarks.casts --quick" in report
    assert json.loads((tmp_path / "casts-cpu-quick.json").read_text())["is_complete"]
    command.remove("--dry")
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode != 0
    assert "make gpu DRY=1" in refused.stderr


def test_a_part_ends_at_its_limit(monkeypatch, tmp_path):
    slow = gpu.Part("slow", (("-c", "import time; print('begun', flush=True); time.sleep(60)"),), ())
    monkeypatch.setattr(gpu, "PARTS", {1: slow})
    monkeypatch.setattr(gpu, "LIMIT", 2)
    monkeypatch.setattr(gpu, "_complete", lambda command, out: [sys.executable, *command])
    (record,) = gpu.run_part(1, False, tmp_path)
    assert record["status"] == "stopped after 2 s of its part"
    assert "**fail**" in gpu.summary([record], [verdicts.Verdict("a", 1.0, 2.0, 3.0)], ["a GPU"], False, tmp_path)
