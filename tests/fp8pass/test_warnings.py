"""Nothing is lost silently: what a compiled model warns of, when, how often, and what `strict=True` makes of it."""

import contextlib
import copy
import re
import warnings

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, fp8_uncompile, inspect, state
from fp8pass.errors import (
    CheckpointMismatchError,
    Fp8Error,
    Fp8FallbackWarning,
    Fp8Warning,
    NotCompiledError,
    OptionError,
    StrictError,
)
from fp8pass.integrations.saved import collect_state
from tests.support.backend import register_backend
from tests.support.cases import each
from tests.support.models import Stack, mlp
from tests.support.selection import NanoGPT, sentence

RECIPE = DelayedScaling(amax_history_len=4)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    register_backend()


def make(model=None, recipe="current", **options):
    return fp8_compile(model or mlp(), recipe, backend="aot_eager", **options)


def batch(width=64):
    return torch.randn(16, width)


@contextlib.contextmanager
def silence():
    """Fails at any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def step(model, *args):
    model(*(args or (batch(),))).square().sum().backward()


# -- rules that match nothing


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_rule_that_matches_nothing_is_said_once_when_the_first_backward_ends(recipe, by_name):
    rules = {"3": None, "0:grad_weight": None, "0.*": None}
    if by_name:
        model = torch.compile(
            mlp(), backend="fp8pass", options={"recipe": recipe, "rules": rules, "backend": "aot_eager", "strict": False}
        )
    else:
        model = make(recipe=recipe, rules=rules)
    with silence():
        with torch.no_grad():
            model(batch())
        out = model(batch())
    with pytest.warns(Fp8Warning, match=r"'3' has matched no GEMM") as said:
        out.sum().backward()
    (text,) = (str(w.message) for w in said)
    assert "'0.*'" in text
    assert "'0:grad_weight'" not in text
    assert text.startswith("Sequential: ")
    assert said[0].filename == __file__
    with silence():
        for _ in range(3):
            step(model)


def test_a_rule_behind_another_one_is_said_with_the_reason():
    model = make(rules={"*": "current", "0": None})
    with pytest.warns(Fp8Warning, match=r"The rule '0' decides nothing: its GEMMs match '\*' first"):
        step(model)


def test_the_second_of_two_compiled_models_says_it_too():
    for _ in range(2):
        with pytest.warns(Fp8Warning, match="has matched no GEMM"):
            step(make(rules={"nowhere": None}))


def test_a_backward_that_failed_was_not_the_first():
    def fail(gradient):
        raise ValueError("no")

    model = make(rules={"nowhere": None})
    x = batch().requires_grad_()
    x.register_hook(fail)
    with silence(), pytest.raises(ValueError, match="no"):
        model(x).sum().backward()
    with pytest.warns(Fp8Warning, match="has matched no GEMM"):
        step(model)


def deep(**options):
    return Stack((mlp(64, 96, 64) for _ in range(3)), **options)


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_under_checkpointing_are_asked_when_all_have_run(reentrant):
    model = deep(use_reentrant=reentrant)
    model.layers = nn.ModuleList(make(layer, rules={"0:grad_weight": None, "2": "current"}) for layer in model.layers)
    with silence():
        for _ in range(3):
            step(model, batch().requires_grad_())


# -- no GEMM in FP8


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(x)


@each(
    "model, options, cause",
    [
        (mlp(8, 16, 8), {}, r"thin \(5\)"),
        (mlp().double(), {}, r"dtype \(5\)"),
        (mlp(), {"rules": {"*": None}}, r"rule \(5\)"),
        (Norm(), {}, "no matrix multiplication"),
    ],
)
def test_no_gemm_in_fp8_is_said_once_with_the_reasons(model, options, cause):
    compiled = make(model, **options)
    x = torch.randn(16, next(model.parameters()).shape[-1], dtype=next(model.parameters()).dtype)
    with pytest.warns(Fp8Warning, match=rf"no GEMM runs in FP8: .*{cause}") as said:
        compiled(x)
    assert len(said) == 1
    assert said[0].filename == __file__
    with silence():
        step(compiled, x)


def test_inference_says_it_too_and_a_function_is_called_one():
    function = fp8_compile(lambda x, w: x @ w, "current", backend="aot_eager", rules={"*": None})
    with torch.no_grad(), pytest.warns(Fp8Warning, match="the compiled function: no GEMM runs in FP8"):
        function(batch(), torch.randn(64, 64))


# -- heads in FP8


@each("options", [{"select": "all"}, {"rules": {"*": "current"}}, {"rules": {"*:output": "current"}}])
def test_a_head_in_fp8_is_said_once_with_the_rules_that_answer(options):
    compiled = make(NanoGPT(), **options)
    with pytest.warns(Fp8Warning, match=r"NanoGPT: lm_head looks like the output embedding.*rules=\{'lm_head': None\}") as said:
        compiled(sentence())
    assert len(said) == 1
    with silence():
        step(compiled, sentence())


@each("options", [{}, {"rules": {"lm_head": "current"}}, {"rules": {"*head": "current"}}, {"rules": {"lm_head": None}}])
def test_a_head_that_is_decided_about_is_not(options):
    with silence():
        step(make(NanoGPT(), strict=True, **options), sentence())


# -- strict


@each(
    "model, args, options, text",
    [
        (mlp, (batch(),), {"rules": {"nowhere": None}}, "has matched no GEMM"),
        (mlp, (batch(),), {"rules": {"*": None}}, "no GEMM runs in FP8"),
        (NanoGPT, (sentence(),), {"select": "all"}, "looks like the output embedding"),
    ],
)
def test_strict_makes_errors_of_them_each_time(model, args, options, text):
    compiled = make(model(), strict=True, **options)
    for _ in range(2):
        with silence(), pytest.raises(StrictError, match=text) as error:
            step(compiled, *args)
        assert isinstance(error.value, Fp8Error)


def test_strict_refuses_an_eager_run_and_a_replaced_call():
    compiled = make(strict=True)
    for _ in range(2):
        with torch.compiler.set_stance("force_eager"), pytest.raises(StrictError, match="fell back to eager"):
            compiled(batch())
    step(compiled)
    model = make(mlp(), strict=True, in_place=True)
    model.compile(backend="eager")
    for _ in range(2):
        with pytest.raises(StrictError, match=r"model\.compile\(\) was called"):
            model(batch())


def test_strict_lets_everything_else_pass():
    with silence():
        for recipe in ("current", RECIPE):
            model = make(recipe=recipe, strict=True, rules={"2:grad_weight": None})
            for _ in range(2):
                step(model)
    with pytest.raises(OptionError, match="strict is 'yes'"):
        make(strict="yes")


def test_the_fallback_warning_names_several_models_and_the_reset():
    first, second = (make(mlp(), dynamic=False) for _ in range(2))
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (16, 32):
            first(torch.randn(rows, 64))
        with pytest.warns(Fp8FallbackWarning, match=r"[Ss]everal models in one process.*torch\._dynamo\.reset\(\)"):
            second(torch.randn(48, 64))
        torch._dynamo.reset()
        with silence():
            second(torch.randn(48, 64))


# -- model.compile() after in_place


def test_compiling_a_model_again_says_that_fp8_is_gone():
    model = make(recipe=RECIPE, in_place=True)
    step(model)
    x = batch()
    model.compile(backend="eager")
    with pytest.warns(Fp8Warning, match=r"Sequential was compiled with fp8_compile.*model\.compile\(\) was called") as said:
        out = model(x)
    assert [w.filename for w in said] == [__file__]
    with torch.no_grad():
        assert out.equal(nn.Sequential.forward(model, x))
    with silence():
        model(x)
    for ask in (inspect, state, fp8_uncompile):
        with pytest.raises(NotCompiledError, match=r"model\.compile\(\) was called.*leave model\.compile\(\) out"):
            ask(model)
    with pytest.raises(OptionError, match=r"model\.compile\(\) was called"):
        make(model, in_place=True)
    assert not {"forward", "compile"} & set(model.__dict__)


def test_the_way_back_that_the_message_names_works():
    model = make(recipe=RECIPE, in_place=True)
    model.compile(backend="eager")
    model._compiled_call_impl = None
    with silence():
        step(make(model, RECIPE, in_place=True))
    assert all(g.quantized for g in inspect(model).gemms)
    fp8_uncompile(model)
    assert not {"forward", "compile", "_compiled_call_impl"} & set(model.__dict__)
    with pytest.raises(NotCompiledError, match="not compiled in place"):
        fp8_uncompile(model)


def test_before_the_first_call_and_set_by_hand():
    model = make(in_place=True)
    model._compiled_call_impl = torch.compile(model._call_impl, backend="eager")
    with pytest.raises(NotCompiledError, match="took the place of FP8"):
        inspect(model)


def test_another_backend_by_our_name_is_inspected_as_what_it_is():
    model = make(deep(), RECIPE, in_place=True)
    model.compile(backend="fp8pass", options={"recipe": "current", "backend": "aot_eager"})
    with pytest.warns(Fp8Warning, match="without the recipe, rules and state"):
        step(model)
    assert {g.recipe for g in inspect(model).gemms} == {"current"}


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copies_of_both_compile_as_any_model_does(duplicate):
    model = make(in_place=True)
    if duplicate is copy.deepcopy:
        twin = duplicate(model)
        twin.compile(backend="eager")
        with silence():
            twin(batch())
        step(model)
        assert inspect(model).gemms
    model.compile(backend="eager")
    twin = duplicate(model)
    with silence():
        twin(batch())


class Keras(nn.Module):
    """`compile` means something else here."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x):
        return self.up(x)

    def compile(self, optimizer):
        self.optimizer = optimizer


def test_a_compile_of_the_models_own_is_called_and_replaces_nothing():
    model = make(Keras(), in_place=True)
    model.compile("adam")
    assert model.optimizer == "adam"
    with silence():
        step(model)
    assert inspect(model).gemms


# -- forward


def test_forward_of_a_model_in_place_is_named_where_nothing_ran():
    model = make(in_place=True)
    model.forward(batch())
    assert re.search(r"call model\(x\): model\.forward\(x\) runs\s+eagerly", str(inspect(model)))
    step(model)
    assert "model.forward" not in str(inspect(model))
    assert "model.forward" not in str(inspect(make()))


# -- load_state_dict


@pytest.mark.parametrize("has_run", [False, True])
def test_an_empty_state_is_refused_under_a_recipe_with_state(has_run):
    model = make(recipe=RECIPE)
    before = state(model).state_dict()
    if has_run:
        step(model)
        before = state(model).state_dict()
    for empty in ({}, {"recorded": torch.tensor(True)}):
        with pytest.raises(CheckpointMismatchError, match=r"the state_dict is empty.*do not call load_state_dict"):
            state(model).load_state_dict(empty)
    after = state(model).state_dict()
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    state(make(recipe="current")).load_state_dict({})


def test_what_a_model_saved_before_its_first_call_is_taken():
    saved = state(make(recipe=RECIPE)).state_dict()
    assert saved
    state(make(recipe=RECIPE)).load_state_dict(saved)


# -- blocks compiled one by one


def blocks(in_place=True, **options):
    torch.manual_seed(0)
    model = deep()
    for i, layer in enumerate(model.layers):
        compiled = make(layer, RECIPE, in_place=in_place, **options)
        model.layers[i] = compiled
    return model


@pytest.mark.parametrize("in_place", [True, False])
def test_blocks_have_one_table_and_one_state(in_place):
    whole = make(deep(), RECIPE)
    model = blocks(in_place)
    x = batch()
    for _ in range(3):
        step(model, x)
        step(whole, x)
    found, wanted = inspect(model), inspect(whole)
    assert {(g.module, g.role, g.quantized) for g in found.gemms} >= {(g.module, g.role, g.quantized) for g in wanted.gemms}
    assert "layers.0-2.0 (x3)" in str(found)
    assert "layers.0-2.2 (x3)" in str(found)
    assert found.outside == []
    assert len(found.graphs) <= 2  # layers with equal code share one, but the first, whose input wants no gradient
    assert set(state(model).tensors) >= set(state(whole).tensors)
    for name in state(whole).tensors:
        assert state(model).scale(name).equal(state(whole).scale(name)), name
        assert state(model).amax_history(name).equal(state(whole).amax_history(name)), name
    assert state(model).num_non_finite() == 0


def test_the_state_of_blocks_is_saved_and_loaded_as_one():
    model, twin, late = blocks(), blocks(), blocks()
    x = batch()
    for _ in range(2):
        step(model, x)
    saved = state(model).state_dict()
    assert saved["num_tensors"] == len(state(model).tensors)
    assert all(key.startswith("layers.") for key in saved if ":" in key)
    step(twin, x)
    for other in (twin, late):  # after and before the first call
        state(other).load_state_dict(saved)
    outs = [m(x) for m in (model, twin, late)]
    assert outs[0].equal(outs[1])
    assert outs[0].equal(outs[2])
    assert collect_state(model).keys() == saved.keys()
    state(make(deep(), RECIPE)).load_state_dict(saved)  # a state of the whole model has the same names


def test_a_state_that_fits_one_block_and_not_another_changes_nothing():
    model = blocks()
    step(model)
    before = state(model).state_dict()
    lacking = {k: v * 2 if k.endswith(".scale") else v for k, v in before.items() if not k.startswith("layers.2.0:weight")}
    with pytest.raises(CheckpointMismatchError, match=r"layers\.2: .*missing from the checkpoint: 0:weight"):
        state(model).load_state_dict(lacking)
    with pytest.raises(CheckpointMismatchError, match=r"no compiled part of it has layers\.7"):
        state(model).load_state_dict({key.replace("layers.1", "layers.7"): value for key, value in before.items()})
    with pytest.raises(CheckpointMismatchError, match="the state_dict is empty"):
        state(model).load_state_dict({})
    after = state(model).state_dict()
    assert all(before[name].equal(after[name]) for name in before)


def test_a_block_that_recorded_nothing_ends_no_step():
    model = blocks()
    step(model)
    state(model).step()
    model.layers[0](batch())
    saved = state(model).state_dict()
    twin = blocks()
    state(twin).load_state_dict(saved)
    state(model).step()
    state(twin).step()
    for name in state(model).tensors:
        assert state(model).amax_history(name).equal(state(twin).amax_history(name)), name


def test_a_linear_compiled_by_itself_has_its_own_path():
    model = deep()
    for layer in model.layers:
        make(layer[0], RECIPE, in_place=True)
    step(model)
    assert {g.module for g in inspect(model).gemms} == {f"layers.{i}.0" for i in range(3)}
    assert state(model).scale("layers.1.0:weight") > 0
    assert inspect(model).outside == [f"layers.{i}.2" for i in range(3)]
    state(model).load_state_dict(state(model).state_dict())


def test_rules_of_blocks_are_unmatched_where_no_block_matches_them():
    model = blocks(rules={"0:grad_weight": None, "nowhere": None})
    with pytest.warns(Fp8Warning, match="'nowhere' has matched no GEMM"):
        step(model)
    report = inspect(model)
    assert report.unmatched_rules == ["nowhere"]
    assert "The rule 'nowhere' has matched no GEMM." in str(report)
    assert str(report).count("'nowhere'") == 1


def test_parts_that_are_compiled_again_are_named_and_nothing_compiled_is_an_error():
    model = blocks()
    model.layers[1].compile(backend="eager")
    with pytest.raises(NotCompiledError, match=r"layers\.1: Sequential was compiled .*model\.compile\(\) was called"):
        inspect(model)
    with pytest.raises(NotCompiledError, match="did not come from fp8_compile"):
        state(deep())
    with pytest.raises(NotCompiledError, match="did not come from fp8_compile"):
        inspect(torch.relu)
    with pytest.raises(
        NotCompiledError, match=r"not compiled in place itself: layers\.0, layers\.2 are; call fp8_uncompile on each"
    ):
        fp8_uncompile(model)
    with pytest.raises(NotCompiledError, match="does not change the model"):
        fp8_uncompile(make())


def test_compiled_autograd_traces_past_it():
    model = make(rules={"nowhere": None})
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        step(model)
    with pytest.warns(Fp8Warning, match="has matched no GEMM"):
        step(model)
