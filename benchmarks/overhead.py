"""Host time: of a compiled call over plain torch.compile's, by the number of Parameters, of deciding a GEMM, and of a step
boundary, with 1000 tensors and by the number of blocks that are compiled one by one."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.common import has_gpu, main
from benchmarks.contestants import steady
from benchmarks.isolation import Bench, Row
from fp8pass import fp8_compile, inspect, state
from fp8pass.api import parts_of
from fp8pass.runtime.session import Session, end_steps
from lowering import gemm as dense_gemm
from lowering import update_scales
from lowering.blockwise import gemm
from lowering.grouped import gemm as grouped_gemm
from lowering.hardware import triton_available
from lowering.mxfp8 import gemm as mx_gemm
from lowering.mxfp8 import reference as mx

_ROUNDS = 15
#: Goals that this project has set itself. Over plain torch.compile: of a call in inference without FP8 operations, with state
#: of delayed scaling and with many Parameters, and of a forward of training with its backward. The last: of a step boundary.
CALL_GOAL_US, _STATE_GOAL_US, _MANY_GOAL_US, _TRAINING_GOAL_US, _BOUNDARY_GOAL_US = 8.0, 15.0, 25.0, 40.0, 2000.0
_MANY = 1000
_NUM_BLOCKS = (1, 16, 64)
#: Of deciding a GEMM, over torch's per-tensor one.
_DECISION_GOAL_US = 5.0
_NOTHING = "nothing"


def _microseconds(functions: Mapping[str, Callable[[], Any]], repeat: int, bench: Bench) -> dict[str, float]:
    """Per function the least of several means, taken in turns: a busy machine is busy for everyone. None of one that raises."""
    left = dict(functions)

    def seconds(function: Callable[[], Any], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return time.perf_counter() - start

    best = dict.fromkeys(functions, float("inf"))
    for calls in (10, *([repeat] * _ROUNDS)):
        for name in list(left):
            found = bench(name, seconds, left[name], calls)
            if found is None:
                del left[name]
            elif calls == repeat:
                best[name] = min(best[name], found)
    return {name: 1e6 * best[name] / repeat for name in left}


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).to(device)


def _compared(
    functions: Mapping[str, Callable[[], Any]], repeat: int, bench: Bench, goals: Mapping[str, float], plain: str = ""
) -> Iterator[Row]:
    """A row per function, beside that named `plain`."""
    times = _microseconds(functions, repeat, bench)
    for name, us in times.items():
        extra, goal = us - times[plain] if plain in times else None, goals.get(name)
        meets = None if goal is None else "yes" if (us if extra is None else extra) <= goal else "no"
        yield {"what": name, "us": us, "over plain us": extra, "goal us": goal, "meets it": meets}


class _Many(nn.Module):
    """A linear, and Parameters that are added to its result."""

    def __init__(self, count: int):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.others = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.cat(list(self.others)).sum()


class _Nothing(torch.autograd.Function):
    """An operation that computes nothing, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        return None, None


def _empty(*args: Any) -> tuple[torch.Tensor]:
    """A graph without operations, with the inputs of a compiled one."""
    x, parameter = (next(a for a in args if isinstance(a, nn.Parameter) == wanted) for wanted in (False, True))
    return (_Nothing.apply(x, parameter) if torch.is_grad_enabled() else x,)


def _emptied(compiled: Any) -> Any:
    """A compiled model that has run, whose graphs compute nothing from now on."""
    for part in parts_of(compiled):
        for graph in part.session.every_graph:
            graph.function = _empty
    return compiled


def _calls(device: torch.device, repeat: int, bench: Bench) -> Iterator[Row]:
    """The wrapper alone: the rules keep all in high precision, so that everyone runs the same kernels."""
    model, x = _model(device), torch.randn(16, 16, device=device)
    plain, ours = torch.compile(copy.deepcopy(model)), fp8_compile(copy.deepcopy(model), "delayed", rules={"*": None})
    beside, name = "plain torch.compile, inference", "fp8_compile, all in high precision"
    functions: dict[str, Callable[[], Any]] = {beside: lambda: plain(x)}
    with torch.no_grad():
        if bench(name, lambda: bench.require(torch.equal(plain(x), ours(x)), f"{name}: equal to plain torch.compile")):
            functions[name] = lambda: ours(x)
        yield from _compared(functions, repeat, bench, {name: CALL_GOAL_US}, beside)


def _empty_calls(
    what: str, model: nn.Module, options: dict[str, Any], goals: dict[str, float], x: torch.Tensor, repeat: int, bench: Bench
) -> Iterator[Row]:
    """The host time of calls, with an empty graph in the place of each compiled one. goals: by recipe."""
    trains = what.startswith("forward")

    def ready(recipe: str) -> Any:
        given = fp8_compile(copy.deepcopy(model), recipe, backend="aot_eager", select="all", **options)
        for _ in range(3):
            given(x).sum().backward()
        state(given).step()
        with torch.set_grad_enabled(trains):
            for _ in range(3):
                given(x)
        return _emptied(given)

    def call(model: Any) -> None:
        with torch.set_grad_enabled(trains):
            out = model(x)
        if trains:
            out.sum().backward()

    plain = f"plain torch.compile, {what}, empty graph"
    functions = {plain: functools.partial(call, torch.compile(copy.deepcopy(model), backend=lambda graph, examples: _empty))}
    for recipe in goals:
        name = f"{recipe}, {what}, empty graph"
        given = bench(name, ready, recipe)
        if given is not None:
            functions[name] = functools.partial(call, given)
    yield from _compared(functions, repeat, bench, {f"{r}, {what}, empty graph": goal for r, goal in goals.items()}, plain)


def _block_boundaries(device: torch.device, repeat: int, bench: Bench) -> Iterator[Row]:
    """The step boundary of blocks that are compiled one by one: together, and one after the other."""
    for count in _NUM_BLOCKS:
        blocks = nn.ModuleList(_model(device) for _ in range(count))
        for block in blocks:
            fp8_compile(block, "delayed", backend="aot_eager", select="all", in_place=True)
        for _ in range(3):
            x = torch.randn(16, 16, device=device)
            for block in blocks:
                x = block(x)
            x.sum().backward()
        sessions = [part.session for part in parts_of(blocks)]

        def one_by_one(sessions: list[Session] = sessions) -> None:
            for session in sessions:
                session.end_step()

        name = f"step boundary, {count} {'block' if count == 1 else 'blocks'}"
        functions = {f"{name}, one after the other": one_by_one, f"{name}, together": functools.partial(end_steps, sessions)}
        yield from _compared(functions, repeat, bench, {})


def _fp8_calls(device: torch.device, repeat: int, bench: Bench) -> Iterator[Row]:
    """With the FP8 operations' own dispatch and launches, which on the CPU are many small emulations."""
    model, x = _model(device), torch.randn(16, 16, device=device)
    compilers: dict[str, Callable[[nn.Module], Any]] = {
        "plain torch.compile": torch.compile,
        "current": lambda m: fp8_compile(m, "current", select="all"),
        "delayed": lambda m: fp8_compile(m, steady("delayed"), step="manual", select="all"),
        "delayed, a step boundary each call": lambda m: fp8_compile(m, steady("delayed"), select="all"),
    }
    functions: dict[str, Callable[[], Any]] = {}

    def ready(label: str, compile_model: Callable[[nn.Module], Any]) -> Callable[[], Any]:
        compiled = compile_model(copy.deepcopy(model))
        compiled(x)
        if not label.startswith("plain"):
            bench.require(all(g.quantized for g in inspect(compiled).gemms), f"{label}: every GEMM runs in FP8")
        return functools.partial(compiled, x)

    suffix = "forward of a training step"
    for label, compile_model in compilers.items():
        call = bench(f"{label}, {suffix}", ready, label, compile_model)
        if call is not None:
            functions[f"{label}, {suffix}"] = call
    yield from _compared(functions, max(1, repeat // 5), bench, {}, f"plain torch.compile, {suffix}")


def _decisions(device: torch.device, repeat: int, bench: Bench) -> Iterator[Row]:
    """Host time of the checks before GEMMs, which compute nothing here."""
    if not triton_available():
        return
    (a, b), (line_a, line_b) = _fp8(device, (16, 32), (32, 32)), (torch.ones(n, 1, device=device) for n in (16, 32))
    experts, bias = _fp8(device, (2, 32, 32))[0], torch.randn(32, device=device).bfloat16()
    lines, tiles = torch.ones(1, 16, device=device), torch.ones(1, 4, device=device)
    one, ends = torch.ones((), device=device), torch.tensor([8, 16], dtype=torch.int32, device=device)
    to_bf16 = {"out_dtype": torch.bfloat16}
    squares = {**to_bf16, "granularity_a": "block_1x128", "granularity_b": "block_128x128", "implementation": _NOTHING}
    rows, blocks = ({**to_bf16, "granularity_a": kind, "granularity_b": kind} for kind in ("row_wise", "block_1x32"))
    plain = "torch._scaled_mm, without a computation"

    def nothing(a: torch.Tensor, *operands: Any, **options: Any) -> torch.Tensor:
        return a

    with (
        mock.patch.object(torch, "_scaled_mm", nothing),
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.dict(gemm.IMPLEMENTATIONS, {_NOTHING: lambda given: nothing}),
        mock.patch.object(mx_gemm, "decided", return_value=nothing),
        mock.patch.object(mx, "check_scales"),
        mock.patch.object(dense_gemm, "runs_kernels", return_value=True),
        mock.patch.object(grouped_gemm, "decided", return_value=("", nothing)),
    ):
        functions = {
            plain: functools.partial(torch._scaled_mm, a, b.t(), one, one, **to_bf16),
            "per-tensor GEMM": functools.partial(dense_gemm.by_decision, a, b.t(), one, one, **to_bf16),
            "per-tensor GEMM with a bias": functools.partial(dense_gemm.by_decision, a, b.t(), one, one, bias, **to_bf16),
            "rowwise GEMM": functools.partial(dense_gemm.by_decision, a, b.t(), line_a, line_b, **rows, fast_accum=True),
            "blockwise GEMM": functools.partial(dense_gemm.by_decision, a, b.t(), lines, tiles, **squares),
            "MXFP8 GEMM": functools.partial(dense_gemm.by_decision, a, b.t(), line_a, line_b, **blocks),
            "grouped GEMM": functools.partial(grouped_gemm.scaled_grouped_mm, a, experts.mT, one, one, ends, **to_bf16),
        }
        functions = {name if name == plain else f"{name}, decision": each for name, each in functions.items()}
        bench.require(all(f().data_ptr() == a.data_ptr() for f in functions.values()), "decisions: nothing is computed")
        yield from _compared(functions, repeat, bench, dict.fromkeys(set(functions) - {plain}, _DECISION_GOAL_US), plain)


def _fp8(device: torch.device, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device).to(torch.float8_e4m3fn) for shape in shapes]


def _boundary(device: torch.device, repeat: int, bench: Bench) -> Iterator[Row]:
    count, length = 1000, 1024
    functions: dict[str, Callable[[], Any]] = {}

    def ready(algo: str) -> Callable[[], Any]:
        history = torch.rand(length, count, device=device)
        scale = torch.ones(count, device=device)
        fp8_max = torch.full((count,), 448.0, device=device)

        def boundary() -> None:
            history[0] = 1.0
            update_scales(history, scale, fp8_max, algo=algo)

        boundary()
        expected = torch.full_like(scale, 448.0) if algo == "most_recent" else fp8_max / history.amax(0)
        bench.require(torch.equal(scale, expected), f"boundary {algo}: scales are fp8_max / amax")
        return boundary

    for algo in ("max", "most_recent"):
        name = f"step boundary, {count} tensors, history {length}, {algo}"
        call = bench(name, ready, algo)
        if call is not None:
            functions[name] = call
    yield from _compared(functions, repeat, bench, dict.fromkeys(functions, _BOUNDARY_GOAL_US))


def run(bench: Bench) -> Iterator[Row]:
    """`quick`: few repetitions."""
    device = torch.device("cuda" if has_gpu() else "cpu")
    bench.baseline, repeat = "plain torch.compile", 50 if bench.quick else 500
    yield from _calls(device, repeat, bench)
    both, trained = (dict.fromkeys(("delayed", "current"), goal) for goal in (_STATE_GOAL_US, _TRAINING_GOAL_US))
    for what, model, options, goals in (
        ("inference", _model(device), {}, both),
        (f"inference, {_MANY} Parameters", _Many(_MANY).to(device), {"rules": {"*": None}}, {"delayed": _MANY_GOAL_US}),
        ("forward and backward", _model(device), {"step": "manual"}, trained),
    ):
        yield from _empty_calls(what, model, options, goals, torch.randn(16, 16, device=device), repeat, bench)
    yield from _fp8_calls(device, repeat, bench)
    yield from _decisions(device, repeat, bench)
    yield from _boundary(device, max(5, repeat // 50), bench)
    yield from _block_boundaries(device, max(3, repeat // 100), bench)


if __name__ == "__main__":
    main("overhead", run)
