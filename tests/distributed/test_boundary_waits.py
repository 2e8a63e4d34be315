"""Step boundaries of several ranks without a host that waits for its device, as on GPUs; here with a CPU in its place."""

import importlib
from unittest import mock

import pytest
import torch

from fp8pass import DelayedScaling, state
from tests.distributed.support import run_on_ranks
from tests.distributed.test_amax_reduction import CountedCollectives, Experts, compiled, run_experts, settled, train
from tests.support.models import mlp

pytestmark = pytest.mark.dist
RECIPE = DelayedScaling(amax_history_len=8, initial_scale="one")


class CountedWaits:
    """Counts what a host waits for on a GPU: values read from tensors, and tensors made of host data."""

    READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__")

    def __enter__(self) -> list[str]:
        calls: list[str] = []

        def counting(name, function):
            return lambda *a, **k: (calls.append(name), function(*a, **k))[1]

        targets = [(torch.Tensor, name) for name in self.READS] + [(torch, "tensor")]
        self._patches = [mock.patch.object(o, n, counting(n, getattr(o, n))) for o, n in targets]
        for patch in self._patches:
            patch.start()
        return calls

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.stop()


def as_on_gpus() -> None:
    """In a rank's process: the device is one that is waited for, update_scales reads nothing back, as its kernel does, and what
    is compared of weights has never arrived yet."""
    from fp8pass.scales import exchanges
    from lowering import ops

    exchanges.Arriving.are_there = property(lambda self: False)
    importlib.import_module("fp8pass.scales.reduction").defers = lambda device: True
    ops.update_scales._providers.clear()


def waits_of_boundaries(rank, deferred):
    if deferred:
        as_on_gpus()
    torch.manual_seed(0)
    model = compiled(mlp(), RECIPE, step="manual")
    counted, collectives = [], []
    for _ in range(5):
        train(model, 1, rank, size=1.0 + rank)
        with CountedWaits() as waits, CountedCollectives() as calls:
            state(model).step()
        counted.append(sorted(waits))
        collectives.append(calls.calls)
    return counted, collectives, settled(model)


def test_a_boundary_waits_for_nothing_but_the_verdict_of_the_one_before():
    results = run_on_ranks(waits_of_boundaries, 2, True, fresh=True)
    plain = run_on_ranks(waits_of_boundaries, 2, False)
    for (waits, collectives, found), (_, _, expected) in zip(results, plain, strict=True):
        assert waits[0], "the first is synchronous"
        assert waits[1:] == [[], ["numpy"], ["numpy"], ["numpy"]], "a value in pinned memory"
        assert collectives[1:] == [["all_reduce"]] * 4
        assert found == expected, "the same scales as with a host that waits"
    assert results[0][2] == results[1][2]


def met_late(rank):
    """Expert 1 runs on rank 1 alone, from the third step on."""
    as_on_gpus()
    torch.manual_seed(0)
    model = compiled(Experts(), RECIPE, step="manual")
    torch.manual_seed(rank)
    amaxes = []
    for choice in ([0, 0], [0, 0], [0, 1], [0, 1], [0, 0]):
        run_experts(model, [choice[rank]])
        amaxes.append(state(model).amax_history("first:input")[0].item())
        state(model).step()
    return amaxes, settled(model)


def test_the_amaxes_of_a_step_in_which_ranks_disagree_are_left_out_everywhere():
    (amaxes, first), (other_amaxes, second) = run_on_ranks(met_late, 2, fresh=True)
    assert first == second
    assert {name for name in first if name.startswith("experts.1")}, "rank 0 knows them, too"
    largest = [max(pair) for pair in zip(amaxes, other_amaxes, strict=True)]
    del largest[2]  # met at its boundary, told at the next one
    assert [amax for amax in first["first:input"][:-1] if amax] == pytest.approx(largest)
    assert sum(amax != 0 for amax in first["experts.1:input"][:-1]) == 1


def many_tensors(rank):
    as_on_gpus()
    reduction = importlib.import_module("fp8pass.scales.reduction")
    torch.manual_seed(0)
    model = compiled(Experts(), RECIPE, step="manual")
    for expert in (0, 0, 1, 1, None):
        reduction.MESSAGE = 4 + 6  # first and one expert fit, two do not
        run_experts(model, [expert], size=1.0 + rank)
        state(model).step()
    return settled(model)


def test_more_tensors_than_a_message_holds_take_the_synchronous_way():
    first, second = run_on_ranks(many_tensors, 2, fresh=True)
    assert first == second
    assert len(first) == 9
    assert sum(amax != 0 for amax in first["first:input"][:-1]) == 4, "the step in which they became too many is left out"
