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

from fp8pass import DelayedScaling, Float8CurrentScaling, fp8_compile, inspect, state
from fp8pass.errors import Fp8FallbackWarning, NotCompiledError, OptionError, RecipeError, RuleError
from fp8pass.options import NAMES, CompileOptions
from fp8pass.runtime import named_backend
from fp8pass.runtime.wrap import session_of
from tests.support.backend import register_backend
from tests.support.models import BrokenBlock, ResidualMlp

RECIPE = DelayedScaling(amax_history_len=4)
OPTIONS = {"recipe": RECIPE, "backend": "aot_eager"}


@pytest.fixture(autouse=True)
def registered():
    register_backend()


def compiled(model=None, options=None, **torch_options):
    torch.manual_seed(0)
    return torch.compile(
        model or ResidualMlp(), backend="fp8pass", options=OPTIONS if options is None else options, **torch_options
    )


def step(model, x):
    out = model(x)
    out.square().sum().backward()
    return out.detach()


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


def test_the_state_is_there_before_the_first_call():
    first = compiled()
    x = torch.randn(16, 64)
    for _ in range(2):
        step(first, x)
    second = compiled(copy.deepcopy(first._orig_mod))
    assert "Nothing is compiled yet" in str(inspect(second))
    state(second).load_state_dict(state(first).state_dict())
    assert step(second, x).equal(step(first, x))
    assert num_steps(second) == 2  # the loading, and the boundary that was due


def test_a_step_ends_at_a_forward_with_gradients_after_a_backward():
    model = compiled(BrokenBlock(64, 96))
    x = torch.randn(16, 64)
    (model(x).sum() + model(x * 2).sum()).backward()
    assert num_steps(model) == 0
    with torch.no_grad():
        model(x * 100)
    assert num_steps(model) == 0
    out = model(x)
    assert num_steps(model) == 1
    assert state(model).amax_history("up:input")[-1] == 2 * x.abs().max()
    model(x)  # no backward came between
    assert num_steps(model) == 1
    out.sum().backward()
    out.sum().grad_fn  # noqa: B018
    model(x)
    assert num_steps(model) == 2


def test_manual_steps_are_the_users():
    model = compiled(options={**OPTIONS, "step": "manual"})
    x = torch.randn(16, 64)
    for _ in range(3):
        step(model, x)
    assert num_steps(model) == 0
    state(model).step()
    assert num_steps(model) == 1


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_around_the_model_ends_one_step_per_training_step(use_reentrant):
    model = compiled()
    for i in range(3):
        x = torch.randn(16, 64, requires_grad=True)
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
        assert num_steps(model) == i


def test_a_function_and_a_method():
    layer = nn.Linear(64, 64)

    @torch.compile(backend="fp8pass", options=OPTIONS)
    def function(x):
        return torch.relu(layer(x))

    model = ResidualMlp()
    method = torch.compile(model.forward, backend="fp8pass", options=OPTIONS)
    for named, tensors in ((function, "layer:input"), (method, "up:input")):
        for _ in range(2):
            step(named, torch.randn(16, 64))
        assert tensors in state(named).tensors
        assert num_steps(named) == 1
        assert any(g.quantized for g in inspect(named).gemms)


def test_the_default_recipe_and_the_mode():
    model = compiled(options={}, mode=None)
    assert named_backend.named_session(model).rules.default == DelayedScaling()
    model = torch.compile(ResidualMlp(), backend="fp8pass", mode="max-autotune-no-cudagraphs")
    assert named_backend.named_session(model).options.patches["max_autotune"] is True
    model = torch.compile(
        ResidualMlp(), backend="fp8pass", options={"recipe": "current", "options": {"epilogue_fusion": False}}
    )
    assert named_backend.named_session(model).options.patches == {"epilogue_fusion": False}


def test_rules_and_other_arguments_of_fp8_compile():
    model = compiled(options={**OPTIONS, "rules": {"down": None}, "select": "all", "weight_copies": "save"})
    step(model, torch.randn(16, 64))
    assert {g.module for g in inspect(model).gemms if g.quantized} == {"up"}
    current = compiled(options={"recipe": Float8CurrentScaling(), "backend": "aot_eager"})
    step(current, torch.randn(16, 64))
    assert {g.recipe for g in inspect(current).gemms if g.quantized} == {"current"}


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
        ({"in_place": True}, OptionError, "'in_place'=True is an argument of fp8_compile"),
    ],
)
def test_bad_options_name_the_value_and_the_fix(options, error, message):
    model = compiled(options=options)
    with pytest.raises(error, match=message):
        state(model)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message) as raised:
        model(torch.randn(16, 64))
    assert isinstance(raised.value.inner_exception, error)


def test_options_are_the_arguments_of_fp8_compile_with_their_defaults():
    given = inspect_module.signature(fp8_compile).parameters
    ours = inspect_module.signature(CompileOptions).parameters
    assert set(given) - set(ours) == {"model", "fullgraph", "in_place"}
    assert {name: p.default for name, p in ours.items()} == {name: given[name].default for name in ours}
    assert set(NAMES) == set(ours) - {"dynamic"}
    assert {p.kind for p in ours.values()} == {inspect_module.Parameter.KEYWORD_ONLY}


def test_other_backends_have_no_session():
    for other in (
        torch.compile(ResidualMlp(), backend="aot_eager"),
        torch.compile(torch.relu, backend="eager"),
        ResidualMlp(),
        3,
    ):
        with pytest.raises(NotCompiledError, match="backend='fp8pass'"):
            state(other)


def test_eager_runs_are_reported():
    model = compiled()
    x = torch.randn(16, 64)
    step(model, x)
    with torch._dynamo.config.patch(recompile_limit=1), pytest.warns(Fp8FallbackWarning, match="recompile limit"):
        step(model, torch.randn(8, 64))


def test_that_the_state_is_not_saved_is_said_once(caplog):
    named_backend._say_that_the_state_is_not_saved.cache_clear()
    with caplog.at_level(logging.WARNING, logger="fp8pass"):
        for options in ({"recipe": "current", "backend": "aot_eager"}, OPTIONS, OPTIONS):
            torch._dynamo.reset()
            step(compiled(options=options), torch.randn(16, 64))
    said = [r.getMessage() for r in caplog.records if r.name == "fp8pass.runtime.named_backend"]
    assert len(said) == 1
    assert "state(compiled).state_dict()" in said[0]


def test_prepared_parts_share_one_session():
    model = nn.Sequential(ResidualMlp(), ResidualMlp())
    named_backend.prepare(model, **OPTIONS, rules={"1.down": None})
    for block in model:
        block.compile(backend="fp8pass")
    for _ in range(2):
        step(model, torch.randn(16, 64))
    assert {g.module for g in inspect(model).gemms if g.quantized} == {"0.up", "0.down", "1.up"}
    assert num_steps(model) == 1
    with pytest.raises(OptionError, match="give them in one place"):
        inspect(torch.compile(model[0], backend="fp8pass", options=OPTIONS))
