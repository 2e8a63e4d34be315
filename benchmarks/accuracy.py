"""Final losses of small GPTs in FP8 beside float32, on Python's library: with default settings, and with a planted outlier.

    python -m benchmarks.accuracy --what defaults --steps 150 --seeds 0 1 2
    python -m benchmarks.accuracy --what saved --steps 600 --seeds 0 1 2
    python -m benchmarks.accuracy --what outlier --steps 300 --seeds 0 1 2

The model and the text are those of `examples/train_gpt.py`; runs of one seed start from the same weights and see the same
batches. Rows of earlier runs stay in the results, so that a grid can be filled in parts.

defaults: each recipe with a tied head. saved: the same model with `saved_activations`, beside that without. outlier: current
scaling where an input channel of one linear is constant and a thousand times as large as the others. The function does not
depend on it: what it adds to the result is taken off again, so that float32 trains as without it. `last_blocks` and
`suggest_rules` leave the same share of the FLOPs in FP8, or the latter more.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common import main
from benchmarks.isolation import Bench, Row
from examples.train_gpt import GPT, batches, learning_rate, standard_library
from fp8pass import fp8_compile, inspect, last_blocks, suggest_rules

RECIPES = ("delayed", "current", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
_BACKEND = "aot_eager"
_SIZES = {"layers": 4, "width": 80, "heads": 4, "context": 64, "batch": 8}
_SMALLER = {"layers": 4, "width": 48, "heads": 4, "context": 32, "batch": 8}
_TAIL = 20
_SHARE, _OUTLIER = 0.25, 1000.0
#: The linear with the outlier, by seed.
_PLACES = ("layers.0.mlp.down", "layers.1.attn.qkv", "layers.2.mlp.up")


def final_loss(model: Any, call: Any, args: argparse.Namespace, seed: int) -> float:
    """The mean loss of the last of `args.steps` steps of AdamW. call: the model, or its compiled form."""
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
    return statistics.fmean(losses[-_TAIL:])


def _training(bench: Bench, sizes: dict[str, int], steps: int) -> argparse.Namespace:
    """The arguments of `examples/train_gpt.py`; three steps in a smoke run."""
    bench.baseline = "float32, eager, the same weights and batches"
    steps = 3 if bench.quick else steps
    bench.notes.append(f"final loss: mean of the last {_TAIL} of {steps} steps; {sizes}, AdamW, Python's library")
    return argparse.Namespace(**sizes, steps=steps, lr=1e-3, device="cpu")


def _gpt_loss(
    args: argparse.Namespace, seed: int, recipe: str | None = None, saved: str | None = None, rounds_weights: bool = False
) -> float:
    """The final loss of a GPT with a tied head; eager without a recipe and saved activations. rounds_weights: to bfloat16's
    values, before the first step."""
    torch.manual_seed(seed)
    model: Any = GPT(args.layers, args.width, args.heads, args.context, tie=True)
    if rounds_weights:
        model.bfloat16().float()
    torch._dynamo.reset()
    call = model if recipe is saved is None else fp8_compile(model, recipe, backend=_BACKEND, saved_activations=saved)
    return final_loss(model, call, args, seed)


def defaults(bench: Bench, steps: int | None, seeds: list[int], recipes: list[str]) -> Iterator[Row]:
    """With a tied head."""
    args = _training(bench, _SIZES, steps or 150)

    def row(what: str, recipe: str, seed: int, base: float) -> Row:
        found = _gpt_loss(args, seed, recipe)
        return {"what": what, "final loss": found, "float32": base, "difference %": 100 * (found / base - 1)}

    for seed in seeds:
        run = f"{args.steps} steps, seed {seed}, lr {args.lr:g}"
        base = bench(f"float32, {run}", _gpt_loss, args, seed)
        for recipe in () if base is None else recipes:
            yield from bench.row(f"{recipe}, {run}", row, f"{recipe}, {run}", recipe, seed, base)


def saved(bench: Bench, steps: int | None, seeds: list[int], recipes: list[str]) -> Iterator[Row]:
    """Beside the difference that any perturbation makes: smaller ones tell nothing."""
    args = _training(bench, _SIZES, steps or 600)
    bench.baseline = "the same run without saved_activations"

    def row(what: str, recipe: str | None, seed: int, plain: float, *how: Any) -> Row:
        found = _gpt_loss(args, seed, recipe, *how)
        return {"what": what, "final loss": found, "without": plain, "difference %": 100 * (found / plain - 1)}

    for seed, recipe in itertools.product(seeds, (None, *recipes)):
        run = f"{args.steps} steps, seed {seed}, lr {args.lr:g}"
        plain = bench(f"{recipe}, {run}", _gpt_loss, args, seed, recipe)
        hows = {"saved_activations": ("fp8", False), "its first weights rounded to bfloat16": (None, True)}
        for words, how in {} if plain is None else hows.items():
            what = f"{recipe} with {words}, {run}"
            yield from bench.row(what, row, what, recipe, seed, plain, *how)


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


def outlier(bench: Bench, steps: int | None, seeds: list[int], recipes: list[str]) -> Iterator[Row]:
    """Current scaling alone."""
    args, recipe = _training(bench, _SMALLER, steps or 300), "current"

    def row(what: str, model: Any, in_fp8: bool, rules: Any, seed: int) -> Row:
        torch._dynamo.reset()
        call = fp8_compile(model, recipe, rules=rules, backend=_BACKEND) if in_fp8 else model
        loss = final_loss(model, call, args, seed)
        gemms = inspect(call).gemms if in_fp8 else []
        flops, quantized = (sum(g.flops or 0 for g in gemms if g.quantized or not only) for only in (False, True))
        return {"what": what, "final loss": loss, "FLOPs in FP8 %": 100 * quantized / (flops or 1)}

    for seed in seeds:
        torch.manual_seed(seed)
        model: Any = GPT(args.layers, args.width, args.heads, args.context, tie=False)
        place = _PLACES[seed % len(_PLACES)]
        linear = model.get_submodule(place)
        linear.__class__ = Planted
        linear.plant(3, _OUTLIER)
        batch = next(batches(standard_library()[0], args, seed))
        torch._dynamo.reset()
        suggested = suggest_rules(model, lambda m, batch=batch: m(*batch), recipe, 1 - _SHARE, checks=0)
        of_place = {"outlier": place, "ranked first": suggested.gemms[0].module}
        rules = {"FP8 everywhere": None, "last_blocks": last_blocks(model, _SHARE), "suggest_rules": suggested}
        for name in ("float32", *rules):
            what = f"{name}, {recipe}, outlier {_OUTLIER:g}, seed {seed}"
            for made in bench.row(what, row, what, copy.deepcopy(model), name in rules, rules.get(name), seed):
                yield made | of_place


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="default: 150; of saved, 600; of outlier, 300")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="not of outlier")


PARTS = {part.__name__: part for part in (defaults, saved, outlier)}

if __name__ == "__main__":
    main("accuracy", PARTS, _options, keeps_rows=True)
