"""Ranks that compile one model differently are told before its first step, and nobody hangs."""

import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fp8pass import DelayedScaling, Float8CurrentScaling, fp8_compile, state
from fp8pass.errors import Fp8Warning, RankMismatchError, StrictError
from tests.distributed.support import outcomes_on_ranks, run_on_ranks
from tests.support.models import ResidualMlp

pytestmark = pytest.mark.dist

CURRENT = {"recipe": "current"}
DELAYED = {"recipe": DelayedScaling(amax_history_len=4)}


def seeded():
    torch.manual_seed(0)
    return ResidualMlp(64, 128)


def sharded(model):
    return fully_shard(model)


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


#: What ranks 0 and 1 do, and what the message says of both.
CASES = {
    "DDP, recipes": (
        lambda o: compiled(DistributedDataParallel(seeded()), **o),
        (CURRENT, {"recipe": "rowwise"}),
        "recipe is Float8CurrentScaling() on rank 0 and Float8RowwiseScaling() on rank 1",
    ),
    "DDP around, delayed against current": (
        lambda o: around(seeded(), **o),
        (DELAYED, CURRENT),
        "recipe is DelayedScaling(amax_history_len=4) on rank 0 and Float8CurrentScaling() on rank 1",
    ),
    "DDP, by name": (
        lambda o: by_name(DistributedDataParallel(seeded()), **o),
        (CURRENT, {"recipe": "blockwise"}),
        "recipe is Float8CurrentScaling() on rank 0 and Float8BlockScaling() on rank 1",
    ),
    "FSDP, gathers": (
        lambda o: compiled(sharded(seeded()), **o),
        (CURRENT | {"fsdp_gather": "fp8"}, CURRENT),
        "fsdp_gather is 'fp8' on rank 0 and None on rank 1",
    ),
    "TP, rules": (
        lambda o: compiled(parallel(seeded()), **o),
        (CURRENT | {"rules": {"up": None}}, CURRENT | {"rules": {"up:grad_weight": None}}),
        "rules['up'] is None on rank 0 and not given on rank 1; rules['up:grad_weight'] is not given on rank 0",
    ),
    "reduced amaxes, an option of the recipe": (
        lambda o: compiled(seeded(), **o),
        (DELAYED, {"recipe": DelayedScaling(amax_history_len=4, margin=1)}),
        "recipe is DelayedScaling(amax_history_len=4) on rank 0 and DelayedScaling(margin=1, amax_history_len=4) on rank 1",
    ),
    "reduced amaxes, delayed against current": (
        lambda o: compiled(seeded(), **o),
        (DELAYED, CURRENT),
        "recipe is DelayedScaling(amax_history_len=4) on rank 0 and Float8CurrentScaling() on rank 1",
    ),
    "reduced amaxes, steps": (
        lambda o: compiled(seeded(), **o),
        (DELAYED | {"step": "manual"}, DELAYED),
        "step is 'manual' on rank 0 and 'auto' on rank 1",
    ),
    "DDP, the order of rules": (
        lambda o: compiled(DistributedDataParallel(seeded()), **o),
        (CURRENT | {"rules": {"up": None, "*": "rowwise"}}, CURRENT | {"rules": {"*": "rowwise", "up": None}}),
        "the order of rules is 'up', '*' on rank 0 and '*', 'up' on rank 1",
    ),
    "DDP, copies of weights": (
        lambda o: compiled(DistributedDataParallel(seeded()), **o),
        (CURRENT | {"weight_copies": "cache"}, CURRENT),
        "weight_copies is 'cache' on rank 0 and 'auto' on rank 1",
    ),
    "DDP, schedules": (
        lambda o: compiled(DistributedDataParallel(seeded()), **o),
        (CURRENT | {"schedule": {5: {"up": None}}}, CURRENT),
        "schedule[5]['up'] is None on rank 0 and not given on rank 1",
    ),
}


def train(model, steps=2):
    for _ in range(steps):
        model(torch.randn(16, 64)).square().mean().backward()


def messages(rank):
    """Per case what was raised, and in how many seconds."""
    found = {}
    for name, (make, options, _) in CASES.items():
        dist.barrier()
        began = time.monotonic()
        model = make(options[rank])
        try:
            train(model, steps=3)
            state(model).step()
        except RankMismatchError as error:
            found[name] = (str(error), time.monotonic() - began)
    return found


def test_what_differs_is_named_on_every_rank():
    for found in run_on_ranks(messages, 2):
        assert set(found) == set(CASES)
        for name, (_, _, expected) in CASES.items():
            assert expected in found[name][0], name
            assert found[name][1] < 25, name  # less than a rank waits for one that does not come


def train_apart(model):
    """Both ranks have begun before either goes on: whoever came first looks at its next boundaries."""
    try:
        train(model, steps=1)
    finally:
        dist.barrier()
    train(model, steps=3)


def unconnected(rank):
    """Of models that nothing ties together: a warning, an error under strict; and what is no mismatch at all."""
    found = []
    recipes = ("current", "rowwise")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_apart(compiled(seeded(), recipe=recipes[rank]))
    found.append([str(w.message) for w in caught if issubclass(w.category, Fp8Warning)])
    dist.barrier()
    try:
        train_apart(compiled(seeded(), recipe=recipes[rank], strict=True))
    except StrictError as error:
        found.append(str(error))
    dist.barrier()
    model = compiled(DistributedDataParallel(seeded()), recipe="current")
    began = time.monotonic()
    if rank == 0:  # a teacher on one rank alone, another model, and evaluations
        train(compiled(nn.Sequential(seeded(), seeded()), recipe=DelayedScaling(reduce_amax=False)))
        with torch.no_grad():
            compiled(seeded(), recipe="blockwise")(torch.randn(16, 64))
    train(model)
    other = compiled(DistributedDataParallel(seeded()), recipe=DelayedScaling(amax_history_len=rank + 1, reduce_amax=False))
    try:
        train(other)
    except RankMismatchError as error:
        found.append(str(error))
    train(compiled(DistributedDataParallel(seeded()), recipe=Float8CurrentScaling(), rules={"up": None}))
    found.append(time.monotonic() - began)
    return found


def test_models_that_nothing_ties_together_are_no_error():
    for warned, strict, again, seconds in run_on_ranks(unconnected, 2):
        (message,) = warned
        for text in (message, strict):
            assert "recipe is Float8CurrentScaling() on rank 0 and Float8RowwiseScaling() on rank 1" in text
        assert "recipe is DelayedScaling(amax_history_len=1, reduce_amax=False) on rank 0" in again
        assert seconds < 25


def in_groups_made_again(rank):
    model = compiled(DistributedDataParallel(seeded()), recipe="current")
    train(model)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    train(compiled(DistributedDataParallel(seeded()), recipe=("current", "rowwise")[rank]))


def test_groups_that_are_made_again_are_compared_again():
    for outcome in outcomes_on_ranks(in_groups_made_again, 2):
        assert outcome.error.startswith("RankMismatchError: ranks 0 and 1")
