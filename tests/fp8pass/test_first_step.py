"""The first step of delayed scaling: a tensor whose history is empty takes its scale from itself.

Oracles: the scale by hand, fp8_max / amax of the tensor itself; and current scaling, which computes just that in every step.
"""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import RecipeError
from fp8pass.runtime import backend as backend_module
from fp8pass.runtime.frame import Frame
from fp8pass.schemes.emitter import FIRST_STEP
from tests.support.models import mlp
from tests.support.numerics import sqnr

RECIPE = DelayedScaling(amax_history_len=4)
MANY = 12
"""Steps: more than a tensor without a history could be waited for by counting."""
E4M3_MAX = torch.tensor(448.0)  # `448.0 / tensor` would multiply with a reciprocal, which rounds twice


def quantized(x, scale):
    """x as an E4M3 tensor with a scale holds it, in float32."""
    return torch.clamp(x * scale, -E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() / scale


def linear_by_hand(module, x, x_scale=None, weight_scale=None):
    """A linear in FP8; scales are taken from the tensors themselves where none is given."""
    with torch.no_grad():
        scales = [E4M3_MAX / t.abs().amax() if s is None else s for t, s in ((x, x_scale), (module.weight, weight_scale))]
        return quantized(x, scales[0]) @ quantized(module.weight, scales[1]).t() + module.bias


def gradients(compiled, model, x, steps=1):
    """Every parameter's gradient in step `steps`, and the output."""
    for _ in range(steps):
        model.zero_grad()
        out = compiled(x)
        out.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()} | {"output": out.detach()}


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].equal(value), name


def compiled_pair(model, recipe=RECIPE, **options):
    """Two copies of a model: one with delayed scaling, one with current scaling."""
    twin = copy.deepcopy(model)
    options = {"backend": "aot_eager", **options}
    return fp8_compile(model, recipe, **options), twin, fp8_compile(twin, "current", **options)


class CountedRuns:
    """Counts runs of graphs for empty histories (`first`), and of the compiled ones (`usual`)."""

    def __enter__(self):
        self.first = self.usual = 0
        real = Frame._call

        def call(frame, graph, instance, args, records, variants, *rest):
            self.first += variants == {FIRST_STEP}
            self.usual += not variants
            return real(frame, graph, instance, args, records, variants, *rest)

        self._patch = mock.patch.object(Frame, "_call", call)
        self._patch.start()
        return self

    def __exit__(self, *error):
        self._patch.stop()

    def since(self):
        """(first, usual) since the last time."""
        counts, self.first, self.usual = (self.first, self.usual), 0, 0
        return counts


# -- numbers


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e5])
def test_the_scale_of_step_1_is_by_hand(size):
    model = nn.Sequential(nn.Linear(64, 48))
    nn.init.zeros_(model[0].bias)
    compiled = fp8_compile(model, RECIPE, backend="aot_eager")
    x = torch.randn(40, 64) * size
    first = compiled(x)
    assert sqnr(linear_by_hand(model[0], x), first) > 100
    first.sum().backward()
    again = x * 0.3
    second = compiled(again)
    expected = linear_by_hand(model[0], again, E4M3_MAX / x.abs().amax(), E4M3_MAX / model[0].weight.abs().amax())
    assert sqnr(expected, second) > 100
    assert sqnr(linear_by_hand(model[0], again), second) < 60, "step 2 uses the history"


def test_a_margin_holds_in_step_1():
    model = nn.Sequential(nn.Linear(64, 48))
    x = torch.randn(40, 64)
    out = fp8_compile(model, DelayedScaling(margin=3), backend="aot_eager")(x)
    scales = [E4M3_MAX / 8 / t.abs().amax() for t in (x, model[0].weight)]
    assert sqnr(linear_by_hand(model[0], x, *scales), out) > 100


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_step_1_is_current_scalings_to_the_last_bit_and_one_is_not(backend):
    model, x = mlp(), torch.randn(24, 64)
    delayed, twin, current = compiled_pair(model)
    other = copy.deepcopy(twin)
    expected = gradients(current, twin, x)
    torch._dynamo.reset()
    if backend == "inductor":
        delayed = fp8_compile(model, RECIPE, backend=backend)
    check_equal(gradients(delayed, model, x), expected)
    one = gradients(fp8_compile(other, DelayedScaling(initial_scale="one"), backend="aot_eager"), other, x)
    assert any(sqnr(expected[n], one[n]) < 40 for n in expected)


class Deep(nn.Module):
    """24 layers without residuals: gradients shrink on their way down."""

    def __init__(self, layers=24, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.slow
def test_24_layers_without_residuals():
    model, x = Deep(), torch.randn(48, 64)
    reference = gradients(model, model, x)
    delayed, twin, current = compiled_pair(model)
    found, expected = gradients(delayed, model, x), gradients(current, twin, x)
    for name, high in reference.items():
        assert abs(sqnr(high, found[name]) - sqnr(high, expected[name])) < 1, name
    losses = {}
    for compiled, trained in ((delayed, model), (current, twin)):
        optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
        for _ in range(20):
            optimizer.zero_grad()
            loss = (compiled(x) - x.roll(1, 1).tanh()).square().mean()
            loss.backward()
            optimizer.step()
        losses[compiled] = loss.item()
    assert losses[delayed] == pytest.approx(losses[current], rel=5e-3)


def test_the_initial_scale_has_two_values():
    with pytest.raises(RecipeError, match=r"initial_scale.*Did you mean 'current'"):
        DelayedScaling(initial_scale="curent")
    assert DelayedScaling().initial_scale == "current"


# -- steady state


def test_later_steps_run_the_compiled_code_and_nothing_is_compiled_again():
    model, x = mlp(), torch.randn(24, 64)
    compiled = fp8_compile(model, RECIPE, backend="aot_eager")
    with CountedRuns() as runs, mock.patch.object(backend_module, "rewrite", wraps=backend_module.rewrite) as rewrite:
        gradients(compiled, model, x)
        assert runs.since() == (1, 0)
        rewrites, graphs = rewrite.call_count, counters["stats"]["unique_graphs"]
        assert rewrites == 2, "the graph, and the one for empty histories"
        gradients(compiled, model, x, steps=20)
        assert runs.since() == (0, 20)
        assert rewrite.call_count == rewrites
    assert counters["stats"]["unique_graphs"] == graphs
    assert len(inspect(compiled).graphs) == 1


def test_the_graph_of_later_steps_is_that_of_a_model_that_starts_with_one():
    """Same operations, same state: no second read, no more memory."""
    found = {}
    for first in ("current", "one"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiled = fp8_compile(mlp(), DelayedScaling(initial_scale=first), backend="aot_eager")
        compiled(torch.randn(24, 64)).sum().backward()
        (graph,) = inspect(compiled).graphs
        found[first] = [[str(n.target) for n in g.graph.nodes] for g in (graph.forward, graph.backward)], graph.saved_bytes
    assert found["current"] == found["one"]


def test_addresses_are_static_from_the_second_step_on():
    """A CUDA graph is recorded with the state's own memory, never a copy."""
    model, x = mlp(), torch.randn(24, 64)
    compiled = fp8_compile(model, RECIPE, backend="aot_eager")
    seen = []
    gradients(compiled, model, x)
    (instances,) = compiled._fp8pass_session.instances.values()
    (instance,) = instances.values()
    real = Frame._call

    def call(frame, graph, *args):
        usual = graph.function

        def spy(*inputs):
            seen.append([t.data_ptr() for t in inputs[-4:]])
            return usual(*inputs)

        with mock.patch.object(graph, "function", spy):
            return real(frame, graph, *args)

    with mock.patch.object(Frame, "_call", call):
        gradients(compiled, model, x, steps=4)
    (bound,) = instance.bound.values()
    (window,) = (window for _, window in bound._windows)
    assert seen == [[window.scale.data_ptr(), window.amax.data_ptr(), window.amax.data_ptr(), window.slots.data_ptr()]] * 4


# -- situations


def test_new_layers_that_share_a_compiled_graph():
    """Each layer has a first step of its own, although the graph is compiled and has run for others."""
    layers = [nn.Linear(64, 64) for _ in range(3)]
    run = fp8_compile(lambda layer, x: layer(x), RECIPE, backend="aot_eager", step="manual")
    with CountedRuns() as runs:
        for step, layer in enumerate(layers):
            x = torch.randn(40, 64, requires_grad=True) * 10.0 ** (3 * step - 3)
            out = run(layer, x)
            assert sqnr(linear_by_hand(layer, x), out) > 100
            out.sum().backward()
            assert runs.since() == (1, 0)
            state(run).step()
            assert sqnr(linear_by_hand(layer, x), run(layer, x)) > 100
            assert runs.since() == (0, 1)
    assert len(inspect(run).graphs) == 1


class Late(nn.Module):
    """A module that joins later."""

    def __init__(self):
        super().__init__()
        self.early, self.late = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, joins):
        x = self.early(x)
        return self.late(1000 * x) if joins else x


def test_a_module_that_first_runs_many_steps_later():
    model = Late()
    compiled = fp8_compile(model, RECIPE, backend="aot_eager")
    x = torch.randn(24, 64)
    for _ in range(99):
        compiled(x, False).sum().backward()
    with CountedRuns() as runs:
        early = compiled(x, False).detach()
        compiled(x, True)  # no boundary between the two: the same scales
        assert runs.since() == (1, 1)
        out = compiled(x, True)
        out.sum().backward()
        compiled(x, True)
        assert runs.since() == (1, 1)
    assert sqnr(linear_by_hand(model.late, 1000 * early), out) > 100
    assert state(compiled).amax_history("early:input").tolist()[1:] == [x.abs().amax()] * 3


def test_a_loaded_checkpoint_has_no_first_step():
    model, x = mlp(), torch.randn(24, 64)
    compiled = fp8_compile(model, RECIPE, backend="aot_eager")
    gradients(compiled, model, x, steps=2)
    saved = state(compiled).state_dict()
    expected = gradients(compiled, model, 5 * x)
    for when in ("before the first call", "after it"):
        torch._dynamo.reset()
        fresh = fp8_compile(model, RECIPE, backend="aot_eager")
        if when == "after it":
            gradients(fresh, model, 100 * x)
        state(fresh).load_state_dict(saved)
        with CountedRuns() as runs:
            check_equal(gradients(fresh, model, 5 * x), expected)
            assert runs.since() == (0, 1)


def test_a_checkpoint_of_empty_histories_still_has_one():
    model, x = mlp(), torch.randn(24, 64)
    compiled = fp8_compile(model, RECIPE, backend="aot_eager")
    with torch.no_grad():
        compiled(x)
    saved = state(compiled).state_dict()
    delayed, twin, current = compiled_pair(model)
    gradients(delayed, model, 100 * x)
    state(delayed).load_state_dict({**state(delayed).state_dict(), **saved})
    found = gradients(delayed, model, x)["output"]
    assert found.equal(gradients(current, twin, x)["output"])


def test_every_microbatch_of_the_first_step_takes_its_own_scale():
    model = mlp()
    delayed, twin, current = compiled_pair(model, step="manual")
    batches = [torch.randn(24, 64) * size for size in (1.0, 1e-4, 300.0)]
    with CountedRuns() as runs:
        for x in batches:
            out, expected = delayed(x), current(x)
            assert out.equal(expected)
            out.square().mean().backward()
            expected.square().mean().backward()
        assert runs.since() == (3, 0)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.grad.equal(q.grad), name
    state(delayed).step()
    largest = max(x.abs().amax() for x in batches)
    assert state(delayed).scale("0:input") == E4M3_MAX / largest
    with CountedRuns() as runs:
        delayed(batches[0])
        assert runs.since() == (0, 1)


def test_a_boundary_between_forward_and_recomputation():
    model, x = mlp(), torch.randn(24, 64, requires_grad=True)
    delayed, twin, current = compiled_pair(model, step="manual")
    out = checkpoint(delayed, x, use_reentrant=False)
    state(delayed).step()
    expected = current(x)
    assert out.equal(expected)
    out.square().mean().backward()
    expected.square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.grad.equal(q.grad), name


def test_evaluation_first_does_not_spend_the_first_step():
    model, x = mlp(), torch.randn(24, 64)
    delayed, twin, current = compiled_pair(model)
    for _ in range(MANY):
        with torch.no_grad():
            assert delayed(x).equal(current(x))
    check_equal(gradients(delayed, model, 7 * x), gradients(current, twin, 7 * x))


def test_a_tensor_that_stays_zero_scales_itself_when_it_leaves_zero():
    """A weight that starts at 0, as LoRA's second one does, and a branch whose gradient is 0 for as long."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    nn.init.zeros_(model[1].weight)
    delayed, twin, current = compiled_pair(model)
    x = torch.randn(24, 64)
    with CountedRuns() as runs:
        gradients(delayed, model, x, steps=MANY)
        assert runs.since() == (MANY, 0)
        with torch.no_grad():
            for each in (model, twin):
                each[1].weight.copy_(1e-3 * torch.eye(64))
        found = gradients(delayed, model, x)
        assert runs.since() == (1, 0)
        gradients(delayed, model, x, steps=2)
        assert runs.since() == (0, 2)
    check_equal({"output": found["output"]}, {"output": gradients(current, twin, x)["output"]})
    assert state(delayed).scale("1:weight") == E4M3_MAX / model[1].weight.abs().amax()


def test_a_state_that_was_saved_before_a_step_starts_again():
    model, x = mlp(), torch.randn(24, 64)
    delayed, twin, current = compiled_pair(model, step="manual")
    gradients(delayed, model, x)
    before = state(delayed).state_dict()  # no history yet, but staged amaxes
    for name in before:
        before[name] = torch.zeros_like(before[name]) if "amax_history" in name else before[name]
    state(delayed).step()
    gradients(delayed, model, x)
    state(delayed).load_state_dict(before)
    check_equal(gradients(delayed, model, 1e-3 * x), gradients(current, twin, 1e-3 * x))


def test_a_weight_that_leaves_zero_in_time_has_its_first_scale_then():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    nn.init.zeros_(model[1].weight)
    delayed, twin, current = compiled_pair(model)
    x = torch.randn(24, 64)
    for m, compiled in ((model, delayed), (twin, current)):
        gradients(compiled, m, x)
        with torch.no_grad():
            m[1].weight.copy_(1e-3 * torch.eye(64))
    check_equal({"output": gradients(delayed, model, x)["output"]}, {"output": gradients(current, twin, x)["output"]})


def test_an_amax_that_is_not_finite_leaves_the_history_empty():
    model, x = mlp(), torch.randn(24, 64)
    delayed, twin, current = compiled_pair(model)
    bad = x.clone()
    bad[0, 0] = torch.inf
    gradients(delayed, model, bad)
    found, expected = gradients(delayed, model, x), gradients(current, twin, x)
    check_equal(found, expected)
