"""Writes to Parameters that leave no trace: with the defaults nothing is out of date; with "cache" that is an error.

Oracle: a twin with weight_copies="save", which casts every weight in every call, written to in the same way.
"""

import copy

import pytest
import torch
from torch import nn

from fp8pass import state
from fp8pass.errors import Fp8Error, StaleWeightError
from tests.support.models import mlp
from tests.support.training import RECIPES, fp8

X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))

# -- programs that write


def in_place(model):
    with torch.no_grad():
        model[0].weight.mul_(1.5)


def optimizer_step(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.Adam(model.parameters()).step()
    model.zero_grad()


def in_inference_mode(model):
    with torch.inference_mode():
        for p in model.parameters():
            p.mul_(0.5)


def every(write):
    return lambda model: [write(p) for p in model.parameters()]


def halved(p):
    return nn.Parameter(p.detach() * 0.5, p.requires_grad)


def by_data(p):
    p.data = p.data * 0.5


def assigned_twice(p):
    """The second storage may lie where the first one was."""
    p.data = p.data * 3
    p.data = p.data * 0.5


def states(model):
    return {k: v * 0.5 for k, v in model.state_dict().items()}


copied_average = every(lambda p: p.data.copy_(p.detach() * 0.5))
#: Programs that torch's version counter or an address tells of.
TRACED = {
    "in place": in_place,
    "optimizer": optimizer_step,
    "loaded": lambda m: m.load_state_dict(states(m)),
    "assigned twice": every(assigned_twice),
    "replaced": lambda m: setattr(m[0], "weight", halved(m[0].weight)),
}
#: Those that an optimizer's step or a change of mode tells of, where weights train.
TOLD = {
    "masters elsewhere": lambda m: (optimizer_step(copy.deepcopy(m)), m[0].weight.data.mul_(0.9)),
    "averaged for evaluation": lambda m: (m.train(not m.training), copied_average(m)),
}
WRITES = {
    **TRACED,
    "copied average": copied_average,
    "NumPy": lambda m: m[0].weight.detach().numpy().__imul__(0.5),
    "other storage": every(by_data),
    "swapped": lambda m: torch.utils.swap_tensors(m[0].weight, halved(m[0].weight)),
    "inference mode": in_inference_mode,
    **TOLD,
}


def by_turns(turn):
    """Each recipe has some of the programs, one after another; of two tests with different turns, others."""
    turns = [(i + turn) % len(RECIPES) for i in range(len(RECIPES))]
    programs = [list(WRITES)[i :: len(RECIPES)] for i in turns]
    rows = zip(programs, RECIPES, [i % 2 == 1 for i in turns], strict=True)
    return pytest.mark.parametrize(("writes", "recipe", "frozen"), list(rows), ids=str)


class Pair(list):
    """A model and its twin, each compiled, with the same state."""

    def __init__(self, recipe="current", frozen=False, **options):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = mlp(64, 96, 64).requires_grad_(not frozen)
        twin = copy.deepcopy(model)
        super().__init__([(model, fp8(model, recipe, **options)), (twin, fp8(twin, recipe, weight_copies="save"))])
        self.trained()
        self.write(nn.Module.zero_grad)

    def write(self, change):
        for model, _ in self:
            change(model)

    def evaluated(self):
        with torch.no_grad():
            return [compiled(X) for _, compiled in self]

    def trained(self):
        found = []
        for _, compiled in self:
            x = X.clone().requires_grad_()
            out = compiled(x)
            out.square().mean().backward()
            found.append(torch.cat([out.detach(), x.grad]))
        return found


@by_turns(0)
def test_nothing_is_out_of_date_with_the_defaults(writes, recipe, frozen):
    pair = Pair(recipe, frozen)
    for write in writes:
        before = pair.evaluated()[0]
        for i, run in enumerate((pair.evaluated, pair.trained)):
            pair.write(WRITES[write])
            ours, theirs = run()
            assert torch.equal(ours, theirs), write
            assert i or not torch.equal(before, ours), write


@by_turns(3)
def test_the_cache_is_right_or_raises_at_the_next_boundary(writes, recipe, frozen):
    """Between two microbatches; after the error training goes on with the right copies."""
    pair = Pair(recipe, frozen, weight_copies="cache")
    for write in writes:
        pair.trained()
        pair.write(WRITES[write])
        try:
            ours, theirs = pair.trained()
        except StaleWeightError:
            assert write not in TRACED
            assert frozen or write not in TOLD
            ours, theirs = pair.trained()
        assert torch.equal(ours, theirs), write


def test_the_error_names_the_parameter_the_cause_and_both_ways_out():
    pair = Pair(weight_copies="cache")
    compiled, double = pair[0][1], lambda model: model[2].weight.data.mul_(2)
    pair.write(double)
    text = r"Parameter 2\.weight has changed since.*\.data.*_fused_.*another thread.*refresh_weights\(\).*weight_copies='auto'"
    with pytest.raises(StaleWeightError, match=text) as caught:
        compiled(X)
    assert isinstance(caught.value, Fp8Error)
    for _ in range(2):  # refreshing after each write raises nothing
        pair.write(double)
        state(compiled).refresh_weights()
        assert torch.equal(*pair.trained())
