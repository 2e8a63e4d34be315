"""`inspect`: records, the table, graphs that can be printed, JSON."""

from __future__ import annotations

import json

import torch
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, inspect
from tests.support.models import mlp


class Deep(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(mlp(32, 64, 32) for _ in range(depth))
        self.head = nn.Linear(32, 48)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def compiled_deep(backend="aot_eager", **options):
    model = fp8_compile(Deep(), DelayedScaling(), backend=backend, **options)
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    return model


def test_before_the_first_call():
    compiled = fp8_compile(mlp())
    report = inspect(compiled)
    assert report.gemms == []
    assert report.graphs == []
    assert "Nothing is compiled yet" in str(report)


def test_table_folds_equal_layers():
    lines = str(inspect(compiled_deep())).splitlines()
    assert sum("layers.0-3.0 (x4)" in line for line in lines) == 3
    assert sum("layers.0-3.2 (x4)" in line for line in lines) == 3
    assert sum("│ head " in line for line in lines) == 3
    assert lines[-1] == "27 of 27 GEMMs run in FP8, in 1 graph."


def test_table_says_why_a_gemm_stays():
    text = str(inspect(compiled_deep(rules={"head": None})))
    assert "rule: 'head' keeps high precision" in text
    assert "24 of 27 GEMMs" in text


def test_graphs_are_printable_and_name_the_state():
    graph = inspect(compiled_deep()).graphs[0]
    assert graph.state_inputs == ["fp8_scale", "fp8_amax", "fp8_grad_amax", "fp8_slots"]
    for part in (graph.before, graph.after, graph.forward, graph.backward):
        assert isinstance(part, torch.fx.GraphModule)
        part.graph.lint()
        assert "def forward" in part.print_readable(print_output=False)
    assert "fp8_scale" in graph.after.print_readable(print_output=False)
    assert "scaled_mm" in graph.backward.code
    assert "scaled_mm" not in graph.before.code


def test_inductor_fills_in_both_sides_of_the_partition():
    graph = inspect(compiled_deep(backend="inductor")).graphs[0]
    assert "record_amax" in graph.forward.code
    assert "record_amax" in graph.backward.code


def test_inference_has_a_forward_only():
    compiled = fp8_compile(mlp(), "current", backend="aot_eager")
    with torch.inference_mode():
        compiled(torch.randn(16, 64))
    graph = inspect(compiled).graphs[0]
    assert graph.backward is None
    assert graph.saved_bytes == 0
    assert [g.role for g in inspect(compiled).gemms] == ["output", "output"]


def test_a_graph_compiled_again_for_another_shape_adds_no_rows():
    compiled = fp8_compile(mlp(), "current", backend="aot_eager", dynamic=False)
    for rows in (16, 32):
        compiled(torch.randn(rows, 64)).sum().backward()
    report = inspect(compiled)
    assert len(report.graphs) == 2
    assert len(report.gemms) == 5  # the input needs no gradient


def test_dynamic_sizes_are_shown_by_symbol():
    compiled = fp8_compile(mlp(), "current", backend="aot_eager", dynamic=True)
    compiled(torch.randn(16, 64)).sum().backward()
    sizes = {g.m for g in inspect(compiled).gemms if g.role == "output"}
    assert all(isinstance(m, str) for m in sizes)


def test_to_dict_is_json():
    report = inspect(compiled_deep())
    data = json.loads(json.dumps(report.to_dict()))
    assert len(data["gemms"]) == 27
    assert set(data["gemms"][0]) >= {"module", "role", "m", "n", "k", "quantized", "reason", "recipe", "a_format", "source"}
    assert data["graphs"][0]["saved_bytes"] > 0


def test_notebook_table_is_escaped_html():
    html = inspect(compiled_deep(rules={"head": None}))._repr_html_()
    assert html.startswith("<table>")
    assert "layers.0-3.0 (x4)" in html
    assert "&#x27;head&#x27; keeps high precision" in html
