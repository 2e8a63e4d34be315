"""The reduction of amaxes at the step boundary: what ranks see, what it costs, and what happens when it goes wrong."""

import contextlib
import importlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, state
from fp8pass.errors import AmaxReductionError
from tests.distributed.support import everyone, on_ranks, run_on_ranks
from tests.support.models import Stack, mlp

pytestmark = pytest.mark.dist
RECIPE = DelayedScaling(amax_history_len=4)
COLLECTIVES = ("all_reduce", "all_gather_object", "all_gather", "broadcast", "barrier")


@contextlib.contextmanager
def counted():
    """The names of the collectives that are called while it is entered."""
    calls = []

    def counting(name, function):
        return lambda *a, **k: (calls.append(name), function(*a, **k))[1]

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, counting(name, getattr(dist, name))))
        yield calls


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x, expert):
        x = self.first(x)
        return x if expert is None else self.experts[expert](x)


def run_experts(model, choices, size=1.0):
    for expert in choices:
        model(torch.randn(16, 32, requires_grad=True) * size, expert).square().mean().backward()


def compiled(make=mlp, recipe=RECIPE, **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return fp8_compile(make(), recipe, backend="aot_eager", **options)


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
    model = compiled()
    train(model, 3, rank, size=1.0 + rank)
    staged = everyone({name: values[0] for name, values in snapshot(model).items()})
    model(torch.randn(16, 64))
    first, second = everyone(settled(model))
    assert first == second
    assert staged[0]["0:input"] < staged[1]["0:input"]
    for name, values in first.items():
        assert values[2] == max(amaxes[name] for amaxes in staged), name


@on_ranks(2, fresh=True)
def test_tensors_beyond_the_message_travel_in_a_second_one(rank):
    """One collective takes whatever the message holds."""
    importlib.import_module("fp8pass.scales.reduction").MESSAGE = 16
    for layers, expected in ((1, ["all_reduce"]), (6, ["all_reduce"] * 2)):
        model = compiled(lambda layers=layers: Stack(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(layers)))
        train(model, 2, rank, width=32, size=1.0 + rank)
        with counted() as calls:
            train(model, 1, rank, width=32)
        first, second = everyone(settled(model))
        assert calls == expected
        assert first == second


# -- ranks that run different modules


@on_ranks(2)
def test_a_rank_without_tokens_takes_part_with_zeros(rank):
    model = compiled(Experts)
    torch.manual_seed(rank)
    # step 1: an expert each; step 2: expert 0 on rank 0 only; step 3: no expert anywhere
    for choice in ([0, 1], [0, None], [None, None]):
        run_experts(model, [choice[rank]])
    run_experts(model, [None])
    first, second = everyone(settled(model))
    assert first == second
    steps = {"experts.0": 2, "experts.1": 1, "first": 3}
    assert set(first) == {f"{m}:{kind}" for m in steps for kind in ("input", "weight", "grad_output")}
    for name, (*history, scale) in first.items():
        assert sum(amax != 0 for amax in history) == steps[name.split(":")[0]], name
        assert history[-1] != 0, "a history stays where no rank ran the module"
        assert scale != 1


# -- disagreement


class OnRank1(nn.Sequential):
    """Another model, as far as ranks are compared before they reduce."""


def differs(rank):
    return (OnRank1 if rank else nn.Sequential)(*mlp())


@on_ranks(2)
def test_tensors_that_a_rank_cannot_have_are_an_error_on_every_rank(rank):
    model = compiled(lambda: differs(rank), rules={"2": None} if rank else None)
    train(model, 1, rank)
    before = snapshot(model)
    with pytest.raises(AmaxReductionError, match=r"rank 1 lacks 2:grad_output, 2:input, 2:weight.*reduce_amax=False"):
        train(model, 1, rank)
    assert snapshot(model) == before


@on_ranks(2, fresh=True)
def test_different_recipes_of_different_models_are_an_error_on_every_rank(rank):
    with pytest.raises(AmaxReductionError, match=r"amax_history_len=4(.|\n)*amax_history_len=5"):
        train(compiled(lambda: differs(rank), DelayedScaling(amax_history_len=4 + rank)), 2, rank)


# -- failure


# -- boundaries without a host that waits for its device, as on GPUs; here with a CPU in its place


def as_on_gpus():
    """In a rank's process: the device is one that is waited for, update_scales reads nothing back, as its kernel does, and what
    is compared of weights has never arrived yet."""
    from fp8pass.scales import exchanges
    from lowering import ops

    exchanges.Arriving.are_there = property(lambda self: False)
    importlib.import_module("fp8pass.scales.reduction").defers = lambda device: True
    ops.update_scales._providers.clear()


def boundaries(rank, choices):
    """Of steps with an expert for each rank: the amaxes, and the model's state."""
    as_on_gpus()
    model, amaxes = compiled(Experts, DelayedScaling(amax_history_len=8), step="manual"), []
    torch.manual_seed(rank)
    for choice in choices:
        run_experts(model, [choice[rank]], size=1.0 + rank)
        amaxes.append(state(model).amax_history("first:input")[0].item())
        state(model).step()
    return amaxes, settled(model)


def test_the_amaxes_of_a_step_in_which_ranks_disagree_are_left_out_everywhere():
    """Expert 1 runs on rank 1 alone, from the third step on."""
    choices = [(0, 0), (0, 0), (0, 1), (0, 1), (0, 0)]
    (ours, first), (theirs, second) = run_on_ranks(boundaries, 2, choices, fresh=True)
    assert first == second
    largest = [max(pair) for pair in zip(ours, theirs, strict=True)]
    del largest[2]  # met at its boundary, told at the next one
    assert [amax for amax in first["first:input"][:-1] if amax] == pytest.approx(largest)
    assert sum(amax != 0 for amax in first["experts.1:input"][:-1]) == 1, "rank 0 knows it, too"
