"""Shapes: dynamic sizes, sizes that are not multiples of 16, empty ones, and every form in which a product is written."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fp8pass
from fp8pass import MXFP8BlockScaling, inspect, state
from tests.support.models import LlamaBlock, Net
from tests.support.training import assert_trains_as, normal, step
from tests.tolerances import NEGLIGIBLE_GRADIENT, SQNR_LINEAR_E4M3, SQNR_LINEAR_E5M2

#: Small and odd sizes are the subject: no GEMM stays in high precision because it is thin.
fp8_compile = functools.partial(fp8pass.fp8_compile, select="all", backend="aot_eager")

RECIPES = ("delayed", "current", "blockwise", "rowwise", "mxfp8")
LINEAR = {"output": SQNR_LINEAR_E4M3, "gradient": SQNR_LINEAR_E5M2}

#: A step with a gradient of normal numbers is close to that of the function or model itself, as close as a whole model is.
check = functools.partial(assert_trains_as, loss=normal, negligible=NEGLIGIBLE_GRADIENT)


@pytest.fixture(autouse=True)
def _no_counts():
    counters.clear()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def by_turns(values, recipes=RECIPES):
    """Each value with a recipe: what a graph looks like before its rewrite is the same under all."""
    return list(zip(values, itertools.cycle(recipes)))


# -- dynamic sizes

SIZES = [(2, 16), (3, 16), (3, 7), (4, 33), (5, 13), (2, 16)]


@pytest.mark.parametrize(
    ("recipe", "backend"), [("current", "aot_eager"), ("rowwise", "aot_eager"), ("delayed", "inductor"), ("mxfp8", "inductor")]
)
def test_dynamic_sizes_compile_once_and_stay_right(recipe, backend):
    block = LlamaBlock(64, 112)
    compiled = fp8_compile(block, recipe, backend=backend, dynamic=True)
    for i, (batch, tokens) in enumerate(SIZES):
        check(compiled, block, torch.randn(batch, tokens, 64), warm_up=0 if i else 2)
    # Up to 128 tokens fit into one tile of scales. Inductor asks whether they do: a graph for each answer.
    assert num_graphs() == (2 if recipe == "mxfp8" else 1)
    assert [g.quantized for g in inspect(compiled).gemms] == [True] * 21


# -- sizes at the edge


@pytest.mark.parametrize(
    ("sizes", "recipe"),
    by_turns(
        [(1, 32, 48), (17, 32, 48), (32, 33, 48), (32, 32, 50), (7, 31, 33), (5, 1, 7), (1, 3, 1), (130, 127, 129)],
        [*RECIPES, "rowwise_with_gw_hp", MXFP8BlockScaling(enable_2d_quantization=True)],
    ),
)
def test_sizes_that_are_no_multiple_of_16(sizes, recipe):
    tokens, inputs, outputs = sizes
    linear, x = nn.Linear(inputs, outputs), torch.randn(tokens, inputs)
    compiled = fp8_compile(linear, recipe)
    # The bounds of one linear hold on average; of a handful of numbers the noise can be twice that, which is 6 dB.
    few = 6 if min(sizes) == 1 else 0
    check(compiled, linear, x, warm_up=2, **{name: bound - few for name, bound in LINEAR.items()})
    assert compiled(x).is_contiguous()
    gemms = inspect(compiled).gemms
    assert all(g.quantized for g in gemms if recipe != "rowwise_with_gw_hp" or g.role != "grad_weight")
    shapes = sorted([(tokens, outputs, inputs), (tokens, inputs, outputs), (outputs, inputs, tokens)])
    assert sorted((g.m, g.n, g.k) for g in gemms) == shapes


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_batch_that_becomes_empty(recipe):
    linear = nn.Linear(32, 48)
    compiled = fp8_compile(linear, recipe, dynamic=True)
    check(compiled, linear, torch.randn(8, 32), warm_up=2, **LINEAR)
    empty = step(compiled, linear, torch.randn(0, 32), loss=normal)
    assert empty.out.shape == (0, 48)
    assert len(empty.gradients) == 3
    assert not any(g.any() for g in empty.gradients)
    check(compiled, linear, torch.randn(5, 32), **LINEAR)
    assert all(state(compiled).scale(name).isfinite() for name in state(compiled).tensors)


# -- forms of products

FORMS = {
    "x @ w": (lambda x, w: x @ w, (24, 32), (32, 48)),
    "w @ x": (lambda x, w: w @ x, (32, 24), (48, 32)),
    "x.T @ w": (lambda x, w: x.T @ w, (32, 24), (32, 48)),
    "w.T @ x.T": (lambda x, w: w.T @ x.T, (24, 32), (32, 48)),
    "batched x @ w": (lambda x, w: x @ w, (2, 3, 4, 32), (32, 48)),
    "vector @ w": (lambda x, w: (x.sum(0) @ w).expand(2, -1), (24, 32), (32, 48)),
    "strided": (lambda x, w: x[:, ::2] @ w, (24, 64), (32, 48)),
    "permuted": (lambda x, w: x.permute(2, 0, 1).flatten(0, 1) @ w, (8, 32, 3), (32, 48)),
    "expanded": (lambda x, w: x.expand(24, 32) @ w, (1, 32), (32, 48)),
    "einsum": (lambda x, w: torch.einsum("bthk,hkd->btd", x, w), (2, 12, 2, 16), (2, 16, 48)),
    "chain": (lambda x, w: (x @ w) @ w.T, (24, 32), (32, 48)),
}


@pytest.mark.parametrize(("form", "recipe"), by_turns(FORMS))
def test_forms_of_products(form, recipe):
    function, x_shape, w_shape = FORMS[form]
    weight, is_chain = nn.Parameter(torch.randn(w_shape) / 6), form == "chain"
    product = Net(lambda m, x: function(x, m.weight), weight=weight)
    compiled = fp8_compile(product, recipe)
    check(compiled, product, torch.randn(x_shape), warm_up=2, **({} if is_chain else LINEAR))
    gemms = inspect(compiled).gemms
    assert all(g.quantized for g in gemms)
    assert sorted(g.role for g in gemms) == sorted(["output", "grad_input", "grad_weight"] * (2 if is_chain else 1))


@pytest.mark.parametrize(("shape", "recipe"), by_turns([(50,), (1, 50), (24, 1), (24, 50), (1,), ()]))
def test_addmm_with_a_bias_of_any_shape(shape, recipe):
    compiled = fp8_compile(torch.addmm, recipe)
    check(compiled, torch.addmm, *(torch.randn(s) for s in (shape, (24, 32), (32, 50))), warm_up=2, **LINEAR)
    assert all(g.quantized for g in inspect(compiled).gemms)
