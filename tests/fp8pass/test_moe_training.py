"""Training a mixture of experts: changing routing, state, resuming, experts without tokens, other ranks' experts, the loss."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import CheckpointMismatchError
from tests.support.moe import Experts, MoE, offsets
from tests.support.training import same


def layer(recipe, seed=0, **options):
    torch.manual_seed(seed)
    model = MoE().to(torch.bfloat16)
    compiled = fp8_compile(model, recipe, backend="aot_eager", **options)
    return model, compiled, torch.optim.AdamW(model.parameters(), lr=1e-3)


def trained(made, steps, first=0):
    """The losses of a layer in some steps on data of which every step has its own routing."""
    _, compiled, optimizer = made
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 64, generator=generator).to(torch.bfloat16)
        target = torch.randn(32, 64, generator=generator).to(torch.bfloat16)
        loss = F.mse_loss(compiled(x.requires_grad_()), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=4), "blockwise"], ids=["delayed", "blockwise"])
def test_steps_of_changing_routing_are_one_graph_and_resuming_is_bit_exact(recipe):
    counters.clear()
    model, compiled, optimizer = made = layer(recipe, fullgraph=True)
    trained(made, 6)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), state(compiled).state_dict()))
    onward = trained(made, 6, first=6)
    assert counters["stats"]["unique_graphs"] == len(inspect(compiled).graphs) == 1
    assert not counters["graph_break"]
    graph = inspect(compiled).graphs[0].after.graph
    assert not [n for n in graph.nodes if "item" in str(n.target) and "getitem" not in str(n.target)]
    torch._dynamo.reset()
    fresh, fresh_compiled, fresh_optimizer = again = layer(recipe, seed=1)
    for part, state_dict in zip((fresh, fresh_optimizer, state(fresh_compiled)), saved, strict=True):
        part.load_state_dict(state_dict)
    assert onward == trained(again, 6, first=6)
    assert same(state(fresh_compiled).state_dict(), state(compiled).state_dict())
    assert same(fresh.state_dict(), model.state_dict())


def test_a_checkpoint_of_another_number_of_experts_is_refused():
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    _, compiled, _ = layer("delayed")
    compiled(x).sum().backward()
    saved = state(compiled).state_dict()
    torch._dynamo.reset()
    other = fp8_compile(MoE(num_experts=8).to(torch.bfloat16), "delayed", backend="aot_eager")
    state(other).load_state_dict(saved)
    with pytest.raises(CheckpointMismatchError, match="up:weight has 4 scales there and 8 here"):
        other(x)


def test_an_expert_without_tokens_keeps_its_history():
    model = Experts(3, 32, 48)
    compiled = fp8_compile(model, DelayedScaling(amax_history_len=4), backend="aot_eager")
    view = state(compiled)

    def step(sizes):
        x = torch.randn(24, 32, dtype=torch.bfloat16, requires_grad=True)
        compiled(x, offsets(sizes)).sum().backward()
        view.step()
        return view.amax_history("weight:weight"), view.scale("weight:weight")

    first, scale = step((8, 0, 16))
    amaxes = model.weight.detach().abs().amax((1, 2)).float()
    assert first[-1].equal(amaxes)  # also of the expert that had no tokens: its first use has a scale
    assert scale.equal(torch.full_like(amaxes, 448) / amaxes)
    with torch.no_grad():
        model.weight *= 2
    second, scale = step((8, 0, 16))
    assert second[-1, 0] == 2 * amaxes[0]
    assert second[:, 1].equal(first[:, 1])
    assert scale[1] == torch.tensor(448.0) / amaxes[1]
    third, _ = step((8, 8, 8))
    assert third[-1].equal(2 * amaxes)


@functools.cache
def final_loss(recipe):
    """Mean loss of the last 30 of 300 steps of a regression that a mixture of experts learns."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    compute = torch.float32 if recipe is None else torch.bfloat16
    teacher, model = MoE(compute=torch.float32), MoE(compute=compute)
    with torch.no_grad():
        teacher.router.weight *= 4
    run = model if recipe is None else fp8_compile(model, recipe, backend="aot_eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(300):
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            target = teacher(x)
        loss = F.mse_loss(run(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses[-30:]).mean().item()


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_the_loss_of_300_steps_is_that_of_float32(recipe):
    assert abs(final_loss(recipe) / final_loss(None) - 1) < 0.005
