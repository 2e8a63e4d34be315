"""Distributed programs of the net, on two ranks that have the same batch: each must equal the reference's serial run."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint
from torch.distributed.pipelining import pipeline as make_pipe
from torch.distributed.tensor import DTensor

from fp8pass import DelayedScaling, fp8_compile, state
from tests.distributed.support import run_on_ranks
from tests.lifecycles.harness import RECIPES, decibels
from tests.lifecycles.parts import WIDTH, batch, loss_of, mlp
from tests.lifecycles.reference import RECIPES as REFERENCES
from tests.lifecycles.reference import compile_reference

pytestmark = pytest.mark.dist
STEPS = 6


class Block(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.inner = mlp(seed)

    def forward(self, x):
        return x + self.inner(x)


class Blocks(nn.Module):
    """Two, each of which FSDP2 gathers by itself; its hooks break the graph."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Block(0), Block(1)

    def forward(self, x):
        return self.last(self.first(x))


def trained(compiled, model):
    """Losses, evaluations, and what an average of the weights gives in high precision, in each step."""
    optimizer, average, found = torch.optim.SGD(model.parameters(), lr=0.5), Blocks(), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(compiled(batch(step)), batch(step))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            found += [loss.detach(), compiled(batch(90))]
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new.full_tensor() if isinstance(new, DTensor) else new, 0.5)
            found.append(average(batch(90)))
    return found


def sharded(model, reshard):
    for block in (model.first, model.last):
        fully_shard(block, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)


def fsdp(rank, recipe, reshard, options):
    torch._dynamo.reset()
    model = sharded(Blocks(), reshard)
    compiled = fp8_compile(model, RECIPES[recipe], backend="aot_eager", select="all", **options)
    ours = trained(compiled, model)
    serial = Blocks()
    reference = compile_reference(serial, REFERENCES[recipe], step="ranks", schedule=None, in_place=False)
    theirs = trained(reference, serial)
    return [decibels(a, b) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize(
    ("recipe", "reshard", "options"),
    [
        ("short", True, {}),
        pytest.param("current", False, {"weight_copies": "cache"}, marks=pytest.mark.exhaustive),
        pytest.param("rowwise", True, {"fsdp_gather": "fp8"}, marks=pytest.mark.exhaustive),
        pytest.param(
            "current",
            False,
            {"fsdp_gather": "fp8"},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_fsdp2_with_evaluations_and_an_average(recipe, reshard, options):
    for found in run_on_ranks(fsdp, 2, recipe, reshard, options):
        assert min(found) == float("inf"), found


def pipeline(rank, recipe, kind):
    """What the last rank sees of a pipeline in each step, and of the same microbatches one after the other."""
    torch._dynamo.reset()
    parts = [mlp(seed) for seed in range(2)]
    whole = copy.deepcopy(nn.Sequential(*parts))
    ends = {"1": SplitPoint.BEGINNING}
    pipe = make_pipe(whole, mb_args=(torch.zeros(16, WIDTH),), split_spec=ends) if kind == "front end" else None
    model = whole[rank] if pipe is None else pipe.get_stage_module(rank)
    product = DelayedScaling(amax_history_len=3, reduce_amax=False) if recipe == "short" else recipe
    fp8_compile(model, product, backend="aot_eager", select="all", step="manual", in_place=True)
    first, last = (torch.zeros(16, WIDTH, requires_grad=wants) for wants in (rank > 0, True))
    static = {"input_args": (first,), "output_args": (last,)} if kind == "static" else {}
    junk = [torch.full((16, WIDTH), 1e6) for _ in range(200)]
    del junk  # what freed memory may hold
    device = torch.device("cpu")
    stage = PipelineStage(model, rank, 2, device, **static) if pipe is None else pipe.build_stage(rank, device)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, aim: (out - aim).square().mean())
    optimizer, ours = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for run in range(2 if kind == "accumulated" else 1):
            x, losses = batch(step + 100 * run, rows=64), []
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=x.tanh(), losses=losses)
                ours.append(torch.stack(losses).detach().mean())
        optimizer.step()
        state(model).step()
        if kind == "evaluated":
            x = 8 * batch(70, rows=64)
            ours.append(schedule.eval(*(() if rank else (x,)), target=x.tanh(), losses=[]))
    return ours, _serial(parts, REFERENCES[recipe], kind)


def _serial(parts, recipe, kind):
    calls = [compile_reference(part, recipe, step="manual", schedule=None, in_place=False) for part in parts]
    optimizer, found = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.5), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for run in range(2 if kind == "accumulated" else 1):
            losses = []
            for x in batch(step + 100 * run, rows=64).chunk(4):
                losses.append((calls[1](calls[0](x)) - x.tanh()).square().mean())
                losses[-1].backward()
            for part in parts:
                for p in part.parameters():
                    p.grad.div_(4)
            found.append(torch.stack(losses).detach().mean())
        optimizer.step()
        for call in calls:
            call.reference.state.end_step()
        if kind == "evaluated":
            with torch.no_grad():
                found.append(torch.cat([calls[1](calls[0](x)) for x in (8 * batch(70, rows=64)).chunk(4)]))
    return found


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("short", "static"),
        pytest.param("current", "plain", marks=pytest.mark.exhaustive),
        ("short", "plain"),
        ("short", "evaluated"),
        ("short", "accumulated"),
        ("short", "front end"),
    ],
)
def test_a_pipeline_equals_a_serial_run(recipe, kind):
    _, (ours, serial) = run_on_ranks(pipeline, 2, recipe, kind)
    assert len(ours) == len(serial) >= STEPS
    assert all(a.equal(b) for a, b in zip(ours, serial, strict=True)), (ours, serial)
