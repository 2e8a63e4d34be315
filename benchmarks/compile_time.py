"""Seconds to compile a training step: a Llama block, cold (empty caches) and warm (a second process), stacks of blocks, and
their restarts: warm, and with torch's mega-cache on a machine without caches.

Stacks are measured in CPU time, with one compiler at a time and one thread, for threads that wait for each other take CPU time,
too: processes that share the machine cannot be taken for it."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.common import has_torchao, main
from benchmarks.contestants import RECIPES
from benchmarks.isolation import Bench, Row

#: dim, ffn, tokens.
_BLOCK = (1024, 2816, 128)
TINY = (256, 512, 64)

_SCRIPT = """
import gc, json, os, resource, sys, time
import torch
from torch import nn
import fp8pass.runtime.wrap  # as torch's own imports below
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
compile_model = contestants(RECIPES)[name]

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


def _run(
    name: str, layers: int, sizes: tuple[int, ...], cache: str, one_at_a_time: bool = False, artifacts: str | None = None
) -> dict:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    if artifacts is not None:
        environment["ARTIFACTS"] = artifacts
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    if one_at_a_time:
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _SCRIPT, name, *map(str, (layers, *sizes))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _measured(
    kind: str, names: Iterable[str], repetitions: int, bench: Bench, measure: Callable[[str], dict[str, float]]
) -> dict[str, list[dict[str, float]]]:
    """The measurements of every contestant, one of each after the other, so that a busy machine is busy for everyone: processes
    that share a core and its caches cost each other CPU time, too. None of one that fails."""
    times: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(repetitions):
        for name in list(times):
            found = bench(f"{kind} {name}", measure, name)
            if found is None:
                del times[name]
            else:
                times[name].append(found)
    return times


def _finite(what: str, run: dict[str, Any], bench: Bench) -> dict[str, Any]:
    bench.require(run["finite"], f"{what}: output is finite")
    return run


def _block(sizes: tuple[int, ...], bench: Bench) -> Iterator[Row]:
    """One block, in seconds of a clock; least of the repetitions."""
    names = ["bf16", "delayed", "current"] + (["torchao tensorwise"] if has_torchao() else [])

    def measure(name: str) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as cache:
            runs = (_finite(f"block, {name}", _run(name, 1, sizes, cache), bench)["seconds"] for _ in range(2))
            return dict(zip(("cold", "warm"), runs, strict=True))

    base = None
    for name, found in _measured("block", names, 1 if bench.quick else 3, bench, measure).items():
        cold, warm = ([run[kind] for run in found] for kind in ("cold", "warm"))
        row = {"what": f"block {name}", "cold s": min(cold), "warm s": min(warm), "median cold s": statistics.median(cold)}
        base = row if name == "bf16" else base
        if base is not None:
            row |= {"cold / bf16": row["cold s"] / base["cold s"], "warm / bf16": row["warm s"] / base["warm s"]}
        yield row


def _stack(layers: int, sizes: tuple[int, ...], repetitions: int, bench: Bench) -> Iterator[Row]:
    """So many blocks, cold, in seconds of CPU time, least of the repetitions; every recipe beside plain torch.compile."""

    def measure(name: str) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as cache:
            return _finite(f"{layers} layers, {name}", _run(name, layers, sizes, cache, one_at_a_time=True), bench)

    base = None
    for name, found in _measured(f"{layers} layers", ("bf16", *RECIPES), repetitions, bench, measure).items():
        times = [run["cpu"] for run in found]
        row = {"what": f"{layers} layers {name}", "cold CPU s": min(times), "median cold CPU s": statistics.median(times)}
        base = row if name == "bf16" else base
        if base is not None:
            row |= {f"{kind}CPU / bf16": row[f"{kind}cold CPU s"] / base[f"{kind}cold CPU s"] for kind in ("", "median ")}
        yield row


def _restarts(layers: int, sizes: tuple[int, ...], repetitions: int, caches: pathlib.Path, bench: Bench) -> Iterator[Row]:
    """So many blocks in a second process, in seconds of CPU time, least of the repetitions: with the first one's caches, and
    with its mega-cache alone. The first one's are kept in a folder, and made where they are not there."""
    names = ["bf16", *RECIPES, *(["torchao tensorwise"] if has_torchao() else [])]

    def start(name: str, cache: str, artifacts: str | None) -> float:
        run = _run(name, layers, sizes, cache, one_at_a_time=True, artifacts=artifacts)
        return _finite(f"{layers} layers, {name}", run, bench)["cpu"]

    def filled(name: str) -> tuple[str, str]:
        folder = caches / f"{layers}-{name.replace(' ', '-')}"
        artifacts = folder / "artifacts"
        if not artifacts.exists():
            start(name, str(folder / "cache"), str(artifacts))
        return str(folder / "cache"), str(artifacts)

    def measure(name: str) -> dict[str, float]:
        cache, artifacts = filled(name)
        with tempfile.TemporaryDirectory() as empty:
            return {"warm": start(name, cache, None), "mega-cache": start(name, empty, artifacts)}

    for name in names:
        filled(name)
    base = None
    for name, found in _measured(f"{layers} layers again", names, repetitions, bench, measure).items():
        if not found:  # no repetitions: the caches are made for another run
            continue
        times = {kind: [run[kind] for run in found] for kind in ("warm", "mega-cache")}
        row: Row = {"what": f"{layers} layers {name}"}
        row |= {f"{kind} CPU s": min(every) for kind, every in times.items()}
        row |= {f"median {kind} CPU s": statistics.median(every) for kind, every in times.items()}
        base = row if name == "bf16" else base
        if base is not None:
            row |= {f"{kind} / bf16": row[f"{kind} CPU s"] / base[f"{kind} CPU s"] for kind in times}
        yield row


def run(
    bench: Bench, layers: list[int] | None = None, repetitions: int = 3, restarts: bool = False, caches: str | None = None
) -> Iterable[Row]:
    """`quick`: one repetition, a small block, two layers. `layers`: stacks of so many blocks alone.
    `repetitions`: of each stack. `restarts`: of stacks. `caches`: the folder of the caches that restarts find."""
    repetitions = 1 if bench.quick else repetitions
    if restarts:
        bench.baseline, bench.where = "bf16", "restarts-cpu"
        bench.notes += [f"dim, ffn, tokens {TINY}, {repetitions} repetitions, the first step's CPU time less the second's"]
        folder = pathlib.Path(caches or tempfile.mkdtemp(prefix="restarts-"))
        counts = layers or ([2] if bench.quick else [4, 24])
        return itertools.chain(*(_restarts(count, TINY, repetitions, folder, bench) for count in counts))
    bench.baseline, bench.where = "bf16", bench.where if layers is None else "layers-cpu"
    bench.notes += [
        "forward and backward: the first step's time less the second's",
        f"layers are of dim, ffn, tokens {TINY}, {repetitions} repetitions",
    ]
    stacks = [_stack(count, TINY, repetitions, bench) for count in layers or ((2,) if bench.quick else (8,))]
    blocks = [_block(TINY if bench.quick else _BLOCK, bench)] if layers is None else []
    return itertools.chain(*blocks, *stacks)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", nargs="+", type=int, help="only stacks of so many layers, without the block")
    parser.add_argument("--repetitions", type=int, default=3, help="of each stack (default: 3)")
    parser.add_argument("--restarts", action="store_true", help="stacks in a second process: warm, and with the mega-cache")
    parser.add_argument("--caches", metavar="FOLDER", help="where the first processes' caches are kept for --restarts")


if __name__ == "__main__":
    main("compile_time", run, _options)
