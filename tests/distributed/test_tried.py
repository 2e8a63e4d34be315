"""Situations of several ranks beyond the plain kinds of parallelism, each against the same program on one rank alone.

The losses of several ranks differ from those of one: gradients are added in another order, the first step of delayed scaling and
every one of current scaling scales by a rank's own amax, and some values then fall on the other side of an FP8 rounding.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from fp8pass import DelayedScaling, Float8CurrentScaling, fp8_compile, inspect, monitor, state
from fp8pass.capture import ranks
from tests.distributed.models import seeded, spread, train
from tests.distributed.support import run_on_ranks
from tests.distributed.test_checkpoint import resumed, straight
from tests.tolerances import RESHARDED_LOSS

pytestmark = pytest.mark.dist
STEPS = 4
DELAYED = DelayedScaling(amax_history_len=3)
RECIPES = (DELAYED, Float8CurrentScaling())
#: Relative difference of an amax: that of one value of the largest, which each rounding of a step moves a little.
AMAX = 0.03
#: The same of gradients: one operand in E5M2, and an amax is that of a single value.
AMAX_OF_GRADIENT = 0.2
NO_HEAD = {"head": None}


def compiler(recipe, **options):
    return functools.partial(fp8_compile, recipe=recipe, backend="aot_eager", select="all", **options)


def serial(recipe, **options):
    """The model on this rank alone: its amaxes stay its own."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    torch._dynamo.reset()
    model = seeded()
    return model, compiler(recipe, amax_reduction_group=alone, **options)(model)


def gemms(compiled, prefix=""):
    return {(prefix + g.module, g.role) for g in inspect(compiled).gemms if g.quantized}


def histories(compiled, prefix=""):
    """Amaxes of the finished steps, by tensor."""
    return {prefix + name: state(compiled).amax_history(name)[1:].tolist() for name in state(compiled).tensors}


def assert_same_amaxes(found, expected, num_shards):
    """`num_shards`: of the batch; the mean over a shard has gradients that are larger by that factor."""
    assert found.keys() == expected.keys()
    for name, amaxes in found.items():
        is_gradient = name.endswith(":grad_output")
        scaled = [a / num_shards for a in amaxes] if is_gradient else amaxes
        assert scaled == pytest.approx(expected[name], rel=AMAX_OF_GRADIENT if is_gradient else AMAX), name


# -- TP with FSDP2


def two_dimensional(rank):
    found = []
    for recipe in RECIPES:
        model, compiled = serial(recipe, rules=NO_HEAD)
        alone = train(compiled, model.parameters(), range(STEPS), 0, 1), gemms(compiled), histories(compiled)
        torch._dynamo.reset()
        model = seeded()
        _, shard, num_shards = spread(model, "fsdp+tp per block", compiler(recipe))
        losses = train(model, model.parameters(), range(STEPS), shard, num_shards)
        parts = [(layer, f"layers.{i}.") for i, layer in enumerate(model.layers)]
        quantized = set().union(*(gemms(*part) for part in parts))
        found.append((alone, (losses, quantized, {k: v for part in parts for k, v in histories(*part).items()})))
    return found


@pytest.mark.exhaustive
def test_tensor_parallel_with_fsdp():
    results = run_on_ranks(two_dimensional, 4)
    assert all(result == results[0] for result in results)
    for (losses, quantized, amaxes), found in results[0]:
        assert found[0] == pytest.approx(losses, rel=RESHARDED_LOSS)
        assert found[1] == quantized
        assert_same_amaxes(found[2], amaxes, 2)


# -- a schedule, and a monitor


def watched(model, compiled, shard, num_shards):
    """Losses, what is quantized by which recipe after each step, amaxes, and what the monitor says of steps."""
    logged, quantized, losses = [], [], []
    watching = monitor(compiled, every=2, log=lambda values, *rest: logged.append(values))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(6):
        losses += train(compiled, None, range(step, step + 1), shard, num_shards, optimizer)
        quantized.append(sorted((g.module, g.role, repr(g.recipe)) for g in inspect(compiled).gemms if g.quantized))
    amaxes = histories(compiled)
    names = sorted({t.name for t in watching.latest.tensors})
    return losses, quantized, amaxes, logged, names


def scheduled(rank):
    schedule = {2: {"layers.0": "rowwise", "*:grad_weight": None}, 4: {"layers.1": Float8CurrentScaling()}}
    model, compiled = serial(DELAYED, schedule=schedule)
    alone = watched(model, compiled, 0, 1)
    torch._dynamo.reset()
    model = seeded()
    compiled, shard, num_shards = spread(model, "ddp", compiler(DELAYED, schedule=schedule))
    return alone, watched(model, compiled, shard, num_shards)


def test_a_schedule_and_a_monitor_act_in_the_same_step_on_all_ranks():
    results = run_on_ranks(scheduled, 2)
    assert str(results[0]) == str(results[1])
    (losses, quantized, amaxes, logged, names), found = results[0]
    assert found[0] == pytest.approx(losses, rel=RESHARDED_LOSS)
    assert found[1] == quantized
    assert len({str(each) for each in quantized}) == 3
    assert_same_amaxes(found[2], amaxes, 2)
    assert len(found[3]) == len(logged) > 0
    assert found[4] == names


# -- groups made again


def in_groups_made_again(rank):
    model, compiled = serial(DELAYED)
    compiled_alone, optimizer = compiled, torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train(compiled_alone, None, range(STEPS), 0, 1, optimizer), histories(compiled_alone)
    torch._dynamo.reset()
    store, found, groups = dist.distributed_c10d._get_default_store(), [], set()
    model = seeded()
    compiled, optimizer = compiler(DELAYED)(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):  # the compiled model goes on, without DDP, which keeps the group that it was made in
        for again in range(8):
            dist.barrier()
            dist.destroy_process_group()
            again_store = dist.PrefixStore(f"{step}.{again}", store)
            dist.init_process_group("gloo", store=again_store, rank=rank, world_size=dist.get_world_size())
            groups.add(ranks._default_group())
        found += train(compiled, None, range(step, step + 1), 0, 1, optimizer)
    torch._dynamo.reset()
    new = seeded()
    new_compiled, shard, num_shards = spread(new, "ddp", compiler(DELAYED))
    new_losses = train(
        new_compiled, None, range(STEPS), shard, num_shards, torch.optim.SGD(new.parameters(), lr=0.1)
    )
    return losses, (found, histories(compiled)), (new_losses, histories(new_compiled)), len(groups)


def test_training_goes_on_in_groups_made_again():
    results = run_on_ranks(in_groups_made_again, 2)
    assert results[0] == results[1]
    (losses, amaxes), again, (new_losses, new_amaxes), num_groups = results[0]
    assert again == (losses, amaxes), "every rank has the whole batch"
    assert new_losses == pytest.approx(losses, rel=RESHARDED_LOSS)
    assert_same_amaxes(new_amaxes, amaxes, 2)
    assert num_groups == STEPS * 8


# -- resume on other ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "num_ranks", "num_ranks_after", "kind_after"),
    [("tp", 2, 1, "single"), ("sp", 2, 1, "single"), ("fsdp per block", 2, 1, "fsdp per block"), ("fsdp+tp", 4, 2, "fsdp")],
)
def test_resume_on_other_ranks(tmp_path, kind, num_ranks, num_ranks_after, kind_after):
    losses, scales = run_on_ranks(straight, num_ranks, kind, DELAYED, str(tmp_path))[0]
    for again, scales_again in run_on_ranks(resumed, num_ranks_after, kind_after, DELAYED, str(tmp_path), False):
        assert losses == pytest.approx(again, rel=RESHARDED_LOSS)
        assert scales.keys() == scales_again.keys()
