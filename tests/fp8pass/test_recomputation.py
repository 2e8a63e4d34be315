"""Activation checkpointing, in the graph and around it: amaxes are recorded once, a run is repeated with its own scales."""

import functools

import numpy
import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fp8pass import DelayedScaling, inspect, state
from fp8pass.runtime.recompute import FirstRun, FirstRuns
from fp8pass.runtime.wrap import session_of
from tests.support.cases import rest
from tests.support.models import BrokenBlock, Stack, mlp
from tests.support.training import fp8, gradients, same, train

RECIPE = DelayedScaling(amax_history_len=2)
ops = torch.ops.lowering

# -- in the graph


def trained(**options):
    """Blocks that are checkpointed inside of the compiled model, or not."""
    torch.manual_seed(0)
    model = Stack((mlp(32, 64, 32) for _ in range(2)), **options)
    compiled, found = fp8(model, RECIPE), []
    for i in range(3):
        model.zero_grad()
        found.append([train(compiled, torch.randn(16, 32) * (i + 1)), gradients(model)])
    return compiled, [found, state(compiled).state_dict()]


def in_backward(compiled, operation):
    """How often the backward runs an operation."""
    (graph,) = inspect(compiled).graphs
    return sum(n.target is operation.default for n in graph.backward.graph.nodes)


def keep_gemms(ctx, op, *args, **kwargs):
    keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def num_gradients(compiled):
    return sum(g.role != "output" for g in inspect(compiled).gemms)


def test_checkpoint_inside_the_model_changes_no_bit_and_a_policy_that_saves_gemms_recomputes_none():
    (plain, expected), (checkpointed, found) = trained(), trained(use_reentrant=False)
    selective, others = trained(
        use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, keep_gemms)
    )
    assert same(found, expected)
    assert same(others, expected)
    assert inspect(checkpointed).graphs[0].saved_bytes < inspect(plain).graphs[0].saved_bytes
    assert in_backward(checkpointed, ops.record_amax) == 1
    assert in_backward(selective, ops.scaled_mm) == num_gradients(selective)


class Gated(nn.Module):
    """Results of GEMMs are cheaper to compute again than to save, by the partitioner's count, which does not know our GEMMs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.sigmoid(x)
        return x


def test_a_small_memory_budget_recomputes_no_fp8_gemm_either():
    compiled = fp8(Gated())
    with functorch_config.patch(activation_memory_budget=0.1):
        train(compiled, torch.randn(64, 64, requires_grad=True))
    assert in_backward(compiled, ops.scaled_mm) == num_gradients(compiled) == 8


# -- around the model


def checkpointed(function, x, kinds):
    """Within a checkpoint of each kind, the innermost first: use_reentrant."""
    for use_reentrant in kinds:
        function = functools.partial(checkpoint, function, use_reentrant=use_reentrant)
    return function(x)


@pytest.mark.parametrize("kinds", [[False], [False, False]])
def test_a_recomputation_behind_a_boundary_writes_nothing_into_the_next_step(kinds):
    compiled, x = fp8(mlp(), RECIPE, step="manual"), torch.randn(16, 64)
    view = state(compiled)
    for scale in (1, 1, 100):
        out = checkpointed(compiled, scale * x, kinds)
        if scale == 100:
            view.step()
        out.sum().backward()
        if scale == 1:
            view.step()
    for name in view.tensors:
        assert (view.amax_history(name)[0] > 0) == name.endswith("grad_output"), name


class ByName(nn.Module):
    """Takes its input in one of several ways."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, batch=None, x=None):
        return self.net(batch["x"][0] if x is None else x)


@pytest.mark.parametrize("call", [lambda model, x: model(x=x), lambda model, x: model({"x": [x]})])
def test_reentrant_checkpointing_around_an_input_that_is_not_positional_ends_steps_where_ranks_agree(call):
    """Gradients are off in its first run, so that the model is known to train by its input alone."""
    compiled = fp8(ByName(), RECIPE)
    session_of(compiled).clock.agrees = True
    for scale in (1.0, 2.0, 4.0):
        x = torch.full((16, 64), scale, requires_grad=True)
        checkpoint(functools.partial(call, compiled), x, use_reentrant=True).sum().backward()
    assert state(compiled).amax_history("net.0:input").tolist() == [4.0, 2.0]


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


def two_runs(checkpoints, make=lambda: BrokenBlock(64, 96), one_by_one=False, one_input=False, again=False, **options):
    """Two runs of one block with a break: the first has the scales of small inputs, the second those of its own.

    one_by_one: with a backward each, the first one first. again: two backwards of each loss, with a boundary between."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = make()
    compiled = fp8(block, RECIPE, step="manual", **options)
    view, small, xs = state(compiled), torch.randn(16, 64), 100 * torch.randn(2, 16, 64)
    xs = [xs[0], xs[0]] if one_input else xs
    for _ in range(2):
        train(compiled, small)
        view.step()
    block.zero_grad()
    losses = []
    for x in xs:
        out = checkpoint(compiled, x, use_reentrant=False) if checkpoints else compiled(x)
        losses.append(out.square().mean())
        view.step()
    for loss in losses if one_by_one else [losses[0] + losses[1]]:
        if again:
            loss.backward(retain_graph=True)
            view.step()
        loss.backward()
    return gradients(block)


@pytest.mark.parametrize(
    "how",
    [
        *({}, {"one_by_one": True}, {"make": mlp, "one_by_one": True, "one_input": True}, {"again": True}),
        # Two graphs that read one tensor repeat a run each.
        *({"make": TwoReaders, "one_by_one": True, "rules": rules} for rules in (None, {"k": None})),
        *rest([{"make": TwoReaders, "one_by_one": True, "rules": {"q": None}}]),
    ],
)
def test_two_runs_of_a_block_are_repeated_as_they_were(how):
    assert same(two_runs(True, **how), two_runs(False, **how))


@functools.cache
def across_a_boundary(*kinds):
    """Gradients of a checkpointed run that a boundary parts from its backward; another run has changed the scales there."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block, x = mlp(), torch.randn(16, 64)
    compiled = fp8(block, RECIPE, step="manual")
    for scale in (1.0, 1.0, 100.0):
        given = x.clone().requires_grad_()
        other = compiled(scale * x)
        out = checkpointed(compiled, given, kinds)
        state(compiled).step()
        block.zero_grad()
        (out.square().mean() + other.mean()).backward()
    return given.grad, gradients(block)


@pytest.mark.parametrize("kinds", [[False], [True], [True, False], *rest([[False, False], [False, True], [True, True]])])
def test_a_recomputation_behind_a_boundary_has_the_scales_of_its_first_run(kinds):
    assert same(across_a_boundary(*kinds), across_a_boundary())


# -- which run is repeated


def first_run():
    return FirstRun({}, True, frozenset(), None, True)


@pytest.mark.parametrize("found_by_memory", [False, True])
def test_the_newest_run_of_an_instance_is_repeated_first_where_no_frame_tells(found_by_memory):
    """A run that was found by its memory is not taken again: the older, whose inputs were made anew, is the next."""
    runs, older, newer, elsewhere = FirstRuns(), first_run(), first_run(), torch.zeros(4)
    inputs = [torch.zeros(4), torch.zeros(4)]
    for given, run in zip(inputs, (older, newer), strict=True):
        runs.add([given], "instance", run)
    asked = [inputs[1] if found_by_memory else elsewhere, elsewhere, elsewhere]
    assert [runs.take([given], "instance") for given in asked] == [newer, older, None]


def test_other_tensors_at_the_same_address_repeat_no_run():
    """A recomputation reads a copy, which may lie where an earlier step's did."""
    memory = numpy.zeros(96, dtype=numpy.float32)  # given to one tensor after the other, as an allocator does
    runs, first = FirstRuns(), torch.from_numpy(memory)
    runs.add([first], "a", first_run())
    assert runs.find([first]) is not None
    del first
    found = torch.from_numpy(memory)
    assert runs.find([found]) is None
    assert runs.take([found], "b") is None
