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
from tests.support.models import Stack, mlp
from tests.support.training import fp8, train

RECIPE = DelayedScaling(amax_history_len=4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, scale: float = 1.0):
        return self.down(torch.relu(self.up(x))) * scale


class OwnState(Block):
    """Copies and pickles everything that it has."""

    def __getstate__(self):
        return dict(self.__dict__)


def make(model=None, recipe=RECIPE):
    return fp8(model or Block(), recipe, in_place=True)


def compiled(model):
    return torch.compile(model, backend="aot_eager")


def x(columns=32):
    return torch.randn(16, columns)


def test_the_model_stays_what_it_was_and_computes_what_a_compiled_one_does():
    model = Block()
    before = (list(model.state_dict()), python_inspect.signature(model.forward), repr(model))
    beside = fp8(copy.deepcopy(model), RECIPE)
    assert make(model) is model
    assert type(model) is Block
    assert (list(model.state_dict()), python_inspect.signature(model.forward), repr(model)) == before
    assert model.forward.__self__ is model
    for _ in range(3):
        given = x()
        assert train(model, given)[0].equal(train(beside, given)[0])
    assert [g for g in inspect(model).gemms if g.quantized] == [g for g in inspect(beside).gemms if g.quantized]
    assert all(g.quantized for g in inspect(model).gemms if g.module == "up")
    assert state(model).tensors == state(beside).tensors
    assert all(state(model).scale(n).equal(state(beside).scale(n)) for n in state(model).tensors)
    assert model(given, scale=0.0).abs().max() == 0


@pytest.mark.parametrize("around", [lambda m: m, compiled, lambda m: compiled(Stack([m]))], ids=["", "itself", "a wrapper"])
@pytest.mark.parametrize("inner", [Block, lambda: mlp(32, 64, 32)], ids=["a module", "torch's own forward"])
def test_hooks_run_once_per_call_and_a_torch_compile_around_the_model_keeps_its_fp8(inner, around):
    model, seen = make(inner()), []
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.register_forward_hook(lambda module, args, output: seen.append("after"))
    train(around(model), x(), x())
    assert seen == ["before", "after"] * 2
    assert any(g.quantized for g in inspect(model).gemms)


def reload(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


COPIES = [(copy.deepcopy, Block), (copy.copy, Block), (pickled, Block), (reload, Block), (copy.deepcopy, OwnState)]


@pytest.mark.parametrize(("duplicate", "kind"), COPIES)
def test_a_copy_is_the_uncompiled_model(duplicate, kind):
    model, given = make(kind()), x()
    train(model, given)
    twin = duplicate(model)
    assert type(twin) is kind
    assert twin.forward.__self__ is twin
    with pytest.raises(NotCompiledError):
        state(twin)
    with torch.no_grad():
        twin.up.weight.mul_(0.5)
        assert twin(given).equal(Block.forward(twin, given))
    assert state(model).tensors
    assert not state(fp8_compile(twin, RECIPE, in_place=True)).tensors


@pytest.mark.parametrize("has_run", [True, False])
def test_a_student_with_the_teachers_body_and_a_head_of_its_own_trains_that(has_run):
    """A shallow copy, whose forward and `compile` were the teacher's."""
    teacher, given = make(), x()
    if has_run:
        train(teacher, given)
        teacher.zero_grad()
    student = copy.copy(teacher)
    student._modules = {**teacher._modules, "down": nn.Linear(64, 32)}
    assert train(student, given)[0].equal(Block.forward(student, given))
    assert student.down.weight.grad is not None
    assert teacher.down.weight.grad is None
    student.compile(backend="aot_eager")
    assert student._compiled_call_impl is not None
    train(teacher, given)
    assert any(g.quantized for g in inspect(teacher).gemms)


def test_a_forward_that_its_class_exchanges_is_the_one_that_runs():
    class Doubled(Block):
        def forward(self, given):
            return 2 * Block.forward(self, given)

    class Patched(Block):
        pass

    models, given = [make(Block(), "current"), make(Patched(), "current")], x()
    before = [model(given) for model in models]
    models[0].__class__ = Doubled
    Patched.forward = Doubled.forward
    for model, once in zip(models, before, strict=True):
        assert model(given).equal(2 * once)
        assert any(g.quantized for g in inspect(model).gemms)
        fp8_uncompile(model)
        assert model.forward.__func__ is Doubled.forward
        assert not {"forward", "compile", "__getstate__"} & set(model.__dict__)


def test_what_is_an_error_and_that_there_is_a_way_back():
    model, given = make(), x()
    train(model, given)
    for in_place in (True, False):
        with pytest.raises(OptionError, match=r"compiled in place already; call fp8_uncompile\(model\)"):
            fp8_compile(model, RECIPE, in_place=in_place)
    plain = Block()
    plain.compile(backend="aot_eager")
    for other, in_place, message in (
        (torch.relu, True, r"in_place=True compiles an nn\.Module"),
        (Block(), "yes", "in_place is 'yes'"),
        (plain, True, r"model.compile\(\) was called"),
    ):
        with pytest.raises(OptionError, match=message):
            fp8_compile(other, RECIPE, in_place=in_place)
    fp8_uncompile(model)
    assert not {"forward", "_compiled_call_impl"} & set(model.__dict__)
    assert model(given).equal(Block.forward(model, given))
    for other, message in ((model, "not compiled in place"), (fp8_compile(Block(), RECIPE), "does not change the model")):
        with pytest.raises(NotCompiledError, match=message):
            fp8_uncompile(other)
    assert make(model, "current") is model
    train(model, given)
    assert {g.recipe for g in inspect(model).gemms if g.quantized} == {"current"}


def test_equal_layers_compile_once():
    before = counters["stats"]["unique_graphs"]
    layers = [make() for _ in range(12)]
    for i, layer in enumerate(layers):
        layer.up.weight.data *= i + 1
        train(layer, x())
    assert counters["stats"]["unique_graphs"] == before + 1
    assert all(state(layer).amax_history("up:weight")[0] == layer.up.weight.abs().max() for layer in layers)


def test_a_call_that_could_not_begin_is_over(monkeypatch):
    """Else Parameters without values would stay as in a call, in which torch may write to memory that they do not have."""
    model = make()
    model(x())
    session = session_of(model)

    def fail(is_part):
        raise KeyboardInterrupt

    monkeypatch.setattr(session.eager, "begin", fail)
    with pytest.raises(KeyboardInterrupt):
        model(x())
    assert session.clock.is_outermost()
    assert released._num_calls == 0
