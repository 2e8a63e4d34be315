"""CPU seconds to compile a training step of stacks of Llama blocks: cold (empty caches), and with `--restarts` warm (a second
process) and with torch's mega-cache on a machine without caches.

    python -m benchmarks.compile_time --restarts --blocks 4 24 64 --repeat 3

Rows are written after every measurement, so that a run may be interrupted. With `--restarts` the results keep the rows of
earlier runs, whose commands they name: a table can be filled in parts.

Stacks are measured in CPU time, with one compiler at a time and one thread, for threads that wait for each other take CPU time,
too: processes that share the machine cannot be taken for it."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.common import has_torchao, main
from benchmarks.contestants import RECIPES
from benchmarks.isolation import Bench, Row

#: Behind the name of a recipe: with `saved_activations`.
SAVED = " with saved_activations"
PAIRS = tuple(recipe + SAVED for recipe in RECIPES)
#: Per cold one, which takes twenty times as long: all contestants by turns, for machines scatter. The least counts. Of stacks
#: above 32 blocks three, whose seconds scatter less.
WARM_STARTS, _OF_LARGE = 8, 3
#: dim, ffn, tokens.
TINY = (256, 512, 64)

_SCRIPT = """
import gc, json, os, resource, sys, time
import torch
from torch import nn
import fp8pass.runtime.wrap  # as torch's own imports below
from benchmarks.compile_time import SAVED
from benchmarks.contestants import RECIPES, contestants
from benchmarks.models import LlamaBlock

device = "cuda" if torch.cuda.is_available() else "cpu"
name, layers, dim, ffn, tokens = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
model = nn.Sequential(*(LlamaBlock(dim, ffn, dim // 64) for _ in range(layers))).bfloat16().to(device)
x = torch.randn(1, tokens, dim, dtype=torch.bfloat16, device=device, requires_grad=True)
torch.compile(lambda x: x + 1)(x)  # what any compilation pays once: imports, the compiler's own start
torch._dynamo.reset()
gc.collect()
gc.freeze()  # else a third of a second of collecting torch's own modules falls to one contestant or another by chance
recipe, *saved = name.split(SAVED)
compile_model = contestants(RECIPES, saved_activations="fp8" if saved else None)[recipe]

def step(call):
    out = call(x)
    out.sum().backward()
    return bool(out.isfinite().all())  # waits for the device, too

def clocks():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(u.ru_utime + u.ru_stime for u in used)

artifacts = os.environ.get("ARTIFACTS")  # torch's mega-cache: read where the file is there, else written
times = [clocks()]
if artifacts and os.path.exists(artifacts):
    with open(artifacts, "rb") as file:
        torch.compiler.load_cache_artifacts(file.read())
compiled = compile_model(model)
for _ in range(2):
    finite = step(compiled)
    times.append(clocks())
first, second = ([b - a for a, b in zip(*pair)] for pair in zip(times, times[1:]))
if artifacts and not os.path.exists(artifacts):
    with open(artifacts, "wb") as file:
        file.write(torch.compiler.save_cache_artifacts()[0])
print(json.dumps({"seconds": first[0] - second[0], "cpu": first[1] - second[1], "finite": finite}))
"""


def _run(name: str, layers: int, cache: str, artifacts: str) -> dict[str, Any]:
    """One process with its caches in a folder, one compiler and one thread. artifacts: the mega-cache's file; "": none."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1", "ARTIFACTS": artifacts}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", _SCRIPT, name, *map(str, (layers, *TINY))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _stack(blocks: int, repeat: int, bench: Bench, recipes: Sequence[str], restarts: bool) -> Iterator[Row]:
    """So many blocks in seconds of CPU time, least of the repetitions, contestants by turns: with empty caches, and with
    `restarts` in a second process with the first one's caches, and with its mega-cache alone. Rows come after every
    measurement, with what is known by then."""
    names = ["bf16", *recipes, *(["torchao tensorwise"] if has_torchao() and restarts else [])]
    found: dict[str, dict[str, list[float]]] = {}

    def start(name: str, cache: str, artifacts: str = "") -> float:
        run = _run(name, blocks, cache, artifacts)
        bench.require(run["finite"], f"{blocks} blocks, {name}: output is finite")
        return float(run["cpu"])

    def measure(kind: str, name: str, folder: str) -> float:
        cache = os.path.join(folder, name.replace(" ", "_"))  # the compiler's command lines have it
        artifacts = f"{cache}.artifacts" if restarts else ""
        if kind == "cold":
            return start(name, cache, artifacts)
        if kind == "warm":
            return start(name, cache)
        with tempfile.TemporaryDirectory() as empty:
            return start(name, empty, artifacts)

    kinds = ["cold", *(["warm"] * (WARM_STARTS if blocks <= 32 else _OF_LARGE) + ["mega-cache"] if restarts else [])]
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            for kind, name in itertools.product(kinds, list(names)):
                if name not in names:
                    continue
                seconds = bench(f"{blocks} blocks {name}", measure, kind, name, folder)
                if seconds is None:
                    names.remove(name)
                    found.pop(name, None)
                    continue
                found.setdefault(name, {}).setdefault(kind, []).append(seconds)
                print(f"{blocks} blocks {name}: {kind} {seconds:.2f}", flush=True)
                yield from _rows(blocks, found)


def _rows(blocks: int, found: dict[str, dict[str, list[float]]]) -> Iterator[Row]:
    """A row per contestant, with ratios to plain torch.compile where that has been measured."""
    base = found.get("bf16")
    for name, times in found.items():
        row: Row = {"what": f"{blocks} blocks {name}"}
        row |= {f"{kind} CPU s": min(every) for kind, every in times.items()}
        if base is not None:
            row |= {f"{kind} / bf16": min(every) / min(base[kind]) for kind, every in times.items() if kind in base}
        row |= {f"median {kind} CPU s": statistics.median(every) for kind, every in times.items()}
        yield row


def run(
    bench: Bench, blocks: list[int] | None = None, repeat: int = 3, recipes: list[str] | None = None, restarts: bool = False
) -> Iterable[Row]:
    """`quick`: one repetition of two blocks."""
    repeat = 1 if bench.quick else repeat
    bench.baseline, bench.where, bench.keeps_rows = "bf16", "restarts-cpu" if restarts else bench.where, restarts
    bench.notes += [
        "forward and backward: the first step's time less the second's",
        f"stacks are of dim, ffn, tokens {TINY}, {repeat} repetitions",
    ]
    counts = blocks or ([2] if bench.quick else [4, 24, 64] if restarts else [8])
    return (row for count in counts for row in _stack(count, repeat, bench, recipes or RECIPES, restarts))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", nargs="+", type=int, help="blocks of each stack (default: 8; with --restarts 4 24 64)")
    parser.add_argument("--repeat", type=int, default=3, help="of each stack; the least counts (default: 3)")
    parser.add_argument("--recipes", nargs="+", choices=(*RECIPES, *PAIRS), help="default: all, without saved_activations")
    parser.add_argument("--restarts", action="store_true", help="also in a second process, and with the mega-cache")


if __name__ == "__main__":
    main("compile_time", run, _options)
