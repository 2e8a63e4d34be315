"""`use_rules` and `schedule=`: other rules in mid-run are what a fresh compilation with these rules and this state computes."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fp8pass import DelayedScaling, Float8BlockScaling, fp8_compile, inspect, state, use_rules
from fp8pass.errors import CheckpointMismatchError, NotCompiledError, OptionError, RecipeError, RuleError
from tests.support.models import BrokenLayers, ResidualMlp, Stack

OUTPUTS_STAY = {"*:output": None}
DELAYED = DelayedScaling(amax_history_len=8)


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(ResidualMlp(), ResidualMlp())


def batch(step):
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step))


def formats(compiled):
    """(module, role) -> whether it runs in FP8."""
    return {(g.module, g.role): g.quantized for g in inspect(compiled).gemms}


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
    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    @property
    def quantized(self):
        return formats(self.compiled)

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


SWITCH = {"0.*": None, "1.up": "current"}


@pytest.mark.parametrize(
    ("recipe", "options", "rules"),
    [
        (DELAYED, {}, SWITCH),
        ("current", {}, OUTPUTS_STAY),
        ("rowwise", {"match": "vllm"}, {"0.*": None, "1.up": Float8BlockScaling(use_f32_scales=True), "1.down": "rowwise"}),
        (DELAYED, {"weight_copies": "cache"}, SWITCH),
    ],
    ids=["delayed, modules", "current, outputs", "match", "kept weights"],
)
def test_a_switch_is_what_a_fresh_compilation_with_this_state_computes(recipe, options, rules):
    """Rules follow `match` as those of a fresh compilation do, and copies of weights are kept by the rules in force."""
    run = Run(recipe=recipe, **options)
    run.train(5)
    saved = run.use(rules).save()
    fresh = Run(make_model(1), recipe, rules=rules, **options).resume(saved)
    assert run.train(5) == fresh.train(5)
    assert torch.equal(run.weights, fresh.weights)
    unswitched = Run(make_model(1), recipe, **options).resume(saved)
    unswitched.train(5)
    assert not torch.equal(unswitched.weights, run.weights), "the rules matter"
    back = Run(make_model(1), recipe, **options).resume(run.use(None).save())
    assert run.train(3) == back.train(3)


@pytest.mark.parametrize("step", ["auto", "manual"])
def test_rules_that_are_given_in_the_step_before_an_entry_of_the_schedule_are_not_lost(step):
    """They begin at the boundary that the entry is for, take its place, and last until the next entry."""
    run = Run(recipe="current", schedule={1: {"0.*": None}, 3: {"*": None}}, step=step)
    given = {"1.up": None}
    found = []
    for i in range(4):
        run.train(1)
        found.append({g.module for g in inspect(run.compiled).gemms if not g.quantized})
        if i == 0:
            run.use(given)
        if step == "manual":
            state(run.compiled).step()
    assert found == [set(), {"1.up"}, {"1.up"}, {"0.up", "0.down", "1.up", "1.down"}]


@pytest.mark.parametrize("recipe", [DELAYED, "current"])
def test_a_schedule_is_a_switch_and_a_resumed_one_goes_on(recipe):
    """At step 6 of 12, resumed at 3, at 6 and at 9. It counts steps of recipes without state, too."""
    rules, schedule = {"1.down": None}, {6: OUTPUTS_STAY}
    run = Run(recipe=recipe, rules=rules, schedule=schedule)
    saved, losses = {}, []
    for step in range(12):
        if step in (3, 6, 9):
            saved[step] = run.save()
        losses += run.train(1)
        assert run.quantized["0.up", "output"] == (step < 6)
    by_hand = Run(recipe=recipe, rules=rules)
    by_hand.train(6)
    by_hand.use(OUTPUTS_STAY).train(6)
    assert torch.equal(run.weights, by_hand.weights)
    for step in saved:
        resumed = Run(make_model(1), recipe, rules=rules, schedule=schedule).resume(saved[step])
        assert resumed.train(12 - step) == losses[step:]
        assert torch.equal(run.weights, resumed.weights)


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


def test_histories_of_what_leaves_fp8_are_kept():
    run = Run()
    run.train(4)
    held = state(run.compiled)
    before = {name: held.amax_history(name).clone() for name in ("0.up:input", "1.up:input")}
    run.use({"0.*": None}).train(1)  # its beginning ends the step before
    kept = held.amax_history("0.up:input").clone()
    run.train(3)
    assert torch.equal(held.amax_history("0.up:input"), kept)
    assert not any(torch.equal(held.amax_history(name), history) for name, history in before.items())
    run.use({}).train(2)
    assert not torch.equal(held.amax_history("0.up:input"), kept)


def test_rules_may_bring_a_recipe_whose_histories_are_empty():
    run = Run(recipe="current")
    run.train(3)
    run.use({"0.*": DELAYED})
    state(run.compiled).step()
    saved = run.save()
    fresh = Run(make_model(1), "current", rules={"0.*": DELAYED}).resume(saved)
    assert run.train(6) == fresh.train(6)
    assert state(run.compiled).tensors == state(fresh.compiled).tensors
    assert {name.partition(":")[0] for name in state(run.compiled).tensors} == {"0.up", "0.down"}


def test_two_recipes_with_state_for_one_tensor():
    """The second one begins empty under a name of its own; back under the first, its history goes on."""
    rules = {"0.up": DelayedScaling(amax_history_len=3)}
    run = Run()
    run.train(4)
    run.use(rules).train(2)
    assert [len(state(run.compiled).amax_history(f"0.up:input{of}")) for of in ("", "@recipe1")] == [8, 3]
    saved = run.save()
    resumed = Run(make_model(1)).use(rules).resume(saved)
    for either in (run, resumed):
        either.train(2)
        either.use(None).train(2)
    assert torch.equal(run.weights, resumed.weights)


def test_it_takes_effect_at_the_next_step_boundary():
    run, awaited = Run(step="manual"), "Other rules take effect at the next step boundary"

    def is_quantized(step):
        run.compiled(batch(step)).sum().backward()
        return run.quantized["0.up", "output"]

    assert is_quantized(0)
    run.use(OUTPUTS_STAY)
    assert is_quantized(1), "the second batch of the same step"
    assert awaited in str(inspect(run.compiled))
    state(run.compiled).step()
    assert awaited not in str(inspect(run.compiled))
    assert not is_quantized(2)
    state(run.compiled).step()
    run.use(None)
    assert is_quantized(3), "between two steps it is the boundary now"
    run, fresh = Run(), Run(rules=OUTPUTS_STAY)
    run.use(OUTPUTS_STAY)  # before the first call
    assert run.train(3) == fresh.train(3)
    assert len(run.compiled._fp8pass_session.every_graph) == 1


def test_a_boundary_behind_which_nothing_trained_is_no_step():
    run, found = Run(schedule={2: {"*": None}}, step="manual"), []
    for _ in range(3):
        run.train(1)
        found.append(run.quantized["0.up", "output"])
        for _ in range(3):
            state(run.compiled).step()
    assert found == [True, True, False]


@pytest.mark.parametrize(("recipe", "reentrant"), [(DELAYED, False), (DELAYED, True), ("current", False)])
def test_a_recomputation_runs_by_the_rules_of_its_first_run(recipe, reentrant):
    """Two forwards, a switch between them, and both backwards after it."""

    def gradients(switches):
        model = Stack(make_model(), use_reentrant=reentrant)
        blocks = model.layers
        for block in blocks:
            fp8_compile(block, recipe, backend="aot_eager", in_place=True)
        for warm_up in range(2):
            model(batch(warm_up).requires_grad_()).sum().backward()
        model.zero_grad()
        first = model(batch(2).requires_grad_())
        for block in blocks:
            if switches:
                use_rules(block, {"*": None})
        if switches:
            model(batch(3).requires_grad_())
        first.square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    assert torch.equal(gradients(True), gradients(False))


def test_backend_by_name():
    model = make_model()
    compiled = torch.compile(
        model, backend="fp8pass", options={"recipe": "current", "backend": "aot_eager", "schedule": {2: {"*": None}}}
    )
    for step in range(4):
        quantized = formats(compiled) if step else {}
        assert all(value == (step < 3) for value in quantized.values())
        compiled(batch(step)).sum().backward()
    assert not any(formats(compiled).values())


def test_rules_that_one_graph_cannot_follow_change_nothing():
    model = BrokenLayers(3)  # the batch, before the first, has no gradient
    run = Run(model)
    run.train(2)
    before = run.quantized
    with pytest.raises(RuleError, match=r"layers\.1\.up and layers\.2\.up share one compiled graph"):
        run.use({"layers.1.up": None})
    run.train(1)
    assert run.quantized == before
    planned = Run(copy.deepcopy(model), schedule={1000: {"layers.1.up": None}})
    with pytest.raises(RuleError, match="share one compiled graph"):
        planned.train(1)  # at once, and not at step 1000


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


def test_a_state_without_a_number_of_steps_does_not_fit_a_schedule():
    run, planned = Run(), Run(make_model(1), schedule={5: {"*": None}})
    run.train(2)
    saved = {key: value for key, value in state(run.compiled).state_dict().items() if key != "num_steps"}
    with pytest.raises(CheckpointMismatchError, match="num_steps"):
        state(planned.compiled).load_state_dict(saved)


def test_rules_of_a_schedule_are_judged_at_the_start_and_those_of_the_backward_in_training():
    run = Run(recipe="current", schedule={100: {"2.up": None}})
    with pytest.warns(UserWarning, match=r"schedule at step 100: The rule '2.up' has matched no GEMM"):
        run.train(1)
    run = Run()
    run.train(1)
    use_rules(run.compiled, {"*:grad_weight": None, "1.up:grad_input": None, "2.up:grad_input": None})
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        run.compiled(batch(0))
    with pytest.warns(UserWarning, match=r"The rule '2.up:grad_input' has matched no GEMM"):
        run.train(1)
