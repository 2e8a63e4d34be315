"""`torch.compile(model, backend="fp8pass")`: the session of a model without our wrapper, its steps, its options."""

import copy
import importlib.metadata
import inspect as inspect_module
import logging
import pathlib
import tomllib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import NotCompiledError, OptionError, RecipeError, RuleError
from fp8pass.options import NAMES, CompileOptions
from fp8pass.runtime import named_backend
from fp8pass.runtime.wrap import session_of
from tests.support.backend import register_backend
from tests.support.models import BrokenBlock, ResidualMlp
from tests.support.training import train

RECIPE = DelayedScaling(amax_history_len=4)
OPTIONS = {"recipe": RECIPE, "backend": "aot_eager"}


@pytest.fixture(autouse=True)
def registered():
    register_backend()


def compiled(model=None, /, mode=None, **options):
    torch.manual_seed(0)
    return torch.compile(model or ResidualMlp(), backend="fp8pass", options={**OPTIONS, **options}, mode=mode)


def x(rows=16):
    return torch.randn(rows, 64)


def num_steps(model):
    """Step boundaries so far."""
    (store,) = (session_of(model) or named_backend.named_session(model)).stores
    return store.version


def test_the_entry_point_names_the_backend():
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    entry = importlib.metadata.EntryPoint("fp8pass", project["entry-points"]["torch_dynamo_backends"]["fp8pass"], "")
    found = [e for e in importlib.metadata.entry_points(group="torch_dynamo_backends") if e.name == "fp8pass"]
    for each in (entry, *found):  # none is found where the package is only on the path
        assert each.load() is named_backend.fp8pass_backend


# -- steps


def test_the_state_is_there_before_the_first_call():
    first, given = compiled(), x()
    train(first, given, given)
    second = compiled(copy.deepcopy(first._orig_mod))
    assert "Nothing is compiled yet" in str(inspect(second))
    state(second).load_state_dict(state(first).state_dict())
    assert second(given).equal(first(given))
    assert num_steps(second) == 2  # the loading, and the boundary that was due


def test_a_step_ends_at_a_forward_with_gradients_after_a_backward():
    model, given = compiled(BrokenBlock(64, 96)), x()
    (model(given).sum() + model(given * 2).sum()).backward()
    with torch.no_grad():
        model(given * 100)
    assert num_steps(model) == 0
    out = model(given)
    assert num_steps(model) == 1
    assert state(model).amax_history("up:input")[-1] == 2 * given.abs().max()
    model(given)  # no backward came between
    assert num_steps(model) == 1
    out.sum().backward()
    model(given)
    assert num_steps(model) == 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_around_the_model_ends_one_step_per_training_step(use_reentrant):
    model = compiled()
    for i in range(3):
        train(lambda given: checkpoint(model, given, use_reentrant=use_reentrant), x().requires_grad_())
        assert num_steps(model) == i


def test_a_function_and_a_method_with_manual_steps():
    layer = nn.Linear(64, 64)

    def function(x):
        return torch.relu(layer(x))

    function, method = compiled(function), compiled(ResidualMlp().forward, step="manual")
    for named, tensor, steps in ((function, "layer:input", 1), (method, "up:input", 0)):
        train(named, x(), x())
        assert tensor in state(named).tensors
        assert num_steps(named) == steps
        state(named).step()
        assert num_steps(named) == steps + 1
        assert any(g.quantized for g in inspect(named).gemms)


def test_prepared_parts_share_one_session():
    model = nn.Sequential(ResidualMlp(), ResidualMlp())
    named_backend.prepare(model, **OPTIONS, rules={"1.down": None})
    for block in model:
        block.compile(backend="fp8pass")
    train(model, x(), x())
    assert {g.module for g in inspect(model).gemms if g.quantized} == {"0.up", "0.down", "1.up"}
    assert num_steps(model) == 1
    with pytest.raises(OptionError, match="give them in one place"):
        inspect(compiled(model[0]))


# -- options


def test_defaults_modes_rules_and_options_are_those_of_fp8_compile():
    assert named_backend.named_session(torch.compile(ResidualMlp(), backend="fp8pass")).rules.default == DelayedScaling()
    for options, patches in (
        ({"mode": "max-autotune-no-cudagraphs"}, {"max_autotune": True}),
        ({"options": {"recipe": "current", "options": {"epilogue_fusion": False}}}, {"epilogue_fusion": False}),
    ):
        model = torch.compile(ResidualMlp(), backend="fp8pass", **options)
        assert named_backend.named_session(model).options.patches.items() >= patches.items()
    for options, modules, recipe in (
        ({"rules": {"down": None}, "select": "all", "weight_copies": "save"}, {"up"}, "delayed"),
        ({"recipe": "current"}, {"up", "down"}, "current"),
    ):
        model = compiled(**options)
        train(model, x())
        assert {(g.module, g.recipe) for g in inspect(model).gemms if g.quantized} == {(m, recipe) for m in modules}
    given = inspect_module.signature(fp8_compile).parameters
    ours = inspect_module.signature(CompileOptions).parameters
    assert set(given) - set(ours) == {"model", "fullgraph", "in_place"}
    assert {name: p.default for name, p in ours.items()} == {name: given[name].default for name in ours}
    assert set(NAMES) == set(ours) - {"dynamic"}
    assert {p.kind for p in ours.values()} == {inspect_module.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recipes": "delayed"}, OptionError, r"'recipes'='delayed'.*Did you mean 'recipe'\?"),
        ({"recipe": "delaid"}, RecipeError, r"no recipe is called 'delaid'. Did you mean 'delayed'\?"),
        ({"rules": {"up:outputs": None}}, RuleError, "Did you mean 'output'"),
        ({"dynamic": True}, OptionError, "an argument of torch.compile itself"),
        ({"max_autotune": True}, OptionError, r"an option of Inductor; write options={'options': {'max_autotune': ...}}"),
        ({"step": "automatic"}, OptionError, "Did you mean 'auto'"),
        ({"min_speedup": -1}, OptionError, "min_speedup is -1"),
        ({"in_place": True}, OptionError, r"'in_place'=True is an argument of fp8_compile.*in_place=True"),
    ],
)
def test_bad_options_name_the_value_and_the_fix(options, error, message):
    model = torch.compile(ResidualMlp(), backend="fp8pass", options=options)
    with pytest.raises(error, match=message):
        state(model)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message) as raised:
        model(x())
    assert isinstance(raised.value.inner_exception, error)


# -- what is said


def test_other_backends_have_no_session():
    others = (torch.compile(ResidualMlp(), backend="aot_eager"), torch.compile(torch.relu, backend="eager"), ResidualMlp(), 3)
    for other in others:
        with pytest.raises(NotCompiledError, match="backend='fp8pass'"):
            state(other)


def test_that_the_state_is_not_saved_is_said_once(caplog):
    named_backend._say_that_the_state_is_not_saved.cache_clear()
    with caplog.at_level(logging.WARNING, logger="fp8pass"):
        for recipe in ("current", RECIPE, RECIPE):
            torch._dynamo.reset()
            train(compiled(recipe=recipe), x())
    (said,) = [r.getMessage() for r in caplog.records if r.name == "fp8pass.runtime.named_backend"]
    assert "state(compiled).state_dict()" in said
