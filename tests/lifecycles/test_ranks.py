"""Distributed programs of the net, on two ranks that have the same batch: each must equal the reference's serial run."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, SplitPoint
from torch.distributed.pipelining import pipeline as make_pipe
from torch.distributed.tensor import DTensor

from fp8pass import DelayedScaling, state
from tests.distributed.support import on_ranks, run_on_ranks
from tests.lifecycles.harness import RECIPES, decibels
from tests.lifecycles.parts import WIDTH, batch, loss_of, mlp, sgd
from tests.lifecycles.reference import RECIPES as REFERENCES
from tests.lifecycles.reference import compile_reference
from tests.support.cases import rest
from tests.support.models import Stack
from tests.support.training import fp8, same

pytestmark = pytest.mark.dist
STEPS = 6


class Blocks(nn.Module):
    """Two, each of which FSDP2 gathers by itself; its hooks break the graph, which in a loop would leave the frame eager."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (Stack([mlp(seed)], residual=True) for seed in range(2))

    def forward(self, x):
        return self.last(self.first(x))


def trained(compiled, model):
    """Losses, evaluations, and what an average of the weights gives in high precision, in each step."""
    optimizer, average, found = sgd(model, 0.5), Blocks(), []
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


@pytest.mark.parametrize(
    ("recipe", "reshard", "options"),
    [
        ("short", True, {}),
        *rest(
            [
                ("current", False, {"weight_copies": "cache"}),
                ("rowwise", True, {"fsdp_gather": "fp8"}),
                ("current", False, {"fsdp_gather": "fp8"}),
            ]
        ),
    ],
    ids=str,
)
@on_ranks(2)
def test_fsdp2_with_evaluations_and_an_average(rank, recipe, reshard, options):
    torch._dynamo.reset()
    model, serial = Blocks(), Blocks()
    for module in (model.first, model.last, model):
        fully_shard(module, reshard_after_forward=reshard)
    ours = trained(fp8(model, RECIPES[recipe], **options), model)
    reference = compile_reference(serial, REFERENCES[recipe], step="ranks", schedule=None, in_place=False)
    found = [decibels(a, b) for a, b in zip(ours, trained(reference, serial), strict=True)]
    assert min(found) == float("inf"), found


def microbatches(step, kind):
    """Of each run of the schedule in a step."""
    return [batch(step + 100 * run, rows=64) for run in range(2 if kind == "accumulated" else 1)]


EVALUATED = 8 * batch(70, rows=64)


def pipeline(rank, recipe, kind, schedule="1F1B"):
    """What the rank of the last stage sees of a pipeline in each step, and of the same microbatches one after the other. A rank
    has a stage; two where a schedule is of several, in a V or in a loop."""
    torch._dynamo.reset()
    count = 2 if schedule == "1F1B" else 4
    numbers = [rank] if count == 2 else [rank, 3 - rank if "V" in schedule else rank + 2]
    parts = [mlp(seed) for seed in range(count)]
    whole = nn.Sequential(*(mlp(seed) for seed in range(count)))
    ends = {"1": SplitPoint.BEGINNING}
    pipe = make_pipe(whole, mb_args=(torch.zeros(16, WIDTH),), split_spec=ends) if kind == "front end" else None
    product = DelayedScaling(amax_history_len=3, reduce_amax=False) if recipe == "short" else recipe
    # Zero-bubble schedules go backward twice through what is compiled: torch asks for this.
    functorch_config.donated_buffer = "ZeroBubble" not in schedule and "V" not in schedule
    models, stages, device = [], [], torch.device("cpu")
    for i in numbers:
        models.append(whole[i] if pipe is None else pipe.get_stage_module(rank))
        fp8(models[-1], product, step="manual", in_place=True)
        first, last = (torch.zeros(16, WIDTH, requires_grad=wants) for wants in (i > 0, True))
        static = {"input_args": (first,), "output_args": (last,)} if kind == "static" else {}
        stages.append(PipelineStage(models[-1], i, count, device, **static) if pipe is None else pipe.build_stage(rank, device))
    junk = [torch.full((16, WIDTH), 1e6) for _ in range(200)]
    del junk  # what freed memory may hold
    made = getattr(pipelining, f"Schedule{schedule}")
    runs = made(stages[0] if count == 2 else stages, 4, loss_fn=lambda out, aim: (out - aim).square().mean())
    optimizer, ours, is_last = sgd(nn.ModuleList(models), 0.5), [], count - 1 in numbers
    for step in range(STEPS):
        optimizer.zero_grad()
        for x in microbatches(step, kind):
            losses = []
            runs.step(*((x,) if 0 in numbers else ()), **({"target": x.tanh(), "losses": losses} if is_last else {}))
            ours += [torch.stack(losses).detach()] if is_last else []
        optimizer.step()
        for model in models:
            state(model).step()
        if kind == "evaluated":
            ours.append(runs.eval(*(() if rank else (EVALUATED,)), target=EVALUATED.tanh(), losses=[]))
    return (ours, _serial(parts, REFERENCES[recipe], kind)) if is_last else None


def _serial(parts, recipe, kind):
    calls = [compile_reference(part, recipe, step="manual", schedule=None, in_place=False) for part in parts]
    parameters = list(itertools.chain(*(part.parameters() for part in parts)))
    optimizer, found = torch.optim.SGD(parameters, lr=0.5), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for given in microbatches(step, kind):
            losses = []
            for x in given.chunk(4):
                losses.append((functools.reduce(lambda out, call: call(out), calls, x) - x.tanh()).square().mean())
                losses[-1].backward()
            for p in parameters:
                p.grad.div_(4)
            found.append(torch.stack(losses).detach())
        optimizer.step()
        for call in calls:
            call.reference.state.end_step()
        if kind == "evaluated":
            with torch.no_grad():
                found.append(torch.cat([calls[1](calls[0](x)) for x in EVALUATED.chunk(4)]))
    return found


KINDS = [("short", kind, "1F1B") for kind in ("static", "evaluated", "accumulated", "front end")]
PLAIN = [*((recipe, "plain", "1F1B") for recipe in ("short", "current")), ("short", "static", "Interleaved1F1B")]
LOOPS = [("short", "plain", "LoopedBFS"), ("current", "plain", "InterleavedZeroBubble"), ("short", "plain", "ZBVZeroBubble")]


@pytest.mark.parametrize(
    ("recipe", "kind", "schedule"), [*KINDS, *rest([*PLAIN, *LOOPS, ("blockwise", "static", "DualPipeV")])]
)
def test_a_pipeline_equals_a_serial_run(recipe, kind, schedule):
    ((ours, serial),) = [found for found in run_on_ranks(pipeline, 2, recipe, kind, schedule) if found is not None]
    assert len(ours) == len(serial) >= STEPS
    assert same(ours, serial), (ours, serial)
