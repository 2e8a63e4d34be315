"""A model with manual steps says if nobody makes them."""

import warnings

import pytest
import torch

from fp8pass import state
from fp8pass.errors import Fp8Warning, StrictError
from fp8pass.runtime import clock
from tests.support.cases import each
from tests.support.training import fp8_mlp, train


def fused(parameters):
    return torch.optim.AdamW(parameters, fused=True)


def compiled_fused(parameters):
    optimizer = fused(parameters)
    optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
    return optimizer


class ByHand:
    def __init__(self, parameters):
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            p.sub_(0.1 * p.grad)
            p.grad = None

    def zero_grad(self):
        pass


UPDATES = {"SGD": torch.optim.SGD, "fused": fused, "compiled and fused": compiled_fused, "by hand": ByHand}


def said(make, num_steps, step_after=(), accumulate=1, recipe="delayed", **options):
    """The warnings of the model."""
    torch._dynamo.reset()
    model, compiled = fp8_mlp(recipe, step="manual", **options)
    optimizer, x = make(model.parameters()), torch.randn(32, 64)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", Fp8Warning)
        for i in range(num_steps):
            train(compiled, *[x] * accumulate)
            optimizer.step()
            optimizer.zero_grad()
            if i in step_after:
                state(compiled).step()
            with torch.no_grad():
                compiled(x)
    return [str(w.message) for w in found if issubclass(w.category, Fp8Warning)]


@pytest.mark.parametrize("make", UPDATES.values(), ids=UPDATES)
def test_steps_that_nobody_makes_are_said_once(make):
    (text,) = said(make, 8)
    assert 'step="manual", and 4 updates of the weights without state(model).step()' in text
    assert 'compile with step="auto"' in text


def test_it_is_an_error_if_strict():
    with pytest.raises(StrictError, match="without state"):
        said(torch.optim.SGD, 8, strict=True)


@each(
    "num_steps, options",
    [  # each step, every third, accumulation, no state
        (8, {"step_after": range(8)}),
        (9, {"step_after": (2, 5, 8)}),
        (3, {"accumulate": 6, "step_after": range(3)}),
        (8, {"recipe": "current"}),
    ],
)
def test_who_makes_them_hears_nothing(num_steps, options):
    assert said(torch.optim.SGD, num_steps, **options) == []


class Traceless(ByHand):
    def step(self):
        for p in self.parameters:
            p.data.sub_(0.1 * p.grad)
            p.grad = None


def test_updates_without_a_trace_are_seen_by_the_number_of_forwards(monkeypatch):
    monkeypatch.setattr(clock, "MAX_FORWARDS", 6)
    (text,) = said(Traceless, 8)
    assert "6 forwards without" in text
