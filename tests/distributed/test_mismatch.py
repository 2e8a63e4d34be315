"""Ranks that compile one model differently are told before its first step, and nobody hangs."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fp8pass import DelayedScaling, Float8CurrentScaling, fp8_compile, state
from fp8pass.errors import Fp8Warning, RankMismatchError, StrictError
from tests.distributed.support import on_ranks, outcomes_on_ranks
from tests.support.models import ResidualMlp

pytestmark = pytest.mark.dist

CURRENT = {"recipe": "current"}
DELAYED = {"recipe": DelayedScaling(amax_history_len=4)}


def seeded():
    torch.manual_seed(0)
    return ResidualMlp(64, 128)


def parallel(model):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def compiled(model, **options):
    options = {"backend": "aot_eager", "select": "all"} | options
    return fp8_compile(model, **options)


def around(model, **options):
    """DDP around what was compiled in place, as callbacks of trainers leave it."""
    compiled(model, in_place=True, **options)
    return DistributedDataParallel(model)


def by_name(model, **options):
    return torch.compile(model, backend="fp8pass", options={"backend": "aot_eager"} | options)


def in_ddp(**options):
    return compiled(DistributedDataParallel(seeded()), **options)


def alone(**options):
    return compiled(seeded(), **options)


#: Name -> how the model is made, the options of ranks 0 and 1, and what the message says of both.
CASES = {
    "DDP, recipes": (
        in_ddp, CURRENT, {"recipe": "rowwise"},
        "recipe is Float8CurrentScaling() on rank 0 and Float8RowwiseScaling() on rank 1",
    ),
    "DDP around, delayed against current": (
        lambda **options: around(seeded(), **options), DELAYED, CURRENT,
        "recipe is DelayedScaling(amax_history_len=4) on rank 0 and Float8CurrentScaling() on rank 1",
    ),
    "DDP, by name": (
        lambda **options: by_name(DistributedDataParallel(seeded()), **options), CURRENT, {"recipe": "blockwise"},
        "recipe is Float8CurrentScaling() on rank 0 and Float8BlockScaling() on rank 1",
    ),
    "FSDP, gathers": (
        lambda **options: compiled(fully_shard(seeded()), **options), CURRENT | {"fsdp_gather": "fp8"}, CURRENT,
        "fsdp_gather is 'fp8' on rank 0 and None on rank 1",
    ),
    "TP, rules": (
        lambda **options: compiled(parallel(seeded()), **options),
        CURRENT | {"rules": {"up": None}}, CURRENT | {"rules": {"up:grad_weight": None}},
        "rules['up'] is None on rank 0 and not given on rank 1; rules['up:grad_weight'] is not given on rank 0",
    ),
    "reduced amaxes, an option of the recipe": (
        alone, DELAYED, {"recipe": DelayedScaling(amax_history_len=4, margin=1)},
        "recipe is DelayedScaling(amax_history_len=4) on rank 0 and DelayedScaling(margin=1, amax_history_len=4) on rank 1",
    ),
    "reduced amaxes, delayed against current": (
        alone, DELAYED, CURRENT,
        "recipe is DelayedScaling(amax_history_len=4) on rank 0 and Float8CurrentScaling() on rank 1",
    ),
    "reduced amaxes, steps": (
        alone, DELAYED | {"step": "manual"}, DELAYED, "step is 'manual' on rank 0 and 'auto' on rank 1",
    ),
    "DDP, the order of rules": (
        in_ddp, CURRENT | {"rules": {"up": None, "*": "rowwise"}}, CURRENT | {"rules": {"*": "rowwise", "up": None}},
        "the order of rules is 'up', '*' on rank 0 and '*', 'up' on rank 1",
    ),
    "DDP, copies of weights": (
        in_ddp, CURRENT | {"weight_copies": "cache"}, CURRENT, "weight_copies is 'cache' on rank 0 and 'auto' on rank 1",
    ),
    "DDP, schedules": (
        in_ddp, CURRENT | {"schedule": {5: {"up": None}}}, CURRENT,
        "schedule[5]['up'] is None on rank 0 and not given on rank 1",
    ),
}  # fmt: skip


def train(model, steps=2):
    for _ in range(steps):
        model(torch.randn(16, 64)).square().mean().backward()


def train_and_step(model):
    train(model, steps=3)
    state(model).step()


@on_ranks(2)
def test_what_differs_is_named_on_every_rank(rank):
    for name, (make, *options, expected) in CASES.items():
        dist.barrier()
        began = time.monotonic()
        model = make(**options[rank])
        with pytest.raises(RankMismatchError, match=re.escape(expected)):
            train_and_step(model)
        assert time.monotonic() - began < 25, name  # less than a rank waits for one that does not come


def train_apart(model):
    """Both ranks have begun before either goes on: whoever came first looks at its next boundaries."""
    try:
        train(model, steps=1)
    finally:
        dist.barrier()
    train(model, steps=3)


@on_ranks(2)
def test_models_that_nothing_ties_together_are_no_error(rank):
    """A warning, an error under strict; and what is no mismatch at all."""
    text = re.escape("recipe is Float8CurrentScaling() on rank 0 and Float8RowwiseScaling() on rank 1")
    recipe = ("current", "rowwise")[rank]
    with pytest.warns(Fp8Warning, match=text) as warned:
        train_apart(compiled(seeded(), recipe=recipe))
    assert len([w for w in warned if issubclass(w.category, Fp8Warning)]) == 1
    dist.barrier()
    with pytest.raises(StrictError, match=text):
        train_apart(compiled(seeded(), recipe=recipe, strict=True))
    dist.barrier()
    model = in_ddp(recipe="current")
    began = time.monotonic()
    if rank == 0:  # a teacher on one rank alone, another model, and evaluations
        train(compiled(nn.Sequential(seeded(), seeded()), recipe=DelayedScaling(reduce_amax=False)))
        with torch.no_grad():
            alone(recipe="blockwise")(torch.randn(16, 64))
    train(model)
    other = in_ddp(recipe=DelayedScaling(amax_history_len=rank + 1, reduce_amax=False))
    with pytest.raises(RankMismatchError, match=r"recipe is DelayedScaling\(amax_history_len=1, reduce_amax=False\) on rank 0"):
        train(other)
    train(in_ddp(recipe=Float8CurrentScaling(), rules={"up": None}))
    assert time.monotonic() - began < 25


def in_groups_made_again(rank):
    train(in_ddp(recipe="current"))
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    train(in_ddp(recipe=("current", "rowwise")[rank]))


def test_groups_that_are_made_again_are_compared_again():
    for outcome in outcomes_on_ranks(in_groups_made_again, 2):
        assert outcome.error.startswith("RankMismatchError: ranks 0 and 1")
