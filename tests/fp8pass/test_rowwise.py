"""Float8RowwiseScaling through the pass: torchao's numbers, which copies there are, ragged sizes, options, mixed recipes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

from fp8pass import Float8RowwiseScaling, fp8_compile, inspect, state
from fp8pass.recipes import as_recipe
from lowering.formats import E4M3
from lowering.operation import NAMESPACE
from tests.support.copies import casts_by
from tests.support.models import LlamaBlock, mlp
from tests.support.numerics import sqnr
from tests.tolerances import SQNR_LINEAR_E4M3, SQNR_MODEL_GRADIENT, SQNR_MODEL_OUTPUT

ops = torch.ops.lowering
M, K, N = 48, 80, 112


@contextlib.contextmanager
def scales_of_casts() -> Iterator[list[torch.Tensor]]:
    """Every float32 tensor that an operation which computes scales returns on the CPU."""
    found: list[torch.Tensor] = []

    def recorded(reference):
        def run(*args, **kwargs):
            results = reference(*args, **kwargs)
            found.extend(t for t in results if t.dtype == torch.float32)
            return results

        return run

    names = ("cast_rowwise", "scales_from_amax")
    with contextlib.ExitStack() as stack:
        for operation in (NAMESPACE.operations[name] for name in names):
            stack.enter_context(mock.patch.object(operation, "reference", recorded(operation.reference)))
        yield found


def torchao_linear(linear: nn.Linear, recipe: str, x: torch.Tensor, grad: torch.Tensor):
    """Output, gradients and scales of torchao's emulated linear."""
    from torchao.float8 import float8_linear
    from torchao.float8.config import Float8LinearConfig

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = float8_linear.Float8Linear.from_float(copy.deepcopy(linear), config)
    scales, cast = [], float8_linear.hp_tensor_to_float8_dynamic

    def recorded(*args, **kwargs):
        made = cast(*args, **kwargs)
        scales.append(made._scale)
        return made

    with mock.patch.object(float8_linear, "hp_tensor_to_float8_dynamic", recorded):
        given = x.clone().requires_grad_()
        out = theirs(given)
        out.backward(grad)
    return [out.detach(), given.grad, *(p.grad for p in theirs.parameters())], scales


def bf16_steps(left: torch.Tensor, right: torch.Tensor) -> int:
    """The largest distance between elements in units of bfloat16's last place, zeros of either sign being equal."""

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((ordered(left) - ordered(right)).abs().max())


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_a_linear_is_torchaos(recipe, bias, spread):
    """Scales bit for bit; output and gradients to one step of bfloat16, for sums are added in another order."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    linear = nn.Linear(K, N, bias=bias, dtype=torch.bfloat16)
    x = (torch.randn(M, K) * torch.exp(spread * torch.randn(M, 1))).bfloat16()
    grad = (torch.randn(M, N) * torch.exp(spread * torch.randn(1, N))).bfloat16()
    expected, scales = torchao_linear(linear, recipe, x, grad)

    compiled = fp8_compile(linear, recipe, backend="aot_eager")
    given = x.clone().requires_grad_()
    with scales_of_casts() as ours:
        out = compiled(given)
        out.backward(grad)
    found = [s.flatten() for s in ours]
    assert len(scales) == (6 if recipe == "rowwise" else 4)
    for scale in scales:
        inverse = scale.reciprocal().flatten()
        assert any(f.shape == inverse.shape and torch.equal(f, inverse) for f in found), scale.shape
    for got, want in zip([out.detach(), given.grad, *(p.grad for p in linear.parameters())], expected, strict=True):
        assert got.dtype == want.dtype == torch.bfloat16
        if got.dim() == 2 and not bias:
            assert bf16_steps(got, want) <= 1
        else:  # torchao rounds before it adds the bias: a step of the product, which may be larger than the sum
            assert sqnr(want, got) >= 45


@pytest.mark.parametrize(("recipe", "backend"), [("rowwise", "inductor"), ("rowwise_with_gw_hp", "aot_eager")])
def test_llama_block(recipe, backend):
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
    assert state(compiled).tensors == []
    gemms = inspect(compiled).gemms
    assert len(gemms) == 21
    assert all((g.a_format, g.b_format) == ("e4m3", "e4m3") for g in gemms if g.quantized)
    kept = {g.role for g in gemms if not g.quantized}
    assert kept == (set() if recipe == "rowwise" else {"grad_weight"})


def targets(compiled) -> list:
    return [n.target for n in inspect(compiled).graphs[0].after.graph.nodes]


def test_which_copies_are_made():
    torch.manual_seed(0)
    compiled = fp8_compile(LlamaBlock(), "rowwise", backend="aot_eager")
    compiled(torch.randn(2, 64, 128, requires_grad=True)).sum().backward()
    found = targets(compiled)
    assert found.count(ops.scaled_mm_rowwise.default) == 21
    casts = functools.partial(casts_by, ops.cast_rowwise.default, inspect(compiled).graphs[0].after.graph.nodes)
    assert len(casts(many=True, both=True)) == 2, "the weights; the gradients of q, k and v"
    assert len(casts(many=False, both=True)) == 4, "the other output gradients"
    # The inputs of the linears: backward makes the columnwise copy itself, of what it has anyway.
    assert len(casts(both=False)) == 2 * 4


def test_with_grad_weight_in_high_precision_each_tensor_has_one_copy_per_scale():
    torch.manual_seed(0)
    compiled = fp8_compile(mlp(64, 128, 96), "rowwise_with_gw_hp", backend="aot_eager")
    compiled(torch.randn(32, 64, requires_grad=True)).sum().backward()
    found = targets(compiled)
    assert found.count(ops.scaled_mm_rowwise.default) == 4
    assert found.count(ops.cast_rowwise.default) == 6, "inputs, weights and output gradients along their rows"
    assert found.count(ops.cast.default) == 1, "weights per tensor"
    nodes = inspect(compiled).graphs[0].after.graph.nodes
    assert len(casts_by(ops.cast.default, nodes, many=True, both=False)) == 1
    assert not casts_by(ops.cast_rowwise.default, nodes, both=True)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("rows", [1, 33, 130])
def test_ragged_sizes(recipe, rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 150), nn.GELU(), nn.Linear(150, 37))
    plain = copy.deepcopy(model)
    x = torch.randn(rows, 100)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    given, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = compiled(given), plain(reference)
    for result in (out, expected):
        result.square().mean().backward()
    assert sqnr(expected, out) >= SQNR_LINEAR_E4M3
    assert sqnr(reference.grad, given.grad) >= 20
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert sqnr(theirs.grad, ours.grad) >= 20
    assert all(g.quantized for g in inspect(compiled).gemms if recipe == "rowwise" or g.role != "grad_weight")


def test_tokens_of_very_different_size_are_what_rows_are_for():
    torch.manual_seed(0)
    linear = nn.Linear(256, 128, bias=False)
    x = torch.randn(64, 256) * torch.logspace(-6, 2, 64)[:, None]
    expected = x @ linear.weight.t()

    def worst_token(recipe):
        out = fp8_compile(linear, recipe, backend="aot_eager")(x)
        return min(sqnr(want, got) for want, got in zip(expected, out, strict=True))

    assert worst_token("rowwise") >= SQNR_LINEAR_E4M3
    assert worst_token("current") < 10, "the small ones underflow beside the large ones"


def test_options_reach_the_operations():
    recipe = Float8RowwiseScaling(
        use_power_2_scales=False, amax_epsilon=1e-3, fast_accum_output=False, fast_accum_grad_input=True
    )
    compiled = fp8_compile(mlp(), recipe, backend="aot_eager")
    compiled(torch.randn(32, 64, requires_grad=True)).sum().backward()
    nodes = list(inspect(compiled).graphs[0].after.graph.nodes)
    casts = [n for n in nodes if "cast" in str(n.target) and "lowering" in str(n.target)]
    assert casts
    assert all((n.kwargs["power_of_2"], n.kwargs["epsilon"]) == (False, 1e-3) for n in casts)
    gemms = [n.kwargs["fast_accum"] for n in nodes if n.target is ops.scaled_mm_rowwise.default]
    assert sorted(gemms) == [False] * 4 + [True] * 2


def test_presets():
    assert as_recipe("rowwise") == Float8RowwiseScaling()
    assert as_recipe("rowwise_with_gw_hp") == Float8RowwiseScaling(high_precision_grad_weight=True)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_dynamic_shapes(recipe):
    torch.manual_seed(0)
    model = mlp(64, 128, 64)
    plain = copy.deepcopy(model)
    compiled = fp8_compile(model, recipe, backend="aot_eager", dynamic=True)
    for rows in (32, 17, 200):
        x = torch.randn(rows, 64)
        model.zero_grad()
        plain.zero_grad()
        for run in (compiled, plain):
            run(x).square().sum().backward()
        assert sqnr(plain[0].weight.grad, model[0].weight.grad) >= 20


def test_recipes_mix_in_one_model():
    """A tensor that rowwise and current GEMMs read is quantized under each."""
    torch.manual_seed(0)
    block = LlamaBlock().bfloat16()
    rules = {"wq": "current", "down:grad_weight": "blockwise", "gate": "rowwise_with_gw_hp"}
    compiled = fp8_compile(block, "rowwise", backend="aot_eager", rules=rules)
    x = torch.randn(1, 32, 128, dtype=torch.bfloat16)
    out = compiled(x)
    out.sum().backward()
    recipes = {(g.module, g.role): (g.recipe, g.quantized) for g in inspect(compiled).gemms}
    assert recipes["wq", "output"] == ("current", True)
    assert recipes["wk", "output"] == ("rowwise", True)
    assert recipes["down", "grad_weight"] == ("blockwise", True)
    assert recipes["gate", "grad_weight"] == ("rowwise", False)
    assert sqnr(block(x), out) >= SQNR_MODEL_OUTPUT


def test_activations_are_multiplied_row_by_column():
    """Both operands of a product of activations are inputs: also the one that has no weight has a scale per line."""
    x = torch.randn(32, 48, requires_grad=True)
    compiled = fp8_compile(lambda x: x @ (x.T @ x) / 32, "rowwise", backend="aot_eager")
    expected = x @ (x.T @ x) / 32
    out = compiled(x)
    assert sqnr(expected, out) >= SQNR_LINEAR_E4M3 - 3  # two products in a row
    out.sum().backward()
    assert all(g.quantized and g.a_format == "e4m3" for g in inspect(compiled).gemms)


def test_every_copy_is_e4m3():
    compiled = fp8_compile(mlp(), "rowwise", backend="aot_eager")
    compiled(torch.randn(32, 64, requires_grad=True)).sum().backward()
    nodes = inspect(compiled).graphs[0].after.graph.nodes
    dtypes = {a.meta["val"].dtype for n in nodes if n.target is ops.scaled_mm_rowwise.default for a in n.args[:2]}
    assert dtypes == {E4M3}
