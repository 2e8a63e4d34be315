"""`suggest_rules`: expected effects against toggling by other means, planted outliers, and a model that is left as it was."""

import copy
import json
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8pass import DelayedScaling, fp8_compile, inspect, suggest_rules
from fp8pass.errors import OptionError
from fp8pass.rules import parse_rules
from fp8pass.tools import probe
from fp8pass.tools.suggest import spearman
from lowering.formats import E4M3
from tests.support.fp8 import rounded
from tests.support.joint import two_ranks
from tests.support.models import Decoder, mlp
from tests.support.training import same

TOKENS = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(1))


def step(model):
    return F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())


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

    with mock.patch.object(linear, "forward", forward), torch.no_grad():
        return step(model).item()


def test_expected_effects_are_those_of_toggling_by_hand():
    """For every output GEMM of a small GPT, by rank and by size."""
    torch.manual_seed(0)
    model = Decoder()
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    with torch.no_grad():
        loss = step(model).item()
    outputs = {g.module: g for g in searched(model, step, checks=0).gemms if g.role == "output"}
    effects = [toggled_by_hand(model, model.get_submodule(name)) - loss for name in outputs]
    assert len(effects) == sum(isinstance(m, nn.Linear) for m in model.modules()) - 1  # the head stays
    assert spearman([g.expected for g in outputs.values()], effects) > 0.95
    assert spearman([g.risk for g in outputs.values()], [abs(e) for e in effects]) > 0.8
    largest = max(outputs.values(), key=lambda g: abs(g.expected))
    assert largest.expected == pytest.approx(effects[list(outputs).index(largest.module)], rel=0.1)


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
    """Every pass has the same dropout."""
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 32), nn.Dropout(0.5))
    small_step(model).backward()
    model[4].eval()
    before = copy.deepcopy(model.state_dict())
    gradients = {p: (p.grad, p.grad.clone()) for p in model.parameters()}
    random = torch.get_rng_state()
    found = searched(model, checks=5)
    assert len(found.gemms) == 5  # the first input needs no gradient
    assert torch.equal(torch.get_rng_state(), random)
    assert same(model.state_dict(), before)
    assert all(p.grad is grad and torch.equal(grad, values) for p, (grad, values) in gradients.items())
    assert [m.training for m in model] == [True] * 4 + [False]
    assert "forward" not in vars(model)


def test_what_it_returns(small, capsys):
    found = suggest_rules(small, small_step, DelayedScaling(), 0.5, checks=1)
    assert "3 passes of the step" in " ".join(capsys.readouterr().err.split())
    assert found.rules == dict(found)
    assert found.fp8_share >= 0.5
    assert sum(g.measured is not None for g in found.gemms) == 1
    assert json.loads(json.dumps(found.to_dict()))["rules"] == found.rules
    assert "expected" in repr(found)
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


WRONG = [{"keep": 1.1}, {"checks": -1}, {"step": 3}, {"model": 3}]


@pytest.mark.parametrize(
    ("search", "error", "match"),
    [
        (lambda m: searched(m, lambda m: 3.0), OptionError, "step returned a float; return the loss"),
        (lambda m: searched(m, lambda m: small_step(m) * float("nan")), OptionError, "nan in high precision"),
        (lambda m: searched(m, lambda m: X.clone().requires_grad_().sum()), OptionError, "nothing of the step would be in FP8"),
        (lambda m: searched(m, lambda m: small_step(m) * next(COUNTER)), OptionError, "not repeatable"),
        (lambda m: searched(m, trains), OptionError, "step ran a backward"),
        (lambda m: searched(m, fails_with_moved_parameters), RuntimeError, "no more data"),
        (lambda m: searched(m, lambda m: small_step(m).detach()), OptionError, "has no gradient; run the model without"),
        (lambda m: searched(m, lambda m: small_step(m) * 0), OptionError, "the gradients of the step are 0"),
        *((lambda m, o=o: searched(**{"model": m} | o), OptionError, f"{n} is {v}") for o in WRONG for n, v in o.items()),
        (lambda m: searched(fp8_compile(m, "current")), OptionError, "model is compiled"),
        (lambda m: searched(m, recipe=None), OptionError, "saved_activations='fp8'"),
    ],
)
def test_refused_and_the_model_is_left_as_it_was(small, search, error, match):
    before = [p.clone() for p in small.parameters()]
    with pytest.raises(error, match=match):
        search(small)
    assert all(torch.equal(p, q) for p, q in zip(small.parameters(), before, strict=True))
    assert error is OptionError or all(p.grad is None for p in small.parameters())


def test_the_error_of_a_grouped_product_is_that_of_its_parts():
    """Of experts, one of which has no rows, and of their gradients. Rows behind the last group count nowhere."""
    a, b, experts, offs = torch.randn(48, 32), torch.randn(48, 16), torch.randn(3, 32, 16), torch.tensor([8, 8, 40])
    parts, of = (slice(8), slice(8, 8), slice(8, 40)), (lambda x, parts=None: x.round(),) * 2
    rows = [probe.product_error(a[part], expert, *of) for part, expert in zip(parts, experts, strict=True)]
    torch.testing.assert_close(probe.product_error(a, experts, *of, offs), torch.cat([*rows, torch.zeros(8, 16)]))
    weights = [probe.product_error(a.mT[:, part], b[part], *of) for part in parts]
    torch.testing.assert_close(probe.product_error(a.mT, b, *of, offs), torch.stack(weights))


def test_ranks_check_the_model_and_average_what_they_have(small):
    """Of two ranks each hears its own numbers from the other, and sums of tensors stay one rank's."""
    own = probe.Probe(small, parse_rules("current", None))
    own.effects["a"], own.flops["a"], own.unknown = probe.Effect(3.0, 8.0), 5, {"a"}
    with two_ranks():
        assert same(probe.average([torch.ones(2), None]), [torch.full((2,), 0.5), None])
        probe.average_effects(own)
        assert (own.effects, own.flops, own.unknown) == ({"a": probe.Effect(3.0, 4.0)}, {"a": 10}, {"a"})
        with pytest.raises(OptionError, match="pass its module"):
            searched(nn.parallel.DistributedDataParallel(small))


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


def test_saved_values_are_ranked_by_their_effect_on_gradients():
    """The expected effect is that of a descent with the gradients of the compiled model."""
    torch.manual_seed(0)
    model = Gates()
    found = suggest_rules(model, loss_of_gates, None, 0.5, saved_activations="fp8", checks=0, progress=False)
    saved = {g.module: g for g in found.gemms if g.role == "saved"}
    assert saved.keys() == {f"layers.{i}.{j}" for i in (0, 1) for j in (0, 1)}
    assert "bytes less; without rules" in str(found)
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
    compiled = fp8_compile(model, None, backend="aot_eager", rules=found, saved_activations="fp8")
    loss_of_gates(compiled).backward()
    kept = {v.module for v in inspect(compiled).graphs[0].saved if (v.reason or "").startswith("rule")}
    assert kept == {g.module for g in saved.values() if g.kept}
    assert len(kept) == 2
