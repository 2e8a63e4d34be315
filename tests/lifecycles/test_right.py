"""Situations that were right when they were looked for, one test each where no other file has one: they stay so.

Each is compared with the reference of this folder bit for bit, or with high precision where its GEMMs are to stay there.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp, stack_module_state, vjp, vmap
from torch.nn.utils import prune

from fp8pass import fp8_compile, inspect, state
from tests.lifecycles.harness import RECIPES, decibels
from tests.lifecycles.parts import HIDDEN, WIDTH, batch, loss_of, mlp, sgd
from tests.lifecycles.reference import RECIPES as REFERENCES
from tests.lifecycles.reference import compile_reference
from tests.tolerances import SQNR_MODEL_OUTPUT

RECIPE = "short"


def both(make, recipe=RECIPE, **options):
    """(compiled by the product, model) and (by the reference, model), of two models that are alike."""
    torch._dynamo.reset()
    models = make(), make()
    ours = fp8_compile(models[0], RECIPES[recipe], backend="aot_eager", select="all", **options)
    theirs = compile_reference(models[1], REFERENCES[recipe], step=options.get("step", "auto"), schedule=None, in_place=False)
    return (ours, models[0]), (theirs, models[1])


def assert_trains_alike(make, recipe=RECIPE, steps=4, width=WIDTH, loss=loss_of):
    runs = []
    for compiled, model in both(make, recipe):
        optimizer, found = sgd(model), []
        for step in range(steps):
            x = batch(step, width=width)
            optimizer.zero_grad()
            loss(compiled(x), x).backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
        runs.append(found)
    assert len(runs[0]) == len(runs[1])
    assert all(a.equal(b) for a, b in zip(*runs, strict=True)), [decibels(a, b) for a, b in zip(*runs, strict=True)]


# -- functional transforms, parametrizations


class Inner(nn.Module):
    """A gradient inside of the model's forward, of something that is no GEMM."""

    def __init__(self, transform):
        super().__init__()
        self.net, self.transform = mlp(), transform

    def forward(self, x):
        return self.net(self.transform(x))


def _by_grad(x):
    return grad(lambda t: t.square().sum() / 2)(x)


def _by_vjp(x):
    out, pull = vjp(torch.sin, x)
    return pull(torch.ones_like(out))[0]


def _by_jvp(x):
    return jvp(torch.sin, (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize("transform", [_by_grad, _by_vjp, _by_jvp])
def test_transforms_inside_the_model(transform):
    assert_trains_alike(lambda: Inner(transform), steps=2)


def test_an_ensemble_by_stacked_states():
    models = [mlp(seed) for seed in range(2)]
    weights, buffers = stack_module_state(models)
    base = mlp().to("meta")

    def ensemble(weights, x):
        return vmap(lambda w: functional_call(base, (w, buffers), (x,)))(weights)

    compiled = fp8_compile(ensemble, "current", backend="aot_eager", select="all")
    x = batch(0)
    out = compiled(weights, x)
    for i, model in enumerate(models):
        assert decibels(out[i].detach(), model(x).detach()) > SQNR_MODEL_OUTPUT


@pytest.mark.parametrize("norm", ["spectral_norm", "orthogonal"])
def test_parametrized_weights(norm):
    def make():
        model = mlp(3)
        getattr(nn.utils.parametrizations, norm)(model[0])
        return model

    (ours, model), _ = both(make, "current")
    x = batch(0)
    out = ours(x)
    out.sum().backward()
    model.eval()
    with torch.no_grad():
        assert decibels(ours(x), model(x)) > SQNR_MODEL_OUTPUT


def test_pruned_by_torch():
    def make():
        model = mlp(2)
        prune.l1_unstructured(model[0], "weight", amount=0.5)
        return model

    assert_trains_alike(make, "current")


class Hyper(nn.Module):
    """One network makes the weights of another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.code = nn.Parameter(torch.randn(WIDTH, 32))
        self.maker = nn.Linear(32, WIDTH)

    def forward(self, x):
        return F.linear(x, self.maker(self.code))


@pytest.mark.parametrize("recipe", ["short", "rowwise"])
def test_a_hypernetwork(recipe):
    assert_trains_alike(Hyper, recipe)


# -- inputs and outputs


def test_mutated_and_aliased_inputs():
    def call(net, x, y):
        x.add_(1)
        return net(x) + y.flip(0), x.view(-1)

    model = mlp()
    compiled = fp8_compile(lambda x, y: call(model, x, y), "current", backend="aot_eager", select="all")
    reference = compile_reference(
        lambda x, y: call(model, x, y), REFERENCES["current"], step="auto", schedule=None, in_place=False
    )
    found = []
    for function in (compiled, reference):
        x = batch(0)
        out, view = function(x, x)
        assert x.equal(batch(0) + 1)
        assert view.data_ptr() == x.data_ptr()
        found.append(out.detach())
    assert found[0].equal(found[1])


@pytest.mark.parametrize("change", [lambda x: x.flip(-1), lambda x: x[:1].expand(32, -1), lambda x: x.t().contiguous().t()])
def test_strides_of_inputs(change):
    (ours, _), (theirs, _) = both(mlp, "current")
    assert ours(change(batch(0))).equal(theirs(change(batch(0))))


def test_rows_that_are_known_only_at_run_time():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, keep):
            return self.net(x[keep.nonzero().squeeze(-1)])

    (ours, _), (theirs, _) = both(Chosen, "current")
    for count in (33, 64, 1):
        keep = torch.arange(64) < count
        assert decibels(ours(batch(0, rows=64), keep).detach(), theirs(batch(0, rows=64), keep).detach()) > 100
    assert ours(batch(0, rows=64), torch.zeros(64, dtype=torch.bool)).shape == (0, WIDTH)


@pytest.mark.parametrize(
    "multiply",
    [
        lambda b, x, w: torch.addmm(b, x, w.t(), alpha=2.0, beta=0.5),
        lambda b, x, w: torch.tensordot(x, w, dims=([1], [1])) + b,
        lambda b, x, w: torch.einsum("tk,nk->tn", x, w) + b,
        lambda b, x, w: torch.mv(w, x[0]) + b,
        lambda b, x, w: torch.baddbmm(b.expand(1, 32, -1), x[None], w.t()[None]),
    ],
)
def test_other_spellings_of_a_product(multiply):
    b, x, w = torch.randn(96), batch(0), torch.randn(96, WIDTH) * 0.1
    compiled = fp8_compile(multiply, "current", backend="aot_eager", select="all")
    assert decibels(compiled(b, x, w), multiply(b, x, w)) > SQNR_MODEL_OUTPUT


# -- control flow


def test_conditions_stay_in_high_precision_and_are_right():
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda t: self.left(t), lambda t: self.right(t), (x,))

    torch.manual_seed(0)
    model = Chooses()
    compiled = fp8_compile(model, "current", backend="aot_eager", select="all")
    with torch.no_grad():
        for x in (batch(0).abs(), -batch(0).abs()):
            assert decibels(compiled(x), model(x)) > SQNR_MODEL_OUTPUT


class Cell(nn.Module):
    """A recurrent cell, three times."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = torch.zeros_like(x)
        for _ in range(3):
            h = torch.tanh(self.into(x) + self.again(h))
        return h


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_a_recurrent_cell(recipe):
    assert_trains_alike(Cell, recipe)


def test_a_fourier_layer():
    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(torch.fft.irfft(torch.fft.rfft(x) * 0.5, n=WIDTH))

    assert_trains_alike(Fourier, "current", steps=2)


# -- training


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("mode", ["anomaly", "deterministic"])
def test_modes_of_autograd(mode):
    torch.use_deterministic_algorithms(mode == "deterministic")
    try:
        with torch.autograd.detect_anomaly(check_nan=True) if mode == "anomaly" else contextlib.nullcontext():
            assert_trains_alike(mlp, steps=2)
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_interrupt_in_the_backward_leaves_a_model_that_trains():
    (ours, model), (theirs, other) = both(mlp)

    def interrupt(_):
        raise KeyboardInterrupt

    for compiled, own in ((ours, model), (theirs, other)):
        out = compiled(batch(0))
        out.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            out.sum().backward()
        own.zero_grad()
        for step in range(2):
            loss_of(compiled(batch(step)), batch(step)).backward()
    assert all(p.grad.equal(q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_an_island_without_autocast():
    class Island(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            h = self.first(x)
            with torch.autocast("cpu", enabled=False):
                return self.last(h.float())

    torch.manual_seed(0)
    model = Island()
    compiled = fp8_compile(model, "current", backend="aot_eager", select="all")
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(batch(0))
        assert out.dtype == torch.float32
        assert decibels(out.detach(), model(batch(0)).detach()) > SQNR_MODEL_OUTPUT


def test_forced_weight_balance_as_in_edm2():
    """Weights are normalized in each forward, and written back under no_grad."""

    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(HIDDEN, WIDTH))

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    self.weight.copy_(F.normalize(self.weight, dim=1))
            return F.linear(x, F.normalize(self.weight, dim=1))

    assert_trains_alike(Normalized, "current", loss=lambda out, x: out.square().mean())


def test_jagged_inputs():
    model = nn.Linear(WIDTH, WIDTH)
    nested = torch.nested.nested_tensor([batch(0, rows=3), batch(1, rows=7)], layout=torch.jagged)
    compiled = fp8_compile(model, "current", backend="aot_eager", select="all")
    out = compiled(nested)
    for found, x in zip(out.unbind(), nested.unbind(), strict=True):
        assert decibels(found.detach(), model(x).detach()) > SQNR_MODEL_OUTPUT


def test_a_vocabulary_that_grows():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.tokens, self.body, self.head = nn.Embedding(96, WIDTH), mlp(), nn.Linear(WIDTH, 96, bias=False)

        def forward(self, tokens):
            return self.head(self.body(self.tokens(tokens)))

    model = Language()
    compiled = fp8_compile(model, RECIPES["short"], backend="aot_eager", rules={"head": RECIPES["short"]})
    for vocabulary in (96, 128):
        if vocabulary > 96:
            for module in (model.tokens, model.head):
                wider = torch.randn(vocabulary, WIDTH) * 0.02
                wider[:96] = module.weight.detach()
                module.weight = nn.Parameter(wider)
            model.tokens.num_embeddings = model.head.out_features = vocabulary
        for step in range(3):
            tokens = torch.randint(0, vocabulary, (4, 16), generator=torch.Generator().manual_seed(step))
            logits = compiled(tokens)
            assert logits.shape[-1] == vocabulary
            assert decibels(logits.detach(), model(tokens).detach()) > SQNR_MODEL_OUTPUT
            logits.square().mean().backward()
    assert "head:weight" in state(compiled).tensors


def test_generation_between_steps_reads_the_new_weights():
    transformers = pytest.importorskip("transformers")
    from tests.integrations.support import llama

    assert transformers
    model = llama()
    fp8_compile(model, "current", backend="aot_eager", in_place=True)
    optimizer, tokens = sgd(model, lr=0.5), torch.arange(16)[None]
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        with torch.no_grad():
            greedy = model.generate(tokens[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
            again = model(input_ids=greedy).logits[:, 3:-1].argmax(-1)
        assert greedy.shape == (1, 8)
        assert (again == greedy[:, 4:]).float().mean() >= 0.75  # a cache holds what other batches were quantized with


def test_all_of_it_is_said_to_run_in_fp8():
    (ours, _), _ = both(mlp, "current")
    ours(batch(0)).sum().backward()
    assert all(g.quantized for g in inspect(ours).gemms)
