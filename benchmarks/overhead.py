"""Host time of a compiled call over plain torch.compile's, and of a step boundary: of 1000 tensors, and of 64 blocks that are
compiled one by one."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.common import has_gpu, main
from benchmarks.isolation import Bench, Row
from fp8pass import fp8_compile, state
from fp8pass.api import parts_of
from fp8pass.runtime.session import end_steps
from lowering import update_scales

_ROUNDS = 15
_NUM_BLOCKS = 64


def _compared(makers: Mapping[str, Callable[[], Any]], repeat: int, bench: Bench, plain: str = "") -> Iterator[Row]:
    """A row per function, beside that named `plain`: the least of several means, taken in turns, for a busy machine is busy for
    everyone. makers: what makes each function, outside of the clock."""
    made = {name: bench(name, make) for name, make in makers.items()}
    functions = {name: function for name, function in made.items() if function is not None}
    means: dict[str, list[float]] = {name: [] for name in functions}
    for calls in (10, *([repeat] * _ROUNDS)):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            means[name].append(1e6 * (time.perf_counter() - start) / calls)
    times = {name: min(every[1:]) for name, every in means.items()}
    for name, us in times.items():
        yield {"what": name, "us": us, "over plain us": us - times[plain] if plain in times else None}


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).to(device)


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


def _calls(device: torch.device, repeat: int, bench: Bench) -> Iterator[Row]:
    """The wrapper alone: the rules keep all in high precision, so that everyone runs the same kernels."""
    model, x = _model(device), torch.randn(16, 16, device=device)
    plain, ours = torch.compile(copy.deepcopy(model)), fp8_compile(copy.deepcopy(model), "delayed", rules={"*": None})
    beside, name = "plain torch.compile, inference", "fp8_compile, all in high precision"

    def checked() -> Callable[[], Any]:
        bench.require(torch.equal(plain(x), ours(x)), f"{name}: equal to plain torch.compile")
        return lambda: ours(x)

    with torch.no_grad():
        yield from _compared({beside: lambda: lambda: plain(x), name: checked}, repeat, bench, beside)


def _empty_calls(what: str, model: nn.Module, x: torch.Tensor, repeat: int, bench: Bench, **options: Any) -> Iterator[Row]:
    """The host time of calls, with an empty graph in the place of each compiled one."""
    trains = what.startswith("forward")

    def call(model: Any) -> None:
        with torch.set_grad_enabled(trains):
            out = model(x)
        if trains:
            out.sum().backward()

    def ready(recipe: str) -> Callable[[], Any]:
        given = fp8_compile(copy.deepcopy(model), recipe, backend="aot_eager", select="all", **options)
        for _ in range(3):
            given(x).sum().backward()
        state(given).step()
        with torch.set_grad_enabled(trains):
            for _ in range(3):
                given(x)
        for part in parts_of(given):
            for graph in part.session.every_graph:
                graph.function = _empty
        return functools.partial(call, given)

    plain = f"plain torch.compile, {what}, empty graph"
    compiled: Any = torch.compile(copy.deepcopy(model), backend=lambda graph, examples: _empty)
    makers: dict[str, Callable[[], Any]] = {plain: lambda: functools.partial(call, compiled)}
    makers |= {f"{recipe}, {what}, empty graph": functools.partial(ready, recipe) for recipe in ("delayed", "current")}
    yield from _compared(makers, repeat, bench, plain)


def _block_boundaries(device: torch.device, repeat: int, bench: Bench) -> Iterator[Row]:
    """The step boundary of blocks that are compiled one by one: together, and one after the other."""
    blocks = nn.ModuleList(_model(device) for _ in range(_NUM_BLOCKS))
    for block in blocks:
        fp8_compile(block, "delayed", backend="aot_eager", select="all", in_place=True)
    for _ in range(3):
        x = torch.randn(16, 16, device=device)
        for block in blocks:
            x = block(x)
        x.sum().backward()
    sessions = [part.session for part in parts_of(blocks)]
    name = f"step boundary, {_NUM_BLOCKS} blocks"
    makers: dict[str, Callable[[], Any]] = {
        f"{name}, one after the other": lambda: lambda: [session.end_step() for session in sessions],
        f"{name}, together": lambda: lambda: end_steps(sessions),
    }
    yield from _compared(makers, repeat, bench)


def _boundary(device: torch.device, repeat: int, bench: Bench) -> Iterator[Row]:
    """The step boundary of delayed scaling."""
    count, length = 1000, 1024

    def ready(algo: str) -> Callable[[], Any]:
        history, scale = torch.rand(length, count, device=device), torch.ones(count, device=device)
        fp8_max = torch.full((count,), 448.0, device=device)

        def boundary() -> None:
            history[0] = 1.0
            update_scales(history, scale, fp8_max, algo=algo)

        boundary()
        expected = torch.full_like(scale, 448.0) if algo == "most_recent" else fp8_max / history.amax(0)
        bench.require(torch.equal(scale, expected), f"boundary {algo}: scales are fp8_max / amax")
        return boundary

    name = f"step boundary, {count} tensors, history {length}"
    makers = {f"{name}, {algo}": functools.partial(ready, algo) for algo in ("max", "most_recent")}
    yield from _compared(makers, repeat, bench)


def run(bench: Bench) -> Iterator[Row]:
    """`quick`: few repetitions."""
    device = torch.device("cuda" if has_gpu() else "cpu")
    bench.baseline, repeat = "plain torch.compile", 50 if bench.quick else 500
    yield from _calls(device, repeat, bench)
    x = torch.randn(16, 16, device=device)
    yield from _empty_calls("inference", _model(device), x, repeat, bench)
    yield from _empty_calls("forward and backward", _model(device), x, repeat, bench, step="manual")
    yield from _boundary(device, max(5, repeat // 50), bench)
    yield from _block_boundaries(device, max(3, repeat // 100), bench)


if __name__ == "__main__":
    main("overhead", run)
