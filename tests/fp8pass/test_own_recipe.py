"""Recipes from users' own files: the one of docs/recipes.md, a subclass of delayed scaling, and decisions that go wrong.

Oracle: operands quantized and dequantized in float64 by formulas written here, multiplied in float64.
"""

import dataclasses
import math

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import RecipeError
from fp8pass.recipes import Granularity, MXFP8HighPrecisionGradWeight, Quantization, Recipe, ScaleFrom
from lowering.formats import E4M3, E5M2, FP8_MAX
from tests.support.joint import calls, trace
from tests.support.models import mlp
from tests.support.training import compiled_step

pytest.importorskip("markdown_it")
pytest.importorskip("sybil")

from tests.support.documents import ROOT, fences

ROUNDING = 2e-6
"""The error of a float32 sum of a few hundred products, relative to the largest result."""


def documented():
    code = next(content for _, content in fences(ROOT / "docs/recipes.md") if "class BlockwiseForward" in content)
    code = code.partition("\ncompiled = ")[0]
    assert len(code.splitlines()) <= 40
    namespace = {"__name__": __name__}  # where dataclasses look for the types of fields
    exec(code, namespace)
    return namespace["BlockwiseForward"]


BlockwiseForward = documented()


def held(x, dtype, block=None, power_of_2=False):
    """float64: what FP8 copies of a matrix hold, each block of rows and columns with its own scale; None is one block."""
    rows, cols = block or x.shape
    result = torch.empty(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], cols):
            part = x[i : i + rows, j : j + cols]
            scale = torch.tensor(FP8_MAX[dtype]) / part.abs().max().float()
            if power_of_2:
                scale = torch.tensor(2.0 ** math.floor(math.log2(float(scale))))
            result[i : i + rows, j : j + cols] = (part * scale).to(dtype).double() / scale.double()
    return result


def assert_sum(got, want):
    assert (got.double() - want).abs().max() <= ROUNDING * want.abs().max()


def run(recipe, model, x, dy, **options):
    compiled, found = compiled_step(model, recipe, x, loss=lambda out: (out * dy).sum(), select="all", **options)
    return compiled, found.out, *found.inputs


@pytest.mark.parametrize("shape", [(48, 256, 128), (40, 200, 72), (17, 130, 50)], ids=str)
def test_blockwise_forward_and_gradients_per_tensor(shape):
    m, k, n = shape
    model, x, dy = nn.Linear(k, n), torch.randn(m, k), torch.randn(m, n)
    x[:, : k // 3] *= 50  # scales of blocks differ
    compiled, out, dx = run(BlockwiseForward(), model, x, dy)
    assert [g.quantized for g in inspect(compiled).gemms] == [True] * 3
    w, bias = model.weight.detach(), model.bias.detach()
    blocks_of_x, blocks_of_w = held(x, E4M3, (1, 128), True), held(w, E4M3, (128, 128), True)
    assert_sum(out, blocks_of_x @ blocks_of_w.t() + bias.double())
    grad = held(dy, E5M2)
    assert_sum(dx, grad @ held(w, E4M3))
    assert_sum(model.weight.grad, grad.t() @ held(x, E4M3))


@pytest.mark.parametrize("shape", [(48, 256, 128), (40, 96, 72)], ids=str)
def test_mxfp8_with_grad_weight_in_high_precision(shape):
    """A recipe of this project that is one file: a subclass, an obstacle, and no FP8 copy along the tokens."""
    m, k, n = shape
    model, x, dy = nn.Linear(k, n), torch.randn(m, k), torch.randn(m, n)
    x[:, : k // 3] *= 50  # scales of blocks differ
    compiled, out, dx = run("mxfp8_with_gw_hp", model, x, dy)
    reasons = {g.role: str(g.reason) for g in inspect(compiled).gemms if not g.quantized}
    assert reasons == {"grad_weight": "recipe: the recipe 'mxfp8_with_gw_hp' keeps grad_weight in high precision"}
    w, bias, block = model.weight.detach(), model.bias.detach(), (1, 32)
    assert_sum(out, held(x, E4M3, block, True) @ held(w, E4M3, block, True).t() + bias.double())
    assert_sum(dx, held(dy, E4M3, block, True) @ held(w.t(), E4M3, block, True).t())
    assert_sum(model.weight.grad, dy.double().t() @ x.double())
    casts = calls(inspect(compiled).graphs[0].after.graph, torch.ops.lowering.cast_with_scales.default)
    assert sum(n.kwargs.get("columnwise", False) for n in casts) == 1, "of the weight alone"
    with pytest.raises(RecipeError, match=r"backward_override='high_precision'\): no grad_weight .* use MXFP8Block"):
        MXFP8HighPrecisionGradWeight(backward_override="high_precision")


def test_own_recipes_have_options_share_graphs_and_stand_in_rules():
    recipe = BlockwiseForward(amax_epsilon=0.5, fast_accum_grad_input=True)
    work = trace(mlp(), torch.randn(16, 64, requires_grad=True), recipe=recipe).run()
    ops = torch.ops.lowering
    gemms = calls(work.graph, ops.scaled_mm.default)
    found = sorted((n.kwargs["granularity_a"], n.kwargs["fast_accum"]) for n in gemms)
    assert found == [("block_1x128", False)] * 2 + [("tensor_wise", False)] * 2 + [("tensor_wise", True)] * 2
    made = [n for n in work.graph.nodes if "epsilon" in n.kwargs]
    assert {n.kwargs["epsilon"] for n in made} == {0.5}
    assert {str(n.target).partition(".")[2].partition(".")[0] for n in made} >= {"scales_from_amax", "cast_with_scales"}
    rules = {"2": BlockwiseForward(), "2:grad_weight": None}
    compiled = fp8_compile(mlp(), "current", rules={"2:grad_weight": None, **rules}, backend="aot_eager", select="all")
    compiled(torch.randn(16, 64)).sum().backward()
    found = {(g.module, g.role): g.recipe for g in inspect(compiled).gemms}
    assert found["2", "output"] == found["2", "grad_input"] == "blockwise forward"
    assert found["2", "grad_weight"] is None
    assert found["0", "output"] == "current"


@dataclasses.dataclass(frozen=True)
class DelayedForward(DelayedScaling):
    """Scales from the state in the forward GEMM alone."""

    def quantization(self, operand, role):
        if role == "output":
            return super().quantization(operand, role)
        return Quantization(E5M2 if operand.kind == "grad_output" else E4M3, Granularity.TENSOR_WISE)


def test_scales_from_the_state_for_some_operands_of_a_subclass_of_delayed_scaling():
    model, x, dy = nn.Linear(64, 48), torch.randn(32, 64), torch.randn(32, 48)
    compiled, *_ = run(DelayedForward(initial_scale="one"), model, x, dy, step="manual")
    assert state(compiled).tensors == ["self:input", "self:weight"]
    assert state(compiled).amax_history("self:input")[0] == x.abs().max()
    state(compiled).step()
    model.zero_grad()
    leaf = (2 * x).requires_grad_()
    out = compiled(leaf)
    out.backward(dy)
    w, scale = model.weight.detach(), torch.tensor(448.0) / x.abs().max()
    late = (2 * x * scale).clamp(-448, 448).to(E4M3).double() / scale.double()
    assert_sum(out, late @ held(w, E4M3).t() + model.bias.double())
    assert_sum(leaf.grad, held(dy, E5M2) @ held(w, E4M3))


# -- decisions that go wrong


@dataclasses.dataclass(frozen=True)
class Fixed(Recipe):
    """One quantization for all but weights."""

    name = "fixed"
    others: Quantization
    weights: Quantization

    def quantization(self, operand, role):
        return self.weights if operand.kind == "weight" else self.others


PER_TENSOR = Quantization(E4M3, Granularity.TENSOR_WISE)


@pytest.mark.parametrize(
    ("others", "weights", "reason"),
    [
        (PER_TENSOR, Quantization(E4M3, Granularity.ROW_WISE), "no FP8 GEMM takes tensor-wise by row-wise scales"),
        (Quantization(E5M2, Granularity.TENSOR_WISE), Quantization(E5M2, Granularity.TENSOR_WISE), "e5m2"),
        (Quantization(E4M3, Granularity.BLOCK_1X32), Quantization(E4M3, Granularity.BLOCK_1X128), "1x32 by 1x128 blocks"),
    ],
)
def test_operands_that_do_not_go_together_stay_in_high_precision(others, weights, reason):
    compiled, *_ = run(Fixed(others, weights), nn.Linear(64, 48), torch.randn(32, 64), torch.randn(32, 48))
    forward = inspect(compiled).gemms[0]
    assert not forward.quantized
    assert forward.reason.startswith("operand formats: ")
    assert reason in forward.reason.lower() or reason in forward.reason


def test_recipes_that_keep_no_state_or_are_not_hashable_and_quantizations_that_nothing_makes():
    late = Quantization(E4M3, Granularity.TENSOR_WISE, scale_from=ScaleFrom.STATE)
    match = r"Fixed.quantization\(\) takes a scale from the state.*derive it from DelayedScaling"
    with pytest.raises(RecipeError, match=match):
        run(Fixed(late, PER_TENSOR), nn.Linear(64, 48), torch.randn(32, 64), torch.randn(32, 48))

    class Listed(Fixed):
        __hash__ = None

    with pytest.raises(RecipeError, match=r"not hashable.*frozen dataclass"):
        fp8_compile(mlp(), Listed(PER_TENSOR, PER_TENSOR))
    for options, text in (
        ({"dtype": torch.float16}, "use one of torch.float8_e4m3fn"),
        ({"square": True}, "requires BLOCK_1X32"),
        ({"scale_from": ScaleFrom.SHARED}, "does not go with"),
        ({"granularity": Granularity.ROW_WISE, "scale_from": ScaleFrom.STATE}, "does not go with"),
    ):
        with pytest.raises(RecipeError, match=text):
            Quantization(**{"dtype": E4M3, "granularity": Granularity.TENSOR_WISE, **options})


def test_a_recipe_is_its_file_and_two_lines_elsewhere():
    lines = [
        line.strip()
        for path in (ROOT / "fp8pass").rglob("*.py")
        if path.stem != "mxfp8_with_gw_hp"
        for line in path.read_text().splitlines()
        if "mxfp8_with_gw_hp" in line and not line.lstrip().startswith(("return", "#"))
    ]
    assert sorted(lines) == [
        '"mxfp8_with_gw_hp",',
        "from fp8pass.recipes.mxfp8_with_gw_hp import MXFP8HighPrecisionGradWeight as MXFP8HighPrecisionGradWeight",
    ]
