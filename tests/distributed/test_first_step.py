"""The first step on several ranks: each takes scales from its own tensors; from the boundary on all have the same."""

import copy

import pytest
import torch
import torch.distributed as dist

from fp8pass import DelayedScaling, fp8_compile, state
from tests.distributed.models import loss_of, seeded, spread
from tests.distributed.support import run_on_ranks
from tests.distributed.test_amax_reduction import Experts
from tests.support.models import mlp

pytestmark = pytest.mark.dist
RECIPE = DelayedScaling(amax_history_len=4)
LIMITS = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}


def scales_of(compiled) -> dict[str, float]:
    return {name: state(compiled).scale(name).item() for name in state(compiled).tensors}


def first_steps(rank):
    """(whether step 1 is current scaling's, staged amaxes of this rank, scales after the boundary, whether step 2 repeats)"""
    torch.manual_seed(0)
    model = mlp()
    twin = copy.deepcopy(model)
    delayed = fp8_compile(model, RECIPE, backend="aot_eager", step="manual")
    current = fp8_compile(twin, "current", backend="aot_eager")
    torch.manual_seed(rank)
    x = torch.randn(16, 64) * 10.0 ** (3 * rank)
    for compiled in (delayed, current):
        compiled(x).square().mean().backward()
    is_equal = all(p.grad.equal(q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    staged = {name: state(delayed).amax_history(name)[0].item() for name in state(delayed).tensors}
    state(delayed).step()
    (store,) = delayed._fp8pass_session.stores
    return is_equal, staged, scales_of(delayed), sorted(store.empty)


def test_each_rank_starts_by_itself_and_scales_agree_after_the_step():
    results = run_on_ranks(first_steps, 2)
    (_, mine, scales, _), (_, others, _, _) = results
    assert mine["0:input"] < others["0:input"] / 100
    for is_equal, _, after, empty in results:
        assert is_equal, "step 1 has the gradients of current scaling"
        assert after == scales
        assert empty == []
    for name, scale in scales.items():
        largest = torch.tensor(max(mine[name], others[name]))
        assert scale == (torch.tensor(LIMITS[name.split(":")[1]]) / largest).item(), name


def a_module_that_others_have_run(rank):
    """Expert 1 runs on rank 1 alone at first; when rank 0 comes to it, it has a history."""
    torch.manual_seed(0)
    compiled = fp8_compile(Experts(), RECIPE, backend="aot_eager", step="manual")
    x = torch.randn(16, 32, requires_grad=True)
    compiled(x, rank).sum().backward()
    state(compiled).step()
    before = None if rank == 0 else state(compiled).scale("experts.1:weight").item()
    out = compiled(1000 * x, 1)
    out.sum().backward()
    return before, state(compiled).scale("experts.1:weight").item(), out.detach()


def test_a_history_that_another_rank_has_written_is_not_empty():
    (_, scale, out), (before, same, other) = run_on_ranks(a_module_that_others_have_run, 2)
    assert scale == same == before
    assert out.equal(other)


def sharded_first_step(rank, recipe):
    """Gradients of step 1 under FSDP2, whose gathers send FP8."""
    compiled, shard, num_shards = spread(
        model := seeded(), "fsdp", lambda m: fp8_compile(m, recipe, backend="aot_eager"), dist.get_world_size()
    )
    loss_of(compiled, 0, shard, num_shards).backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return gradients, loss_of(compiled, 1, shard, num_shards).item()


def test_gathers_of_the_first_step_send_fp8_with_the_scale_of_all_shards():
    delayed, current = (run_on_ranks(sharded_first_step, 2, recipe) for recipe in (RECIPE, "current"))
    for (found, loss), (expected, other) in zip(delayed, current, strict=True):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, rtol=1e-5, atol=1e-8), name
        assert loss == pytest.approx(other, rel=1e-2)
