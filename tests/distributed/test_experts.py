"""Mixtures of experts on two ranks, each with its own routing."""

import pytest
import torch

from fp8pass import DelayedScaling, fp8_compile, state
from tests.distributed.support import run_on_ranks
from tests.support.moe import Experts, offsets

pytestmark = pytest.mark.dist

SIZES = ((24, 0, 8), (0, 0, 32))
"""Tokens of each expert on each rank: one expert has some on rank 0 alone, one has none at all."""


def steps(rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Experts(3, 32, 48)
    compiled = fp8_compile(model, DelayedScaling(amax_history_len=4), backend="aot_eager")
    for step in range(3):
        torch.manual_seed(10 * rank + step)
        x = (1 + rank) * torch.randn(32, 32, dtype=torch.bfloat16)
        compiled(x.requires_grad_(), offsets(SIZES[(rank + step) % 2])).sum().backward()
        torch.distributed.all_reduce(model.weight.grad)
        with torch.no_grad():
            model.weight -= 0.01 * model.weight.grad
        model.zero_grad()
        state(compiled).step()
    shared = {key: value for key, value in state(compiled).state_dict().items() if "@" not in key}
    return shared | {"weight": model.weight.detach()}


def test_ranks_with_different_routing_have_equal_scales():
    first, second = run_on_ranks(steps, 2)
    assert first.keys() == second.keys()
    assert all(first[key].equal(second[key]) for key in first)
    history = first["weight:weight.amax_history"]
    assert history.shape == (4, 3)
    assert (history[1:] > 0).sum(0).tolist() == [3, 1, 3]  # the expert without tokens has that of its first step
