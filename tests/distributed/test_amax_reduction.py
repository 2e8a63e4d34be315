"""The reduction of amaxes at the step boundary: what ranks see, what it costs, and what happens when it goes wrong."""

import contextlib
import importlib
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, state
from fp8pass.errors import AmaxReductionError, OptionError
from tests.distributed.support import everyone, on_ranks, outcomes_on_ranks
from tests.support.models import Stack, mlp

pytestmark = pytest.mark.dist
RECIPE = DelayedScaling(amax_history_len=4)


COLLECTIVES = [(dist, name) for name in ("all_reduce", "all_gather_object", "all_gather", "broadcast", "barrier")]


@contextlib.contextmanager
def counted(targets=COLLECTIVES):
    """The names of functions that are called while it is entered. targets: their owners and names."""
    calls = []

    def counting(name, function):
        return lambda *a, **k: (calls.append(name), function(*a, **k))[1]

    with contextlib.ExitStack() as stack:
        for owner, name in targets:
            stack.enter_context(mock.patch.object(owner, name, counting(name, getattr(owner, name))))
        yield calls


def compiled(model, recipe=RECIPE, **options):
    return fp8_compile(model, recipe, backend="aot_eager", **options)


def seeded_mlp():
    torch.manual_seed(0)
    return mlp()


def train(model, steps, rank, size=1.0, width=64):
    for step in range(steps):
        torch.manual_seed(1000 * rank + step)
        model(torch.randn(16, width) * size).square().mean().backward()


def snapshot(model):
    """Per tensor the staged amax, the history and the scale."""
    view = state(model)
    return {n: [*view.amax_history(n).tolist(), view.scale(n).item()] for n in view.tensors}


def settled(model):
    """The same without the staged amax, which is a rank's own until the step ends."""
    return {name: values[1:] for name, values in snapshot(model).items()}


# -- equal scales, by one collective per step


@on_ranks(2)
def test_scales_are_equal_on_all_ranks_and_follow_the_largest_amax(rank):
    model = compiled(seeded_mlp())
    train(model, 3, rank, size=1.0 + rank)
    staged = everyone({name: values[0] for name, values in snapshot(model).items()})
    model(torch.randn(16, 64))
    first, second = everyone(settled(model))
    assert first == second
    assert staged[0]["0:input"] < staged[1]["0:input"]
    for name, values in first.items():
        assert values[2] == max(amaxes[name] for amaxes in staged), name


def deep(layers):
    return Stack(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(layers))


def collectives_of_a_step(rank, layers, rules=None):
    """And the model's state behind it."""
    torch._dynamo.reset()
    model = compiled(deep(layers), rules=rules)
    train(model, 2, rank, width=32)
    with counted() as calls:
        train(model, 1, rank, width=32)
    return calls, settled(model)


@on_ranks(2)
def test_one_collective_per_step_however_many_layers_and_recipes(rank):
    for layers, rules in ((1, None), (4, {"layers.3.*": DelayedScaling(amax_history_len=2)})):
        calls, tensors = collectives_of_a_step(rank, layers, rules)
        assert (calls, len(tensors)) == (["all_reduce"], 3 * layers - 1 + 1)


@on_ranks(2, fresh=True)
def test_tensors_beyond_the_message_travel_in_a_second_one(rank):
    importlib.import_module("fp8pass.scales.reduction").MESSAGE = 16
    calls, found = collectives_of_a_step(rank, 6)
    first, second = everyone(found)
    assert calls == ["all_reduce", "all_reduce"]
    assert first == second


@on_ranks(2)
def test_reduce_amax_false_communicates_nothing(rank):
    model = compiled(seeded_mlp(), DelayedScaling(amax_history_len=4, reduce_amax=False))
    with counted() as calls:
        train(model, 3, rank, size=1.0 + rank)
    assert calls == []
    first, second = everyone(snapshot(model))
    assert first["0:input"] != second["0:input"]


# -- ranks that run different modules


class Experts(nn.Module):
    def __init__(self, outer: bool = True):
        super().__init__()
        self.first = nn.Linear(32, 32) if outer else nn.Identity()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x, expert: int | None):
        x = self.first(x)
        return x if expert is None else self.experts[expert](x)


def run_experts(model, choices, size=1.0):
    for expert in choices:
        model(torch.randn(16, 32, requires_grad=True) * size, expert).square().mean().backward()


@pytest.mark.parametrize("outer", [True, False])
@on_ranks(2)
def test_a_rank_without_tokens_takes_part_with_zeros(rank, outer):
    torch.manual_seed(0)
    model = compiled(Experts(outer))
    torch.manual_seed(rank)
    # step 1: an expert each; step 2: expert 0 on rank 0 only; step 3: no expert anywhere
    for choice in ([0, 1], [0, None], [None, None]):
        run_experts(model, [choice[rank]])
    run_experts(model, [None])
    first, second = everyone(settled(model))
    assert first == second
    steps = {"experts.0": 2, "experts.1": 1} | ({"first": 3} if outer else {})
    assert set(first) == {f"{m}:{kind}" for m in steps for kind in ("input", "weight", "grad_output")}
    for name, (*history, scale) in first.items():
        assert sum(amax != 0 for amax in history) == steps[name.split(":")[0]], name
        assert scale != 1


@on_ranks(2)
def test_history_and_scale_stay_if_no_rank_ran_the_module(rank):
    model = compiled(Experts())
    run_experts(model, [0, None])
    before = {name: values for name, values in snapshot(model).items() if name.startswith("experts.0")}
    run_experts(model, [None, None])
    assert len(before) == 3
    assert snapshot(model).items() >= before.items()


@on_ranks(2)
def test_manual_steps_include_ranks_that_ran_nothing(rank):
    model = compiled(Experts(outer=False), step="manual")
    view = state(model)
    for _ in range(2):
        if rank == 0:
            run_experts(model, [0, 1])
        view.step()
    first, second = everyone(snapshot(model))
    assert first == second
    assert len(first) == 6


@on_ranks(2)
def test_one_rank_may_evaluate_alone(rank):
    model = compiled(seeded_mlp())
    train(model, 2, rank)
    if rank == 0:
        with torch.no_grad(), counted() as calls:
            model(torch.randn(16, 64))
            model(torch.randn(16, 64))
        assert calls == []
    dist.barrier()
    train(model, 2, rank)
    first, second = everyone(settled(model))
    assert first == second


# -- disagreement, and groups


class OnRank1(nn.Sequential):
    """Another model, as far as ranks are compared before they reduce."""


@on_ranks(2)
def test_tensors_that_a_rank_cannot_have_are_an_error_on_every_rank(rank):
    kind, rules = (OnRank1, {"2": None}) if rank else (nn.Sequential, None)
    model = compiled(kind(*seeded_mlp()), rules=rules)
    train(model, 1, rank)
    before = snapshot(model)
    with pytest.raises(AmaxReductionError, match=r"rank 1 lacks 2:grad_output, 2:input, 2:weight.*reduce_amax=False"):
        train(model, 1, rank)
    assert snapshot(model) == before


def different_recipes(rank):
    kind = OnRank1 if rank else nn.Sequential
    model = compiled(kind(seeded_mlp()), DelayedScaling(amax_history_len=4 + rank))
    train(model, 2, rank)


def test_different_recipes_of_different_models_are_an_error_on_every_rank():
    for outcome in outcomes_on_ranks(different_recipes, 2):
        assert outcome.error.startswith("AmaxReductionError")
        assert "amax_history_len=4" in outcome.error
        assert "amax_history_len=5" in outcome.error


@on_ranks(4)
def test_amaxes_are_reduced_within_their_group_only(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = compiled(seeded_mlp(), amax_reduction_group=pairs[rank // 2])
    train(model, 3, rank, size=1.0 + rank)
    with pytest.raises(OptionError, match="not a member"):
        compiled(seeded_mlp(), amax_reduction_group=pairs[1 - rank // 2])
    results = everyone(settled(model))
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert results[0]["0:input"] != results[2]["0:input"]


# -- failure


def without_a_peer(rank, leave):
    """What the next calls raise, each of which must try again: the step has not ended, and the state is as it was."""
    model = compiled(seeded_mlp())
    train(model, 2, rank)
    if rank == 1:
        return leave()
    session, errors = model._fp8pass_session, []
    before = snapshot(model), next(iter(session.stores)).version
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            model(torch.randn(16, 64))
        errors.append((raised.type.__module__, str(raised.value).lower()))
        assert session.clock.recorded
        assert before == (snapshot(model), next(iter(session.stores)).version)
    return errors


def peer_dies(rank):
    return without_a_peer(rank, lambda: os._exit(7))


def test_a_peer_that_dies_is_torchs_error_and_leaves_the_state():
    survivor, dead = outcomes_on_ranks(peer_dies, 2)
    assert dead.error == "died (exit code 7)"
    assert not any(module.startswith("fp8pass") for module, _ in survivor.value), survivor


def peer_stalls(rank):
    return without_a_peer(rank, lambda: time.sleep(5))


def test_a_peer_that_stalls_is_torchs_timeout_and_leaves_the_state():
    (module, text), _ = outcomes_on_ranks(peer_stalls, 2, group_timeout=2)[0].value
    assert not module.startswith("fp8pass")
    assert "timed out" in text or "timeout" in text
