"""CPU seconds to compile a training step of stacks of Llama blocks: cold (empty caches), warm (a second process), and with
torch's mega-cache on a machine without caches.

    python -m benchmarks.compile_time --blocks 4 24 64 --repeat 3

Rows are written after every measurement, and the results keep the rows of earlier runs, whose commands they name: a run may be
interrupted, and a table can be filled in parts. CPU time is measured with one compiler at a time and one thread, for threads
that wait for each other take CPU time, too: processes that share the machine cannot be taken for it."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence

from benchmarks.common import has_torchao, main
from benchmarks.contestants import RECIPES
from benchmarks.isolation import Bench, Row

#: dim, ffn, tokens.
TINY = (256, 512, 64)

_SCRIPT = """
import gc, json, os, resource, sys
import torch
from torch import nn
import fp8pass.runtime.wrap  # as torch's own imports below
from benchmarks.compile_time import TINY
from benchmarks.contestants import RECIPES, contestants
from benchmarks.models import LlamaBlock

device = "cuda" if torch.cuda.is_available() else "cpu"
name, layers, artifacts = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dim, ffn, tokens = TINY
torch.manual_seed(0)
model = nn.Sequential(*(LlamaBlock(dim, ffn, dim // 64) for _ in range(layers))).bfloat16().to(device)
x = torch.randn(1, tokens, dim, dtype=torch.bfloat16, device=device, requires_grad=True)
torch.compile(lambda x: x + 1)(x)  # what any compilation pays once: imports, the compiler's own start
torch._dynamo.reset()
gc.collect()
gc.freeze()  # else a third of a second of collecting torch's own modules falls to one contestant or another by chance
compile_model = contestants(RECIPES)[name]

def cpu():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)

times = [cpu()]
if os.path.exists(artifacts):  # torch's mega-cache: read where the file is there, else written
    with open(artifacts, "rb") as file:
        torch.compiler.load_cache_artifacts(file.read())
compiled = compile_model(model)
for _ in range(2):
    out = compiled(x)
    out.sum().backward()
    finite = bool(out.isfinite().all())  # waits for the device, too
    times.append(cpu())
if artifacts and not os.path.exists(artifacts):
    with open(artifacts, "wb") as file:
        file.write(torch.compiler.save_cache_artifacts()[0])
print(json.dumps([times[1] - times[0] - (times[2] - times[1]), finite]))
"""


def _run(name: str, layers: int, cache: str, artifacts: str) -> tuple[float, bool]:
    """CPU seconds of a process with its caches in a folder, and whether its result is finite. artifacts: the mega-cache's file;
    "": none."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", _SCRIPT, name, str(layers), artifacts]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    seconds, finite = json.loads(done.stdout.splitlines()[-1])
    return seconds, finite


def _stack(blocks: int, repeat: int, bench: Bench, recipes: Sequence[str]) -> Iterator[Row]:
    """So many blocks, contestants by turns, for machines scatter; the least counts. Per cold start there are eight warm ones,
    of stacks above 32 blocks three. Rows come after every measurement, with what is known by then."""
    names = ["bf16", *recipes, *(["torchao tensorwise"] if has_torchao() else [])]
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def measure(kind: str, name: str, folder: str) -> float:
        cache = os.path.join(folder, name.replace(" ", "_"))  # the compiler's command lines have it
        with tempfile.TemporaryDirectory() as empty:
            where = empty if kind == "mega-cache" else cache
            seconds, finite = _run(name, blocks, where, "" if kind == "warm" else f"{cache}.artifacts")
        bench.require(finite, f"{blocks} blocks, {name}: output is finite")
        return seconds

    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            for kind, name in itertools.product(["cold", *["warm"] * (8 if blocks <= 32 else 3), "mega-cache"], list(names)):
                if name not in names:
                    continue
                what = f"{blocks} blocks {name}"
                seconds = bench(what, measure, kind, name, folder)
                if seconds is None:
                    names.remove(name)
                    found.pop(name, None)
                    continue
                found[name][kind].append(seconds)
                print(f"{what}: {kind} {seconds:.2f}", flush=True)
                row: Row = {"what": what}
                row |= {f"{kind} CPU s": min(every) for kind, every in found[name].items()}
                base = found.get("bf16", {})
                yield row | {f"{k} / bf16": min(every) / min(base[k]) for k, every in found[name].items() if k in base}


def run(bench: Bench, blocks: list[int], repeat: int, recipes: list[str]) -> Iterator[Row]:
    """`quick`: one repetition of two blocks."""
    bench.baseline = "bf16"
    bench.notes += [
        "forward and backward: the first step's time less the second's",
        f"stacks are of dim, ffn, tokens {TINY}, {1 if bench.quick else repeat} repetitions",
    ]
    for count in [2] if bench.quick else blocks:
        yield from _stack(count, 1 if bench.quick else repeat, bench, recipes)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", nargs="+", type=int, default=[4], help="blocks of each stack")
    parser.add_argument("--repeat", type=int, default=1, help="of each stack; the least counts")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))


if __name__ == "__main__":
    main("compile_time", run, _options, keeps_rows=True)
