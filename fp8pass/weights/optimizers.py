"""Steps of optimizers: those who ask are told of each, of any torch.optim.Optimizer in the process, compiled or not."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class Listener(Protocol):
    """Wants to know of steps."""

    def after_optimizer(self, optimizer: Optimizer | None) -> None:
        """An optimizer has made a step; None: a compiled one, which says no more than that."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


class _CompiledSteps:
    """Whether a step of a compiled optimizer has run since `take_compiled_steps` was last called."""

    have_run = False


_compiled_steps = _CompiledSteps()


def listen(listener: Listener) -> None:
    """Tell it of every step from now on, for as long as somebody else holds it."""
    _hook()
    _listeners.add(listener)


def take_compiled_steps() -> None:
    """Tell all of steps of compiled optimizers since the last call."""
    if _compiled_steps.have_run:
        _compiled_steps.have_run = False
        _tell(None)


@functools.cache
def _hook() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    """Dynamo traces it into a compiled step. There it sets an attribute that it does not read: an assignment that compiled code
    repeats at each call, without an operation in its graph and without a guard on the value."""
    if torch.compiler.is_compiling():
        _compiled_steps.have_run = True
    else:
        _tell(optimizer)


def _tell(optimizer: Optimizer | None) -> None:
    for listener in list(_listeners):
        listener.after_optimizer(optimizer)
