"""Hooks on saved tensors, such as those of activation offloading, change nothing: scales, histories, gradients, statistics.

Oracle: the same run without hooks, bit for bit.
"""

import contextlib
import functools

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from fp8pass import state
from tests.support.training import fp8_mlp, gradients, same

TRACKED: dict[int, torch.Tensor] = {}


@contextlib.contextmanager
def numbered():
    """TRL's and torchtune's OffloadActivations, one for all steps: a tensor is a number from pack to unpack, which happens
    once, and after a backward none is left."""
    assert not TRACKED

    def pack(t):
        number = len(TRACKED)
        is_small = t.nbytes < 64 or isinstance(t, torch.nn.Parameter)
        TRACKED[number] = t if is_small else torch.empty_like(t).copy_(t)
        return number

    with saved_tensors_hooks(pack, TRACKED.pop):
        yield


CONTEXTS = {
    "numbered": numbered,
    "clone": functools.partial(saved_tensors_hooks, torch.clone, lambda t: t),
    "NumPy": functools.partial(saved_tensors_hooks, lambda t: t.detach().numpy().copy(), torch.from_numpy),  # has no FP8
    "save_on_cpu": save_on_cpu,
}


def run(context, recipe):
    """Everything that training leaves behind: gradients of each step and the state."""
    torch._dynamo.reset()
    model, compiled = fp8_mlp(recipe)
    found = []
    for step in range(4):
        model.zero_grad()
        x = (torch.randn(32, 64) * (step + 1)).requires_grad_()
        with context():
            out = compiled(x)
        (1e-3 * out.square().mean()).backward()
        found.append({**gradients(model), "x": x.grad})
    return found, state(compiled).state_dict()


@functools.cache
def unhooked(recipe):
    """What `run` finds without hooks: the same for all of them."""
    return run(contextlib.nullcontext, recipe)


@pytest.mark.parametrize(("name", "recipe"), [*((name, "delayed") for name in CONTEXTS), ("NumPy", "blockwise")])
def test_hooks_around_a_model(name, recipe):
    assert same(run(CONTEXTS[name], recipe), unhooked(recipe))


def test_a_hook_that_raises_leaves_the_model_usable():
    def refuse(tensor):
        raise ValueError("no room")

    _, compiled = fp8_mlp()
    with pytest.raises(ValueError, match="no room"), saved_tensors_hooks(refuse, lambda t: t):
        compiled(torch.randn(32, 64))
    compiled(torch.randn(32, 64)).sum().backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
