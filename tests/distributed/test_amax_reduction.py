"""The reduction of amaxes at the step boundary: what ranks see, what it costs, and what happens when it goes wrong."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, state
from fp8pass.errors import AmaxReductionError, OptionError
from tests.distributed.support import outcomes_on_ranks, run_on_ranks
from tests.support.models import Stack, mlp

pytestmark = pytest.mark.dist
RECIPE = DelayedScaling(amax_history_len=4)


class CountedCollectives:
    """Counts calls of torch.distributed's collectives while it is entered."""

    NAMES = ("all_reduce", "all_gather_object", "all_gather", "broadcast", "barrier")

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __enter__(self) -> CountedCollectives:
        self._real = {name: getattr(dist, name) for name in self.NAMES}
        for name, function in self._real.items():
            setattr(dist, name, lambda *a, _name=name, _f=function, **k: (self.calls.append(_name), _f(*a, **k))[1])
        return self

    def __exit__(self, *error: object) -> None:
        for name, function in self._real.items():
            setattr(dist, name, function)


def compiled(model: nn.Module, recipe=RECIPE, **options):
    return fp8_compile(model, recipe, backend="aot_eager", **options)


def seeded_mlp() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def train(model, steps: int, rank: int, size: float = 1.0, width: int = 64) -> None:
    for step in range(steps):
        torch.manual_seed(1000 * rank + step)
        model(torch.randn(16, width) * size).square().mean().backward()


def snapshot(model) -> dict[str, list[float]]:
    """Per tensor the staged amax, the history and the scale."""
    view = state(model)
    return {n: [*view.amax_history(n).tolist(), view.scale(n).item()] for n in view.tensors}


def settled(model) -> dict[str, list[float]]:
    """The same without the staged amax, which is a rank's own until the step ends."""
    return {name: values[1:] for name, values in snapshot(model).items()}


# -- equal scales, and what they are


def scales_after_steps(rank):
    model = compiled(seeded_mlp())
    train(model, 3, rank, size=1.0 + rank)
    local = {n: h[0] for n, h in snapshot(model).items()}
    model(torch.randn(16, 64))
    return local, settled(model)


def test_scales_are_equal_on_all_ranks_and_follow_the_largest_amax():
    (first_staged, first), (second_staged, second) = run_on_ranks(scales_after_steps, 2)
    assert first == second
    assert first_staged["0:input"] < second_staged["0:input"]
    for name in first:
        assert first[name][2] == max(first_staged[name], second_staged[name]), name


# -- one collective per step


def deep(layers: int) -> nn.Module:
    return Stack(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(layers))


def collectives_of_a_step(rank, cases):
    found = []
    for layers, rules in cases:
        torch._dynamo.reset()
        model = compiled(deep(layers), rules=rules)
        train(model, 2, rank, width=32)
        with CountedCollectives() as counted:
            train(model, 1, rank, width=32)
        found.append((counted.calls, len(state(model).tensors)))
    return found


def test_one_collective_per_step_however_many_layers_and_recipes():
    cases = [(1, None), (4, {"layers.3.*": DelayedScaling(amax_history_len=2)})]
    for results in run_on_ranks(collectives_of_a_step, 2, cases):
        assert results == [(["all_reduce"], 3 * layers - 1 + 1) for layers, _ in cases]


def collectives_without_reduction(rank):
    model = compiled(seeded_mlp(), DelayedScaling(amax_history_len=4, reduce_amax=False))
    with CountedCollectives() as counted:
        train(model, 3, rank, size=1.0 + rank)
    return counted.calls, snapshot(model)


def test_reduce_amax_false_communicates_nothing():
    (calls, first), (other_calls, second) = run_on_ranks(collectives_without_reduction, 2)
    assert calls == other_calls == []
    assert first["0:input"] != second["0:input"]


# -- more tensors than the message holds


def many_tensors(rank):
    importlib.import_module("fp8pass.scales.reduction").MESSAGE = 16
    model = compiled(deep(6))
    train(model, 3, rank, width=32)
    with CountedCollectives() as counted:
        train(model, 1, rank, width=32)
    return counted.calls, settled(model)


def test_tensors_beyond_the_message_travel_in_a_second_one():
    (calls, first), (_, second) = run_on_ranks(many_tensors, 2, fresh=True)
    assert calls == ["all_reduce", "all_reduce"]
    assert first == second


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


def different_experts(rank, outer):
    torch.manual_seed(0)
    model = compiled(Experts(outer))
    torch.manual_seed(rank)
    # step 1: an expert each; step 2: expert 0 on rank 0 only; step 3: no expert anywhere
    for choice in ([0, 1], [0, None], [None, None]):
        run_experts(model, [choice[rank]])
    run_experts(model, [None])
    return settled(model)


@pytest.mark.parametrize("outer", [True, False])
def test_a_rank_without_tokens_takes_part_with_zeros(outer):
    first, second = run_on_ranks(different_experts, 2, outer)
    assert first == second
    steps = {"experts.0": 2, "experts.1": 1} | ({"first": 3} if outer else {})
    assert set(first) == {f"{m}:{kind}" for m in steps for kind in ("input", "weight", "grad_output")}
    for name, (*history, scale) in first.items():
        assert sum(amax != 0 for amax in history) == steps[name.split(":")[0]], name
        assert scale != 1


def nobody_runs_the_expert(rank):
    model = compiled(Experts())
    run_experts(model, [0, None])
    before = snapshot(model)
    run_experts(model, [None, None])
    after = snapshot(model)
    return [(before[n], after[n]) for n in before if n.startswith("experts.0")]


def test_history_and_scale_stay_if_no_rank_ran_the_module():
    for pairs in run_on_ranks(nobody_runs_the_expert, 2):
        assert len(pairs) == 3
        assert all(before == after for before, after in pairs)


def manual_steps(rank):
    model = compiled(Experts(outer=False), step="manual")
    view = state(model)
    for _ in range(2):
        if rank == 0:
            run_experts(model, [0, 1])
        view.step()
    return snapshot(model)


def test_manual_steps_include_ranks_that_ran_nothing():
    first, second = run_on_ranks(manual_steps, 2)
    assert first == second
    assert len(first) == 6


def evaluation_on_one_rank(rank):
    model = compiled(seeded_mlp())
    train(model, 2, rank)
    if rank == 0:
        with torch.no_grad(), CountedCollectives() as counted:
            model(torch.randn(16, 64))
            model(torch.randn(16, 64))
        assert counted.calls == []
    dist.barrier()
    train(model, 2, rank)
    return settled(model)


def test_one_rank_may_evaluate_alone():
    first, second = run_on_ranks(evaluation_on_one_rank, 2)
    assert first == second


# -- disagreement


def different_rules(rank):
    rules = {"2": None} if rank == 1 else None
    kind = OnRank1 if rank else nn.Sequential
    model = compiled(kind(*seeded_mlp()), rules=rules)
    train(model, 1, rank)
    before = snapshot(model)
    try:
        train(model, 1, rank)
    except AmaxReductionError as error:
        assert snapshot(model) == before
        return str(error)
    return "no error"


def test_tensors_that_a_rank_cannot_have_are_an_error_on_every_rank():
    for message in run_on_ranks(different_rules, 2):
        assert "rank 1 lacks 2:grad_output, 2:input, 2:weight" in message
        assert "reduce_amax=False" in message


class OnRank1(nn.Sequential):
    """Another model, as far as ranks are compared before they reduce."""


def different_recipes(rank):
    kind = OnRank1 if rank else nn.Sequential
    model = compiled(kind(seeded_mlp()), DelayedScaling(amax_history_len=4 + rank))
    train(model, 2, rank)


def test_different_recipes_of_different_models_are_an_error_on_every_rank():
    for outcome in outcomes_on_ranks(different_recipes, 2):
        assert outcome.error.startswith("AmaxReductionError")
        assert "amax_history_len=4" in outcome.error
        assert "amax_history_len=5" in outcome.error


# -- groups


def within_pairs(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = compiled(seeded_mlp(), amax_reduction_group=pairs[rank // 2])
    train(model, 3, rank, size=1.0 + rank)
    try:
        compiled(seeded_mlp(), amax_reduction_group=pairs[1 - rank // 2])
    except OptionError as error:
        refusal = str(error)
    return settled(model), refusal


def test_amaxes_are_reduced_within_their_group_only():
    results, refusals = zip(*run_on_ranks(within_pairs, 4), strict=True)
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert results[0]["0:input"] != results[2]["0:input"]
    assert all("not a member" in refusal for refusal in refusals)


# -- failure


def peer_dies(rank):
    model = compiled(seeded_mlp())
    train(model, 2, rank)
    if rank == 1:
        os._exit(7)
    before, version = snapshot(model), next(iter(model._fp8pass_session.stores)).version
    recorded = model._fp8pass_session.clock.recorded
    errors = []
    for _ in range(2):  # the second call must try again: the step has not ended
        try:
            model(torch.randn(16, 64))
        except RuntimeError as error:
            errors.append(type(error).__module__)
    after = snapshot(model), next(iter(model._fp8pass_session.stores)).version
    return (before, version) == after, recorded and model._fp8pass_session.clock.recorded, errors


def test_a_peer_that_dies_is_torchs_error_and_leaves_the_state():
    survivor, dead = outcomes_on_ranks(peer_dies, 2)
    assert dead.error == "died (exit code 7)"
    unchanged, recorded, errors = survivor.value
    assert unchanged
    assert recorded
    assert len(errors) == 2
    assert not any(module.startswith("fp8pass") for module in errors)


def peer_stalls(rank):
    import time

    model = compiled(seeded_mlp())
    train(model, 2, rank)
    before = snapshot(model)
    if rank == 1:
        time.sleep(5)
        return None
    try:
        model(torch.randn(16, 64))
    except RuntimeError as error:
        return str(error), snapshot(model) == before, model._fp8pass_session.clock.recorded


def test_a_peer_that_stalls_is_torchs_timeout_and_leaves_the_state():
    outcome = outcomes_on_ranks(peer_stalls, 2, group_timeout=2)[0]
    message, unchanged, recorded = outcome.value
    assert "timed out" in message.lower() or "timeout" in message.lower(), message
    assert unchanged
    assert recorded
