"""Final losses of small GPTs in FP8 beside float32, on Python's library: with default settings, and with a planted outlier.

    python -m benchmarks.accuracy --what defaults --steps 150 --seeds 0 1 2
    python -m benchmarks.accuracy --what saved --steps 600 --seeds 0 1 2
    python -m benchmarks.accuracy --what gradients --seeds 0 1 2
    python -m benchmarks.accuracy --what outlier --steps 300 --seeds 0 1 2

The model and the text are those of `examples/train_gpt.py`; runs of one seed start from the same weights and see the same
batches. Rows of earlier runs stay in the results, so that a grid can be filled in parts.

defaults: each recipe with a tied head. saved: the same model with `saved_activations`, beside that without. gradients: the
signal-to-noise ratio of all gradients of three Llama blocks in bfloat16, against float64; `saved_activations` saves all that it
may, the gate and up projections of SwiGLU alone, or all others. outlier: an input channel of one linear is constant and a
thousand times as large as the others. The function does not depend on it: what it adds to the result is taken off again, so
that float32 trains as without it.
`last_blocks` and `suggest_rules` leave the same share of the FLOPs in FP8, or the latter more. `--value 0` plants nothing.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common import Run, main
from benchmarks.isolation import Bench, Row
from benchmarks.models import LlamaBlock
from examples.train_gpt import GPT, batches, learning_rate, standard_library
from fp8pass import fp8_compile, inspect, last_blocks, suggest_rules

RECIPES = ("delayed", "current", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
_SIZES = {"layers": 4, "width": 80, "heads": 4, "context": 64, "batch": 8}
_SMALLER = {"layers": 4, "width": 48, "heads": 4, "context": 32, "batch": 8}
_TAIL = 20
_BOUND_PERCENT = 0.5
_SHARE = 0.25
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


def _training(bench: Bench, given: argparse.Namespace, sizes: dict[str, int], steps: int) -> argparse.Namespace:
    """The arguments of `examples/train_gpt.py`; `steps` by default, and three in a smoke run."""
    bench.baseline = "float32, eager, the same weights and batches"
    steps = 3 if bench.quick else given.steps or steps
    bench.notes.append(f"final loss: mean of the last {_TAIL} of {steps} steps; {sizes}, AdamW, Python's library")
    return argparse.Namespace(**sizes, steps=steps, lr=given.lr, device="cpu")


def _gpt_loss(
    args: argparse.Namespace,
    seed: int,
    recipe: str | None = None,
    backend: str = "",
    saved: str | None = None,
    rounds_weights: bool = False,
) -> float:
    """The final loss of a GPT with a tied head; eager without a recipe and saved activations. rounds_weights: to bfloat16's
    values, before the first step."""
    torch.manual_seed(seed)
    model: Any = GPT(args.layers, args.width, args.heads, args.context, tie=True)
    if rounds_weights:
        model.bfloat16().float()
    torch._dynamo.reset()
    call = model if recipe is saved is None else fp8_compile(model, recipe, backend=backend, saved_activations=saved)
    return final_loss(model, call, args, seed)


def saved(bench: Bench, given: argparse.Namespace) -> Iterator[Row]:
    """`quick`: three steps."""
    args = _training(bench, given, _SIZES, 600)
    bench.baseline = "the same run without saved_activations"

    def row(what: str, recipe: str | None, seed: int, plain: float, option: str | None, rounds_weights: bool) -> Row:
        found = _gpt_loss(args, seed, recipe, given.backend, option, rounds_weights)
        return {"what": what, "final loss": found, "without": plain, "difference %": 100 * (found / plain - 1)}

    for seed, recipe in itertools.product(given.seeds, (None, *(given.recipes or RECIPES))):
        run = f"{args.steps} steps, seed {seed}, lr {given.lr:g}"
        plain = bench(f"{recipe}, {run}", _gpt_loss, args, seed, recipe, given.backend)
        if plain is not None:
            what = f"{recipe} with saved_activations, {run}"
            yield from bench.row(what, row, what, recipe, seed, plain, "fp8", False)
            # The difference that any perturbation makes: smaller ones tell nothing.
            what = f"{recipe} with its first weights rounded to bfloat16, {run}"
            yield from bench.row(what, row, what, recipe, seed, plain, None, True)


#: The rules of a run with `saved_activations`.
_SAVED_RULES: dict[str, dict[str, str | None]] = {
    "all": {},
    "gate and up alone": {"*.gate:saved": "blockwise", "*.up:saved": "blockwise", "*:saved": None},
    "all but gate and up": {"*.gate:saved": None, "*.up:saved": None},
}


def _gradients(seed: int, recipe: str | None, rules: dict[str, str | None] | None, backend: str) -> tuple[float, int]:
    """Decibels of all gradients together, and the bytes that the forward saves. rules: of saved values; None: all unchanged."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(LlamaBlock(256, 896, 4, 1) for _ in range(3))).bfloat16()
    exact = copy.deepcopy(model).double()
    x, grad = torch.randn(2, 1, 512, 256).bfloat16().unbind()
    exact(x.double()).backward(grad.double())
    torch._dynamo.reset()
    saved: Any = None if rules is None else "fp8"
    rules = {"*": None} if rules is recipe is None else rules  # nothing in FP8
    compiled = fp8_compile(
        model, recipe or (None if saved else "current"), rules=rules, saved_activations=saved, select="all", backend=backend
    )
    for _ in range(2):  # delayed scaling has its scales in the second step
        model.zero_grad()
        compiled(x).backward(grad)
    pairs = [(p.grad.double(), q.grad) for p, q in zip(model.parameters(), exact.parameters(), strict=True)]  # type: ignore[union-attr]
    noise, signal = sum((p - q).square().sum() for p, q in pairs), sum(q.square().sum() for _, q in pairs)
    return float(10 * torch.log10(signal / noise)), sum(g.saved_bytes for g in inspect(compiled).graphs)


def gradients(bench: Bench, given: argparse.Namespace) -> Iterator[Row]:
    """`quick`: one seed."""
    bench.baseline = "float64, eager, the same weights and batch"

    def row(what: str, seed: int, recipe: str | None, plain: float, rules: dict[str, str | None], saved_bytes: int) -> Row:
        found, saves = _gradients(seed, recipe, rules, given.backend)
        return {"what": what, "dB": found, "lost dB": plain - found, "saved bytes / bf16": saves / saved_bytes}

    for seed in given.seeds[:1] if bench.quick else given.seeds:
        plain = bench(f"bf16, seed {seed}", _gradients, seed, None, None, given.backend)
        for recipe in () if plain is None else (None, *(given.recipes or RECIPES)):
            without = bench(f"{recipe}, seed {seed}", _gradients, seed, recipe, None, given.backend)
            if without is not None:
                about = {"dB": without[0], "saved bytes / bf16": without[1] / plain[1]}
                yield {"what": f"{recipe or 'bf16'}, seed {seed}", "lost dB": None} | about
                for name, rules in _SAVED_RULES.items():
                    what = f"{recipe or 'bf16'} with saved_activations, {name}, seed {seed}"
                    yield from bench.row(what, row, what, seed, recipe, without[0], rules, plain[1])


def defaults(bench: Bench, given: argparse.Namespace) -> Iterator[Row]:
    """`quick`: three steps. With a tied head."""
    args = _training(bench, given, _SIZES, 150)

    def row(what: str, recipe: str, seed: int, base: float) -> Row:
        found = _gpt_loss(args, seed, recipe, given.backend)
        bounds = {"difference %": 100 * (found / base - 1), "bound %": _BOUND_PERCENT}
        return {"what": what, "final loss": found, "float32": base, **bounds, "backend": given.backend}

    for seed in given.seeds:
        run = f"{args.steps} steps, seed {seed}, lr {given.lr:g}"
        base = bench(f"float32, {run}", _gpt_loss, args, seed)
        for recipe in () if base is None else given.recipes or RECIPES:
            yield from bench.row(f"{recipe}, {run}", row, f"{recipe}, {run}", recipe, seed, base)


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


def outlier(bench: Bench, given: argparse.Namespace) -> Iterator[Row]:
    """`quick`: three steps."""
    args = _training(bench, given, _SMALLER, 300)

    def row(what: str, model: Any, recipe: str | None, rules: Any, seed: int) -> Row:
        torch._dynamo.reset()
        call = model if recipe is None else fp8_compile(model, recipe, rules=rules, backend=given.backend)
        loss = final_loss(model, call, args, seed)
        gemms = [] if recipe is None else inspect(call).gemms
        flops, quantized = (sum(g.flops or 0 for g in gemms if g.quantized or not only) for only in (False, True))
        return {"what": what, "final loss": loss, "FLOPs in FP8 %": 100 * quantized / (flops or 1)}

    for seed, recipe in itertools.product(given.seeds, given.recipes or ("current",)):
        torch.manual_seed(seed)
        model: Any = GPT(args.layers, args.width, args.heads, args.context, tie=False)
        place = _PLACES[seed % len(_PLACES)]
        if given.value:
            linear = model.get_submodule(place)
            linear.__class__ = Planted
            linear.plant(3, given.value)
        batch = next(batches(standard_library()[0], args, seed))
        torch._dynamo.reset()
        suggested = suggest_rules(model, lambda m, batch=batch: m(*batch), recipe, 1 - _SHARE, checks=0)
        of_place = {"outlier": place if given.value else "none", "ranked first": suggested.gemms[0].module}
        for name, runs_in, rules in (
            ("float32", None, None),
            ("FP8 everywhere", recipe, None),
            ("last_blocks", recipe, last_blocks(model, _SHARE)),
            ("suggest_rules", recipe, suggested),
        ):
            what = f"{name}, {recipe}, outlier {given.value:g}, seed {seed}"
            for made in bench.row(what, row, what, copy.deepcopy(model), runs_in, rules, seed):
                yield made | of_place


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="default: 150; of outlier, 300")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, help="default: all; of outlier, current")
    parser.add_argument("--backend", default="aot_eager", choices=("inductor", "aot_eager"))
    parser.add_argument("--value", type=float, default=1000.0, help="the outlier; 0 plants none")


def _keeping(part: Callable[[Bench, argparse.Namespace], Iterator[Row]]) -> Run:
    """A part whose results keep the rows of earlier runs."""

    def run(bench: Bench, **given: Any) -> Iterator[Row]:
        bench.keeps_rows = True
        return part(bench, argparse.Namespace(**given))

    return run


PARTS = {part.__name__: _keeping(part) for part in (defaults, saved, gradients, outlier)}

if __name__ == "__main__":
    main("accuracy", PARTS, _options)
