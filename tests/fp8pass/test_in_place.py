"""`fp8_compile(model, in_place=True)`: the model itself is compiled, and stays what it was; modules within modules."""

import copy
import inspect as python_inspect
import pickle

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, fp8_uncompile, inspect, state
from fp8pass.errors import NotCompiledError, OptionError
from tests.support.cases import each
from tests.support.models import Stack, mlp
from tests.support.training import fp8, same, train

RECIPE = DelayedScaling(amax_history_len=4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, scale: float = 1.0):
        return self.down(torch.relu(self.up(x))) * scale


def make(model=None, recipe=RECIPE):
    return fp8(model or Block(), recipe, in_place=True)


def compiled(model):
    return torch.compile(model, backend="aot_eager")


def x():
    return torch.randn(16, 32)


def test_the_model_stays_what_it_was_and_computes_what_a_compiled_one_does():
    model = Block()
    before = (list(model.state_dict()), python_inspect.signature(model.forward), repr(model))
    beside = fp8(copy.deepcopy(model), RECIPE)
    assert make(model) is model
    assert (list(model.state_dict()), python_inspect.signature(model.forward), repr(model)) == before
    assert model.forward.__self__ is model
    given = torch.randn(3, 16, 32)
    assert same(train(model, *given), train(beside, *given))
    assert [g for g in inspect(model).gemms if g.quantized] == [g for g in inspect(beside).gemms if g.quantized]
    assert same(state(model).state_dict(), state(beside).state_dict())
    assert model(x(), scale=0.0).abs().max() == 0


def test_hooks_run_once_per_call_and_a_torch_compile_around_the_model_keeps_its_fp8():
    model, seen = make(), []
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.register_forward_hook(lambda module, args, output: seen.append("after"))
    train(torch.compile(Stack([model]), backend="aot_eager"), x(), x())
    assert seen == ["before", "after"] * 2
    assert any(g.quantized for g in inspect(model).gemms)


@each("duplicate", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_the_uncompiled_model(duplicate):
    model, given = make(), x()
    train(model, given)
    twin = duplicate(model)
    assert type(twin) is Block
    assert twin.forward.__self__ is twin
    with pytest.raises(NotCompiledError):
        state(twin)
    with torch.no_grad():
        twin.up.weight.mul_(0.5)
        assert twin(given).equal(Block.forward(twin, given))
    assert state(model).tensors
    assert not state(fp8_compile(twin, RECIPE, in_place=True)).tensors


def test_a_student_with_the_teachers_body_and_a_head_of_its_own_trains_that():
    """A shallow copy, whose forward was the teacher's."""
    teacher, given = make(), x()
    student = copy.copy(teacher)
    student._modules = {**teacher._modules, "down": nn.Linear(64, 32)}
    assert train(student, given)[0].equal(Block.forward(student, given))
    assert student.down.weight.grad is not None
    assert teacher.down.weight.grad is None
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


def linear():
    return nn.Linear(64, 64)


def test_three_levels_have_their_own_states():
    middle = make(nn.Sequential(linear(), make(mlp(64, 96, 64)), linear()))
    outer = make(nn.Sequential(linear(), middle, linear()))
    train(outer, *torch.randn(2, 32, 64))
    for module in (outer, middle, middle[1]):
        assert {name.split(":")[0] for name in state(module).tensors} == {"0", "2"}
        assert state(module).scale("0:weight") == torch.tensor(448.0) / module[0].weight.abs().max()


def test_a_module_compiled_after_the_first_step_of_its_container():
    outer = make(nn.Sequential(linear(), mlp(64, 96, 64), linear()))
    train(outer, *torch.randn(2, 32, 64))
    make(outer[1])
    train(outer, *torch.randn(2, 32, 64))
    assert len(inspect(outer[1]).gemms) == 6
    assert all(g.quantized for m in (outer, outer[1]) for g in inspect(m).gemms)


def test_modules_that_look_alike_share_a_graph():
    parts = [linear() for _ in range(12)]  # more than Dynamo's recompile limit
    outer = make(nn.Sequential(*parts, make(mlp(64, 96, 64)), linear(), linear()))
    train(outer, *torch.randn(2, 32, 64))
    assert [g.quantized for g in inspect(outer).gemms] == [True] * (3 * 14 - 1)
    assert len(inspect(outer).graphs) <= 2


def test_what_torch_does_not_compile_is_said():
    module = mlp(64, 96, 64)
    module.compile(backend="fp8pass", options={"recipe": "delayed", "backend": "aot_eager"})
    module(torch.randn(4, 32, 64))
    for ask in (inspect, state):
        with pytest.raises(NotCompiledError, match=r"compiles nothing in nn\.Sequential"):
            ask(module)
