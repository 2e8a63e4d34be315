"""`inspect(...).to_html`: one page that needs nothing else."""

import collections
import dataclasses
import html
import json
import re

import pytest
import torch
from torch import nn

from fp8pass import fp8_compile, inspect, monitor, state
from fp8pass.tools.picture import pictures
from tests.support.models import LlamaBlock, Stack, mlp

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
def measured(compiled):
    with monitor(compiled, every=1) as watching:
        compiled(torch.randn(2, 16, 32, requires_grad=True)).square().mean().backward()
    return watching.latest


@pytest.fixture(scope="module")
def page(compiled, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    inspect(compiled).to_html(path)
    return path


def test_the_page_loads_nothing_and_runs_no_foreign_code(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(|<(link|img|iframe)\b|<[^>]*\s(src|href|onclick)\s*=", text)
    assert re.search(r"""<meta http-equiv=[^>]* content=["']default-src 'none'""", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_the_table_has_a_row_per_gemm_and_the_summary_counts(compiled, page):
    report = inspect(compiled)
    text = page.read_text(encoding="utf-8")
    table = html.unescape(text.split('id="gemms"')[1].partition("</table>")[0])
    rows = [line.split("<td>")[1:] for line in table.splitlines() if "<td>" in line]
    for row, g in zip(rows, report.gemms, strict=True):
        recipe = "delayed" if g.quantized else "-"
        assert [*row[:4], row[7]] == [g.module, g.role, f"{g.m} x {g.n} x {g.k}", recipe, g.reason or ""]
    assert rows[0][6] == "benchmarks/models.py:31"
    flops = {q: sum(2 * g.m * g.n * g.k for g in report.gemms if g.quantized is q) for q in (True, False)}
    assert f"<b>{sum(g.quantized for g in report.gemms)} of {len(report.gemms)}</b>" in text
    assert f"<b>{flops[True] / sum(flops.values()):.1%}</b>" in text
    assert f"<b>{report.speedup:.2f} x</b>" in text
    for dtype in report.graphs[0].saved_dtypes:
        assert f"</span>{dtype} " in text
    ((name, use),) = report.cache.items()
    assert (name, use) == ("graph_0", "bypassed: torch caches generated code only")
    assert f"Compile cache: {name} {use}." in text
    assert "SQNR" not in text, "no numbers without a monitor"


def test_saved_bytes_by_dtype_are_those_of_the_graph(compiled):
    """Against the values that the forward graph returns behind the model's outputs, each storage once."""
    graph = inspect(compiled).graphs[0]
    inputs = {n.meta["val"].untyped_storage()._cdata for n in graph.forward.graph.find_nodes(op="placeholder")}
    values = [node.meta.get("val") for node in graph.forward.graph.output_node().args[0][1:]]
    largest, by_dtype = {}, collections.Counter()
    for value in values:
        if isinstance(value, torch.Tensor) and (key := value.untyped_storage()._cdata) not in inputs:
            largest[key] = max(largest.get(key, (0, "")), (value.nbytes, str(value.dtype).removeprefix("torch.")))
    for size, dtype in largest.values():
        by_dtype[dtype] += size
    assert graph.saved_dtypes == by_dtype
    assert graph.saved_bytes == sum(by_dtype.values())
    assert any("float8" in dtype for dtype in by_dtype)


def maps_of(path):
    return json.loads(re.search(r"const maps = (.*);", path.read_text(encoding="utf-8"))[1])


def test_the_heat_maps(compiled, page):
    coverage, amax, scale = maps_of(page)
    assert coverage["rows"] == ["layers.0", "layers.1", "head"]
    assert coverage["columns"][:3] == ["wq:output", "wq:grad_input", "wq:grad_weight"]
    assert len(coverage["cells"]) == len(inspect(compiled).gemms)
    values = state(compiled)
    for row, column, i in scale["cells"]:
        module, _, kind = scale["columns"][column].rpartition(":")
        name = f"{scale['rows'][row]}.{module}:{kind}".replace(".:", ":")
        assert float(scale["texts"][i]) == pytest.approx(values.scale(name).item(), rel=1e-2)
    assert len(amax["cells"]) == len(scale["cells"]) == len(values.tensors)


def test_long_names_are_whole_and_a_page_before_the_first_call(tmp_path):
    inspect(fp8_compile(mlp(), "delayed")).to_html(tmp_path / "page.html")
    assert "Nothing is compiled yet" in (tmp_path / "page.html").read_text(encoding="utf-8")
    name = "a_module_with_a_name_that_is_longer_than_the_margin_of_a_table"
    model = nn.ModuleDict({name: nn.Linear(64, 64)})
    compiled = fp8_compile(lambda x: model[name](x), "current", backend="aot_eager")
    compiled(torch.randn(32, 64, requires_grad=True)).sum().backward()
    inspect(compiled).to_html(tmp_path / "page.html")
    drawn = re.findall(r"<svg class=.heat.*?</svg>", (tmp_path / "page.html").read_text(encoding="utf-8"), re.DOTALL)
    assert name in drawn[0]


def test_the_picture_marks_fp8(compiled):
    layer, drawn = pictures(inspect(compiled).graphs[0].compiled)
    assert layer == "layers.0"
    assert [p.title for p in drawn] == ["forward, before", "forward, after", "backward, before", "backward, after"]
    before, after, _, backward = drawn
    assert before.num_fp8 == 0
    assert [sum(box.kind == kind for box in before.boxes) for kind in ("gemm", "fp8", "cast")] == [7, 0, 0]
    assert [sum(box.kind == kind for box in after.boxes) for kind in ("gemm", "fp8")] == [0, 7]
    # 4 inputs (one shared by q, k, v; one by gate and up) and 7 weights: one edge from each cast to each GEMM
    assert after.num_fp8 == 14
    assert {b.detail for b in backward.boxes if b.kind == "fp8"} == {"grad_input", "grad_weight"}
    for picture in drawn:
        places = [(b.row, round(b.x - b.width / 2), round(b.x + b.width / 2)) for b in picture.boxes]
        for row, left, right in places:
            assert 0 <= left <= right <= picture.width
            assert not any(r == row and left < other < right for r, other, _ in places)
        # Lines that pass rows bend between their boxes, and begin and end at boxes.
        curve = r"M(-?\d+) (-?\d+)C-?\d+ -?\d+ -?\d+ -?\d+ (-?\d+) (-?\d+)"
        lines = [[tuple(map(int, c)) for c in re.findall(curve, path)] for path, _ in picture.lines]
        assert any(len(curves) > 1 for curves in lines)
        ends = {(round(b.x), round(b.y) + down) for b in picture.boxes for down in (0, 34)}
        for curves in lines:
            assert {curves[0][:2], curves[-1][2:]} <= ends
            assert all(0 <= x <= picture.width for curve in curves for x in curve[::2])


def test_names_are_escaped_everywhere(tmp_path):
    model = nn.Sequential()
    model.add_module(NAUGHTY.replace(".", ""), mlp(16, 32, 16))
    compiled = fp8_compile(model, "current", backend="aot_eager")
    compiled(torch.randn(16, 16)).sum().backward()
    report = inspect(compiled)
    gemms = [dataclasses.replace(g, module=f"{NAUGHTY}</script>", reason=NAUGHTY, source=NAUGHTY) for g in report.gemms]
    path = tmp_path / "page.html"
    dataclasses.replace(report, gemms=gemms, unmatched_rules=[NAUGHTY], rule_remarks=(NAUGHTY,)).to_html(path)
    text = path.read_text(encoding="utf-8")
    assert "<img" not in text
    assert text.count("</script>") == 1
    assert "&lt;img" in text
    assert text.count("\\u003cimg") >= 1


def test_numbers_of_a_monitor(compiled, measured, tmp_path):
    """Attached, or given; the blockwise recipe, whose copies have numbers of their own and no history."""
    path = tmp_path / "page.html"
    inspect(compiled).to_html(path, measured)
    assert len(maps_of(path)) == 5
    model = fp8_compile(mlp(32, 64, 32), "blockwise", backend="aot_eager")
    watching = monitor(model, every=1)
    model(torch.randn(16, 32, requires_grad=True)).square().sum().backward()
    inspect(model).to_html(path)
    text = path.read_text(encoding="utf-8")
    assert re.findall("<option>([a-zA-Z]+)</option>", text)[:4] == ["coverage", "amax", "SQNR", "underflow"]
    sqnr = maps_of(path)[2]
    worst = {}
    for tensor in watching.latest.tensors:
        worst[tensor.name] = min(tensor.sqnr, worst.get(tensor.name, 1000.0))
    found = {f"{sqnr['rows'][row]}{sqnr['columns'][column]}": sqnr["texts"][i] for row, column, i in sqnr["cells"]}
    assert found == {name: f"{value:.3g} dB" for name, value in worst.items()}
    for name, value in worst.items():
        assert re.search(rf"{name}</span><br>amax [^,]+, SQNR {value:.3g} dB, underflow", text)
