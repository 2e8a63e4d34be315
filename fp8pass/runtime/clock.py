"""The steps of training: when one ends, which forwards are no training, and the steps that the user forgot to end.

NOTE [dry passes] torch's `PipelineStage` infers the shapes of what stages send each other, unless they are given. It runs the
stage on memory without content and, in torch 2.13, differentiates it, at the first step of a schedule and whenever the schedule
changes between training and evaluation. A schedule's `eval` runs stages with gradients, though no backward follows. Nothing of
such a pass is recorded, measured or counted as a step. Micro-batches, and nothing else, run within the public methods
`forward_one_chunk` and `backward_one_chunk` of a stage: what a stage runs outside of them is such a pass. Its backward writes
to the scratch memory that its forward chose.

NOTE [shared boundaries] Each compiled module has a session, whose step ends when its own next forward begins. Where that of one
module begins, the steps of others are over, too, if nothing can come that belongs to them: their backwards have run, without a
graph that is kept for another one. Ended now or at their own next forward, their histories get the same amaxes, as nothing
reads or writes them in between. So they end together, in one update (NOTE [shared memory] in `fp8pass.scales.shared`): those
with equal options whose forward came behind that of the module in the last step, and whose gradients came from the same call
of backward. Blocks of a model are such, and a generator and a critic, each trained by steps of its own, are not. Every other
module ends its own step, as one that is alone does: where a backward is still to come, or where ranks do something together at
boundaries, who have to agree on them by their calls alone.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fp8pass.inputs import in_backward
from fp8pass.options import StepMode
from fp8pass.runtime.recompute import hook_backward
from fp8pass.scales.reduction import AmaxReduction
from fp8pass.weights.parameters import Place, listen, places_of, take_compiled_steps

#: So many optimizer steps without a step boundary are no schedule of anybody's: several backwards per step of SAM or of a
#: penalty on gradients change the weights twice.
MAX_UPDATES = 4
#: So many forwards with gradients are none either, where updates leave no trace, as writes through `.data`.
MAX_FORWARDS = 1024

_STAGE = "torch.distributed.pipelining.stage"
#: Methods of `PipelineStage` that run a micro-batch.
_CHUNKS = frozenset(("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"))


class StepClock:
    """The steps of one compiled model. Forwards nest: a compiled model may call itself or be called by several threads. In mode
    "auto" a step ends when the next outermost forward begins. Where ranks reduce amaxes, they must agree that it ends: they do
    on the calls they make, not on what these recorded. So there only a forward with gradients ends a step; an evaluation, which
    often runs on one rank alone, does not. NOTE [steps at graphs] A model that torch.compile compiled by our backend's name has
    no wrapper that sees a forward begin: only calls of its graphs are seen. There, a step ends when a graph runs with gradients
    after a backward, which is the first graph of the next training forward. Several forwards before one backward belong to one
    step, and an evaluation ends none."""

    def __init__(self, mode: StepMode, reduction: AmaxReduction, at_graphs: bool = False):
        self.mode = mode
        self.at_graphs = at_graphs  # True if calls of graphs end steps, instead of outermost forwards.
        self.recorded = False  # A graph ran with gradients since the last step boundary: with state it recorded amaxes.
        self.trained = False  # An outermost forward with gradients began since the last step boundary, or a graph of one ran.
        self.went_backward = False  # True if a backward ran since the last step boundary; known only where graphs end steps.
        self.agrees = False  # True if ranks do something together at step boundaries besides reducing amaxes.
        self._reduction = reduction
        self.depth = threading.local()  # `value`: the number of forwards that a thread is in; not set in one that was in none.

    @property
    def is_step_pending(self) -> bool:
        """True if there is a step to end."""
        return self.trained if self.must_agree else self.recorded

    def is_step_due(self, trains: bool) -> bool:
        """True if a forward that is about to begin, with or without gradients, ends a step first."""
        if not (self.recorded or self.trained):  # as before most forwards without gradients
            return False
        ends_steps = trains or not self.must_agree
        return self.mode == "auto" and not self.at_graphs and self.is_outermost() and self.is_step_pending and ends_steps

    def is_step_due_at_graph(self, trains: bool) -> bool:
        """True if a graph that is about to run, with or without gradients, ends a step first: see NOTE [steps at graphs]."""
        return self.mode == "auto" and self.at_graphs and trains and self.went_backward and not in_backward()

    def ends_as(self, other: StepClock) -> bool:
        """True if the same kind of call ends steps of both."""
        return (self.mode, self.at_graphs) == (other.mode, other.at_graphs)

    def note_backward(self, *_: object) -> None:
        """Note that a backward has reached a graph of the model; a hook of autograd's."""
        self.went_backward = True

    def begin_forward(self, trains: bool) -> None:
        """Begin a forward in this thread."""
        depth = self._num_forwards()
        self.trained |= trains and not depth and not in_backward()
        self.depth.value = depth + 1

    def end_forward(self) -> None:
        """End a forward of this thread, with or without an error."""
        self.depth.value = self._num_forwards() - 1

    def set_pending(self, pending: bool) -> None:
        """Note that a boundary has passed (False), or that a state was loaded that was saved before one (True)."""
        self.recorded = self.trained = self.went_backward = pending

    @property
    def must_agree(self) -> bool:
        """True if ranks do something together at step boundaries."""
        return self._reduction.is_active or self.agrees

    def _num_forwards(self) -> int:
        """Forwards that this thread is in."""
        return getattr(self.depth, "value", 0)

    def is_outermost(self) -> bool:
        """True if a forward that begins now is not part of another one, nor a recomputation."""
        return not self._num_forwards() and not in_backward()


class ManualSteps:
    """Counts the optimizer steps since the last step boundary of one model. Invariant: holds no reference to the model.
    Optimizers say that they have made a step; updates by hand raise the version of a Parameter that trains."""

    def __init__(self, root: Callable[[], nn.Module | None]):
        self._root = root
        self._version: int | None = None
        self._place: Place | None = None
        self._is_updated = False
        self.num_updates = 0  # Updates of the weights, each followed by a forward with gradients.
        self.num_forwards = 0  # Outermost forwards with gradients.
        listen(self.after_optimizer)

    def begin_forward(self) -> None:
        """Count an outermost forward with gradients, which begins."""
        take_compiled_steps()
        parameter = self._trained()
        version = None if parameter is None else parameter._version
        if self._is_updated or (self._version is not None and version != self._version):
            self.num_updates += 1
        self._version, self._is_updated = version, False
        self.num_forwards += 1

    def end_step(self) -> None:
        """Count anew from a step boundary."""
        self.num_updates = self.num_forwards = 0

    @property
    def complaint(self) -> str:
        """The text of a warning; empty if all is well."""
        if self.num_updates < MAX_UPDATES and self.num_forwards < MAX_FORWARDS:
            return ""
        found = f"{self.num_updates} updates of the weights" if self.num_updates else f"{self.num_forwards} forwards"
        return (
            f'step="manual", and {found} without state(model).step(): the scales of delayed scaling do not change, and'
            f' tensors that grow saturate. Call state(model).step() once per optimizer step, or compile with step="auto"'
        )

    def after_optimizer(self, optimizer: Optimizer | None) -> None:
        """Note that an optimizer has made a step; None: a compiled one, of whichever model."""
        parameter = self._trained()
        if optimizer is None or any(p is parameter for group in optimizer.param_groups for p in group["params"]):
            self._is_updated = True

    def _trained(self) -> nn.Parameter | None:
        """The first matrix that trains; the one of the last call, while it does."""
        held = None if self._place is None else self._place.tensor()
        if isinstance(held, nn.Parameter) and held.requires_grad and held.ndim > 1:
            return held
        root = self._root()
        found = None if root is None else next((p for p in root.parameters() if p.requires_grad and p.ndim > 1), None)
        self._place = None if found is None else places_of(root, [found])[0]
        return found


def is_dry() -> bool:
    """True if what is called now is part of a dry pass. Costs nothing in a program without pipelines."""
    method, stage = _stage_that_runs()
    return stage is not None and (method not in _CHUNKS or not stage.has_backward)


def stage_on_stack() -> Any:
    """The stage of a pipeline that is running, whatever for; None where none is."""
    return _stage_that_runs()[1]


def _stage_that_runs() -> tuple[str, Any]:
    """The method that runs a stage, that of micro-batches if there is one, and the stage."""
    pipelines = sys.modules.get(_STAGE)
    frame: FrameType | None = None if pipelines is None else sys._getframe(1)
    running: tuple[str, Any] = ("", None)
    while frame is not None and running[0] not in _CHUNKS:
        code = frame.f_code
        if code.co_name in _CHUNKS or code.co_filename == pipelines.__file__:  # type: ignore[union-attr]
            found = frame.f_locals.get("self")
            if isinstance(found, pipelines._PipelineStageBase):  # type: ignore[union-attr]
                running = code.co_name, found
        frame = frame.f_back
    return running


# -- the boundaries of modules that are compiled one by one: NOTE [shared boundaries]

_numbers = itertools.count(1)


class Passes:
    """The forwards and backwards of one session, as far as they decide whether its step is over."""

    def __init__(self) -> None:
        self._awaited: weakref.WeakValueDictionary[int, Callable[..., None]] = weakref.WeakValueDictionary()
        """The hooks of forwards whose backward may come, or come again, held by the nodes of autograd that it comes to. A graph
        that is given up takes its own along."""
        self.last_forward = 0  # The number of the last forward of training, in the order of all sessions; 0: none yet.
        self.last_backward = -1  # Torch's number of the last call of backward that reached a graph since; -1 where none did.

    def note_forward(self, result: Any) -> None:
        """Take note of a graph that has run for training and returned `result`. A recomputation, which runs in a backward, is a
        part of that call of backward, whatever inner one differentiates it; it has the place of its first run."""
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            self.last_forward, self.last_backward = next(_numbers), -1
        key = next(_numbers)
        hook = self._awaited[key] = functools.partial(self._note_backward, key, self.last_forward, backward)
        hook_backward(result, hook)

    def _note_backward(self, key: int, forward: int, backward: int, *_: object) -> None:
        """Take note of a backward that has come to a forward, a part of this call of backward, or of none: -1."""
        if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
            return
        if forward == self.last_forward:
            self.last_backward = torch._C._current_graph_task_id() if backward == -1 else backward
        self._awaited.pop(key, None)

    @property
    def are_over(self) -> bool:
        """True if forwards were noted, and no backward of them can come any more."""
        return self.last_forward > 0 and not self._awaited

    def follow(self, other: Passes) -> bool:
        """True if another session's forwards came before these, and the same backward differentiated both."""
        return self.last_forward > other.last_forward and self.last_backward == other.last_backward != -1
