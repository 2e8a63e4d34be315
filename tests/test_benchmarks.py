"""What every benchmark relies on: gates that fail, failures that cost one row, records, turns and clocks."""

import copy
import json
import sys

import pytest
import torch

from benchmarks import common, contestants, timing, train_step
from benchmarks.correctness import BLOCK_DB, Step, require_fp8, require_step, run_step
from benchmarks.isolation import Bench
from fp8pass import fp8_compile
from tests.support.models import LlamaBlock

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
    require_step("block", expected, run_step(compiled, x, dy), bench, **BLOCK_DB, residual=(x, dy))
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
    (changed("down.weight", lambda gradient, dy: -gradient), "SQNR of gradients.*down.weight"),
    (changed("attn_norm.weight", lambda gradient, dy: gradient * torch.nan), "SQNR of gradients.*attn_norm.weight"),
]


@pytest.mark.parametrize(("gradients", "match"), _WRONG)
def test_a_wrong_step_is_not_timed(step, gradients, match):
    _, x, dy, expected = step
    found = Step(expected.output, gradients(expected.gradients, dy)) if gradients else Step(x.detach(), expected.gradients)
    with pytest.raises(AssertionError, match=match):
        require_step("block", expected, found, Bench(), **BLOCK_DB, residual=(x, dy))


def test_a_model_in_high_precision_is_not_timed_as_fp8(step):
    model, x, dy, _ = step
    compiled = fp8_compile(copy.deepcopy(model), "current", rules={"gate": None}, backend="aot_eager")
    run_step(compiled, x, dy)
    with pytest.raises(AssertionError, match="18 of 21 GEMMs in FP8"):
        require_fp8("block", compiled, 21, Bench())


# -- one failure costs one row


def test_train_step(tmp_path, monkeypatch):
    """A contestant that does not compile, and one whose numbers are wrong."""
    plain, real = torch.compile, contestants.fp8_compile

    def compiled(model, recipe, *, mode, **options):
        if recipe == "current":
            raise RuntimeError("broken on purpose")
        return real(model, recipe, backend="aot_eager", **options)

    def gate(what, expected, found, *args, **kwargs):
        output = -found.output if what == "tiny 64 blockwise" else found.output
        require_step(what, expected, Step(output, found.gradients), *args, **kwargs)

    monkeypatch.setattr(torch, "compile", lambda f, mode=None, **options: plain(f, **{"backend": "aot_eager", **options}))
    monkeypatch.setattr(contestants, "fp8_compile", compiled)
    monkeypatch.setattr(train_step, "RECIPES", ("delayed", "current", "blockwise"))
    monkeypatch.setattr(train_step, "require_step", gate)
    monkeypatch.setattr(sys, "argv", ["train_step", "--quick", "--out", str(tmp_path), "--tokens", "64"])
    with pytest.raises(SystemExit, match="FAILED tiny 64 current: RuntimeError: broken on purpose"):
        common.main("train_step", train_step.run, train_step._options)
    (path,) = tmp_path.glob("*.json")
    rows = {row["what"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["tiny 64 current"]["failed"] == "RuntimeError: broken on purpose"
    wrong = "AssertionError: not correct, so not timed: tiny 64 blockwise: SQNR of the output"
    assert rows["tiny 64 blockwise"]["failed"].startswith(wrong)
    assert rows["tiny 64 delayed"]["speed-up"] > 0


# -- turns


def test_a_contestant_that_fails_in_any_call_costs_one_row():
    counts, bench = dict.fromkeys("abc", 0), Bench()

    def call(name):
        counts[name] += 1
        if name == "b" and counts[name] > 6:
            raise RuntimeError("among single calls")

    functions = {name: (lambda name=name: call(name)) for name in "abc"}
    times = timing.in_turns(functions, torch.device("cpu"), bench, lambda label: f"turn {label}", repeat=10)
    assert list(times) == ["a", "c"]
    assert bench.failed == [{"what": "turn b", "failed": "RuntimeError: among single calls"}]
    assert counts["b"] == 7
    assert counts["a"] == counts["c"] > 10
