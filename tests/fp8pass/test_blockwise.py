"""Float8BlockScaling through the pass: formats, granularity, ragged sizes, outliers, mixed recipes."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, Float8BlockScaling, Format, fp8_compile, inspect, state
from lowering import hardware
from tests.support.copies import casts_by
from tests.support.models import LlamaBlock, mlp
from tests.support.numerics import sqnr
from tests.tolerances import SQNR_LINEAR_E4M3, SQNR_LINEAR_E5M2, SQNR_MODEL_GRADIENT, SQNR_MODEL_OUTPUT, SQNR_OUTLIERS_GAIN


def train(model, recipe, x, steps=1, **options):
    compiled = fp8_compile(model, recipe, backend="aot_eager", **options)
    for _ in range(steps):
        model.zero_grad()
        given = x.clone().requires_grad_()
        out = compiled(given)
        out.square().mean().backward()
    return compiled, out, given.grad


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_llama_block(backend):
    torch.manual_seed(0)
    block = LlamaBlock().bfloat16()
    plain = copy.deepcopy(block)
    x = torch.randn(2, 64, 128, dtype=torch.bfloat16)
    compiled = fp8_compile(block, "blockwise", backend=backend)
    given, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = compiled(given), plain(reference)
    for result in (out, expected):
        result.square().mean().backward()
    assert sqnr(expected, out) >= SQNR_MODEL_OUTPUT
    assert sqnr(reference.grad, given.grad) >= SQNR_MODEL_GRADIENT
    for ours, theirs in zip(block.parameters(), plain.parameters(), strict=True):
        assert sqnr(theirs.grad, ours.grad) >= SQNR_MODEL_GRADIENT
    gemms = inspect(compiled).gemms
    assert len(gemms) == 21
    assert all(g.quantized and (g.a_format, g.b_format) == ("e4m3", "e4m3") for g in gemms)
    nodes = list(inspect(compiled).graphs[0].after.graph.nodes)
    assert sum(n.target is torch.ops.lowering.scaled_mm_blockwise.default for n in nodes) == 21
    # Gradients are quantized in one read; of inputs, backward makes the copies that it reads: it has what they are made of.
    ops = torch.ops.lowering
    many = casts_by(ops.cast_blockwise.default, nodes, many=True, both=True)
    assert [len(n.args[0]) for n in many] == [7, 3], "the weights; the gradients of q, k and v"
    assert len(casts_by(ops.cast_blockwise.default, nodes, many=False, both=True)) == 4
    assert len(casts_by(ops.cast_blockwise.default, nodes, both=False)) == 2 * 4
    assert state(compiled).tensors == []


def test_granularities_of_the_gemms():
    compiled, _, _ = train(mlp(128, 128, 128), Float8BlockScaling(), torch.randn(32, 128))
    nodes = inspect(compiled).graphs[0].after.graph.nodes
    dims = [
        (n.kwargs["granularity_a"], n.kwargs["granularity_b"])
        for n in nodes
        if n.target is torch.ops.lowering.scaled_mm_blockwise.default
    ]
    assert sorted(dims) == [("block_1x128", "block_128x128")] * 4 + [("block_1x128", "block_1x128")] * 2
    assert {type(value) for pair in dims for value in pair} == {str}, "a member of an enum could not be printed as code"


def test_two_dimensional_inputs_meet_no_two_dimensional_weights():
    recipe = Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)
    model, x = mlp(), torch.randn(32, 64)
    compiled, out, _ = train(model, recipe, x)
    assert all(g.quantized for g in inspect(compiled).gemms)
    assert sqnr(model(x), out) >= SQNR_MODEL_OUTPUT


@pytest.mark.parametrize("rows", [1, 33, 130])
def test_ragged_sizes(rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 150), nn.GELU(), nn.Linear(150, 37))
    plain = copy.deepcopy(model)
    x = torch.randn(rows, 100)
    compiled, out, grad = train(model, "blockwise", x)
    reference = x.clone().requires_grad_()
    expected = plain(reference)
    expected.square().mean().backward()
    assert sqnr(expected, out) >= SQNR_LINEAR_E4M3
    assert sqnr(reference.grad, grad) >= SQNR_LINEAR_E5M2
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert sqnr(theirs.grad, ours.grad) >= SQNR_LINEAR_E5M2
    assert all(g.quantized for g in inspect(compiled).gemms)


def test_outlier_channels_are_what_blocks_are_for():
    """A few channels x 100 appear in trained-on inputs: delayed scales have not seen them and saturate, blocks adapt.

    Outliers that the history already knows cost little in either recipe: E4M3 is a floating-point format, and a factor of 100
    leaves the other channels normal numbers.
    """
    ordinary = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    with_outliers = ordinary.clone()
    with_outliers[..., [3, 77, 140, 200]] *= 100.0

    def quality(recipe):
        torch.manual_seed(0)
        block = LlamaBlock(256, 512).bfloat16()
        plain = copy.deepcopy(block).float()
        compiled, _, _ = train(block, recipe, ordinary, steps=3)
        return sqnr(plain(with_outliers.float()), compiled(with_outliers))

    assert quality("blockwise") >= quality(DelayedScaling(amax_history_len=4)) + SQNR_OUTLIERS_GAIN


def test_recipes_mix_in_one_model():
    torch.manual_seed(0)
    block = LlamaBlock().bfloat16()
    rules = {"w[qkvo]": "current", "down:grad_weight": None, "gate": "blockwise", "up": "blockwise", "down": "blockwise"}
    x = torch.randn(1, 32, 128, dtype=torch.bfloat16)
    compiled, out, _ = train(block, DelayedScaling(), x, rules=rules)
    recipes = {(g.module, g.role): g.recipe for g in inspect(compiled).gemms}
    assert recipes["wq", "output"] == "current"
    assert recipes["up", "grad_input"] == "blockwise"
    assert recipes["down", "grad_weight"] is None
    assert sqnr(block(x), out) >= SQNR_MODEL_OUTPUT


def test_hybrid_formats_and_float32_scales():
    recipe = Float8BlockScaling(fp8_format=Format.HYBRID, use_f32_scales=True, amax_epsilon=1e-6)
    model, x = mlp(), torch.randn(32, 64)
    compiled, out, grad = train(model, recipe, x)
    assert {g.a_format for g in inspect(compiled).gemms if g.role != "output"} == {"e5m2"}
    assert sqnr(model(x), out) >= SQNR_MODEL_OUTPUT
    plain = x.requires_grad_()
    model(plain).square().mean().backward()
    assert sqnr(plain.grad, grad) >= SQNR_MODEL_GRADIENT


def test_batched_tokens_dynamic_shapes():
    torch.manual_seed(0)
    model = mlp(64, 128, 64)
    plain = copy.deepcopy(model)
    compiled = fp8_compile(model, "blockwise", backend="aot_eager", dynamic=True)
    for rows in (32, 17, 200):
        x = torch.randn(rows, 64)
        model.zero_grad()
        plain.zero_grad()
        for run in (compiled, plain):
            run(x).square().sum().backward()
        assert sqnr(plain[0].weight.grad, model[0].weight.grad) >= SQNR_LINEAR_E5M2


def on_sm100(recipe) -> list:
    """The GEMMs of a linear on meta, which a machine takes for its GPU with SM100, and the inspection."""
    with (
        mock.patch.object(hardware, "cuda_capability", return_value=(10, 0)),
        mock.patch.object(hardware, "cuda_version", return_value=(13, 0)),
    ):
        compiled = fp8_compile(nn.Linear(64, 64, device="meta"), recipe, backend="aot_eager")
        compiled(torch.empty(32, 64, device="meta"))
    inspection = inspect(compiled)
    target = torch.ops.lowering.scaled_mm_blockwise.default
    return [n for n in inspection.graphs[0].after.graph.nodes if n.target is target], inspection.gemms


def test_sm100_multiplies_through_mxfp8():
    nodes, gemms = on_sm100("blockwise")
    assert [n.kwargs["implementation"] for n in nodes] == ["mxfp8"] * 2, "output and grad_weight"
    assert all(g.quantized for g in gemms)


def test_sm100_refuses_float32_scales():
    nodes, gemms = on_sm100(Float8BlockScaling(use_f32_scales=True))
    assert nodes == []
    start = "hardware: blockwise GEMMs run as MXFP8 on this device, whose scales are powers of two"
    assert len(gemms) == 2
    assert all(g.reason.startswith(start) for g in gemms)
