"""When steps end; a model with manual steps says if nobody makes them."""

import types
import warnings

import pytest
import torch

from fp8pass import state
from fp8pass.errors import Fp8Warning, StrictError
from fp8pass.runtime import clock
from fp8pass.runtime.clock import StepClock
from tests.support.cases import each
from tests.support.training import fp8_mlp, train


def make(mode="auto", reduces=False):
    return StepClock(mode, types.SimpleNamespace(is_active=reduces))


def forward(clock, kind="t"):
    """One outermost forward: whether it ended a step first. kind: "t" trains and records, "n" trains, "e" evaluates."""
    due = clock.is_step_due(kind != "e")
    if due:
        clock.set_pending(False)
    clock.begin_forward(kind != "e")
    clock.recorded |= kind == "t"
    clock.end_forward()
    return due


@pytest.mark.parametrize(
    ("mode", "reduces", "kinds", "dues", "is_pending"),
    [
        ("auto", False, "ttt", [False, True, True], True),
        ("auto", False, "ee", [False, False], False),  # a step without an amax has no end
        ("auto", False, "eete", [False, False, False, True], False),  # an evaluation ends the step before it
        ("manual", False, "ttt", [False, False, False], True),
        # Ranks that reduce agree by their calls and not by what they recorded: one rank may evaluate alone.
        ("auto", True, "tet", [False, False, True], True),
        ("auto", True, "nen", [False, False, True], True),
    ],
)
def test_a_step_ends_when_the_next_forward_begins(mode, reduces, kinds, dues, is_pending):
    clock = make(mode, reduces)
    assert [forward(clock, kind) for kind in kinds] == dues
    assert reduces or clock.is_step_pending == is_pending


def test_a_forward_inside_another_ends_no_step():
    clock = make()
    forward(clock)
    assert clock.is_step_due(True)
    clock.begin_forward(True)
    assert not clock.is_step_due(True)
    clock.set_pending(False)
    clock.begin_forward(True)
    assert not clock.trained, "it is part of the outer one"
    clock.end_forward()
    clock.end_forward()


def test_a_forward_inside_a_backward_is_a_recomputation():
    clock, seen = make(), []

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(clock.is_step_due(True))
            return grad

    forward(clock)
    Recompute.apply(torch.ones(1, requires_grad=True)).backward()
    assert seen == [False]
    assert clock.is_step_due(True)


# -- manual steps that nobody makes


def sgd(parameters):
    return torch.optim.SGD(parameters).step


def compiled_fused(parameters):
    return torch.compile(torch.optim.AdamW(parameters, fused=True).step, backend="aot_eager")


def by_hand(parameters):
    return torch.no_grad()(lambda: [p.sub_(0.1 * p.grad) for p in parameters])


def without_a_trace(parameters):
    return lambda: [p.data.sub_(0.1 * p.grad) for p in parameters]


def said(make_update, num_steps, step_after=(), accumulate=1, recipe="delayed", **options):
    """The warnings of the model."""
    torch._dynamo.reset()
    model, compiled = fp8_mlp(recipe, step="manual", **options)
    update, x = make_update(list(model.parameters())), torch.randn(32, 64)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", Fp8Warning)
        for i in range(num_steps):
            train(compiled, *[x] * accumulate)
            update()
            model.zero_grad()
            if i in step_after:
                state(compiled).step()
            with torch.no_grad():
                compiled(x)
    return [str(w.message) for w in found if issubclass(w.category, Fp8Warning)]


@each("make_update", [sgd, compiled_fused, by_hand])
def test_steps_that_nobody_makes_are_said_once(make_update):
    (text,) = said(make_update, 8)
    assert 'step="manual", and 4 updates of the weights without state(model).step()' in text
    assert 'compile with step="auto"' in text


def test_updates_without_a_trace_are_seen_by_the_number_of_forwards(monkeypatch):
    monkeypatch.setattr(clock, "MAX_FORWARDS", 6)
    (text,) = said(without_a_trace, 8)
    assert "6 forwards without" in text
    with pytest.raises(StrictError, match="without state"):
        said(without_a_trace, 8, strict=True)


def test_who_makes_them_hears_nothing():
    """Each step, every third, with accumulation, and without a state."""
    assert said(sgd, 8, range(8)) == said(sgd, 9, (2, 5, 8)) == said(sgd, 3, range(3), accumulate=6) == []
    assert said(sgd, 8, recipe="current") == []
