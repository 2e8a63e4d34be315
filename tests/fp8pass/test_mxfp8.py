"""MXFP8BlockScaling through the pass: torchao's numbers, which copies there are, ragged sizes, options, the hardware."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from fp8pass import Format, MXFP8BlockScaling, fp8_compile, inspect, state
from fp8pass.recipes import as_recipe
from lowering import hardware
from lowering.formats import E4M3
from tests.support.copies import casts_by
from tests.support.models import LlamaBlock, mlp
from tests.support.numerics import sqnr
from tests.tolerances import REFERENCE_MM, SQNR_LINEAR_E4M3, SQNR_MODEL_GRADIENT, SQNR_MODEL_OUTPUT, relative_error

ops = torch.ops.lowering


def nodes_of(compiled) -> list:
    return list(inspect(compiled).graphs[0].after.graph.nodes)


def targets(compiled) -> list:
    return [n.target for n in nodes_of(compiled)]


def dequantized(x: torch.Tensor) -> torch.Tensor:
    """What torchao's MXFP8 keeps of x, blocks along the last dimension, in float64."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    scale, q = mx.to_mx(x.contiguous(), E4M3, 32, mx.ScaleCalculationMode.RCEIL)
    codes = scale.view(torch.uint8).double().repeat_interleave(32, dim=-1)
    return q.double() * torch.exp2(codes - 127)


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_a_linear_multiplies_what_torchao_quantizes(spread):
    """Output and gradients are the float64 products of torchao's values, each block along K of its GEMM."""
    torch.manual_seed(0)
    tokens, features_in, features_out = 64, 96, 128
    linear = nn.Linear(features_in, features_out, bias=False)
    x = torch.randn(tokens, features_in) * torch.exp(spread * torch.randn(tokens, 1))
    grad = torch.randn(tokens, features_out) * torch.exp(spread * torch.randn(1, features_out))
    given = x.clone().requires_grad_()
    out = fp8_compile(linear, "mxfp8", backend="aot_eager")(given)
    out.backward(grad)
    w = linear.weight.detach()
    for found, a, b in ((out, x, w), (given.grad, grad, w.t()), (linear.weight.grad, grad.t(), x.t())):
        assert relative_error(found.detach(), dequantized(a) @ dequantized(b).t()) <= REFERENCE_MM[torch.float32]


@pytest.mark.parametrize(("square", "backend"), [(False, "aot_eager"), (True, "inductor")])
def test_llama_block(square, backend):
    recipe = MXFP8BlockScaling(enable_2d_quantization=square)
    torch.manual_seed(0)
    block = LlamaBlock().bfloat16()
    plain = copy.deepcopy(block)
    x = torch.randn(2, 64, 128, dtype=torch.bfloat16)
    compiled = fp8_compile(block, recipe, backend=backend)
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
    found = targets(compiled)
    assert found.count(ops.scaled_mm_mxfp8.default) == 21
    # Everything is quantized in one read, but for the result of attention: backward has it and makes its copy there.
    assert len(casts_by(ops.cast_mxfp8.default, nodes_of(compiled), both=True)) == 17
    assert found.count(ops.cast_mxfp8.default) == 17 + 2
    assert state(compiled).tensors == []


def test_scales_are_uint8_and_data_are_padded_to_whole_blocks():
    compiled = fp8_compile(mlp(40, 72, 33), "mxfp8", backend="aot_eager")
    compiled(torch.randn(33, 40, requires_grad=True)).sum().backward()
    gemms = [n for n in nodes_of(compiled) if n.target is ops.scaled_mm_mxfp8.default]
    assert len(gemms) == 6
    for node in gemms:
        a, b, scale_a, scale_b = (arg.meta["val"] for arg in node.args[:4])
        assert scale_a.dtype == scale_b.dtype == torch.uint8
        assert a.shape[1] == b.shape[0]
        assert a.shape[1] % 32 == 0
        assert b.shape[1] % 16 == 0


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("rows", [1, 33, 130])
def test_ragged_sizes(rows, square):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 150), nn.GELU(), nn.Linear(150, 37))
    plain = copy.deepcopy(model)
    x = torch.randn(rows, 100)
    compiled = fp8_compile(model, MXFP8BlockScaling(enable_2d_quantization=square), backend="aot_eager")
    given, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = compiled(given), plain(reference)
    for result in (out, expected):
        result.square().mean().backward()
    assert sqnr(expected, out) >= SQNR_LINEAR_E4M3
    assert sqnr(reference.grad, given.grad) >= 20
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert sqnr(theirs.grad, ours.grad) >= 20
    assert all(g.quantized for g in inspect(compiled).gemms)


def test_dynamic_shapes():
    torch.manual_seed(0)
    model = mlp(64, 128, 64)
    plain = copy.deepcopy(model)
    compiled = fp8_compile(model, "mxfp8", backend="aot_eager", dynamic=True)
    for rows in (32, 17, 200):
        x = torch.randn(rows, 64)
        model.zero_grad()
        plain.zero_grad()
        for run in (compiled, plain):
            run(x).square().sum().backward()
        assert sqnr(plain[0].weight.grad, model[0].weight.grad) >= 20


def test_tiles_are_for_weights_alone():
    compiled = fp8_compile(mlp(64, 96, 64), MXFP8BlockScaling(enable_2d_quantization=True), backend="aot_eager")
    compiled(torch.randn(32, 64, requires_grad=True)).sum().backward()
    casts = [n for n in nodes_of(compiled) if n.target is ops.cast_mxfp8.default]
    squares = {n.kwargs["square"]: set() for n in casts}
    for node in casts:
        squares[node.kwargs["square"]].add(tuple(node.args[0][0].meta["val"].shape))
    assert squares[True] == {(96, 64), (64, 96)}, "the weights [out, in]"
    assert squares[False] == {(32, 64), (32, 96)}


def test_hybrid_gradients_are_e5m2():
    model, x = mlp(), torch.randn(32, 64, requires_grad=True)
    compiled = fp8_compile(model, MXFP8BlockScaling(fp8_format=Format.HYBRID), backend="aot_eager")
    out = compiled(x)
    out.square().sum().backward()
    plain = x.detach().clone().requires_grad_()
    expected = model(plain)
    expected.square().sum().backward()
    assert {(g.a_format, g.b_format) for g in inspect(compiled).gemms if g.role != "output"} == {("e5m2", "e4m3")}
    assert sqnr(expected, out) >= SQNR_MODEL_OUTPUT
    assert sqnr(plain.grad, x.grad) >= SQNR_MODEL_GRADIENT


def test_preset():
    assert as_recipe("mxfp8") == MXFP8BlockScaling()


def test_recipes_mix_in_one_model():
    torch.manual_seed(0)
    rules = {"wq": "current", "down:grad_weight": "blockwise", "gate": MXFP8BlockScaling(enable_2d_quantization=True)}
    block, x = LlamaBlock().bfloat16(), torch.randn(1, 32, 128, dtype=torch.bfloat16)
    compiled = fp8_compile(block, "mxfp8", backend="aot_eager", rules=rules)
    out = compiled(x)
    out.sum().backward()
    recipes = {(g.module, g.role): (g.recipe, g.quantized) for g in inspect(compiled).gemms}
    assert recipes["wq", "output"] == ("current", True)
    assert recipes["wk", "output"] == ("mxfp8", True)
    assert recipes["down", "grad_weight"] == ("blockwise", True)
    assert sqnr(block(x), out) >= SQNR_MODEL_OUTPUT


def test_rows_of_very_different_size_are_what_blocks_are_for():
    torch.manual_seed(0)
    linear = nn.Linear(256, 128, bias=False)
    x = torch.randn(64, 256) * torch.logspace(-6, 2, 64)[:, None]
    expected = x @ linear.weight.t()
    out = fp8_compile(linear, "mxfp8", backend="aot_eager")(x)
    assert min(sqnr(want, got) for want, got in zip(expected, out, strict=True)) >= SQNR_LINEAR_E4M3


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((9, 0), "hardware: 1x32 blocks need compute capability 10.0, this device has 9.0; use the recipe 'blockwise' there"),
        ((8, 0), "hardware: 1x32 blocks need compute capability 10.0, this device has 8.0"),
        (None, "hardware: meta has no FP8 tensor cores that torch's GEMM uses"),
    ],
)
def test_a_device_without_mx_keeps_high_precision_and_names_what_to_take(capability, reason):
    """The device of the graph is asked: here a model on meta, which a machine takes for its GPU."""
    with mock.patch.object(hardware, "cuda_capability", return_value=capability):
        compiled = fp8_compile(nn.Linear(64, 64, device="meta"), "mxfp8", backend="aot_eager")
        compiled(torch.empty(32, 64, device="meta"))
    assert {g.reason for g in inspect(compiled).gemms} == {reason}
