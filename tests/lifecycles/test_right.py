"""Situations that were right when they were looked for, and are no training loop: they stay so.

Each is compared with the reference of this folder bit for bit, or with high precision where its GEMMs are to stay there.
"""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from fp8pass import inspect, state
from tests.lifecycles.harness import RECIPES, decibels
from tests.lifecycles.parts import WIDTH, batch, loss_of, mlp, sgd
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


def test_jagged_inputs():
    model = nn.Linear(WIDTH, WIDTH)
    nested = torch.nested.nested_tensor([batch(0, rows=3), batch(1, rows=7)], layout=torch.jagged)
    assert_close(fp8(model)(nested).unbind(), [model(x) for x in nested.unbind()])


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
