"""The calls that a step boundary counts: those that train, from the windows that the state has now; found by mutations."""

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, inspect, state
from fp8pass.runtime.recompute import FirstRun, FirstRuns
from tests.support.models import mlp

RECIPE = DelayedScaling(amax_history_len=2)


def first_run() -> FirstRun:
    return FirstRun({}, True, frozenset(), None, True, False)


def test_a_run_that_was_found_by_its_memory_is_not_taken_again():
    """The newer of two regions of one instance is found by its memory; the older, whose inputs were made anew, is the next."""
    runs, older, newer = FirstRuns(), first_run(), first_run()
    first, second, elsewhere = (torch.zeros(4) for _ in range(3))
    runs.add([first], "instance", older)
    runs.add([second], "instance", newer)
    assert runs.take([second], "instance") is newer
    assert runs.take([elsewhere], "instance") is older
    assert runs.take([elsewhere], "instance") is None


def test_a_boundary_behind_which_nothing_trained_is_no_step():
    model = mlp()
    compiled = fp8_compile(model, RECIPE, backend="aot_eager", step="manual", schedule={2: {"*": None}})
    view, x = state(compiled), torch.randn(16, 64)
    in_fp8 = []
    for _ in range(3):
        out = compiled(x)
        in_fp8.append(not torch.equal(out, model(x)))
        out.sum().backward()
        for _ in range(3):
            view.step()
    assert in_fp8 == [True, True, False]


class Growing(nn.Module):
    """A part of its own graph, and from a call on a second one, of new layers, whose tensors make the state grow."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.grows = False
        self.first = nn.Linear(16, 16)
        self.others = nn.Sequential()

    def forward(self, x):
        out = self.first(x)
        torch._dynamo.graph_break()
        return out, self.others(x) if self.grows else 2 * x  # Dynamo gives a frame up that computes nothing in its first call


def test_a_graph_reads_the_state_that_grew():
    """Bit for bit the scales of a state that never grows, in the graph that was there before."""
    found = []
    for grows_from in (3, 100):
        torch._dynamo.reset()
        model = Growing()
        compiled = fp8_compile(model, RECIPE, backend="aot_eager", select="all")
        view, generator = state(compiled), torch.Generator().manual_seed(0)
        outs = []
        for step in range(6):
            x = torch.randn(16, 16, generator=generator) * 3**step
            if step == grows_from:
                model.others.extend(nn.Linear(16, 16) for _ in range(40))
                model.grows = True
            out, other = compiled(x)
            (out.square().sum() + (other.sum() if model.grows else 0.0)).backward()
            outs.append(out.detach())
        view.step()
        scales = {name: float(view.scale(name)) for name in view.tensors if name.startswith("first")}
        found.append((outs, scales))
    (outs, scales), (expected, of_one) = found
    assert scales == of_one
    assert len(scales) == 3
    for out, other in zip(outs, expected, strict=True):
        assert torch.equal(out, other)


@pytest.mark.parametrize("weight_copies", ["auto", "cache"])
def test_a_graph_that_trains_records_nothing_of_a_call_without_gradients(weight_copies):
    """Without guards, which a user may drop, it runs without gradients: by the short way or, beside a cache, by `_run`."""
    how = {"step": "manual", "weight_copies": weight_copies}
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    compiled = fp8_compile(mlp(), RECIPE, backend="aot_eager", options=options, **how)
    view, x = state(compiled), torch.randn(16, 64)
    for _ in range(2):
        compiled(x).sum().backward()
        view.step()
    before = {name: view.amax_history(name).clone() for name in view.tensors}
    with torch.no_grad():
        compiled(1000 * x)
    assert len(inspect(compiled).graphs) == 1
    compiled(x).sum().backward()
    view.step()
    for name, history in before.items():
        assert view.amax_history(name).max() <= 1.01 * history.max(), name
