"""Step boundaries of several ranks without a host that waits for its device, as on GPUs; here with a CPU in its place."""

import importlib

import pytest
import torch

from fp8pass import DelayedScaling, state
from tests.distributed.support import everyone, on_ranks, run_on_ranks
from tests.distributed.test_amax_reduction import Experts, compiled, counted, run_experts, settled, train
from tests.support.models import mlp

pytestmark = pytest.mark.dist
RECIPE = DelayedScaling(amax_history_len=8, initial_scale="one")


#: What a host waits for on a GPU: values read from tensors, and tensors made of host data.
WAITS = [(torch.Tensor, name) for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__")]
WAITS += [(torch, "tensor")]


def as_on_gpus():
    """In a rank's process: the device is one that is waited for, update_scales reads nothing back, as its kernel does, and what
    is compared of weights has never arrived yet."""
    from fp8pass.scales import exchanges
    from lowering import ops

    exchanges.Arriving.are_there = property(lambda self: False)
    importlib.import_module("fp8pass.scales.reduction").defers = lambda device: True
    ops.update_scales._providers.clear()


def seeded(make):
    torch.manual_seed(0)
    return compiled(make(), RECIPE, step="manual")


def waits_of_boundaries(rank, deferred):
    if deferred:
        as_on_gpus()
    model = seeded(mlp)
    waited, collectives = [], []
    for _ in range(5):
        train(model, 1, rank, size=1.0 + rank)
        with counted(WAITS) as waits, counted() as calls:
            state(model).step()
        waited.append(sorted(waits))
        collectives.append(calls)
    return waited, collectives, settled(model)


def test_a_boundary_waits_for_nothing_but_the_verdict_of_the_one_before():
    results = run_on_ranks(waits_of_boundaries, 2, True, fresh=True)
    plain = run_on_ranks(waits_of_boundaries, 2, False)
    for (waits, collectives, found), (_, _, expected) in zip(results, plain, strict=True):
        assert waits[0], "the first is synchronous"
        assert waits[1:] == [[], ["numpy"], ["numpy"], ["numpy"]], "a value in pinned memory"
        assert collectives[1:] == [["all_reduce"]] * 4
        assert found == expected == results[0][2], "the same scales as with a host that waits"


@on_ranks(2, fresh=True)
def test_the_amaxes_of_a_step_in_which_ranks_disagree_are_left_out_everywhere(rank):
    """Expert 1 runs on rank 1 alone, from the third step on."""
    as_on_gpus()
    model = seeded(Experts)
    torch.manual_seed(rank)
    amaxes = []
    for choice in ([0, 0], [0, 0], [0, 1], [0, 1], [0, 0]):
        run_experts(model, [choice[rank]])
        amaxes.append(state(model).amax_history("first:input")[0].item())
        state(model).step()
    first, second = everyone(settled(model))
    assert first == second
    largest = [max(pair) for pair in zip(*everyone(amaxes), strict=True)]
    del largest[2]  # met at its boundary, told at the next one
    assert [amax for amax in first["first:input"][:-1] if amax] == pytest.approx(largest)
    assert sum(amax != 0 for amax in first["experts.1:input"][:-1]) == 1, "rank 0 knows it, too"


@on_ranks(2, fresh=True)
def test_more_tensors_than_a_message_holds_take_the_synchronous_way(rank):
    as_on_gpus()
    model = seeded(Experts)
    for expert in (0, 0, 1, 1, None):
        importlib.import_module("fp8pass.scales.reduction").MESSAGE = 4 + 6  # first and one expert fit, two do not
        run_experts(model, [expert], size=1.0 + rank)
        state(model).step()
    first, second = everyone(settled(model))
    assert first == second
    assert len(first) == 9
    assert sum(amax != 0 for amax in first["first:input"][:-1]) == 4, "the step in which they became too many is left out"
