"""Losses of a GPT with a tied head by default settings, each recipe beside float32, and what the first call costs.

    python -m benchmarks.defaults --steps 150 --seeds 0 1 2

The model and the text are those of `examples/train_gpt.py`. Runs of one seed start from the same weights and see the same
batches. A row that the results have already is measured again and replaced; the others stay, so that a grid can be filled in
parts. `--first-call` measures the first calls instead of losses.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.common import RESULTS, record_of
from examples.train_gpt import GPT, batches, learning_rate, standard_library
from fp8pass import DelayedScaling, fp8_compile

RECIPES = ("delayed", "current", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
_SIZES = {"layers": 4, "width": 80, "heads": 4, "context": 64, "batch": 8}
_TAIL = 20
_BOUND_PERCENT = 0.5


def train(model: Any, call: Any, args: argparse.Namespace, seed: int) -> list[float]:
    """The loss of each of `args.steps` steps of AdamW on Python's library. call: the model, or its compiled form."""
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95))
    losses = []
    for step, batch in enumerate(itertools.islice(batches(standard_library()[0], args, seed), args.steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = call(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _losses(recipe: str | None, seed: int, steps: int, lr: float, backend: str) -> list[float]:
    args = argparse.Namespace(**_SIZES, steps=steps, lr=lr, device="cpu")
    torch.manual_seed(seed)
    model: Any = GPT(args.layers, args.width, args.heads, args.context, tie=True)
    torch._dynamo.reset()
    return train(model, model if recipe is None else fp8_compile(model, recipe, backend=backend), args, seed)


def _compare(seed: int, steps: int, lr: float, recipes: list[str], backend: str) -> list[dict[str, Any]]:
    """One row per recipe: its final loss, float32's, and the difference in percent."""
    final, rows = {}, []
    for recipe in (None, *recipes):
        start = time.perf_counter()
        final[recipe] = statistics.fmean(_losses(recipe, seed, steps, lr, backend)[-_TAIL:])
        if recipe is not None:
            rows.append(
                {
                    "what": f"{recipe}, {steps} steps, seed {seed}, lr {lr:g}",
                    "final loss": final[recipe],
                    "float32": final[None],
                    "difference %": 100 * (final[recipe] / final[None] - 1),
                    "bound %": _BOUND_PERCENT,
                    "backend": backend,
                }
            )
            print(rows[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
    return rows


# ---- The first call


def _first_call(what: str, backend: str) -> dict[str, Any]:
    """Seconds of the first steps and the process's largest memory, in a process of its own."""
    recipe = {"current": "current", "delayed": DelayedScaling(), "one": DelayedScaling(initial_scale="one")}[what]
    torch.manual_seed(0)
    model = GPT(_SIZES["layers"], _SIZES["width"], _SIZES["heads"], _SIZES["context"], tie=True)
    warm_up = fp8_compile(torch.nn.Linear(64, 64), "current", backend=backend)
    warm_up(torch.randn(16, 64)).sum().backward()  # what any compilation pays once: imports, the compiler's own start
    torch._dynamo.reset()
    tokens = torch.randint(256, (_SIZES["batch"], _SIZES["context"]))
    compiled = fp8_compile(copy.deepcopy(model), recipe, backend=backend)
    row: dict[str, Any] = {}
    for step in ("step 1 s", "step 2 s", "step 3 s"):
        start = time.perf_counter()
        compiled(tokens, tokens).backward()
        row[step] = time.perf_counter() - start
        row[step.replace(" s", " peak MB")] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return row


def _first_calls(backend: str) -> list[dict[str, Any]]:
    rows = []
    names = {"current": "current", "one": "delayed, initial_scale='one'", "delayed": "delayed"}
    for what, name in names.items():
        runs = []
        for _ in range(3):
            command = [sys.executable, "-m", "benchmarks.defaults", "--measure", what, "--backend", backend]
            done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        best = {key: min(run[key] for run in runs) for key in runs[0]}
        rows.append({"what": f"first calls, {name}, {backend}", **best, "backend": backend})
        print(rows[-1], flush=True)
    return rows


# ---- The record


def _write(rows: list[dict[str, Any]], command: str) -> None:
    """Put rows into the results; rows of the same name are replaced, and each row tells its command."""
    path = RESULTS / "defaults-cpu.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {row["what"]: {**row, "command": command} for row in rows}
    merged = [new.pop(row["what"], row) for row in kept] + list(new.values())
    record = record_of("defaults", command)
    record |= {"rows": merged, "baseline": "float32, eager, the same weights and batches"}
    record |= {"notes": [f"final loss: mean of the last {_TAIL} steps; {_SIZES}, AdamW, tied head, Python's library"]}
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defaults", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--backend", default="aot_eager", choices=("inductor", "aot_eager"))
    parser.add_argument("--first-call", action="store_true", help="time and memory of the first steps")
    parser.add_argument("--measure", choices=("current", "delayed", "one"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(_first_call(args.measure, args.backend)))
        return
    command = " ".join(["python -m benchmarks.defaults", *sys.argv[1:]])
    if args.first_call:
        _write(_first_calls(args.backend), command)
        return
    for seed in args.seeds:
        _write(_compare(seed, args.steps, args.lr, args.recipes, args.backend), command)


if __name__ == "__main__":
    main()
