"""Ranks that differ: in how they compile one model, of which they are told before its first step, and in the number of their
batches, under torch.distributed's Join. Nobody hangs."""

import contextlib
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fp8pass import DelayedScaling, monitor, state
from fp8pass.errors import Fp8Warning, RankMismatchError, StrictError, UnsupportedError
from tests.distributed.support import on_ranks
from tests.support.models import ResidualMlp
from tests.support.training import fp8

pytestmark = pytest.mark.dist

CURRENT = {"recipe": "current"}
DELAYED = {"recipe": DelayedScaling(amax_history_len=4)}
OWN = {"recipe": DelayedScaling(reduce_amax=False)}


def seeded():
    torch._dynamo.reset()
    torch.manual_seed(0)
    return ResidualMlp(64, 128)


def alone(**options):
    return fp8(seeded(), **options)


def outside(**options):
    return fp8(DistributedDataParallel(seeded()), **options)


def inside(**options):
    """DDP around what was compiled in place, as callbacks of trainers leave it."""
    return DistributedDataParallel(fp8(seeded(), in_place=True, **options))


def by_name(**options):
    return torch.compile(DistributedDataParallel(seeded()), backend="fp8pass", options={"backend": "aot_eager"} | options)


def sharded(**options):
    return fp8(fully_shard(seeded()), **options)


#: How the model is made, the options of ranks 0 and 1, and what the message says of both.
CASES = (
    (
        outside, CURRENT | {"weight_copies": "cache"}, {"recipe": "rowwise"},
        "recipe is Float8CurrentScaling() on rank 0 and Float8RowwiseScaling() on rank 1",
        "weight_copies is 'cache' on rank 0 and 'auto' on rank 1",
    ),
    (sharded, CURRENT | {"fsdp_gather": "fp8"}, CURRENT, "fsdp_gather is 'fp8' on rank 0 and None on rank 1"),
    (
        alone, DELAYED | {"step": "manual"}, {"recipe": DelayedScaling(amax_history_len=4, margin=1)},
        "recipe is DelayedScaling(amax_history_len=4) on rank 0 and DelayedScaling(margin=1, amax_history_len=4) on rank 1",
        "step is 'manual' on rank 0 and 'auto' on rank 1",
    ),
)  # fmt: skip


def train(model, steps=2, ends=False):
    """ends: the last step by hand."""
    for _ in range(steps):
        model(torch.randn(16, 64)).square().mean().backward()
    if ends:
        state(model).step()


@on_ranks(2)
def test_what_differs_is_named_on_every_rank(rank):
    for make, first, second, *texts in CASES:
        dist.barrier()
        began = time.monotonic()
        model = make(**(second if rank else first))
        with pytest.raises(RankMismatchError) as caught:
            train(model, 3, ends=True)
        assert all(text in str(caught.value) for text in texts), str(caught.value)
        assert time.monotonic() - began < 25, texts  # less than a rank waits for one that does not come


def train_apart(model):
    """Both ranks have begun before either goes on: whoever came first looks at its next boundaries."""
    try:
        train(model, steps=1)
    finally:
        dist.barrier()
    train(model, steps=3)


@on_ranks(2, fresh=True)
def test_models_that_nothing_ties_together_are_no_error(rank):
    """A warning, an error under strict, and what is no mismatch at all."""
    text = re.escape("recipe is Float8CurrentScaling() on rank 0 and Float8RowwiseScaling() on rank 1")
    recipe = ("current", "rowwise")[rank]
    with pytest.warns(Fp8Warning, match=text) as warned:
        train_apart(alone(recipe=recipe))
    assert len([w for w in warned if issubclass(w.category, Fp8Warning)]) == 1
    dist.barrier()
    with pytest.raises(StrictError, match=text):
        train_apart(alone(recipe=recipe, strict=True))
    dist.barrier()
    model = outside(**CURRENT)
    if rank == 0:  # a teacher on one rank alone, another model, and evaluations
        train(fp8(nn.Sequential(seeded(), seeded()), **OWN))
        with torch.no_grad():
            alone(recipe="blockwise")(torch.randn(16, 64))
    train(model)


# -- different numbers of batches


MANUAL, BY_HAND = {"step": "manual"}, "state(model).step(), which reduces"
#: How a model is compiled, its options, whether a monitor watches it, where steps end by hand; what a refusal says.
SETTINGS = (
    (outside, DELAYED, False, None, "step='manual'"),
    (by_name, CURRENT, True, None, "step='manual'"),
    (inside, DELAYED | MANUAL, False, "in the loop", BY_HAND),
    (by_name, DELAYED | MANUAL, False, "after it", None),
    (inside, OWN, False, None, None),
)


def with_parts(model):
    """A model, its DDP, and the part of the program that has a state."""
    ddp = next(m for m in model.modules() if isinstance(m, DistributedDataParallel))
    return model, ddp, ddp.module if model is ddp else model


@on_ranks(2)
def test_steps_that_reduce_are_refused_within_a_join(rank):
    for make, options, is_watched, by_hand, refusal in SETTINGS:
        model, ddp, owner = with_parts(make(**options))
        if is_watched:
            monitor(owner)
        with contextlib.nullcontext() if refusal is None else pytest.raises(UnsupportedError) as caught:
            for epoch in range(2):
                with Join([ddp]):
                    for _ in range(2 + rank * (1 - epoch)):
                        train(model, 1)
                        if by_hand == "in the loop":
                            state(owner).step()
                if by_hand == "after it":
                    state(owner).step()
        assert refusal is None or all(text in str(caught.value) for text in (refusal, "after the Join")), (make, options)
