"""Grouped GEMMs through the pass: bit for bit a loop over the experts, roles, gathers, rows of no group, reasons, and
training: changing routing, experts without tokens."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from tests.support.cases import each
from tests.support.copies import CastNode
from tests.support.models import Net
from tests.support.moe import RECIPES, Experts, FallbackExperts, GatheredExperts, MoE, expected, offsets
from tests.support.training import fp8, step
from tests.tolerances import SQNR_MODEL_GRADIENT, sqnr

SIZES = (0, 1, 7, 15, 16, 17, 127, 128, 129, 0)
ALL_IN_ONE = (0, 0, 0, sum(SIZES), 0, 0, 0, 0, 0, 0)
K, N = 48, 80


def compiled_experts(recipe):
    model = Experts(len(SIZES), K, N)
    return model, fp8_compile(model, recipe, backend="aot_eager")


def run(compiled, model, x, dy, offs):
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = compiled(x, offs)
    out.backward(dy)
    return out.detach(), x.grad, model.weight.grad


@each("recipe, spare", [(recipe, spare) for recipe in RECIPES for spare in (0, 21)])
def test_equals_a_loop_over_the_experts_bit_for_bit(recipe, spare):
    """Rows of no group hold NaN, as uninitialized memory may: they reach nothing."""
    rows = sum(SIZES) + spare
    for sizes in (SIZES, ALL_IN_ONE):
        model, compiled = compiled_experts(recipe)
        x, dy = torch.randn(rows, K, dtype=torch.bfloat16), torch.randn(rows, N, dtype=torch.bfloat16)
        x[sum(SIZES) :] = dy[sum(SIZES) :] = torch.nan
        found = run(compiled, model, x, dy, offsets(sizes))
        assert list(map(torch.equal, found, expected(recipe, x, model.weight, dy, sizes))) == [True] * 3
        assert [(g.groups, g.quantized) for g in inspect(compiled).gemms] == [(len(SIZES), True)] * 3


# -- which GEMMs


def test_the_loop_of_transformers_in_float32_is_rewritten_with_both_gradients():
    pytest.importorskip("transformers.integrations.moe")
    model = FallbackExperts(len(SIZES), 50, 72, torch.float32)
    compiled = fp8_compile(model, "blockwise", backend="aot_eager")
    rows = sum(SIZES) + 5
    x, dy = torch.randn(rows, 50), torch.randn(rows, 72)
    x[sum(SIZES) :] = dy[sum(SIZES) :] = torch.nan
    found = run(compiled, model, x, dy, offsets(SIZES))
    for got, want in zip(found, expected("blockwise", x, model.weight, dy, SIZES), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # the product of x and dy is computed transposed
    assert not any("fallback" in str(n.target) for n in inspect(compiled).graphs[0].after.graph.nodes)


@each("recipe, use_bias", [(recipe, i % 2) for i, recipe in enumerate(RECIPES)])
def test_bmm_with_a_parameter_equals_a_loop(recipe, use_bias):
    """Every expert has as many rows."""
    weights = {"weight": nn.Parameter(torch.randn(3, 40, 56) / 6), "bias": nn.Parameter(torch.randn(3, 1, 56))}
    model = Net(lambda m, x: torch.baddbmm(m.bias, x, m.weight) if use_bias else torch.bmm(x, m.weight), **weights)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    x, dy = torch.randn(3, 24, 40, requires_grad=True), torch.randn(3, 24, 56)
    out = compiled(x)
    out.backward(dy)
    flat = (x.detach().flatten(0, 1), model.weight.detach().transpose(1, 2), dy.flatten(0, 1))
    want_out, want_dx, want_dw = expected(recipe, *flat, (24, 24, 24))
    want_out = want_out.view_as(out) + (model.bias if use_bias else 0)
    torch.testing.assert_close(out, want_out, rtol=1e-6, atol=1e-6)  # K is summed in another order
    torch.testing.assert_close(x.grad, want_dx.view_as(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.weight.grad, want_dw.transpose(1, 2), rtol=1e-6, atol=1e-6)
    ops = {"output": "baddbmm" if use_bias else "bmm", "grad_weight": "bmm", "grad_input": "bmm"}
    assert {(g.role, g.op, g.groups) for g in inspect(compiled).gemms if g.quantized} == {(r, op, 3) for r, op in ops.items()}


# -- gathers, and rows of no group


@each("recipe", ["delayed", "rowwise", "mxfp8"])
def test_a_gathered_source_is_cast_before_it_is_gathered(recipe):
    tokens, top_k, sizes = 40, 4, (0, 70, 30, 43)
    model = GatheredExperts(4, K, N)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    index = torch.randperm(tokens * top_k) // top_k
    x = torch.randn(tokens, K, dtype=torch.bfloat16)
    index = torch.where(torch.isin(index, torch.tensor([3, 7])), 0, index)
    index[sum(sizes) :] = 7  # row 7 is read by slots of no group alone
    x[7] = torch.nan
    dy = torch.randn(tokens * top_k, N, dtype=torch.bfloat16)
    dy[sum(sizes) :] = torch.nan
    out, dx, dw = run(lambda source, offs: compiled(source, offs, index), model, x, dy, offsets(sizes))
    want_out, want_dx, want_dw = expected(recipe, x[index], model.weight.detach(), dy, sizes)
    assert out.equal(want_out)
    assert dw.equal(want_dw)
    scattered = torch.zeros_like(x).index_put((index,), want_dx, accumulate=True)
    torch.testing.assert_close(dx, scattered, rtol=0.02, atol=0.02)
    if recipe == "delayed":
        amax = x[index[: sum(sizes)]].abs().amax().float()
        assert state(compiled).amax_history("weight:input")[0] == amax
    casts = [n for n in inspect(compiled).graphs[0].after.graph.nodes if "lowering.cast" in str(n.target)]
    shapes = [tuple(m.meta["val"].shape) for n in casts for m in CastNode.read(n).matrices]
    assert {shape[-2:] for shape in shapes if shape[-1] == K} == {(tokens, K), (N, K)}


# -- training


def test_steps_of_changing_routing_and_numbers_of_tokens_are_one_graph():
    counters.clear()
    model = MoE().to(torch.bfloat16)
    compiled = fp8(model, "blockwise", select="auto", fullgraph=True, dynamic=True)
    for tokens in (32, 48, 81):
        x = torch.randn(tokens, 64, dtype=torch.bfloat16)
        found, plain = (step(call, model, x).inputs[0] for call in (compiled, model))
        assert sqnr(plain, found) >= SQNR_MODEL_GRADIENT
    assert counters["stats"]["unique_graphs"] == len(inspect(compiled).graphs) == 1
    graph = inspect(compiled).graphs[0].after.graph
    assert not [n for n in graph.nodes if "item" in str(n.target) and "getitem" not in str(n.target)]


def test_an_expert_without_tokens_keeps_its_history():
    model = Experts(3, 32, 48)
    compiled = fp8(model, DelayedScaling(amax_history_len=4))
    view = state(compiled)

    def after(sizes):
        compiled(torch.randn(24, 32, dtype=torch.bfloat16, requires_grad=True), offsets(sizes)).sum().backward()
        view.step()
        return view.amax_history("weight:weight"), view.scale("weight:weight")

    first, scale = after((8, 0, 16))
    amaxes = model.weight.detach().abs().amax((1, 2)).float()
    assert first[-1].equal(amaxes)  # also of the expert that had no tokens: its first use has a scale
    assert scale.equal(torch.full_like(amaxes, 448) / amaxes)
    with torch.no_grad():
        model.weight *= 2
    second, scale = after((8, 0, 16))
    assert second[-1, 0] == 2 * amaxes[0]
    assert second[:, 1].equal(first[:, 1])
    assert scale[1] == torch.tensor(448.0) / amaxes[1]
    third, _ = after((8, 8, 8))
    assert third[-1].equal(2 * amaxes)
