"""Ranks that stay for several runs: each run is as on ranks of its own, and ranks that failed are not used again."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.distributed import models
from tests.distributed.support import RanksFailed, run_on_ranks

pytestmark = pytest.mark.dist


def seen(rank):
    """What a run may see of those before it."""
    numbers = torch.rand(4).tolist(), os.environ.get("LEFT"), dist._DEFAULT_FIRST_BUCKET_BYTES
    counts = dict(torch._dynamo.utils.counters["stats"])
    configs = torch._dynamo.config.optimize_ddp, torch._functorch.config.donated_buffer, torch._inductor.config.max_autotune
    return *numbers, counts, configs, models.TOKENS, len(warnings.filters)


def leaves(rank):
    """Everything that `seen` looks at is otherwise."""
    before = seen(rank)
    torch.manual_seed(1)
    os.environ["LEFT"], dist._DEFAULT_FIRST_BUCKET_BYTES = "something", 1
    torch._dynamo.config.optimize_ddp = torch._functorch.config.donated_buffer = False
    torch._inductor.config.max_autotune = True
    warnings.simplefilter("error")
    torch.compile(torch.nn.Linear(4, 4), backend="eager")(torch.ones(4, 4))
    assert all(a != b for a, b in zip(before[:5], seen(rank)[:5], strict=True))


def pid(rank):
    return os.getpid()


def replaces(rank):
    models.TOKENS = 15


def raises_on_one(rank):
    if rank:
        raise ValueError("of rank 1")


def never_ends_on_one(rank):
    if rank:
        time.sleep(600)


def test_what_a_run_leaves_the_next_one_does_not_see():
    expected, pids = run_on_ranks(seen, 2, fresh=True), run_on_ranks(pid, 2)
    run_on_ranks(leaves, 2)
    assert run_on_ranks(seen, 2) == expected
    assert run_on_ranks(pid, 2) == pids
    assert not {*run_on_ranks(pid, 2, fresh=True), *run_on_ranks(pid, 1)} & {*pids}


@pytest.mark.parametrize(
    ("function", "message", "timeout"),
    [
        (replaces, r"replaced for the runs that follow: tests.distributed.models.TOKENS\. Such a run needs fresh=True", 300),
        (raises_on_one, r"rank 1: ValueError: of rank 1(.|\n)*in raises_on_one", 300),
        (never_ends_on_one, "rank 1: did not finish in time", 5),
    ],
    ids=["replaces", "raises", "never ends"],
)
def test_ranks_that_failed_are_gone(function, message, timeout):
    pids = run_on_ranks(pid, 2)
    with pytest.raises(RanksFailed, match=message):
        run_on_ranks(function, 2, timeout=timeout)
    assert not any(os.path.exists(f"/proc/{process}") for process in pids)
    assert not {*run_on_ranks(pid, 2)} & {*pids}
    run_on_ranks(replaces, 2, fresh=True)
