"""Kept copies of weights are made again without the host waiting for the device."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8pass import fp8_compile, state
from fp8pass.runtime.wrap import session_of
from fp8pass.weights import cache
from tests.support.models import mlp

X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


class Waits(TorchDispatchMode):
    """Records waits of the host for a device: values that it reads, and numbers of its own that become a tensor there."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in str(func) for word in ("_local_scalar_dense", "lift_fresh", "nonzero", "is_nonzero", "aten.equal")):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_copies_that_a_step_made_out_of_date_are_made_without_waiting_for_the_device(recipe, monkeypatch):
    found = []
    current, tolist = cache.WeightCache.current, torch.Tensor.tolist

    def recorded(*args, **options):
        with Waits(found):
            return current(*args, **options)

    torch._dynamo.reset()
    model = mlp()
    compiled = fp8_compile(model, recipe, backend="aot_eager", select="all", weight_copies="cache", step="manual")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if step == 3:
            monkeypatch.setattr(cache.WeightCache, "current", recorded)
            monkeypatch.setattr(cache.torch.Tensor, "tolist", lambda self: found.append("tolist") or tolist(self))
        weights = list(session_of(compiled).weights.cache._weights.values()) if step else []
        made = [weight.made for weight in weights]
        compiled(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state(compiled).step()
    assert all(before is not w.made for before, w in zip(made, weights, strict=True)), "made again each step"
    assert len(weights) == 2
    assert found == []
