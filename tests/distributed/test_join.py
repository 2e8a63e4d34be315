"""torch.distributed's Join, under which ranks have different numbers of batches."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from fp8pass import DelayedScaling, fp8_compile, monitor, state
from fp8pass.errors import UnsupportedError
from tests.distributed.support import on_ranks
from tests.distributed.test_mismatch import seeded

pytestmark = pytest.mark.dist


def outside(model, **options):
    ddp = DistributedDataParallel(model)
    return fp8_compile(ddp, backend="aot_eager", **options), ddp


def inside(model, **options):
    ddp = DistributedDataParallel(fp8_compile(model, backend="aot_eager", in_place=True, **options))
    return ddp, ddp


def around(model, **options):
    ddp = DistributedDataParallel(model)
    return fp8_compile(nn.Sequential(ddp, nn.ReLU()), backend="aot_eager", **options), ddp


def by_name(model, **options):
    ddp = DistributedDataParallel(model)
    return torch.compile(ddp, backend="fp8pass", options={"backend": "aot_eager"} | options), ddp


WAYS = (outside, inside, around, by_name)
SETTINGS = {
    "automatic": {"recipe": DelayedScaling()},
    "manual": {"recipe": DelayedScaling(), "step": "manual"},
    "step in the loop": {"recipe": DelayedScaling(), "step": "manual"},
    "no reduction": {"recipe": DelayedScaling(reduce_amax=False)},
    "no reduction, step in the loop": {"recipe": DelayedScaling(reduce_amax=False), "step": "manual"},
    "no state": {"recipe": "current"},
    "monitored": {"recipe": "current"},
    "monitored, step in the loop": {"recipe": "current", "step": "manual"},
}
REFUSED = {"automatic": "step='manual'", "monitored": "step='manual'"} | {
    what: "state(model).step(), which reduces" for what in SETTINGS if "in the loop" in what and "no reduction" not in what
}


def part_of(model, ddp):
    """The part of the program that has a state."""
    return ddp.module if model is ddp else model


@pytest.mark.parametrize("way", [way.__name__ for way in WAYS])
@on_ranks(2)
def test_steps_that_reduce_are_refused_within_a_join(rank, way):
    for what, options in SETTINGS.items():
        torch._dynamo.reset()
        model, ddp = globals()[way](seeded(), **options)
        if "monitored" in what:
            monitor(part_of(model, ddp))
        with pytest.raises(UnsupportedError) if what in REFUSED else contextlib.nullcontext() as caught:
            for epoch in range(2):
                with Join([ddp]):
                    for _ in range(2 + rank * (1 - epoch)):
                        model(torch.randn(16, 64)).square().mean().backward()
                        if "in the loop" in what:
                            state(part_of(model, ddp)).step()
                if what == "manual":
                    state(part_of(model, ddp)).step()
        assert caught is None or all(text in str(caught.value) for text in (REFUSED[what], "after the Join")), what


@pytest.mark.parametrize("way", [way.__name__ for way in WAYS])
@on_ranks(2, fresh=True)
def test_steps_end_after_a_join_and_within_one_that_stops_all_ranks(rank, way):
    """Steps under a `Join`, after it, and in one that stops all ranks when the first has no batch left."""
    model, ddp = globals()[way](seeded(), **SETTINGS["manual"])
    view, losses = state(part_of(model, ddp)), []

    def step():
        loss = model(torch.randn(16, 64)).square().mean()
        loss.backward()
        losses.append(loss.item())

    with Join([ddp]):
        for _ in range(2 + rank):
            step()
    for _ in range(2):  # torch keeps the module's part of the Join
        step()
        view.step()
    with contextlib.suppress(RuntimeError), Join([ddp], throw_on_early_termination=True):
        for _ in range(2 + rank):
            step()
            view.step()
    assert len(losses) == 6 + rank
    assert {view.amax_history(name)[1:].count_nonzero().item() for name in view.tensors} == {4}
