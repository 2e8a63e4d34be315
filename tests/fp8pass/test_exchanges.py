"""Weights that are exchanged under delayed scaling: said where they saturate, and nothing else is."""

import re
import warnings

import torch
from torch import nn
from torch.func import functional_call

from fp8pass import DelayedScaling
from fp8pass.errors import Fp8Warning
from fp8pass.scales.exchanges import CHECKED_CALLS
from tests.support.cases import each
from tests.support.training import fp8, fp8_mlp

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def train(compiled, model, steps=1):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        compiled(X).square().mean().backward()
        optimizer.step()


@torch.no_grad()
def evaluate(compiled, model):
    compiled(X)


def write(model, factor):
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * factor)


def said(act):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act()
    assert all(w.category is Fp8Warning for w in found)
    return [name for w in found for name in re.search(r"value of ([^ ]+(?:, [^ ]+)*) has", str(w.message))[1].split(", ")]


@each("then, length", [(train, 1), (evaluate, 3)])
def test_larger_weights_are_said(then, length):
    """In training at the next boundary, in an evaluation at once."""
    model, compiled = fp8_mlp(DelayedScaling(amax_history_len=length))
    assert said(lambda: (train(compiled, model, 4), evaluate(compiled, model))) == []
    write(model, 8)
    assert said(lambda: then(compiled, model)) == ([] if then is train else ["0:weight", "2:weight"])
    if then is train:
        assert said(lambda: train(compiled, model)) == ["0:weight", "2:weight"]
    write(model, 1 / 8)
    write(model, 8)
    assert said(lambda: train(compiled, model, 3)) == [], "said once"


def test_what_is_between_two_looks_is_not_missed():
    model, compiled = fp8_mlp(DelayedScaling(amax_history_len=64))
    train(compiled, model, CHECKED_CALLS + 4)
    write(model, 3)
    assert said(lambda: train(compiled, model, 5)) == []
    assert said(lambda: train(compiled, model, CHECKED_CALLS)) == ["0:weight", "2:weight"]


def test_layers_that_begin_with_zeros_are_not():
    """Their weights more than double while the learning rate grows."""
    model, compiled = fp8_mlp(DelayedScaling())
    with torch.no_grad():
        model[2].weight.zero_()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for i in range(12):
        optimizer.param_groups[0]["lr"] = 1e-4 * i
        optimizer.zero_grad()
        (compiled(X) - X).square().mean().backward()
        optimizer.step()


def test_tensors_that_are_no_parameters_may_jump():
    """An argument, or what takes a Parameter's place for a call, changes as activations do."""
    recipe, module = DelayedScaling(amax_history_len=4), nn.Linear(64, 64, bias=False)
    product, linear = fp8(lambda x, w: x @ w, recipe), fp8(module, recipe)
    ((name, _),) = linear.named_parameters()
    argument = torch.ones(64, 64, requires_grad=True)
    for factor in (1, 1, 1, 9, 9):
        with torch.no_grad():
            argument.fill_(factor)
        product(X, argument).sum().backward()
        functional_call(linear, {name: argument}, X).sum().backward()
