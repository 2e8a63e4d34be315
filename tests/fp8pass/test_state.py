"""The state of delayed scaling: names, step boundaries, what is recorded, checkpoints."""

import copy
import functools
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


def test_names_are_module_path_and_kind_and_a_shared_input_has_one_and_understands_the_others():
    _, compiled = fp8_mlp(SHORT)
    with torch.no_grad():
        compiled(x())
    assert set(state(compiled).tensors) == {"0:input", "0:weight", "2:input", "2:weight"}
    train(compiled, x().requires_grad_())
    assert set(state(compiled).tensors) == {f"{module}:{kind}" for module in "02" for kind in FP8_MAX}
    compiled = fp8_compile(LlamaBlock(), SHORT, backend="aot_eager")
    train(compiled, torch.randn(1, 16, 128, requires_grad=True))
    view = state(compiled)
    assert "wq:input" in view.tensors
    assert not {"wk:input", "wv:input", "up:input"} & set(view.tensors)
    assert view.amax_history("wk:input").equal(view.amax_history("wq:input"))
    view.step()
    assert view.scale("wv:input") == view.scale("wq:input") != 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": SHORT}, "Did you mean '0:weight'"),
        ({"recipe": "current"}, "There are none: only tensors under delayed scaling have a state"),
        ({"recipe": SHORT, "rules": {"*": "current"}}, "There are none: only tensors under delayed scaling have a state"),
    ],
    ids=str,
)
def test_an_unknown_name_is_answered_with_the_nearest_or_why_there_is_none(options, message):
    _, compiled = fp8_mlp(**options)
    if "rules" in options:
        with pytest.raises(UnknownTensorError, match="none yet: run a forward first"):
            state(compiled).scale("0:input")
    train(compiled, x())
    with pytest.raises(UnknownTensorError, match=message):
        state(compiled).scale("0:weigth")


class Multiplies(nn.Module):
    """A GEMM of the model's own, in a frame that calls it something else than `self`."""

    def __init__(model) -> None:
        super().__init__()
        model.weight, model.last = nn.Parameter(torch.randn(64, 64)), nn.Linear(64, 64)

    def forward(model, x: torch.Tensor) -> torch.Tensor:
        return model.last(x @ model.weight)


@pytest.mark.parametrize("make", [lambda: nn.Linear(64, 64), Multiplies])
def test_gemms_of_the_model_itself_are_called_self(make):
    compiled, fresh, ruled = fp8(make(), SHORT), fp8(make(), SHORT), fp8(make(), SHORT, rules={"self": None})
    train(compiled, x())
    assert {"self:input", "self:weight", "self:grad_output"} <= set(state(compiled).tensors)
    assert {g.module for g in inspect(compiled).gemms} <= {"self", "last"}
    state(fresh).load_state_dict(state(compiled).state_dict())
    train(ruled, x())
    assert not any(g.quantized for g in inspect(ruled).gemms if g.module == "self")


def test_state_grows_with_a_function_that_many_modules_call():
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(40))
    run = fp8(lambda layer, x: layer(x), SHORT)
    given = torch.randn(16, 32, requires_grad=True)
    sum(run(layer, given).sum() for layer in layers).backward()
    view, names = state(run), ["layer", *(f"layer#{i}" for i in range(1, 40))]
    assert len(view.tensors) == 120
    assert len(inspect(run).graphs) == 1
    assert view.tensors[0] == "layer:input"
    assert {g.module for g in inspect(run).gemms} == set(names)
    view.step()
    for layer, name in zip(layers, names, strict=True):
        assert view.scale(f"{name}:weight") == torch.tensor(448.0) / layer.weight.abs().max()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_graphs_that_the_state_has_outgrown_compute_the_same(checkpoints, monkeypatch):
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
                call = functools.partial(compiled, layer, last)
                given = checkpoint(call, given, use_reentrant=False) if checkpoints else call(given)
            given.square().mean().backward()
            state(compiled).step()
            found += [given.detach(), gradients(layers), gradients(last), state(compiled).state_dict()]
        return found, len(inspect(compiled).graphs)

    assert same(run(8), run(256))


@pytest.mark.parametrize("assign", [False, True])
def test_exchanged_weights_of_a_function_keep_their_names_and_begin_anew(assign):
    """Their memory is exchanged, or the Parameters are."""
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
    run = fp8(lambda layer, x: layer(x), SHORT, step="manual")
    for scale in (1.0, 1.0, 0.01):
        given = [x(scale).requires_grad_() for _ in layers]
        sum(run(layer, one).sum() for layer, one in zip(layers, given, strict=True)).backward()
        state(run).step()
        for layer in layers:
            if assign:
                layer.load_state_dict({name: values.clone() for name, values in layer.state_dict().items()}, assign=True)
            else:
                layer.weight.data = layer.weight.data.clone()
    assert {name.partition(":")[0] for name in state(run).tensors} == {"layer", "layer#1"}
    assert state(run).scale("layer#1:input") == 448 / given[1].detach().abs().max()


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


def test_histories_go_with_modules_that_move_and_saved_states_have_those_of_the_model():
    model, compiled = chain(*(layer(10**i) for i in range(4)))
    found = {i: state(compiled).amax_history(f"{i}:weight") for i in range(4)}
    del model[1]
    model.append(layer())
    view = state(compiled)
    assert [view.amax_history(f"{i}:weight").equal(found[j]) for i, j in ((0, 0), (1, 2), (2, 3))] == [True] * 3
    assert view.scale("2:grad_output") != 1
    assert {name.partition(":")[0] for name in view.tensors} <= set("0123")
    del model[3]
    saved = state(compiled).state_dict()
    _, fresh = chain(*(layer() for _ in range(3)))
    state(fresh).load_state_dict(saved)
    assert same(saved, state(fresh).state_dict())
    train(compiled, x(), x())
    assert {name.partition(":")[0] for name in view.tensors} == set("012")


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(64, 16), nn.Linear(16, 64)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_an_adapted_layer_keeps_its_histories_and_so_it_does_when_the_adapter_goes():
    model, compiled = chain(layer(), layer(100), layer())
    found = state(compiled).amax_history("1:weight")
    model[1] = Adapted(model[1])
    assert state(compiled).amax_history("1.base:weight").equal(found)
    train(compiled, x())
    model[1] = model[1].base
    view = state(compiled)
    view.step()
    assert view.amax_history("1:weight").count_nonzero() == 3
    assert not [name for name in view.tensors if name.startswith("1.")]
    train(compiled, x())


# -- steps


def second_largest(history):
    return history.sort(dim=0, descending=True).values[min(1, history.shape[0] - 1)]


@pytest.mark.parametrize(
    ("algo", "has_own_factor"), [("max", False), ("max", True), ("most_recent", False), (second_largest, True)]
)
def test_history_follows_the_formula_over_many_steps(algo, has_own_factor):
    calls = []

    def halved(amax, scale, fp8_max, recipe):
        calls.append(recipe)
        return fp8_max / amax / 2

    own = {"scaling_factor_compute_algo": halved} if has_own_factor else {"margin": 1}
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=algo, **own)
    _, compiled = fp8_mlp(recipe)
    amaxes = [1.0, 8.0, 2.0, 0.5, 4.0]
    for step, amax in enumerate(amaxes):
        train(compiled, full(amax))
        state(compiled).step()
        window = amaxes[max(0, step - 2) : step + 1]
        expected = {"max": max(window), "most_recent": window[-1]}.get(algo, sorted([0.0, 0.0, *window])[-2])
        assert not expected or state(compiled).scale("0:input") == torch.tensor(448.0 / 2) / torch.tensor(expected)
    assert calls == [recipe] * (5 if has_own_factor else 0)
    history = state(compiled).amax_history("0:input")
    state(compiled).step()  # in which nothing was recorded
    assert state(compiled).amax_history("0:input").equal(history)


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


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_input_reaches_the_output_and_damages_no_state(poison):
    (_, compiled), (_, clean), given = fp8_mlp(SHORT), fp8_mlp(SHORT), x()
    bad = given.clone()
    bad[3, 5] = poison
    train(compiled, given), train(clean, given)
    (out,) = train(compiled, bad)
    assert not out[3].isfinite().any()
    assert out[2].isfinite().all()
    compiled(given), clean(given)
    assert compiled(given).equal(clean(given))
    view = state(compiled)
    assert view.num_non_finite("0:input") == 1
    assert view.num_non_finite() > 1
    assert all(view.scale(name).isfinite() and view.amax_history(name).isfinite().all() for name in view.tensors)


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


@pytest.mark.parametrize(("saved", "loaded"), [(SHORT, E4M3), (E4M3, SHORT)])
def test_a_state_of_another_format_is_refused_at_the_first_call_at_the_latest(saved, loaded):
    (_, compiled), (_, fresh) = trained(saved), fp8_mlp(loaded)

    def load_and_step():
        state(fresh).load_state_dict(state(compiled).state_dict())
        train(fresh, x())

    with pytest.raises(CheckpointMismatchError, match=r"grad_output was saved with fp8_max .* use the same fp8_format"):
        load_and_step()


@pytest.mark.parametrize("rules", [{"0": None}, {"2": None}, {"2": "current"}, {"2:output": None}])
def test_a_tensor_may_be_named_after_a_gemm_in_high_precision(rules):
    """That reads it first: so the rules for its module do not tell whether it has a history."""

    class Branches(nn.ModuleList):
        def forward(self, x):
            x = torch.relu(self[1](x))
            return self[0](x) + self[2](x)

    compiled, fresh = (fp8(Branches(nn.Linear(64, 64) for _ in range(3)), SHORT, rules=rules) for _ in range(2))
    train(compiled, x())
    assert "0:input" in state(compiled).tensors
    state(fresh).load_state_dict(state(compiled).state_dict())
    train(fresh, x())
    assert set(state(fresh).tensors) == set(state(compiled).tensors)


def test_a_state_of_the_first_step_continues_in_a_model_that_has_run():
    """The boundary that follows is the first to write its histories."""
    (_, compiled), (_, other) = trained(), trained(steps=3)
    state(other).load_state_dict(state(compiled).state_dict())
    for scale in (2.0, 0.5, 1.0):
        given = x(scale)
        assert same(train(other, given), train(compiled, given))
    assert same(state(other).state_dict(), state(compiled).state_dict())


# -- several recipes


#: Output gradients are quantized twice: to E5M2 for grad_input GEMMs, to E4M3 for grad_weight GEMMs; so are inputs, with
#: histories of two lengths.
TWO = {"rules": {"*:grad_weight": DelayedScaling(amax_history_len=3, fp8_format=Format.E4M3)}}


def test_a_tensor_under_two_recipes_has_two_histories_with_a_name_each():
    _, compiled = fp8_mlp(SHORT, **TWO)
    train(compiled, full(2.0).requires_grad_())
    view = state(compiled)
    view.step()
    ours, theirs = "2:grad_output", "2:grad_output@recipe1"
    assert {ours, theirs, "0:input", "0:input@recipe1"} <= set(view.tensors)
    assert [len(view.amax_history(name)) for name in (ours, theirs)] == [4, 3]
    assert view.scale(ours) / view.scale(theirs) == 57344 / 448
    assert len(view.tensors) == 6 + 4, "no grad_weight GEMM reads a weight"


def test_a_tensor_in_two_formats_is_saved_and_loaded_bit_for_bit_and_does_not_fit_one_recipe():
    (_, compiled), (_, fresh), (_, other) = fp8_mlp(SHORT, **TWO), fp8_mlp(SHORT, **TWO), fp8_mlp(SHORT)
    batches = [x().requires_grad_() for _ in range(4)]
    train(compiled, *batches[:2])
    saved = state(compiled).state_dict()
    assert {"2:grad_output.scale", "2:grad_output@recipe1.scale"} <= set(saved)
    state(fresh).load_state_dict(saved)
    assert same(state(fresh).state_dict(), saved)
    for given in batches[2:]:
        assert fresh(given).equal(compiled(given))
        train(fresh, given), train(compiled, given)
    assert same(state(fresh).state_dict(), state(compiled).state_dict())
    with pytest.raises(CheckpointMismatchError, match=r"@recipe1' was saved under recipe 1.*rules have 1"):
        state(other).load_state_dict(saved)
