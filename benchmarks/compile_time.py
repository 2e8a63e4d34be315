"""Seconds to compile a training step: a Llama block, cold (empty caches) and warm (a second process), and stacks of blocks.

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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.common import has_torchao, main
from benchmarks.contestants import RECIPES
from benchmarks.isolation import Bench, Row

#: dim, ffn, tokens.
_BLOCK = (1024, 2816, 128)
TINY = (256, 512, 64)

_SCRIPT = """
import gc, json, resource, sys, time
import torch
from torch import nn
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


def run(bench: Bench, layers: list[int] | None = None, repetitions: int = 3) -> Iterable[Row]:
    """`quick`: one repetition, a small block, two layers. `layers`: stacks of so many blocks alone.
    `repetitions`: of each stack."""
    repetitions = 1 if bench.quick else repetitions
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


if __name__ == "__main__":
    main("compile_time", run, _options)
