"""Pipelines: every schedule equals the same microbatches one after the other, bit for bit, and passes by which torch finds out
shapes leave no trace."""

import functools
import importlib
import itertools
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8pass
from tests.distributed.support import ROOT, everyone, on_ranks
from tests.support.models import Stack
from tests.support.training import same

pytestmark = pytest.mark.dist

WIDTH, ROWS, MICROBATCHES, STEPS = 64, 16, 4, 3
RECIPES = {"delayed": fp8pass.DelayedScaling(amax_history_len=2, reduce_amax=False)}


class Stage(nn.Module):
    def __init__(self, seed, checkpoints=False):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.checkpoints = checkpoints

    def block(self, x):
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) if self.checkpoints else self.block(x)


def compiled_in_place(stage, recipe, step="manual", select="all"):
    fp8pass.fp8_compile(stage, RECIPES.get(recipe, recipe), backend="aot_eager", select=select, step=step, in_place=True)
    return stage


def batches(step):
    return torch.randn(MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(step)) * (1 + step % 3)


def loss_of(out, aim):
    return (out - aim).square().mean()


def fill_freed_memory():
    """What `torch.empty` may find."""
    junk = [torch.full((rows, WIDTH), 1e6) for rows in (ROWS, 2 * ROWS) for _ in range(100)]
    del junk


# -- schedules

ONE_STAGE, LOOPED, V_SHAPED = (
    ("GPipe", "1F1B"),
    ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"),
    ("ZBVZeroBubble", "DualPipeV"),
)


def piped(rank, schedule, recipe, is_static, evaluates):
    """Losses by step, on the rank that has the last stage."""
    numbers = [rank] if schedule in ONE_STAGE else [rank, 3 - rank] if schedule in V_SHAPED else [rank, rank + 2]
    count = 2 * len(numbers)
    modules = [compiled_in_place(Stage(i), recipe) for i in numbers]
    stages = []
    for i, module in zip(numbers, modules, strict=True):
        first, last = (torch.zeros(ROWS, WIDTH, requires_grad=wants) for wants in (i > 0, True))
        static = {"input_args": (first,), "output_args": (last,)} if is_static else {}
        stages.append(pipelining.PipelineStage(module, i, count, torch.device("cpu"), **static))
    kind = getattr(pipelining, f"Schedule{schedule}")
    runs = kind(stages[0] if len(stages) == 1 else stages, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.5)
    found = []
    for step in range(STEPS):
        x, losses = batches(step), []
        args = (x,) if 0 in numbers else ()
        last = {"target": x.tanh(), "losses": losses} if count - 1 in numbers else {}
        fill_freed_memory()
        optimizer.zero_grad()
        runs.step(*args, **last)
        optimizer.step()
        for module in modules:
            fp8pass.state(module).step()
        if last:
            found.append(torch.stack(losses).detach())
        if evaluates:  # on larger values; from training to evaluation and back, torch finds out the shapes again
            runs.eval(*(8 * arg for arg in args), **last)
    return found


def serial(modules, optimizer, parts_of, loss_of=loss_of, steps=STEPS):
    """Losses of the same microbatches one after the other. parts_of: the inputs and aims of a step."""
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        losses = []
        for x, aim in parts_of(step):
            losses.append(loss_of(functools.reduce(lambda out, module: module(out), modules, x), aim))
            losses[-1].backward()
        for module in modules:
            for p in module.parameters():
                p.grad.div_(MICROBATCHES)
        optimizer.step()
        for module in modules:
            fp8pass.state(module).step()
        found.append(torch.stack(losses).detach())
    return found


def serial_stages(count, recipe):
    modules = [compiled_in_place(Stage(i), recipe) for i in range(count)]
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.5)
    return serial(modules, optimizer, lambda step: [(x, x.tanh()) for x in batches(step).chunk(MICROBATCHES)])


@pytest.mark.exhaustive
@on_ranks(2)
def test_a_schedule_equals_a_serial_run(rank):
    """On the rank that has the last stage."""
    for schedule, recipe in itertools.product(ONE_STAGE + LOOPED + V_SHAPED, ("delayed", "current", "blockwise")):
        evaluates = schedule in ONE_STAGE + LOOPED[:2]
        # Zero-bubble schedules go backward twice through what is compiled: torch asks for this.
        torch._functorch.config.donated_buffer = evaluates
        torch._dynamo.reset()
        expected = serial_stages(2 if schedule in ONE_STAGE else 4, recipe)
        for is_static in (False, True):
            torch._dynamo.reset()
            losses = piped(rank, schedule, recipe, is_static, evaluates)
            assert not losses or same(losses, expected), (schedule, recipe, is_static)
            assert sorted(everyone(bool(losses))) == [False, True]


# -- every way to compile a stage


def by_name(stage, recipe, **options):
    return torch.compile(
        stage, backend="fp8pass", options={"recipe": RECIPES.get(recipe, recipe), "backend": "aot_eager"} | options
    )


def wrapped(stage, recipe, **options):
    return fp8pass.fp8_compile(stage, RECIPES.get(recipe, recipe), backend="aot_eager", select="all", step="manual", **options)


def ways():
    """Per way of compiling: a new stage, and the compiled models whose state it has."""
    whole = compiled_in_place(Stage(0), "delayed")
    yield "in place", whole, [whole]
    beside = wrapped(Stage(0), "delayed")
    yield "beside", beside, [beside]
    blocks = Stack([compiled_in_place(Stage(0), "delayed"), compiled_in_place(Stage(1), "delayed")])
    yield "blocks", blocks, list(blocks.layers)
    again = compiled_in_place(Stage(0, checkpoints=True), "delayed")
    yield "checkpointed", again, [again]
    automatic = compiled_in_place(Stage(0), "delayed", step="auto")
    yield "automatic steps", automatic, [automatic]
    named = by_name(Stage(0), "delayed")
    yield "by name", named, [named]


@on_ranks(1)
def test_a_pass_that_finds_out_shapes_leaves_no_trace(rank):
    """Of a pipeline of one stage."""
    for way, module, compiled in ways():
        monitors = [fp8pass.monitor(one, every=1) for one in compiled]
        fill_freed_memory()
        stage = pipelining.PipelineStage(module, 0, 1, torch.device("cpu"))
        schedule = pipelining.ScheduleGPipe(stage, 1, loss_fn=loss_of)
        x = batches(0)
        x.requires_grad_()
        stage.has_backward = True  # as in later passes: torch 2.13 sets it after the first one
        schedule._initialize_stage((x,), {}, target=x.detach())
        for one, monitor in zip(compiled, monitors, strict=True):
            view = fp8pass.state(one)
            histories = [view.amax_history(name) for name in view.tensors]
            view.step()
            histories += [view.amax_history(name) for name in view.tensors]
            assert histories, way
            assert not any(history.any() for history in histories), way
            assert monitor.latest is None


# -- the example

RUN = """
import json, sys
sys.path.insert(0, "examples")
import train_pipeline
losses = train_pipeline.main(sys.argv[1:])
if losses:
    print("losses", json.dumps(losses))
"""


def serial_example(example, recipe, steps, width=64):
    modules = []
    for rank in range(2):
        torch.manual_seed(rank)
        recipe = fp8pass.DelayedScaling(reduce_amax=False) if recipe == "delayed" else recipe
        modules.append(compiled_in_place(nn.Sequential(example.Block(width), example.Block(width)), recipe, select="auto"))
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-3)
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
    parts = list(zip(x.chunk(4), x.roll(1, 0).chunk(4), strict=True))
    return [losses.mean().item() for losses in serial(modules, optimizer, lambda step: parts, F.mse_loss, steps)]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("current", marks=pytest.mark.exhaustive)])
def test_the_example_equals_a_serial_run(recipe, tmp_path, monkeypatch):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [*launcher, "--nproc-per-node", "2", str(script), "--backend", "aot_eager", "--steps", "5", "--recipe", recipe]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in (0, 1):
        assert f"rank {rank}: 12 of 12 GEMMs in FP8" in run.stdout
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have it: sums depend on it
    expected = serial_example(importlib.import_module("train_pipeline"), recipe, steps=5)
    torch.set_num_threads(threads)
    assert json.loads(re.search(r"losses (.+)", run.stdout).group(1)) == expected
