"""When steps end, without compiling anything."""

import types

import pytest
import torch

from fp8pass.runtime.clock import StepClock


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
