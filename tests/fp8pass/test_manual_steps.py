"""A model with manual steps says if nobody makes them."""

import warnings

import pytest
import torch

from fp8pass import fp8_compile, state
from fp8pass.errors import Fp8Warning, StrictError
from fp8pass.runtime import clock
from tests.support.models import mlp
from tests.support.numerics import sqnr


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


def train(make, num_steps, step_after=(), accumulate=1, recipe="delayed", **options):
    """The warnings of the model."""
    torch._dynamo.reset()
    model = mlp(64, 96, 64)
    compiled = fp8_compile(model, recipe, backend="aot_eager", step="manual", **options)
    optimizer = make(model.parameters())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", Fp8Warning)
        for i in range(num_steps):
            for _ in range(accumulate):
                compiled(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if i in step_after:
                state(compiled).step()
            with torch.no_grad():
                compiled(torch.randn(32, 64))
    return [str(w.message) for w in said if issubclass(w.category, Fp8Warning)]


@pytest.mark.parametrize("make", UPDATES.values(), ids=UPDATES)
def test_steps_that_nobody_makes_are_said_once(make):
    (text,) = train(make, 8)
    assert 'step="manual", and 4 updates of the weights without state(model).step()' in text
    assert 'compile with step="auto"' in text


def test_it_is_an_error_if_strict():
    with pytest.raises(StrictError, match="without state"):
        train(torch.optim.SGD, 8, strict=True)


@pytest.mark.parametrize(
    ("num_steps", "options"),
    [
        (8, {"step_after": range(8)}),
        (9, {"step_after": (2, 5, 8)}),
        (3, {"accumulate": 6, "step_after": range(3)}),
        (8, {"recipe": "current"}),
    ],
    ids=["each step", "every third", "accumulation", "no state"],
)
def test_who_makes_them_hears_nothing(num_steps, options):
    assert train(torch.optim.SGD, num_steps, **options) == []


def test_updates_without_a_trace_are_seen_by_the_number_of_forwards(monkeypatch):
    class Traceless(ByHand):
        def step(self):
            for p in self.parameters:
                p.data.sub_(0.1 * p.grad)
                p.grad = None

    monkeypatch.setattr(clock, "MAX_FORWARDS", 6)
    (text,) = train(Traceless, 8)
    assert "6 forwards without" in text


@pytest.mark.parametrize("is_pending", [False, True], ids=["the step has ended", "it has not"])
@pytest.mark.parametrize("copies", ["auto", "cache"])
def test_weights_that_were_exchanged_scale_themselves(copies, is_pending):
    """Also where the weights before them have recorded amaxes in a step that has not ended."""
    model = mlp(64, 96, 64)
    compiled = fp8_compile(model, "delayed", backend="aot_eager", select="all", weight_copies=copies)
    x = torch.randn(32, 64)
    for _ in range(4):
        compiled(x).square().mean().backward()
    with torch.no_grad():
        if not is_pending:
            compiled(x)
        model[2].weight.mul_(50)
        if not is_pending:
            assert sqnr(model(x), compiled(x)) < 3
        state(compiled).forget_weights()
        assert not state(compiled).amax_history("2:weight").any()
        assert state(compiled).amax_history("2:input").any()
        assert sqnr(model(x), compiled(x)) > 20
    for _ in range(2):
        compiled(x).square().mean().backward()
    assert state(compiled).scale("2:weight") == torch.tensor(448.0) / model[2].weight.abs().max()
