"""How a compiled model carries its session: in a module of its own, in a function, or in the model itself (in place)."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import BackendCompilerFailed

from fp8pass.errors import Fp8Error, Fp8Warning, OptionError, UnsupportedCopyError, UnsupportedError
from fp8pass.notices import tell
from fp8pass.options import CompileOptions
from fp8pass.runtime.backend import Backend
from fp8pass.runtime.nested import CALL, Siblings, framed, note_compiled
from fp8pass.runtime.recompute import in_backward
from fp8pass.runtime.session import Session, session_in_this_thread
from fp8pass.runtime.warn import after_backward, after_call, tell_of_call, tell_of_modules

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
        refuse_export()
        return super().__call__(*args, **kwargs)

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
    """What a model that was compiled in place runs when it is called.

    It belongs to one model: a copy or a pickle of it is None, which leaves the copy of the model uncompiled.
    """

    def __init__(self, function: Callable[..., Any], session: Session):
        self._function = function
        self.session = session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_export()
        return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _nothing, ()


class ReplacedCall:
    """What `model.compile()` put in the place of an InPlaceCall: says at its first call that FP8 is gone."""

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
    """What a copied or pickled InPlaceCall becomes."""


def _compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """`compile` of a model that is compiled in place: as the class has it, which takes our place, and remembers that it has."""
    ours = self.__dict__.get(CALL)
    type(self).compile(self, *args, **kwargs)
    theirs = self.__dict__.get(CALL)
    if isinstance(ours, InPlaceCall) and theirs is not ours and callable(theirs):
        setattr(self, CALL, ReplacedCall(theirs, self, ours.session.strict))
        _restore(self)


_compile.__name__ = "compile"  # by which the bound method is pickled: that of the copy is the class's


def new_session(model: Any, options: CompileOptions, *, steps_at_graphs: bool = False) -> Session:
    """The session of a model that is about to be compiled. Raises OptionError where `fsdp_gather` cannot be."""
    if options.fsdp_gather is not None and (steps_at_graphs or not isinstance(model, nn.Module)):
        what = "torch.compile(backend='fp8pass')" if steps_at_graphs else f"a {type(model).__name__}"
        raise OptionError(
            f"fsdp_gather={options.fsdp_gather!r} is for an nn.Module that fp8_compile compiles, whose forwards it sees begin,"
            f" and not for {what}; use fp8_compile(model, ..., in_place=True) where fully_shard comes later"
        )
    return Session(model, options, steps_at_graphs, after_backward)


def compile_beside(model: Any, session: Session, **torch_options: Any) -> Any:
    """A compiled version of a model or function, which stays as it is."""
    compiled: Any = torch.compile(model, backend=Backend(session.options), **torch_options)
    if isinstance(model, nn.Module):
        compiled.__class__ = Fp8Module
        if trace_rules.check(model.forward):
            compiled.forward = compiled.dynamo_ctx(framed(model, model))
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
    if "forward" not in model.__dict__:
        # Dynamo calls the class's `forward` of a module that it traces, past `__call__` and so past us: a torch.compile around
        # this model would take it into its own graph, in high precision. It does not where the module has its own `forward`.
        model.__dict__["forward"] = types.MethodType(type(model).forward, model)
    compiled = torch.compile(call, backend=Backend(session.options), **torch_options)
    if "compile" not in model.__dict__:
        model.__dict__["compile"] = types.MethodType(_compile, model)
    setattr(model, CALL, InPlaceCall(_guarded(compiled, session, model), session))
    _in_place.add(model)
    note_compiled()


def undo_in_place(model: nn.Module) -> None:
    """The model runs eagerly again."""
    delattr(model, CALL)
    _restore(model)
    _in_place.discard(model)


def _restore(model: nn.Module) -> None:
    """Take our methods off a model."""
    for name, function in (("forward", type(model).forward), ("compile", _compile)):
        own = model.__dict__.get(name)
        if isinstance(own, types.MethodType) and own.__func__ is function:
            del model.__dict__[name]


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
    """Whether `fp8_compile(..., in_place=True)` compiled this model."""
    return isinstance(getattr(model, "__dict__", {}).get(CALL), InPlaceCall)


def is_called_in_place(model: nn.Module) -> bool:
    """Whether a call of this module runs something compiled that its `forward` does not."""
    return model.__dict__.get(CALL) is not None


def replaced(model: object) -> str | None:
    """What became of a model that was compiled in place and is not any more; None for every other object."""
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
        end = enter(session, siblings, args)
        try:
            return function(*args, **kwargs)
        except BackendCompilerFailed as failure:
            if isinstance(failure.inner_exception, Fp8Error):
                raise failure.inner_exception from None
            raise
        finally:
            end()

    return forward


def enter(session: Session, siblings: Siblings, args: tuple[Any, ...] = ()) -> Callable[[], None]:
    """Begin a forward, perhaps from one of torch.compile's own hooks; returns what ends it, whether it raised or not."""
    handled = sys.exc_info()[1]
    outer = session.begin_forward(args)
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
            _after_call(session, num_graph_calls, new)

    return end


def _after_call(session: Session, num_graph_calls: int, eager: Sequence[str]) -> None:
    """What a model says by itself. num_graph_calls: the session's count when the call began; eager: the modules that are now
    known to have run eagerly."""
    if torch.compiler.is_compiling():
        return
    if session.num_graph_calls != num_graph_calls:
        tell_of_modules(session, eager)
    elif not torch._dynamo.config.disable and (session.strict or not session.warned_of_eager_run):
        tell_of_call(session)
    if not in_backward():  # a recomputation
        after_call(session)
