"""The first step of delayed scaling: a tensor whose history is empty takes its scale from itself.

Oracles: the scale by hand, fp8_max / amax of the tensor itself; and current scaling, which computes just that in every step.
The first steps of programs, with margins, microbatches, evaluations, zeros and infinities, and of modules that come later:
`tests/lifecycles`.
"""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from fp8pass import DelayedScaling, inspect, state
from fp8pass.runtime import backend as backend_module
from fp8pass.runtime.frame import DynamoGraph
from fp8pass.schemes.emitter import FIRST_STEP
from tests.support import training
from tests.support.models import mlp
from tests.support.numerics import sqnr
from tests.support.training import assert_equal, fp8, same
from tests.tolerances import SQNR_MODEL_OUTPUT

RECIPE = DelayedScaling(amax_history_len=4)
E4M3_MAX = torch.tensor(448.0)  # `448.0 / tensor` would multiply with a reciprocal, which rounds twice


def linear_by_hand(module, x):
    """A linear in FP8, whose scales are taken from the tensors themselves."""
    operands = []
    with torch.no_grad():
        for value in (x, module.weight):
            scale = E4M3_MAX / value.abs().amax()
            operands.append(torch.clamp(value * scale, -448, 448).to(torch.float8_e4m3fn).float() / scale)
        return operands[0] @ operands[1].t() + module.bias


class Pair:
    """Two copies of a model: one with delayed scaling, one with current scaling."""

    def __init__(self, **options):
        self.model = mlp()
        self.twin = copy.deepcopy(self.model)
        self.delayed, self.current = fp8(self.model, RECIPE, **options), fp8(self.twin, "current", **options)

    def step(self, x):
        """One of delayed scaling."""
        return training.step(self.delayed, self.model, x)


@pytest.fixture
def runs(monkeypatch):
    """(whether a graph ran for empty histories, whether a compiled one did) of each run."""
    found, real = [], DynamoGraph._call

    def call(frame, graph, instance, args, records, variants, *rest):
        found.append((variants == {FIRST_STEP}, not variants))
        return real(frame, graph, instance, args, records, variants, *rest)

    monkeypatch.setattr(DynamoGraph, "_call", call)
    return found


FIRST, USUAL = (True, False), (False, True)

# -- numbers


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_step_1_is_current_scalings_to_the_last_bit_and_one_is_not(backend):
    pair, x = Pair(), torch.randn(24, 64)
    other = copy.deepcopy(pair.twin)
    expected = training.step(pair.current, pair.twin, x)
    torch._dynamo.reset()
    assert_equal(training.step(fp8(pair.model, RECIPE, backend=backend), pair.model, x), expected)
    one = training.step(fp8(other, DelayedScaling(initial_scale="one")), other, x)
    assert any(sqnr(a, b) < 40 for a, b in zip(expected.gradients, one.gradients, strict=True))


# -- steady state


def test_later_steps_run_the_compiled_code_and_nothing_is_compiled_again(runs):
    pair, x = Pair(), torch.randn(24, 64)
    with mock.patch.object(backend_module, "rewrite", wraps=backend_module.rewrite) as rewrite:
        pair.step(x)
        assert runs == [FIRST]
        graphs = counters["stats"]["unique_graphs"]
        for _ in range(20):
            pair.step(x)
        assert runs == [FIRST, *[USUAL] * 20]
        assert rewrite.call_count == 2, "the graph, and the one for empty histories"
    assert counters["stats"]["unique_graphs"] == graphs
    assert len(inspect(pair.delayed).graphs) == 1


def test_the_graph_of_later_steps_is_that_of_a_model_that_starts_with_one():
    """Same operations, same state: no second read, no more memory."""
    found = []
    for first in ("current", "one"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiled = fp8(mlp(), DelayedScaling(initial_scale=first))
        training.train(compiled, torch.randn(24, 64))
        (graph,) = inspect(compiled).graphs
        found.append([[str(n.target) for g in (graph.forward, graph.backward) for n in g.graph.nodes], graph.saved_bytes])
    assert found[0] == found[1]


# -- situations


def test_new_layers_that_share_a_compiled_graph(runs):
    """Each layer has a first step of its own, although the graph is compiled and has run for others."""
    run = fp8(lambda layer, x: layer(x), RECIPE, step="manual")
    for step in range(3):
        layer, x = nn.Linear(64, 64), torch.randn(40, 64, requires_grad=True) * 10.0 ** (3 * step - 3)
        out = run(layer, x)
        assert sqnr(linear_by_hand(layer, x), out) > 100
        out.sum().backward()
        state(run).step()
        assert sqnr(linear_by_hand(layer, x), run(layer, x)) > 100
    assert runs == [FIRST, USUAL] * 3
    assert len(inspect(run).graphs) == 1


class Scaled(nn.Module):
    """Python floats that change between calls are inputs of Dynamo's graph, which the first step traces again."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, factor, both=True):
        x = self.first(x * factor)
        return self.second(x) if both else x


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("evaluates", [True, False], ids=["an evaluation first", "a branch that begins later"])
def test_floats_that_change(evaluates, backend):
    model, x = Scaled(), torch.randn(32, 64)
    compiled = fp8(copy.deepcopy(model), "delayed", backend=backend)
    for factor, both in [(4.0, evaluates), (3.0, evaluates), (2.0, True), (1.0, True)]:
        for i in range(3 if evaluates and factor == 4 else 0):
            with torch.no_grad():
                assert sqnr(model(x, 1.0 + i), compiled(x, 1.0 + i)) >= SQNR_MODEL_OUTPUT
        out = compiled(x, factor, both)
        out.sum().backward()
        assert sqnr(model(x, factor, both), out) >= SQNR_MODEL_OUTPUT
    assert all(gemm.quantized for gemm in inspect(compiled).gemms)


def test_a_boundary_between_forward_and_recomputation():
    pair, x = Pair(step="manual"), torch.randn(24, 64, requires_grad=True)
    out, expected = checkpoint(pair.delayed, x, use_reentrant=False), pair.current(x)
    state(pair.delayed).step()
    assert out.equal(expected)
    for result in (out, expected):
        result.square().mean().backward()
    assert same(training.gradients(pair.model), training.gradients(pair.twin))


class Heads(nn.ModuleList):
    """Two layers, of which those run that are chosen."""

    def forward(self, x, *chosen):
        return sum(self[i](x) for i in chosen)


def test_a_layer_that_ran_beside_another_one_knows_the_inputs_of_both():
    """In one graph their input is one tensor, which has the name of the first."""
    compiled, x = fp8(Heads([nn.Linear(64, 64), nn.Linear(64, 64)]), RECIPE), torch.randn(16, 64)
    for factor, chosen in ((1, [0]), (1, [1]), (30, [0, 1]), (30, [0, 1]), (30, [1])):
        compiled(factor * x, *chosen).square().mean().backward()
    scales = {name: state(compiled).scale(name) for name in state(compiled).tensors}
    assert scales["1:input"] == scales["0:input"] == 448 / (30 * x).abs().max()


@pytest.mark.parametrize("boundaries", [1, 3])
def test_a_gradient_that_comes_behind_a_boundary_has_a_history_at_the_next(boundaries):
    """As where an evaluation comes between a forward and its backward; a resumed run, which sees the histories, is the same."""
    torch.manual_seed(0)
    model, x, found, saved = Heads([nn.Linear(64, 64), nn.Linear(64, 64)]), torch.randn(16, 64), [], None
    for _ in range(2):
        torch._dynamo.reset()
        compiled = fp8(model, RECIPE, step="manual")
        view = state(compiled)
        if saved is None:
            out = compiled(x, 0)
            for _ in range(boundaries):
                view.step()
            out.square().mean().backward()
            compiled(x, 1).square().mean().backward()
            view.step()
            saved = view.state_dict()
        else:
            view.load_state_dict(saved)
        model.zero_grad()
        compiled(10 * x, 0).square().mean().backward()
        found.append(training.gradients(model))
    assert same(*found)


def test_a_state_that_was_saved_before_a_step_starts_again():
    pair, x = Pair(step="manual"), torch.randn(24, 64)
    pair.step(x)
    saved = state(pair.delayed).state_dict()  # no history yet, but staged amaxes
    before = {name: torch.zeros_like(value) if "amax_history" in name else value for name, value in saved.items()}
    state(pair.delayed).step()
    pair.step(x)
    state(pair.delayed).load_state_dict(before)
    assert_equal(pair.step(1e-3 * x), training.step(pair.current, pair.twin, 1e-3 * x))


@pytest.mark.parametrize("first", [True, False])
def test_backwards_of_generated_code_that_keep_their_graph(first):
    """From the first step on, and later: equal to what torch makes of a graph without donated buffers."""
    x = torch.randn(32, 64)

    def trained(**patches):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        compiled, found = fp8(model, "delayed", backend="inductor"), []
        for step in range(3):
            y = compiled(x)
            with functorch_config.patch(**patches):
                y.sum().backward(retain_graph=first or step == 2)
                if first or step == 2:
                    y.square().sum().backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found

    assert same(trained(), trained(donated_buffer=False))
