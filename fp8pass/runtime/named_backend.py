"""The backend by its name: `torch.compile(model, backend="fp8pass", options={"recipe": "delayed"})`.

torch.compile hands a backend graphs, but not the model that they belong to. Every call to torch.compile makes a context, which
the compiled module or function holds and which is on the stack while it runs. NOTE [the caller] The session of a model hangs
on that context: made when `inspect` or `state` ask for it, or when one of its graphs runs for the first time, found by
walking up the stack. From then on the context's own hooks, which torch.compile calls before and after each call, say which
session is running.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch.nn.parallel import DistributedDataParallel

from fp8pass.errors import InvariantError, NotCompiledError, OptionError
from fp8pass.options import CompileOptions
from fp8pass.runtime.backend import Backend
from fp8pass.runtime.eager import CALL
from fp8pass.runtime.session import Session, session_in_this_thread
from fp8pass.runtime.wrap import ReplacedCall, Siblings, before_outermost_calls, enter, session_of, share_session

log = logging.getLogger(__name__)

#: Attribute of torch.compile's context.
_SESSION = "_fp8pass_session"
#: The function that a compiled function or method runs in, with the context and the original function as variables.
_WRAPPER, _WRAPPER_MODULE = "compile_wrapper", "torch._dynamo.eval_frame"

_backends: weakref.WeakKeyDictionary[Session, Backend] = weakref.WeakKeyDictionary()


def fp8pass_backend(gm: fx.GraphModule, example_inputs: list[Any], **options: Any) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs: the entry point `torch_dynamo_backends` of torch.compile(backend="fp8pass").

    options: torch.compile's `mode` or `options`. `options` takes the keyword arguments of `fp8_compile` by their names, but
        `dynamic`, `fullgraph` and `in_place`.

    Raises RecipeError, RuleError or OptionError for invalid options; torch.compile reports it as BackendCompilerFailed, with
    its text, at the first call.
    """
    session = _calling_session()
    if session not in _backends:
        _backends[session] = Backend(session.options, _calling_session)
    return _backends[session](gm, example_inputs)


def _reset() -> None:
    """Forget recorded CUDA graphs, when `torch._dynamo.reset()` resets the backends that it has used."""
    for backend in list(_backends.values()):
        backend.reset()


fp8pass_backend.reset = _reset  # type: ignore[attr-defined]


def prepare(model: nn.Module, **options: Any) -> Session:
    """Let every part of `model` that is compiled by our name, now or later, share one session with these options."""
    session = Session(model, CompileOptions.named(None, options, None), steps_at_graphs=True)
    share_session(model.modules(), session)
    return session


def named_session(compiled: object) -> Session | None:
    """The session of what torch.compile(backend="fp8pass") returned, or of a module on which `.compile(backend="fp8pass")` was
    called; None for anything else. Raises NotCompiledError for a module of torch's own, whose `.compile()` compiles nothing."""
    if isinstance(compiled, DistributedDataParallel):
        return session_of(compiled.module) or named_session(compiled.module)
    if isinstance(compiled, OptimizedModule):
        return _session_on(compiled.dynamo_ctx, compiled._orig_mod)
    if isinstance(compiled, nn.Module):
        held = compiled.__dict__.get(CALL)
        found = named_session(held.function if isinstance(held, ReplacedCall) else held)
        if found is not None and trace_rules.check(compiled.forward):
            raise NotCompiledError(
                f"torch.compile compiles nothing in nn.{type(compiled).__name__}(...).compile(), with any backend, because it"
                f" skips the code of torch's own modules: use torch.compile(module, backend='fp8pass') or"
                f" fp8_compile(module, recipe, in_place=True)"
            )
        return found
    if isinstance(compiled, FunctionType) and _is_wrapper(compiled.__code__, compiled.__globals__):
        held = inspect.getclosurevars(compiled).nonlocals
        return _session_on(held["self"], _owner(held["fn"]))
    return None


def _calling_session() -> Session:
    """The session of the model whose graph is being compiled or run in this thread: see NOTE [the caller]."""
    session = session_in_this_thread()
    if session is not None and session.clock.at_graphs:
        return session
    for context, owner in _callers():
        is_new = getattr(context, _SESSION, None) is None
        found = _session_on(context, owner)
        if found is not None:
            if is_new and found.rules.stateful:
                _say_that_the_state_is_not_saved()
            return found
    raise InvariantError(
        "a graph of the backend 'fp8pass' was compiled or called from outside of torch.compile(model, backend='fp8pass')"
    )


def _meet_callers() -> None:
    """Give every model on the stack its session. None of its graphs may have run before it called a module that is compiled
    otherwise, and none will where Dynamo leaves the call eager: `wrap.py`."""
    for context, owner in _callers():
        is_new = getattr(context, _SESSION, None) is None
        if is_new and (session := _session_on(context, owner)) is not None:
            session.seen.began_midway = True
            log.warning(
                "a model that torch.compile(backend='fp8pass') compiled calls a module that fp8_compile compiled: a module that"
                " ran before it in this first call may have run in high precision. Later calls run in FP8"
            )


before_outermost_calls.append(_meet_callers)


def _callers() -> Iterator[tuple[Any, Any]]:
    """The calls on the stack of what torch.compile made, the innermost first: its context, and the module or function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _WRAPPER and _is_wrapper(frame.f_code, frame.f_globals):  # at every call, of every frame
            yield frame.f_locals["self"], _owner(frame.f_locals["fn"])
        frame = frame.f_back


def _is_wrapper(code: CodeType, variables: dict[str, Any]) -> bool:
    return code.co_name == _WRAPPER and variables.get("__name__") == _WRAPPER_MODULE


def _session_on(context: Any, owner: Any) -> Session | None:
    """The session that hangs on a context of torch.compile, made if it has none; None if its backend is another one. owner: the
    module or function that was compiled."""
    found = getattr(context, _SESSION, None)
    if isinstance(found, Session):
        return found
    wrapper: Any = innermost_backend(context.callback) if callable(getattr(context, "callback", None)) else None
    if wrapper is fp8pass_backend:
        given, dynamic = {}, None
    elif isinstance(wrapper, torch._TorchCompileWrapper) and wrapper.compiler_fn is fp8pass_backend:
        given, dynamic = wrapper.kwargs, wrapper.dynamic
    else:
        return None
    parts = owner.modules() if isinstance(owner, nn.Module) else ()  # a wrapper such as CheckpointWrapper was not prepared
    session = next((s for module in parts if (s := session_of(module)) is not None and s.clock.at_graphs), None)
    if session is not None and given:
        raise OptionError(f"the model was prepared with options, and torch.compile has {given!r}; give them in one place")
    if session is None:
        options = CompileOptions.named(given.get("mode"), given.get("options"), dynamic)
        session = Session(owner, options, steps_at_graphs=True)
    setattr(context, _SESSION, session)
    context.enter_exit_hooks.append(functools.partial(enter, session, Siblings(owner)))
    return session


def _owner(function: Any) -> Any:
    """The module that a compiled method belongs to, or the function itself."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, nn.Module) else function


@functools.cache
def _say_that_the_state_is_not_saved() -> None:
    """Once per process."""
    log.warning(
        "torch.compile(backend='fp8pass') keeps the scales and amax histories of delayed scaling outside of"
        " model.state_dict(). To resume with them, save fp8pass.state(compiled).state_dict() with each checkpoint;"
        " otherwise a resumed run begins with empty histories. fp8pass.integrations has callbacks that save it."
    )
