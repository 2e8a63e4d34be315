"""Part 0 of a run on a GPU: its dry run, whole; that no operation and no recipe is forgotten; that its gates fail, and that one
failure costs one row."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gemm_layer import Experts
from benchmarks.part0 import operations, rates, recipes, run, samples, worker
from benchmarks.part0.cases import ALONE, groups
from fp8pass import fp8_compile
from fp8pass.recipes import PRESETS
from lowering.formats import Granularity
from lowering.grouped import reference as grouped_reference
from lowering.grouped.reference import GroupedGemm
from lowering.operation import NAMESPACE

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def lines_of(folder):
    """The record of the run, and a row per case."""
    head, *rows = [json.loads(line) for line in (folder / "part0.jsonl").read_text().splitlines()]
    return head, rows


# -- the cases


def cases_of_operations():
    return [case for family in operations.families() for case in operations.cases(family, CPU)]


def test_every_operation_has_cases():
    found = cases_of_operations()
    assert {case.operation for case in found} == set(NAMESPACE.operations)
    assert not any("no sample" in case.name for case in found)
    names = [case.name for case in found]
    assert len(set(names)) == len(names), "a row is known by its name"


def test_a_new_operation_without_a_sample_is_wrong(monkeypatch):
    monkeypatch.setitem(NAMESPACE.operations, "brand_new", NAMESPACE.operations["amaxes"])
    monkeypatch.setattr(samples, "_SAMPLES", {name: s for name, s in samples._SAMPLES.items() if name != "brand_new"})
    (case,) = [case for case in cases_of_operations() if case.operation == "brand_new"]
    row = worker.outcome(case, CPU)
    assert row["status"] == "wrong"
    assert "nothing is known of brand_new: add a sample to benchmarks/part0/samples.py" in row["failed"]


def test_groups_are_operations_recipes_and_rates():
    assert set(recipes.NAMES) == set(PRESETS)
    assert set(groups()) == {ALONE, *operations.families(), *(f"recipe {name}" for name in PRESETS)}
    for recipe in PRESETS:
        assert [case.name for case in groups()[f"recipe {recipe}"](CPU)] == ["Inductor", "CUDA graphs", "experts"]


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [("current", Granularity.TENSOR_WISE), ("rowwise", Granularity.ROW_WISE), ("blockwise", Granularity.BLOCK_1X128)],
)
def test_grouped_gemms_are_measured_on_what_casts_write(recipe, kind, monkeypatch):
    """Strides of all operands of the forward's GEMM: those that a compiled mixture of experts gives it."""
    sizes = rates._Sizes(experts=(2, 256, 256, 128))
    experts, rows, inputs, outputs = sizes.experts
    given: list[GroupedGemm] = []
    real = grouped_reference.scaled_grouped_mm
    monkeypatch.setattr(
        grouped_reference, "scaled_grouped_mm", lambda *a, **k: (given.append(GroupedGemm(*a, **k)), real(*a, **k))[1]
    )
    with torch.no_grad():
        compiled = fp8_compile(Experts(experts, inputs, outputs, rows, CPU), recipe, backend="aot_eager")
        compiled(torch.randn(rows, inputs, dtype=torch.bfloat16))
    (of_product,) = given
    given.clear()
    monkeypatch.setattr(NAMESPACE.operations["scaled_grouped_mm"], "overload", grouped_reference.scaled_grouped_mm)
    rates._grouped(sizes, CPU, kind, torch.float8_e4m3fn, of_product.fast_accum, "reference")
    for name in ("a", "b", "scale_inv_a", "scale_inv_b", "offs"):
        measured, wanted = (getattr(gemm, name) for gemm in (given[0], of_product))
        assert (measured.shape, measured.stride(), measured.dtype) == (wanted.shape, wanted.stride(), wanted.dtype), name


# -- gates


def test_an_operation_that_computes_something_else_is_wrong(monkeypatch):
    """One bit of one result; one part in ten of a product; a NaN in another place; one result too many; another dtype, another
    layout; nothing written."""
    wrong = {
        "transposed_copy": lambda out: flipped(out),
        "scaled_mm": lambda out: out * 1.1,
        "quantize": lambda out: torch.full_like(out.float(), torch.nan).to(out.dtype),
        "amax_rowwise": lambda out: [out, out],
        "multi_scales": lambda out: (out[0], out[1].double()),
        "gemm_ready": lambda out: (out[0].view(torch.uint8).t().contiguous().t().view(out[0].dtype), out[1]),
    }
    for name, change in wrong.items():
        operation = NAMESPACE.operations[name]
        monkeypatch.setattr(operation, "overload", lambda *a, o=operation, c=change, **k: c(o.reference(*a, **k)))
    monkeypatch.setattr(NAMESPACE.operations["record_amax"], "overload", lambda *args, **options: None)
    cases = [case for case in cases_of_operations() if "empty" not in case.name]  # the wrong product of nothing is right
    rows = {case: worker.outcome(case, CPU) for case in cases if case.operation in {*wrong, "record_amax"}}
    statuses = {
        name: {row["status"] for case, row in rows.items() if case.operation == name} for name in (*wrong, "record_amax")
    }
    assert statuses.pop("record_amax") == {"wrong", "right"}, "nothing is written of no amaxes"
    assert statuses == {name: {"wrong"} for name in wrong}


def flipped(x):
    x.view(torch.uint8).view(-1)[-1] ^= 0x40  # a NaN becomes a number
    return x


@pytest.mark.parametrize("name", ["_scaled_mm", "_grouped_mm"])
def test_a_wrong_product_has_no_rate(name, monkeypatch):
    real = getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *args, **kwargs: real(*args, **kwargs) * 1.05)
    rows = {case.name: worker.outcome(case, CPU) for case in rates.cases(CPU) if "attention" not in case.name}
    of_name = {n for n in rows if n == "bf16 grouped" or n.startswith(("FP8 per tensor", "FP8 rowwise"))}
    broken = {n for n in of_name if ("grouped" in n) == (name == "_grouped_mm") and rows[n]["status"] != "skipped"}
    assert any("per tensor" in n or "grouped" in n for n in broken)
    assert {n for n, row in rows.items() if row["status"] == "wrong"} == broken
    assert not any("TFLOP/s" in rows[n] for n in broken)


def test_a_recipe_that_stays_in_high_precision_is_wrong(monkeypatch):
    real = recipes.fp8_compile
    monkeypatch.setattr(recipes, "fp8_compile", lambda model, recipe, **o: real(model, recipe, rules={"*": None}, **o))
    rows = [worker.outcome(case, CPU) for case in recipes.cases("current", CPU) if case.name != "CUDA graphs"]
    assert [row["status"] for row in rows] == ["wrong", "wrong"]
    assert "0 of 21 GEMMs in FP8" in rows[0]["failed"]


# -- processes

#: Stands in for the worker's groups, which take a second to import: cases that end well and badly.
_BAD_CASES = """
import os, pathlib, signal, sys, time
import torch
from benchmarks.part0 import cases as of_part0, worker
from benchmarks.part0.cases import Case, SkipCase

spoilt = []

def illegal_access():
    spoilt.append("CUDA error: an illegal memory access was encountered")
    raise RuntimeError(spoilt[0])

def wrong():
    raise AssertionError("relative error 1.0 > 0.01")

def skipped():
    raise SkipCase("no Blackwell")

cases = [
    Case("first", lambda: {"note": 1}), Case("wrong", wrong), Case("illegal", illegal_access), Case("behind it", dict),
    Case("segfault", lambda: os.kill(os.getpid(), signal.SIGSEGV)), Case("exit", lambda: os._exit(3)),
    Case("skipped", skipped), Case("hangs", lambda: time.sleep(300)), Case("last", dict),
]
made = {"bad": lambda on: iter(cases), "good": lambda on: iter(cases[:1]), "import": lambda on: 1 / 0}
of_part0.groups = lambda: made
worker.cuda_error = lambda: spoilt[0] if spoilt else None
group, device, first, path = sys.argv[1:]
sys.exit(worker.work(group, torch.device(device), int(first), pathlib.Path(path)))
"""


@pytest.fixture
def bad_cases(monkeypatch):
    monkeypatch.setattr(run, "_WORKER", ("-c", _BAD_CASES))
    monkeypatch.setattr(run, "groups", lambda: dict.fromkeys(("bad", "good", "import")))
    monkeypatch.setattr(run, "DRY_CASE_LIMIT", 20.0)


def test_one_failure_costs_one_row(bad_cases, tmp_path, capsys):
    assert not run.run(tmp_path, device="cpu")
    head, rows = lines_of(tmp_path)
    assert head["machine"]["torch"] == torch.__version__
    bad = {row["case"]: row["status"] for row in rows if row["group"] == "bad"}
    assert bad == {
        "first": "right", "wrong": "wrong", "illegal": "raised", "behind it": "right", "segfault": "died", "exit": "died",
        "skipped": "skipped", "hangs": "hung", "last": "right",
    }  # fmt: skip
    assert [row["status"] for row in rows if row["group"] == "good"] == ["right"]
    ((whole),) = [row for row in rows if row["group"] == "import"]
    assert (whole["status"], "ZeroDivisionError" in whole["failed"]) == ("died", True)
    assert next(row for row in rows if row["case"] == "first")["note"] == 1
    assert "in wrong" in next(row for row in rows if row["case"] == "wrong")["traceback"]
    failed = {row["case"]: row["failed"] for row in rows if row["group"] == "bad" and "failed" in row}
    assert failed["illegal"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert "exit status -11" in failed["segfault"]
    assert "exit status 3" in failed["exit"]
    assert "nothing came for" in failed["hangs"]
    printed = capsys.readouterr().out
    assert "WRONG bad / wrong: AssertionError: relative error 1.0 > 0.01" in printed
    assert "skipped bad / skipped: no Blackwell" in printed


def test_rows_are_written_as_they_come(bad_cases, tmp_path, monkeypatch):
    """The end of part 0 itself leaves them."""

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_last_line", interrupted)  # where it names the process that has died
    with pytest.raises(KeyboardInterrupt):
        run.run(tmp_path, ("bad",), device="cpu")
    _, rows = lines_of(tmp_path)
    cases = {row["case"]: row["status"] for row in rows}
    assert cases.pop("segfault") == "hung", "ended with its process"
    assert cases == {"first": "right", "wrong": "wrong", "illegal": "raised", "behind it": "right"}


def test_the_time_of_part_0_ends(bad_cases, tmp_path, monkeypatch):
    """Running groups are ended then, waiting ones are named."""
    monkeypatch.setattr(run, "num_cores", lambda: 1)
    assert not run.run(tmp_path, ("bad", "good"), device="cpu", limit=0.5)
    _, rows = lines_of(tmp_path)
    assert [(row["group"], row["status"]) for row in rows] == [("bad", "hung"), ("good", "not run")]
    assert all("time of part 0" in row["failed"] for row in rows)


# -- the dry run

without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
#: Of torch before 2.13.
UNKNOWN_TO_OLDER = "FP8 rowwise"


def require_whole(rows, names):
    """Every case of these groups has a row of its own, and all are right."""
    assert {row["status"] for row in rows} <= {"right", "skipped"}, rows
    skipped = {row["case"] for row in rows if row["status"] == "skipped"}
    assert all(name.startswith(UNKNOWN_TO_OLDER) and torch.__version__ < (2, 13) for name in skipped), skipped
    found = {(row["group"], row["case"]) for row in rows}
    assert len(found) == len(rows)
    assert found == {(name, case.name) for name in names for case in groups()[name](CPU)}
    assert all(row["seconds"] >= 0 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@without_a_gpu
@pytest.mark.parametrize("name", [name for name in groups() if name not in ("recipe current", "recipe rowwise")])
def test_every_case_of_a_group(name, tmp_path):
    """As its process runs them, in this one: half of what a group takes in one of its own are imports. Two recipes, whose cases
    `delayed` and `rowwise_with_gw_hp` have as well, are left to GPUs."""
    path = tmp_path / "group.jsonl"
    assert worker.work(name, CPU, 0, path) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows.pop()["status"] == "finished"
    assert all(row["status"] == "running" for row in rows[::2])
    require_whole(rows[1::2], [name])
    if name == ALONE:
        measured = rows[1::2]
        assert sum("TFLOP/s" in row or row["status"] == "skipped" for row in measured) > 15
        assert sum("TB/s" in row for row in measured) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@without_a_gpu
def test_a_dry_run(tmp_path):
    """Some groups, in their processes, by the documented command."""
    names = [ALONE, "casts state", "casts mxfp8"]
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", "0", "--cpu", "--out", str(tmp_path), "--group", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    _, rows = lines_of(tmp_path)
    require_whole(rows, names)
    assert "part 0" in (tmp_path / "part0.log").read_text()
    assert "| 0 | `python3 -m benchmarks.part0.run --cpu" in (tmp_path / "gpu-part0-dry.md").read_text()
