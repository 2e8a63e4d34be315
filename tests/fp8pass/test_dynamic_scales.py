"""Recipes whose scales are computed in the graph: torchao's numbers of rows, the hardware, and `backward_override`, with which
backward GEMMs run in high precision from the original or the dequantized operands."""

import copy
import dataclasses
import re
from unittest import mock

import pytest
import torch
from torch import nn

import lowering
from fp8pass import Float8BlockScaling, fp8_compile, inspect
from fp8pass.errors import RecipeError
from fp8pass.recipes import as_recipe
from lowering import hardware
from lowering.formats import E4M3
from tests.support import engines, models
from tests.support.cases import each
from tests.support.copies import scaled_gemms
from tests.support.training import fp8, step

BF16 = torch.bfloat16
F32_BLOCKS = Float8BlockScaling(use_f32_scales=True)


def spread(rows, columns, dim):
    """Lines of very different sizes."""
    factors = torch.randn(rows, 1) if dim == 0 else torch.randn(1, columns)
    return torch.randn(rows, columns) * torch.exp(3 * factors)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_a_rowwise_linear_is_torchaos(recipe):
    """To one step of bfloat16, for sums are added in another order; tests/lowering/test_quantization.py compares scales."""
    float8_linear = pytest.importorskip("torchao.float8.float8_linear")
    from torchao.float8.config import Float8LinearConfig

    linear = nn.Linear(80, 112, bias=False, dtype=torch.bfloat16)
    x, grad = spread(48, 80, 0).bfloat16(), spread(48, 112, 1).bfloat16()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = float8_linear.Float8Linear.from_float(copy.deepcopy(linear), config)
    expected = step(theirs, theirs, x, loss=lambda out: (out * grad).sum())
    made = step(fp8_compile(linear, recipe, backend="aot_eager"), linear, x, loss=lambda out: (out * grad).sum())
    for got, want in zip([made.out, *made.gradients], [expected.out, *expected.gradients], strict=True):
        assert got.dtype == want.dtype == torch.bfloat16
        neighbours = [torch.nextafter(want, torch.full_like(want, end)) for end in (-torch.inf, torch.inf)]
        assert torch.stack([got == other for other in (want, *neighbours)]).any(0).all()


@each(
    ("recipe", "capability", "reason"),
    [
        ("blockwise", (10, 0), None),
        (F32_BLOCKS, (10, 0), "blockwise GEMMs run as MXFP8 on this device, whose scales are powers"),
        ("mxfp8", (9, 0), "1x32 blocks need compute capability 10.0, this device has 9.0; use the recipe 'blockwise'"),
    ],
)
def test_recipes_on_devices(recipe, capability, reason):
    """The hardware is that of the graph: here of a model on meta, which a machine takes for its GPU."""
    with (
        mock.patch.object(hardware, "cuda_capability", return_value=capability),
        mock.patch.object(hardware, "cuda_version", return_value=(13, 0)),
    ):
        compiled = fp8_compile(nn.Linear(64, 64, device="meta"), recipe, backend="aot_eager")
        compiled(torch.empty(32, 64, device="meta"))
    gemms, nodes = inspect(compiled).gemms, scaled_gemms(inspect(compiled).graphs[0].after.graph)
    assert [g.quantized for g in gemms] == [reason is None] * 2, "output and grad_weight"
    assert [n.kwargs["implementation"] for n in nodes] == ["mxfp8"] * (2 if reason is None else 0)
    assert reason is None or all(g.reason.startswith(f"hardware: {reason}") for g in gemms)


# -- backward_override


def overriding(recipe, override, **options):
    return type(as_recipe(recipe))(backward_override=override, **options)


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


@pytest.mark.parametrize("recipe", ["current", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("override", ["dequantized", "high_precision"])
def test_gradients_are_those_of_operands_replaced_by_hand(recipe, override):
    linear, x, grad = (
        nn.Linear(100, 200, bias=False).bfloat16(),
        torch.randn(40, 100, dtype=BF16),
        torch.randn(40, 200, dtype=BF16),
    )
    x_read, weight_read = x, linear.weight.detach()
    if override == "dequantized":
        x_read, weight_read = dequantized(x, recipe, "input"), dequantized(weight_read, recipe, "weight")
    compiled = fp8(linear, overriding(recipe, override))
    found = step(compiled, linear, x, loss=lambda out: (out * grad).sum())
    with torch.no_grad():
        assert torch.equal(found.out, fp8(copy.deepcopy(linear), recipe)(x))
    for got, want in zip(found.gradients, (grad @ weight_read, grad.t() @ x_read), strict=True):
        assert torch.equal(got, want)
    output, *backward = inspect(compiled).gemms
    assert output.quantized
    assert [str(g.reason) for g in backward] == [f"recipe: backward_override={override!r} keeps high precision"] * 2


@pytest.mark.parametrize(("override", "num_bytes"), [("high_precision", 0), ("dequantized", 128 * 256 + 4 * 128 * 2)])
def test_what_it_saves(override, num_bytes):
    """One byte per element of what a GEMM read and of its scales, or nothing beside the input in bfloat16, which is there."""
    compiled = fp8(nn.Sequential(nn.Linear(256, 256, bias=False)).bfloat16(), overriding("blockwise", override))
    compiled(torch.randn(128, 256, dtype=BF16).mul(2)).sum().backward()  # grad_weight alone
    assert [graph.saved_bytes for graph in inspect(compiled).graphs] == [num_bytes]


def test_rules_give_a_role_back_to_fp8():
    compiled = fp8(models.mlp().bfloat16(), overriding("rowwise", "dequantized"), rules={"*:grad_weight": "current"})
    compiled(torch.randn(16, 64, dtype=BF16, requires_grad=True)).sum().backward()
    quantized = {(g.role, g.quantized) for g in inspect(compiled).gemms}
    assert quantized == {("output", True), ("grad_input", False), ("grad_weight", True)}


@pytest.mark.parametrize(
    ("recipe", "override", "options", "message"),
    [
        ("delayed", "dequantized", {}, "delayed scaling has none, as in TransformerEngine"),
        ("current", "dequantized", {"fast_accum_grad_weight": True}, "no backward GEMM runs in FP8 with backward_override="),
        ("rowwise", "dequantized", {"high_precision_grad_weight": True}, "leave high_precision_grad_weight at False"),
    ],
)
def test_options_that_mean_nothing_beside_it_are_refused(recipe, override, options, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        overriding(recipe, override, **options)
