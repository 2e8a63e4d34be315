"""Training a mixture of experts: changing routing, state, resuming, experts without tokens, other ranks' experts, the loss."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import CheckpointMismatchError
from tests.support.moe import RECIPES, Experts, MoE, offsets
from tests.support.numerics import sqnr


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


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_fifty_steps_of_changing_routing_are_one_graph_and_deterministic(recipe):
    counters.clear()
    model, compiled, _ = made = layer(recipe, fullgraph=True)
    losses = trained(made, 50)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert len(inspect(compiled).graphs) == 1
    graph = inspect(compiled).graphs[0].after.graph
    assert not [n for n in graph.nodes if "item" in str(n.target) and "getitem" not in str(n.target)]
    torch._dynamo.reset()
    again = layer(recipe, fullgraph=True)
    assert losses == trained(again, 50)
    assert all(p.equal(q) for p, q in zip(model.parameters(), again[0].parameters(), strict=True))


def test_resuming_is_bit_exact():
    recipe = DelayedScaling(amax_history_len=4)
    model, compiled, optimizer = made = layer(recipe, fullgraph=True)
    trained(made, 6)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), state(compiled).state_dict()))
    onward = trained(made, 6, first=6)
    torch._dynamo.reset()
    fresh, fresh_compiled, fresh_optimizer = again = layer(recipe, seed=1)
    fresh.load_state_dict(saved[0])
    state(fresh_compiled).load_state_dict(saved[2])
    fresh_optimizer.load_state_dict(saved[1])
    assert onward == trained(again, 6, first=6)
    ours, theirs = state(compiled).state_dict(), state(fresh_compiled).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in ours)


def test_a_checkpoint_of_another_number_of_experts_is_refused():
    compiled = fp8_compile(MoE().to(torch.bfloat16), "delayed", backend="aot_eager")
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
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


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8", "current"])
def test_experts_of_two_ranks_equal_those_of_one(recipe):
    """Tokens of the other rank's experts are sorted to the end, and belong to no group."""
    whole = MoE().to(torch.bfloat16)
    halves = []
    for rank in range(2):
        half = MoE(num_experts=2).to(torch.bfloat16)
        with torch.no_grad():
            half.up.copy_(whole.up[2 * rank : 2 * rank + 2])
            half.down.copy_(whole.down[2 * rank : 2 * rank + 2])
        halves.append(half)
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    weights, chosen = whole.router(x).float().softmax(-1).topk(2)
    weights, dy = weights.detach(), torch.randn(40, 64, dtype=torch.bfloat16)

    def local(rank):
        ours = chosen - 2 * rank
        return torch.where((ours >= 0) & (ours < 2), ours, 2)

    results = []
    for model, ids in ((whole, chosen), (halves[0], local(0)), (halves[1], local(1))):
        torch._dynamo.reset()
        compiled = fp8_compile(model.experts, recipe, backend="aot_eager")
        source = x.clone().requires_grad_()
        out = compiled(source, weights, ids)
        out.backward(dy)
        results.append((out.detach().float(), source.grad.float(), model.up.grad, model.down.grad))
    (out, dx, up, down), first, second = results
    ours = [first[0] + second[0], first[1] + second[1], torch.cat((first[2], second[2])), torch.cat((first[3], second[3]))]
    for got, want in zip(ours, (out, dx, up, down), strict=True):
        assert not got.isnan().any()
        assert sqnr(want, got) > (20 if recipe == "current" else 40)  # one scale for the tokens of a rank, or scales per row
    if recipe != "current":
        assert torch.cat((first[2], second[2])).equal(up)
        assert torch.cat((first[3], second[3])).equal(down)


@pytest.fixture(scope="module")
def reference_loss():
    return _final_loss(None)


def _final_loss(recipe):
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_of_300_steps_is_that_of_float32(recipe, reference_loss):
    assert abs(_final_loss(recipe) / reference_loss - 1) < 0.005
