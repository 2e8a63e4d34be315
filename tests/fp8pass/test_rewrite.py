"""The rewrite of joint graphs: what fires, what does not and why, ops gone and come, numbers."""

import copy
import functools
from collections import Counter

import pytest
import torch

from fp8pass import DelayedScaling, Float8CurrentScaling, fp8_compile, inspect, state
from tests.support.copies import casts_by
from tests.support.models import LlamaBlock, ResidualMlp, mlp
from tests.support.training import assert_trains_as, step

RECIPES = [DelayedScaling(amax_history_len=8), Float8CurrentScaling()]
GEMMS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def count_ops(graph_module):
    return Counter(str(n.target).rsplit(".", 1)[0] for n in graph_module.graph.nodes if n.op == "call_function")


def block_gemms(tokens, dim=128, ffn=256):
    """(module, role) -> (m, n, k) of a LlamaBlock, written down by hand."""
    sizes = {"wq": (dim, dim), "wk": (dim, dim), "wv": (dim, dim), "wo": (dim, dim)}
    sizes |= {"gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn)}
    expected = {}
    for module, (out, into) in sizes.items():
        expected[module, "output"] = (tokens, out, into)
        expected[module, "grad_input"] = (tokens, into, out)
        expected[module, "grad_weight"] = (out, into, tokens)
    return expected


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_llama_block(recipe):
    block = LlamaBlock().bfloat16()
    compiled = fp8_compile(block, recipe, backend="aot_eager")
    x = torch.randn(2, 64, 128, dtype=torch.bfloat16)
    for _ in range(2):
        step(compiled, block, x)
    assert_trains_as(compiled, block, x)

    report = inspect(compiled)
    assert {(g.module, g.role): (g.m, g.n, g.k) for g in report.gemms} == block_gemms(128)
    assert all(g.quantized and g.reason is None for g in report.gemms)
    assert {(g.a_format, g.b_format) for g in report.gemms if g.role == "output"} == {("e4m3", "e4m3")}
    assert {(g.a_format, g.b_format) for g in report.gemms if g.role != "output"} == {("e5m2", "e4m3")}
    assert all(g.source.rsplit(":", 1)[0].endswith("models.py") for g in report.gemms)
    before, after = count_ops(report.graphs[0].before), count_ops(report.graphs[0].after)
    assert before["aten.mm"] == 21
    assert after["aten.mm"] == 0
    assert after["lowering.scaled_mm"] == 21
    # 7 weights share a launch, and so do the gradients of q, k and v; 4 gradients have one of their own. The 4 inputs are cast
    # rowwise in forward and, from recomputed values, columnwise in backward.
    nodes = report.graphs[0].after.graph.nodes
    casts = functools.partial(casts_by, torch.ops.lowering.cast.default, nodes)
    assert [len(n.args[0]) for n in casts(many=True, both=True)] == [7, 3]
    assert (len(casts(many=False, both=True)), len(casts(both=False))) == (4, 2 * 4)
    tensors = 4 + 2 + 4  # inputs; what shares a launch; other gradients
    assert after["lowering.scales_from_amax"] == (0 if recipe.keeps_state else tensors)
    assert after["lowering.record_amax"] == (2 if recipe.keeps_state else 0), "one a side"


@pytest.mark.parametrize(("backend", "make", "width"), [("aot_eager", LlamaBlock, 128), ("inductor", ResidualMlp, 64)])
def test_rules_that_exclude_everything_change_no_bit(backend, make, width):
    model = make().bfloat16()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 24, width, dtype=torch.bfloat16)
    ours = fp8_compile(model, DelayedScaling(), rules={"*": None}, backend=backend)
    theirs = torch.compile(plain, backend=backend)
    for _ in range(2):
        outs = [compiled(x) for compiled in (ours, theirs)]
        assert outs[0].equal(outs[1])
        for out in outs:
            out.square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad.equal(q.grad)
    report = inspect(ours)
    assert not any(g.quantized for g in report.gemms)
    assert {g.reason for g in report.gemms} == {"rule: '*' keeps high precision"}
    assert state(ours).tensors == []


def test_rules_by_module_and_role():
    current = Float8CurrentScaling(use_power_2_scales=True)
    rules = {"2:grad_weight": None, "2": current, "nowhere.*": None}
    compiled = fp8_compile(mlp(), DelayedScaling(), rules=rules, backend="aot_eager")
    compiled(torch.randn(16, 64, requires_grad=True)).sum().backward()
    report = inspect(compiled)
    decided = {(g.module, g.role): g.recipe if g.quantized else None for g in report.gemms}
    assert decided == {
        ("0", "output"): "delayed",
        ("0", "grad_input"): "delayed",
        ("0", "grad_weight"): "delayed",
        ("2", "output"): "current",
        ("2", "grad_input"): "current",
        ("2", "grad_weight"): None,
    }
    assert report.unmatched_rules == ["nowhere.*"]
    assert "'nowhere.*' has matched no GEMM" in str(report)
    assert set(state(compiled).tensors) == {"0:input", "0:weight", "0:grad_output"}
