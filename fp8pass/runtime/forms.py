"""The forms of one graph of Dynamo's: compiled once per set of rules, when a call first needs it, and never by Dynamo again.

NOTE [a switch] The rules of a model may change at a step boundary, and a step may be a measured one. What Dynamo compiled
stays: behind it, a call picks the graph in the form that the session asks for. A recomputation runs in the form of its first
run, whatever has changed since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fp8pass.errors import ForwardModeError
from fp8pass.runtime.binding import Binder
from fp8pass.runtime.dry import is_dry
from fp8pass.runtime.recompute import in_backward, may_be_checkpointed
from fp8pass.runtime.session import Session, running_session
from fp8pass.runtime.settings import Form
from lowering.operation import has_tangent

Calls = Counter[frozenset[str]]
"""How often each variant of a graph was called."""
CompileForm = Callable[[Form, Calls], Binder]


class Forms:
    """Runs one graph of Dynamo's in the form that its session is in."""

    def __init__(
        self,
        first: Binder,
        compile_form: CompileForm,
        find_session: Callable[[], Session] = running_session,
        *,
        has_break: bool = False,
    ):
        """first: the graph in the form that it was needed in first. has_break: whether eager code runs before or after
        it in a call."""
        self._has_break = has_break
        self._first = self._usual = first
        self._binders = {first.form: first}
        self._compile_form = compile_form
        self._find_session = find_session

    def run(self, *args: Any) -> Any:
        """Call the graph, with the extra inputs of the module instance that `args` belong to."""
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if isinstance(first, FakeTensor):
            return self._first.run_dry(args, first.fake_mode)
        if has_tangent(args):
            raise ForwardModeError(
                "an input or a Parameter carries a tangent of forward-mode differentiation (torch.autograd.forward_ad), which"
                " FP8 operations do not have. Differentiate the model that was compiled, not what fp8_compile returned, or use"
                " reverse mode: backward() or torch.autograd.grad"
            )
        session = self._find_session()
        session.num_graph_calls += 1
        if self._has_break:
            session.weights.note_break()
        # Not every change of `requires_grad` makes Dynamo compile anew, so a graph that trains may run without gradients.
        trains = self._first.compiled.trains
        trains = trains and torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        dry = is_dry()
        if session.clock.at_graphs and not in_backward() and not dry:
            if trains:
                session.before_training()
            may_train = trains or (not torch.is_grad_enabled() and may_be_checkpointed(args))
            if session.clock.is_step_due_at_graph(may_train):
                session.end_step()
            session.clock.begin_graph(may_train)
        return self._find(session, args, trains and not dry).run(session, args, trains, dry)

    def _find(self, session: Session, args: tuple[Any, ...], trains: bool) -> Binder:
        """trains: whether the call is one of training, which may be measured."""
        # Asked at every call: rules that are the same object as before need no hash.
        usual = self._usual
        is_usual = usual.form.rules is session.rules and usual.form.watch is None and session.watch is None
        if is_usual and not in_backward():
            return usual
        found = self._binder(self._form(session, args, trains))
        if found.form.watch is None:
            self._usual = found
        return found

    def _binder(self, form: Form) -> Binder:
        if form not in self._binders:
            # Measured steps count as others do: that code is generated for a variant then must not depend on a monitor.
            counts = (b.num_calls for known, b in self._binders.items() if known.rules == form.rules)
            self._binders[form] = self._compile_form(form, next(counts, Counter()))
        return self._binders[form]

    def _form(self, session: Session, args: tuple[Any, ...], trains: bool) -> Form:
        now = session.form if trains else Form(session.form.rules)
        if not in_backward():
            return now
        first = session.first_runs.find(args)
        if first is None and len(self._binders) > 1:
            found = [binder.last_first_run(session, args) for binder in self._binders.values()]
            first = next((run for run in found if run is not None), None)
        if first is None:
            return now
        return first.form if first.trained else Form(first.form.rules, now.watch)  # reentrant: this is the run that trains
