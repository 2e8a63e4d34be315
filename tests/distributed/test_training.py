"""Training on several ranks: losses as in high precision and on one rank, boundaries, passes of pipelines, a monitor."""

import dataclasses
import functools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.nn.parallel import DistributedDataParallel

from fp8pass import DelayedScaling, fp8_compile, inspect, monitor, state
from tests.distributed import models
from tests.distributed.models import seeded, spread, train
from tests.distributed.support import everyone, on_ranks, run_on_ranks
from tests.support.models import Stack, mlp
from tests.support.training import fp8

pytestmark = pytest.mark.dist
STEPS = 30
#: Relative difference that a loss may have at any step.
TOLERANCE = 0.01


def compiler(recipe):
    if recipe is None:
        return functools.partial(torch.compile, backend="aot_eager")
    return functools.partial(fp8, recipe=recipe)  # every GEMM: a rank's part of the head is thin


def trained(kind, recipe):
    """(losses, scales, GEMMs in FP8, linears outside of compiled graphs, gathers in graphs) of a training run."""
    torch._dynamo.reset()
    model = seeded()
    compiled, shard, num_shards = (compiler(recipe)(model), 0, 1) if kind == "single" else spread(model, kind, compiler(recipe))
    losses = train(compiled, model.parameters(), range(STEPS), shard, num_shards)
    if recipe is None:
        return losses, None, None, None, None
    parts = list(model.layers) if kind.endswith("block") else [compiled]
    gemms = {(g.module, g.role) for part in parts for g in inspect(part).gemms if g.quantized}
    scales = [{name: state(part).scale(name).item() for name in state(part).tensors} for part in parts]
    gathers = [(g.tensor, g.quantized) for part in parts for graph in inspect(part).graphs for g in graph.gathers]
    return losses, scales, gemms, [name for part in parts for name in inspect(part).outside], gathers


def curves(rank, kind, recipes, num_tokens):
    with mock.patch.object(models, "TOKENS", num_tokens):
        return [trained(kind, recipe) for recipe in recipes]


def largest_difference(losses, others) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, others, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "num_ranks", "recipe", "num_tokens"),
    [
        ("ddp without splitting", 2, "current", 16),
        ("fsdp per block", 2, "blockwise", 16),
        ("sp of DTensors", 2, "delayed", 15),  # which two ranks do not divide
        ("fsdp+tp", 4, "current", 16),
    ],
)
def test_losses_follow_high_precision_and_one_rank(kind, num_ranks, recipe, num_tokens):
    results = run_on_ranks(curves, num_ranks, kind, [None, recipe], num_tokens)
    ((single, _, single_gemms, *_),) = run_on_ranks(curves, 1, "single", [recipe], num_tokens)[0]
    for (high, *_), (low, scales, gemms, outside, gathers) in results:
        _, (first, first_scales, *_, first_gathers) = results[0]
        assert (low, scales) == (first, first_scales)
        assert gathers == first_gathers, "ranks that pad their shard gather as often as the others"
        assert low[-1] < 0.9 * low[0]
        assert largest_difference(low, high) < TOLERANCE
        assert largest_difference(low, single) < TOLERANCE
        if kind.endswith("block"):
            assert gemms == {(m.removeprefix("layers.0."), role) for m, role in single_gemms if "layers.0" in m}
        elif "fsdp" in kind:  # the hooks of fully_shard break the graph around each block; what stands between runs eagerly
            assert gemms == {(m, role) for m, role in single_gemms if m != "head"}
            assert outside == ["head"]
        else:
            assert gemms == single_gemms


@on_ranks(2)
def test_a_boundary_without_training_is_no_step(rank):
    """Ranks agree at boundaries behind which none of them has trained: each step runs in FP8 until two have passed."""
    model = mlp()
    compiled = fp8_compile(model, "delayed", backend="aot_eager", step="manual", schedule={2: {"*": None}})
    view, x = state(compiled), torch.randn(16, 64)
    for is_in_fp8 in (True, True, False):
        out = compiled(x)
        assert torch.equal(out, model(x)) != is_in_fp8
        out.sum().backward()
        for _ in range(3):
            view.step()


# -- passes by which a pipeline finds out shapes; whole pipelines are those of tests/lifecycles/test_ranks.py

OWN = DelayedScaling(amax_history_len=2, reduce_amax=False)


def ways():
    """Per way of compiling: a new stage, and the compiled models whose state it has."""
    in_place = functools.partial(fp8, recipe=OWN, step="manual", in_place=True)
    whole, again = in_place(mlp()), in_place(Stack([mlp()], use_reentrant=False))
    beside = fp8(mlp(), OWN, step="manual")
    blocks = Stack([in_place(mlp()), in_place(mlp())])
    named = torch.compile(mlp(), backend="fp8pass", options={"recipe": OWN, "backend": "aot_eager"})
    yield from (("in place", whole, [whole]), ("checkpointed", again, [again]), ("beside", beside, [beside]))
    yield from (("blocks", blocks, list(blocks.layers)), ("by name", named, [named]))


@on_ranks(1)
def test_a_pass_that_finds_out_shapes_leaves_no_trace(rank):
    """Of a pipeline of one stage."""
    for way, module, compiled in ways():
        monitors = [monitor(one, every=1) for one in compiled]
        junk = [torch.full((64, 64), 1e6) for _ in range(100)]
        del junk  # what torch.empty may find
        stage = pipelining.PipelineStage(module, 0, 1, torch.device("cpu"))
        schedule = pipelining.ScheduleGPipe(stage, 1, loss_fn=nn.functional.mse_loss)
        x = torch.randn(64, 64, requires_grad=True)
        stage.has_backward = True  # as in later passes: torch 2.13 sets it after the first one
        schedule._initialize_stage((x,), {}, target=x.detach())
        for one, watching in zip(compiled, monitors, strict=True):
            view = state(one)
            view.step()
            assert view.tensors, way
            assert not any(view.amax_history(name).any() for name in view.tensors), way
            assert watching.latest is None


# -- a monitor finds what one process finds with the tensors of all ranks

ROWS = 48


def whole_batch():
    """The ranks' rows behind each other: those of the second are much larger, and hold what is not finite."""
    x = torch.randn(2 * ROWS, 64, generator=torch.Generator().manual_seed(0))
    x[ROWS:] *= 1000
    x[0, :4] = torch.tensor([-0.0, -1e-30, 1e-12, 1e-30])
    x[-1, :2] = torch.tensor([torch.nan, -torch.inf])
    return x


def watched(rank, recipe, num_ranks):
    """What the monitor measured of the input, and said."""
    torch.manual_seed(0)
    compiled = fp8_compile(nn.Sequential(nn.Linear(64, 96)), recipe, backend="aot_eager", step="manual", select="all")
    logged = []
    watching = monitor(compiled, every=1, log=logged.append)
    count = 2 * ROWS // num_ranks
    DistributedDataParallel(compiled)(whole_batch()[rank * count : (rank + 1) * count]).sum().backward()
    state(compiled).step()
    found = next(t for t in watching.latest.tensors if t.name == "0:input" and t.copy != "columnwise")
    numbers = str((found, logged, watching.latest.first_non_finite))
    assert everyone(numbers) == [numbers] * num_ranks, "every rank has the same numbers"
    return dataclasses.asdict(found), watching.latest.first_non_finite


@pytest.mark.parametrize("recipe", [DelayedScaling(initial_scale="one"), "rowwise"], ids=["delayed", "rowwise"])
def test_the_monitors_numbers_are_those_of_one_process(recipe):
    ((expected, _), (found, text), _) = *run_on_ranks(watched, 1, recipe, 1), *run_on_ranks(watched, 2, recipe, 2)
    assert "0:input, for the GEMM output, in the forward (2 elements)" in text
    assert (found["num_elements"], found["num_non_finite"]) == (2 * ROWS * 64, 2)
    assert found["num_underflow"] >= 3
    for each in (
        found,
        expected,
    ):  # with one scale a rank is a block; quantiles between the extremes are means
        each["headroom"] = each["headroom"][0]
        each["block_sqnr"] = recipe == "rowwise" and (each["block_sqnr"][0], each["block_sqnr"][-1])
    for name, value in expected.items():
        is_exact = isinstance(value, (str, int)) or value is None
        assert found[name] == (value if is_exact else pytest.approx(value, rel=1e-6)), name
