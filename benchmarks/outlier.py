"""Final losses of a GPT with a planted outlier: FP8 everywhere, `last_blocks`, and `suggest_rules`.

    python -m benchmarks.outlier --steps 300 --seeds 0 1 2

The outlier is an input channel of one linear that is constant and a thousand times as large as the others. The function does
not depend on it: what it adds to the result is taken off again, so that float32 trains as without it. `last_blocks` and
`suggest_rules` leave the same share of the FLOPs in FP8, or the latter more. Runs of one seed start from the same weights and
see the same batches; the model and the text are those of `examples/train_gpt.py`. `--value 0` plants nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common import RESULTS, record_of
from benchmarks.defaults import train
from examples.train_gpt import GPT, batches, standard_library
from fp8pass import fp8_compile, inspect, last_blocks, suggest_rules

_SIZES = {"layers": 4, "width": 48, "heads": 4, "context": 32, "batch": 8}
_SHARE = 0.25
_TAIL = 20
#: Where the outlier is, by seed.
_PLACES = ("layers.0.mlp.down", "layers.1.attn.qkv", "layers.2.mlp.up")


class Planted(nn.Linear):
    """A linear with a constant input channel, whose part of the result is taken off again."""

    def plant(self, channel: int, value: float) -> None:
        """Take a channel of the input for the outlier."""
        keep, offset = torch.ones(self.in_features), torch.zeros(self.in_features)
        keep[channel], offset[channel] = 0, value
        self.register_buffer("keep", keep)
        self.register_buffer("offset", offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A row per token, as nn.Linear has it."""
        return F.linear(x * self.keep + self.offset, self.weight, self.bias) - (self.weight * self.offset).sum(1)


def _model(args: argparse.Namespace, seed: int, value: float) -> Any:
    torch.manual_seed(seed)
    model: Any = GPT(args.layers, args.width, args.heads, args.context, tie=False)
    linear = model.get_submodule(_PLACES[seed % len(_PLACES)])
    if value:
        linear.__class__ = Planted
        linear.plant(3, value)
    return model


def _train(model: Any, rules: Any, seed: int, args: argparse.Namespace, recipe: str | None) -> tuple[float, float]:
    """The final loss, and the share of the GEMMs' FLOPs that ran in FP8."""
    torch._dynamo.reset()
    call = model if recipe is None else fp8_compile(model, recipe, rules=rules, backend="aot_eager")
    losses = train(model, call, args, seed)
    gemms = [] if recipe is None else inspect(call).gemms
    total = sum(g.flops or 0 for g in gemms) or 1
    return statistics.fmean(losses[-_TAIL:]), sum(g.flops or 0 for g in gemms if g.quantized) / total


def _rows(seed: int, args: argparse.Namespace, recipe: str, value: float) -> list[dict[str, Any]]:
    model = _model(args, seed, value)
    batch = next(batches(standard_library()[0], args, seed))
    torch._dynamo.reset()
    suggested = suggest_rules(model, lambda m: m(*batch), recipe, 1 - _SHARE, checks=0)
    contestants: dict[str, tuple[str | None, Any]] = {
        "float32": (None, None),
        "FP8 everywhere": (recipe, None),
        "last_blocks": (recipe, last_blocks(model, _SHARE)),
        "suggest_rules": (recipe, suggested),
    }
    place = _PLACES[seed % len(_PLACES)] if value else "none"
    rows = []
    for name, (runs_in, rules) in contestants.items():
        start = time.perf_counter()
        loss, share = _train(copy.deepcopy(model), rules, seed, args, runs_in)
        row = {"what": f"{name}, {recipe}, outlier {value:g}, seed {seed}", "outlier": place, "final loss": loss}
        rows.append(row | {"FLOPs in FP8 %": 100 * share, "ranked first": suggested.gemms[0].module})
        print(rows[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outlier", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--recipe", default="current")
    parser.add_argument("--value", type=float, default=1000.0, help="the outlier; 0 plants none")
    args = parser.parse_args()
    sizes = argparse.Namespace(**_SIZES, steps=args.steps, lr=args.lr, device="cpu")
    command = f"python -m benchmarks.outlier --steps {args.steps} --recipe {args.recipe} --value {args.value:g}"
    path = RESULTS / "outlier-cpu.json"
    for seed in args.seeds:
        rows = _rows(seed, sizes, args.recipe, args.value)
        kept = json.loads(path.read_text())["rows"] if path.exists() else []
        new = {row["what"]: {**row, "command": command} for row in rows}
        merged = [new.pop(row["what"], row) for row in kept] + list(new.values())
        notes = [f"final loss: mean of the last {_TAIL} of {args.steps} steps; {_SIZES}, AdamW, Python's library"]
        path.write_text(json.dumps(record_of("outlier", command) | {"rows": merged, "notes": notes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
