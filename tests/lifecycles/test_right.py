"""Situations that were right when they were looked for, and are no training loop: they stay so.

Each is compared with the reference of this folder bit for bit, or with high precision where its GEMMs are to stay there.
"""

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.func import functional_call, stack_module_state, vmap

from fp8pass import fp8_compile, inspect, state
from tests.lifecycles.harness import RECIPES, Oracle, Product, decibels
from tests.lifecycles.parts import HIDDEN, WIDTH, batch, loss_of, mlp, sgd
from tests.support.models import Net
from tests.support.training import fp8, same
from tests.tolerances import SQNR_MODEL_OUTPUT


def assert_close(found, expected):
    """As close to high precision as one model in FP8."""
    for x, wanted in zip(*((out,) if isinstance(out, torch.Tensor) else out for out in (found, expected)), strict=True):
        assert x.dtype == wanted.dtype
        assert decibels(x.detach(), wanted.detach()) > SQNR_MODEL_OUTPUT


# -- products and models in other words


def linears(forward):
    """Two linears, and a forward of them."""
    torch.manual_seed(0)
    return Net(forward, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH))


def looped(m, x):
    """`a` as often as the loop says, then `b`, which is not in it."""
    weight, bias = m.a.weight, m.a.bias
    body = lambda i, t: (i - 1, torch.tanh(t @ weight.T + bias))  # noqa: E731
    return m.b(while_loop(lambda i, t: i > 0, body, (torch.tensor(3), x))[1])


def scanned(m, x):
    def combine(carry, row):
        new = torch.tanh(m.a(carry) + row)
        return new, new.clone()

    return m.b(scan(combine, torch.zeros(8, WIDTH), x.reshape(-1, 8, WIDTH))[1].reshape(-1, WIDTH))


@pytest.mark.parametrize("forward", [looped, scanned])
def test_bodies_of_loops_stay_in_high_precision_and_say_so(forward):
    model = linears(forward)
    compiled = fp8(model)
    with torch.no_grad():
        for x in (batch(0).abs(), -batch(0).abs()):
            assert_close(compiled(x), model(x))
    gemms = inspect(compiled).gemms
    assert {g.module for g in gemms if g.quantized} == {"b"}
    assert {g.reason.partition(":")[0] for g in gemms if not g.quantized} == {"unsupported op"}


def island(m, x):
    """Without autocast."""
    h = m.a(x)
    with torch.autocast("cpu", enabled=False):
        return m.b(h.float())


def test_an_island_without_autocast():
    model = linears(island)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(fp8(model)(batch(0)), model(batch(0)))


@pytest.mark.parametrize("norm", ["spectral_norm", "orthogonal"])
def test_parametrized_weights(norm):
    model = mlp(3)
    getattr(nn.utils.parametrizations, norm)(model[0])
    compiled = fp8(model)
    compiled(batch(0)).sum().backward()
    model.eval()
    with torch.no_grad():
        assert_close(compiled(batch(0)), model(batch(0)))


def test_an_ensemble_by_stacked_states():
    models = [mlp(seed) for seed in range(2)]
    weights, buffers = stack_module_state(models)
    base = mlp().to("meta")
    compiled = fp8(lambda weights, x: vmap(lambda w: functional_call(base, (w, buffers), (x,)))(weights))
    assert_close(compiled(weights, batch(0)).unbind(), [model(batch(0)) for model in models])


def test_jagged_inputs():
    model = nn.Linear(WIDTH, WIDTH)
    nested = torch.nested.nested_tensor([batch(0, rows=3), batch(1, rows=7)], layout=torch.jagged)
    assert_close(fp8(model)(nested).unbind(), [model(x) for x in nested.unbind()])


def chosen():
    """Rows that are known only at run time."""
    return Net(lambda self, x, keep: self.net(x[keep.nonzero().squeeze(-1)]), net=mlp())


def test_rows_that_are_known_only_at_run_time():
    ours, theirs = (kind("current").compile(chosen()) for kind in (Product, Oracle))
    for count in (33, 64, 1):
        keep = torch.arange(64) < count
        assert decibels(ours(batch(0, rows=64), keep).detach(), theirs(batch(0, rows=64), keep).detach()) > 100
    assert ours(batch(0, rows=64), torch.zeros(64, dtype=torch.bool)).shape == (0, WIDTH)


# -- what is compiled or set around the model


def whole_step(compiled):
    def call(x):
        loss = loss_of(compiled(x), x)
        loss.backward()
        return loss

    return call


def compiled_autograd(compiled):
    def call(x):
        loss = loss_of(compiled(x), x)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        return loss

    return call


def whole_step_compiled(compiled):
    """The compiled model is a graph break in it."""
    return torch.compile(whole_step(compiled), backend="aot_eager")


def trained(step_of, recipe, steps=4):
    torch._dynamo.reset()
    model = mlp()
    compiled = fp8(model, RECIPES[recipe])
    call, optimizer, losses = step_of(compiled), sgd(model), []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(call(batch(step)).detach())
        optimizer.step()
    return losses, model.state_dict(), state(compiled).state_dict()


@pytest.mark.parametrize("recipe", ["short", "current"])
def test_steps_that_are_compiled_train_as_without(recipe):
    expected = trained(whole_step, recipe)
    assert same(trained(compiled_autograd, recipe), expected)
    assert same(trained(whole_step_compiled, recipe), expected)


def test_a_whole_step_compiles_while_another_model_has_released_parameters():
    """Both models have Dynamo call back before it traces; it must not trace that itself, within the backward."""
    released = fp8(mlp().requires_grad_(False), release_frozen=True)
    released(batch(0))
    assert any(r.reason is None for r in inspect(released).released.values())
    assert all(loss.isfinite() for loss in trained(whole_step_compiled, "current")[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [{"mode": "reduce-overhead"}, {"options": {"max_autotune": True}}, {"freezing": True}], ids=str
)
def test_modes_of_inductor(options):
    model = mlp()
    expected = fp8_compile(copy.deepcopy(model), "current", select="all")
    freezing = options == {"freezing": True}
    with torch.no_grad():
        want = expected(batch(0))
        torch._dynamo.reset()
        with torch._inductor.config.patch(freezing=freezing):
            compiled = fp8_compile(model, "current", select="all", **({} if freezing else options))
            for _ in range(2):
                assert decibels(compiled(batch(0)), want) > 60
            for own in (model, expected._orig_mod):
                own[0].weight.mul_(0.5)
            if not freezing:  # which folds weights into the graph, as its users know
                assert decibels(compiled(batch(0)), expected(batch(0))) > 60


# -- weights of others


class Int8(torch.Tensor):
    """A weight in int8 with one scale, as torchao's are: it dequantizes itself in a linear."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32, requires_grad=False)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _, size, stride):
        return cls(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        from torch.utils._python_dispatch import return_and_correct_aliasing

        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default, torch.ops.aten.alias.default):
            new = cls(func(args[0].values), args[0].scale)
            return return_and_correct_aliasing(func, args, kwargs or {}, new)
        plain = [a.values.float() * a.scale if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch.compile of 2.11 does not trace it either")
def test_weights_of_tensor_subclasses_are_left_to_their_project():
    model = mlp()
    weight = model[0].weight.detach()
    scale = weight.abs().max() / 127
    model[0].weight = nn.Parameter(Int8((weight / scale).round().to(torch.int8), scale), requires_grad=False)
    plain, out = model(batch(0)), fp8(model)(batch(0))
    assert_close(out, plain)
    loss_of(out, batch(0)).backward()
    assert model[2].weight.grad.shape == (WIDTH, HIDDEN)
