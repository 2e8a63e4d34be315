"""What every benchmark relies on: gates that fail, failures that cost one row, records, turns and clocks."""

import copy
import json
import os
import shutil
import stat
import subprocess
import sys

import pytest
import torch

from benchmarks import (  # fmt: skip
    casts,
    common,
    compile_time,
    contestants,
    correctness,
    gemm_layer,
    isolation,
    overhead,
    timing,
    train_step,
    tune,
    whole_model,
)
from benchmarks.correctness import Step, require_fp8, require_step, run_step
from benchmarks.isolation import Bench
from fp8pass import fp8_compile
from tests.support.models import LlamaBlock

BOUNDS = {"output_db": 18.0, "gradient_db": 12.0}
CPU = torch.device("cpu")
BROKEN = "RuntimeError: broken on purpose"


def broken(*args, **kwargs):
    raise RuntimeError("broken on purpose\n")


# -- gates


@pytest.fixture(scope="module")
def step():
    """A block, its input and output gradient, and what it computes in high precision."""
    torch.manual_seed(0)
    model = LlamaBlock(64, 128, 4).bfloat16()
    x = torch.randn(1, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    return model, x, dy, run_step(model, x, dy)


def test_what_is_right_passes(step):
    model, x, dy, expected = step
    compiled = fp8_compile(copy.deepcopy(model), "current", backend="aot_eager")
    bench = Bench()
    require_step("block", expected, run_step(compiled, x, dy), bench, **BOUNDS, residual=(x, dy))
    require_fp8("block", compiled, 21, bench)
    assert len(bench.checks) == 4
    assert all(p.grad is None for p in (x, *model.parameters(), *compiled.parameters()))


def changed(name, value):
    """The gradient of `name` is `value` of it."""
    return lambda gradients, dy: {**gradients, name: value(gradients[name], dy)}


#: The gradients that are found instead; None: the right ones, with the input as the output. And what the error says.
_WRONG = [
    (None, "output less its residual"),  # which would score more than the bound with the residual
    (changed("x", lambda gradient, dy: dy.clone()), r"SQNR of gradients.*\(x\)"),  # of a backward that computes nothing
    (lambda gradients, dy: {k: g for k, g in gradients.items() if k != "gate.weight"}, "gradients of 10 tensors"),
    *(
        (changed(name, value), f"SQNR of gradients.*{name}")
        for name in ("x", "down.weight", "attn_norm.weight")
        for value in (lambda gradient, dy: -gradient, lambda gradient, dy: torch.full_like(gradient, torch.nan))
    ),
]


@pytest.mark.parametrize(("gradients", "match"), _WRONG)
def test_a_wrong_step_is_not_timed(step, gradients, match):
    _, x, dy, expected = step
    found = Step(expected.output, gradients(expected.gradients, dy)) if gradients else Step(x.detach(), expected.gradients)
    with pytest.raises(AssertionError, match=match):
        require_step("block", expected, found, Bench(), **BOUNDS, residual=(x, dy))


def test_a_model_in_high_precision_is_not_timed_as_fp8(step):
    model, x, dy, _ = step
    compiled = fp8_compile(copy.deepcopy(model), "current", rules={"gate": None}, backend="aot_eager")
    run_step(compiled, x, dy)
    with pytest.raises(AssertionError, match="18 of 21 GEMMs in FP8"):
        require_fp8("block", compiled, 21, Bench())


# -- one failure costs one row


def rows_of(module, folder, monkeypatch, *options):
    """Run a benchmark as its command line does; its rows by name and its failures, after it has exited with 1."""
    name = module.__name__.rpartition(".")[2]
    run, add_options = getattr(module, "PARTS", None) or module.run, getattr(module, "_options", None)
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--out", str(folder), *options])
    with pytest.raises(SystemExit) as exited:
        common.main(name, run, add_options)
    assert exited.value.code == 1
    (path,) = folder.glob("*.json")
    record = json.loads(path.read_text())
    assert record["is_complete"]
    rows = {row["what"]: row for row in record["rows"]}
    return rows, {what: row["failed"] for what, row in rows.items() if "failed" in row}


def break_recipe(module, monkeypatch, broken_one):
    """The module's `fp8_compile` raises for one recipe."""
    real = module.fp8_compile
    monkeypatch.setattr(
        module, "fp8_compile", lambda model, recipe, **o: broken() if recipe == broken_one else real(model, recipe, **o)
    )


@pytest.fixture
def no_code_generation(monkeypatch):
    plain, real = torch.compile, contestants.fp8_compile
    monkeypatch.setattr(torch, "compile", lambda f, mode=None, **options: plain(f, **{"backend": "aot_eager", **options}))
    monkeypatch.setattr(contestants, "fp8_compile", lambda *args, mode, **options: real(*args, backend="aot_eager", **options))
    monkeypatch.setattr(train_step, "RECIPES", ("delayed", "current"))


def test_whole_model(tmp_path, monkeypatch):
    """A recipe that does not compile, and one that trains another loss."""
    pytest.importorskip("transformers")
    plain, real = torch.compile, whole_model.fp8_compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: plain(model, **{"backend": "aot_eager", **options}))
    monkeypatch.setattr(whole_model, "fp8_compile", lambda model, recipe: real(model, recipe, backend="aot_eager"))
    monkeypatch.setattr(whole_model, "RECIPES", ("delayed", "current", "rowwise"))
    break_recipe(whole_model, monkeypatch, "current")
    trained, count = whole_model._train, iter(range(3))
    monkeypatch.setattr(
        whole_model, "_train", lambda *a: (row := trained(*a)) | {"loss": row["loss"] * (1, 1, 1.02)[next(count)]}
    )
    rows, failed = rows_of(whole_model, tmp_path, monkeypatch)
    assert failed.keys() == {"current", "rowwise"}
    assert failed["current"] == BROKEN
    assert failed["rowwise"].startswith("AssertionError: not correct, so not timed: rowwise: last loss within 2.0e-02 <= 0.01")
    assert rows["delayed"]["speed-up"] > 0
    assert rows["delayed"]["GEMMs in FP8"] == "42 of 45"


@pytest.mark.usefixtures("no_code_generation")
@pytest.mark.parametrize("fault", ["compiling", "numbers"])
def test_train_step(fault, tmp_path, monkeypatch):
    """A contestant that does not compile; a baseline whose numbers are wrong, which nothing is compared with then."""
    real_gate = correctness.require_step

    def gate(what, expected, found, *args, **kwargs):
        output = -found.output if what == "tiny 64 bf16" else found.output
        real_gate(what, expected, Step(output, found.gradients), *args, **kwargs)

    if fault == "compiling":
        break_recipe(contestants, monkeypatch, "current")
    else:
        monkeypatch.setattr(correctness, "require_step", gate)
    rows, failed = rows_of(train_step, tmp_path, monkeypatch, "--tokens", "64")
    assert rows.keys() == {
        f"tiny 64 {name}{graph}" for name in ("bf16", "delayed", "current") for graph in ("", ", CUDA graph")
    }
    if fault == "compiling":
        assert failed == {"tiny 64 current": BROKEN, "tiny 64 current, CUDA graph": BROKEN}
        assert rows["tiny 64 delayed"]["speed-up"] > 0
        assert rows["tiny 64 delayed"]["saved / bf16"] > 0
    else:
        ((what, text),) = failed.items()
        assert what == "tiny 64 bf16"
        assert text.startswith("AssertionError: not correct, so not timed: tiny 64 bf16: SQNR of the output")
        assert "speed-up" not in rows["tiny 64 delayed"]
        assert rows["tiny 64 delayed, CUDA graph"]["speed-up"] > 0


def test_gemm_layer_of_which_one_linear_fails(tmp_path, monkeypatch):
    """A contestant that did not run every linear has no sum."""
    monkeypatch.setattr(gemm_layer, "RECIPES", ("delayed",))
    monkeypatch.setattr(gemm_layer, "GROUPED", {})
    real = gemm_layer._prequantized
    monkeypatch.setattr(gemm_layer, "_prequantized", lambda what, *rest: broken() if what == "up" else real(what, *rest))
    rows, failed = rows_of(gemm_layer, tmp_path, monkeypatch)
    assert failed == {"up 64->256, pre-quantized": BROKEN}
    assert {"delayed ms", "delayed graph ms", "bf16 ms", "pre-quantized ms"} <= rows["down 256->64"].keys()
    assert "pre-quantized ms" not in rows["sum"]
    assert rows["speed-up"]["bf16 ms"] == rows["speed-up"]["bf16 graph back-to-back ms"] == 1
    assert rows["speed-up"]["delayed ms"] > 0


def test_tune(tmp_path, monkeypatch):
    """One way to compute a GEMM, which leaves the other, and one of which nothing can be made."""
    real_gate, real_make = Bench.require, tune._implementation

    def gate(bench, condition, text):
        return real_gate(bench, condition and not text.startswith("qkv grad_input, fast"), text)

    monkeypatch.setattr(Bench, "require", gate)
    monkeypatch.setattr(tune, "_implementation", lambda name, *r: broken() if name == "up output" else real_make(name, *r))
    rows, failed = rows_of(tune, tmp_path, monkeypatch)
    assert failed.keys() == {"per tensor, qkv grad_input 64x64x192, fast", "blockwise, up output"}
    assert len(rows) - len(failed) == 12 + 11 + 2
    assert "accurate ms" in rows["per tensor, qkv grad_input 64x64x192"]
    assert "fast ms" not in rows["per tensor, qkv grad_input 64x64x192"]


def test_overhead(tmp_path, monkeypatch):
    break_recipe(overhead, monkeypatch, "current")
    monkeypatch.setattr(overhead, "_ROUNDS", 2)
    rows, failed = rows_of(overhead, tmp_path, monkeypatch)
    kinds = ("forward of a training step", "inference, empty graph", "forward and backward, empty graph")
    assert failed == {f"current, {what}": BROKEN for what in kinds}
    assert {f"delayed, {what}" for what in kinds} <= rows.keys()
    assert any(what.startswith("step boundary, 64 blocks") for what in rows), "what comes last"


def test_compile_time(tmp_path, monkeypatch):
    """Every measurement is written before the next begins: what is interrupted has its rows, of the least so far."""
    warm = (*[0.5] * 10, 0.25, *[0.5] * 5)  # eight starts for each cold one
    seconds = {"cold": iter((3.0, 2.0)), "warm": iter(warm), "mega-cache": iter((0.75, 0.5))}
    known = []

    def run(name, blocks, cache, artifacts):
        known.append({row["what"]: row for path in tmp_path.glob("*.json") for row in json.loads(path.read_text())["rows"]})
        if name == "current":
            broken()
        if name != "delayed":
            return {"cpu": 1.0, "finite": name == "bf16"}
        kind = "cold" if artifacts == f"{cache}.artifacts" else "mega-cache" if artifacts else "warm"
        return {"cpu": next(seconds[kind]), "finite": True}

    monkeypatch.setattr(compile_time, "_run", run)
    monkeypatch.setattr(compile_time, "has_torchao", lambda: False)
    recipes = ["delayed", "current", "mxfp8"]
    path = common.run_and_report("compile_time", lambda bench: compile_time.run(bench, [4], 2, recipes, True), False, tmp_path)
    rows = {row["what"]: row for row in json.loads(path.read_text())["rows"]}
    unfinished = "AssertionError: not correct, so not timed: 4 blocks, mxfp8: output is finite"
    failed = {what: row["failed"] for what, row in rows.items() if "failed" in row}
    assert failed == {"4 blocks current": BROKEN, "4 blocks mxfp8": unfinished}
    assert [rows["4 blocks delayed"][f"{kind} / bf16"] for kind in seconds] == [2.0, 0.25, 0.5]
    assert [len(written) for written in known] == [0, 1, 2, 3] + [4] * 38
    assert known[4]["4 blocks delayed"]["cold CPU s"] == 3.0


def test_accuracy_keeps_rows_of_earlier_runs(tmp_path, monkeypatch):
    pytest.importorskip("rich")  # of the example whose model it trains
    from benchmarks import accuracy

    break_recipe(accuracy, monkeypatch, "current")
    monkeypatch.setattr(accuracy, "_SIZES", {"layers": 1, "width": 64, "heads": 2, "context": 32, "batch": 2})
    for seed in ("0", "1"):
        options = ("--what", "defaults", "--recipes", "delayed", "current", "--seeds", seed)
        rows, failed = rows_of(accuracy, tmp_path, monkeypatch, *options)
    assert failed.keys() == {f"current, 3 steps, seed {seed}, lr 0.001" for seed in (0, 1)}
    for seed in (0, 1):
        row = rows[f"delayed, 3 steps, seed {seed}, lr 0.001"]
        assert 0 < abs(row["difference %"]) < 1
        assert f" --seeds {seed} " in row["command"]


def test_a_cuda_error_ends_the_process_and_another_one_goes_on(tmp_path, monkeypatch):
    """Failures are left out there, and what has its row is not measured again."""
    chosen = ["cast e4m3", "cast columnwise e4m3", "cast_transpose e4m3", "multi_cast rowwise e4m3"]
    monkeypatch.setattr(casts, "_by_importance", lambda kernels: {name: kernels[name] for name in chosen})
    spoilt, measured, again = [], [], []
    real = casts.NAMESPACE.operations["cast"].reference

    def reference(xs, scales, dtype, **how):
        measured.append((len(xs), how.get("rowwise", True), how.get("columnwise", False)))
        if how.get("rowwise") is False and len(xs) == 1 and not spoilt:
            spoilt.append("CUDA error: an illegal memory access was encountered")
            raise RuntimeError(spoilt[0])
        return real(xs, scales, dtype, **how)

    def execv(program, arguments):
        assert program == sys.executable
        again.append(arguments)
        raise SystemExit("replaced")

    monkeypatch.setattr(casts.NAMESPACE.operations["cast"], "reference", reference)
    monkeypatch.setattr(isolation, "cuda_error", lambda: spoilt[-1] if spoilt else None)
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "argv", ["casts", "--quick", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="replaced"):
        common.main("casts", casts.run)
    assert again == [[sys.executable, "-m", "benchmarks.casts", "--quick", "--out", str(tmp_path), "--resume"]]
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    names = [f"{name} 256x256" for name in chosen]
    assert ([row["what"] for row in record["rows"]], record["is_complete"]) == (names[:2], False)
    first = record["rows"][0]
    # The process that goes on.
    monkeypatch.setattr(isolation, "cuda_error", lambda: None)
    measured.clear()
    rows, failed = rows_of(casts, tmp_path, monkeypatch, "--resume")
    assert list(rows) == names
    assert rows[names[0]] == first, "not measured again"
    assert failed == {names[1]: f"RuntimeError: {spoilt[0]}"}
    assert set(measured) == {(1, True, True), (2, True, False)}, "the two that are left"


# -- records


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_results_name_the_commit(tmp_path):
    def git(*arguments):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

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


# -- turns and clocks


def in_turns(functions, bench=None, **options):
    return timing.in_turns(functions, CPU, bench or Bench(), lambda label: f"turn {label}", **options)


@pytest.mark.parametrize("last", [0, 6, 20], ids=["first call", "among single ones", "at the very end"])
def test_a_contestant_that_fails_in_any_call_costs_one_row(last):
    counts, bench = dict.fromkeys("abc", 0), Bench()

    def call(name):
        counts[name] += 1
        if name == "b" and counts[name] > last:
            raise RuntimeError(f"call {last}")

    times = in_turns({name: (lambda name=name: call(name)) for name in "abc"}, bench, repeat=10)
    assert list(times) == ["a", "c"]
    assert bench.failed == [{"what": "turn b", "failed": f"RuntimeError: call {last}"}]
    assert counts["b"] == last + 1
    assert counts["a"] == counts["c"] > 20


def test_clocks_come_with_the_times(tmp_path, monkeypatch):
    """A stand-in for nvidia-smi, which prints a sample whenever it is asked to; without one there are no clocks."""
    sample = "while true; do date '+%Y/%m/%d %H:%M:%S.%3N, 1500, 3201, 700.0, 50'; sleep 0.02; done"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ntrap 'exit 0' TERM\n{sample}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    x = torch.randn(64, 64)
    times = in_turns({"a": lambda: x @ x}, repeat=1, seconds={"a": 0.9})
    assert times["a"].clocks == {"SM MHz": 1500, "memory MHz": 3201, "W": 700, "°C": 50}
    assert timing.columns("a", times["a"]).keys() == {"a ms", "a back-to-back ms", "a SM MHz", "a W"}
    monkeypatch.setenv("PATH", "/nowhere")
    assert in_turns({"a": lambda: None}, repeat=1)["a"].clocks == {}
