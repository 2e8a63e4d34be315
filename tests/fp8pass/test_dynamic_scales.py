"""Recipes whose scales are computed in the graph, of blocks and of rows: torchao's numbers, formats, copies, ragged sizes,
mixtures, options, the hardware."""

import copy
import dataclasses
from unittest import mock

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, Float8BlockScaling, Float8RowwiseScaling, Format, MXFP8BlockScaling, fp8_compile, inspect
from lowering import hardware
from lowering.formats import E4M3
from tests.support.cases import each
from tests.support.copies import casts_by
from tests.support.models import LlamaBlock, mlp
from tests.support.numerics import sqnr
from tests.support.training import assert_trains_as, compiled_step, step
from tests.tolerances import REFERENCE_MM, SQNR_LINEAR_E4M3, relative_error

ops = torch.ops.lowering
M, K, N = 48, 80, 112
SQUARE = MXFP8BlockScaling(enable_2d_quantization=True)


def nodes_of(compiled) -> list:
    return list(inspect(compiled).graphs[0].after.graph.nodes)


def of(compiled, target) -> list:
    return [n for n in nodes_of(compiled) if n.target is target.default]


# -- numbers of torchao


def kept_by_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """The values of x in torchao's MXFP8, blocks along the last dimension, in float64."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    scale, q = mx.to_mx(x.contiguous(), E4M3, 32, mx.ScaleCalculationMode.RCEIL)
    codes = scale.view(torch.uint8).double().repeat_interleave(32, dim=-1)
    return q.double() * torch.exp2(codes - 127)


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_an_mxfp8_linear_multiplies_what_torchao_quantizes(spread):
    """Output and gradients are the float64 products of torchao's values, each block along K of its GEMM."""
    linear = nn.Linear(96, 128, bias=False)
    x = torch.randn(64, 96) * torch.exp(spread * torch.randn(64, 1))
    grad = torch.randn(64, 128) * torch.exp(spread * torch.randn(1, 128))
    found = step(fp8_compile(linear, "mxfp8", backend="aot_eager"), linear, x, loss=lambda out: (out * grad).sum())
    w = linear.weight.detach()
    for got, a, b in zip([found.out, *found.gradients], (x, grad, grad.t()), (w, w.t(), x.t()), strict=True):
        assert relative_error(got, kept_by_mxfp8(a) @ kept_by_mxfp8(b).t()) <= REFERENCE_MM[torch.float32]


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize(("bias", "spread"), [(False, 0.0), (True, 3.0), (False, 3.0)])
def test_a_rowwise_linear_is_torchaos(recipe, bias, spread):
    """To one step of bfloat16, for sums are added in another order; tests/lowering/test_quantization.py compares scales."""
    float8_linear = pytest.importorskip("torchao.float8.float8_linear")
    from torchao.float8.config import Float8LinearConfig

    linear = nn.Linear(K, N, bias=bias, dtype=torch.bfloat16)
    x = (torch.randn(M, K) * torch.exp(spread * torch.randn(M, 1))).bfloat16()
    grad = (torch.randn(M, N) * torch.exp(spread * torch.randn(1, N))).bfloat16()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = float8_linear.Float8Linear.from_float(copy.deepcopy(linear), config)
    expected = step(theirs, theirs, x, loss=lambda out: (out * grad).sum())
    made = step(fp8_compile(linear, recipe, backend="aot_eager"), linear, x, loss=lambda out: (out * grad).sum())
    for got, want in zip([made.out, *made.gradients], [expected.out, *expected.gradients], strict=True):
        assert got.dtype == want.dtype == torch.bfloat16
        if got.dim() == 2 and not bias:
            neighbours = [torch.nextafter(want, torch.full_like(want, end)) for end in (-torch.inf, torch.inf)]
            assert torch.stack([got == other for other in (want, *neighbours)]).any(0).all()
        else:  # torchao rounds before it adds the bias: a step of the product, which may be larger than the sum
            assert sqnr(want, got) >= 45


# -- every recipe


MIXED = {"wq": "current", "down:grad_weight": "blockwise"}


@each(
    ("recipe", "rules", "expected"),
    [
        ("delayed", MIXED | {"down:grad_weight": None, "up": "blockwise"}, {"up:grad_input": "blockwise"}),
        ("rowwise", MIXED | {"gate": "rowwise_with_gw_hp"}, {"wk:output": "rowwise", "gate:grad_weight": None}),
        ("mxfp8", MIXED | {"gate": SQUARE}, {"wk:output": "mxfp8"}),
    ],
)
def test_recipes_mix_in_one_model(recipe, rules, expected):
    """A tensor that GEMMs of two recipes read is quantized under each."""
    block, x = LlamaBlock().bfloat16(), torch.randn(1, 32, 128, dtype=torch.bfloat16)
    compiled = fp8_compile(block, recipe, backend="aot_eager", rules=rules)
    assert_trains_as(compiled, block, x, gradient=0)
    found = {f"{g.module}:{g.role}": g.recipe if g.quantized else None for g in inspect(compiled).gemms}
    expected = expected | {"wq:output": "current", "down:grad_weight": rules["down:grad_weight"]}
    assert {name: found[name] for name in expected} == expected


@each(
    ("recipe", "formats"),
    [
        (Float8BlockScaling(fp8_format=Format.HYBRID, use_f32_scales=True, amax_epsilon=1e-6), {("e5m2", "e4m3")}),
        (MXFP8BlockScaling(fp8_format=Format.HYBRID), {("e5m2", "e4m3")}),
        (Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1), {("e4m3", "e4m3")}),
        (DelayedScaling(fp8_format=Format.E4M3), {("e4m3", "e4m3")}),
    ],
)
def test_formats_and_blocks_by_option(recipe, formats):
    model, x = mlp(), torch.randn(32, 64)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    assert_trains_as(compiled, model, x)
    assert all(g.quantized for g in inspect(compiled).gemms)
    assert {(g.a_format, g.b_format) for g in inspect(compiled).gemms if g.role != "output"} == formats


# -- nodes


def compiled_mlp(recipe, *sizes, rows=32):
    compiled, _ = compiled_step(mlp(*sizes), recipe, torch.randn(rows, sizes[0]))
    return compiled


def test_arguments_of_casts_and_gemms():
    gemms = of(compiled_mlp("blockwise", 128, 128, 128), ops.scaled_mm)
    dims = [(n.kwargs["granularity_a"], n.kwargs["granularity_b"]) for n in gemms]
    assert sorted(dims) == [("block_1x128", "block_128x128")] * 4 + [("block_1x128", "block_1x128")] * 2
    assert {type(value) for pair in dims for value in pair} == {str}, "a member of an enum could not be printed as code"
    gemms = of(compiled_mlp("mxfp8", 40, 72, 33, rows=33), ops.scaled_mm)
    assert len(gemms) == 6
    for a, b, *scales in ([arg.meta["val"] for arg in node.args[:4]] for node in gemms):
        assert [scale.dtype for scale in scales] == [torch.uint8] * 2
        assert (a.shape[1] % 32, b.shape[1] % 16) == (0, 0)
    casts = of(compiled_mlp(SQUARE, 64, 96, 64), ops.cast_with_scales)
    squares = {tuple(n.args[0][0].meta["val"].shape) for n in casts if n.kwargs.get("square", False)}
    assert squares == {(96, 64), (64, 96)}, "the weights"
    compiled = compiled_mlp("rowwise_with_gw_hp", 64, 96, 48)
    assert [len(of(compiled, op)) for op in (ops.scaled_mm, ops.cast_with_scales, ops.cast)] == [4, 6, 1]
    assert len(casts_by(ops.cast.default, nodes_of(compiled), many=True, both=False)) == 1, "weights per tensor"
    accumulation = {"fast_accum_output": False, "fast_accum_grad_input": True}
    compiled = compiled_mlp(Float8RowwiseScaling(use_power_2_scales=False, amax_epsilon=1e-3, **accumulation), 64, 128, 64)
    casts = [n for n in nodes_of(compiled) if str(n.target).startswith("lowering.cast")]
    assert {(n.kwargs["power_of_2"], n.kwargs["epsilon"]) for n in casts} == {(False, 1e-3)}
    assert sorted(n.kwargs["fast_accum"] for n in of(compiled, ops.scaled_mm)) == [False] * 4 + [True] * 2


def test_activations_are_multiplied_row_by_column():
    """Both operands of a product of activations are inputs: also the one that has no weight has a scale per line."""
    x = torch.randn(32, 48, requires_grad=True)
    compiled = fp8_compile(lambda x: x @ (x.T @ x) / 32, "rowwise", backend="aot_eager")
    expected = x @ (x.T @ x) / 32
    out = compiled(x)
    assert sqnr(expected, out) >= SQNR_LINEAR_E4M3 - 3  # two products in a row
    out.sum().backward()
    assert all(g.quantized and g.a_format == "e4m3" for g in inspect(compiled).gemms)


# -- the hardware: that of the graph, here of a model on meta, which a machine takes for its GPU


@each(
    ("recipe", "capability", "reason"),
    [
        ("blockwise", (10, 0), None),
        (
            Float8BlockScaling(use_f32_scales=True),
            (10, 0),
            "blockwise GEMMs run as MXFP8 on this device, whose scales are powers",
        ),
        ("mxfp8", (9, 0), "1x32 blocks need compute capability 10.0, this device has 9.0; use the recipe 'blockwise'"),
        ("mxfp8", (8, 0), "1x32 blocks need compute capability 10.0, this device has 8.0"),
        ("mxfp8", None, "meta has no FP8 tensor cores that torch's GEMM uses"),
    ],
)
def test_recipes_on_devices(recipe, capability, reason):
    with (
        mock.patch.object(hardware, "cuda_capability", return_value=capability),
        mock.patch.object(hardware, "cuda_version", return_value=(13, 0)),
    ):
        compiled = fp8_compile(nn.Linear(64, 64, device="meta"), recipe, backend="aot_eager")
        compiled(torch.empty(32, 64, device="meta"))
    gemms, nodes = inspect(compiled).gemms, of(compiled, ops.scaled_mm)
    assert len(gemms) == 2
    if reason is None:
        assert all(g.quantized for g in gemms)
        assert [n.kwargs["implementation"] for n in nodes] == ["mxfp8"] * 2, "output and grad_weight"
    else:
        assert nodes == []
        assert all(g.reason.startswith(f"hardware: {reason}") for g in gemms)
