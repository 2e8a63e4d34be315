"""Seconds to compile a training step: a Llama block, cold (empty caches) and warm (a second process), and stacks of blocks.

Stacks are measured in CPU time, with one compiler at a time and one thread, for threads that wait for each other take CPU time,
too: processes that share the machine cannot be taken for it."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.common import Result, has_torchao, main, require
from benchmarks.peers import RECIPES

#: dim, ffn, tokens.
_BLOCK = (1024, 2816, 128)
TINY = (256, 512, 64)

_SCRIPT = """
import gc, json, resource, sys, time
import torch
from torch import nn
from benchmarks.peers import RECIPES, contestants
from tests.support.models import LlamaBlock

device = "cuda" if torch.cuda.is_available() else "cpu"
name, layers, dim, ffn, tokens = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
model = nn.Sequential(*(LlamaBlock(dim, ffn, dim // 64) for _ in range(layers))).bfloat16().to(device)
x = torch.randn(1, tokens, dim, dtype=torch.bfloat16, device=device, requires_grad=True)
torch.compile(lambda x: x + 1)(x)  # what any compilation pays once: imports, the compiler's own start
torch._dynamo.reset()
gc.collect()
gc.freeze()  # else a third of a second of collecting torch's own modules falls to one contestant or another by chance
compile_model = contestants(RECIPES)[name]

def step(call):
    out = call(x)
    out.sum().backward()
    return bool(out.isfinite().all())  # waits for the device, too

def clocks():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(u.ru_utime + u.ru_stime for u in used)

times = [clocks()]
compiled = compile_model(model)
for _ in range(2):
    finite = step(compiled)
    times.append(clocks())
first, second = ([b - a for a, b in zip(*pair)] for pair in zip(times, times[1:]))
print(json.dumps({"seconds": first[0] - second[0], "cpu": first[1] - second[1], "finite": finite}))
"""


def _run(name: str, layers: int, sizes: tuple[int, ...], cache: str, one_at_a_time: bool = False) -> dict:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    if one_at_a_time:
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _SCRIPT, name, *map(str, (layers, *sizes))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _block(quick: bool, sizes: tuple[int, ...], checks: list[str]) -> list[dict]:
    """One block, in seconds of a clock; least of the repetitions."""
    names = ["bf16", "delayed", "current"] + (["torchao tensorwise"] if has_torchao() else [])
    cold: dict[str, list[float]] = {n: [] for n in names}
    warm: dict[str, list[float]] = {n: [] for n in names}
    for _ in range(1 if quick else 3):
        for name in names:  # interleaved, so that a busy machine is busy for everyone
            with tempfile.TemporaryDirectory() as cache:
                for times in (cold, warm):
                    measured = _run(name, 1, sizes, cache)
                    times[name].append(measured["seconds"])
                    require(measured["finite"], f"block, {name}: output is finite", checks)
    rows = [
        {
            "what": f"block {n}",
            "cold s": min(cold[n]),
            "warm s": min(warm[n]),
            "median cold s": statistics.median(cold[n]),
        }
        for n in names
    ]
    for row in rows:
        row["cold / bf16"] = row["cold s"] / rows[0]["cold s"]
        row["warm / bf16"] = row["warm s"] / rows[0]["warm s"]
    return rows


def _stack(layers: int, sizes: tuple[int, ...], repetitions: int, checks: list[str]) -> Iterator[dict]:
    """So many blocks, cold, in seconds of CPU time, least of the repetitions; every recipe beside plain torch.compile."""
    names = ("bf16", *RECIPES)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repetitions):
        for name in names:  # interleaved: processes that share a core and its caches cost each other CPU time, too
            with tempfile.TemporaryDirectory() as cache:
                measured = _run(name, layers, sizes, cache, one_at_a_time=True)
            require(measured["finite"], f"{layers} layers, {name}: output is finite", checks)
            times[name].append(measured["cpu"])
    for name in names:
        least, median = min(times[name]), statistics.median(times[name])
        row = {"what": f"{layers} layers {name}", "cold CPU s": least, "median cold CPU s": median}
        yield row | {"CPU / bf16": least / min(times["bf16"]), "median CPU / bf16": median / statistics.median(times["bf16"])}


def run(quick: bool, layers: list[int] | None = None, repetitions: int = 3) -> Result:
    """`quick`: one repetition, a small block, two layers. `layers`: stacks of so many blocks alone.
    `repetitions`: of each stack."""
    checks: list[str] = []
    repetitions = 1 if quick else repetitions

    def rows() -> Iterator[dict]:
        if layers is None:
            yield from _block(quick, TINY if quick else _BLOCK, checks)
        for count in layers or ((2,) if quick else (8,)):
            yield from _stack(count, TINY, repetitions, checks)

    notes = ["forward and backward: the first step's time less the second's"]
    notes.append(f"layers are of dim, ffn, tokens {TINY}, {repetitions} repetitions")
    where = "" if layers is None else "layers-cpu"
    return Result(rows(), "bf16", checks, notes, where)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", nargs="+", type=int, help="only stacks of so many layers, without the block")
    parser.add_argument("--repetitions", type=int, default=3, help="of each stack (default: 3)")


if __name__ == "__main__":
    main("compile_time", run, _options)
