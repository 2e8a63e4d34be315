"""Shapes: dynamic sizes, sizes that are not multiples of 16, empty ones, and every form in which a product is written."""

import functools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fp8pass
from fp8pass import MXFP8BlockScaling, inspect, state
from tests.support.cases import combinations, pairwise, rest
from tests.support.models import LlamaBlock, Net, mlp
from tests.support.training import assert_close, assert_trains_as, normal, step
from tests.tolerances import NEGLIGIBLE_GRADIENT, SQNR_LINEAR_E4M3, SQNR_LINEAR_E5M2

#: Small and odd sizes are the subject: no GEMM stays in high precision because it is thin.
fp8_compile = functools.partial(fp8pass.fp8_compile, select="all")

RECIPES = ("delayed", "current", "blockwise", "rowwise", "mxfp8")
BACKENDS = ("aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive))
LINEAR = {"output": SQNR_LINEAR_E4M3, "gradient": SQNR_LINEAR_E5M2}

#: A step with a gradient of normal numbers is close to that of the function or model itself, as close as a whole model is.
check = functools.partial(assert_trains_as, loss=normal, negligible=NEGLIGIBLE_GRADIENT)


@pytest.fixture(autouse=True)
def _no_counts():
    counters.clear()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def by_turns(names):
    """Each name with a recipe, exhaustively with two: what a graph looks like before its rewrite is the same under all."""
    first, second = ([(n, RECIPES[(i + more) % len(RECIPES)]) for i, n in enumerate(names)] for more in (0, 2))
    return [*first, *rest(second)]


# -- dynamic sizes

SIZES = [(2, 16), (3, 16), (3, 7), (4, 33), (5, 13), (2, 16)]
CHANGING_SIZES = [*SIZES, (1, 5), (1, 16), (3, 1), (2, 16)]


#: Each recipe once; with both backends the one with state, and one that has two graphs with Inductor.
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        *((recipe, "aot_eager") for recipe in ("delayed", "current", "blockwise", "rowwise")),
        *((recipe, "inductor") for recipe in ("delayed", "blockwise", "mxfp8")),
    ],
)
def test_dynamic_sizes_compile_once_and_stay_right(recipe, backend):
    block = LlamaBlock(64, 112)
    compiled = fp8_compile(block, recipe, backend=backend, dynamic=True)
    for i, (batch, tokens) in enumerate(SIZES):
        check(compiled, block, torch.randn(batch, tokens, 64), warm_up=0 if i else 2)
    # Up to 128 tokens fit into one block, or one tile of scales. Inductor asks whether they do: a graph for each answer.
    assert num_graphs() == (2 if recipe in ("blockwise", "mxfp8") and backend == "inductor" else 1)
    assert [g.quantized for g in inspect(compiled).gemms] == [True] * 21


@functools.cache
def num_graphs_of_torch_compile() -> int:
    plain = torch.compile(LlamaBlock(64, 112), backend="aot_eager")
    for batch, tokens in CHANGING_SIZES:
        plain(torch.randn(batch, tokens, 64, requires_grad=True)).sum().backward()
    return num_graphs()


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_automatic_dynamic_compiles_no_more_than_torch_compile(recipe):
    block, expected = LlamaBlock(64, 112), num_graphs_of_torch_compile()
    torch._dynamo.reset()
    counters.clear()
    compiled, names = fp8_compile(block, recipe, backend="aot_eager"), None
    for batch, tokens in CHANGING_SIZES:
        check(compiled, block, torch.randn(batch, tokens, 64), warm_up=2)
        names = names or state(compiled).tensors
        assert state(compiled).tensors == names, "every variant of the graph shares one history per tensor"
    assert num_graphs() == expected < len(CHANGING_SIZES)
    assert len(inspect(compiled).gemms) == 21


def test_dynamic_size_behind_a_squeeze():
    def project(x, weight):
        return x.squeeze(0) @ weight

    compiled = fp8_compile(project, "current", backend="aot_eager", dynamic=True)
    for tokens in (7, 19, 32):
        check(compiled, project, torch.randn(1, tokens, 64), torch.randn(64, 48), **LINEAR)
    assert num_graphs() == 1


# -- sizes at the edge


@pairwise(
    "sizes, recipe, backend",
    [(1, 32, 48), (17, 32, 48), (32, 33, 48), (32, 32, 50), (7, 31, 33), (5, 1, 7), (1, 3, 1), (130, 127, 129)],
    RECIPES,
    BACKENDS,
)
def test_sizes_that_are_no_multiple_of_16(sizes, recipe, backend):
    tokens, inputs, outputs = sizes
    linear, x = nn.Linear(inputs, outputs), torch.randn(tokens, inputs)
    compiled = fp8_compile(linear, recipe, backend=backend)
    # The bounds of one linear hold on average; of a handful of numbers the noise can be twice that, which is 6 dB.
    few = 6 if min(sizes) == 1 else 0
    check(compiled, linear, x, warm_up=2, **{name: bound - few for name, bound in LINEAR.items()})
    assert compiled(x).is_contiguous()
    gemms = inspect(compiled).gemms
    assert all(g.quantized for g in gemms)
    shapes = sorted([(tokens, outputs, inputs), (tokens, inputs, outputs), (outputs, inputs, tokens)])
    found = sorted((g.m, g.n, g.k) for g in gemms)
    assert set(found) <= set(shapes) if few else found == shapes, "Inductor multiplies by a single row or column without a GEMM"


@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", MXFP8BlockScaling(enable_2d_quantization=True)], ids=["gw_hp", "2d"])
def test_odd_sizes_between_two_gemms(recipe):
    model = mlp(100, 150, 37)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    for rows in (1, 33, 130):
        check(compiled, model, torch.randn(rows, 100), **LINEAR)
    assert all(g.quantized for g in inspect(compiled).gemms if recipe != "rowwise_with_gw_hp" or g.role != "grad_weight")


@pytest.mark.parametrize(
    ("recipe", "backend"), [*((recipe, "aot_eager") for recipe in RECIPES), ("delayed", "inductor"), ("rowwise", "inductor")]
)
def test_a_batch_that_becomes_empty(recipe, backend):
    linear = nn.Linear(32, 48)
    compiled = fp8_compile(linear, recipe, backend=backend, dynamic=True)
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
    "x @ w.T": (lambda x, w: x @ w.T, (24, 32), (48, 32)),
    "(w @ x).T": (lambda x, w: (w @ x).T, (32, 24), (48, 32)),
    "w.T @ x.T": (lambda x, w: w.T @ x.T, (24, 32), (32, 48)),
    "batched x @ w": (lambda x, w: x @ w, (2, 3, 4, 32), (32, 48)),
    "vector @ w": (lambda x, w: (x.sum(0) @ w).expand(2, -1), (24, 32), (32, 48)),
    "strided": (lambda x, w: x[:, ::2] @ w, (24, 64), (32, 48)),
    "permuted": (lambda x, w: x.permute(2, 0, 1).flatten(0, 1) @ w, (8, 32, 3), (32, 48)),
    "expanded": (lambda x, w: x.expand(24, 32) @ w, (1, 32), (32, 48)),
    "einsum": (lambda x, w: torch.einsum("btd,dhk->bthk", x, w), (2, 12, 32), (32, 3, 16)),
    "einsum of two": (lambda x, w: torch.einsum("bthk,hkd->btd", x, w), (2, 12, 2, 16), (2, 16, 48)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([1], [0])), (12, 32, 2), (32, 48)),
    "chain": (lambda x, w: (x @ w) @ w.T, (24, 32), (32, 48)),
}


@pytest.mark.parametrize(("form", "recipe"), by_turns(FORMS))
def test_forms_of_products(form, recipe):
    function, x_shape, w_shape = FORMS[form]
    weight, is_chain = nn.Parameter(torch.randn(w_shape) / 6), form == "chain"
    product = Net(lambda m, x: function(x, m.weight), weight=weight)
    compiled = fp8_compile(product, recipe, backend="aot_eager")
    check(compiled, product, torch.randn(x_shape), warm_up=2, **({} if is_chain else LINEAR))
    gemms = inspect(compiled).gemms
    assert all(g.quantized for g in gemms)
    assert sorted(g.role for g in gemms) == sorted(["output", "grad_input", "grad_weight"] * (2 if is_chain else 1))


def biases():
    """Every shape and width with a recipe, exhaustively with more."""
    rows = combinations([(48,), (1, 48), (24, 1), (24, 48), (1,), ()], [48, 50], RECIPES)
    first = list({row[:2]: row for row in rows}.values())
    return [*first, *rest(row for row in rows if row not in first)]


@pytest.mark.parametrize(("bias_shape", "width", "recipe"), biases())
def test_addmm_with_a_bias_of_any_shape(bias_shape, width, recipe):
    bias = tuple(width if s == 48 else s for s in bias_shape)
    compiled = fp8_compile(torch.addmm, recipe, backend="aot_eager")
    check(compiled, torch.addmm, *(torch.randn(s) for s in (bias, (24, 32), (32, width))), warm_up=2, **LINEAR)
    assert all(g.quantized for g in inspect(compiled).gemms)


# -- who needs a gradient

FROZEN = {"weight": {"output", "grad_input"}, "input": {"output", "grad_weight"}}


@pytest.mark.parametrize(
    ("recipe", "frozen"),
    [
        *((recipe, list(FROZEN)[i % 2]) for i, recipe in enumerate(RECIPES)),
        *rest((recipe, list(FROZEN)[1 - i % 2]) for i, recipe in enumerate(RECIPES)),
    ],
)
def test_gradients_that_nobody_needs_are_not_computed(recipe, frozen):
    linear = nn.Linear(32, 48)
    linear.weight.requires_grad_(frozen != "weight")
    compiled = fp8_compile(linear, recipe, backend="aot_eager")
    call = (lambda x: compiled(x.detach())) if frozen == "input" else compiled
    plain = (lambda x: linear(x.detach())) if frozen == "input" else linear
    x = torch.randn(24, 32)
    expected = step(plain, linear, x, loss=normal)
    for _ in range(3):
        found = step(call, linear, x, loss=normal)
    assert_close(found, expected, **LINEAR)
    assert {g.role for g in inspect(compiled).gemms} == FROZEN[frozen]
