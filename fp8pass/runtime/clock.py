"""The step clock: when a step of training ends. It decides; the session ends the step."""

from __future__ import annotations

import threading

from fp8pass.options import StepMode
from fp8pass.runtime.recompute import in_backward
from fp8pass.scales.reduction import AmaxReduction


class StepClock:
    """The steps of one compiled model. Forwards nest: a compiled model may call itself or be called by several threads.

    In mode "auto" a step ends when the next outermost forward begins. Where ranks reduce amaxes, they must agree that it
    ends: they do on the calls they make, not on what these recorded. So there only a forward with gradients ends a step; an
    evaluation, which often runs on one rank alone, does not.

    NOTE [steps at graphs] A model that torch.compile compiled by our backend's name has no wrapper that sees a forward begin:
    only calls of its graphs are seen. There, a step ends when a graph runs with gradients after a backward, which is the
    first graph of the next training forward. Several forwards before one backward belong to one step, and an evaluation ends
    none.
    """

    def __init__(self, mode: StepMode, reduction: AmaxReduction, at_graphs: bool = False):
        self.mode = mode
        self.at_graphs = at_graphs
        """Whether calls of graphs end steps, instead of outermost forwards."""
        self.recorded = False
        """Whether a graph ran with gradients since the last step boundary: under a recipe with state it recorded amaxes."""
        self.trained = False
        """Whether an outermost forward with gradients began since the last step boundary."""
        self.went_backward = False
        """Whether a backward ran since the last step boundary; known only where graphs end steps."""
        self.agrees = False
        """Whether ranks do something together at step boundaries besides reducing amaxes."""
        self._reduction = reduction
        self._depth = threading.local()

    @property
    def is_step_pending(self) -> bool:
        """Whether there is a step to end."""
        return self.trained if self.must_agree else self.recorded

    def is_step_due(self, trains: bool) -> bool:
        """Whether a forward that is about to begin, with or without gradients, ends a step first."""
        ends_steps = trains or not self.must_agree
        return self.mode == "auto" and not self.at_graphs and self.is_outermost() and self.is_step_pending and ends_steps

    def is_step_due_at_graph(self, trains: bool) -> bool:
        """Whether a graph that is about to run, with or without gradients, ends a step first: see NOTE [steps at graphs]."""
        return self.mode == "auto" and self.at_graphs and trains and self.went_backward and not in_backward()

    def begin_graph(self, trains: bool) -> None:
        """A graph runs, of a model whose graphs end steps."""
        self.trained |= trains

    def note_backward(self, *_: object) -> None:
        """A backward has reached a graph of the model; takes what autograd hands to hooks."""
        self.went_backward = True

    def begin_forward(self, trains: bool) -> None:
        """A forward begins in this thread."""
        self.trained |= trains and self.is_outermost()
        self._depth.value = self._num_forwards() + 1

    def end_forward(self) -> None:
        """A forward of this thread ends, with or without an error."""
        self._depth.value = self._num_forwards() - 1

    def set_pending(self, pending: bool) -> None:
        """A boundary has passed (False), or a state was loaded that was saved before one (True)."""
        self.recorded = self.trained = self.went_backward = pending

    @property
    def must_agree(self) -> bool:
        """Whether ranks do something together at step boundaries."""
        return self._reduction.is_active or self.agrees

    def _num_forwards(self) -> int:
        """Forwards that this thread is in."""
        return getattr(self._depth, "value", 0)

    def is_outermost(self) -> bool:
        """Whether a forward that begins now is not part of another one, nor a recomputation."""
        return not self._num_forwards() and not in_backward()
