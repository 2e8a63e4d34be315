"""State and its neighbours where a mistake shows late: one history entry, the 65th tensor, loading between two evaluations."""

import copy

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, state
from fp8pass.errors import CheckpointMismatchError
from tests.support.models import Net
from tests.support.training import fp8, fp8_mlp, gradients, same, train

TWO_STEPS = DelayedScaling(amax_history_len=2)


def test_a_history_of_one_step_is_loaded_as_it_was():
    """Behind a boundary all its entries are 0: the scale alone tells that it is no empty one."""
    (_, compiled), (_, loaded) = (fp8_mlp(DelayedScaling(amax_history_len=1), step="manual") for _ in range(2))
    x = torch.randn(16, 64)
    train(compiled, x)
    state(compiled).step()
    state(loaded).load_state_dict(state(compiled).state_dict())
    assert loaded(x * 3).equal(compiled(x * 3))


@pytest.mark.filterwarnings("ignore:.* has more than doubled")
def test_an_evaluation_after_loading_has_the_loaded_scales():
    model, compiled = fp8_mlp(TWO_STEPS, weight_copies="cache", step="manual")
    x, view = torch.randn(16, 64), state(compiled)
    train(compiled, x)
    view.step()
    saved, weights = view.state_dict(), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        wanted = compiled(x)
        for parameter in model.parameters():
            parameter.mul_(37.0)
    train(compiled, x)
    view.step()
    model.load_state_dict(weights)
    with torch.no_grad():
        compiled(x)  # keeps copies with the scales of the larger weights
        view.load_state_dict(saved)
        assert compiled(x).equal(wanted)


def ways(other):
    """Two linears that read one tensor, or another way through them."""
    forward = lambda self, x: other(self, x) if self.in_turn else self.a(x) + self.b(x)  # noqa: E731
    return Net(forward, a=nn.Linear(64, 64), b=nn.Linear(64, 64), in_turn=False)


def test_tensors_that_were_one_on_another_way_have_histories_of_their_own():
    model = ways(lambda self, x: self.b(30 * self.a(x)))  # the second reads the result of the first
    compiled, x = fp8(model, DelayedScaling()), torch.randn(32, 64)
    view = state(compiled)
    for model.in_turn in (False, True, False, True):
        train(compiled, x)
        assert view.amax_history("a:input")[0] == x.abs().max()
    assert view.amax_history("b:input")[0] > 4 * x.abs().max()


@pytest.mark.parametrize("first", [False, True])
def test_a_tensor_that_is_one_with_another_on_one_way_alone_is_kept_and_saved(first):
    x, order = torch.randn(32, 64), (first, not first)
    models = [ways(lambda self, x: self.b(1000 * x)) for _ in range(2)]
    compiled, resumed = (fp8(model, TWO_STEPS, step="manual") for model in models)
    for models[0].in_turn in order:
        train(compiled, x)
        state(compiled).step()
    for name, scale in (("a:input", 448 / x.abs().max()), ("b:input", 448 / (1000 * x).abs().max())):
        assert state(compiled).scale(name) == scale
    models[1].load_state_dict(models[0].state_dict())
    state(resumed).load_state_dict(state(compiled).state_dict())
    for way in reversed(order):
        models[0].in_turn = models[1].in_turn = way
        train(compiled, x)
        train(resumed, x)
    assert same(state(resumed).state_dict(), state(compiled).state_dict())


class Tasks(nn.Module):
    """A body and a head per task."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(64, 64), nn.ModuleDict({task: nn.Linear(64, 64) for task in "abc"})

    def forward(self, x, task="a"):
        return self.heads[task](self.body(x).relu())


def after_tasks(tasks, model=None):
    """A model that has trained one step per task."""
    torch.manual_seed(0)
    model = Tasks() if model is None else model
    compiled = fp8(model, TWO_STEPS)
    for i, task in enumerate(tasks):
        compiled(ramp(i + 1), task).square().sum().backward()
    return compiled


def ramp(largest):
    return torch.linspace(0, largest, 16 * 64).view(16, 64)


@pytest.mark.parametrize(("saved", "before", "after"), [("aa", "aab", "ba"), ("ab", "c", "aba")])
def test_a_part_that_had_not_run_when_the_state_was_saved_begins_with_empty_histories(saved, before, after):
    """before: what the model that loads the state has trained. The run that goes on without a checkpoint is right."""
    one, other = after_tasks(saved), after_tasks(before)
    state(other).load_state_dict(state(one).state_dict())
    other.load_state_dict(one.state_dict())
    for i, task in enumerate(after):
        for compiled in (one, other):
            compiled.zero_grad()
            compiled(ramp(10 * i + 10), task).square().sum().backward()
        assert same(gradients(other), gradients(one))
    for name in state(one).tensors:
        assert same(state(other).amax_history(name), state(one).amax_history(name)), name


def test_a_state_of_other_weights_or_a_part_of_one_is_no_state_of_an_earlier_time():
    tied, whole = Tasks(), state(after_tasks("a")).state_dict()
    tied.heads["a"].weight = tied.body.weight
    for saved in (
        state(after_tasks("a", model=tied)).state_dict(),
        {key: value for key, value in whole.items() if not key.startswith("heads.a")},
    ):
        compiled = after_tasks("")
        state(compiled).load_state_dict(saved)
        with pytest.raises(CheckpointMismatchError, match=r"it lacks heads\.b:input"):
            compiled(ramp(1), "b")


def test_weights_that_are_untied_have_scales_of_their_own():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    compiled, x = fp8(model, TWO_STEPS, step="manual"), torch.randn(32, 64)
    for is_tied in (True, False, False):
        if not is_tied:
            model[2].weight = nn.Parameter(3 * model[0].weight.detach())
        train(compiled, x)
        state(compiled).step()
    for i in (0, 2):
        assert state(compiled).scale(f"{i}:weight") == 448 / model[i].weight.detach().abs().max()
