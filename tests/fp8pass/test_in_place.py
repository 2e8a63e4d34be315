"""`fp8_compile(model, in_place=True)`: the model itself is compiled, and stays what it was."""

import copy
import inspect as python_inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fp8pass import DelayedScaling, fp8_compile, fp8_uncompile, inspect, state
from fp8pass.errors import NotCompiledError, OptionError
from fp8pass.runtime.wrap import session_of
from fp8pass.weights import released
from tests.support.models import mlp

RECIPE = DelayedScaling(amax_history_len=4)


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x, scale: float = 1.0):
        return self.down(torch.relu(self.up(x))) * scale


def make(recipe=RECIPE, model=None, **options):
    torch.manual_seed(0)
    return fp8_compile(model or Block(), recipe, backend="aot_eager", in_place=True, **options)


def step(model, x):
    out = model(x)
    out.square().sum().backward()
    return out.detach()


def test_the_model_stays_what_it_was_and_computes_what_a_compiled_one_does():
    model = Block()
    before = (list(model.state_dict()), python_inspect.signature(model.forward), repr(model))
    beside = fp8_compile(copy.deepcopy(model), RECIPE, backend="aot_eager")
    assert fp8_compile(model, RECIPE, backend="aot_eager", in_place=True) is model
    assert type(model) is Block
    assert (list(model.state_dict()), python_inspect.signature(model.forward), repr(model)) == before
    assert model.forward.__self__ is model
    for _ in range(3):
        x = torch.randn(16, 32)
        assert step(model, x).equal(step(beside, x))
    assert [g for g in inspect(model).gemms if g.quantized] == [g for g in inspect(beside).gemms if g.quantized]
    assert all(g.quantized for g in inspect(model).gemms if g.module == "up")
    assert state(model).tensors == state(beside).tensors
    assert all(state(model).scale(n).equal(state(beside).scale(n)) for n in state(model).tensors)
    assert model(x, scale=0.0).abs().max() == 0


def test_a_sequential_whose_forward_is_torchs_own_is_compiled_too():
    model = make(model=mlp())
    step(model, torch.randn(16, 64))
    assert {g.module for g in inspect(model).gemms if g.quantized}


def test_hooks_run_once_per_call():
    model, seen = make(), []
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.register_forward_hook(lambda module, args, output: seen.append("after"))
    step(model, torch.randn(16, 32))
    assert seen == ["before", "after"]
    assert any(g.quantized for g in inspect(model).gemms)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: reload(m)],
    ids=["deepcopy", "copy", "pickle", "save"],
)
def test_a_copy_is_the_uncompiled_model(duplicate):
    model = make()
    x = torch.randn(16, 32)
    step(model, x)
    twin = duplicate(model)
    assert type(twin) is Block
    assert duplicate is copy.copy or twin.forward.__self__ is twin  # a shallow copy shares all that the model holds
    with pytest.raises(NotCompiledError):
        state(twin)
    with torch.no_grad():
        assert twin(x).equal(Block.forward(twin, x))
    assert state(model).tensors
    assert not state(fp8_compile(twin, RECIPE, in_place=True)).tensors


def reload(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


class OwnState(Block):
    """Copies and pickles everything that it has."""

    def __getstate__(self):
        return dict(self.__dict__)


def test_a_model_with_a_getstate_of_its_own_has_uncompiled_copies_too():
    model = make(model=OwnState())
    x = torch.randn(16, 32)
    step(model, x)
    twin = copy.deepcopy(model)
    twin.up.weight.data.zero_()
    assert twin(x).equal(Block.forward(twin, x))


def test_twice_is_an_error_and_there_is_a_way_back():
    model = make()
    x = torch.randn(16, 32)
    step(model, x)
    for in_place in (True, False):
        with pytest.raises(OptionError, match=r"compiled in place already; call fp8_uncompile\(model\)"):
            fp8_compile(model, RECIPE, in_place=in_place)
    fp8_uncompile(model)
    assert not {"forward", "_compiled_call_impl"} & set(model.__dict__)
    assert model(x).equal(Block.forward(model, x))
    with pytest.raises(NotCompiledError, match="not compiled in place"):
        fp8_uncompile(model)
    with pytest.raises(NotCompiledError, match="does not change the model"):
        fp8_uncompile(fp8_compile(Block(), RECIPE))
    assert fp8_compile(model, "current", backend="aot_eager", in_place=True) is model
    step(model, x)
    assert {g.recipe for g in inspect(model).gemms if g.quantized} == {"current"}


def test_what_cannot_be_compiled_in_place():
    with pytest.raises(OptionError, match=r"in_place=True compiles an nn\.Module"):
        fp8_compile(torch.relu, RECIPE, in_place=True)
    with pytest.raises(OptionError, match="in_place is 'yes'"):
        fp8_compile(Block(), RECIPE, in_place="yes")
    plain = Block()
    plain.compile(backend="aot_eager")
    with pytest.raises(OptionError, match=r"model.compile\(\) was called"):
        fp8_compile(plain, RECIPE, in_place=True)


def test_equal_layers_compile_once():
    before = counters["stats"]["unique_graphs"]
    layers = [make(model=Block()) for _ in range(12)]
    for i, layer in enumerate(layers):
        layer.up.weight.data *= i + 1
        step(layer, torch.randn(16, 32))
    assert counters["stats"]["unique_graphs"] == before + 1
    assert all(state(layer).amax_history("up:weight")[0] == layer.up.weight.abs().max() for layer in layers)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


@pytest.mark.parametrize("around", [lambda m: m, Around], ids=["itself", "a wrapper"])
@pytest.mark.parametrize("inner", [Block, lambda: mlp(32, 64, 32)], ids=["a module", "a sequential"])
def test_a_torch_compile_around_the_model_keeps_its_fp8(around, inner):
    model = make(model=inner())
    outer = torch.compile(around(model), backend="aot_eager")
    for _ in range(2):
        step(outer, torch.randn(16, 32))
    assert any(g.quantized for g in inspect(model).gemms)


def test_a_call_that_could_not_begin_is_over(monkeypatch):
    """Else Parameters without values would stay as in a call, in which torch may write to memory that they do not have."""
    model = fp8_compile(mlp(), "current", backend="aot_eager", in_place=True)
    model(torch.randn(16, 64))
    session = session_of(model)

    def fail(is_part):
        raise KeyboardInterrupt

    monkeypatch.setattr(session.eager, "begin", fail)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(16, 64))
    assert session.clock.is_outermost()
    assert released._num_calls == 0
