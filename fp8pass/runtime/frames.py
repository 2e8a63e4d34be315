"""What Dynamo made of Python frames, as far as it tells: which it left eager, and why.

Dynamo calls back before and after it traces a frame. An attempt in which our backend got no graph left the frame eager; the
reason is among those that Dynamo counted meanwhile. All of it is known per process, as Dynamo's own decisions are.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import DisableContext
from torch._dynamo.utils import counters

try:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list as _compiled_for
except ImportError:  # a debugging function: without it no frame counts as being at its limit
    _compiled_for = None  # type: ignore[assignment]

_TORCH = os.path.dirname(str(torch.__file__)) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_ATTACH = _OWN + os.path.join("runtime", "attach.py")
_RESUMES = "torch_dynamo_resume_in_"
_KINDS = ("graph_break", "unimplemented")

_Key = tuple[str, str, int]
"""File, name and first line: what code that Dynamo changed has in common with the original."""

#: What makes torch.compile trace nn.LSTM and its like.
ALLOW_RNN = "torch._dynamo.config.allow_rnn = True before the first call makes torch.compile trace it"

_breaks: dict[_Key, str] = {}
"""Of frames: why Dynamo ended a graph in them, or left them eager."""
_left_eager: set[_Key] = set()
_in_thread = threading.local()


def listen(before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
    """Have functions called before Dynamo traces a frame, and after. `torch._dynamo.reset()` makes Dynamo forget them, and what
    is known here with them."""
    handler = callback_handler
    if before not in handler.start_callbacks:
        _breaks.clear()
        _left_eager.clear()
        for start in (_begin_attempt, before):
            handler.register_start_callback(start)
        for end in (_end_attempt, after):
            handler.register_end_callback(end)


def note_graph(code: CodeType | None, reason: str | None) -> None:
    """The backend got a graph of a frame. reason: why Dynamo ended it before its frame ends."""
    _in_thread.num_graphs = getattr(_in_thread, "num_graphs", 0) + 1
    if code is not None and reason is not None:
        _breaks[_key(code)] = _first_lines(reason)


def _begin_attempt(_: Any) -> None:
    _in_thread.before = (getattr(_in_thread, "num_graphs", 0), _counted())


def _end_attempt(_: Any) -> None:
    num_graphs, counted = getattr(_in_thread, "before", (0, dict[str, int]()))
    code = _traced_code()
    if code is None or getattr(_in_thread, "num_graphs", 0) != num_graphs:
        return
    new = [text for text, count in _counted().items() if count > counted.get(text, 0)]
    if new:
        _left_eager.add(_key(code))
        _breaks[_key(code)] = _first_lines(new[0])


def _counted() -> Mapping[str, int]:
    """How often Dynamo met each obstacle in this process."""
    return {text: count for kind in _KINDS for text, count in counters[kind].items()}


def _traced_code() -> CodeType | None:
    """That of the frame which Dynamo is tracing in this thread: it tells its callbacks a number only."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_inner" and isinstance(code := frame.f_locals.get("code"), CodeType):
            return code
        frame = frame.f_back
    return None


def _first_lines(text: str) -> str:
    """The sentence of Dynamo's that says what it met, without its advice."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    explanation = next((e.partition(":")[2].strip() for e in lines if e.startswith("Explanation:")), "")
    found = lines[0].removeprefix("Graph Break Reason:").strip() if lines else ""
    if found == "step_unsupported":  # Dynamo's word for a break in a block that it cannot resume in
        found = "Dynamo cannot resume behind a break in a `try`, `with` or loop, nor trace a raised exception"
    found = (f"{found}: {explanation}" if explanation else found).rstrip(".")
    return f"{found}; {ALLOW_RNN}" if "RNN, GRU" in found else found


def _key(code: CodeType) -> _Key:
    return code.co_filename, code.co_name, code.co_firstlineno


def named(code: CodeType) -> str:
    """A function with its place; that of which Dynamo made the rest of one is the one."""
    name = code.co_name
    if name.startswith(_RESUMES):
        name = name.removeprefix(_RESUMES).partition("_at_")[0]
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


# -- the recompile limit


def num_compiled(code: CodeType) -> int:
    """For how many kinds of inputs Dynamo compiled a frame."""
    return 0 if _compiled_for is None else len(_compiled_for(code))


def is_at_limit(code: CodeType) -> bool:
    """Whether Dynamo compiles a frame no more."""
    return num_compiled(code) >= min(torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit)


def num_limits_reached() -> int:
    """How often a frame needed to be compiled beyond its limit in this process."""
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
    return f"graph break: Dynamo left {named(code)} eager: {_breaks[key]}" if key in _left_eager else None


def why_eager() -> tuple[str, bool, str]:
    """Why the code that calls this runs eagerly within a compiled model, whether the user means it to, and "file:line" of the
    user's code."""
    innermost: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _begins_call(frame):
        code = frame.f_code
        if (meant := _disabled(frame)) is not None:
            return meant, True, _line(innermost)
        if not code.co_filename.startswith((_TORCH, _OWN)):
            innermost = innermost or frame
            if _is_marked(frame):
                return f"torch.compiler.disable(recursive=False) on {named(code)}", True, _line(innermost)
            if (left := left_eager(code)) is not None:
                return left, False, _line(innermost)
            if is_at_limit(code):
                return limit_reason(code), False, _line(innermost)
            if _key(code) in _breaks:
                return f"graph break: in {named(code)}: {_breaks[_key(code)]}", False, _line(innermost)
        frame = frame.f_back
    place = "code that Dynamo does not trace" if innermost is None else named(innermost.f_code)
    return f"graph break: Dynamo left {place} eager (TORCH_LOGS=graph_breaks says more)", False, _line(innermost)


def _begins_call(frame: FrameType) -> bool:
    """Whether a compiled model was called here: by our wrapper, or by torch.compile's."""
    return frame.f_code.co_filename == _ATTACH or frame.f_code.co_name == "compile_wrapper"


def _line(frame: FrameType | None) -> str:
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _disabled(frame: FrameType) -> str | None:
    """What a user kept from Dynamo, if the frame is the wrapper of `torch.compiler.disable`; torch's own uses are not meant."""
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


def _is_marked(frame: FrameType) -> bool:
    """Whether the function of a frame has the mark of `torch.compiler.disable(recursive=False)`."""
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    held = frame.f_globals.get(name) if owner is None else getattr(type(owner), name, None)
    return getattr(held, "__code__", None) is frame.f_code and bool(getattr(held, "_torchdynamo_disable", False))


# -- code


def is_of_torch(code: CodeType | None) -> bool:
    """Whether a function is one of torch's own."""
    return code is not None and code.co_filename.startswith(_TORCH)


@functools.lru_cache(maxsize=4096)
def calls_any(code: CodeType, names: frozenset[str]) -> bool:
    """Whether a function uses one of these names, or `@`."""
    return bool(names & set(code.co_names)) or any(
        i.opname == "BINARY_MATRIX_MULTIPLY" or i.argrepr in ("@", "@=") for i in dis.get_instructions(code)
    )


def may_compile() -> bool:
    """Whether torch.compile is not told to run everything eagerly."""
    return not torch._dynamo.config.disable and stance() != "force_eager"


def stance() -> str:
    """That of `torch.compiler.set_stance`."""
    return str(getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", "default"))
