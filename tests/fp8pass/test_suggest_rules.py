"""`suggest_rules`: expected effects against toggling by other means, planted outliers, and a model that is left as it was."""

import functools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fp8pass import DelayedScaling, Float8CurrentScaling, fp8_compile, inspect, suggest_rules
from fp8pass.errors import OptionError
from fp8pass.graph.values import MatrixValue, Operand
from fp8pass.rules import parse_rules
from fp8pass.schemes import eager
from fp8pass.tools.probe import StepPasses, product_error, restorer
from fp8pass.tools.suggest import Sensitivity, Suggestion, _ranked, _suggestion, patterns, spearman
from lowering.formats import E4M3
from tests.support.fp8 import rounded
from tests.support.models import Decoder, mlp


class Planted(nn.Linear):
    """A linear, one of whose input channels may be a constant that the function does not depend on: what is added for it to the
    result is taken off again."""

    def plant(self, channel, value):
        self.keep.fill_(1)
        self.offset.zero_()
        if value:
            self.keep[channel], self.offset[channel] = 0, value

    def forward(self, x):
        return F.linear(x * self.keep + self.offset, self.weight) - (self.weight * self.offset).sum(1)


TOKENS = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(1))


def step(model):
    return F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())


def effects_of(passes):
    """The ranking of a model as it is now, with the graphs that are there."""
    passes.restore = restorer(passes.model)
    passes.probe.effects.clear()
    passes.probe.flops.clear()
    return passes.effects(), _ranked(passes.probe)


@pytest.fixture(scope="module")
def passes():
    """A model and graphs that tests share; each sets the parameters that it needs."""
    torch.manual_seed(0)
    return StepPasses(Decoder(), step, parse_rules("current", None))


def reset(model, seed):
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def rounded_by_numpy(x):
    """E4M3 with one scale, in float64: the nearest of all its values."""
    x = x.detach().double().numpy()
    scale = np.float64(np.float32(448.0) / np.float32(np.abs(x).max()))
    return torch.from_numpy(rounded(x * scale, E4M3) / scale)


def toggled_by_hand(model, linear):
    """The loss with one linear's operands rounded: nothing of fp8pass is involved."""

    def forward(x):
        w = rounded_by_numpy(linear.weight)
        return (rounded_by_numpy(x.flatten(0, 1)) @ w.T).float().view(*x.shape[:-1], -1)

    linear.forward = forward
    try:
        with torch.no_grad():
            return step(model).item()
    finally:
        del linear.forward


def test_expected_effects_are_those_of_toggling_by_hand(passes):
    """For every output GEMM of a small GPT, by rank and by size."""
    reset(passes.model, 3)
    loss, found = effects_of(passes)
    assert loss == pytest.approx(step(passes.model).item(), rel=1e-6)
    outputs = {g.module: g for g in found if g.role == "output"}
    linears = {name: m for name, m in passes.model.named_modules() if isinstance(m, nn.Linear) and name != "head"}
    assert outputs.keys() == linears.keys()
    effects = [toggled_by_hand(passes.model, linears[name]) - loss for name in outputs]
    expected = [g.expected for g in outputs.values()]
    assert spearman(expected, effects) > 0.95
    assert spearman([abs(e) for e in expected], [abs(e) for e in effects]) > 0.9
    assert spearman([g.risk for g in outputs.values()], [abs(e) for e in effects]) > 0.8
    largest = max(outputs.values(), key=lambda g: abs(g.expected))
    assert largest.expected == pytest.approx(effects[list(outputs).index(largest.module)], rel=0.1)


def test_measured_effects_are_those_of_the_compiled_model(passes):
    reset(passes.model, 4)
    loss, found = effects_of(passes)
    gemm = next(g for g in found if g.role == "output")
    measured = passes.measured((gemm.module, gemm.role), loss, {})
    passes.restore()
    compiled = fp8_compile(passes.model, "current", backend="aot_eager", rules={f"{gemm.module}:output": "current", "*": None})
    assert step(compiled).item() - loss == pytest.approx(measured, rel=0.05, abs=2e-6)
    assert sum(g.quantized for g in inspect(compiled).gemms) == 1


def test_effects_of_gradients_are_those_on_the_loss_after_a_step(passes):
    """Measured by running: what the tangents predict. Effects near the resolution of float32 are left out."""
    reset(passes.model, 5)
    with torch.no_grad():  # larger gradients, whose effects float32 can tell
        passes.model.head.weight.mul_(8)
    loss, found = effects_of(passes)
    largest = [g for g in found if g.role != "output"][:8]
    assert {g.role for g in largest} == {"grad_input", "grad_weight"}
    baselines = {}
    measured = [passes.measured((g.module, g.role), loss, baselines) for g in largest]
    assert spearman([g.expected for g in largest], measured) > 0.8


def test_a_planted_outlier_ranks_first():
    """Ten seeds and places: one input channel of one linear is a thousand times as large as the others and constant, as in
    large language models. In high precision the model computes the same."""
    model = Decoder()
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "head"}
    for linear in linears.values():
        linear.__class__ = Planted
        linear.register_buffer("keep", torch.ones(linear.in_features))
        linear.register_buffer("offset", torch.zeros(linear.in_features))
    passes = StepPasses(model, step, parse_rules("current", None))
    planted, first = [], []
    for seed in range(10):
        reset(model, seed)
        generator = torch.Generator().manual_seed(seed)
        planted.append(list(linears)[int(torch.randint(len(linears), (), generator=generator))])
        for linear in linears.values():
            linear.plant(0, 0)
        without = step(model).item()
        linear = linears[planted[-1]]
        linear.plant(int(torch.randint(linear.in_features, (), generator=generator)), 1000.0)
        loss, found = effects_of(passes)
        assert loss == pytest.approx(without, rel=0.01)
        first.append(found[0].module)
    assert first == planted
    assert len(set(planted)) > 4


@pytest.fixture
def small():
    torch.manual_seed(0)
    return mlp(32, 64, 32)


X = torch.randn(32, 32, generator=torch.Generator().manual_seed(2))
COUNTER = iter(range(1, 100))


def small_step(model):
    return model(X).square().mean()


def searched(model, step=small_step, recipe="current", *args, **options):
    return suggest_rules(model, step, recipe, *args, **{"progress": False} | options)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    small_step(model).backward()
    optimizer.step()
    model[2].eval()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    gradients = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    moments = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    random = torch.get_rng_state()
    found = searched(model, checks=2)
    assert len(found.gemms) == 5  # the first input needs no gradient
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    for name, p in model.named_parameters():
        assert p.grad is gradients[name][0]
        assert torch.equal(p.grad, gradients[name][1])
    assert all(torch.equal(v, moments[p][k]) for p, s in optimizer.state.items() for k, v in s.items())
    assert [m.training for m in model] == [True, True, False, True]
    assert "forward" not in vars(model)


def test_dropout_is_the_same_in_every_pass_and_searches_repeat(small):
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32))
    losses = []

    def noted(model):
        loss = small_step(model)
        losses.append(loss.item())
        return loss

    searched(model, noted, checks=0)
    first, moved, again = losses
    assert first == again != moved
    assert small_step(model).item() == pytest.approx(first, rel=1e-5)  # the mask that comes next, as if nothing had run
    assert small_step(model).item() != pytest.approx(first, rel=1e-5)
    found = [searched(small, checks=0) for _ in range(10)]  # more often than Dynamo compiles one function
    assert all(f.to_dict() == found[0].to_dict() for f in found)


def test_rules_fill_the_budget_in_the_order_of_the_ranking():
    def gemm(module, role, flops, kept=False):
        return Sensitivity(module=module, role=role, expected=1.0, spread=0.0, measured=None, flops=flops, kept=kept)

    found = [gemm("a", "output", 30), gemm("b", "output", 80), gemm("a", "grad_weight", 20), gemm("c", "output", 70)]
    chosen = _suggestion(list(found), 0.7, 1.0)
    assert dict(chosen) == {"a": None}  # both of a's; b does not fit
    assert chosen.fp8_share == 0.75
    assert dict(_suggestion(list(found), 1.0, 1.0)) == {}
    assert dict(_suggestion(list(found), 0.0, 1.0)) == {"a": None, "b": None, "c": None}
    assert dict(_suggestion([gemm("a", "output", 10), gemm("a", "grad_input", 90)], 0.9, 1.0)) == {"a:output": None}
    assert patterns([gemm("a[0]", "output", 1, kept=True)]) == {"a[[]0]": None}


def test_what_it_returns(small, capsys):
    found = suggest_rules(small, small_step, DelayedScaling(), 0.5, checks=1)
    assert "3 passes of the step" in " ".join(capsys.readouterr().err.split())
    assert isinstance(found, Suggestion)
    assert isinstance(found, dict)
    assert found.rules == dict(found)
    assert found.fp8_share >= 0.5
    assert sum(g.measured is not None for g in found.gemms) == 1
    assert json.loads(json.dumps(found.to_dict()))["rules"] == found.rules
    assert "expected" in str(found)
    assert repr(found) == str(found).rstrip("\n")
    compiled = fp8_compile(small, "delayed", backend="aot_eager", rules=found)
    small_step(compiled).backward()
    report = inspect(compiled)
    assert report.unmatched_rules == []
    assert {(g.module, g.role) for g in report.gemms if not g.quantized} == {(g.module, g.role) for g in found.gemms if g.kept}
    assert sum(g.flops for g in report.gemms if g.quantized) / sum(g.flops for g in report.gemms) == found.fp8_share


def trains(model):
    loss = small_step(model)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss


def fails_with_moved_parameters(model):
    if next(COUNTER) % 2 == 0:
        raise RuntimeError("no more data")
    return small_step(model)


@pytest.mark.parametrize(
    ("search", "error", "match"),
    [
        (lambda m: searched(m, lambda m: 3.0), OptionError, "step returned a float; return the loss"),
        (lambda m: searched(m, lambda m: m(X)), OptionError, "a tensor of shape"),
        (lambda m: searched(m, lambda m: small_step(m).detach()), OptionError, "has no gradient"),
        (lambda m: searched(m, lambda m: small_step(m) * float("nan")), OptionError, "nan in high precision"),
        (lambda m: searched(m, lambda m: X.clone().requires_grad_().sum()), OptionError, "nothing of the step would be in FP8"),
        (lambda m: searched(m, lambda m: small_step(m) * torch.rand(()).add(next(COUNTER))), OptionError, "not repeatable"),
        (lambda m: searched(m, trains), OptionError, "step ran a backward"),
        (lambda m: searched(m, fails_with_moved_parameters), RuntimeError, "no more data"),
        (lambda m: searched(m, keep=1.1), OptionError, "keep is 1.1"),
        (lambda m: searched(m, keep=True), OptionError, "keep is True"),
        (lambda m: searched(m, checks=-1), OptionError, "checks is -1"),
        (lambda m: searched(fp8_compile(m, "current")), OptionError, "model is compiled"),
        (lambda m: searched(small_step), OptionError, "a function"),
        (lambda m: searched(m, recipe=None), OptionError, "saved_activations='fp8'"),
        (lambda m: searched(m, saved_activations="int8"), OptionError, "'int8'"),
    ],
)
def test_refused_and_the_model_is_left_as_it_was(small, search, error, match):
    before = [p.clone() for p in small.parameters()]
    with pytest.raises(error, match=match):
        search(small)
    assert all(torch.equal(p, q) for p, q in zip(small.parameters(), before, strict=True))
    assert error is OptionError or all(p.grad is None for p in small.parameters())


MAGNITUDES = torch.tensor([1.0, 1e2, 1e4, 1e6])
OFFS = torch.tensor([17, 17, 48, 80], dtype=torch.int32)  # the second group is empty, and rows behind 80 belong to none
ROUNDED_RECIPES = {
    "delayed": DelayedScaling(margin=1),
    "epsilon": Float8CurrentScaling(amax_epsilon=3e2),
    **{name: name for name in ("current", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")},
}


class Product(nn.Module):
    """A linear, or experts as a batch or for rows in groups; [k, n] or [4, k, n]."""

    def __init__(self, form, k, n):
        super().__init__()
        weight = torch.randn(k, n) if form == "mm" else torch.randn(4, k, n) * MAGNITUDES[:, None, None]
        self.form, self.weight = form, nn.Parameter(weight.bfloat16() if form == "grouped" else weight)

    def forward(self, x):
        return torch._grouped_mm(x, self.weight, offs=OFFS) if self.form == "grouped" else x @ self.weight


def largest(x):
    """Matrix by matrix, as their magnitudes differ."""
    return x.double().view(-1, *x.shape[-2:]).abs().amax((1, 2))


@pytest.mark.parametrize("form", ["mm", "bmm", "grouped"])
@pytest.mark.parametrize("name", ROUNDED_RECIPES)
def test_products_are_those_of_the_rewritten_graph(form, name):
    """The operands of all roles, in the sizes and magnitudes that tell one scale of a batch from several."""
    recipe, is_grouped = ROUNDED_RECIPES[name], form == "grouped"
    k, n, rows = (64, 48, 96) if is_grouped else (50, 70, 33)
    torch.manual_seed(0)
    model = Product(form, k, n)
    shape = (4, rows, k) if form == "bmm" else (rows, k)
    x = torch.randn(shape) * (MAGNITUDES[:, None, None] if form == "bmm" else MAGNITUDES.repeat(rows)[:rows, None])
    if is_grouped:
        x[80:] = 1e9
        x = x.bfloat16()
    x.requires_grad_()
    compiled = fp8_compile(model, recipe, select="all", backend="aot_eager")
    out = compiled(x)
    dy = torch.randn(out.shape).to(out.dtype)
    out.backward(dy)

    weight = model.weight.detach()
    products = {
        "output": (x.detach(), weight, ("input", "weight"), out.detach()),
        "grad_input": (dy, weight.mT, ("grad_output", "weight"), x.grad),
        "grad_weight": (x.detach().mT, dy, ("input", "grad_output"), model.weight.grad),
    }
    checked = parse_rules(recipe, None).default
    seen = {g.role for g in inspect(compiled).gemms if g.quantized}
    assert seen
    for role in seen:
        a, b, kinds, expected = products[role]
        offs = OFFS if is_grouped else None
        exact = by_groups(a, b, sums=role == "grad_weight") if is_grouped else a.float() @ b.float()
        found, expected = product_error(a, b, *roundings(checked, role, kinds), offs) + exact, expected.float()
        if not is_grouped:  # sums in another order
            assert (largest(found - expected) <= 1e-5 * largest(expected)).all(), role
            continue
        found = found.bfloat16().float()
        if role != "grad_weight":
            found, expected = found[:80], expected[:80]
        assert (found - expected).norm() <= 4e-3 * expected.norm(), role  # bfloat16 results


def by_groups(a, b, *, sums):
    a, b = a.float(), b.float()
    parts = [slice(start, end) for start, end in zip([0, *OFFS.tolist()[:-1]], OFFS.tolist(), strict=True)]
    if sums:
        return torch.stack([a[:, part] @ b[part] for part in parts])
    return torch.cat([*(a[part] @ w for part, w in zip(parts, b, strict=True)), torch.zeros(len(a) - 80, b.shape[-1])])


def roundings(recipe, role, kinds):
    transposed = {"output": (False, False), "grad_input": (False, True), "grad_weight": (True, False)}[role]
    value = MatrixValue(fx.Graph().placeholder("x"), 1, 1)
    made = (Operand(value, t, kind) for kind, t in zip(kinds, transposed, strict=True))
    quantized = [(operand.kind, recipe.quantization(operand, role)) for operand in made]
    return [functools.partial(eager.rounded, recipe=recipe, quantization=q, kind=kind) for kind, q in quantized]


# -- saved values


class Gates(nn.Module):
    """Two SwiGLUs; the values of the first are rounded worse, for some are 1e4 times as large as their neighbours."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(64, 128) for _ in range(2)) for _ in range(2))
        self.down = nn.Linear(256, 64)
        with torch.no_grad():
            self.layers[0][1].weight[::8] *= 1e4
            self.down.weight[:, :128:8] *= 1e-4

    def forward(self, x):
        return self.down(torch.cat([F.silu(gate(x)) * up(x) for gate, up in self.layers], -1))


def loss_of_gates(model):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    return (model(x) - x.roll(1, 1)).square().mean()


@pytest.mark.parametrize("recipe", [None, "current"], ids=str)
def test_saved_values_are_ranked_by_their_effect_on_gradients(recipe):
    """The expected effect is that of a descent with the gradients of the compiled model."""
    torch.manual_seed(0)
    model = Gates()
    found = suggest_rules(model, loss_of_gates, recipe, 0.5, saved_activations="fp8", checks=40, progress=False)
    saved = {g.module: g for g in found.gemms if g.role == "saved"}
    assert saved.keys() == {f"layers.{i}.{j}" for i in (0, 1) for j in (0, 1)}
    assert all(g.flops is None and g.saved_bytes == 64 * 128 * 4 - 64 * 128 - 64 * 4 for g in saved.values())
    assert (len(found.gemms) > len(saved)) == (recipe is not None)
    assert sum(g.kept for g in saved.values()) == 2
    assert {f"{g.module}:saved" for g in saved.values() if g.kept} <= {*found} | {f"{name}:saved" for name in found}
    assert "bytes" in str(found)
    loss = loss_of_gates(model)
    exact = torch.autograd.grad(loss, [*model.parameters()])
    rate = 0.01 * loss.item() / sum(g.square().sum() for g in exact).item()
    for name in saved:
        torch._dynamo.reset()
        rules = {f"{other}:saved": None for other in saved if other != name}
        compiled = fp8_compile(model, None, backend="aot_eager", rules=rules, saved_activations="fp8")
        rounded = torch.autograd.grad(loss_of_gates(compiled), [*model.parameters()])
        effect = -rate * sum(((b - a) * a).sum().item() for a, b in zip(exact, rounded, strict=True))
        assert saved[name].expected == pytest.approx(effect, rel=0.02, abs=1e-9 * loss.item())
    torch._dynamo.reset()
    compiled = fp8_compile(model, recipe, backend="aot_eager", rules=found, saved_activations="fp8")
    loss_of_gates(compiled).backward()
    kept = {v.module for v in inspect(compiled).graphs[0].saved if (v.reason or "").startswith("rule")}
    assert kept == {g.module for g in saved.values() if g.kept}
