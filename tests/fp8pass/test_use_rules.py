"""`use_rules` and `schedule=`: other rules in mid-run are what a fresh compilation with these rules and this state computes."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fp8pass import DelayedScaling, Float8BlockScaling, fp8_compile, inspect, state, use_rules
from fp8pass.errors import NotCompiledError, OptionError, RecipeError, RuleError
from tests.support.models import ResidualMlp

OUTPUTS_STAY = {"*:output": None}
DELAYED = DelayedScaling(amax_history_len=8)


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(ResidualMlp(), ResidualMlp())


def batch(step):
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step))


class Run:
    """A model in training: its optimizer has momentum, so that every step depends on all before."""

    def __init__(self, model=None, recipe=DELAYED, **options):
        self.model = make_model() if model is None else model
        self.compiled = fp8_compile(self.model, recipe, backend="aot_eager", **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.step = 0

    def train(self, num_steps):
        losses = []
        for _ in range(num_steps):
            loss = self.compiled(batch(self.step)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(loss.item())
        return losses

    @property
    def quantized(self):
        """(module, role) -> whether it runs in FP8."""
        return {(g.module, g.role): g.quantized for g in inspect(self.compiled).gemms}

    def use(self, rules):
        use_rules(self.compiled, rules)
        return self

    def save(self):
        parts = (self.model.state_dict(), self.optimizer.state_dict(), state(self.compiled).state_dict(), self.step)
        return copy.deepcopy(parts)

    def resume(self, saved):
        weights, momentum, fp8, self.step = copy.deepcopy(saved)  # an optimizer keeps what it is given
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(momentum)
        state(self.compiled).load_state_dict(fp8)
        return self


@pytest.mark.parametrize(
    ("recipe", "options", "rules"),
    [
        (DELAYED, {}, {"0.*": None, "1.up": "current"}),
        ("rowwise", {"match": "vllm"}, {"0.*": None, "1.up": Float8BlockScaling(use_f32_scales=True), "1.down": "rowwise"}),
    ],
    ids=["delayed", "match"],
)
def test_a_switch_is_what_a_fresh_compilation_with_this_state_computes(recipe, options, rules):
    """Rules follow `match` as those of a fresh compilation do."""
    run = Run(recipe=recipe, **options)
    run.train(5)
    saved = run.use(rules).save()
    fresh = Run(make_model(1), recipe, rules=rules, **options).resume(saved)
    assert run.train(5) == fresh.train(5)
    back = Run(make_model(1), recipe, **options).resume(run.use(None).save())
    assert run.train(3) == back.train(3)


@pytest.mark.parametrize("recipe", [DELAYED, "current"])
def test_a_schedule_is_a_switch_and_a_resumed_one_goes_on(recipe):
    """At step 4 of 8, resumed at 2, at 4 and at 6. It counts steps of recipes without state, too."""
    rules, schedule = {"1.down": None}, {4: OUTPUTS_STAY}
    run = Run(recipe=recipe, rules=rules, schedule=schedule)
    saved, losses = {}, []
    for step in range(8):
        if step in (2, 4, 6):
            saved[step] = run.save()
        losses += run.train(1)
        assert run.quantized["0.up", "output"] == (step < 4)
    by_hand = Run(recipe=recipe, rules=rules)
    assert by_hand.train(4) + by_hand.use(OUTPUTS_STAY).train(4) == losses
    for step in saved:
        resumed = Run(make_model(1), recipe, rules=rules, schedule=schedule).resume(saved[step])
        assert resumed.train(8 - step) == losses[step:]


def test_switching_back_compiles_nothing_and_dynamo_never_again():
    run = Run()
    run.train(3)
    counters.clear()
    names = state(run.compiled).tensors
    for _ in range(3):
        for rules in (OUTPUTS_STAY, None):
            run.use(rules).train(2)
            assert run.quantized["0.up", "output"] is (rules is None)
    assert counters["stats"]["unique_graphs"] == 0, "Dynamo traced nothing"
    assert len(run.compiled._fp8pass_session.every_graph) == 2, "one graph per set of rules"
    assert state(run.compiled).tensors == names


def test_bad_input_leaves_the_rules_as_they_were():
    run = Run(recipe="rowwise", match="vllm")
    run.train(1)
    parts = nn.ModuleDict({"a": ResidualMlp(), "b": ResidualMlp()})
    for part in parts.values():
        fp8_compile(part, backend="aot_eager", in_place=True)
    for model, rules, error, message in (
        (run.compiled, {"*:wgrad": None}, RuleError, "grad_weight"),
        (run.compiled, {"1.up": "mxfp8"}, RecipeError, "match='vllm' with the recipe 'mxfp8'"),
        (run.model, {}, NotCompiledError, "did not come from fp8_compile"),
        (parts, {}, OptionError, r"use_rules on each \(a, b\)"),
    ):
        with pytest.raises(error, match=message):
            use_rules(model, rules)
    run.train(1)
    assert all(run.quantized.values())
