"""Activation checkpointing, in the graph and around it: amaxes are recorded once, a run is repeated with its own scales."""

import copy
import functools

import numpy
import pytest
import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from fp8pass import DelayedScaling, inspect, state
from fp8pass.rewrite import runner
from fp8pass.rewrite.launches import MANY_ROWS
from fp8pass.runtime.recompute import FirstRun, FirstRuns
from fp8pass.runtime.wrap import session_of
from lowering.formats import FP8_MAX
from tests.support.cases import each, rest
from tests.support.joint import trace
from tests.support.models import LlamaBlock, Net, mlp
from tests.support.training import assert_equal, compiled_step, fp8, gradients, same, train

RECIPE = DelayedScaling(amax_history_len=2)


def gated(m, x):
    """Results of GEMMs are cheaper to compute again than to save, by the partitioner's count, which does not know our GEMMs."""
    for layer in m.layers:
        x = torch.tanh(layer(x)) * torch.sigmoid(x)
    return x


def test_a_small_memory_budget_recomputes_no_fp8_gemm():
    compiled = fp8(Net(gated, layers=nn.ModuleList(nn.Linear(64, 64) for _ in range(4))))
    with functorch_config.patch(activation_memory_budget=0.1):
        train(compiled, torch.randn(64, 64, requires_grad=True))
    (graph,) = inspect(compiled).graphs
    gemms = graph.backward.graph.find_nodes(op="call_function", target=torch.ops.lowering.scaled_mm.default)
    assert len(gemms) == sum(gemm.role != "output" for gemm in graph.gemms) == 8


def checkpointed(function, x, kinds):
    """Within a checkpoint of each kind, the innermost first: use_reentrant."""
    for use_reentrant in kinds:
        function = functools.partial(checkpoint, function, use_reentrant=use_reentrant)
    return function(x)


def test_a_recomputation_behind_a_boundary_writes_nothing_into_the_next_step():
    compiled, x = fp8(mlp(), RECIPE, step="manual"), torch.randn(16, 64)
    view = state(compiled)
    for scale in (1, 1, 100):
        out = checkpointed(compiled, scale * x, [False, False])
        if scale == 100:
            view.step()
        out.sum().backward()
        if scale == 1:
            view.step()
    for name in view.tensors:
        assert (view.amax_history(name)[0] > 0) == name.endswith("grad_output"), name


def test_reentrant_checkpointing_around_an_input_within_a_dict_ends_steps_where_ranks_agree():
    """Gradients are off in its first run, so that the model is known to train by its input alone."""
    compiled = fp8(Net(lambda m, batch: m.net(batch["x"][0]), net=mlp()), RECIPE)
    session_of(compiled).clock.agrees = True
    for scale in (1.0, 2.0, 4.0):
        x = torch.full((16, 64), scale, requires_grad=True)
        checkpoint(lambda x: compiled({"x": [x]}), x, use_reentrant=True).sum().backward()
    assert state(compiled).amax_history("net.0:input").tolist() == [4.0, 2.0]


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


# -- copies that backward makes itself

three_steps = functools.partial(compiled_step, count=3)


def saved_fp8(compiled) -> list[tuple[int, ...]]:
    """Shapes of the FP8 tensors that forward saves for backward."""
    (graph,) = inspect(compiled).graphs
    (results,) = graph.forward.graph.find_nodes(op="output")[0].args
    values = [n.meta["val"] for n in results if isinstance(n, fx.Node)]
    return [tuple(v.shape) for v in values if isinstance(v, torch.Tensor) and v.dtype in FP8_MAX]


def test_recomputed_copies_change_no_bit():
    x = torch.randn(2, 32, 128)
    block = LlamaBlock()
    _, recomputed = three_steps(copy.deepcopy(block), "delayed", x)
    with runner.without("plan recomputation"):
        plain, saved = three_steps(block, "delayed", x)
    assert {(64, 128), (128, 64)} & set(saved_fp8(plain))
    assert_equal(recomputed, saved)


def two_linears(between) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), between, nn.Linear(96, 64))


RECOMPUTE = {"weight_copies": "recompute"}
WHOLE = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
OWN = two_linears(nn.GELU())
COMPUTED = Net(lambda m, x: x @ (m.w * 2), w=nn.Parameter(torch.randn(64, 64)))
PLANS = {
    # Casts of whole blocks join the code before them; others are kernels of their own, for which the value would be written.
    "casts of whole blocks": (WHOLE, (128, 128), {"recipe": "blockwise"}, {"2:input"}),
    "casts of parts of blocks": (two_linears(nn.GELU()), (48, 64), {"recipe": "blockwise"}, set()),
    "casts to MXFP8": (WHOLE, (128, 128), {"recipe": "mxfp8"}, set()),
    "inference": (two_linears(nn.GELU()), (48, 64), RECOMPUTE | {"trains": False}, set()),
    "a computed weight": (COMPUTED, (48, 64), RECOMPUTE, set()),
    "the user's": (
        lambda x: checkpoint(OWN, x, use_reentrant=False),
        (48, 64),
        RECOMPUTE,
        {"OWN.0:weight", "OWN.2:weight"},
    ),
    "few rows": (nn.Linear(16, 16), (MANY_ROWS - 16, 16), {}, set()),
    "many rows": (nn.Linear(16, 16), (MANY_ROWS, 16), {}, {"self:weight"}),
}


@each("case", PLANS)
def test_what_backward_makes_itself(case):
    """Names of the tensors whose backward-only copies it makes."""
    model, shape, options, expected = PLANS[case]
    plan = trace(model, torch.randn(shape), **{"recipe": "current"} | options).run("plan recomputation").plan
    values = {str(t.name) for t in plan.copies if t.name.kind != "weight" and t.value.root in plan.recomputed}
    assert values | {str(t.name) for t in plan.recomputed_weights} == expected
