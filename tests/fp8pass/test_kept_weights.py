"""FP8 copies of weights that are kept between calls: equal to what a cast in each call gives, made as seldom as possible, never
out of date.

Oracle: the same model with weight_copies="save", which casts every weight in every call.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8pass import DelayedScaling, inspect, state
from fp8pass.weights import cache
from tests.support.models import BrokenLayers, mlp
from tests.support.moe import MoE
from tests.support.training import fp8, gradients, same, train

X = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def launches(monkeypatch):
    """The number of weights that each launch outside of the graphs has quantized."""
    found, quantize = [], cache.quantize
    monkeypatch.setattr(
        cache, "quantize", lambda kind, weights, scale: found.append(len(weights)) or quantize(kind, weights, scale)
    )
    return found


def make():
    return mlp(64, 96, 64)


def kept_of(compiled):
    """What is known of the weights of all graphs."""
    return [w for g in inspect(compiled).graphs for w in g.kept]


def half_frozen():
    model = make()
    model[0].requires_grad_(False)
    return model


FIRST, ONE = (DelayedScaling(amax_history_len=2, initial_scale=initial) for initial in ("current", "one"))
#: (model, recipe, optimizer steps, microbatches, how many weights the launches quantize)
SITUATIONS = [
    (make, "blockwise", 2, 3, [2, 2]),  # one launch per optimizer step
    # After a boundary that leaves a weight and its scale as they were, copies are kept; the scale 1, then that of the amax.
    (make, FIRST, 1, 3, [2]),
    (make, ONE, 1, 3, [2, 2]),
    (lambda: MoE().bfloat16(), "rowwise", 2, 2, [1, 1, 2, 2]),  # the router's and two stacks
    (lambda: BrokenLayers(3), "mxfp8", 2, 2, [1] * 6 + [6]),  # the second step makes the copies of all instances at once
    (half_frozen, "delayed", 3, 1, [1, 1, 2]),  # the scale of a weight that stays does, too
]


@pytest.mark.parametrize(("build", "recipe", "steps", "microbatches", "expected"), SITUATIONS)
def test_weights_are_cast_as_seldom_as_possible(build, recipe, steps, microbatches, expected, launches):
    """That training is equal: tests/lifecycles, with the option "cache"."""
    model = build()
    compiled = fp8(model, recipe, weight_copies="cache")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x = X[0].to(next(model.parameters()).dtype).requires_grad_()
    for _ in range(steps):
        train(compiled, *[x] * microbatches)
        optimizer.step()
        optimizer.zero_grad()
    assert sorted(launches) == expected
    if build is make:
        assert all(w.kept and w.reason is None for w in kept_of(compiled))


@pytest.mark.filterwarnings("ignore:.* has more than doubled")
def test_a_run_behind_the_boundary_leaves_the_recomputation_its_copies():
    """A forward of the next step makes the copies anew before a checkpointed one of the step before is run again."""

    def run(model, copies):
        compiled = fp8(model, "delayed", weight_copies=copies, step="manual")
        for i in range(3):
            compiled(X[i]).square().mean().backward()
            state(compiled).step()
        with torch.no_grad():
            model[0].weight.mul_(3)  # by the scale of the step before they saturate
        model.zero_grad()
        first = checkpoint(compiled, X[0].clone().requires_grad_(), use_reentrant=False)
        state(compiled).step()
        second = compiled(X[1])
        first.square().mean().backward()
        second.square().mean().backward()
        return [first.detach(), second.detach(), gradients(model)]

    model = make()
    assert same(*(run(copy.deepcopy(model), copies) for copies in ("cache", "save")))


def test_never_out_of_date_within_one_storage():
    """Another part of the same storage is other values, which no version tells of, and so is a transpose in the same memory; of
    a change in place the version tells."""
    model, parts = nn.Linear(64, 64).requires_grad_(False), torch.randn(2, 64, 64)
    compiled, plain = (fp8(model, weight_copies=copies) for copies in ("cache", "save"))
    for values in (parts[0], parts[1], parts[1].t()):
        model.weight.data = values
        assert torch.equal(compiled(X[0]), plain(X[0]))
    with torch.no_grad():
        model.weight.mul_(1.5)
    assert torch.equal(compiled(X[0]), plain(X[0]))


def test_inspect_counts_the_copies_and_the_other_choices_keep_none(launches):
    for copies in ("auto", "save", "recompute"):
        compiled = fp8(make().requires_grad_(False), weight_copies=copies)
        compiled(X)
        assert launches == kept_of(compiled) == []
    compiled = fp8(make(), weight_copies="cache")
    with torch.no_grad():
        compiled(X)
    report = inspect(compiled)
    assert "2 weights are quantized when changed, not at each call: 12,288 bytes of FP8 copies are kept." in str(report)
    assert {w["bytes"] for w in report.to_dict()["graphs"][0]["kept"]} == {6144}


def test_frozen_weights_that_were_only_evaluated_are_kept_in_the_orientation_that_training_needs():
    """Then no weight is dequantized or saved for the backward: it reads the copies."""
    found = []
    for copies in ("cache", "save"):
        torch.manual_seed(0)
        compiled, x = fp8(make().requires_grad_(False), weight_copies=copies), X[0].clone().requires_grad_()
        with torch.no_grad():
            before = compiled(x)
        train(compiled, x)
        found.append([before, x.grad])
        if copies == "cache":
            (graph,) = [graph for graph in inspect(compiled).graphs if graph.trains]
            read = [n.meta["val"] for n in graph.backward.graph.find_nodes(op="placeholder") if n.users]
            weights = [value.dtype for value in read if tuple(value.shape) in ((96, 64), (64, 96))]
            assert weights == [torch.float8_e4m3fn] * 2
    assert same(*found)
