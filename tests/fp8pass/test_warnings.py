"""Nothing is lost silently: what a compiled model warns of, when, how often, and what `strict=True` makes of it."""

import contextlib
import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call

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
from tests.support.models import BrokenLayers, Stack, mlp
from tests.support.selection import NanoGPT, sentence
from tests.support.training import same

RECIPE = DelayedScaling(amax_history_len=4)
NO_GEMM = "has matched no GEMM"


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    register_backend()


def make(model=None, recipe="current", **options):
    return fp8_compile(model or mlp(), recipe, backend="aot_eager", **options)


def deep(**options):
    return Stack((mlp(64, 96, 64) for _ in range(3)), **options)


def batch(width=64):
    return torch.randn(16, width)


@contextlib.contextmanager
def silence(kind=Warning):
    """Fails at any warning of the kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", kind)
        yield


def step(model, *args):
    model(*(args or (batch(),))).square().sum().backward()


@contextlib.contextmanager
def said_once(text):
    """One warning, for the line that calls; the second step is silent."""
    with pytest.warns(Fp8Warning, match=text) as said:
        yield said
    assert [w.filename for w in said] == [__file__]


# -- what is said once


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_rule_that_matches_nothing_is_said_once_when_the_first_backward_ends(recipe, by_name):
    options = {"recipe": recipe, "rules": {"3": None, "0:grad_weight": None, "0.*": None}}
    named = {**options, "backend": "aot_eager", "strict": False}
    model = torch.compile(mlp(), backend="fp8pass", options=named) if by_name else make(**options)
    with silence():
        with torch.no_grad():
            model(batch())
        out = model(batch())
    with said_once(rf"^Sequential: .*'3' {NO_GEMM}") as said:
        out.sum().backward()
    assert "'0.*'" in str(said[0].message)
    assert "'0:grad_weight'" not in str(said[0].message)
    with silence():
        for _ in range(3):
            step(model)


def test_the_second_of_two_compiled_models_says_it_too_and_a_rule_behind_another_one_with_the_reason():
    for _ in range(2):
        with said_once(NO_GEMM):
            step(make(rules={"nowhere": None}))
    with said_once(r"The rule '0' decides nothing: its GEMMs match '\*' first"):
        step(make(rules={"*": "current", "0": None}))


def test_a_backward_that_failed_or_that_compiled_autograd_traced_was_not_the_first():
    def fail(gradient):
        raise ValueError("no")

    model, traced = make(rules={"nowhere": None}), make(rules={"nowhere": None})
    x = batch().requires_grad_()
    x.register_hook(fail)
    with silence(), pytest.raises(ValueError, match="no"):
        model(x).sum().backward()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        step(traced)
    for compiled in (model, traced):
        with said_once(NO_GEMM):
            step(compiled)


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_under_checkpointing_are_asked_when_all_have_run(reentrant):
    model = deep(use_reentrant=reentrant)
    model.layers = nn.ModuleList(make(layer, rules={"0:grad_weight": None, "2": "current"}) for layer in model.layers)
    with silence():
        for _ in range(3):
            step(model, batch().requires_grad_())


HEAD = r"NanoGPT: lm_head looks like the output embedding.*rules=\{'lm_head': None\}"


@each(
    "model, options, text",
    [
        (mlp(8, 16, 8), {}, r"no GEMM runs in FP8: .*thin \(5\)"),
        (mlp().double(), {}, r"no GEMM runs in FP8: .*dtype \(5\)"),
        (mlp(), {"rules": {"*": None}}, r"no GEMM runs in FP8: .*rule \(5\)"),
        (nn.Sequential(nn.LayerNorm(64)), {}, "no GEMM runs in FP8: .*no matrix multiplication"),
        (NanoGPT(), {"select": "all"}, HEAD),
        (NanoGPT(), {"rules": {"*": "current"}}, HEAD),
        (NanoGPT(), {"rules": {"*:output": "current"}}, HEAD),
    ],
)
def test_no_gemm_in_fp8_and_a_head_in_fp8_are_said_once_with_the_reasons_or_the_rules_that_answer(model, options, text):
    weight = next(model.parameters())
    x = sentence() if isinstance(model, NanoGPT) else torch.randn(16, weight.shape[-1], dtype=weight.dtype)
    compiled = make(model, **options)
    with said_once(text):
        compiled(x)
    with silence():
        step(compiled, x)


def test_a_batch_without_rows_says_nothing_and_the_next_one_does():
    model = make(strict=True, rules={"0": "blockwise", "2": None})
    step(model, batch()[:0])
    assert not any(g.quantized for g in inspect(model).gemms)
    step(model, batch())
    assert {g.module for g in inspect(model).gemms if g.quantized} == {"0"}
    model = make(mlp(16, 16, 16), strict=True)
    step(model, batch(16)[:0])
    with pytest.raises(StrictError, match="no GEMM runs in FP8"):
        model(batch(16))


def test_inference_says_it_too_and_a_function_is_called_one():
    function = fp8_compile(lambda x, w: x @ w, "current", backend="aot_eager", rules={"*": None})
    with torch.no_grad(), said_once("the compiled function: no GEMM runs in FP8"):
        function(batch(), torch.randn(64, 64))


@each("options", [{}, {"rules": {"lm_head": "current"}}, {"rules": {"*head": "current"}}, {"rules": {"lm_head": None}}])
def test_a_head_that_is_decided_about_is_not(options):
    with silence():
        step(make(NanoGPT(), strict=True, **options), sentence())


# -- strict


@each(
    "model, args, options, text",
    [
        (mlp, (batch(),), {"rules": {"nowhere": None}}, NO_GEMM),
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


def test_strict_refuses_an_eager_run_and_a_replaced_call_and_lets_everything_else_pass():
    compiled, model = make(strict=True), make(mlp(), strict=True, in_place=True)
    for _ in range(2):
        with torch.compiler.set_stance("force_eager"), pytest.raises(StrictError, match="fell back to eager"):
            compiled(batch())
    step(compiled)
    model.compile(backend="eager")
    for _ in range(2):
        with pytest.raises(StrictError, match=r"model\.compile\(\) was called"):
            model(batch())
    with silence():
        model = make(recipe=RECIPE, strict=True, rules={"2:grad_weight": None})
        for _ in range(2):
            step(model)


def test_the_fallback_warning_names_several_models_and_the_reset():
    first, second = (make(dynamic=False) for _ in range(2))
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (16, 32):
            first(torch.randn(rows, 64))
        with pytest.warns(Fp8FallbackWarning, match=r"[Ss]everal models in one process.*torch\._dynamo\.reset\(\)"):
            second(torch.randn(48, 64))
        torch._dynamo.reset()
        with silence():
            second(torch.randn(48, 64))


# -- model.compile() after in_place


def test_compiling_a_model_again_says_that_fp8_is_gone_and_the_way_back_works():
    model, x = make(recipe=RECIPE, in_place=True), batch()
    step(model)
    model.compile(backend="eager")
    with said_once(r"Sequential was compiled with fp8_compile.*model\.compile\(\) was called"):
        out = model(x)
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
    model._compiled_call_impl = None
    with silence():
        step(make(model, RECIPE, in_place=True))
    assert all(g.quantized for g in inspect(model).gemms)
    fp8_uncompile(model)
    assert not {"forward", "compile", "_compiled_call_impl"} & set(model.__dict__)
    with pytest.raises(NotCompiledError, match="not compiled in place"):
        fp8_uncompile(model)


def test_a_call_set_by_hand_and_another_backend_by_our_name_are_inspected_as_what_they_are():
    model = make(in_place=True)
    model._compiled_call_impl = torch.compile(model._call_impl, backend="eager")  # before the first call
    with pytest.raises(NotCompiledError, match="took the place of FP8"):
        inspect(model)
    model = make(deep(), RECIPE, in_place=True)
    model.compile(backend="fp8pass", options={"recipe": "current", "backend": "aot_eager"})
    with pytest.warns(Fp8Warning, match="without the recipe, rules and state"):
        step(model)
    assert {g.recipe for g in inspect(model).gemms} == {"current"}


def test_copies_of_both_compile_as_any_model_does():
    model = make(in_place=True)
    twins = [copy.deepcopy(model)]
    twins[0].compile(backend="eager")
    step(model)
    assert inspect(model).gemms
    model.compile(backend="eager")
    with silence():
        for twin in (*twins, copy.copy(model), copy.deepcopy(model)):
            twin(batch())


class Keras(nn.Sequential):
    """`compile` means something else here."""

    def compile(self, optimizer):
        self.optimizer = optimizer


def test_a_compile_of_the_models_own_replaces_nothing_and_forward_is_named_where_nothing_ran():
    model = make(Keras(nn.Linear(64, 64)), in_place=True)
    model.compile("adam")
    assert model.optimizer == "adam"
    model.forward(batch())
    assert re.search(r"call model\(x\): model\.forward\(x\) runs\s+eagerly", str(inspect(model)))
    with silence():
        step(model)
    assert inspect(model).gemms
    assert not any("model.forward" in str(inspect(other)) for other in (model, make()))


# -- load_state_dict


@pytest.mark.parametrize("has_run", [False, True])
def test_an_empty_state_is_refused_under_a_recipe_with_state(has_run):
    model = make(recipe=RECIPE)
    if has_run:
        step(model)
    before = state(model).state_dict()
    for empty in ({}, {"recorded": torch.tensor(True)}):
        with pytest.raises(CheckpointMismatchError, match=r"the state_dict is empty.*do not call load_state_dict"):
            state(model).load_state_dict(empty)
    assert same(state(model).state_dict(), before)
    state(make(recipe="current")).load_state_dict({})
    assert before, "also of a model before its first call"
    state(make(recipe=RECIPE)).load_state_dict(before)


# -- blocks compiled one by one


def blocks(in_place=True, **options):
    torch.manual_seed(0)
    model = deep()
    for i, layer in enumerate(model.layers):
        model.layers[i] = make(layer, RECIPE, in_place=in_place, **options)
    return model


@pytest.mark.parametrize("in_place", [True, False])
def test_blocks_have_one_table_and_one_state(in_place):
    whole, model, x = make(deep(), RECIPE), blocks(in_place), batch()
    for _ in range(3):
        step(model, x)
        step(whole, x)
    found, wanted = ({(g.module, g.role, g.quantized) for g in inspect(m).gemms} for m in (model, whole))
    assert found >= wanted
    assert "layers.0-2.0 (x3)" in str(inspect(model))
    assert "layers.0-2.2 (x3)" in str(inspect(model))
    assert inspect(model).outside == []
    assert len(inspect(model).graphs) <= 2  # layers with equal code share one, but the first, whose input wants no gradient
    ours, theirs = state(model), state(whole)
    assert set(ours.tensors) >= set(theirs.tensors)
    for read in ("scale", "amax_history"):
        assert same([getattr(ours, read)(n) for n in theirs.tensors], [getattr(theirs, read)(n) for n in theirs.tensors])
    assert ours.num_non_finite() == 0


def test_the_state_of_blocks_is_saved_and_loaded_as_one_or_not_at_all():
    (model, twin, late), x = (blocks() for _ in range(3)), batch()
    for _ in range(2):
        step(model, x)
    saved = state(model).state_dict()
    assert saved["num_tensors"] == len(state(model).tensors)
    assert all(key.startswith("layers.") for key in saved if ":" in key)
    step(twin, x)
    for other in (twin, late):  # after and before the first call
        state(other).load_state_dict(saved)
    assert same([twin(x), late(x)], [model(x)] * 2)
    assert collect_state(model).keys() == saved.keys()
    state(make(deep(), RECIPE)).load_state_dict(saved)  # a state of the whole model has the same names
    before = state(model).state_dict()
    lacking = {k: v * 2 if k.endswith(".scale") else v for k, v in before.items() if not k.startswith("layers.2.0:weight")}
    for saved, message in (
        (lacking, r"layers\.2: .*missing from the checkpoint: 0:weight"),
        ({key.replace("layers.1", "layers.7"): v for key, v in before.items()}, r"no compiled part of it has layers\.7"),
        ({}, "the state_dict is empty"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            state(model).load_state_dict(saved)
    assert same(state(model).state_dict(), before)


def test_a_block_that_recorded_nothing_ends_no_step():
    model, twin = blocks(), blocks()
    step(model)
    state(model).step()
    model.layers[0](batch())
    state(twin).load_state_dict(state(model).state_dict())
    for part in (model, twin):
        state(part).step()
    assert same(*([state(part).amax_history(name) for name in state(model).tensors] for part in (model, twin)))


def test_a_linear_compiled_by_itself_has_its_own_path_and_rules_are_unmatched_where_no_block_matches_them():
    model = deep()
    for layer in model.layers:
        make(layer[0], RECIPE, in_place=True)
    step(model)
    assert {g.module for g in inspect(model).gemms} == {f"layers.{i}.0" for i in range(3)}
    assert inspect(model).outside == [f"layers.{i}.2" for i in range(3)]
    assert state(model).scale("layers.1.0:weight") > 0
    state(model).load_state_dict(state(model).state_dict())
    model = blocks(rules={"0:grad_weight": None, "nowhere": None})
    with pytest.warns(Fp8Warning, match=f"'nowhere' {NO_GEMM}"):
        step(model)
    assert inspect(model).unmatched_rules == ["nowhere"]
    assert str(inspect(model)).count("'nowhere'") == 1


def test_parts_that_are_compiled_again_are_named_and_nothing_compiled_is_an_error():
    model = blocks()
    model.layers[1].compile(backend="eager")
    each_of_them = r"not compiled in place itself: layers\.0, layers\.2 are; call fp8_uncompile on each"
    for ask, asked, message in (
        (inspect, model, r"layers\.1: Sequential was compiled .*model\.compile\(\) was called"),
        (state, deep(), "did not come from fp8_compile"),
        (inspect, torch.relu, "did not come from fp8_compile"),
        (fp8_uncompile, model, each_of_them),
        (fp8_uncompile, make(), "does not change the model"),
    ):
        with pytest.raises(NotCompiledError, match=message):
            ask(asked)


def test_layers_that_nothing_tells_apart_are_said_once(monkeypatch):
    """Rules with their paths do not apply, and they share histories."""
    monkeypatch.setattr("fp8pass.runtime.dynamo_graphs._modules_at", lambda *frame: ())
    compiled, strict = (make(BrokenLayers(2), RECIPE, rules={"layers.0.up": None}, strict=strict) for strict in (False, True))

    def run(model):
        weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        functional_call(model, weights, batch()).square().sum().backward()

    message = "the places of down, up in the model are not known"
    with pytest.warns(Fp8Warning, match=message):
        run(compiled)
    with silence(Fp8Warning):
        run(compiled)
    with pytest.raises(StrictError, match=message):
        run(strict)
