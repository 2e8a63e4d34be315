"""The modules of a compiled model that run eagerly in its calls, so in high precision, with the reasons.

Dynamo compiles frames. It leaves one eager at the recompile limit, for a graph break where it cannot resume (in a loop, `try`
or `with`), and where code is kept from it; the rest of the model still runs compiled.

NOTE [watched modules] A module that multiplies, and that no graph of a call read, was either not called or ran eagerly. Only a
call tells: a hook on such modules, for as long as a call of the compiled model lasts. In the first call, and wherever Dynamo
traces, all are watched; later those that no graph of the call before read, in the first calls of a kind and then ever more
seldom. There are no hooks while Dynamo traces, in any thread, so no graph has them, and its guards ignore hooks on a module
that had none.

NOTE [at the limit] A frame that reaches its recompile limit goes eager without a call of Dynamo's. Where its counter has moved
in a call, modules ran eagerly in it whose graphs all belong to a frame at the limit of which no graph ran.

NOTE [attempts] Dynamo calls back before and after it traces a frame. An attempt in which our backend got no graph left the
frame eager; the reason is among those that Dynamo counted meanwhile. All of it is known per process, as Dynamo's own decisions
are.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from traceback import FrameSummary
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import DisableContext, OptimizedModule
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.utils import counters

from fp8pass.errors import Reason, ReasonKind
from fp8pass.graph.gemms import GraphInput
from fp8pass.graph.origin import joined
from fp8pass.inputs import in_backward, listen, untraced
from fp8pass.runtime.instances import ROOT, Placement, without_wrappers, wrapper_paths

try:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list as _compiled_for
except ImportError:  # a debugging function: without it no frame counts as being at its limit
    _compiled_for = None  # type: ignore[assignment]

_TORCH = os.path.dirname(str(torch.__file__)) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_WRAP = _OWN + os.path.join("runtime", "wrap.py")
#: The attribute of nn.Module with the result of `compile()`; `__call__` calls it, and copies and pickles leave it out.
CALL = "_compiled_call_impl"
_RESUMES = "torch_dynamo_resume_in_"
FRAME = "call_"  # With the class's name and a number, the name of a frame of ours around a module of torch's: `framed`.
_KINDS = ("graph_break", "unimplemented")
_CANNOT_RESUME = "step_unsupported"
"""Dynamo's word for an obstacle behind which it cannot resume; what it met is among those that it counted."""

_Key = tuple[str, str, int]  # File, name and first line: what code that Dynamo changed has in common with the original.

#: The setting with which torch.compile traces nn.LSTM and its like.
ALLOW_RNN = "torch._dynamo.config.allow_rnn = True before the first call makes torch.compile trace it"

#: So many calls of a kind are watched one after the other, and then those whose number is a power of two.
WATCHED_CALLS = 8
_MAX_KINDS = 256

#: Modules of torch that multiply by their Parameters. Dynamo traces their code only as a part of another frame.
_LINEARS = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
#: Calls in the forward of another module that has Parameters: it multiplies by them.
_PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "_grouped_mm", "grouped_mm"))

_breaks: dict[_Key, tuple[str, str]] = {}  # Frame -> where Dynamo ended a graph in it, or left it eager, and why.
_left_eager: set[_Key] = set()
_rests: dict[_Key, int] = {}  # Frame -> the line of its own behind which Dynamo could not resume, and left it eager.
_in_thread = threading.local()
_numbers = itertools.count()


def next_number() -> int:
    """The number of a new instance: unlike an identity, it is never used again."""
    return next(_numbers)


@dataclasses.dataclass(frozen=True)
class EagerRun:
    """A module that ran eagerly in a call of the compiled model."""

    reason: Reason
    is_expected: bool = False
    """True if no warning is due: the user keeps it from torch.compile, by `torch.compiler.disable`, or it is one of torch's
    recurrent modules, which torch.compile traces only with a setting."""
    m: int | str = "?"  # Rows of its input; "?", like n and k, where they are not known.
    n: int | str = "?"
    k: int | str = "?"
    is_gemm: bool = True  # False for a recurrent module, which has a kernel of its own.
    source: str = ""  # file:line of the user's code that called it.


Watched = tuple[str, "weakref.ref[nn.Module]"]  # A module, with its path in the user's model.


class EagerRuns:
    """The modules of one compiled model that ran eagerly. Invariant: holds no strong reference to the model."""

    def __init__(self, root: Callable[[], nn.Module | None]):
        self._root = root
        self.found: dict[str, EagerRun] = {}  # By the module's path, in the order in which they were found.
        self._reads: dict[int, tuple[frozenset[str], CodeType | None]] = {}
        """Number of an instance -> the modules whose Parameters its graph reads, and the frame that Dynamo traced."""
        self._missing: dict[frozenset[int], tuple[Watched, ...]] = {}  # Instances of a call -> the modules that none reads.
        self._num_calls: dict[frozenset[int], int] = {}  # The number of such calls that were followed by another one.
        self._last: frozenset[int] | None = None
        self._next: dict[frozenset[int], frozenset[int]] = {}
        """A kind of call -> the other kind that followed it last, as an evaluation follows a step of training."""
        self.is_settled = False
        """True if nothing is to be watched in the next call: the graphs of the last one read each module that multiplies, or it
        is known to run eagerly."""
        self._num_limits = num_limits_reached()

    def bind(self, number: int, inputs: Sequence[GraphInput], placement: Placement, code: CodeType | None) -> None:
        """Note that a graph was bound to a module instance."""
        owners = {placement.name_module(given.owner) for given in inputs if given.is_parameter and given.owner is not None}
        self._reads[number] = frozenset(owners), code

    def forget(self, number: int) -> None:
        """Forget an instance whose Parameters are gone."""
        self._reads.pop(number, None)

    def note(self, number: int) -> None:
        """Note that a graph runs for an instance."""
        call: Call | None = getattr(_in_thread, "call", None)
        if call is not None and call.runs is self:
            call.graphs |= {number}

    def begin(self, is_part: bool) -> Call | None:
        """Begin a call of the compiled model. is_part: whether it is known to reach only a part of the model. Returns None for
        a call within another one and for a recomputation, which are not watched."""
        outer: Call | None = getattr(_in_thread, "call", None)
        root = self._root()
        if root is None or in_backward() or (outer is not None and outer.runs is self):
            return None
        watched: Sequence[Watched] = ()
        if self._last is None:
            watched = self.candidates(root, is_part)
        elif not is_part:
            if missing := self._missing.get(self._last):
                count = self._num_calls[self._last] = self._num_calls.get(self._last, 0) + 1
                watched = missing if count <= WATCHED_CALLS or not count & (count - 1) else ()
            if following := self._of_the_next_kind(self._last):
                watched = list(dict((*watched, *following)).items())
        if watched and not _may_watch():
            return None
        _listen()
        call = _in_thread.call = Call(self, outer, is_part)
        if watched:
            call.watch(watched)
        return call

    def begin_settled(self) -> Call:
        """Begin an outermost call in which nothing is to be watched."""
        _listen()
        call: Call = Call(self, None, False)
        _in_thread.call = call
        return call

    def end_settled(self, call: Call) -> bool:
        """End a call in which nothing was to be watched; False if other graphs ran than in the last one: then call `end`."""
        _in_thread.call = None
        return bool(call.graphs) and call.graphs == self._last and not (call.fired or call._removals)

    def end(self, call: Call | None) -> list[str]:
        """End what `begin` returned. Returns the paths of the modules that are now known to run eagerly."""
        if call is None:
            return []
        call.unwatch()
        _in_thread.call = call.outer
        if call.graphs == self._last and not call.fired:
            return []
        root = self._root()
        if root is None or not _may_watch():
            return []
        read = self.read_by(call.graphs)
        found = {path: run for path, (run, is_eager) in call.fired.items() if is_eager(path in read)}
        key = call.graphs
        if key not in self._missing:
            if len(self._missing) >= _MAX_KINDS:
                self._missing.clear()
                self._num_calls.clear()
                self._next.clear()
            missing = tuple(held for held in self.candidates(root, call.is_part) if held[0] not in read)
            self._missing[key] = () if call.is_part else missing
            found = {**self._at_limit([path for path, _ in missing], call.graphs), **found}
        if self._last is not None and self._last != key:
            self._next[self._last] = key
        self._last = key
        new = [path for path in found if path not in self.found]
        self.found.update((path, found[path]) for path in new)
        if new:  # who is known is not watched any more
            left = {k: tuple(held for held in v if held[0] not in self.found) for k, v in self._missing.items()}
            self._missing = left
        self.is_settled = not self._missing[key] and not self._of_the_next_kind(key)
        return new

    def _of_the_next_kind(self, last: frozenset[int]) -> tuple[Watched, ...]:
        """The modules that no graph reads in the other kind of call that may follow one of this kind, in its first calls."""
        kind = self._next.get(last)
        return () if kind is None or self._num_calls.get(kind, 0) >= WATCHED_CALLS else self._missing.get(kind, ())

    def read_by(self, graphs: Iterable[int]) -> frozenset[str]:
        """The modules whose Parameters these instances read."""
        return frozenset[str]().union(*(self._reads[n][0] for n in graphs if n in self._reads))

    def candidates(self, root: nn.Module, is_part: bool) -> list[Watched]:
        """The modules that multiply, and are not known to run eagerly. Those that were compiled on their own are not a part of
        this model's graphs, unless calls reach only parts of it, as of blocks that share a session."""
        wrapped = wrapper_paths(root)
        found = []
        for path, module in _parts(root, follow_compiled=is_part):
            name = without_wrappers(path, wrapped) or ROOT
            if multiplies(module) and name not in self.found:
                found.append((name, weakref.ref(module)))
        return found

    def _at_limit(self, missing: Sequence[str], graphs: Iterable[int]) -> dict[str, EagerRun]:
        """The modules, of those that no graph of a call read, whose frames are at the limit: NOTE [at the limit]."""
        before, self._num_limits = self._num_limits, num_limits_reached()
        if before == self._num_limits:
            return {}
        ran = {self._reads[n][1] for n in graphs if n in self._reads}
        found = {}
        for path in missing:
            codes = {code for modules, code in self._reads.values() if path in modules}
            limited = [code for code in codes if code is not None and code not in ran and is_at_limit(code)]
            if limited and len(limited) == len(codes):
                found[path] = EagerRun(Reason(ReasonKind.EAGER, limit_reason(limited[0])))
        return found


class Call:
    """A call of a compiled model, while it lasts."""

    __slots__ = ("__weakref__", "_removals", "fired", "graphs", "is_part", "outer", "runs")

    def __init__(self, runs: EagerRuns, outer: Call | None, is_part: bool):
        self.runs = runs
        self.outer = outer  # The call of another compiled model that this one is within.
        self.is_part = is_part
        self.graphs: frozenset[int] = frozenset()  # The instances that ran.
        self.fired: dict[str, tuple[EagerRun, Callable[[bool], bool]]] = {}
        """The watched modules that were called, each with a function for the end of the call: (whether a graph of the call
        reads the module) -> whether it ran eagerly."""
        self._removals: list[Callable[[], object]] = []

    def watch(self, modules: Iterable[Watched]) -> None:
        """Look at the next call of each of these modules, until `unwatch`, unless Dynamo traces in another thread."""
        with _watching_lock:
            if not _num_traces:
                _watching.add(self)
                self._watch(modules)

    def _watch(self, modules: Iterable[Watched]) -> None:
        for path, reference in modules:
            module = reference()
            if module is None or path in self.fired:
                continue
            hook = _Hook(self, path)
            # Guards count the hooks of a module that has some of a kind.
            if not module._forward_pre_hooks:
                hook.remove = module.register_forward_pre_hook(hook).remove
            elif not module._forward_hooks:
                hook.remove = module.register_forward_hook(hook).remove
            elif CALL not in module.__dict__ and not any(path in read for read, _ in self.runs._reads.values()):
                # Graphs that read it would guard this attribute.
                module.__dict__[CALL] = _noted_call(hook, module)
                hook.remove = functools.partial(module.__dict__.pop, CALL, None)
            self._removals.append(hook.remove)

    def watch_again(self) -> None:
        """Watch, after Dynamo has traced a frame, whatever no graph has read so far: it may run eagerly. So may a linear of
        torch's that a graph has read, in another frame or in the rest of one."""
        root = self.runs._root()
        if root is not None:
            read = self.runs.read_by(self.graphs)
            found = ((path, reference, reference()) for path, reference in self.runs.candidates(root, self.is_part))
            self.watch(
                (path, reference) for path, reference, module in found if path not in read or isinstance(module, _LINEARS)
            )

    def unwatch(self) -> None:
        """Take all hooks off."""
        with _watching_lock:
            for remove in self._removals:
                remove()
            self._removals.clear()


class _Hook:
    """A forward hook of a watched module. It is removed at the first call, before the module's forward begins: Dynamo would
    trace the forward of a linear of torch's that has a hook, and not otherwise."""

    def __init__(self, call: Call, path: str):
        self._call = weakref.ref(call)
        self._path = path
        self.remove: Callable[[], object] = _nothing

    @torch._dynamo.disable
    def __call__(self, module: nn.Module, args: tuple[Any, ...], *_: Any) -> None:
        call = self._call()
        self.remove()
        if call is not None:
            _note_run(call, self._path, module, args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _get_nothing, ()


def _noted_call(hook: _Hook, module: nn.Module) -> Callable[..., Any]:
    """The call of a module that has hooks of both kinds, with a note before them. Dynamo traces past it, as past `__call__`."""

    @torch._dynamo.disable(recursive=False)
    def call(*args: Any, **kwargs: Any) -> Any:
        hook(module, args)
        return module._call_impl(*args, **kwargs)

    return call


def _nothing(*_: Any) -> None:
    """The hook of a module that was copied within a call."""


def _get_nothing() -> Callable[..., None]:
    return _nothing


def _note_run(call: Call, path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    detail, is_expected, source = why_eager()
    forward = getattr(module.forward, "__func__", module.forward)
    if getattr(forward, "_torchdynamo_disable", False):
        told = getattr(forward, "_torchdynamo_disable_msg", None)
        detail = f"torch.compiler.disable on {type(module).__name__}.forward" + (f": {told}" if told else "")
        is_expected = True
    if isinstance(module, nn.RNNBase) and not is_expected and not getattr(torch._dynamo.config, "allow_rnn", True):
        detail, is_expected = f"nn.{type(module).__name__} is not traced: {ALLOW_RNN}", True
    is_linear = isinstance(module, _LINEARS)
    weight = next((p for p in module._parameters.values() if p is not None and p.dim() > 1), None)
    first = args[0] if args else None
    m: int | str = "?"
    if is_linear and isinstance(first, torch.Tensor) and first.dim():
        m = first.numel() // max(first.shape[-1], 1)
    n, k = ("?", "?") if weight is None or not is_linear else weight.shape[-2:]
    code = getattr(forward, "__code__", None)
    is_own = is_linear and is_of_torch(code) and not (module._forward_pre_hooks or module._forward_hooks)

    def is_eager(is_read: bool) -> bool:
        """Dynamo compiles the frame of a user's module, and of a linear of torch's with hooks, unless it was left out."""
        if is_own or is_expected:
            return True
        if code is None:
            return False
        if is_read:
            return calls_any(code, _PRODUCTS, _last_compiled_line(code))
        return is_at_limit(code) or not num_compiled(code) or _key(code) in _left_eager

    is_gemm = not isinstance(module, (nn.RNNBase, nn.RNNCellBase))
    run = EagerRun(Reason(ReasonKind.EAGER, detail), is_expected, m, n, k, is_gemm, source)
    call.fired.setdefault(path, (run, is_eager))
    if isinstance(module, nn.MultiheadAttention):  # its forward multiplies by out_proj's weight without a call of out_proj
        n, k = module.out_proj.weight.shape
        inner = joined("" if path == ROOT else path, "out_proj")
        call.fired.setdefault(inner, (dataclasses.replace(run, n=n, k=k), is_eager))


def _calls() -> Iterator[Call]:
    """The calls of compiled models that this thread is in, the innermost first."""
    call: Call | None = getattr(_in_thread, "call", None)
    while call is not None:
        yield call
        call = call.outer


#: Calls of all threads that watch modules, and the number of traces that are under way: their hooks must not be in one.
_watching: weakref.WeakSet[Call] = weakref.WeakSet()
_num_traces = 0
_watching_lock = threading.RLock()


def _before_tracing(_: Any) -> None:
    global _num_traces
    with _watching_lock:
        _num_traces += 1
        for call in _watching:
            call.unwatch()
        _watching.clear()


def _after_tracing(_: Any) -> None:
    global _num_traces
    with _watching_lock:
        _num_traces = max(0, _num_traces - 1)
    for call in _calls():
        call.watch_again()


def _may_watch() -> bool:
    """True if a hook tells anything and changes nothing: where Dynamo's guards look at all hooks, it would compile anew."""
    config = torch._dynamo.config
    return bool(getattr(config, "skip_nnmodule_hook_guards", False)) and not config.disable and stance() == "default"


def _parts(
    module: nn.Module, follow_compiled: bool, path: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """A module and those below it, with their paths: each once."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, child in module._modules.items():
        if child is None or (_is_compiled(child) and not follow_compiled):
            continue
        yield from _parts(child, follow_compiled, joined(path, name), seen)


def _is_compiled(module: nn.Module) -> bool:
    if isinstance(module, OptimizedModule):
        return not isinstance(module.dynamo_ctx, DisableContext)
    call = module.__dict__.get(CALL)
    # Functions of ours are there for the time of a call: frames (NOTE [a frame for torch's modules] in wrap.py), and notes.
    is_temporary = isinstance(call, FunctionType) and call.__module__.startswith(f"{__package__}.")
    return call is not None and not is_temporary


def multiplies(module: nn.Module) -> bool:
    """True if a module multiplies by Parameters of its own: a linear of torch's, or one whose forward calls for a product."""
    if isinstance(module, _LINEARS):
        return True
    if not any(p is not None and p.dim() > 1 for p in module._parameters.values()):
        return False
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and calls_any(code, _PRODUCTS)


# -- what Dynamo made of Python frames: NOTE [attempts]


def _listen() -> None:
    """Have Dynamo call back around its traces of frames. `torch._dynamo.reset()` makes it forget that, and what is known."""
    global _num_traces
    if _start in callback_handler.start_callbacks:  # asked here, too, as this is called around every forward
        return
    if listen((_begin_attempt, _before_tracing), (_end_attempt, _after_tracing)):
        _breaks.clear()
        _left_eager.clear()
        _rests.clear()
        _num_traces = 0


def note_graph(code: CodeType | None, reason: GraphCompileReason | None) -> None:
    """Note that the backend got a graph of a frame. reason: why Dynamo ended it before its frame ends."""
    _in_thread.num_graphs = getattr(_in_thread, "num_graphs", 0) + 1
    if code is not None and reason is not None:
        text = _first_lines(reason.reason)
        if _CANNOT_RESUME in reason.reason and (met := _met_since(getattr(_in_thread, "before", (0, _counted()))[1])):
            text = _first_lines(met[-1])
            stops = "Dynamo compiled up to this line and cannot resume after the break, as in a `try`, `with` or loop"
            text = text if ALLOW_RNN in text else f"{text}; {stops}"
            if own := _own_lines(code, reason.user_stack):
                _rests[_key(code)] = own[-1].lineno or 0
        _breaks[_key(code)] = _place(code, reason.user_stack), text


def _begin_attempt(_: Any) -> None:
    _in_thread.before = (getattr(_in_thread, "num_graphs", 0), _counted())


_start = untraced(_begin_attempt)


def _end_attempt(_: Any) -> None:
    num_graphs, counted = getattr(_in_thread, "before", (0, dict[tuple[str, str], int]()))
    code = _traced_code()
    if code is None or getattr(_in_thread, "num_graphs", 0) != num_graphs:
        return
    if new := _met_since(counted):
        _left_eager.add(_key(code))
        _breaks[_key(code)] = _place(code, getattr(sys.exc_info()[1], "real_stack", None) or ()), _first_lines(new[0])


def _last_compiled_line(code: CodeType) -> int:
    """The line of a function behind which Dynamo left it eager, as it could not resume or left what it had resumed."""
    resumed = [key for key in _left_eager if key[1].startswith(_RESUMES)]
    found = [*_rests.items(), *((key, int(key[1].rpartition("_at_")[2]) - 1) for key in resumed)]
    last = max((line for _, line in dis.findlinestarts(code) if line), default=0)
    own = (code.co_filename, code.co_name)
    lines = [line for (file, name, _), line in found if (file, function_name(name)) == own]
    return min((line for line in lines if code.co_firstlineno <= line <= last), default=sys.maxsize)


def _met_since(before: Mapping[tuple[str, str], int]) -> list[str]:
    """The obstacles that Dynamo met since these were counted."""
    return [text for (kind, text), count in _counted().items() if count > before.get((kind, text), 0)]


def _counted() -> Mapping[tuple[str, str], int]:
    """The number of times that Dynamo met each obstacle in this process, by its kind and text, of which
    it may have counted one by both kinds."""
    return {(kind, text): count for kind in _KINDS for text, count in counters[kind].items()}


def _traced_code() -> CodeType | None:
    """The code of the frame that Dynamo is tracing in this thread: it tells its callbacks a number only."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_inner" and isinstance(code := frame.f_locals.get("code"), CodeType):
            return code
        frame = frame.f_back
    return None


def _first_lines(text: str) -> str:
    """Dynamo's sentence about an obstacle, without its advice."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    explanation = next((e.partition(":")[2].strip() for e in lines if e.startswith("Explanation:")), "")
    found = lines[0].removeprefix("Graph Break Reason:").strip() if lines else ""
    if found == _CANNOT_RESUME:
        found = "Dynamo cannot resume after a break in a `try`, `with` or loop, nor trace a raised exception"
    found = (f"{found}: {explanation}" if explanation else found).rstrip(".")
    return f"{found}; {ALLOW_RNN}" if "RNN, GRU" in found else found


def _key(code: CodeType) -> _Key:
    return code.co_filename, code.co_name, code.co_firstlineno


def named(code: CodeType) -> str:
    """A function with its first line."""
    return _at(code.co_name, code.co_filename, code.co_firstlineno)


def _at(function: str, file: str, line: int | None) -> str:
    if file == _WRAP and function.startswith(FRAME):
        return f"the forward of {function.removeprefix(FRAME).rpartition('_')[0]}"
    return f"{function_name(function)} ({os.path.basename(file)}:{line})"


def function_name(name: str) -> str:
    """The name of a function; of one that Dynamo made of the rest of a function behind a graph break, the latter's."""
    return name.removeprefix(_RESUMES).rpartition("_at_")[0] if name.startswith(_RESUMES) else name


def _place(code: CodeType, stack: Iterable[FrameSummary]) -> str:
    """A function with the line that broke its graph and, if that line is in a function it calls, the latter. stack: the user's
    code where Dynamo stopped, the innermost function last."""
    users = [at for at in stack if not at.filename.startswith((_TORCH, _OWN))]
    own = _own_lines(code, users)
    place = named(code) if not own else _at(code.co_name, code.co_filename, own[-1].lineno)
    if users and users[-1] not in own:
        place += f", in {_at(users[-1].name, users[-1].filename, users[-1].lineno)}"
    return place


def _own_lines(code: CodeType, stack: Iterable[FrameSummary]) -> list[FrameSummary]:
    """The entries of a stack that are of this function."""
    return [at for at in stack if (at.filename, function_name(at.name)) == (code.co_filename, function_name(code.co_name))]


# -- the recompile limit


def num_compiled(code: CodeType) -> int:
    """The number of kinds of inputs that Dynamo compiled a frame for."""
    return 0 if _compiled_for is None else len(_compiled_for(code))


def is_at_limit(code: CodeType) -> bool:
    """True if Dynamo compiles a frame no more."""
    return num_compiled(code) >= min(torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit)


def num_limits_reached() -> int:
    """The number of times that a frame needed to be compiled beyond its limit in this process."""
    return sum(count for text, count in counters["unimplemented"].items() if "limit exceeded" in text[:80])


def limit_reason(code: CodeType) -> str:
    """Why a frame runs eagerly that has reached its limit."""
    return (
        f"recompile limit: torch.compile compiled {named(code)} {num_compiled(code)} times and runs it eagerly for all other"
        f" inputs. TORCH_LOGS=recompiles shows why; compile with dynamic=True, or raise torch._dynamo.config.recompile_limit"
    )


# -- why a frame runs eagerly


def left_eager(code: CodeType) -> str | None:
    """Dynamo's reason why it left a frame eager; None if it did not."""
    key = _key(code)
    return "graph break: Dynamo left {} eager: {}".format(*_breaks[key]) if key in _left_eager else None


def why_eager() -> tuple[str, bool, str]:
    """Why the caller runs eagerly within a compiled model, if the user means it to, and "file:line" of the user's code. What a
    frame at its limit or behind `torch.compiler.disable` calls is eager for that, whatever Dynamo met there in other calls."""
    innermost: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    reason = ""
    while frame is not None and not _begins_call(frame):
        code = frame.f_code
        if (meant := _disabled(frame)) is not None:
            return meant, True, _line(innermost)
        if not code.co_filename.startswith((_TORCH, _OWN)):
            innermost = innermost or frame
            name, owner = frame.f_code.co_name, frame.f_locals.get("self")
            held = frame.f_globals.get(name) if owner is None else getattr(type(owner), name, None)
            is_disabled = getattr(held, "__code__", None) is frame.f_code and bool(getattr(held, "_torchdynamo_disable", False))
            if is_disabled and not reason:
                return f"torch.compiler.disable(recursive=False) on {named(code)}", True, _line(innermost)
            if is_at_limit(code):
                return limit_reason(code), False, _line(innermost)
            if not reason and _key(code) in _breaks:
                reason = left_eager(code) or "graph break: in {}: {}".format(*_breaks[_key(code)])
        frame = frame.f_back
    if reason:
        return reason, False, _line(innermost)
    place = "code that Dynamo does not trace" if innermost is None else named(innermost.f_code)
    return f"graph break: Dynamo left {place} eager (TORCH_LOGS=graph_breaks shows details)", False, _line(innermost)


def _begins_call(frame: FrameType) -> bool:
    """True if a compiled model was called here: by our wrapper, or by torch.compile's."""
    code = frame.f_code
    return (code.co_filename == _WRAP and code.co_name == "forward") or code.co_name == "compile_wrapper"


def _line(frame: FrameType | None) -> str:
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _disabled(frame: FrameType) -> str | None:
    """A reason, if the frame is the wrapper of a user's `torch.compiler.disable`; torch's own uses are not meant."""
    if frame.f_code.co_name != "_fn" or frame.f_globals.get("__name__") != DisableContext.__module__:
        return None
    context, function = frame.f_locals.get("self"), frame.f_locals.get("fn")
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if not isinstance(context, DisableContext) or code is None:
        return None
    if code.co_filename.startswith((_TORCH, _OWN)) and not isinstance(getattr(function, "__self__", None), torch.nn.Module):
        return None
    reason = getattr(context, "msg", None)
    what = named(code) if not is_of_torch(code) else f"a {type(function.__self__).__name__}"  # type: ignore[union-attr]
    return f"torch.compiler.disable on {what}" + (f": {reason}" if reason else "")


# -- code


def is_of_torch(code: CodeType | None) -> bool:
    """True for torch's own functions."""
    return code is not None and code.co_filename.startswith(_TORCH)


@functools.lru_cache(maxsize=4096)
def calls_any(code: CodeType, names: frozenset[str], after: int = 0) -> bool:
    """True if a function uses one of these names, or `@`, in a line after this one."""
    lines = dict(dis.findlinestarts(code))
    line = 0
    for i in dis.get_instructions(code):
        line = lines.get(i.offset) or line
        is_product = i.opname == "BINARY_MATRIX_MULTIPLY" or i.argrepr in ("@", "@=")
        if line > after and (is_product or (i.opcode in dis.hasname and i.argval in names)):
            return True
    return False


def may_compile() -> bool:
    """False if torch.compile is set to run everything eagerly."""
    return not torch._dynamo.config.disable and stance() != "force_eager"


def stance() -> str:
    """The stance that `torch.compiler.set_stance` has set."""
    return str(getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", "default"))
