"""A compiled module within a compiled module: the modules beside it are compiled, too, wherever the call stands.

The call of the inner module is a graph break. In a loop over modules, such as that of nn.Sequential, Dynamo cannot resume: it
leaves the loop eager and compiles what the loop calls, function by function. It skips the functions of torch, so an nn.Linear
in that loop would run in high precision. NOTE [a frame for torch's modules] For as long as a call of the outer module lasts,
those modules of torch are called through a frame of ours, which Dynamo compiles if it left the loop eager; if it did not, it
traces their `forward` and never sees that frame.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import OptimizedModule

#: Where nn.Module keeps what `compile()` made; `__call__` calls it, and copies and pickles leave it out.
CALL = "_compiled_call_impl"

_lock = threading.Lock()
_num_compiled = 0


def note_compiled() -> None:
    """A module was compiled, perhaps one within a compiled model that has run."""
    global _num_compiled
    _num_compiled += 1


class Siblings:
    """The modules of torch beside those that are compiled on their own, within a compiled module. Invariant: holds no strong
    reference to any."""

    def __init__(self, compiled: object):
        """compiled: the outer module; a function has no modules."""
        self._outer: Callable[[], nn.Module | None] = weakref.ref(compiled) if isinstance(compiled, nn.Module) else _none
        self._found: tuple[weakref.ref[nn.Module], ...] = ()
        self._known = -1
        self._num_calls = 0

    def open(self) -> bool:
        """A call of the outer module begins. Returns whether `close` is to be called at its end."""
        if self._known == _num_compiled and not self._found:
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
        """It has ended."""
        with _lock:
            self._num_calls -= 1
            if not self._num_calls:
                for module in filter(None, (ref() for ref in self._found)):
                    if getattr(module.__dict__.get(CALL), "__module__", None) == __name__:  # a frame of ours
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
    """Whether a module is compiled on its own."""
    return isinstance(module, OptimizedModule) or module.__dict__.get(CALL) is not None


def _none() -> None:
    """The module of a compiled function."""


#: By the structure of modules: the code of the frame around them.
_codes: dict[str, types.CodeType] = {}


def framed(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a module of torch in a frame that Dynamo traces. Modules that look alike share its code, and with it what
    Dynamo compiles; others have their own, and with it their own recompile limit and their own graph breaks."""

    def frame(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    own = cast(types.FunctionType, frame)
    code = _codes.setdefault(repr(module), own.__code__.replace(co_name=f"call_{type(module).__name__}_{len(_codes)}"))
    return types.FunctionType(code, own.__globals__, code.co_name, None, own.__closure__)
