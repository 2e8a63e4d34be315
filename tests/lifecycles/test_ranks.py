"""Distributed programs of the net, on two ranks that have the same batch: each must equal the reference's serial run."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, SplitPoint
from torch.distributed.pipelining import pipeline as make_pipe
from torch.distributed.tensor import DTensor

from fp8pass import DelayedScaling, state
from tests.distributed.support import everyone, on_ranks
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


# -- pipelines

ONE_STAGE, LOOPED, V_SHAPED = (
    ("GPipe", "1F1B"),
    ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"),
    ("ZBVZeroBubble", "DualPipeV"),
)
#: How a program uses its schedule: shapes that are given or found out; evaluations of larger values between steps, behind which
#: torch finds them out again; two runs a step; a stage of torch's own front end.
KINDS = ("static", "plain", "evaluated", "accumulated", "front end")


def microbatches(step, kind):
    """Of each run of the schedule in a step."""
    return [batch(step + 100 * run, rows=64) for run in range(2 if kind == "accumulated" else 1)]


EVALUATED = 8 * batch(70, rows=64)


def stage_of(number, count, recipe, kind):
    """A stage that is compiled in place, and its module."""
    whole = nn.Sequential(*(mlp(seed) for seed in range(count)))
    ends, device = {"1": SplitPoint.BEGINNING}, torch.device("cpu")
    pipe = make_pipe(whole, mb_args=(torch.zeros(16, WIDTH),), split_spec=ends) if kind == "front end" else None
    model = whole[number] if pipe is None else pipe.get_stage_module(number)
    product = DelayedScaling(amax_history_len=3, reduce_amax=False) if recipe == "short" else recipe
    fp8(model, product, step="manual", in_place=True)
    first, last = (torch.zeros(16, WIDTH, requires_grad=wants) for wants in (number > 0, True))
    static = {"input_args": (first,), "output_args": (last,)} if kind == "static" else {}
    stage = PipelineStage(model, number, count, device, **static) if pipe is None else pipe.build_stage(number, device)
    return model, stage


def pipeline(rank, recipe, kind, schedule):
    """What the rank of the last stage sees of a pipeline in each step, and the number of stages."""
    torch._dynamo.reset()
    numbers = [rank] if schedule in ONE_STAGE else [rank, 3 - rank] if schedule in V_SHAPED else [rank, rank + 2]
    count = 2 * len(numbers)
    models, stages = zip(*(stage_of(number, count, recipe, kind) for number in numbers), strict=True)
    made = getattr(pipelining, f"Schedule{schedule}")
    runs = made(stages[0] if len(stages) == 1 else list(stages), 4, loss_fn=lambda out, aim: (out - aim).square().mean())
    is_first, is_last = 0 in numbers, count - 1 in numbers
    optimizer, ours = sgd(nn.ModuleList(models), 0.5), []
    for step in range(STEPS):
        junk = [torch.full((rows, WIDTH), 1e6) for rows in (16, 64) for _ in range(100)]
        del junk  # what freed memory may hold
        optimizer.zero_grad()
        for x in microbatches(step, kind):
            losses = []
            runs.step(*((x,) if is_first else ()), **({"target": x.tanh(), "losses": losses} if is_last else {}))
            ours += [torch.stack(losses).detach()] if is_last else []
        optimizer.step()
        for model in models:
            state(model).step()
        if kind == "evaluated":
            last = {"target": EVALUATED.tanh(), "losses": []} if is_last else {}
            out = runs.eval(*((EVALUATED,) if is_first else ()), **last)
            ours += [out] if is_last else []
    return ours, count


def serial(count, recipe, kind):
    """The same microbatches one after the other, by the reference."""
    parts = nn.ModuleList(mlp(seed) for seed in range(count))
    calls = [compile_reference(part, recipe, step="manual", schedule=None, in_place=False) for part in parts]

    def run(x):
        return functools.reduce(lambda out, call: call(out), calls, x)

    optimizer, found = sgd(parts, 0.5), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for given in microbatches(step, kind):
            losses = []
            for x in given.chunk(4):
                losses.append((run(x) - x.tanh()).square().mean())
                losses[-1].backward()
            for p in parts.parameters():
                p.grad.div_(4)
            found.append(torch.stack(losses).detach())
        optimizer.step()
        for call in calls:
            call.reference.state.end_step()
        if kind == "evaluated":
            with torch.no_grad():
                found.append(torch.cat([run(x) for x in EVALUATED.chunk(4)]))
    return found


def assert_equals_serial(rank, recipe, kind, schedule):
    ours, count = pipeline(rank, recipe, kind, schedule)
    if ours:
        expected = serial(count, REFERENCES[recipe], kind)
        assert same(ours, expected), (schedule, kind, ours, expected)
    assert sorted(everyone(bool(ours))) == [False, True], "the rank of the last stage"


@pytest.mark.parametrize(
    ("recipe", "kind"), [*(("short", kind) for kind in KINDS), *rest([("current", "plain"), ("blockwise", "evaluated")])]
)
@on_ranks(2)
def test_a_pipeline_equals_a_serial_run(rank, recipe, kind):
    assert_equals_serial(rank, recipe, kind, "1F1B")


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["short", "current", "blockwise"])
@on_ranks(2)
def test_every_schedule_equals_a_serial_run(rank, recipe):
    for schedule in ONE_STAGE + LOOPED + V_SHAPED:
        evaluates = schedule in ONE_STAGE + LOOPED[:2]
        # Zero-bubble schedules go backward twice through what is compiled: torch asks for this.
        torch._functorch.config.donated_buffer = evaluates
        for kind in ("static", "evaluated" if evaluates else "plain"):
            assert_equals_serial(rank, recipe, kind, schedule)
