"""Shapes: dynamic sizes, sizes that are not multiples of 16, empty ones, and every form in which a product is written."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import fp8pass
from fp8pass import DelayedScaling, inspect, state
from tests.support.cases import combinations, pairwise, rest
from tests.support.models import LlamaBlock, mlp
from tests.support.numerics import sqnr
from tests.tolerances import NEGLIGIBLE_GRADIENT, SQNR_LINEAR_E4M3, SQNR_LINEAR_E5M2, SQNR_MODEL_GRADIENT, SQNR_MODEL_OUTPUT

#: Small and odd sizes are the subject: no GEMM stays in high precision because it is thin.
fp8_compile = functools.partial(fp8pass.fp8_compile, select="all")

RECIPES = ("delayed", "current", "blockwise", "rowwise", "mxfp8")
BACKENDS = ("aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.exhaustive]))


@pytest.fixture(autouse=True)
def _no_counts():
    counters.clear()


def run(call, *args, leaves=()):
    """Output and the gradients of `leaves` of one forward and backward, with a gradient of normal numbers."""
    for leaf in leaves:
        leaf.grad = None
    out = call(*args)
    if out.requires_grad:
        generator = torch.Generator().manual_seed(1)
        out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return out.detach(), [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


def check(call, compiled, *args, leaves=(), output=SQNR_LINEAR_E4M3, gradient=SQNR_LINEAR_E5M2, warm_up=0):
    """Hold a compiled function's output and gradients against the function itself."""
    expected, expected_grads = run(call, *args, leaves=leaves)
    for _ in range(warm_up):
        run(compiled, *args, leaves=leaves)
    out, grads = run(compiled, *args, leaves=leaves)
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    assert sqnr(expected, out) >= output
    largest = max((g.norm() for g in expected_grads if g is not None), default=0)
    for reference, grad in zip(expected_grads, grads, strict=True):
        assert (reference is None) == (grad is None)
        if reference is not None and reference.norm() > NEGLIGIBLE_GRADIENT * largest:
            assert sqnr(reference, grad) >= gradient


WHOLE_MODEL = {"output": SQNR_MODEL_OUTPUT, "gradient": SQNR_MODEL_GRADIENT, "warm_up": 2}


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


# Dynamic sizes.

SIZES = [(2, 16), (3, 16), (3, 7), (4, 33), (5, 13), (2, 16)]


#: Each recipe once; with both backends the one with state, and one that has two graphs with Inductor.
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        *((recipe, "aot_eager") for recipe in ("delayed", "current", "blockwise", "rowwise")),
        *(pytest.param(recipe, "inductor", marks=pytest.mark.slow) for recipe in ("delayed", "blockwise", "mxfp8")),
    ],
)
def test_dynamic_sizes_compile_once_and_stay_right(recipe, backend):
    block = LlamaBlock(64, 112)
    compiled = fp8_compile(block, recipe, backend=backend, dynamic=True)
    for i, (batch, tokens) in enumerate(SIZES):
        bounds = WHOLE_MODEL | {"warm_up": 0 if i else 2}
        check(block, compiled, torch.randn(batch, tokens, 64), leaves=list(block.parameters()), **bounds)
    # Up to 128 tokens fit into one block, or one tile of scales. Inductor asks whether they do: a graph for each answer.
    assert num_graphs() == (2 if recipe in ("blockwise", "mxfp8") and backend == "inductor" else 1)
    gemms = inspect(compiled).gemms
    assert len(gemms) == 21
    assert all(g.quantized for g in gemms)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_automatic_dynamic_compiles_no_more_than_torch_compile(recipe):
    block = LlamaBlock(64, 112)
    expected = num_graphs_of_torch_compile()
    torch._dynamo.reset()
    counters.clear()
    compiled = fp8_compile(block, recipe, backend="aot_eager")
    names = None
    for batch, tokens in CHANGING_SIZES:
        check(block, compiled, torch.randn(batch, tokens, 64), leaves=list(block.parameters()), **WHOLE_MODEL)
        names = names or state(compiled).tensors
        assert state(compiled).tensors == names, "every variant of the graph shares one history per tensor"
    assert num_graphs() == expected < len(CHANGING_SIZES)
    assert len(inspect(compiled).gemms) == 21


CHANGING_SIZES = [*SIZES, (1, 5), (1, 16), (3, 1), (2, 16)]


@functools.cache
def num_graphs_of_torch_compile() -> int:
    plain = torch.compile(LlamaBlock(64, 112), backend="aot_eager")
    for batch, tokens in CHANGING_SIZES:
        plain(torch.randn(batch, tokens, 64)).sum().backward()
    return num_graphs()


@pytest.mark.parametrize("dim", [0, 1])
def test_mark_dynamic_compiles_once(dim):
    model = mlp(48, 80, 32)
    compiled = fp8_compile(model, "delayed", backend="aot_eager")
    for size in (8, 9, 16, 31, 64):
        x = torch.randn(*((size, 6) if dim == 0 else (6, size)), 48)
        torch._dynamo.mark_dynamic(x, dim)
        check(model, compiled, x, leaves=list(model.parameters()), **WHOLE_MODEL)
    assert num_graphs() == 1
    assert len(state(compiled).tensors) == 6


def test_dynamic_size_behind_a_squeeze():
    weight = torch.randn(64, 48, requires_grad=True)

    def project(x):
        return x.squeeze(0) @ weight

    compiled = fp8_compile(project, "current", backend="aot_eager", dynamic=True)
    for tokens in (7, 19, 32):
        check(project, compiled, torch.randn(1, tokens, 64), leaves=[weight])
    assert num_graphs() == 1


def test_train_eval_train_keeps_the_scales():
    model = mlp(48, 80, 32)
    compiled = fp8_compile(model, DelayedScaling(amax_history_len=4), backend="aot_eager")
    x = torch.randn(8, 6, 48)
    for _ in range(2):
        compiled(x).square().sum().backward()
    state(compiled).step()
    trained = {name: (state(compiled).scale(name), state(compiled).amax_history(name)) for name in state(compiled).tensors}
    compiled.eval()
    with torch.no_grad():
        for batch in (8, 3, 1):
            assert sqnr(model(x[:batch]), compiled(x[:batch])) >= SQNR_MODEL_OUTPUT
            assert compiled(100 * x[:batch]).isfinite().all(), "it saturates"
    compiled.train()
    for name, (scale, history) in trained.items():
        assert state(compiled).scale(name).equal(scale)
        assert state(compiled).amax_history(name).equal(history)


# Sizes at the edge.


@pairwise(
    "sizes, recipe, backend",
    [(1, 32, 48), (17, 32, 48), (32, 33, 48), (32, 32, 50), (7, 31, 33), (5, 1, 7), (1, 3, 1), (130, 127, 129)],
    RECIPES,
    BACKENDS,
)
def test_sizes_that_are_no_multiple_of_16(sizes, recipe, backend):
    tokens, inputs, outputs = sizes
    linear = nn.Linear(inputs, outputs)
    x = torch.randn(tokens, inputs, requires_grad=True)
    compiled = fp8_compile(linear, recipe, backend=backend)
    # The bounds of one linear hold on average; of a handful of numbers the noise can be twice that, which is 6 dB.
    few = 6 if min(tokens, inputs, outputs) == 1 else 0
    bounds = {"output": SQNR_LINEAR_E4M3 - few, "gradient": SQNR_LINEAR_E5M2 - few}
    check(linear, compiled, x, leaves=[x, *linear.parameters()], warm_up=2, **bounds)
    assert compiled(x).is_contiguous()
    assert all(g.quantized for g in inspect(compiled).gemms)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [True, False])
def test_odd_vocabulary(bias, backend):
    head = nn.Linear(48, 1013, bias=bias)  # 50257 in small: a prime

    def loss(x, target):
        return F.cross_entropy(head(x).flatten(0, 1), target.flatten())

    x, target = torch.randn(2, 9, 48, requires_grad=True), torch.randint(1013, (2, 9))
    compiled = fp8_compile(loss, "delayed", backend=backend)
    check(loss, compiled, x, target, leaves=[x, *head.parameters()], warm_up=2)
    assert {(g.m, g.n, g.k) for g in inspect(compiled).gemms} == {(18, 1013, 48), (1013, 48, 18), (18, 48, 1013)}
    assert all(g.quantized for g in inspect(compiled).gemms)


@pytest.mark.parametrize(
    ("recipe", "backend"), [*((recipe, "aot_eager") for recipe in RECIPES), ("delayed", "inductor"), ("rowwise", "inductor")]
)
def test_a_batch_that_becomes_empty(recipe, backend):
    linear = nn.Linear(32, 48)
    compiled = fp8_compile(linear, recipe, backend=backend, dynamic=True)
    check(linear, compiled, torch.randn(8, 32), leaves=list(linear.parameters()), warm_up=2)
    out, grads = run(compiled, torch.randn(0, 32), leaves=list(linear.parameters()))
    assert out.shape == (0, 48)
    assert not any(g.any() for g in grads)
    check(linear, compiled, torch.randn(5, 32), leaves=list(linear.parameters()))
    assert all(state(compiled).scale(name).isfinite() for name in state(compiled).tensors)


# Forms of products.

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


def by_turns(names):
    """Each name with a recipe, exhaustively with two: what a graph looks like before its rewrite is the same under all."""
    first, second = ([(n, RECIPES[(i + more) % len(RECIPES)]) for i, n in enumerate(names)] for more in (0, 2))
    return [*first, *rest(second)]


@pytest.mark.parametrize(("form", "recipe"), by_turns(FORMS))
def test_forms_of_products(form, recipe):
    product, x_shape, w_shape = FORMS[form]
    x, w = torch.randn(x_shape, requires_grad=True), nn.Parameter(torch.randn(w_shape) / 6)
    compiled = fp8_compile(product, recipe, backend="aot_eager")
    bounds = WHOLE_MODEL if form == "chain" else {"warm_up": 2}
    check(product, compiled, x, w, leaves=[x, w], **bounds)
    gemms = inspect(compiled).gemms
    assert all(g.quantized for g in gemms)
    assert sorted(g.role for g in gemms) == sorted(["output", "grad_input", "grad_weight"] * (len(gemms) // 3))
    assert len(gemms) == (6 if form == "chain" else 3)


def biases():
    """Every shape and width with a recipe, exhaustively with more."""
    rows = combinations([(48,), (1, 48), (24, 1), (24, 48), (1,), ()], [48, 50], RECIPES)
    first = list({row[:2]: row for row in rows}.values())
    return [*first, *rest(row for row in rows if row not in first)]


@pytest.mark.parametrize(("bias_shape", "width", "recipe"), biases())
def test_addmm_with_a_bias_of_any_shape(bias_shape, width, recipe):
    shape = tuple(width if s == 48 else s for s in bias_shape)
    x, w, bias = (torch.randn(s, requires_grad=True) for s in ((24, 32), (32, width), shape))
    compiled = fp8_compile(torch.addmm, recipe, backend="aot_eager")
    check(torch.addmm, compiled, bias, x, w, leaves=[bias, x, w], warm_up=2)
    assert all(g.quantized for g in inspect(compiled).gemms)


@pytest.mark.parametrize("factors", [{"alpha": 0.5}, {"beta": 2.0}, {"alpha": 0.5, "beta": 0.0}])
def test_addmm_with_factors_stays_and_its_gradients_do_not(factors):
    def scaled(bias, x, w):
        return torch.addmm(bias, x, w, **factors)

    bias, x, w = (torch.randn(s, requires_grad=True) for s in ((48,), (24, 32), (32, 48)))
    compiled = fp8_compile(scaled, "current", backend="aot_eager")
    check(scaled, compiled, bias, x, w, leaves=[bias, x, w])
    reasons = {g.role: g.reason for g in inspect(compiled).gemms}
    assert reasons["output"].startswith("unsupported op: addmm with")
    assert reasons["grad_input"] is reasons["grad_weight"] is None


# Who needs a gradient.


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
    x = torch.randn(24, 32, requires_grad=frozen != "input")
    compiled = fp8_compile(linear, recipe, backend="aot_eager")
    check(linear, compiled, x, leaves=[x, *linear.parameters()], warm_up=2)
    assert {g.role for g in inspect(compiled).gemms} == FROZEN[frozen]


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", *rest(["current", "blockwise", "rowwise"])])
def test_tied_weight_has_one_gradient_of_both_uses(recipe):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(80, 48)
            self.inner = nn.Linear(48, 48)
            self.head = nn.Linear(48, 80, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(torch.tanh(self.inner(self.embedding(tokens))))

    model = Tied()
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    check(model, compiled, torch.randint(80, (2, 12)), leaves=list(model.parameters()), **WHOLE_MODEL)
    assert len(inspect(compiled).gemms) == 6
