"""Host time: of a compiled call over plain torch.compile's, and of a step boundary with 1000 tensors."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.common import Result, has_gpu, main, require
from fp8pass import fp8_compile, inspect
from lowering import update_scales
from tests.support.traffic import steady

_ROUNDS = 15
_CALL_BOUND_US, _BOUNDARY_BOUND_US = 20.0, 2000.0


def _microseconds(functions: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Per function the least of several means, taken in turns: a busy machine is busy for everyone."""
    best = dict.fromkeys(functions, float("inf"))
    for function in functions.values():
        for _ in range(10):
            function()
    for _ in range(_ROUNDS):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(repeat):
                function()
            best[name] = min(best[name], time.perf_counter() - start)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    return {name: 1e6 * seconds / repeat for name, seconds in best.items()}


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).to(device)


def _calls(device: torch.device, repeat: int, checks: list[str]) -> list[dict[str, Any]]:
    """What our wrapper costs: the rules keep all in high precision, so that everyone runs the same kernels."""
    model, x = _model(device), torch.randn(16, 16, device=device)
    plain = torch.compile(copy.deepcopy(model))
    name = "fp8_compile, all in high precision"
    ours = fp8_compile(copy.deepcopy(model), "delayed", rules={"*": None})
    with torch.no_grad():
        require(torch.equal(plain(x), ours(x)), f"{name}: equal to plain torch.compile", checks)
        times = _microseconds({"plain": lambda: plain(x), name: lambda: ours(x)}, repeat)
    extra = times[name] - times["plain"]
    return [
        {"what": "plain torch.compile, inference", "us": times["plain"], "over plain us": 0.0, "bound us": None},
        {"what": name, "us": times[name], "over plain us": extra, "bound us": _CALL_BOUND_US},
    ]


def _fp8_calls(device: torch.device, repeat: int, checks: list[str]) -> list[dict[str, Any]]:
    """With the FP8 operations' own dispatch and launches, which on the CPU are many small emulations."""
    model, x = _model(device), torch.randn(16, 16, device=device)
    compiled = {
        "plain": torch.compile(copy.deepcopy(model)),
        "current": fp8_compile(copy.deepcopy(model), "current", select="all"),
        "delayed": fp8_compile(copy.deepcopy(model), steady("delayed"), step="manual", select="all"),
        "delayed, a step boundary each call": fp8_compile(copy.deepcopy(model), steady("delayed"), select="all"),
    }
    times = _microseconds({n: (lambda f=f: f(x)) for n, f in compiled.items()}, max(1, repeat // 5))
    for name in list(compiled)[1:]:
        require(all(g.quantized for g in inspect(compiled[name]).gemms), f"{name}: every GEMM runs in FP8", checks)
    return [
        {"what": f"{n}, forward of a training step", "us": t, "over plain us": t - times["plain"], "bound us": None}
        for n, t in times.items()
    ]


def _boundary(device: torch.device, repeat: int, checks: list[str]) -> list[dict[str, Any]]:
    count, length = 1000, 1024
    functions = {}
    for algo in ("max", "most_recent"):
        history = torch.rand(length, count, device=device)
        scale = torch.ones(count, device=device)
        fp8_max = torch.full((count,), 448.0, device=device)

        def boundary(algo: str = algo, history=history, scale=scale, fp8_max=fp8_max) -> None:
            history[0] = 1.0
            update_scales(history, scale, fp8_max, algo=algo)

        boundary()
        expected = torch.full_like(scale, 448.0) if algo == "most_recent" else fp8_max / history.amax(0)
        require(torch.equal(scale, expected), f"boundary {algo}: scales are fp8_max / amax", checks)
        functions[f"step boundary, {count} tensors, history {length}, {algo}"] = boundary
    return [
        {"what": name, "us": t, "over plain us": None, "bound us": _BOUNDARY_BOUND_US}
        for name, t in _microseconds(functions, repeat).items()
    ]


def run(quick: bool) -> Result:
    """`quick`: few repetitions."""
    device = torch.device("cuda" if has_gpu() else "cpu")
    checks: list[str] = []
    repeat = 50 if quick else 500

    def rows() -> Iterator[dict[str, Any]]:
        yield from _calls(device, repeat, checks)
        yield from _fp8_calls(device, repeat, checks)
        yield from _boundary(device, max(5, repeat // 50), checks)

    return Result(rows(), "plain torch.compile", checks)


if __name__ == "__main__":
    main("overhead", run)
