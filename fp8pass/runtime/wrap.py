"""Compiled models, which carry their sessions in a module of their own, in a function, or in the model (in place); their calls.

NOTE [a frame for torch's modules] The call of a compiled module within a compiled module is a graph break. In a loop over
modules, such as that of nn.Sequential, Dynamo cannot resume: it leaves the loop eager and compiles what the loop calls, one
function after the other. It skips the functions of torch, so an nn.Linear in that loop would run in high precision. For as long
as a call of the outer module lasts, those modules of torch are called through a frame of ours, which Dynamo compiles if it left
the loop eager. If it did not, it traces their `forward` and never sees that frame.

NOTE [quiet calls] Before and after most calls without gradients there is nothing to do: no step is pending, no warning is due,
every module that multiplies was seen to run compiled, and nothing was released or compiled since. That is not remembered but
asked at each call, of the fields that would be looked at one by one, so nothing that writes them has to end a quiet state. Such
a call notes which session runs, and which graphs ran; if these are not those of the last call, it ends as every other one does.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import BackendCompilerFailed

from fp8pass.errors import Fp8Error, Fp8Warning, UnsupportedCopyError, UnsupportedError, tell
from fp8pass.runtime.backend import Backend
from fp8pass.runtime.eager import CALL, FRAME
from fp8pass.runtime.session import Session, session_in_this_thread
from fp8pass.runtime.warn import after_call

_SESSION = "_fp8pass_session"

#: Sessions of modules that are parts of one model, or that will be compiled later.
_shared: weakref.WeakKeyDictionary[nn.Module, Session] = weakref.WeakKeyDictionary()
#: Models that were compiled in place and not uncompiled, whatever has become of it.
_in_place: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def refuse_export() -> None:
    """Raise UnsupportedError where torch.export traces a compiled model."""
    if torch.compiler._is_exporting_flag:  # Dynamo of torch 2.11 takes `is_exporting()` for true in every trace
        raise UnsupportedError(
            "torch.export cannot trace a compiled model: export the model itself, torch.export.export(model, args), after"
            " fp8_uncompile(model) if it is compiled in place; export_fp8(compiled, folder) writes its weights in FP8"
        )


class Fp8Module(OptimizedModule):
    """A compiled model. Behaves as the OptimizedModule of torch.compile; `inspect` and `state` take it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler._is_exporting_flag:
            refuse_export()
        return OptimizedModule.__call__(self, *args, **kwargs)

    def __bool__(self) -> bool:
        return bool(self._orig_mod)  # without it Python asks `__len__`, which torch defines for modules that have none

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedCopyError(
            "a compiled model cannot be copied: deepcopy the model itself, fp8_compile the copy, and load the state with"
            " state(copy).load_state_dict(state(compiled).state_dict())"
        )

    def __copy__(self) -> Any:
        return self.__deepcopy__({})

    def __reduce__(self) -> Any:
        raise UnsupportedCopyError(
            "a compiled model cannot be pickled: save model.state_dict() and state(compiled).state_dict(), and compile again"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


class InPlaceCall:
    """The call of a model that was compiled in place. A copy or a pickle of it is None: a copied model is not compiled."""

    def __init__(self, function: Callable[..., Any], session: Session, model: nn.Module):
        self._function = function
        self.session = session
        self._model = weakref.ref(model)
        self.forward = type(model).forward  # The model has it as a method of its own.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_export()
        model = self._model()
        if model is not None and type(model).forward is not self.forward:  # the class, or its forward, was exchanged
            own = model.__dict__.get("forward")
            if isinstance(own, types.MethodType) and own.__func__ is self.forward:
                model.__dict__["forward"] = types.MethodType(type(model).forward, model)
            self.forward = type(model).forward
        return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _nothing, ()


class ReplacedCall:
    """The call that `model.compile()` put instead of an InPlaceCall: it warns, when first called, that FP8 is gone."""

    def __init__(self, function: Callable[..., Any], model: nn.Module, strict: bool):
        self.function = function
        self._model = weakref.ref(model)
        self._strict = strict

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        cause = None if model is None else replaced(model)
        if model is not None and not self._strict:
            setattr(model, CALL, self.function)
        if cause is not None:
            tell(cause, Fp8Warning, strict=self._strict)
        return self.function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    """The result of copying or unpickling a call."""


def _compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """`compile` of a model that is compiled in place: that of the class, which replaces our call; it leaves a note of that."""
    ours = self.__dict__.get(CALL)
    type(self).compile(self, *args, **kwargs)
    theirs = self.__dict__.get(CALL)
    if isinstance(ours, InPlaceCall) and theirs is not ours and callable(theirs):
        setattr(self, CALL, ReplacedCall(theirs, self, ours.session.options.strict))
        _restore(self, ours)


def _getstate(self: nn.Module) -> Any:
    """`__getstate__` of a model that is compiled in place: that of the class, without our methods, which are this model's."""
    state: Any = type(self).__getstate__(self)
    if not isinstance(state, dict):
        return state
    ours = _our_methods(self, self.__dict__.get(CALL))
    return {name: value for name, value in state.items() if name not in ours}


def compile_beside(model: Any, session: Session, **torch_options: Any) -> Any:
    """A compiled version of a model or function, which is not changed."""
    compiled: Any = torch.compile(model, backend=Backend(session.options), **torch_options)
    if isinstance(model, nn.Module):
        compiled.__class__ = Fp8Module
        if trace_rules.check(model.forward):
            frame = framed(model, model)
            session.frame = frame.__code__
            compiled.forward = compiled.dynamo_ctx(frame)
        object.__setattr__(compiled, _SESSION, session)
        compiled.forward = _guarded(compiled.forward, session, model)
        note_compiled()
        return compiled
    wrapper = functools.wraps(model)(_guarded(compiled, session, model))
    setattr(wrapper, _SESSION, session)
    return wrapper


def compile_in_place(model: nn.Module, session: Session, **torch_options: Any) -> None:
    """Compile what the model's `__call__` runs, as `nn.Module.compile()` does."""
    call: Any = model._call_impl
    if trace_rules.check(model.forward):
        # Dynamo skips frames of torch itself, so it would never see the forward of an nn.Sequential.
        call = framed(model, call)
        session.frame = call.__code__
    if "forward" not in model.__dict__:
        # Dynamo calls the class's `forward` of a module that it traces, past `__call__` and so past us: a torch.compile around
        # this model would take it into its own graph, in high precision. It does not where the module has its own `forward`.
        model.__dict__["forward"] = types.MethodType(type(model).forward, model)
    compiled = torch.compile(call, backend=Backend(session.options), **torch_options)
    for name, function in (("compile", _compile), ("__getstate__", _getstate)):
        if name not in model.__dict__:
            model.__dict__[name] = types.MethodType(function, model)
    setattr(model, CALL, InPlaceCall(_guarded(compiled, session, model), session, model))
    _in_place.add(model)
    note_compiled()


def undo_in_place(model: nn.Module) -> None:
    """Let the model run eagerly again."""
    _restore(model, model.__dict__[CALL])
    delattr(model, CALL)
    _in_place.discard(model)


def _restore(model: nn.Module, call: object) -> None:
    """Take our methods off a model. call: what its calls run."""
    for name in _our_methods(model, call):
        del model.__dict__[name]


def _our_methods(model: nn.Module, call: object) -> list[str]:
    """The names of the methods that we put into a model."""
    ours = {"forward": call.forward if isinstance(call, InPlaceCall) else None, "compile": _compile, "__getstate__": _getstate}
    own = {name: model.__dict__.get(name) for name in ours}
    return [name for name, method in own.items() if isinstance(method, types.MethodType) and method.__func__ is ours[name]]


def session_of(compiled: object) -> Session | None:
    """The session of what `fp8_compile` returned or compiled in place, or of modules that share one; None for anything else."""
    attributes = getattr(compiled, "__dict__", {})
    found = attributes.get(_SESSION)
    if isinstance(found, Session):
        return found
    in_place = attributes.get(CALL)
    if isinstance(in_place, InPlaceCall):
        return in_place.session
    return _shared.get(compiled) if isinstance(compiled, nn.Module) else None


def share_session(modules: Iterable[nn.Module], session: Session) -> None:
    """Let `session_of` give this session for each of these modules, which are compiled one by one."""
    session.is_shared = True
    _shared.update(dict.fromkeys(modules, session))


def is_in_place(model: object) -> bool:
    """True if `fp8_compile(..., in_place=True)` compiled this model."""
    return isinstance(getattr(model, "__dict__", {}).get(CALL), InPlaceCall)


def is_called_in_place(model: nn.Module) -> bool:
    """True if a call of this module runs something compiled that its `forward` does not."""
    return model.__dict__.get(CALL) is not None


def replaced(model: object) -> str | None:
    """An explanation for a model that was compiled in place and is not any more; None for every other object."""
    if not isinstance(model, nn.Module) or model not in _in_place or is_in_place(model):
        return None
    name = type(model).__name__
    what = "model.compile() was called" if model.__dict__.get(CALL) is not None else f"model.{CALL} was deleted"
    return (
        f"{name} was compiled with fp8_compile(model, in_place=True), then {what}, which took the place of FP8: the model runs"
        f" without the recipe, rules and state that it was given. fp8_compile compiles the model already: leave model.compile()"
        f" out. To return to FP8 in this process: model.{CALL} = None, then fp8_compile(model, ..., in_place=True)"
    )


#: Called when a model is called whose caller is no model of ours, as far as is known.
before_outermost_calls: list[Callable[[], None]] = []


def _guarded(function: Callable[..., Any], session: Session, compiled: object) -> Callable[..., Any]:
    """`function`, which runs `compiled`, with a step boundary before outermost calls, and with our errors as they were raised.
    A torch.compile around it traces none of it."""
    siblings = Siblings(compiled)

    @torch._dynamo.disable
    def forward(*args: Any, **kwargs: Any) -> Any:
        if session_in_this_thread() is None:
            for meet_caller in before_outermost_calls:
                meet_caller()
            is_quiet = siblings.are_none and session.is_quiet(args, kwargs)
        else:
            is_quiet = False
        handled, num_graph_calls = sys.exc_info()[1], session.num_graph_calls
        quiet = session.begin_quietly() if is_quiet else None
        end = enter(session, siblings, args, kwargs) if quiet is None else None
        try:
            return function(*args, **kwargs)
        except BackendCompilerFailed as failure:
            if isinstance(failure.inner_exception, Fp8Error):
                raise failure.inner_exception from None
            raise
        finally:
            if end is not None:
                end()
            elif quiet is not None and not session.end_quietly(quiet):
                new = session.eager.end(quiet)
                if sys.exc_info()[1] is handled:
                    after_call(session, num_graph_calls, new)

    return forward


def enter(
    session: Session, siblings: Siblings, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[], None]:
    """Begin a forward, perhaps from a hook of torch.compile's. Returns a function that ends it, raised or not."""
    handled = sys.exc_info()[1]
    outer = session.begin_forward(args, kwargs)
    num_graph_calls = session.num_graph_calls
    has_siblings = siblings.open()
    try:
        call = session.eager.begin(session.is_shared)
    except BaseException:
        if has_siblings:
            siblings.close()
        session.end_forward(outer, raised=True)
        raise

    def end() -> None:
        raised = sys.exc_info()[1] is not handled
        try:
            new = session.eager.end(call)
        finally:
            if has_siblings:
                siblings.close()
            session.end_forward(outer, raised=raised)
        if not raised:
            after_call(session, num_graph_calls, new)

    return end


# -- modules of torch beside compiled ones: NOTE [a frame for torch's modules]

_lock = threading.Lock()
_num_compiled = 0


def note_compiled() -> None:
    """Count a module that was compiled, perhaps one within a compiled model that has run."""
    global _num_compiled
    _num_compiled += 1


class Siblings:
    """The modules of torch beside those compiled on their own, within a compiled one. Invariant: holds none strongly."""

    def __init__(self, compiled: object):
        """compiled: the outer module; a function has no modules."""
        self._outer: Callable[[], nn.Module | None] = weakref.ref(compiled) if isinstance(compiled, nn.Module) else lambda: None
        self._found: tuple[weakref.ref[nn.Module], ...] = ()
        self._known = -1
        self._num_calls = 0

    @property
    def are_none(self) -> bool:
        """True if there is none, as far as all is known that was compiled."""
        return self._known == _num_compiled and not self._found

    def open(self) -> bool:
        """Begin a call of the outer module. Returns whether `close` is to be called at its end."""
        if self.are_none:
            return False
        with _lock:
            self._num_calls += 1
            if self._num_calls > 1:
                return True
            if self._known != _num_compiled:
                self._known = _num_compiled
                outer = self._outer()
                self._found = () if outer is None else tuple(map(weakref.ref, _siblings(outer)))
            for module in filter(None, (ref() for ref in self._found)):
                if module.__dict__.get(CALL) is None:
                    setattr(module, CALL, framed(module, module._call_impl))
        return True

    def close(self) -> None:
        """End a call of the outer module."""
        with _lock:
            self._num_calls -= 1
            if not self._num_calls:
                for module in filter(None, (ref() for ref in self._found)):
                    call = module.__dict__.get(CALL)
                    if isinstance(call, types.FunctionType) and call.__module__ == __name__:  # a frame of ours
                        delattr(module, CALL)


def _siblings(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of torch beside compiled ones below `module`, whose call is about to begin."""
    children = list(module.children())
    if not any(map(_holds_compiled, children)):
        return
    for child in children:
        if is_compiled(child):
            continue
        if _holds_compiled(child):
            yield from _siblings(child)
        elif trace_rules.check(child.forward) and next(child.parameters(), None) is not None:
            yield child


def _holds_compiled(module: nn.Module) -> bool:
    return any(is_compiled(m) for m in module.modules())


def is_compiled(module: nn.Module) -> bool:
    """True for a module that is compiled on its own."""
    return isinstance(module, OptimizedModule) or module.__dict__.get(CALL) is not None


#: By the structure of modules: the code of the frame around them.
_codes: dict[str, types.CodeType] = {}


def framed(module: nn.Module, call: Callable[..., Any]) -> types.FunctionType:
    """A call of a module of torch in a frame that Dynamo traces. Modules that look alike share its code, and with it what
    Dynamo compiles; others have their own, and with it their own recompile limit and their own graph breaks."""

    def frame(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    own = cast(types.FunctionType, frame)
    code = _codes.setdefault(repr(module), own.__code__.replace(co_name=f"{FRAME}{type(module).__name__}_{len(_codes)}"))
    return types.FunctionType(code, own.__globals__, code.co_name, None, own.__closure__)
