"""torch.distributed's Join, under which ranks have different numbers of batches."""

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from fp8pass import DelayedScaling, fp8_compile, monitor, state
from fp8pass.errors import UnsupportedError
from tests.distributed.support import run_on_ranks
from tests.distributed.test_mismatch import Model

pytestmark = pytest.mark.dist


def outside(model, **options):
    return fp8_compile(DistributedDataParallel(model), backend="aot_eager", **options)


def inside(model, **options):
    fp8_compile(model, backend="aot_eager", in_place=True, **options)
    return DistributedDataParallel(model)


def by_name(model, **options):
    return torch.compile(DistributedDataParallel(model), backend="fp8pass", options={"backend": "aot_eager"} | options)


def uneven(model, joined, num_batches):
    with Join([joined]):
        for _ in range(num_batches):
            model(torch.randn(16, 64)).square().mean().backward()


def outcomes(rank):
    """Per way, recipe and step: what the error says, or that all ranks came to the end."""
    found = {}
    for way in (outside, inside, by_name):
        for what, options in (
            ("automatic", {"recipe": DelayedScaling()}),
            ("manual", {"recipe": DelayedScaling(), "step": "manual"}),
            ("no reduction", {"recipe": DelayedScaling(reduce_amax=False)}),
            ("no state", {"recipe": "current"}),
            ("monitored", {"recipe": "current"}),
        ):
            torch._dynamo.reset()
            model = way(Model(), **options)
            joined = model if isinstance(model, DistributedDataParallel) else model._orig_mod
            if what == "monitored":
                monitor(model if way is not inside else model.module)
            try:
                uneven(model, joined, num_batches=2 + rank)
                if what == "manual":
                    state(model if way is not inside else model.module).step()
                found[way.__name__, what] = "came to the end"
            except UnsupportedError as error:
                found[way.__name__, what] = str(error)
    return found


def test_automatic_steps_with_reductions_are_refused_and_everything_else_runs():
    for found in run_on_ranks(outcomes, 2):
        assert len(found) == 15
        for (way, what), outcome in found.items():
            if what in ("automatic", "monitored"):
                assert "Join" in outcome, (way, what)
                assert "step='manual'" in outcome, (way, what)
            else:
                assert outcome == "came to the end", (way, what)
