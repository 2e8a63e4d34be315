"""Nothing is lost silently: what a compiled model warns of, when, how often, and what `strict=True` makes of it."""

import contextlib
import warnings

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, fp8_uncompile, inspect, state
from fp8pass.errors import CheckpointMismatchError, Fp8Error, Fp8Warning, NotCompiledError, OptionError, StrictError
from fp8pass.integrations.saved import collect_state
from tests.support.models import Stack, mlp
from tests.support.selection import NanoGPT, sentence
from tests.support.training import same

RECIPE = DelayedScaling(amax_history_len=4)
NO_GEMM = "has matched no GEMM"


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


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


@contextlib.contextmanager
def said_once(text):
    """One warning, for the line that calls; the second step is silent."""
    with pytest.warns(Fp8Warning, match=text) as said:
        yield said
    assert [w.filename for w in said] == [__file__]


# -- what is said once, and an error under `strict`

HEAD = r"NanoGPT: lm_head looks like the output embedding.*rules=\{'lm_head': None\}"


@pytest.mark.parametrize(
    ("make_model", "options", "text"),
    [
        (mlp, {"rules": {"nowhere": None}}, rf"^Sequential: .*'nowhere' {NO_GEMM}"),
        (mlp, {"rules": {"*": "current", "0": None}}, r"The rule '0' decides nothing: its GEMMs match '\*' first"),
        (mlp, {"rules": {"*": None}}, r"no GEMM runs in FP8: .*rule \(5\)"),
        (lambda: nn.Sequential(nn.LayerNorm(64)), {}, "no GEMM runs in FP8: .*no matrix multiplication"),
        (NanoGPT, {"select": "all"}, HEAD),
        (NanoGPT, {"rules": {"*:output": "current"}}, HEAD),
    ],
)
def test_each_is_said_once_and_is_an_error_each_time_under_strict(make_model, options, text):
    x = sentence() if make_model is NanoGPT else batch()
    compiled, strict = make(make_model(), **options), make(make_model(), strict=True, **options)
    with said_once(text):
        step(compiled, x)
    with silence():
        step(compiled, x)
    for _ in range(2):
        with silence(), pytest.raises(StrictError, match=text) as error:
            step(strict, x)
        assert isinstance(error.value, Fp8Error)


def test_a_rule_that_matches_nothing_is_said_when_the_first_backward_ends():
    model = make(recipe="delayed", rules={"3": None, "0:grad_weight": None, "0.*": None})
    with silence():
        with torch.no_grad():
            model(batch())
        out = model(batch())
    with said_once(rf"'3' {NO_GEMM}") as said:
        out.sum().backward()
    assert "'0.*'" in str(said[0].message)
    assert "'0:grad_weight'" not in str(said[0].message)


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


def test_strict_refuses_an_eager_run_and_a_replaced_call():
    compiled, model = make(strict=True), make(mlp(), strict=True, in_place=True)
    with torch.compiler.set_stance("force_eager"), pytest.raises(StrictError, match="fell back to eager"):
        compiled(batch())
    step(compiled)
    model.compile(backend="eager")
    with pytest.raises(StrictError, match=r"model\.compile\(\) was called"):
        model(batch())


# -- model.compile() after in_place


def test_compiling_a_model_again_says_that_fp8_is_gone_and_the_way_back_works():
    model, x = make(recipe=RECIPE, in_place=True), batch()
    step(model)
    model.compile(backend="eager")
    with said_once(r"Sequential was compiled with fp8_compile.*model\.compile\(\) was called"):
        out = model(x)
    with torch.no_grad(), silence():
        assert out.equal(nn.Sequential.forward(model, x))
        model(x)
    for ask in (inspect, state, fp8_uncompile):
        with pytest.raises(NotCompiledError, match=r"model\.compile\(\) was called.*leave model\.compile\(\) out"):
            ask(model)
    with pytest.raises(OptionError, match=r"model\.compile\(\) was called"):
        make(model, in_place=True)
    model._compiled_call_impl = None
    with silence():
        step(make(model, RECIPE, in_place=True))
    assert all(g.quantized for g in inspect(model).gemms)


# -- blocks compiled one by one


def blocks():
    torch.manual_seed(0)
    return Stack(make(mlp(64, 96, 64), RECIPE, in_place=True) for _ in range(3))


def test_the_state_of_blocks_is_saved_and_loaded_as_one_or_not_at_all():
    (model, twin), x = (blocks() for _ in range(2)), batch()
    for _ in range(2):
        step(model, x)
    saved = state(model).state_dict()
    state(twin).load_state_dict(saved)
    assert same(twin(x), model(x))
    assert collect_state(model).keys() == saved.keys()
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
