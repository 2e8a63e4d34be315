"""Blocks that eager checkpointing runs again: which run they repeat, and where their amaxes go."""

import copy

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8pass import DelayedScaling, fp8_compile, state
from fp8pass.runtime.recompute import FirstRun, FirstRuns
from tests.support.models import BrokenBlock, mlp

RECIPE = DelayedScaling(amax_history_len=2)


def test_a_recomputation_behind_a_boundary_writes_nothing_into_the_next_step():
    compiled = fp8_compile(mlp(), RECIPE, backend="aot_eager", step="manual")
    view, x = state(compiled), torch.randn(16, 64)
    for _ in range(2):
        checkpoint(compiled, x, use_reentrant=False).sum().backward()
        view.step()
    out = checkpoint(compiled, 100 * x, use_reentrant=False)
    view.step()
    out.sum().backward()
    staged = {name: float(view.amax_history(name)[0]) for name in view.tensors}
    assert all(value == 0 for name, value in staged.items() if not name.endswith("grad_output")), staged
    assert all(value > 0 for name, value in staged.items() if name.endswith("grad_output")), staged


class TwoReaders(nn.Module):
    """Two graphs that read one tensor and nothing else."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        q = self.q(x)
        torch._dynamo.graph_break()
        k = self.k(x)
        torch._dynamo.graph_break()
        return q * k


def gradients(checkpoints: bool, make=lambda: BrokenBlock(64, 96), one_by_one=False, **options):
    """Two runs of one block with a break: the first has the scales of small inputs, the second those of its own."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = make()
    compiled = fp8_compile(block, RECIPE, backend="aot_eager", step="manual", **options)
    view, small, xs = state(compiled), torch.randn(16, 64), 100 * torch.randn(2, 16, 64)
    for x in (small, small):
        compiled(x).square().mean().backward()
        view.step()
    block.zero_grad()
    losses = []
    for x in xs:
        out = checkpoint(compiled, x, use_reentrant=False) if checkpoints else compiled(x)
        losses.append(out.square().mean())
        view.step()
    for loss in losses if one_by_one else [losses[0] + losses[1]]:
        loss.backward()
    return copy.deepcopy([p.grad for p in block.parameters()])


def test_two_runs_of_a_block_with_a_break_are_repeated_newest_first_and_not_oldest():
    for plain, again in zip(gradients(False), gradients(True), strict=True):
        assert again.equal(plain)


@pytest.mark.parametrize("rules", [None, {"k": None}, {"q": None}])
def test_two_graphs_that_read_one_tensor_repeat_a_run_each(rules):
    plain, again = (
        gradients(checkpoints, TwoReaders, one_by_one=True, select="all", rules=rules) for checkpoints in (False, True)
    )
    for one, other in zip(plain, again, strict=True):
        assert other.equal(one)


def test_a_run_is_that_of_its_instance_where_two_read_the_same_memory():
    runs, tensors, known = FirstRuns(), [torch.zeros(4) for _ in range(2)], {}
    for i, x in enumerate(tensors):
        for instance in "qk":
            known[i, instance] = FirstRun({}, True, frozenset(), None, True)
            runs.add([x], instance, known[i, instance])
    for i, x in enumerate(tensors):  # as in 1F1B, the oldest first
        for instance in "kq":
            assert runs.take([x], instance) is known[i, instance]


def test_other_tensors_at_the_same_address_repeat_no_run():
    """A recomputation reads a copy, which may lie where an earlier step's did."""
    memory = numpy.zeros(96, dtype=numpy.float32)  # given to one tensor after the other, as an allocator does
    runs, first = FirstRuns(), torch.from_numpy(memory)
    runs.add([first], "a", FirstRun({}, True, frozenset(), None, True))
    assert runs.find([first]) is not None
    del first
    found = torch.from_numpy(memory)
    assert runs.find([found]) is None
    assert runs.take([found], "b") is None


def across_a_boundary(use_reentrant):
    """Gradients of a run that a boundary parts from its backward; another run has changed the scales there. None: it
    is not checkpointed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = mlp()
    compiled = fp8_compile(block, RECIPE, backend="aot_eager", step="manual")
    view, x = state(compiled), torch.randn(16, 64)
    for scale in (1.0, 1.0, 100.0):
        given = x.clone().requires_grad_()
        other = compiled(scale * x)
        out = compiled(given) if use_reentrant is None else checkpoint(compiled, given, use_reentrant=use_reentrant)
        view.step()
        block.zero_grad()
        (out.square().mean() + other.mean()).backward()
    return [given.grad, *(p.grad.clone() for p in block.parameters())]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_behind_a_boundary_has_the_scales_of_its_first_run(use_reentrant):
    plain, again = across_a_boundary(None), across_a_boundary(use_reentrant)
    assert all(a.equal(b) for a, b in zip(plain, again, strict=True))
