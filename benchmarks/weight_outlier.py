"""Weights with one row or one column a thousand times as large: their rank by `suggest_rules`, and by toggling every GEMM.

    python -m benchmarks.weight_outlier --seeds 10

A row is an output channel of a linear, a column an input channel. Each seed has other weights and another place. Ranked are the
output GEMMs of a GPT in float32: by what `suggest_rules` expects, and by the loss with one of them in FP8 alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import torch
from torch import nn

from examples.train_gpt import GPT
from fp8pass.rules import parse_rules
from fp8pass.tools.search.probe import Passes
from fp8pass.tools.search.suggest import _ranked, spearman

FACTOR = 1000.0


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Of the linear that was changed, 0 for the first, and the rank correlation over all output GEMMs."""

    place: str
    expected: int
    toggled: int
    correlation: float


def ranks(seed: int, is_row: bool, recipe: str = "current") -> Ranks:
    """Those of one seed."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model: Any = GPT(2, 48, 4, 32, tie=False)
    tokens = torch.randint(0, 256, (4, 33))
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith("layers.")}
    place = list(linears)[int(torch.randint(len(linears), ()))]
    weight = linears[place].weight.detach()
    channel = int(torch.randint(weight.shape[0 if is_row else 1], ()))
    (weight[channel] if is_row else weight[:, channel]).mul_(FACTOR)
    passes = Passes(model, lambda m: m(tokens[:, :-1], tokens[:, 1:]), parse_rules(recipe, None))
    loss = passes.effects()
    risks = {g.module: g.risk for g in _ranked(passes.probe) if g.role == "output"}
    toggled = {name: abs(passes.measured((name, "output"), loss, {})) for name in risks}
    orders = [sorted(values, key=lambda name: -values[name]) for values in (risks, toggled)]
    correlation = spearman(list(risks.values()), list(toggled.values()))
    return Ranks(place, *(order.index(place) for order in orders), correlation)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_outlier", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    for is_row in (True, False):
        found = [ranks(seed, is_row) for seed in range(seeds)]
        for one in found:
            print("row" if is_row else "column", one)
        first = sum(one.expected == 0 for one in found), sum(one.toggled == 0 for one in found)
        both = sum(one.toggled == 0 and one.expected == 0 for one in found)
        print(f"first of {seeds}: {first[0]} expected, {first[1]} by toggling, {both} by both")
        print(f"median rank correlation: {statistics.median(one.correlation for one in found):.2f}")


if __name__ == "__main__":
    main()
