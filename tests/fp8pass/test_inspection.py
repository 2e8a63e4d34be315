"""`inspect`: records, the table, graphs that can be printed, JSON; `diff`: what two inspections decided differently, why."""

import copy
import dataclasses
import functools
import json
import re

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, Float8CurrentScaling, Format, cost, diff, fp8_compile, inspect, use_rules
from fp8pass.errors import Fp8FallbackWarning, OptionError
from fp8pass.integrations.saved import show
from fp8pass.tools.inspection import rows_of
from fp8pass.tools.tables import folded_path
from lowering import hardware
from lowering.blockwise import cublaslt
from lowering.formats import E4M3, Granularity
from lowering.mxfp8 import gemm as mxfp8
from lowering.trials import ProductKind
from tests.support.models import Net, Stack, mlp


def inspected(model, recipe, *args, **options):
    """The inspection of a model after a step, which gets numbers [16, 64] if no arguments are given."""
    compiled = fp8_compile(model, recipe, backend="aot_eager", **options)
    compiled(*(args or [torch.randn(16, 64, requires_grad=True)])).sum().backward()
    return inspect(compiled)


def compiled_deep(backend="aot_eager", depth=4, **options):
    model = Stack((mlp(32, 64, 32) for _ in range(depth)), nn.Linear(32, 48), residual=True)
    model = fp8_compile(model, DelayedScaling(), backend=backend, **options)
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    return model


@functools.cache
def deep(*in_high_precision):
    return compiled_deep(rules=dict.fromkeys(in_high_precision))


def test_before_the_first_call_and_in_inference():
    compiled = fp8_compile(mlp())
    report = inspect(compiled)
    assert report.gemms == []
    assert report.graphs == []
    assert "Nothing is compiled yet" in str(report)
    compiled = fp8_compile(mlp(), "current", backend="aot_eager")
    with torch.inference_mode():
        compiled(torch.randn(16, 64))
    graph = inspect(compiled).graphs[0]
    assert graph.backward is None
    assert graph.saved_bytes == 0
    assert [g.role for g in inspect(compiled).gemms] == ["output", "output"]


def test_the_table_folds_equal_layers(monkeypatch):
    """Without a terminal it has 160 columns."""
    report = inspect(deep())
    lines = str(report).splitlines()
    assert {len(line) for line in lines if line.startswith("│")} == {max(map(len, lines[:3]))}
    assert repr(report) == str(report).rstrip("\n")
    assert sum("layers.0-3.0 (x4)" in line for line in lines) == 3
    assert sum("layers.0-3.2 (x4)" in line for line in lines) == 3
    assert sum("│ head " in line for line in lines) == 3
    assert lines[-1] == "27 of 27 GEMMs run in FP8, in 1 graph."
    monkeypatch.setattr("sys.stdout", None)  # as under pythonw
    assert str(report).splitlines() == lines
    reason = f"ran eagerly: {'a long ' * 12}story"
    first = dataclasses.replace(report.gemms[0], quantized=False, reason=reason)
    for names in ("ab", "abc"):
        found = dataclasses.replace(report, gemms=[dataclasses.replace(first, module=name) for name in names])
        assert (f"(1) {reason}" in str(found)) is (names == "abc"), "of several rows it is below the table once"


def test_graphs_are_printable_and_name_the_state():
    graph = inspect(deep()).graphs[0]
    assert graph.state_inputs == ["fp8_scale", "fp8_amax", "fp8_grad_amax", "fp8_slots"]
    for part in (graph.before, graph.after, graph.forward, graph.backward):
        assert isinstance(part, torch.fx.GraphModule)
        part.graph.lint()
        assert "def forward" in part.print_readable(print_output=False)
    assert "fp8_scale" in graph.after.print_readable(print_output=False)
    assert "scaled_mm" in graph.backward.code
    assert "scaled_mm" not in graph.before.code
    graph = inspect(compiled_deep(backend="inductor", depth=1)).graphs[0]
    assert "record_amax" in graph.forward.code
    assert "record_amax" in graph.backward.code


def test_linears_outside_of_every_gemm_are_named_even_where_there_is_no_gemm():
    model = Net(lambda m, x, is_long=False: m.up(x) if is_long else m.norm(x), norm=nn.LayerNorm(32), up=nn.Linear(32, 32))
    compiled = fp8_compile(model, "current", backend="aot_eager")
    assert "No GEMM belongs to" not in str(inspect(compiled))  # nothing has run
    compiled(torch.randn(16, 32))
    assert inspect(compiled).outside == ["up"]
    assert "No GEMM belongs to up: not run so far, or running in high precision." in str(inspect(compiled))
    compiled(torch.randn(16, 32), is_long=True)
    assert inspect(compiled).outside == []


def test_the_device_of_the_estimate_is_that_of_a_graph_with_gemms():
    @torch._dynamo.disable
    def pause(x):
        return x

    model = fp8_compile(lambda x, w: pause(torch.relu(x)) @ w, "current", backend="aot_eager")
    model(torch.randn(16, 32), torch.randn(32, 32))
    report = inspect(model)
    assert [len(g.gemms) for g in report.graphs] == [0, 1]
    assert "device 'cpu' has no constants" in str(report)
    assert "no device" not in str(report)


def test_graphs_of_other_shapes():
    for dynamic, num_graphs, num_gemms in ((False, 2, 5), (True, 1, 5)):  # the input needs no gradient
        compiled = fp8_compile(mlp(), "current", backend="aot_eager", dynamic=dynamic)
        for rows in (16, 32):
            compiled(torch.randn(rows, 64)).sum().backward()
        report = inspect(compiled)
        assert (len(report.graphs), len(report.gemms)) == (num_graphs, num_gemms)
        assert {type(g.m) for g in report.gemms if g.role == "output"} == {str if dynamic else int}


def test_json_and_the_notebooks_table():
    report = inspect(deep())
    data = json.loads(json.dumps(report.to_dict()))
    assert len(data["gemms"]) == 27
    assert set(data["gemms"][0]) >= {"module", "role", "m", "n", "k", "quantized", "reason", "recipe", "a_format", "source"}
    assert data["graphs"][0]["saved_bytes"] > 0
    html = inspect(deep("head"))._repr_html_()
    assert html.startswith("<table>")
    assert "layers.0-3.0 (x4)" in html
    assert "&#x27;head&#x27; keeps high precision" in html


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["head"], "head"),
        (["head", "head"], "head (x2)"),
        (["0", "2"], "{0,2} (x2)"),
        (["layers.0.up", "layers.1.up", "layers.2.up"], "layers.0-2.up (x3)"),
        (["layers.0.up", "layers.1.up", "layers.4.up"], "layers.{0,1,4}.up (x3)"),
        ([f"layers.{i}.experts.{j}.up" for i in (0, 1) for j in (0, 1, 3)], "layers.0-1.experts.{0,1,3}.up (x6)"),
        (["experts.0.1.up", "experts.0.3.up", "experts.1.0.up"], "experts.*.*.up {0.1, 0.3, 1.0} (x3)"),
        (["blocks.7.experts.2.3", "blocks.7.experts.3.2"], "blocks.7.experts.*.* {2.3, 3.2} (x2)"),
        (["layers.10.up", "layers.9.up"], "layers.9-10.up (x2)"),
        (["layer#1", "layer#2", "layer#4"], "layer#{1,2,4} (x3)"),
    ],
)
def test_a_folded_row_prints_the_layers_that_are_there_and_no_others(modules, expected):
    assert folded_path(modules) == expected


def test_rows_of_experts_and_of_roles_that_stay_alike():
    def forward(m, x):
        for layer, expert in ((0, 1), (0, 3), (1, 0)):
            x = torch.tanh(m.layers[layer][expert](x))
        return x

    layers = nn.ModuleList(nn.ModuleList(nn.Linear(32, 32) for _ in range(4)) for _ in range(2))
    report = inspected(Net(forward, layers=layers), "current", torch.randn(16, 32, requires_grad=True))
    assert str(report).count("layers.*.* {0.1, 0.3, 1.0} (x3)") == 3
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    children = {"tokens": nn.Embedding(48, 32), "head": nn.Linear(32, 48), "layers": layers}
    model = Net(lambda m, tokens: m.head(m.layers(m.tokens(tokens))), **children)
    report = inspected(model, "delayed", torch.randint(48, (2, 16)), rules={"layers.1": None})
    rows = {(row[0], row[1]): row for row in rows_of(report.gemms)}
    assert rows["head", "all"][3:5] == ["-", "high precision"]
    assert rows["layers.1", "all"][3:5] == ["-", "high precision"]
    assert {role for module, role in rows if module == "layers.0"} == {"output", "grad_input", "grad_weight"}
    assert len(rows) == 5


def blockwise_kind(*granularities):
    return ProductKind(torch.device("cpu"), (E4M3, E4M3), granularities, None, torch.bfloat16, False)


@pytest.mark.parametrize("failed", [("1x128", "128x128"), ("1x128", "1x128"), None])
def test_a_gemm_that_failed_its_trial_has_no_speed_up(failed, monkeypatch):
    """Triton's, which runs instead, takes longer than the estimate says: the column, the sum and a remark say so."""
    pairs = [("1x128", "128x128"), ("1x128", "1x128")]
    by_label = {g.label: g for g in Granularity}
    kinds = {blockwise_kind(*(by_label[label] for label in pair)): pair != failed for pair in pairs}
    monkeypatch.setattr(cublaslt.trial, "tried", kinds)
    blockwise, current = (inspected(mlp(), recipe) for recipe in ("blockwise", "current"))
    assert current.distrusted == []
    assert current.speedup > 0
    without = {(g.a_scaling, g.b_scaling) for g in blockwise.gemms if g.speedup is None}
    assert without == (set() if failed is None else {failed})
    assert sorted(blockwise.libraries.values()) == (["cuBLASLt"] * 2 if failed is None else ["Triton", "cuBLASLt"])
    if failed is None:
        assert blockwise.speedup > 0
        assert blockwise.distrusted == []
        assert str(blockwise).count("cuBLASLt's GEMM runs.") == 2
        return
    (kind,) = blockwise.distrusted
    assert kind.startswith(f"blockwise GEMMs, {failed[0]} torch.float8_e4m3fn by {failed[1]}")
    assert blockwise.speedup is None
    assert blockwise.to_dict()["speedup"] is None
    text = " ".join(str(blockwise).split())
    assert f"{kind}: the library's GEMM failed its self-test, so Triton's runs; no speed-up is known." in text
    assert "Expected speed-up: unknown" in text
    has_none = [(g.a_scaling, g.b_scaling) == failed for g in blockwise.gemms]
    assert [row[5] == "-" for row in rows_of(blockwise.gemms)] == has_none


@pytest.mark.parametrize("is_right", [True, False])
def test_blockwise_gemms_whose_mxfp8_trial_failed_have_no_speed_up(is_right, monkeypatch):
    """On Blackwell blocks of 128 run as blocks of 32, by Triton where cuBLASLt's GEMM of those is wrong."""
    monkeypatch.setattr(cost, "device_for", lambda device: cost.device_called("b200"))
    kind = ProductKind(torch.device("cpu"), (E4M3, E4M3), (Granularity.BLOCK_1X32,) * 2, None, torch.float32)
    monkeypatch.setattr(mxfp8.trial, "tried", {kind: is_right})
    monkeypatch.setattr(mxfp8.trial, "reasons", {} if is_right else {kind: "its relative error is 0.7"})
    found = {recipe: inspected(mlp(), recipe) for recipe in ("blockwise", "mxfp8", "current")}
    name = f"MXFP8 GEMMs, {kind}"
    blockwise = found["blockwise"]
    assert {g.computed_by for g in blockwise.gemms} == {"torch, blocks of 128 as blocks of 32"}
    assert found["current"].libraries == {}
    assert found["mxfp8"].libraries == ({name: "cuBLASLt"} if is_right else {}), "no GEMM takes the place of a wrong one"
    assert blockwise.libraries == {name: "cuBLASLt" if is_right else "Triton"}
    assert blockwise.distrusted == ([] if is_right else [name])
    assert (blockwise.speedup is None) is not is_right
    assert {g.speedup is None for g in blockwise.gemms} == {not is_right}
    text = " ".join(str(blockwise).split())
    assert (f"{name}: not cuBLASLt: its relative error is 0.7." in text) is not is_right


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


@pytest.mark.parametrize("columns", [80, 100, 120, 160, 240])
def test_text_fits_the_terminal(monkeypatch, columns):
    report = inspect(deep("head", "layers.1.0:grad_weight"))
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) < 25
    text = " ".join(" ".join(lines).split())
    assert columns < 130 or "why not FP8" in text
    words = ("layers.0-3.2 (x4)", "output", "grad_weight", "delayed", "rule: 'head' keeps high precision")
    for word in (*words, "23 of 27 GEMMs"):
        assert word in text
    assert ("(1)" in text) == (columns < 130)


def test_adapters_share_a_row_whatever_they_adapt():
    def adapted(n, k):
        """Named as by peft."""
        children = {"base": nn.Linear(k, n).requires_grad_(False), "lora_A": nn.ModuleDict(), "lora_B": nn.ModuleDict()}
        model = Net(lambda m, x: m.base(x) + m.lora_B["default"](m.lora_A["default"](x)), **children)
        model.lora_A["default"], model.lora_B["default"] = nn.Linear(k, 8, bias=False), nn.Linear(8, n, bias=False)
        return model

    x = torch.randn(16, 32)
    report = inspected(nn.Sequential(adapted(64, 32), nn.GELU(), adapted(48, 64)), "current", x)
    rows = {row[0]: row for row in rows_of(report.gemms) if row[-1]}
    assert list(rows) == ["*.lora_A.default (x2)", "*.lora_B.default (x2)"]
    assert {row[1] for row in rows.values()} == {"all"}
    assert [row[2] for row in rows.values()] == ["16 x 8 x 32-64", "16 x 48-64 x 8"]
    assert all("rules={'*.lora_*': recipe}" in row[-1] for row in rows.values())
    report = inspected(nn.Sequential(adapted(64, 32)), "current", x, rules={"*.lora_*": "current"})
    assert {row[0] for row in rows_of(report.gemms)} == {"0.base", "0.lora_A.default", "0.lora_B.default"}


def test_callbacks_print_below_a_progress_bar(capsys):
    tqdm = pytest.importorskip("tqdm")
    with tqdm.tqdm(total=2, ncols=60) as bar:
        bar.update(1)
        show("the table")
        bar.update(1)
    written = capsys.readouterr()
    assert written.out == "the table\n"
    assert re.search(r"\r +\r", written.err), "the bar was wiped before"


def test_what_computes_each_gemm_and_why_no_library_does(monkeypatch):
    """By the platform that estimates are for; a library that was asked and did not take a GEMM says why."""
    monkeypatch.setattr(hardware, "cuda_version", lambda: (12, 8))
    kind = blockwise_kind(Granularity.BLOCK_1X128, Granularity.BLOCK_128X128)
    monkeypatch.setattr(cublaslt.trial, "reasons", {kind: "it raises TypeError: another signature"})
    for recipe, expected in (("rowwise", {"torch, scales of rows applied afterwards"}), ("blockwise", {"Triton"})):
        found = inspected(mlp(), recipe)
        quantized = [g for g in found.gemms if g.quantized]
        assert {g.computed_by for g in quantized} == expected
        assert all(g.computed_by is None for g in found.gemms if not g.quantized)
        text = " ".join(str(found).split())
        assert f"estimated for, {len(quantized)} GEMMs are computed by {min(expected)}." in text
        why = f"blockwise GEMMs, {kind}: not cuBLASLt: it raises TypeError: another signature."
        assert (why in text) is (recipe == "blockwise")
        assert [row["computed_by"] for row in found.to_dict()["gemms"]] == [g.computed_by for g in found.gemms]


# -- comparisons


def layers():
    return Stack((mlp(32, 64, 32) for _ in range(2)), nn.Linear(32, 16, bias=False), residual=True)


def inspected_layers(recipe="current", rows=16, model=None, **options):
    torch._dynamo.reset()
    return inspected(model or layers(), recipe, torch.randn(rows, 32, requires_grad=True), **options)


@pytest.fixture(scope="module")
def plain():
    return inspected_layers()


def test_equal_runs_differ_in_nothing(plain):
    found = diff(plain, inspected_layers(rows=48))
    assert not found
    assert (found.changes, found.only_before, found.only_after, found.settings) == ([], [], [], [])
    assert (found.num_equal, found.num_resized) == (len(plain.gemms), len(plain.gemms))
    assert str(found) == "0 GEMMs changed their decision; 15 kept it, 15 of them with another shape.\n"


def causes(found):
    return {(c.module, c.role): c.causes for c in found.changes}


def test_another_rule_is_the_only_cause_even_where_shapes_differ(plain):
    found = diff(plain, inspected_layers(rows=32, rules={"layers.1.*:grad_weight": None}))
    why = ("rule: none -> 'layers.1.*:grad_weight'",)
    assert causes(found) == {(f"layers.1.{i}", "grad_weight"): why for i in (2, 0)}
    assert all(c.before["quantized"] and not c.after["quantized"] for c in found.changes)
    assert found.settings == ["Rule 'layers.1.*:grad_weight' is only in the second."]
    found = diff(
        inspected_layers("delayed", rules={"layers.0.0": "current"}), inspected_layers("delayed", rules={"layers.0.0": None})
    )
    why = ("rule 'layers.0.0': Float8CurrentScaling() -> None",)
    assert causes(found) == {("layers.0.0", role): why for role in ("output", "grad_input", "grad_weight")}


def test_another_recipe_or_option(plain):
    found = diff(plain, inspected_layers(Float8CurrentScaling(fp8_format=Format.E4M3)))
    cause = "recipe: Float8CurrentScaling() -> Float8CurrentScaling(fp8_format=E4M3)"
    assert {role for _, role in causes(found)} == {"grad_input", "grad_weight"}
    assert set(causes(found).values()) == {(cause,)}
    assert f"{cause}." in found.settings
    found = diff(plain, inspected_layers(select="all"))
    assert {module for module, _ in causes(found)} == {"head"}
    assert set(causes(found).values()) == {("select: auto -> all",)}


def test_a_shape_that_becomes_too_thin_and_gemms_of_one_side(plain):
    model = layers()
    model.head = nn.Linear(32, 96, bias=False)
    found = diff(inspected_layers(model=model), plain)
    change = next(c for c in found.changes if c.role == "output")
    assert (change.module, change.causes) == ("head", ("shape: 16 x 96 x 32 -> 16 x 16 x 32",))
    assert change.after["reason"].startswith("thin")
    model = layers()
    model.layers.append(mlp(32, 64, 32))
    found = diff(plain, inspected_layers(model=model))
    assert found.changes == []
    assert set(found.only_after) == {f"layers.2.{i}:{r}" for i in (0, 2) for r in ("output", "grad_input", "grad_weight")}
    assert len(found.only_after) == 6
    assert bool(found)
    assert "6 are only in the second: layers.2.0:output" in str(found)


def test_saved_inspections_another_version_and_gemms_that_are_matched_by_likeness(plain):
    saved = json.loads(json.dumps(plain.to_dict()))
    assert not diff(saved, plain)
    other = copy.deepcopy(saved)
    for gemm in other["gemms"]:
        if gemm["reason"]:
            gemm["reason"] += " and 3"
    assert not diff(saved, other), "numbers of reasons"
    other["versions"]["torch"] = "2.99.0"
    other["gemms"][0] |= {"quantized": False, "reason": "hardware: gone", "recipe": None}
    found = diff(saved, other)
    (change,) = found.changes
    assert change.causes == (f"version of torch: {torch.__version__} -> 2.99.0",)
    assert json.loads(json.dumps(found.to_dict()))["changes"][0]["after"]["reason"] == "hardware: gone"
    other["versions"] = saved["versions"]
    assert diff(saved, other).changes[0].causes[0].startswith("the graph around it")
    twice = copy.deepcopy(saved)
    extra = twice["gemms"][0] | {"m": 99, "quantized": False, "reason": "slow: 0.5", "recipe": None}
    twice["gemms"].insert(0, extra)
    found = diff(saved, twice)
    assert (found.changes, found.only_after) == ([], [f"{extra['module']}:{extra['role']}"])


def test_the_table_folds_equal_layers_and_the_page_escapes(plain):
    found = diff(plain, inspected_layers(rules={"layers.*.0:output": None}))
    assert "layers.0-1.0 (x2)" in str(found)
    assert repr(found) == str(found).rstrip("\n")
    found.changes[0] = type(found.changes[0])(**{**vars(found.changes[0]), "module": "<b>"})
    assert "<b>" not in found._repr_html_()
    assert "&lt;b&gt;" in found._repr_html_()


@pytest.mark.parametrize("wrong", [3, None, [], {}, {"gemms": []}])
def test_what_is_no_inspection_or_has_not_run(plain, wrong):
    with pytest.raises(OptionError, match=r"the second argument of diff is a \w+.*inspect\(compiled\)"):
        diff(plain, wrong)
    with pytest.raises(OptionError, match="the first inspection has no GEMM: run the model"):
        diff(inspect(fp8_compile(mlp(), backend="aot_eager")), plain)
