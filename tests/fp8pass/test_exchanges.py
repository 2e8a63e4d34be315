"""Weights that are exchanged under delayed scaling: said where they saturate, and nothing else is."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import Fp8Warning, StrictError
from fp8pass.scales import exchanges
from fp8pass.scales.exchanges import CHECKED_CALLS
from tests.support.cases import each
from tests.support.models import Net, mlp
from tests.support.training import fp8, fp8_mlp

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def train(compiled, model, steps=1, lr=1e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        compiled(X).square().mean().backward()
        optimizer.step()


@torch.no_grad()
def evaluate(compiled, model, calls=1):
    for _ in range(calls):
        compiled(X)


def load(model, factor):
    model.load_state_dict({name: value * factor for name, value in model.state_dict().items()})


def write(model, factor):
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * factor)


def replace(model, factor):
    for parameter in model.parameters():
        parameter.data = parameter.data * factor


def said(act):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act()
    assert all(w.category is Fp8Warning for w in found)
    return [name for w in found for name in re.search(r"value of ([^ ]+(?:, [^ ]+)*) has", str(w.message))[1].split(", ")]


@each("length", [1, 3])
@each("exchange", [load, write, replace])
@each("then", [train, evaluate])
def test_larger_weights_are_said(length, exchange, then):
    """In training at the next boundary, in an evaluation at once."""
    model, compiled = fp8_mlp(DelayedScaling(amax_history_len=length))
    assert said(lambda: (train(compiled, model, 4), evaluate(compiled, model))) == []
    exchange(model, 8)
    assert said(lambda: then(compiled, model)) == ([] if then is train else ["0:weight", "2:weight"])
    if then is train:
        assert said(lambda: train(compiled, model)) == ["0:weight", "2:weight"]
    exchange(model, 1 / 8)
    exchange(model, 8)
    assert said(lambda: train(compiled, model, 3)) == [], "said once"


def test_what_is_between_two_looks_is_not_missed():
    model, compiled = fp8_mlp(DelayedScaling(amax_history_len=64))
    train(compiled, model, CHECKED_CALLS + 4)
    write(model, 3)
    assert said(lambda: train(compiled, model, 5)) == []
    assert said(lambda: train(compiled, model, CHECKED_CALLS)) == ["0:weight", "2:weight"]


def test_an_average_that_is_evaluated_by_and_by():
    """It comes in after the calls that look, and goes out before training."""
    model, compiled = fp8_mlp(DelayedScaling())
    train(compiled, model, 4)
    evaluate(compiled, model, 5)
    write(model, 3)
    assert said(lambda: evaluate(compiled, model, CHECKED_CALLS)) == ["0:weight", "2:weight"]


@each("remedy", ["forget", "load"])
def test_with_the_state_that_belongs_to_them_nothing_is_said(remedy):
    model, compiled = fp8_mlp(DelayedScaling(amax_history_len=4), strict=True)
    train(compiled, model, 4)
    write(model, 8)
    other, trained = fp8_mlp(DelayedScaling(amax_history_len=4))
    other.load_state_dict(model.state_dict())
    train(trained, other, 3)
    if remedy == "forget":
        state(compiled).forget_weights()
    else:
        state(compiled).load_state_dict(state(trained).state_dict())
    evaluate(compiled, model)
    train(compiled, model, 4)


def test_strict_is_an_error_and_the_step_goes_on():
    model, compiled = fp8_mlp(DelayedScaling(amax_history_len=4), strict=True)
    train(compiled, model, 4)
    write(model, 8)
    train(compiled, model)
    with pytest.raises(StrictError, match="0:weight, 2:weight"):
        train(compiled, model)
    state(compiled).forget_weights()
    train(compiled, model, 3)
    assert state(compiled).scale("0:weight") == pytest.approx(448 / model[0].weight.abs().max().item(), rel=0.05)


def batched_experts(shape):
    experts = nn.Parameter(torch.randn(shape) / 8)
    return Net(lambda self, x: torch.bmm(x.expand(4, -1, -1), self.experts.view(4, 64, 64)), experts=experts)


@pytest.mark.parametrize("shape", [(4, 64, 64), (256, 64)], ids=["batch", "matrix"])
def test_one_expert_of_many(shape):
    model = batched_experts(shape)
    compiled = fp8_compile(model, DelayedScaling(amax_history_len=4), backend="aot_eager", select="all")
    train(compiled, model, 4)
    with torch.no_grad():
        model.experts.view(4, 64, 64)[2] *= 5
    (name,) = (n for n in state(compiled).tensors if n.endswith("weight"))
    assert said(lambda: evaluate(compiled, model)) == [name]


def test_released_weights_have_no_values_to_read():
    model = mlp(64, 96, 64)
    model[0].requires_grad_(False)
    compiled = fp8(model, DelayedScaling(amax_history_len=4), release_frozen=True)
    for _ in range(4):
        compiled(X).square().mean().backward()
    assert inspect(compiled).released["0.weight"].bytes == 4 * 64 * 96
    evaluate(compiled, model, 3)


@each("warmup", [False, True])
def test_layers_that_begin_with_zeros_are_not(warmup):
    """Their weights double in the second step, and more than that while the learning rate grows."""
    model, compiled = fp8_mlp(DelayedScaling())
    with torch.no_grad():
        model[2].weight.zero_()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for i in range(12):
        optimizer.param_groups[0]["lr"] = 1e-4 * (i if warmup else 10)
        optimizer.zero_grad()
        (compiled(X) - X).square().mean().backward()
        optimizer.step()


def test_tensors_that_are_no_parameters_may_jump():
    """An argument, or what takes a Parameter's place for a call, changes as activations do."""
    options = {"recipe": DelayedScaling(amax_history_len=4), "backend": "aot_eager", "select": "all"}
    product, linear = fp8_compile(lambda x, w: x @ w, **options), fp8_compile(nn.Linear(64, 64, bias=False), **options)
    ((name, _),) = linear.named_parameters()
    argument = torch.ones(64, 64, requires_grad=True)
    for factor in (1, 1, 1, 9, 9):
        with torch.no_grad():
            argument.fill_(factor)
        product(X, argument).sum().backward()
        functional_call(linear, {name: argument}, X).sum().backward()


def test_the_host_does_not_wait(monkeypatch):
    """A result that does not arrive is not taken."""
    monkeypatch.setattr(exchanges.Arriving, "are_there", property(lambda self: False))
    monkeypatch.setattr(exchanges.Arriving, "take", lambda self: pytest.fail("waits"))
    model, compiled = fp8_mlp(DelayedScaling())
    train(compiled, model, 4)
    write(model, 8)
    train(compiled, model, 3)
    evaluate(compiled, model, 3)
