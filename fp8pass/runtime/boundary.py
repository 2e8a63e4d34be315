"""The step boundaries of modules that are compiled one by one: which of them can be one.

NOTE [shared boundaries] Each compiled module has a session, whose step ends when its own next forward begins. Where that of one
module begins, the steps of others are over, too, if nothing can come that belongs to them: their backwards have run, without a
graph that is kept for another one. Ended now or at their own next forward, their histories get the same amaxes, as nobody
reads or writes them in between. So they end together, in one update (NOTE [shared memory] in `fp8pass.scales.shared`): those
with equal options whose forward came behind that of the module in the last step, and whose gradients came from the same call
of backward. Blocks of a model are such, and a generator and a critic, each trained by steps of its own, are not. Every other
module ends its own step, as one that is alone does: where a backward is still to come, or where ranks do something together at
boundaries, who have to agree on them by their calls alone.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from fp8pass.runtime.recompute import hook_backward

_numbers = itertools.count(1)


class Passes:
    """The forwards and backwards of one session, as far as they decide whether its step is over."""

    def __init__(self) -> None:
        self._awaited: weakref.WeakSet[_Forward] = weakref.WeakSet()
        """Forwards whose backward may come, or come again. A graph that is given up takes its own along."""
        self.last_forward = 0
        """The number of the last forward of training, in the order of all sessions; 0 before there is one."""
        self.last_backward = -1  # Torch's number of the last call of backward that reached a graph since; -1 where none did.

    def note_forward(self, result: Any) -> None:
        """Take note of a graph that has run for training and returned `result`. A recomputation, which runs in a backward, is a
        part of that call of backward, whatever inner one differentiates it; it has the place of its first run."""
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            self.last_forward, self.last_backward = next(_numbers), -1
        forward = _Forward(self, self.last_forward, backward)
        self._awaited.add(forward)
        hook_backward(result, forward.note_backward)

    @property
    def are_over(self) -> bool:
        """True if forwards were noted, and no backward of them can come any more."""
        return self.last_forward > 0 and not self._awaited

    def follow(self, other: Passes) -> bool:
        """True if these come behind those of another session in one forward, and one backward was of both."""
        return self.last_forward > other.last_forward and self.last_backward == other.last_backward != -1


class _Forward:
    """A forward of a graph, held by the nodes of autograd that its backward comes to."""

    def __init__(self, passes: Passes, number: int, backward: int):
        """backward: the number of the call of backward that it is a part of; -1 for none."""
        self._passes, self._number, self._backward = passes, number, backward

    def note_backward(self, *_: object) -> None:
        """Take note of a backward that has come; a hook of autograd's."""
        if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
            return
        if self._number == self._passes.last_forward:
            inner = torch._C._current_graph_task_id()
            self._passes.last_backward = inner if self._backward == -1 else self._backward
        self._passes._awaited.discard(self)
