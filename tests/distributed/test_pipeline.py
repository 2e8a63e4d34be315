"""Pipelines: every schedule of two stages on a rank equals the same microbatches one after the other, bit for bit."""

import functools

import pytest
import torch
from torch.distributed import pipelining

import fp8pass
from tests.distributed.support import everyone, on_ranks
from tests.support.models import Stack, mlp
from tests.support.training import fp8, same

pytestmark = pytest.mark.dist

WIDTH, ROWS, MICROBATCHES, STEPS = 64, 16, 4, 3
DELAYED = fp8pass.DelayedScaling(amax_history_len=2, reduce_amax=False)
#: With the recipe, and whether stages are told their shapes.
SCHEDULES = [
    ("Interleaved1F1B", DELAYED, True),
    ("LoopedBFS", DELAYED, False),
    ("InterleavedZeroBubble", "current", False),
    ("ZBVZeroBubble", DELAYED, False),
    ("DualPipeV", "blockwise", True),
]


def stage_of(number, recipe):
    torch.manual_seed(number)
    return fp8(Stack([mlp(WIDTH, 2 * WIDTH, WIDTH)], residual=True), recipe, step="manual", in_place=True)


def loss_of(out, aim):
    return (out - aim).square().mean()


def trained(modules, run):
    """What `run` makes of the batch of each step."""
    optimizer, found = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.5), []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(step)) * (1 + step % 3)
        found.append(run(x))
        optimizer.step()
        for module in modules:
            fp8pass.state(module).step()
    return found


def serial(recipe):
    modules = [stage_of(i, recipe) for i in range(4)]

    def run(x):
        losses = []
        for part in x.chunk(MICROBATCHES):
            losses.append(loss_of(functools.reduce(lambda out, module: module(out), modules, part), part.tanh()))
            (losses[-1] / MICROBATCHES).backward()
        return torch.stack(losses).detach()

    return trained(modules, run)


def piped(rank, schedule, recipe, is_static):
    """None on the rank without the last stage."""
    numbers = [rank, 3 - rank] if schedule in ("ZBVZeroBubble", "DualPipeV") else [rank, rank + 2]
    modules, stages = [stage_of(i, recipe) for i in numbers], []
    for i, module in zip(numbers, modules, strict=True):
        first, last = (torch.zeros(ROWS, WIDTH, requires_grad=wants) for wants in (i > 0, True))
        static = {"input_args": (first,), "output_args": (last,)} if is_static else {}
        stages.append(pipelining.PipelineStage(module, i, 4, torch.device("cpu"), **static))
    runs = getattr(pipelining, f"Schedule{schedule}")(stages, MICROBATCHES, loss_fn=loss_of)

    def run(x):
        losses = []
        runs.step(*((x,) if 0 in numbers else ()), **({"target": x.tanh(), "losses": losses} if 3 in numbers else {}))
        return torch.stack(losses).detach() if losses else None

    return trained(modules, run)


@pytest.mark.exhaustive
@on_ranks(2)
def test_a_schedule_equals_a_serial_run(rank):
    for schedule, recipe, is_static in SCHEDULES:
        # Zero-bubble schedules go backward twice through what is compiled: torch asks for this.
        torch._functorch.config.donated_buffer = schedule in ("Interleaved1F1B", "LoopedBFS")
        torch._dynamo.reset()
        expected = serial(recipe)
        torch._dynamo.reset()
        losses = piped(rank, schedule, recipe, is_static)
        assert losses[0] is None or same(losses, expected), (schedule, recipe)
        assert sorted(everyone(losses[0] is not None)) == [False, True]
