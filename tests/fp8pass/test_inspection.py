"""`inspect`: records, the table, graphs as Python, JSON, one page that needs nothing else; `diff`: what two inspections decided
differently, why."""

import copy
import dataclasses
import functools
import html
import json
import re

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, Float8CurrentScaling, Format, diff, fp8_compile, inspect, monitor, use_rules
from fp8pass.errors import Fp8FallbackWarning, OptionError
from tests.support.cases import each
from tests.support.models import LlamaBlock, Stack, mlp


def inspected(model, recipe, *args, **options):
    """The inspection of a model after a step, which gets numbers [16, 64] if no arguments are given."""
    compiled = fp8_compile(model, recipe, backend="aot_eager", **options)
    compiled(*(args or [torch.randn(16, 64, requires_grad=True)])).sum().backward()
    return inspect(compiled)


@functools.cache
def deep(*in_high_precision):
    model = Stack((mlp(32, 64, 32) for _ in range(4)), nn.Linear(32, 48), residual=True)
    x = torch.randn(16, 32, requires_grad=True)
    return inspected(model, DelayedScaling(), x, rules=dict.fromkeys(in_high_precision))


def test_the_table_folds_equal_layers(monkeypatch):
    """Without a terminal it has 160 columns."""
    report = deep()
    lines = str(report).splitlines()
    assert {len(line) for line in lines if line.startswith("│")} == {max(map(len, lines[:3]))}
    assert repr(report) == str(report).rstrip("\n")
    assert [sum(name in line for line in lines) for name in ("layers.0-3.0 (x4)", "│ head ")] == [3, 3]
    assert lines[-1] == "27 of 27 GEMMs run in FP8, in 1 graph."
    monkeypatch.setattr("sys.stdout", None)  # as under pythonw
    assert str(report).splitlines() == lines


def test_json_the_notebooks_table_and_graphs_as_python():
    data = json.loads(json.dumps(deep().to_dict()))
    assert len(data["gemms"]) == 27
    assert set(data["gemms"][0]) >= {"module", "role", "m", "n", "k", "quantized", "reason", "recipe", "a_format", "source"}
    assert data["graphs"][0]["saved_bytes"] > 0
    assert "&#x27;head&#x27; keeps high precision" in deep("head")._repr_html_()
    graph = deep().graphs[0]
    for part in (graph.before, graph.after, graph.forward, graph.backward):
        assert ("scaled_mm" in part.print_readable(print_output=False)) is (part is not graph.before)


def test_an_inspection_is_of_its_moment():
    """Later steps of the model change neither its text nor its numbers."""
    compiled = fp8_compile(mlp(), "current", backend="aot_eager")
    compiled(torch.randn(16, 64, requires_grad=True)).sum().backward()
    found = inspect(compiled)
    before = str(found), found.to_dict(), found.decisions()
    use_rules(compiled, {"*": None})
    assert "Other rules take effect at the next step boundary" in str(inspect(compiled))
    with torch.compiler.set_stance("force_eager"), pytest.warns(Fp8FallbackWarning):
        compiled(torch.randn(16, 64))
    assert "Fp8FallbackWarning" in str(inspect(compiled))
    compiled(torch.randn(32, 64, requires_grad=True)).sum().backward()
    assert (str(found), found.to_dict(), found.decisions()) == before


# -- the terminal


def test_text_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = str(deep("head", "layers.1.0:grad_weight")).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for word in ("layers.0-3.2 (x4)", "output", "delayed", "(1)", "rule: 'head' keeps high precision", "23 of 27 GEMMs"):
        assert word in text


# -- comparisons


def inspected_layers(recipe="current", rows=16, head=16, num_layers=2, **options):
    torch._dynamo.reset()
    model = Stack((mlp(32, 64, 32) for _ in range(num_layers)), nn.Linear(32, head, bias=False), residual=True)
    return inspected(model, recipe, torch.randn(rows, 32, requires_grad=True), **options)


@pytest.fixture(scope="module")
def plain():
    return inspected_layers()


def causes(before, after):
    return {(c.module, c.role, *c.causes) for c in diff(before, after).changes}


def test_what_differs_and_why(plain):
    """Another rule is the only cause even where shapes differ."""
    same = diff(plain, inspected_layers(rows=48))
    assert not same
    assert str(same) == "0 GEMMs changed their decision; 15 kept it, 15 of them with another shape.\n"
    by_rule = inspected_layers(rows=32, rules={"layers.*.0:output": None})
    assert causes(plain, by_rule) == {(f"layers.{i}.0", "output", "rule: none -> 'layers.*.0:output'") for i in range(2)}
    assert "high precision, rule: 'layers.*.0:output'" in " ".join(repr(diff(plain, by_rule)).split())
    assert diff(plain, by_rule).settings == ["Rule 'layers.*.0:output' is only in the second."]
    changed = {why for *_, why in causes(plain, inspected_layers(Float8CurrentScaling(fp8_format=Format.E4M3)))}
    assert changed == {"recipe: Float8CurrentScaling() -> Float8CurrentScaling(fp8_format=E4M3)"}
    selected = causes(plain, inspected_layers(select="all"))
    assert {(module, why) for module, _, why in selected} == {("head", "select: auto -> all")}
    assert ("head", "output", "shape: 16 x 96 x 32 -> 16 x 16 x 32") in causes(inspected_layers(head=96), plain)


def test_saved_inspections_another_version_and_gemms_that_are_matched_by_likeness(plain):
    saved = json.loads(json.dumps(plain.to_dict()))
    other = copy.deepcopy(saved)
    for gemm in other["gemms"]:
        if gemm["reason"]:
            gemm["reason"] += " and 3"
    assert not diff(plain, other), "numbers of reasons"
    other["versions"]["torch"] = "2.99.0"
    other["gemms"][0] |= {"quantized": False, "reason": "hardware: gone", "recipe": None}
    (change,) = json.loads(json.dumps(diff(saved, other).to_dict()))["changes"]
    assert change["causes"] == [f"version of torch: {torch.__version__} -> 2.99.0"]
    assert "gone" in diff(saved, other)._repr_html_()
    twice = copy.deepcopy(saved)
    twice["gemms"].insert(0, twice["gemms"][0] | {"m": 99, "quantized": False, "reason": "slow: 0.5", "recipe": None})
    found = diff(saved, twice)
    assert (found.changes, len(found.only_after)) == ([], 1)


@each("wrong", [3, [], {"gemms": []}])
def test_what_is_no_inspection_or_has_not_run(wrong):
    with pytest.raises(OptionError, match=r"the second argument of diff is a \w+.*inspect\(compiled\)"):
        diff(deep(), wrong)
    with pytest.raises(OptionError, match="the first inspection has no GEMM: run the model"):
        diff(inspect(fp8_compile(mlp(), backend="aot_eager")), deep())


# -- the page

NAUGHTY = '<img src=x onerror="document.title=1">&'


@pytest.fixture(scope="module")
def compiled():
    torch.manual_seed(0)
    model = Stack((LlamaBlock(32, 64, 2) for _ in range(2)), nn.Linear(32, 48))
    model = fp8_compile(model, "delayed", backend="aot_eager", rules={"layers.1.wq": None})
    for _ in range(3):
        model(torch.randn(2, 16, 32, requires_grad=True)).square().mean().backward()
    return model


@pytest.fixture(scope="module")
def page(compiled, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    inspect(compiled).to_html(path)
    return path


def test_the_page_loads_nothing_has_a_row_per_gemm_and_a_summary(compiled, page):
    report = inspect(compiled)
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(|<(link|img|iframe)\b|<[^>]*\s(src|href|onclick)\s*=", text)
    assert re.search(r"""<meta http-equiv=[^>]* content=["']default-src 'none'""", text)
    table = html.unescape(text.split('id="gemms"')[1].partition("</table>")[0])
    rows = [line.split("<td>")[1:] for line in table.splitlines() if "<td>" in line]
    for row, g in zip(rows, report.gemms, strict=True):
        recipe = "delayed" if g.quantized else "-"
        assert [*row[:4], row[7]] == [g.module, g.role, f"{g.m} x {g.n} x {g.k}", recipe, g.reason or ""]
    assert rows[0][6] == "benchmarks/models.py:31"
    flops = {q: sum(2 * g.m * g.n * g.k for g in report.gemms if g.quantized is q) for q in (True, False)}
    counts = f"{sum(g.quantized for g in report.gemms)} of {len(report.gemms)}"
    for summary in (counts, f"{flops[True] / sum(flops.values()):.1%}", f"{report.speedup:.2f} x"):
        assert f"<b>{summary}</b>" in text
    assert all(f"</span>{dtype} " in text for dtype in report.graphs[0].saved_dtypes)
    assert "Compile cache: graph_0 bypassed: torch caches generated code only." in text
    assert "SQNR" not in text, "no numbers without a monitor"


def test_names_are_escaped_everywhere(compiled, tmp_path):
    report = inspect(compiled)
    gemms = [dataclasses.replace(g, module=f"{NAUGHTY}</script>", reason=NAUGHTY, source=NAUGHTY) for g in report.gemms]
    path = tmp_path / "page.html"
    dataclasses.replace(report, gemms=gemms, unmatched_rules=[NAUGHTY], rule_remarks=(NAUGHTY,)).to_html(path)
    text = path.read_text(encoding="utf-8")
    assert "<img" not in text
    assert text.count("</script>") == 1
    assert "&lt;img" in text
    assert text.count("\\u003cimg") >= 1


def test_numbers_of_a_monitor(tmp_path):
    """The blockwise recipe's copies have numbers of their own and no history."""
    path = tmp_path / "page.html"
    model = fp8_compile(mlp(32, 64, 32), "blockwise", backend="aot_eager")
    watching = monitor(model, every=1)
    model(torch.randn(16, 32, requires_grad=True)).square().sum().backward()
    inspect(model).to_html(path, watching.latest)
    text = path.read_text(encoding="utf-8")
    assert re.findall("<option>([a-zA-Z]+)</option>", text)[:4] == ["coverage", "amax", "SQNR", "underflow"]
    worst = {}
    for tensor in watching.latest.tensors:
        worst[tensor.name] = min(tensor.sqnr, worst.get(tensor.name, 1000.0))
    for name, value in worst.items():
        assert re.search(rf"{name}</span><br>amax [^,]+, SQNR {value:.3g} dB, underflow", text)
