"""`torch.compile(model, backend="fp8pass")`: the session of a model without our wrapper, its steps, its options."""

import copy
import importlib.metadata
import inspect as inspect_module
import pathlib
import tomllib

import pytest
import torch

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.errors import OptionError
from fp8pass.options import NAMES, CompileOptions
from fp8pass.runtime import named_backend
from fp8pass.runtime.wrap import session_of
from tests.support.models import BrokenBlock, ResidualMlp
from tests.support.training import train

RECIPE = DelayedScaling(amax_history_len=4)
OPTIONS = {"recipe": RECIPE, "backend": "aot_eager"}


def compiled(model=None, /, mode=None, **options):
    torch.manual_seed(0)
    return torch.compile(model or ResidualMlp(), backend="fp8pass", options={**OPTIONS, **options}, mode=mode)


def x():
    return torch.randn(16, 64)


def num_steps(model):
    """Step boundaries so far."""
    (store,) = (session_of(model) or named_backend.named_session(model)).stores
    return store.version


def test_the_entry_point_names_the_backend():
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    entry = importlib.metadata.EntryPoint("fp8pass", project["entry-points"]["torch_dynamo_backends"]["fp8pass"], "")
    assert entry.load() is named_backend.fp8pass_backend


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
    for _ in range(2):  # no backward comes between
        model(given)
        assert num_steps(model) == 1
    assert state(model).amax_history("up:input")[-1] == 2 * given.abs().max()


# -- options


def test_defaults_modes_rules_and_options_are_those_of_fp8_compile():
    assert named_backend.named_session(torch.compile(ResidualMlp(), backend="fp8pass")).rules.default == DelayedScaling()
    for options, patches in (
        ({"mode": "max-autotune-no-cudagraphs"}, {"max_autotune": True}),
        ({"options": {"recipe": "current", "options": {"epilogue_fusion": False}}}, {"epilogue_fusion": False}),
    ):
        model = torch.compile(ResidualMlp(), backend="fp8pass", **options)
        assert named_backend.named_session(model).options.patches.items() >= patches.items()
    given = inspect_module.signature(fp8_compile).parameters
    ours = inspect_module.signature(CompileOptions).parameters
    assert set(given) - set(ours) == {"model", "fullgraph", "in_place"}
    assert {name: p.default for name, p in ours.items()} == {name: given[name].default for name in ours}
    assert set(NAMES) == set(ours) - {"dynamic"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipes": "delayed"}, r"'recipes'='delayed'.*Did you mean 'recipe'\?"),
        ({"dynamic": True}, "an argument of torch.compile itself"),
        ({"max_autotune": True}, r"an option of Inductor; write options={'options': {'max_autotune': ...}}"),
        *((3, "options is 3, a int; use a dict such as"), ({"release_frozen": True}, "use fp8_compile.*in_place=True")),
        ({"in_place": True}, r"'in_place'=True is an argument of fp8_compile.*in_place=True"),
    ],
)
def test_bad_options_name_the_value_and_the_fix(options, message):
    model = torch.compile(ResidualMlp(), backend="fp8pass", options=options)
    with pytest.raises(OptionError, match=message):
        state(model)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        model(x())
