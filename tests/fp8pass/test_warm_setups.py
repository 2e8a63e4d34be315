"""Warm starts of the ways in which models are compiled and trained: each hits on its second start, or says why not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_inductor_cache
from torch.utils.checkpoint import checkpoint

from fp8pass import fp8_compile, inspect, monitor, state, use_rules
from fp8pass.recipes import Granularity, Quantization, Recipe
from fp8pass.runtime import backend
from lowering.formats import E4M3
from tests.fp8pass.test_warm import facts, no_rewrite
from tests.support.cases import each
from tests.support.models import BrokenLayers, ResidualMlp, mlp

pytestmark = pytest.mark.exhaustive


class Layers(nn.Module):
    """Residual blocks, each called by `through`."""

    def __init__(self, through=lambda layer, x: layer(x)):
        super().__init__()
        self.layers = nn.ModuleList(ResidualMlp() for _ in range(3))
        self.through = through

    def forward(self, x):
        for layer in self.layers:
            x = self.through(layer, x)
        return x


@torch.compiler.nested_compile_region
def region(layer, x):
    return layer(x)


def whole(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return model


def measure(compiled, step):
    if step == 0:
        monitor(compiled, every=2)


def other_rules(compiled, step):
    if step == 1:
        use_rules(compiled, {"0": None})


def one_by_one(model):
    for layer in model.layers:
        fp8_compile(layer, "delayed", in_place=True)
    return model


def by_name(model):
    for layer in model.layers:
        layer.compile(backend="fp8pass")
    return model


@dataclasses.dataclass(frozen=True)
class Own(Recipe):
    """A user's recipe, with what decides in a constant of its file."""

    name = "own"

    def quantization(self, operand, role):
        return Quantization(E4M3, GRANULARITY)


GRANULARITY = Granularity.ROW_WISE

#: name -> (model, how it is compiled, what happens behind each step, whether shapes change).
SETUPS = {
    "whole": (mlp, lambda m: fp8_compile(m), None, False),
    "blocks in place": (Layers, one_by_one, None, False),
    "blocks by name": (Layers, by_name, None, False),
    "regions": (lambda: Layers(region), lambda m: fp8_compile(m), None, False),
    "checkpointing": (lambda: Layers(whole), lambda m: fp8_compile(m), None, False),
    "graph breaks": (lambda: BrokenLayers(3), lambda m: fp8_compile(m), None, False),
    "dynamic shapes": (mlp, lambda m: fp8_compile(m, dynamic=True), None, True),
    "CUDA graphs": (mlp, lambda m: fp8_compile(m, mode="reduce-overhead"), None, False),
    "frozen weights": (frozen, lambda m: fp8_compile(m, "current"), None, False),
    "released weights": (frozen, lambda m: fp8_compile(m, "current", release_frozen=True), None, False),
    "cached weights": (mlp, lambda m: fp8_compile(m, "current", weight_copies="cache"), None, False),
    "monitor": (mlp, lambda m: fp8_compile(m), measure, False),
    "use_rules": (mlp, lambda m: fp8_compile(m), other_rules, False),
    "schedule": (mlp, lambda m: fp8_compile(m, schedule={2: {"0": None}}), None, False),
    "min_speedup": (mlp, lambda m: fp8_compile(m, min_speedup=0.1), None, False),
}


def start(make, compile_model, between, grows):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    compiled = compile_model(model)
    results = []
    for step in range(4):
        model.zero_grad()
        out = compiled(torch.randn(16 + 16 * step * grows, 64))
        out.square().sum().backward()
        results += [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        if between is not None:
            between(compiled, step)
    return compiled, results


def every_use(compiled):
    """The use of the cache for every graph, under whatever rules."""
    return {graph.cache for part in inspect(compiled).parts for graph in part.session.every_graph}


@each("setup", list(SETUPS))
def test_it_hits_on_its_second_start_and_equals_the_first(setup, monkeypatch):
    with fresh_inductor_cache(), functorch_config.patch(enable_autograd_cache=True):
        cold, first = start(*SETUPS[setup])
        assert "hit" not in every_use(cold) or setup in ("blocks in place", "blocks by name")
        with monkeypatch.context() as m:
            m.setattr(backend, "rewrite", no_rewrite)
            warm, second = start(*SETUPS[setup])
        assert every_use(warm) == {"hit"}
        assert len(first) == len(second)
        assert all(map(torch.equal, first, second))
        assert facts(warm) == facts(cold)


@each("recipe", ["current", "delayed"])
def test_shapes_that_turn_dynamic_hit_from_the_third_start_on(recipe):
    """Torch remembers between starts which sizes changed, so the second compiles another first graph. With delayed scaling the
    first graph has one call alone, which runs the variant for the first step."""
    with fresh_inductor_cache(), functorch_config.patch(enable_autograd_cache=True):
        results = [start(mlp, lambda m: fp8_compile(m, recipe), None, True) for _ in range(3)]
    assert every_use(results[2][0]) == {"hit"}
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[2][1], strict=True))


def test_a_users_recipe_hits_until_its_code_or_what_it_reads_changes(monkeypatch):
    def use():
        compiled, _ = start(mlp, lambda m: fp8_compile(m, Own()), None, False)
        return inspect(compiled).cache["graph_0"], {g.a_scaling for g in inspect(compiled).gemms}

    with fresh_inductor_cache(), functorch_config.patch(enable_autograd_cache=True):
        assert use() == ("miss", {"row-wise"})
        assert use() == ("hit", {"row-wise"})
        monkeypatch.setitem(globals(), "GRANULARITY", Granularity.TENSOR_WISE)
        assert use() == ("miss", {"tensor-wise"})
        monkeypatch.setitem(globals(), "GRANULARITY", iter([Granularity.ROW_WISE] * 100))
        monkeypatch.setattr(Own, "quantization", lambda self, operand, role: Quantization(E4M3, next(GRANULARITY)))
        found, scalings = use()
        assert found == "bypassed: an object of builtins.list_iterator has no text that is the same in every process"
        assert scalings == {"row-wise"}


def test_a_restart_from_a_checkpoint_hits_and_goes_on():
    def run(steps, saved=None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = mlp()
        compiled = fp8_compile(model, "delayed")
        if saved is not None:
            model.load_state_dict(saved[0])
            state(compiled).load_state_dict(saved[1])
        results = []
        for step in steps:
            out = compiled(torch.full((16, 64), 0.1 * (step + 1)))
            out.square().sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 1e-3 * p.grad
                    p.grad = None
            results.append(out.detach())
        state(compiled).step()
        return compiled, results, (model.state_dict(), state(compiled).state_dict())

    with fresh_inductor_cache(), functorch_config.patch(enable_autograd_cache=True):
        _, straight, _ = run(range(5))
        _, _, saved = run(range(3))
        resumed, rest, _ = run(range(3, 5), saved)
        assert inspect(resumed).cache == {"graph_0": "hit"}
        assert all(map(torch.equal, straight[3:], rest))
