"""The first step of delayed scaling: a tensor whose history is empty takes its scale from itself.

Oracle: current scaling, whose scale is fp8_max / amax of the tensor itself in every step.
The first steps of programs, with margins, microbatches, evaluations, zeros and infinities, and of modules that come later:
`tests/lifecycles`.
"""

import copy

import torch
from torch import nn

from fp8pass import DelayedScaling, state
from tests.support import training
from tests.support.cases import each
from tests.support.models import Net, mlp
from tests.support.training import assert_equal, compiled_step, fp8, same
from tests.tolerances import SQNR_MODEL_OUTPUT, sqnr

RECIPE = DelayedScaling(amax_history_len=4)


def test_step_1_is_current_scalings_to_the_last_bit_and_one_is_not():
    model, x = mlp(), torch.randn(24, 64)
    recipes = "current", RECIPE, DelayedScaling(initial_scale="one")
    current, first, one = (compiled_step(model, recipe, x, select="all")[1] for recipe in recipes)
    assert_equal(first, current)
    assert any(sqnr(a, b) < 40 for a, b in zip(current.gradients, one.gradients, strict=True))


def scaled(m, x, factor, both=True):
    x = m.first(x * factor)
    return m.second(x) if both else x


@each("evaluates", [True, False])
def test_floats_that_change(evaluates):
    """They are inputs of Dynamo's graph, which the first step traces again: after an evaluation, or in a branch that begins."""
    model, x = Net(scaled, first=nn.Linear(64, 64), second=nn.Linear(64, 64)), torch.randn(32, 64)
    compiled = fp8(copy.deepcopy(model), "delayed")
    for factor, both in [(4.0, evaluates), (3.0, evaluates), (2.0, True), (1.0, True)]:
        for i in range(3 if evaluates and factor == 4 else 0):
            with torch.no_grad():
                assert sqnr(model(x, 1.0 + i), compiled(x, 1.0 + i)) >= SQNR_MODEL_OUTPUT
        out = compiled(x, factor, both)
        out.sum().backward()
        assert sqnr(model(x, factor, both), out) >= SQNR_MODEL_OUTPUT


class Heads(nn.ModuleList):
    """Two layers, of which those run that are chosen."""

    def forward(self, x, *chosen):
        return sum(self[i](x) for i in chosen)


@each("boundaries", [1, 3])
def test_a_gradient_that_comes_behind_a_boundary_has_a_history_at_the_next(boundaries):
    """As where an evaluation comes between a forward and its backward; a resumed run, which sees the histories, is the same."""
    model, x, found, saved = Heads([nn.Linear(64, 64), nn.Linear(64, 64)]), torch.randn(16, 64), [], None
    for _ in range(2):
        torch._dynamo.reset()
        compiled = fp8(model, RECIPE, step="manual")
        view = state(compiled)
        if saved is None:
            out = compiled(x, 0)
            for _ in range(boundaries):
                view.step()
            out.square().mean().backward()
            compiled(x, 1).square().mean().backward()
            view.step()
            saved = view.state_dict()
        else:
            view.load_state_dict(saved)
        model.zero_grad()
        compiled(10 * x, 0).square().mean().backward()
        found.append(training.gradients(model))
    assert same(*found)
