"""`backward_override`: FP8 forward GEMMs, backward GEMMs in high precision from the original or the dequantized operands."""

import copy
import re

import pytest
import torch
from torch import nn

import lowering
from fp8pass import fp8_compile, inspect
from fp8pass.errors import RecipeError
from fp8pass.recipes import as_recipe
from lowering.formats import E4M3
from tests.support import engines, models
from tests.support.numerics import sqnr
from tests.support.training import assert_equal, compiled_step, step

RECIPES = {name: type(as_recipe(name)) for name in ("current", "blockwise", "rowwise", "mxfp8")}
OVERRIDES = ("high_precision", "dequantized")


def dequantized(x: torch.Tensor, recipe: str, kind: str) -> torch.Tensor:
    """The values of a matrix that the forward GEMM reads: quantized along its last dimension, and back."""
    if recipe == "current":
        scale = lowering.scale_from_amax(lowering.amax(x), E4M3)
        return (lowering.quantize(x, scale, E4M3).float() * scale.reciprocal()).to(x.dtype)
    if recipe == "rowwise":
        q, scales = lowering.quantize_rowwise(x, E4M3, power_of_2=True)
    elif recipe == "blockwise":
        q, scales = lowering.quantize_blockwise(x, E4M3, (128 if kind == "weight" else 1, 128))
    else:
        q, scales = lowering.quantize_mxfp8(x, E4M3)
    return engines.dequantized(q, scales.view(len(q), -1) if recipe == "rowwise" else scales).to(x.dtype)


class ByHand(torch.autograd.Function):
    """A linear with a given result, whose gradients are those of given operands."""

    @staticmethod
    def forward(ctx, x, weight, bias, out, x_read, weight_read):
        ctx.save_for_backward(x_read, weight_read)
        return out.clone()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(0), None, None, None


def mlp(*sizes: int) -> nn.Sequential:
    return models.mlp(*sizes).bfloat16()


SIZES = [(64, 128, 48), (100, 200, 72)]


@pytest.mark.parametrize(
    ("recipe", "override", "sizes"),
    [(recipe, override, SIZES[(i + j) % 2]) for i, recipe in enumerate(RECIPES) for j, override in enumerate(OVERRIDES)],
)
def test_gradients_are_those_of_operands_replaced_by_hand(recipe, override, sizes):
    model = mlp(*sizes)
    twin = copy.deepcopy(model)
    x = torch.randn(40, sizes[0], dtype=torch.bfloat16)

    def by_hand(x):
        for layer in twin:
            if isinstance(layer, nn.GELU):
                x = layer(x)
                continue
            forward = fp8_compile(copy.deepcopy(layer), recipe, backend="aot_eager", select="all")
            with torch.no_grad():
                out = forward(x)
            read = dequantized if override == "dequantized" else lambda x, *_: x
            operands = read(x.detach(), recipe, "input"), read(layer.weight.detach(), recipe, "weight")
            x = ByHand.apply(x, layer.weight, layer.bias, out, *operands)
        return x

    compiled = fp8_compile(model, RECIPES[recipe](backward_override=override), backend="aot_eager", select="all")
    assert_equal(step(compiled, model, x), step(by_hand, twin, x))
    gemms = inspect(compiled).gemms
    assert [g.quantized for g in gemms if g.role == "output"] == [True] * 2
    backward = gemms[2:]
    assert [str(g.reason) for g in backward] == [f"recipe: backward_override={override!r} keeps high precision"] * 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_saved(recipe):
    """One byte per element of what a GEMM read and of its scales, or the original in bfloat16."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False)).bfloat16()
    saved = {}
    for override in OVERRIDES:
        compiled = fp8_compile(model, RECIPES[recipe](backward_override=override), backend="aot_eager")
        compiled(torch.randn(128, 256, dtype=torch.bfloat16).mul(2)).sum().backward()  # grad_weight alone
        (graph,) = inspect(compiled).graphs
        saved[override] = graph.saved_bytes
        formats = {v.meta["val"].dtype for v in graph.forward.graph.output_node().all_input_nodes}
        assert (E4M3 in formats) == (override == "dequantized")
    scales = {"current": 4, "rowwise": 4 * 128, "blockwise": 4 * 128 * 2, "mxfp8": 128 * 8}
    assert saved == {"high_precision": 0, "dequantized": 128 * 256 + scales[recipe]}  # an input is in memory anyway


@pytest.mark.parametrize(("recipe", "override"), [("rowwise", "dequantized"), ("current", "high_precision")])
def test_inductor_and_dynamic_sizes(recipe, override):
    model, made = mlp(96, 128, 64), RECIPES[recipe](backward_override=override)
    calls = [fp8_compile(copy.deepcopy(model), made, backend=backend, dynamic=True) for backend in ("aot_eager", "inductor")]
    for rows in (33, 48):
        x = torch.randn(rows, 96, dtype=torch.bfloat16)
        eager, compiled = (step(call, None, x).inputs[0] for call in calls)
        assert sqnr(eager, compiled) >= 30


def test_rules_of_one_role():
    made = RECIPES["rowwise"](backward_override="dequantized")
    compiled = fp8_compile(mlp(64, 64, 64), made, backend="aot_eager", rules={"*:grad_weight": "current"})
    compiled(torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    quantized = {(g.role, g.quantized) for g in inspect(compiled).gemms}
    assert quantized == {("output", True), ("grad_input", False), ("grad_weight", True)}
    model = mlp(64, 64, 64)
    made = RECIPES["current"](backward_override="dequantized")
    compiled = fp8_compile(model, made, backend="aot_eager", rules={"*:output": None})
    plain = copy.deepcopy(model)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    assert_equal(step(compiled, model, x), step(plain, plain, x))


# -- options


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("delayed", {}, "delayed scaling has none, as in TransformerEngine"),
        ("current", {"backward_override": "dequantised"}, "Did you mean 'dequantized'?"),
        ("mxfp8", {"backward_override": True}, "use None, 'high_precision' or 'dequantized'"),
        (
            "current",
            {"fast_accum_grad_weight": True},
            "no backward GEMM runs in FP8 with backward_override='dequantized'; leave fast_accum_grad_weight at False",
        ),
        ("blockwise", {"grad_block_scaling_dim": 2}, "leave grad_block_scaling_dim at 1"),
        ("rowwise", {"high_precision_grad_weight": True}, "leave high_precision_grad_weight at False"),
    ],
)
def test_refused(recipe, options, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        type(as_recipe(recipe))(**{"backward_override": "dequantized"} | options)


@pytest.mark.parametrize("override", OVERRIDES)
def test_activation_checkpointing_changes_nothing(override):
    inner, made = mlp(64, 64, 64), RECIPES["blockwise"](backward_override=override)
    x, plain = torch.randn(32, 64, dtype=torch.bfloat16), models.Stack([copy.deepcopy(inner)])
    model = models.Stack([inner], use_reentrant=False)
    _, found = compiled_step(model, made, x)
    assert_equal(found, compiled_step(plain, made, x)[1])
