"""The monitor: its numbers are those of the tensors that were quantized, and training does not notice it."""

import copy
import re

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fp8pass import DelayedScaling, MXFP8BlockScaling, fp8_compile, inspect, monitor, state, use_rules
from fp8pass.errors import NotCompiledError, OptionError
from fp8pass.tools.monitoring import Measurement, TensorNumbers
from lowering.formats import E4M3
from tests.support.cases import rest
from tests.support.models import ResidualMlp, Stack
from tests.support.moe import FallbackExperts, MoE, offsets

RECIPES = ("delayed", "current", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")


@pytest.fixture(autouse=True)
def mxfp8_runs_everywhere(monkeypatch):
    """Emulated, as no test machine has SM100."""
    monkeypatch.setattr("fp8pass.schemes.blocks.hardware.refusal", lambda *a, **k: None)


def make_model(cls=ResidualMlp):
    torch.manual_seed(0)
    return nn.Sequential(cls(), cls())


def batch(step, dim=64):
    return torch.randn(48, dim, generator=torch.Generator().manual_seed(step))


def train(model, compiled, num_steps, first=0, dim=64):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(first, first + num_steps):
        compiled(batch(step, dim)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def watched(recipe, model=None, every=1, results=False, **options):
    model = make_model() if model is None else model
    compiled = fp8_compile(model, recipe, backend="aot_eager", **options)
    return model, compiled, monitor(compiled, every=every, results=results)


def by_name(measurement):
    return {(t.name, t.copy): t for t in measurement.tensors}


def test_training_is_the_same_and_nothing_compiles_again():
    """tests/lifecycles has it with every recipe."""
    plain = make_model()
    wanted = train(plain, fp8_compile(plain, "delayed", backend="aot_eager"), 12)
    model, logged = make_model(), []
    compiled = fp8_compile(model, "delayed", backend="aot_eager")
    watching = monitor(compiled, every=5, log=logged.append)
    train(model, compiled, 6)
    graphs = list(compiled._fp8pass_session.every_graph)
    counters.clear()
    assert torch.equal(train(model, compiled, 6, first=6), wanted)
    assert counters["stats"]["unique_graphs"] == 0
    assert list(compiled._fp8pass_session.every_graph) == graphs
    assert [entry["fp8/step"] for entry in logged] == [0, 5, 10]
    assert (len(graphs), len(inspect(compiled).graphs), watching.latest.step) == (2, 1, 10)


@pytest.mark.parametrize("recipe", ["delayed", "current", MXFP8BlockScaling()], ids=["delayed", "current", "mxfp8"])
def test_numbers_are_those_of_the_tensors(recipe):
    """Inputs, weights and gradients of each linear, taken by hooks, and quantized here."""
    model, compiled, watching = watched(recipe)
    plain = copy.deepcopy(model)
    compiled(batch(0)).square().mean().backward()
    x = batch(0)
    tensors = {"0.up:input": x, **{f"{n}:weight": m.weight for n, m in plain.named_modules() if isinstance(m, nn.Linear)}}
    numbers = by_name(watching.latest)
    for name, tensor in tensors.items():
        x = tensor.detach().double()
        if recipe in ("delayed", "current"):
            found = numbers[name, "tensor"]
            scale = torch.tensor(448.0) / tensor.detach().abs().max()
            lines = (tensor.detach() * scale).clamp(-448, 448).to(E4M3).double() * scale.reciprocal().double()
        else:
            found = numbers[name, "rowwise"]
            amax = x.float().unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 448
            factor = torch.exp2(torch.ceil(torch.log2(amax)))
            lines = ((x.float().unflatten(1, (-1, 32)) / factor).to(E4M3).double() * factor.double()).flatten(1)
        error = (x - lines).square().sum()
        assert found.num_elements == x.numel()
        assert found.num_underflow == int(((lines == 0) & (x != 0)).sum())
        assert found.sqnr == pytest.approx(float(10 * torch.log10(x.square().sum() / error)), rel=1e-6)
        assert found.mse == pytest.approx(float(error / x.numel()), rel=1e-6)
        assert found.amax == float(x.abs().max())
    kinds = {t.kind for t in watching.latest.tensors}
    assert kinds == {"input", "weight", "grad_output"}
    grad = next(t for t in watching.latest.tensors if t.kind == "grad_output")
    assert grad.gradient_to_noise == pytest.approx(10 ** (grad.sqnr / 20))


def test_headroom_and_staleness_under_delayed_scaling():
    _, compiled, watching = watched(DelayedScaling(amax_history_len=4), nn.Sequential(nn.Linear(64, 64)))
    found = []
    for factor in (4.0, 1.0, 0.5, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        x = torch.ones(16, 64) * factor
        compiled(x.requires_grad_()).sum().backward()
        found.append(by_name(watching.latest)["0:input", "tensor"])
    assert [t.headroom[0] for t in found] == pytest.approx([0, 2, 3, -1, 3, 3, 3, 3, 0], abs=1e-6)
    assert [t.staleness for t in found] == [None, 1, 2, 3, 1, 2, 3, 1, 1]
    assert [t.num_saturated for t in found] == [0, 0, 0, 16 * 64, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_the_first_tensor_that_is_not_finite_is_named(recipe):
    model, compiled, watching = watched(recipe)
    train(model, compiled, 1)
    assert watching.latest.first_non_finite is None
    with torch.no_grad():
        model[0].down.weight[3, 5] = torch.inf
    compiled(batch(1)).square().mean().backward()
    assert watching.latest.first_non_finite.startswith("0.down:weight, for the GEMM output, in the forward (1 element)")
    assert "0.down:weight" in str(watching)
    _, compiled, watching = watched(recipe)
    gradient = torch.ones(48, 64)
    gradient[0, 0] = torch.nan
    compiled(batch(0)).backward(gradient)
    assert watching.latest.first_non_finite.startswith("1.down:grad_output, for the GEMM grad_")
    assert "in the backward" in watching.latest.first_non_finite


@pytest.mark.parametrize("recipe", [*RECIPES[1::2], *rest(RECIPES[::2])])
def test_grouped_gemms(recipe):
    plain = MoE()
    model, compiled, watching = watched(recipe, copy.deepcopy(plain), results=True)
    results = []
    for each, call in ((model, compiled), (plain, fp8_compile(plain, recipe, backend="aot_eager"))):
        for step in range(2):
            torch.manual_seed(step)
            call(torch.randn(64, 64)).square().mean().backward()
        results.append(torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None]))
    assert torch.equal(*results)
    weights = [t for t in watching.latest.tensors if t.kind == "weight"]
    assert weights
    assert all(t.num_elements in {p.numel() for p in model.parameters()} for t in weights)
    assert all(15 < t.sqnr < 60 for t in watching.latest.tensors if t.num_elements), str(watching)
    assert all(10 < g.sqnr < 60 for g in watching.latest.gemms)
    assert {g.role for g in watching.latest.gemms} >= {"output", "grad_input"}


def test_results_of_experts_whose_operation_transposes_its_operands():
    """transformers' loop over experts in float32: its backward is one operation that computes both gradients."""
    pytest.importorskip("transformers.integrations.moe")

    _, compiled, watching = watched("rowwise", FallbackExperts(3, 48, 80, torch.float32), results=True)
    compiled(torch.randn(40, 48, requires_grad=True), offsets([9, 0, 25])).square().sum().backward()
    found = {g.role: g.sqnr for g in watching.latest.gemms}
    assert set(found) == {"output", "grad_input", "grad_weight"}
    assert all(25 < sqnr < 35 for sqnr in found.values()), found


def test_results_of_gemms():
    model, compiled, watching = watched("current", results=True)
    compiled(batch(0)).square().mean().backward()
    weight, x = model[0].up.weight.detach(), batch(0)

    def quantized(t, dtype=E4M3):
        scale = torch.finfo(dtype).max / t.abs().max()
        return (t * scale).clamp(-448, 448).to(dtype).float() / scale

    exact = torch.nn.functional.linear(x, weight, model[0].up.bias.detach())
    made = torch.nn.functional.linear(quantized(x), quantized(weight), model[0].up.bias.detach())
    wanted = 10 * torch.log10(exact.square().sum() / (exact - made).square().sum())
    found = {(g.module, g.role): g for g in watching.latest.gemms}
    assert found["0.up", "output"].sqnr == pytest.approx(float(wanted), abs=0.01)
    assert len(found) == 11, "four linears, and no gradient of the batch"
    assert found["0.up", "output"].gradient_to_noise is None
    assert found["0.up", "grad_weight"].gradient_to_noise > 3


def test_batches_of_a_step_are_added():
    _, compiled, watching = watched("current", every=2, step="manual")
    for step in range(3):
        for part in range(3):
            compiled(batch(10 * step + part)).sum().backward()
        state(compiled).step()
        assert watching.latest.step == (step // 2) * 2
        assert by_name(watching.latest)["0.up:input", "tensor"].num_elements == 3 * 48 * 64
    compiled.eval()
    with torch.no_grad():
        compiled(batch(99))
    assert by_name(watching.latest)["0.up:input", "tensor"].num_elements == 3 * 48 * 64


@pytest.mark.parametrize("reentrant", [False, *rest([True])])
def test_recomputation_counts_nothing_twice(reentrant):
    results, watching = [], []
    for every in (0, 1):
        model = Stack(make_model(), use_reentrant=reentrant)
        for block in model.layers:
            fp8_compile(block, "delayed", backend="aot_eager", in_place=True)
        if every:
            watching = monitor(model, every=1)
        for step in range(2):
            model(batch(step).requires_grad_()).square().sum().backward()
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*results)
    numbers = by_name(watching.latest)
    assert len(numbers) == 12
    counts = {n: t.num_elements for (n, _), t in numbers.items() if n.endswith("up:input")}
    assert counts == dict.fromkeys(("layers.0.up:input", "layers.1.up:input"), 48 * 64)


def test_a_switch_of_rules_while_it_watches():
    model, compiled, watching = watched("current")
    train(model, compiled, 1)
    assert len(watching.latest.tensors) == 12
    use_rules(compiled, {"0.*": None})
    train(model, compiled, 1)
    assert {t.module.partition(".")[0] for t in watching.latest.tensors} == {"1"}


def test_names_for_loggers_and_the_table_and_under_several_recipes():
    model, compiled, watching = watched("blockwise", every=100)
    assert str(watching) == "Nothing is measured yet: train a step."
    assert watching.latest is None
    train(model, compiled, 1)
    flat = watching.latest.to_dict()
    names = {name.rpartition("/")[2] for name in flat if name.startswith("fp8/0.up/input_columnwise/")}
    assert names >= {"underflow", "saturated", "sqnr", "mse", "amax", "headroom", "block_sqnr_q10"}
    assert all(isinstance(value, (int, float)) and re.fullmatch(r"[\w./ -]+", name) for name, value in flat.items())  # MLflow's
    worst = min(watching.latest.tensors, key=lambda t: t.sqnr)
    assert worst.name in next(line for line in str(watching).splitlines() if "dB" in line)
    model, compiled, watching = watched("delayed", every=100, rules={"0.up:output": "current"})
    train(model, compiled, 1)
    of_input = [t for t in watching.latest.tensors if t.name == "0.up:input"]
    assert [(t.recipe, t.role) for t in of_input] == [("current", "output"), ("delayed", "grad_weight")]
    names = {name for name in watching.latest.to_dict() if "up/input" in name and name.endswith("/sqnr")}
    of_0 = {f"fp8/0.up/input_{recipe}/sqnr" for recipe in ("current_output", "delayed_grad_weight")}
    assert names == {*of_0, "fp8/1.up/input/sqnr"}
    assert "0.up:input (current, output)" in str(watching)


def test_bad_arguments():
    model, compiled, first = watched("current")
    for given, options, error, message in (
        (compiled, {"every": 0}, OptionError, "every is 0; use a positive int"),
        (compiled, {"log": "wandb"}, OptionError, "log is 'wandb'"),
        (compiled, {}, OptionError, "has a monitor already"),
        (model, {}, NotCompiledError, "did not come from fp8_compile"),
    ):
        with pytest.raises(error, match=message):
            monitor(given, **options)
    first.stop()
    monitor(compiled).stop()


def numbers(name, sqnr, num_underflow=0, num_saturated=0, **others):
    module, _, kind = name.partition(":")
    given = {"role": "output", "recipe": "current", "format": "e4m3", "scaling": "tensor-wise", "copy": "tensor", "mse": 0.0}
    counts = {"num_elements": 1000, "num_underflow": num_underflow, "num_saturated": num_saturated, "num_non_finite": 0}
    rest = {"amax": 1.0, "headroom": (-0.01,) * 5, "block_sqnr": (sqnr,) * 5, "staleness": None}
    return TensorNumbers(name=name, module=module, kind=kind, sqnr=sqnr, **given | counts | rest | others)


def test_what_is_worst_and_asks_for_attention():
    """An outlier's own part of the SQNR hides what it does to the other elements."""
    healthy = numbers("down:grad_output", 25.4, format="e5m2")
    outlier, grown = numbers("up:input", 32.4, num_underflow=180), numbers("up:weight", 28.0, num_saturated=11)
    found = Measurement(step=3, tensors=(healthy, grown, outlier), gemms=(), first_non_finite=None)
    assert found.worst is outlier
    assert found.remarks() == [
        "up:input: 18.0% of the elements underflow to zero.",
        "up:weight: 1.1% of the elements saturate.",
    ]
    assert "-0.0" not in str(found)
    quiet = Measurement(step=3, tensors=(numbers("up:input", 31.0, num_underflow=10), healthy), gemms=(), first_non_finite=None)
    assert quiet.worst is healthy
    assert quiet.remarks() == []


@pytest.mark.parametrize("step", ["auto", "manual"])
@pytest.mark.parametrize("num_steps", [1, 3, 4])
def test_stop_logs_the_step_under_way(step, num_steps):
    model, logged = make_model(), []
    compiled = fp8_compile(model, "current", backend="aot_eager", step=step)
    with monitor(compiled, 2, logged.append) as watching:
        train(model, compiled, num_steps)
    measured = [0] if step == "manual" else list(range(0, num_steps, 2))  # nobody ends its step
    assert [found["fp8/step"] for found in logged] == measured
    assert logged[-1] == watching.latest.to_dict()
    watching.stop()
    assert len(logged) == len(measured)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_the_scale_is_no_saturation(dtype):
    """The largest element times its scale may round to just above the format's largest value, and is it all the same."""
    _, compiled, watching = watched("current", nn.Linear(64, 64).to(dtype), select="all")
    rounds_up = [value for value in (torch.arange(1, 400) / 1000).to(dtype) if 448.0 / value.float() * value.float() > 448]
    assert len(rounds_up) > 2
    for value in rounds_up[:4]:
        compiled(value.expand(32, 64).clone()).sum().backward()
        found = {t.name: t for t in watching.latest.tensors}
        assert found["self:input"].num_saturated == 0
        assert found["self:input"].sqnr > 100
