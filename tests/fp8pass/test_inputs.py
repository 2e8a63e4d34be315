"""Providers of extra inputs: a counter that a graph reads and a step boundary raises, beside the state of delayed scaling.

Oracle: the count by hand. A pass of the test's own lets the graph add the counter to its first output.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fp8pass
from fp8pass import inspect, rewrite_graph
from fp8pass.errors import UnsupportedError
from fp8pass.graph.cursor import Cursor
from fp8pass.graph.traces import FLAG
from fp8pass.graph.values import value_of
from fp8pass.inputs import USUAL, BoundInputs, ExtraInput, InputProvider, InputsMissing
from fp8pass.rewrite import runner
from fp8pass.runtime import session as sessions
from tests.support.models import mlp
from tests.support.training import fp8, train

COUNT = "count of steps"
ODD = "odd"


class Counter(InputProvider, BoundInputs):
    """Counts step boundaries in a tensor that graphs read; calls in odd steps need a variant of the graph."""

    identity = COUNT
    made: ClassVar[list[Counter]] = []

    def __init__(self):
        self.count = torch.zeros((), dtype=torch.float32)
        self.bound = 0
        self.asked: list[int] = []
        self.repeated: list[float] = []
        Counter.made.append(self)

    def inputs(self, device, needed):
        self.asked.append(needed.entries)
        return [ExtraInput(COUNT, "count", (), torch.float32)]

    def bind(self, placed):
        assert [given.key for given in placed.inputs] == [COUNT]
        self.bound += 1
        return self

    def variants(self):
        return frozenset({ODD}) if self.count % 2 else USUAL

    def remember(self, variants):
        return self.count.clone()

    def tensors(self, args, records, variants, remembered):
        if remembered is not None:
            self.repeated.append(float(remembered))
        return [(self.count if remembered is None else remembered).data]

    def after_step(self):
        self.count += 1


def add_count(work):
    """The first output, and 1000 more in the variant for odd steps."""
    node = work.inputs[COUNT]
    output = work.graph.output_node()
    first, *rest = output.args[0]
    cursor = Cursor.start(work.graph).at(output, False)
    more = 1000.0 if ODD in work.options.variants else 0.0
    added = cursor.call(torch.ops.aten.add.Tensor, node, more)
    summed = cursor.call(torch.ops.aten.add.Tensor, first, added)
    assert value_of(summed).shape == value_of(first).shape
    output.args = ((summed, *rest),)
    return work


@pytest.fixture
def made(monkeypatch):
    """The counters of the models that are compiled from now on."""
    monkeypatch.setattr(runner, "PASSES", (*runner.PASSES, ("add count", add_count)))
    monkeypatch.setattr(sessions, "PROVIDERS", (Counter,))
    monkeypatch.setattr(Counter, "made", [])
    return Counter.made


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["current", fp8pass.DelayedScaling(initial_scale="one")], ids=["stateless", "stateful"])
def test_a_graph_reads_what_a_boundary_raises(made, monkeypatch, recipe, backend):
    model, x = mlp(), torch.randn(16, 64)
    outputs = train(fp8(model, recipe, backend=backend), *[x] * 4)
    (counter,) = made
    assert counter.count == 3, "the fourth step has not ended"
    assert (counter.bound, counter.asked) == (1, [0])
    monkeypatch.setattr(runner, "PASSES", runner.PASSES[:-1])
    monkeypatch.setattr(sessions, "PROVIDERS", ())
    torch._dynamo.reset()
    expected = train(fp8(model, recipe, backend=backend), *[x] * 4)
    added = [float(i + 1000 * (i % 2)) for i in range(4)]  # in the steps before so many boundaries
    for out, want, more in zip(outputs, expected, added, strict=True):
        torch.testing.assert_close(out, want + more, rtol=0, atol=0 if backend == "aot_eager" else 1e-3)


def test_each_model_has_a_counter_of_its_own_they_share_graphs_and_inference_ends_no_step(made):
    models, x = [fp8(mlp(), "delayed") for _ in range(3)], torch.randn(16, 64)
    train(models[0], x, x, x), train(models[1], x)
    with torch.no_grad():
        for _ in range(3):
            models[2](x)
    assert [float(counter.count) for counter in made] == [2.0, 0.0, 0.0]
    for compiled in models[:2]:
        (graph,) = inspect(compiled).graphs
        assert graph.state_inputs == ["fp8_scale", "fp8_amax", "fp8_grad_amax", "fp8_slots", "count"]


def test_a_recomputation_sees_what_its_first_run_saw(made):
    compiled = fp8(mlp(), step="manual")
    out = torch.utils.checkpoint.checkpoint(compiled, torch.randn(16, 64, requires_grad=True), use_reentrant=False)
    compiled._fp8pass_session.end_step()
    out.sum().backward()
    assert made[0].repeated == [0.0], "not 1, the count when the recomputation ran"


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_graphs_that_others_own_get_the_inputs_of_all_providers(made, recipe):
    """Each provider fills its own; a variant that the owner has no graph for is refused."""
    weight, x = torch.randn(64, 64), torch.randn(16, 64)

    def trained(weight, x):
        y = x @ weight.t()
        return [y, torch.autograd.grad(y.sum(), weight)[0]]

    graph = make_fx(trained, tracing_mode="fake")(weight.requires_grad_(), x)
    nodes = list(graph.graph.nodes)
    for node in nodes[[n.target for n in nodes].index(torch.ops.aten.ones_like.default) + 1 : -1]:
        node.meta[FLAG] = True
    rewritten = rewrite_graph(graph, recipe, inputs=["0.weight"])
    (counter,) = made
    state_names = ["fp8_scale", "fp8_amax", "fp8_grad_amax", "fp8_slots"] if recipe == "delayed" else []
    assert rewritten.state_names == [*state_names, "count"]
    with torch.no_grad():
        before = rewritten(weight, x)[0]
        rewritten.state.step()
        assert counter.count == 1
        with pytest.raises(UnsupportedError, match="requests the variant odd, which a rewritten graph"):
            rewritten(weight, x)
        counter.count += 1
        torch.testing.assert_close(rewritten(weight, x)[0], before + 2, rtol=0, atol=1e-5)


def test_an_input_that_is_too_small_is_asked_for_again(made, monkeypatch):
    attempts = []

    def too_small(work):
        attempts.append(work)
        if len(attempts) == 1:
            raise InputsMissing(entries=77)
        return work

    monkeypatch.setattr(runner, "PASSES", (*runner.PASSES, ("too small", too_small)))
    fp8(mlp())(torch.randn(16, 64))
    assert made[0].asked == [0, 77]
