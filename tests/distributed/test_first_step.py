"""The first step on several ranks: each takes scales from its own tensors; from the boundary on all have the same."""

import copy

import pytest
import torch

from fp8pass import DelayedScaling, fp8_compile, state
from tests.distributed.models import loss_of, seeded, spread
from tests.distributed.support import everyone, on_ranks
from tests.distributed.test_amax_reduction import Experts, compiled, seeded_mlp

pytestmark = pytest.mark.dist
RECIPE = DelayedScaling(amax_history_len=4)
LIMITS = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}


@on_ranks(2)
def test_each_rank_starts_by_itself_and_scales_agree_after_the_step(rank):
    model = seeded_mlp()
    twin = copy.deepcopy(model)
    delayed = compiled(model, RECIPE, step="manual")
    torch.manual_seed(rank)
    x = torch.randn(16, 64) * 10.0 ** (3 * rank)
    for call in (delayed, compiled(twin, "current")):
        call(x).square().mean().backward()
    assert all(p.grad.equal(q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True)), "as current scaling"
    view = state(delayed)
    mine, others = everyone({name: view.amax_history(name)[0].item() for name in view.tensors})
    assert mine["0:input"] < others["0:input"] / 100
    view.step()
    (store,) = delayed._fp8pass_session.stores
    assert not store.empty
    for name in view.tensors:
        largest = torch.tensor(max(mine[name], others[name]))
        assert view.scale(name).item() == (torch.tensor(LIMITS[name.split(":")[1]]) / largest).item(), name


@on_ranks(2)
def test_a_history_that_another_rank_has_written_is_not_empty(rank):
    """Expert 1 runs on rank 1 alone at first; when rank 0 comes to it, it has a history."""
    torch.manual_seed(0)
    model = compiled(Experts(), RECIPE, step="manual")
    x = torch.randn(16, 32, requires_grad=True)
    model(x, rank).sum().backward()
    state(model).step()
    before = None if rank == 0 else state(model).scale("experts.1:weight").item()
    out = model(1000 * x, 1)
    out.sum().backward()
    (_, scale, out), (before, same, other) = everyone((before, state(model).scale("experts.1:weight").item(), out.detach()))
    assert scale == same == before
    assert out.equal(other)


@on_ranks(2)
def test_gradients_of_the_first_step_have_the_scale_of_all_shards(rank):
    """Gradients of step 1 under FSDP2, and the loss of step 2, beside those of current scaling."""
    found = []
    for recipe in (RECIPE, "current"):
        torch._dynamo.reset()
        model = seeded()
        call, *shards = spread(model, "fsdp", lambda m, recipe=recipe: fp8_compile(m, recipe, backend="aot_eager"))
        loss_of(call, 0, *shards).backward()
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        found.append((gradients, loss_of(call, 1, *shards).item()))
    (gradients, loss), (expected, other) = found
    for name, gradient in expected.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-5, atol=1e-8), name
    assert loss == pytest.approx(other, rel=1e-2)
