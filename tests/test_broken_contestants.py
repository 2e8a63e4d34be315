"""In each benchmark one contestant, kernel or choice is broken: it has a row that says so, all others have theirs, and the exit
status is 1."""

import json
import os
import sys

import pytest
import torch

from benchmarks import (
    casts,
    common,
    compile_time,
    contestants,
    correctness,
    gemm_layer,
    isolation,
    overhead,
    traffic,
    train_step,
    tune,
)
from benchmarks.__main__ import NAMES
from lowering import hardware

needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton to generate CUDA code")
BROKEN = "RuntimeError: broken on purpose"


def broken(*args, **kwargs):
    raise RuntimeError("broken on purpose\n")


def rows_of(module, folder, monkeypatch, *options):
    """Run a benchmark as its command line does; its rows by name, after it has exited with 1."""
    name = module.__name__.rpartition(".")[2]
    run, add_options = getattr(module, "PARTS", None) or module.run, getattr(module, "_options", None)
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--out", str(folder), *options])
    with pytest.raises(SystemExit) as exited:
        common.main(name, run, add_options)
    assert exited.value.code == 1
    (path,) = folder.glob("*.json")
    record = json.loads(path.read_text())
    assert record["is_complete"]
    return {row["what"]: row for row in record["rows"]}


def failures(rows):
    """The rows that failed; every other row has figures."""
    assert all(len(row) == 2 if "failed" in row else len(row) > 1 for row in rows.values())
    return {what: row["failed"] for what, row in rows.items() if "failed" in row}


def break_one(module, monkeypatch, contestant, keep=None):
    """One of a benchmark's contestants raises when it compiles a model; of the others only `keep` take part, for time."""
    real = module.contestants

    def contestants(*args, **kwargs):
        found = {name: c for name, c in real(*args, **kwargs).items() if keep is None or name in (*keep, contestant)}
        return {**found, contestant: broken}

    monkeypatch.setattr(module, "contestants", contestants)


@pytest.fixture
def no_code_generation(monkeypatch):
    """The longest benchmarks without C++, which is not their subject: they take a third of the time."""
    plain, real = torch.compile, contestants.fp8_compile
    monkeypatch.setattr(torch, "compile", lambda f, mode=None, **options: plain(f, **{"backend": "aot_eager", **options}))
    monkeypatch.setattr(contestants, "fp8_compile", lambda *args, mode, **options: real(*args, backend="aot_eager", **options))


@pytest.mark.usefixtures("no_code_generation")
def test_train_step(tmp_path, monkeypatch):
    break_one(train_step, monkeypatch, "current", keep=("bf16", "delayed"))
    rows = rows_of(train_step, tmp_path, monkeypatch, "--tokens", "64")
    names = [f"tiny 64 {name}{graph}" for graph in ("", ", CUDA graph") for name in ("bf16", "delayed", "current")]
    assert rows.keys() == set(names)
    assert failures(rows) == {"tiny 64 current": BROKEN, "tiny 64 current, CUDA graph": BROKEN}
    assert rows["tiny 64 delayed"]["speed-up"] > 0
    assert rows["tiny 64 delayed"]["saved / bf16"] > 0


@pytest.mark.usefixtures("no_code_generation")
def test_train_step_whose_gate_fails(tmp_path, monkeypatch):
    """Numbers that are wrong are no time; nor is there one to compare with where the baseline is wrong."""
    real = correctness.require_step

    def gate(what, expected, found, *args, **kwargs):
        output = -found.output if what == "tiny 64 bf16" else found.output
        real(what, expected, type(found)(output, found.gradients), *args, **kwargs)

    monkeypatch.setattr(correctness, "require_step", gate)
    monkeypatch.setattr(train_step, "RECIPES", ("delayed",))
    rows = rows_of(train_step, tmp_path, monkeypatch, "--tokens", "64")
    (text,) = failures(rows).values()
    assert "tiny 64 bf16" in failures(rows)
    assert text.startswith("AssertionError: not correct, so not timed: tiny 64 bf16: SQNR of the output")
    assert rows["tiny 64 delayed"]["ms"] > 0
    assert "speed-up" not in rows["tiny 64 delayed"]
    assert rows["tiny 64 delayed, CUDA graph"]["speed-up"] > 0


@pytest.mark.usefixtures("no_code_generation")
def test_train_step_whose_timing_fails(tmp_path, monkeypatch):
    real, calls = train_step.step_of, []

    def step_of(compiled, x, dy):
        step = real(compiled, x, dy)
        calls.append(step)
        return step if len(calls) != 2 else broken

    monkeypatch.setattr(train_step, "step_of", step_of)
    monkeypatch.setattr(train_step, "RECIPES", ("delayed", "current"))
    rows = rows_of(train_step, tmp_path, monkeypatch, "--tokens", "64")
    assert failures(rows) == {"tiny 64 delayed": BROKEN}
    assert len(rows) == 6


def test_gemm_layer(tmp_path, monkeypatch):
    break_one(gemm_layer, monkeypatch, "delayed", keep=("bf16", "blockwise"))
    rows = rows_of(gemm_layer, tmp_path, monkeypatch)
    linears = ["qkv 64->192", "out 64->64", "up 64->256", "down 256->64"]
    experts = ["experts' gate and up 4 x 256->192", "experts' down 4 x 96->256"]
    of_broken = [f"{what}, delayed{graph}" for what in (*linears, *experts) for graph in ("", " graph")]
    assert failures(rows) == dict.fromkeys(of_broken, BROKEN)
    assert rows.keys() - of_broken == {*linears, *experts, "sum", "speed-up"}
    for what in linears:
        kinds = ("bf16", "blockwise", "bf16 graph", "blockwise graph", "pre-quantized")
        assert {f"{kind} ms" for kind in kinds} <= rows[what].keys()
        assert not any(key.startswith("delayed") for key in rows[what])
    assert rows["speed-up"]["bf16 ms"] == rows["speed-up"]["bf16 graph back-to-back ms"] == 1
    assert rows["speed-up"]["blockwise ms"] > 0


def test_gemm_layer_of_which_one_linear_fails(tmp_path, monkeypatch):
    """A contestant that did not run every linear has no sum."""
    monkeypatch.setattr(gemm_layer, "RECIPES", ("delayed",))
    monkeypatch.setattr(gemm_layer, "GROUPED", {})
    real = gemm_layer._prequantized
    monkeypatch.setattr(gemm_layer, "_prequantized", lambda what, *rest: broken() if what == "up" else real(what, *rest))
    rows = rows_of(gemm_layer, tmp_path, monkeypatch)
    assert failures(rows) == {"up 64->256, pre-quantized": BROKEN}
    assert "pre-quantized ms" in rows["down 256->64"]
    assert "pre-quantized ms" not in rows["sum"]
    assert "delayed ms" in rows["sum"]


@pytest.mark.parametrize("fault", ["raises", "differs"])
def test_casts(fault, tmp_path, monkeypatch):
    names = ["cast e4m3", "cast_transpose e4m3", "amax", "cast e5m2"]
    real = casts.hand_written

    def hand_written(x):
        found = {name: kernel for name, kernel in real(x).items() if name in names}
        wrong = found["cast_transpose e4m3"]
        given = (wrong.arguments[0], [torch.ones(3)], *wrong.arguments[2:])
        return found | ({"cast_transpose e4m3": wrong._replace(arguments=given)} if fault == "raises" else {})

    monkeypatch.setattr(casts, "hand_written", hand_written)
    if fault == "differs":
        same = iter([True, False, True, True])  # E4M3 comes first
        monkeypatch.setattr(casts, "_same", lambda *results: next(same))
    rows = rows_of(casts, tmp_path, monkeypatch)
    assert rows.keys() == {f"{name} 256x256" for name in names}
    ((what, text),) = failures(rows).items()
    assert what == "cast_transpose e4m3 256x256"
    assert text.startswith("ValueError: " if fault == "raises" else "AssertionError: not correct, so not timed")


def test_tune(tmp_path, monkeypatch):
    """One way to compute a GEMM, which leaves the other, and one of which nothing can be made."""
    real_gate, real_make = isolation.Bench.require, tune._implementation

    def gate(bench, condition, text):
        return real_gate(bench, condition and not text.startswith("qkv grad_input, fast"), text)

    monkeypatch.setattr(isolation.Bench, "require", gate)
    monkeypatch.setattr(
        tune, "_implementation", lambda name, *rest: broken() if name == "up output" else real_make(name, *rest)
    )
    rows = rows_of(tune, tmp_path, monkeypatch)
    found = failures(rows)
    assert found.keys() == {"per tensor, qkv grad_input 64x64x192, fast", "blockwise, up output"}
    assert found["blockwise, up output"] == BROKEN
    assert len(rows) - len(found) == 12 + 11 + 2
    assert "accurate ms" in rows["per tensor, qkv grad_input 64x64x192"]
    assert "fast ms" not in rows["per tensor, qkv grad_input 64x64x192"]
    assert {"accurate ms", "fast ms"} <= rows["per tensor, qkv output 64x192x64"].keys()


def test_overhead(tmp_path, monkeypatch):
    real = overhead.fp8_compile
    monkeypatch.setattr(
        overhead, "fp8_compile", lambda model, recipe, **o: broken() if recipe == "current" else real(model, recipe, **o)
    )
    monkeypatch.setattr(overhead, "_ROUNDS", 2)
    rows = rows_of(overhead, tmp_path, monkeypatch)
    broken_ones = ("forward of a training step", "inference, empty graph", "forward and backward, empty graph")
    assert failures(rows) == {f"current, {what}": BROKEN for what in broken_ones}
    assert {f"delayed, {what}" for what in broken_ones} <= rows.keys()
    assert any(what.startswith("step boundary, 64 blocks") for what in rows), "what comes last"


def test_compile_time(tmp_path, monkeypatch):
    def run(name, blocks, *rest, **options):
        if name == "delayed" and blocks == 2:
            broken()
        return {"seconds": 2.0, "cpu": 3.0, "finite": name != "mxfp8"}

    monkeypatch.setattr(compile_time, "_run", run)
    rows = rows_of(compile_time, tmp_path, monkeypatch)
    unfinished = "AssertionError: not correct, so not timed: 2 blocks, mxfp8: output is finite"
    assert failures(rows) == {"2 blocks delayed": BROKEN, "2 blocks mxfp8": unfinished}
    others = ("bf16", "current", "blockwise", "rowwise")
    assert {f"2 blocks {name}" for name in others} | {f"block {name}" for name in ("bf16", "delayed", "current")} <= rows.keys()
    assert rows["block current"]["cold / bf16"] == 1


def test_compile_time_of_restarts(tmp_path, monkeypatch):
    """Every measurement is written before the next begins: what is interrupted has its rows, of the least so far."""
    seconds = {"cold": iter((3.0, 2.0)), "warm": iter((0.5, 0.25)), "mega-cache": iter((0.75, 0.5))}
    known = []

    def run(name, blocks, sizes, cache, one_at_a_time, artifacts):
        known.append({row["what"]: row for path in tmp_path.glob("*.json") for row in json.loads(path.read_text())["rows"]})
        if name == "current":
            broken()
        if name == "bf16":
            return {"cpu": 1.0, "finite": True}
        kind = "cold" if artifacts and cache.endswith("cache") else "mega-cache" if artifacts else "warm"
        return {"cpu": next(seconds[kind]), "finite": True}

    monkeypatch.setattr(compile_time, "_run", run)
    monkeypatch.setattr(compile_time, "has_torchao", lambda: False)
    path = common.run_and_report(
        "compile_time",
        lambda given: compile_time.run(given, [4], 2, ["delayed", "current"], True),
        False,
        tmp_path,
    )
    rows = {row["what"]: row for row in json.loads(path.read_text())["rows"]}
    assert failures(rows) == {"4 blocks current": BROKEN}
    assert [rows["4 blocks delayed"][f"{kind} / bf16"] for kind in seconds] == [2.0, 0.25, 0.5]
    assert [len(written) for written in known] == [0] * 3 + [1] * 3 + [2] + [3] * 6
    assert known[8]["4 blocks delayed"]["cold CPU s"] == 3.0


@needs_triton
def test_traffic(tmp_path, monkeypatch):
    break_one(traffic, monkeypatch, "bf16", keep=("current",))
    rows = rows_of(traffic, tmp_path, monkeypatch, "--what", "block")
    assert failures(rows) == {"bf16, 2048 rows": BROKEN}
    assert rows["current, 2048 rows"]["MB"] > 0


def test_parts_that_cannot_run_leave_the_others(tmp_path, monkeypatch, capsys):
    """A benchmark is skipped where none of its parts can run."""

    def skipped(bench):
        raise common.SkipBenchmark("needs a wheel")

    monkeypatch.setattr(sys, "argv", ["traffic", "--quick", "--out", str(tmp_path)])
    common.main("traffic", {"one": skipped, "two": lambda bench: [{"what": "a", "MB": 1.0}]})
    assert [path.name for path in tmp_path.glob("*.json")] == [f"traffic-two-{isolation.Bench().where}-quick.json"]
    assert "traffic of one: skipped, needs a wheel" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exited:
        common.main("traffic", {"one": skipped})
    assert exited.value.code == common.SKIPPED


def test_accuracy(tmp_path, monkeypatch):
    """Rows of an earlier run stay."""
    pytest.importorskip("rich")
    from benchmarks import accuracy

    real = accuracy.fp8_compile
    monkeypatch.setattr(
        accuracy, "fp8_compile", lambda model, recipe, **o: broken() if recipe == "current" else real(model, recipe, **o)
    )
    monkeypatch.setattr(accuracy, "_SIZES", {"layers": 1, "width": 64, "heads": 2, "context": 32, "batch": 2})
    options = ("--what", "defaults", "--recipes", "delayed", "current", "--seeds")
    rows_of(accuracy, tmp_path, monkeypatch, *options, "0")
    rows = rows_of(accuracy, tmp_path, monkeypatch, *options, "1")
    assert {what for what, row in rows.items() if "failed" in row} == {
        f"current, 3 steps, seed {seed}, lr 0.001" for seed in (0, 1)
    }
    for seed in (0, 1):
        row = rows[f"delayed, 3 steps, seed {seed}, lr 0.001"]
        assert 0 < abs(row["difference %"]) < 1
        assert f" --seeds {seed} " in row["command"]


def test_every_benchmark_is_broken_here():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(NAMES) <= tested


# -- CUDA errors


def test_a_cuda_error_ends_the_process_and_another_one_goes_on(tmp_path, monkeypatch):
    """Failures are left out there, and what has its row is not measured again."""
    monkeypatch.setattr(casts, "_by_importance", lambda kernels: dict(list(kernels.items())[:4]))
    spoilt: list[str] = []
    measured: list[str] = []
    real = casts.NAMESPACE.operations["cast"].reference

    def reference(xs, scales, dtype, **how):
        measured.append(f"{len(xs)} rowwise={how.get('rowwise', True)} columnwise={how.get('columnwise', False)}")
        if how.get("rowwise") is False and len(xs) == 1 and not spoilt:
            spoilt.append("CUDA error: an illegal memory access was encountered")
            raise RuntimeError(spoilt[0])
        return real(xs, scales, dtype, **how)

    monkeypatch.setattr(casts.NAMESPACE.operations["cast"], "reference", reference)
    monkeypatch.setattr(isolation, "cuda_error", lambda: spoilt[-1] if spoilt else None)
    again: list[list[str]] = []

    def execv(program, arguments):
        assert program == sys.executable
        again.append(arguments)
        raise SystemExit(f"replaced by {arguments}")

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "argv", ["casts", "--quick", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="replaced by"):
        common.main("casts", casts.run)
    assert again == [[sys.executable, "-m", "benchmarks.casts", "--quick", "--out", str(tmp_path), "--resume"]]
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert [row["what"] for row in record["rows"]] == ["cast e4m3 256x256", "cast columnwise e4m3 256x256"]
    assert not record["is_complete"]
    first = record["rows"][0]
    # The process that goes on.
    monkeypatch.setattr(isolation, "cuda_error", lambda: None)
    monkeypatch.setattr(sys, "argv", again[0][2:])
    measured.clear()
    with pytest.raises(SystemExit) as exited:
        common.main("casts", casts.run)
    assert exited.value.code == 1
    record = json.loads(path.read_text())
    assert record["is_complete"]
    assert record["rows"][0] == first, "not measured again"
    assert record["rows"][1] == {"what": "cast columnwise e4m3 256x256", "failed": f"RuntimeError: {spoilt[0]}"}
    assert [row["what"] for row in record["rows"][2:]] == ["cast_transpose e4m3 256x256", "multi_cast rowwise e4m3 256x256"]
    assert set(measured) == {"1 rowwise=True columnwise=True", "2 rowwise=True columnwise=False"}, "the two that are left"
    assert len(record["checks"]) == 3


def test_errors_in_words():
    assert isolation.in_words(ValueError("first\n\n  second\nthird\nfourth")) == "ValueError: first | second | third"
    assert isolation.in_words(AssertionError()) == "AssertionError"
