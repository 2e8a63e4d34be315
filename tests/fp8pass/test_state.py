"""The state of delayed scaling: names, step boundaries, what is recorded, checkpoints."""

import copy

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, Float8CurrentScaling, Format, fp8_compile, inspect, state
from fp8pass.errors import CheckpointMismatchError, UnknownTensorError
from tests.support.models import LlamaBlock, mlp

RECIPE = DelayedScaling(amax_history_len=4)
FP8_MAX = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}


def compiled_mlp(recipe=RECIPE, seed=0, **options):
    torch.manual_seed(seed)
    model = mlp()
    return model, fp8_compile(model, recipe, backend="aot_eager", **options)


def train_step(compiled, x):
    compiled(x).square().sum().backward()


def test_names_are_module_path_and_kind():
    _, compiled = compiled_mlp()
    train_step(compiled, torch.randn(16, 64, requires_grad=True))
    kinds = ("input", "weight", "grad_output")
    assert set(state(compiled).tensors) == {f"{module}:{kind}" for module in ("0", "2") for kind in kinds}


def test_shared_input_has_one_name_and_understands_the_others():
    compiled = fp8_compile(LlamaBlock(), RECIPE, backend="aot_eager")
    x = torch.randn(1, 16, 128, requires_grad=True)
    train_step(compiled, x)
    view = state(compiled)
    assert "wq:input" in view.tensors
    assert not {"wk:input", "wv:input", "up:input"} & set(view.tensors)
    assert view.amax_history("wk:input").equal(view.amax_history("wq:input"))
    view.step()
    assert view.scale("wv:input").equal(view.scale("wq:input"))
    assert view.scale("wq:input") != 1


def test_unknown_name_suggests_the_nearest():
    _, compiled = compiled_mlp()
    train_step(compiled, torch.randn(16, 64))
    with pytest.raises(UnknownTensorError, match="Did you mean '0:weight'"):
        state(compiled).scale("0:weigth")


@pytest.mark.parametrize("options", [{"recipe": "current"}, {"recipe": RECIPE, "rules": {"*": "current"}}], ids=str)
def test_a_model_that_keeps_no_state_is_not_told_to_run_first(options):
    compiled = fp8_compile(torch.nn.Linear(32, 32), backend="aot_eager", **options)
    if "rules" in options:
        with pytest.raises(UnknownTensorError, match="none yet: run a forward first"):
            state(compiled).scale("0:input")
    compiled(torch.randn(16, 32)).sum().backward()
    with pytest.raises(UnknownTensorError, match="There are none: only tensors under delayed scaling have a state"):
        state(compiled).scale("0:input")


def test_first_step_uses_scale_1_and_the_second_the_amaxes_of_the_first():
    model, compiled = compiled_mlp()
    x = torch.randn(16, 64)
    train_step(compiled, x)
    view = state(compiled)
    assert all(view.scale(name) == 1 for name in view.tensors)
    staged = {name: view.amax_history(name)[0] for name in view.tensors}
    assert staged["0:input"] == x.abs().max()
    assert staged["0:weight"] == model[0].weight.abs().max()
    compiled(x)
    for name in view.tensors:
        limit = torch.tensor(FP8_MAX[name.split(":")[1]])
        assert view.scale(name).equal(limit / staged[name]), name
        history = [0.0, 0.0, 0.0, staged[name].item()]
        observed = view.amax_history(name).tolist()
        assert observed[1:] == history[1:], name


def test_outputs_of_step_2_use_the_new_scales_to_the_last_bit():
    model, compiled = compiled_mlp()
    x = torch.randn(16, 64)
    train_step(compiled, x)
    second = compiled(x)

    def linear(value, module, scales):
        q, w = (
            torch.clamp(t * s, -448, 448).to(torch.float8_e4m3fn).float()
            for t, s in zip((value, module.weight), scales, strict=True)
        )
        inverse = scales[0].reciprocal() * scales[1].reciprocal()
        return (q @ w.t()) * inverse + module.bias

    view = state(compiled)
    with torch.no_grad():
        hidden = linear(x, model[0], (view.scale("0:input"), view.scale("0:weight")))
        expected = linear(nn.functional.gelu(hidden), model[2], (view.scale("2:input"), view.scale("2:weight")))
    assert second.equal(expected)


def second_largest(history):
    return history.sort(dim=0, descending=True).values[min(1, history.shape[0] - 1)]


@pytest.mark.parametrize("has_own_factor", [False, True])
@pytest.mark.parametrize("algo", ["max", "most_recent", second_largest])
def test_history_follows_the_formula_over_many_steps(algo, has_own_factor):
    calls = []

    def halved(amax, scale, fp8_max, recipe):
        calls.append(recipe)
        return fp8_max / amax / 2

    own = {"scaling_factor_compute_algo": halved} if has_own_factor else {"margin": 1}
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=algo, **own)
    _, compiled = compiled_mlp(recipe)
    amaxes = [1.0, 8.0, 2.0, 0.5, 4.0]
    for step, amax in enumerate(amaxes):
        compiled(torch.full((16, 64), amax)).sum().backward()
        state(compiled).step()
        window = amaxes[max(0, step - 2) : step + 1]
        expected = {"max": max(window), "most_recent": window[-1]}.get(algo, sorted([0.0, 0.0, *window])[-2])
        assert not expected or state(compiled).scale("0:input") == torch.tensor(448.0 / 2) / torch.tensor(expected)
    assert calls == [recipe] * (5 if has_own_factor else 0)


def test_manual_steps_keep_the_largest_amax_of_all_microbatches():
    _, compiled = compiled_mlp(step="manual")
    view = state(compiled)
    for amax in (1.0, 4.0, 2.0):
        compiled(torch.full((16, 64), amax)).sum().backward()
    assert view.scale("0:input") == 1
    view.step()
    assert view.scale("0:input") == 448.0 / 4.0
    view.step()  # nothing was recorded since
    assert view.amax_history("0:input").tolist() == [0, 0, 0, 4.0]


def test_auto_steps_end_with_the_next_forward_also_under_accumulation():
    _, compiled = compiled_mlp()
    for amax in (1.0, 4.0):
        compiled(torch.full((16, 64), amax)).sum().backward()
    assert state(compiled).amax_history("0:input").tolist() == [4.0, 0, 0, 1.0]


def test_nothing_is_recorded_without_gradients():
    model, compiled = compiled_mlp()
    train_step(compiled, torch.randn(16, 64))
    view = state(compiled)
    view.step()
    before = view.state_dict()
    with torch.no_grad():
        compiled(torch.randn(16, 64) * 100)
    with torch.inference_mode():
        compiled(torch.randn(16, 64) * 100)
    for p in model.parameters():
        p.requires_grad_(False)
    compiled(torch.randn(16, 64) * 100)
    after = view.state_dict()
    assert before.keys() == after.keys()
    assert all(before[key].equal(after[key]) for key in before)


def test_inference_before_training_shares_names_with_it():
    _, compiled = compiled_mlp()
    with torch.no_grad():
        compiled(torch.randn(16, 64))
    assert set(state(compiled).tensors) == {"0:input", "0:weight", "2:input", "2:weight"}
    train_step(compiled, torch.randn(16, 64))
    assert len(state(compiled).tensors) == 6


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_input_reaches_the_output_and_damages_no_state(poison):
    _, compiled = compiled_mlp()
    _, clean = compiled_mlp()
    x = torch.randn(16, 64)
    bad = x.clone()
    bad[3, 5] = poison
    for c in (compiled, clean):
        train_step(c, x)
    out = compiled(bad)
    assert not out[3].isfinite().any()
    assert out[2].isfinite().all()
    out.square().sum().backward()
    compiled(x)
    clean(x)
    assert compiled(x).equal(clean(x))
    view = state(compiled)
    assert view.num_non_finite("0:input") == 1
    assert view.num_non_finite() > 1
    for name in view.tensors:
        assert view.scale(name).isfinite()
        assert view.amax_history(name).isfinite().all()


def test_state_grows_with_a_function_that_many_modules_call():
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(40))
    run = fp8_compile(lambda layer, x: layer(x), RECIPE, backend="aot_eager")
    x = torch.randn(16, 32)
    sum(run(layer, x.requires_grad_()).sum() for layer in layers).backward()
    view = state(run)
    assert len(view.tensors) == 120
    assert len(inspect(run).graphs) == 1
    assert view.tensors[0] == "layer:input"
    assert {g.module for g in inspect(run).gemms} == {"layer", *(f"layer#{i}" for i in range(1, 40))}
    view.step()
    weights = [view.scale(f"layer#{i}:weight" if i else "layer:weight") for i in range(40)]
    for layer, scale in zip(layers, weights, strict=True):
        assert scale == torch.tensor(448.0) / layer.weight.abs().max()


def test_safetensors_and_weights_only_roundtrip(tmp_path):
    _, compiled = compiled_mlp()
    train_step(compiled, torch.randn(16, 64))
    saved = state(compiled).state_dict()
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(saved, tmp_path / "fp8.safetensors")
    torch.save(saved, tmp_path / "fp8.pt")
    for loaded in (safetensors.load_file(tmp_path / "fp8.safetensors"), torch.load(tmp_path / "fp8.pt", weights_only=True)):
        assert loaded.keys() == saved.keys()
        assert all(loaded[key].equal(saved[key]) for key in saved)


@pytest.mark.parametrize("has_run", [False, True])
def test_a_fresh_model_goes_on_with_the_scales_that_it_loads(has_run):
    """As if it had run all along: one without a state takes those of its first tensors."""
    (_, compiled), (_, fresh) = compiled_mlp(DelayedScaling()), compiled_mlp(DelayedScaling())
    for _ in range(2):
        train_step(compiled, torch.randn(16, 64))
    if has_run:
        with torch.no_grad():
            fresh(torch.randn(16, 64))
    state(fresh).load_state_dict(state(compiled).state_dict())
    x = 0.1 * torch.randn(16, 64)
    assert compiled(x).equal(fresh(x))


def test_a_history_that_is_loaded_empty_is_empty():
    """Weights that were exchanged scale themselves, also in a model whose own histories were not empty."""
    (_, compiled), (_, other) = compiled_mlp(DelayedScaling()), compiled_mlp(DelayedScaling())
    for call, factor in ((compiled, 1.0), (other, 3.0)):
        for _ in range(2):
            train_step(call, factor * torch.randn(16, 64))
    state(compiled).forget_weights()
    state(other).load_state_dict(state(compiled).state_dict())
    x = 0.1 * torch.randn(16, 64)
    assert compiled(x).equal(other(x))


def test_loading_refuses_another_model_and_leaves_the_state():
    _, compiled = compiled_mlp()
    train_step(compiled, torch.randn(16, 64))
    before = state(compiled).state_dict()
    other = fp8_compile(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.ReLU(), nn.Linear(64, 64)), RECIPE, backend="aot_eager")
    train_step(other, torch.randn(16, 64))
    with pytest.raises(CheckpointMismatchError, match=r"missing from the checkpoint: 2:grad_output.*unknown to the model: 3:"):
        state(compiled).load_state_dict(state(other).state_dict())
    after = state(compiled).state_dict()
    assert all(before[key].equal(after[key]) for key in before)


def test_loading_before_the_first_call_refuses_unknown_modules():
    _, compiled = compiled_mlp()
    train_step(compiled, torch.randn(16, 64))
    fresh = fp8_compile(nn.Linear(64, 64), RECIPE, backend="aot_eager")
    with pytest.raises(CheckpointMismatchError, match="has no modules for"):
        state(fresh).load_state_dict(state(compiled).state_dict())
    assert state(fresh).tensors == []


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (DelayedScaling(amax_history_len=8), r"amax_history has shape \(4,\) .* \(8,\)"),
        (DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3), "use the same fp8_format"),
        (Float8CurrentScaling(), "keeps no state"),
    ],
)
def test_loading_refuses_another_recipe(recipe, message):
    _, compiled = compiled_mlp()
    train_step(compiled, torch.randn(16, 64))
    _, other = compiled_mlp(recipe)
    train_step(other, torch.randn(16, 64))
    with pytest.raises(CheckpointMismatchError, match=message):
        state(other).load_state_dict(state(compiled).state_dict())
    _, fresh = compiled_mlp(recipe)
    with pytest.raises(CheckpointMismatchError, match=message):
        state(fresh).load_state_dict(state(compiled).state_dict())
    assert state(fresh).tensors == []


@pytest.mark.parametrize(("saved", "loaded"), [(Format.HYBRID, Format.E4M3), (Format.E4M3, Format.HYBRID)])
def test_a_state_of_another_format_is_refused_at_the_first_call_at_the_latest(saved, loaded):
    _, compiled = compiled_mlp(DelayedScaling(amax_history_len=4, fp8_format=saved))
    train_step(compiled, torch.randn(16, 64))
    _, fresh = compiled_mlp(DelayedScaling(amax_history_len=4, fp8_format=loaded))

    def load_and_step() -> None:
        state(fresh).load_state_dict(state(compiled).state_dict())
        train_step(fresh, torch.randn(16, 64))

    with pytest.raises(CheckpointMismatchError, match=r"grad_output was saved with fp8_max .* use the same fp8_format"):
        load_and_step()


@pytest.mark.parametrize("rules", [{"0": None}, {"2": None}, {"2": "current"}, {"2:output": None}])
def test_a_tensor_may_be_named_after_a_gemm_in_high_precision(rules):
    """That reads it first: so the rules for its module do not tell whether it has a history."""

    class Branches(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self[1](x))
            return self[0](x) + self[2](x)

    compiled, fresh = (
        fp8_compile(Branches(nn.Linear(64, 64) for _ in range(3)), RECIPE, rules=rules, backend="aot_eager") for _ in range(2)
    )
    train_step(compiled, torch.randn(16, 64))
    assert "0:input" in state(compiled).tensors
    state(fresh).load_state_dict(state(compiled).state_dict())
    train_step(fresh, torch.randn(16, 64))
    assert set(state(fresh).tensors) == set(state(compiled).tensors)


class Multiplies(nn.Module):
    """A GEMM of the model's own, in a frame that calls it something else than `self`."""

    def __init__(model) -> None:
        super().__init__()
        model.weight, model.last = nn.Parameter(torch.randn(64, 64)), nn.Linear(64, 64)

    def forward(model, x: torch.Tensor) -> torch.Tensor:
        return model.last(x @ model.weight)


@pytest.mark.parametrize("make", [lambda: nn.Linear(64, 64), Multiplies])
def test_gemms_of_the_model_itself_are_called_self(make):
    compiled, fresh = (fp8_compile(make(), RECIPE, backend="aot_eager") for _ in range(2))
    train_step(compiled, torch.randn(16, 64))
    assert {"self:input", "self:weight", "self:grad_output"} <= set(state(compiled).tensors)
    assert {g.module for g in inspect(compiled).gemms} <= {"self", "last"}
    state(fresh).load_state_dict(state(compiled).state_dict())
    ruled = fp8_compile(make(), RECIPE, rules={"self": None}, backend="aot_eager")
    train_step(ruled, torch.randn(16, 64))
    assert not any(g.quantized for g in inspect(ruled).gemms if g.module == "self")


def test_loading_refuses_a_foreign_dictionary():
    model, compiled = compiled_mlp()
    with pytest.raises(CheckpointMismatchError, match="not an entry of an fp8pass state"):
        state(compiled).load_state_dict(copy.deepcopy(model.state_dict()))


def test_rules_with_two_delayed_recipes_keep_two_histories():
    short, long = DelayedScaling(amax_history_len=2), DelayedScaling(amax_history_len=5, margin=1)
    torch.manual_seed(0)
    compiled = fp8_compile(mlp(), short, rules={"2": long}, backend="aot_eager")
    x = torch.full((16, 64), 2.0)
    train_step(compiled, x)
    view = state(compiled)
    view.step()
    assert view.amax_history("0:input").shape == (2,)
    assert view.amax_history("2:input").shape == (5,)
    assert view.scale("0:input") == 224
    assert view.scale("2:weight") * view.amax_history("2:weight")[-1] == pytest.approx(224)
    assert len(inspect(compiled).graphs[0].state_inputs) == 8


def two_recipes(seed):
    """Output gradients are quantized twice: to E5M2 for grad_input GEMMs, to E4M3 for grad_weight GEMMs; so are inputs, with
    histories of two lengths."""
    narrow = DelayedScaling(amax_history_len=3, fp8_format=Format.E4M3)
    return compiled_mlp(RECIPE, seed, rules={"*:grad_weight": narrow})


def test_a_tensor_under_two_recipes_has_two_histories_with_a_name_each():
    _, compiled = two_recipes(0)
    x = torch.full((16, 64), 2.0, requires_grad=True)
    train_step(compiled, x)
    view = state(compiled)
    view.step()
    ours, theirs = "2:grad_output", "2:grad_output@recipe1"
    assert {ours, theirs, "0:input", "0:input@recipe1"} <= set(view.tensors)
    assert [len(view.amax_history(name)) for name in (ours, theirs)] == [4, 3]
    assert view.scale(ours) / view.scale(theirs) == 57344 / 448
    assert len(view.tensors) == 6 + 4, "no grad_weight GEMM reads a weight"


def test_a_tensor_in_two_formats_is_saved_and_loaded_bit_for_bit():
    _, compiled = two_recipes(0)
    batches = [torch.randn(16, 64, requires_grad=True) for _ in range(4)]
    for x in batches[:2]:
        train_step(compiled, x)
    saved = state(compiled).state_dict()
    assert "2:grad_output.scale" in saved
    assert "2:grad_output@recipe1.scale" in saved
    _, fresh = two_recipes(0)
    fresh.load_state_dict(compiled.state_dict())
    state(fresh).load_state_dict(saved)
    again = state(fresh).state_dict()
    assert again.keys() == saved.keys()
    assert all(again[key].equal(saved[key]) for key in saved)
    for x in batches[2:]:
        assert fresh(x).equal(compiled(x))
        for c in (fresh, compiled):
            train_step(c, x)
    ours, theirs = state(fresh).state_dict(), state(compiled).state_dict()
    assert all(ours[key].equal(theirs[key]) for key in ours.keys() | theirs.keys())


def test_a_state_of_two_recipes_does_not_fit_one():
    _, compiled = two_recipes(0)
    train_step(compiled, torch.randn(16, 64))
    _, other = compiled_mlp()
    with pytest.raises(CheckpointMismatchError, match=r"@recipe1' was saved under recipe 1.*rules have 1"):
        state(other).load_state_dict(state(compiled).state_dict())
