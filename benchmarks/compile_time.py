"""Seconds to compile a Llama block's training step, cold (empty caches) and warm (a second process), per contestant."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

from benchmarks.common import Result, has_torchao, main, require

_SCRIPT = """
import gc, json, sys, time
import torch
from benchmarks.peers import contestants
from tests.support.models import LlamaBlock

device = "cuda" if torch.cuda.is_available() else "cpu"
name, dim, ffn, tokens = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
model = LlamaBlock(dim, ffn, dim // 64).bfloat16().to(device)
x = torch.randn(1, tokens, dim, dtype=torch.bfloat16, device=device, requires_grad=True)
torch.compile(lambda x: x + 1)(x)  # what any compilation pays once: imports, the compiler's own start
torch._dynamo.reset()
gc.collect()
gc.freeze()  # else a third of a second of collecting torch's own modules falls to one contestant or another by chance
compile_model = contestants()[name]

def step(call):
    out = call(x)
    out.sum().backward()
    return bool(out.isfinite().all())  # waits for the device, too

times = [time.perf_counter()]
compiled = compile_model(model)
for _ in range(2):
    finite = step(compiled)
    times.append(time.perf_counter())
first, second = times[1] - times[0], times[2] - times[1]
print(json.dumps({"seconds": first - second, "finite": finite}))
"""


def _run(name: str, sizes: tuple[int, ...], cache: str) -> dict:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", _SCRIPT, name, *map(str, sizes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(quick: bool) -> Result:
    """`quick`: one repetition, a small block."""
    names = ["bf16", "delayed", "current"] + (["torchao tensorwise"] if has_torchao() else [])
    sizes = (256, 512, 64) if quick else (1024, 2816, 128)
    cold: dict[str, list[float]] = {n: [] for n in names}
    warm: dict[str, list[float]] = {n: [] for n in names}
    checks: list[str] = []
    for _ in range(1 if quick else 3):
        for name in names:  # interleaved, so that a busy machine is busy for everyone
            with tempfile.TemporaryDirectory() as cache:
                for times in (cold, warm):
                    measured = _run(name, sizes, cache)
                    times[name].append(measured["seconds"])
                    require(measured["finite"], f"{name}: output is finite", checks)
    rows = [
        {"what": n, "cold s": min(cold[n]), "warm s": min(warm[n]), "median cold s": statistics.median(cold[n])} for n in names
    ]
    for row in rows:
        row["cold / bf16"] = row["cold s"] / rows[0]["cold s"]
        row["warm / bf16"] = row["warm s"] / rows[0]["warm s"]
    return Result(
        rows,
        "bf16",
        sorted(set(checks)),
        ["forward and backward: the first step's time less the second's; least of the repetitions"],
    )


if __name__ == "__main__":
    main("compile_time", run)
