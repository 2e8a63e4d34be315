"""When steps end, without compiling anything."""

import threading
import types

import pytest
import torch

from fp8pass.runtime.clock import StepClock


def make(mode="auto", reduces=False):
    return StepClock(mode, types.SimpleNamespace(is_active=reduces))


def forward(clock, trains=True, records=True):
    """One outermost forward: whether it ended a step first."""
    due = clock.is_step_due(trains)
    if due:
        clock.set_pending(False)
    clock.begin_forward(trains)
    clock.recorded |= records
    clock.end_forward()
    return due


def test_a_step_ends_when_the_next_forward_begins():
    clock = make()
    assert [forward(clock) for _ in range(3)] == [False, True, True]


def test_a_step_without_an_amax_has_no_end():
    clock = make()
    assert [forward(clock, trains=False, records=False) for _ in range(2)] == [False, False]
    assert not clock.is_step_pending
    forward(clock)
    assert forward(clock, trains=False, records=False), "an evaluation ends the step before it"
    assert not clock.is_step_pending


def test_manual_steps_are_never_due():
    clock = make("manual")
    assert [forward(clock) for _ in range(3)] == [False] * 3
    assert clock.is_step_pending


@pytest.mark.parametrize("records", [True, False])
def test_ranks_that_reduce_agree_by_their_calls_and_not_by_what_they_recorded(records):
    clock = make(reduces=True)
    assert not forward(clock, records=records)
    assert not forward(clock, trains=False, records=False), "one rank may evaluate alone"
    assert forward(clock, records=records)


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


def test_another_thread_is_not_inside_this_ones_forward():
    clock, seen = make(), []
    forward(clock)
    clock.begin_forward(True)
    thread = threading.Thread(target=lambda: seen.append(clock.is_step_due(True)))
    thread.start()
    thread.join()
    clock.end_forward()
    assert seen == [True]


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
