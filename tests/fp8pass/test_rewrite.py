"""The rewrite of joint graphs: what fires, what does not and why, ops gone and come, numbers."""

import copy
import functools
from collections import Counter

import pytest
import torch

from benchmarks.contestants import steady
from benchmarks.cross_codegen import capture
from fp8pass import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, fp8_compile, inspect, state
from tests.support.cases import rest
from tests.support.copies import casts_by
from tests.support.models import LlamaBlock, ResidualMlp
from tests.support.training import assert_trains_as

ops = torch.ops.lowering
SQUARE = MXFP8BlockScaling(enable_2d_quantization=True)


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


#: Casts: tensors of launches with both copies, of which there are several; casts of one tensor to both copies; to one.
#: 7 weights share a launch, and so do the gradients of q, k and v; 4 gradients have one of their own. The 4 inputs are cast
#: rowwise in forward and, from recomputed values, columnwise in backward. MXFP8 reads each tensor once but attention's result.
SHARED, ALONE = ([7, 3], 4, 2 * 4), ([], 17, 2)


@pytest.mark.parametrize(
    ("recipe", "backend", "gemm", "gradients", "casts"),
    [
        pytest.param(DelayedScaling(amax_history_len=8), "aot_eager", "", "e5m2", SHARED, id="delayed"),
        pytest.param(Float8CurrentScaling(), "aot_eager", "", "e5m2", SHARED, id="current"),
        *(pytest.param("blockwise", b, "_blockwise", "e4m3", SHARED, id=f"blockwise-{b}") for b in ("aot_eager", "inductor")),
        pytest.param("rowwise", "inductor", "_rowwise", "e4m3", SHARED, id="rowwise-inductor"),
        pytest.param("rowwise_with_gw_hp", "aot_eager", "_rowwise", "e4m3", None, id="gw_hp"),
        pytest.param("mxfp8", "aot_eager", "_mxfp8", "e4m3", ALONE, id="mxfp8"),
        pytest.param("mxfp8_with_gw_hp", "aot_eager", "_mxfp8", "e4m3", None, id="mxfp8 gw_hp"),
        pytest.param(SQUARE, "inductor", "_mxfp8", "e4m3", ALONE, id="mxfp8 2d-inductor"),
    ],
)
def test_llama_block(recipe, backend, gemm, gradients, casts):
    block, x = LlamaBlock().bfloat16(), torch.randn(2, 64, 128, dtype=torch.bfloat16)
    compiled = fp8_compile(block, recipe, backend=backend)
    assert_trains_as(compiled, block, x, warm_up=2 if gemm == "" else 0)

    report = inspect(compiled)
    assert {(g.module, g.role): (g.m, g.n, g.k) for g in report.gemms} == block_gemms(128)
    kept = {"grad_weight"} if str(recipe).endswith("_with_gw_hp") else set()
    assert {g.role for g in report.gemms if not g.quantized} == {g.role for g in report.gemms if g.reason} == kept
    formats = {(g.role == "output", g.a_format, g.b_format) for g in report.gemms if g.quantized}
    assert formats == {(True, "e4m3", "e4m3"), (False, gradients, "e4m3")}
    assert all(g.source.rsplit(":", 1)[0].endswith("models.py") for g in report.gemms)
    before, after = count_ops(report.graphs[0].before), count_ops(report.graphs[0].after)
    num_quantized = sum(g.quantized for g in report.gemms)
    assert (before["aten.mm"], after["aten.mm"]) == (21, 21 - num_quantized)
    assert after["lowering.scaled_mm"] == num_quantized
    if casts is not None:
        found = functools.partial(
            casts_by, getattr(ops, "cast_with_scales" if gemm else "cast").default, report.graphs[0].after.graph.nodes
        )
        shared = [len(n.args[0]) for n in found(many=True, both=True)]
        assert (shared, len(found(many=False, both=True)), len(found(both=False))) == casts
    keeps_state = isinstance(recipe, DelayedScaling)
    assert bool(state(compiled).tensors) == keeps_state
    assert after["lowering.record_amax"] == (2 if keeps_state else 0), "one a side"
    if gemm == "":
        assert after["lowering.scales_from_amax"] == (0 if keeps_state else 4 + 2 + 4)  # inputs; launches; other gradients


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


def cudnn_attention(q, k, v, is_causal):
    """The operation that `scaled_dot_product_attention` calls on Hopper, in training."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)[0]


@pytest.mark.parametrize(
    ("recipe", "num_kv_heads"),
    [("delayed", 4), ("blockwise", 2), *rest([("delayed", 2), ("blockwise", 4), ("current", 4), ("rowwise", 2)])],
)
def test_a_block_with_cudnns_attention(recipe, num_kv_heads, monkeypatch):
    """Every GEMM runs in FP8, and what attention gives and takes is quantized as with any other."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", cudnn_attention)
    compiled = fp8_compile(LlamaBlock(256, 512, 4, num_kv_heads).bfloat16(), steady(recipe))
    with capture() as graphs:
        compiled(torch.zeros(1, 128, 256, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert [gemm.quantized for gemm in inspect(compiled).gemms] == [True] * 21
    targets = [str(node.target) for _, graph, _ in graphs.graphs for node in graph.graph.nodes]
    assert sum("_scaled_dot_product_cudnn_attention.default" in target for target in targets) == 1
    assert sum("_scaled_dot_product_cudnn_attention_backward" in target for target in targets) == 1
