"""The state of delayed scaling: names, step boundaries, what is recorded, checkpoints."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fp8pass import DelayedScaling, Float8CurrentScaling, Format, fp8_compile, inspect, state
from fp8pass.errors import CheckpointMismatchError, UnknownTensorError
from fp8pass.scales import store
from tests.support.models import LlamaBlock, Net
from tests.support.training import fp8, fp8_mlp, gradients, same, train

SHORT = DelayedScaling(amax_history_len=4)
E4M3 = DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3)
FP8_MAX = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}


def x(scale=1.0):
    return torch.randn(16, 64) * scale


def full(amax):
    return torch.full((16, 64), amax)


def trained(recipe=SHORT, steps=1, **options):
    model, compiled = fp8_mlp(recipe, **options)
    train(compiled, *(x() for _ in range(steps)))
    return model, compiled


# -- names


def test_a_shared_input_has_one_name_and_understands_the_others():
    compiled = fp8_compile(LlamaBlock(), SHORT, backend="aot_eager")
    train(compiled, torch.randn(1, 16, 128, requires_grad=True))
    view = state(compiled)
    assert "wq:input" in view.tensors
    assert not {"wk:input", "wv:input", "up:input"} & set(view.tensors)
    assert view.amax_history("wk:input").equal(view.amax_history("wq:input"))
    view.step()
    assert view.scale("wv:input") == view.scale("wq:input") != 1


def test_an_unknown_name_is_answered_with_the_nearest_or_why_there_is_none():
    for recipe, message in ((SHORT, "Did you mean '0:weight'"), ("current", "only tensors under delayed scaling")):
        _, compiled = fp8_mlp(recipe)
        train(compiled, x())
        with pytest.raises(UnknownTensorError, match=message):
            state(compiled).scale("0:weigth")


def test_graphs_that_the_state_has_outgrown_compute_the_same(monkeypatch):
    """A weight that all layers read is far from those that come late, and a recomputation has scales of a smaller state."""

    def run(smallest):
        monkeypatch.setattr(store, "_SMALLEST", smallest)
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers, last = nn.ModuleList(nn.Linear(32, 32) for _ in range(8)), nn.Linear(32, 32)
        compiled = fp8(lambda layer, last, x: last(layer(x).tanh()), SHORT, step="manual")
        found = []
        for _ in range(3):
            given = torch.randn(16, 32)
            for layer in layers:
                given = checkpoint(compiled, layer, last, given, use_reentrant=False)
            given.square().mean().backward()
            state(compiled).step()
            found += [given.detach(), gradients(layers), gradients(last), state(compiled).state_dict()]
        return found, len(inspect(compiled).graphs)

    assert same(run(8), run(256))


# -- modules that are exchanged


def chain(*layers):
    """A Sequential that trained for two steps, and its compiled form."""
    model = nn.Sequential(*layers)
    compiled = fp8_compile(model, SHORT, backend="aot_eager", select="all")
    train(compiled, x(), x())
    return model, compiled


def layer(size=1.0):
    made = nn.Linear(64, 64)
    made.weight.data *= size
    return made


def test_a_module_with_the_identities_of_one_that_is_gone_is_new():
    """Here its Parameter has moved; an identity comes back, too, when the memory of a Parameter is free."""
    model = Net(lambda m, x: m.head(m.body(x)), body=layer(), head=nn.Linear(64, 64, bias=False))
    compiled = fp8_compile(model, SHORT, backend="aot_eager", select="all")
    train(compiled, x(), x())
    new = nn.Linear(64, 64, bias=False)
    new.weight = model.head.weight
    model.head = new
    gc.collect()
    train(compiled, x())
    state(compiled).step()
    assert state(compiled).amax_history("head:input").count_nonzero() == 1


@pytest.mark.parametrize("given", ["", "head"])
def test_a_module_in_the_place_of_another_whose_parameters_are_tensors_is_new(given):
    """As torch.func.functional_call passes them, all or some: outputs and state are as without it."""
    model, made = Net(lambda m, x: F.linear(m.body(x), m.head.weight), body=layer(), head=layer()), []
    new, batches = layer(100), [x() for _ in range(4)]
    for run in (lambda compiled, x: compiled(x), lambda compiled, x: functional_call(compiled, tensors(compiled, given), x)):
        compiled = fp8(copy.deepcopy(model), SHORT)
        train(lambda x, of=compiled, run=run: run(of, x), *batches[:2])
        compiled.head = copy.deepcopy(new)
        made.append((train(lambda x, of=compiled, run=run: run(of, x), *batches[2:]), state(compiled).state_dict()))
    assert same(*made)


def tensors(model, part):
    """The values of a model's Parameters in tensors that are none."""
    return {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if part in n}


def test_a_module_in_the_place_of_another_has_empty_histories():
    model, compiled = chain(layer(), layer(100))
    earlier, model[1] = model[1], layer()
    view = state(compiled)
    assert {view.scale(f"1:{kind}").item() for kind in FP8_MAX} == {1.0}
    train(compiled, x())
    view.step()
    assert view.scale("1:weight") == 448 / model[1].weight.detach().abs().max()
    assert view.amax_history("0:weight").count_nonzero() == 3 != view.amax_history("1:weight").count_nonzero()
    model[1] = earlier  # as after an evaluation of an average
    assert view.amax_history("1:weight").count_nonzero() == 2
    assert view.scale("1:weight") == 448 / earlier.weight.detach().abs().max()


# -- steps


@pytest.mark.parametrize("own", ["factor", "algo", "margin"])
def test_scales_follow_the_users_formula_over_many_steps(own):
    calls, amaxes = [], [1.0, 8.0, 2.0, 0.5, 4.0]

    def second_largest(history):
        return history.sort(dim=0, descending=True).values[1]

    def halved(amax, scale, fp8_max, recipe):
        calls.append(recipe)
        return fp8_max / amax / 2

    algo = {"algo": {"amax_compute_algo": second_largest}, "factor": {"scaling_factor_compute_algo": halved}}
    recipe = DelayedScaling(amax_history_len=3, margin=int(own != "factor"), **algo.get(own, {}))
    _, compiled = fp8_mlp(recipe, step="manual")
    for step, amax in enumerate(amaxes):
        train(compiled, full(amax))
        state(compiled).step()
        window = sorted([0.0, 0.0, *amaxes[: step + 1]][-3:])
        expected = window[-2 if own == "algo" else -1]
        assert not expected or state(compiled).scale("0:input") == torch.tensor(448.0 / 2) / torch.tensor(expected)
    assert calls == [recipe] * (5 if own == "factor" else 0)


@pytest.mark.parametrize("weight_copies", ["auto", "cache"])
def test_a_graph_that_trains_records_nothing_of_a_call_without_gradients(weight_copies):
    """Without guards, which a user may drop, it runs without gradients: by the short way or, beside a cache, by `_run`."""
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    _, compiled = fp8_mlp(SHORT, step="manual", weight_copies=weight_copies, options=options)
    given, found = x(), []
    for _ in range(3):
        train(compiled, given)
        state(compiled).step()
        found.append(state(compiled).state_dict())
        with torch.no_grad():
            compiled(1000 * given)
    assert len(inspect(compiled).graphs) == 1
    for name, history in found[-1].items():
        assert not name.endswith("amax_history") or history.max() <= 1.01 * found[-2][name].max(), name


# -- checkpoints


def test_safetensors_and_weights_only_roundtrip(tmp_path):
    saved = state(trained()[1]).state_dict()
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(saved, tmp_path / "fp8.safetensors")
    torch.save(saved, tmp_path / "fp8.pt")
    assert same(safetensors.load_file(tmp_path / "fp8.safetensors"), saved)
    assert same(torch.load(tmp_path / "fp8.pt", weights_only=True), saved)


@pytest.mark.parametrize("fresh", ["never ran", "evaluated", "trained, and the loaded weights are forgotten"])
def test_a_model_goes_on_with_the_scales_that_it_loads(fresh):
    """As if it had run all along: one without a state takes those of its first tensors; empty histories are loaded empty, so
    that exchanged weights scale themselves."""
    (_, compiled), (_, other) = trained(DelayedScaling(), steps=2), fp8_mlp(DelayedScaling())
    if fresh == "evaluated":
        with torch.no_grad():
            other(x())
    elif fresh != "never ran":
        train(other, x(3), x(3))
        state(compiled).forget_weights()
    state(other).load_state_dict(state(compiled).state_dict())
    given = x(0.1)
    assert compiled(given).equal(other(given))


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    model, compiled = trained()
    before = state(compiled).state_dict()
    other = fp8(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.ReLU(), nn.Linear(64, 64)), SHORT)
    train(other, x())
    for saved, message in (
        (state(other).state_dict(), r"missing from the checkpoint: 2:grad_output.*unknown to the model: 3:"),
        (model.state_dict(), "not an entry of an fp8pass state"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            state(compiled).load_state_dict(saved)
        assert same(state(compiled).state_dict(), before)
    fresh = [fp8(nn.Linear(64, 64), SHORT)]
    with pytest.raises(CheckpointMismatchError, match="has no modules for"):
        state(fresh[0]).load_state_dict(before)
    for recipe, message in (
        (DelayedScaling(amax_history_len=8), r"amax_history has shape \(4,\) .* \(8,\)"),
        (E4M3, "use the same fp8_format"),
        (Float8CurrentScaling(), "keeps no state"),
    ):
        fresh.append(fp8_mlp(recipe)[1])
        for loading in (trained(recipe)[1], fresh[-1]):
            with pytest.raises(CheckpointMismatchError, match=message):
                state(loading).load_state_dict(before)
    assert [state(loading).tensors for loading in fresh] == [[]] * 4


def test_a_state_of_the_first_step_continues_in_a_model_that_has_run():
    """The boundary that follows is the first to write its histories."""
    (_, compiled), (_, other) = trained(), trained(steps=3)
    state(other).load_state_dict(state(compiled).state_dict())
    for scale in (2.0, 0.5, 1.0):
        given = x(scale)
        assert same(train(other, given), train(compiled, given))
    assert same(state(other).state_dict(), state(compiled).state_dict())
