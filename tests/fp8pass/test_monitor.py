"""The monitor: its numbers are those of the tensors that were quantized, and training does not notice it."""

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8pass import DelayedScaling, monitor
from fp8pass.errors import NotCompiledError, OptionError
from lowering.formats import E4M3
from tests.support.cases import each
from tests.support.models import ResidualMlp
from tests.support.training import fp8, train


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(ResidualMlp(), ResidualMlp())


def batch(step=0):
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(step))


def watched(recipe, model=None, every=1, results=False, **options):
    model = make_model() if model is None else model
    compiled = fp8(model, recipe, **options)
    return model, compiled, monitor(compiled, every=every, results=results)


def by_name(watching):
    return {t.name: t for t in watching.latest.tensors}


def quantized(x):
    """What FP8 holds of a tensor."""
    scale = torch.tensor(448.0) / x.abs().max()
    return (x * scale).clamp(-448, 448).to(E4M3).double() * scale.reciprocal().double()


def decibels(exact, found):
    return pytest.approx(float(10 * torch.log10(exact.double().square().sum() / (exact - found).square().sum())), rel=1e-4)


def test_numbers_are_those_of_the_tensors_and_results():
    """Of an input, the weights and a GEMM, quantized here. Other scalings: tests/lowering/test_statistics.py."""
    model, compiled, watching = watched("delayed", results=True)
    weights = {f"{n}:weight": m.weight.detach() for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    train(compiled, batch())
    found = by_name(watching)
    for name, x in {"0.up:input": batch(), **weights}.items():
        held = quantized(x)
        assert (found[name].num_elements, found[name].amax) == (x.numel(), x.abs().max())
        assert found[name].num_underflow == ((held == 0) & (x != 0)).sum()
        assert found[name].sqnr == decibels(x, held)
        assert found[name].mse == pytest.approx(float((x - held).square().mean()), rel=1e-4)
    assert {t.kind for t in found.values()} == {"input", "weight", "grad_output"}
    gemms = {(g.module, g.role): g for g in watching.latest.gemms}
    assert len(gemms) == 11, "four linears, and no gradient of the batch"
    operands, bias = (batch().double(), weights["0.up:weight"].double()), model[0].up.bias.detach().double()
    exact, made = F.linear(*operands, bias), F.linear(*(quantized(x.float()) for x in operands), bias)
    assert gemms["0.up", "output"].sqnr == decibels(exact, made)
    assert gemms["0.up", "output"].gradient_to_noise is None
    assert gemms["0.up", "grad_weight"].gradient_to_noise > 3
    assert watching.latest.to_dict()["fp8/0.up/grad_weight/gradient_to_noise"] > 3
    assert "0.up:output (result)" in str(watching)


def test_headroom_and_staleness_under_delayed_scaling():
    _, compiled, watching = watched(DelayedScaling(amax_history_len=4), nn.Sequential(nn.Linear(64, 64)))
    found = []
    for factor in (4.0, 1.0, 0.5, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        train(compiled, torch.ones(16, 64) * factor)
        found.append(by_name(watching)["0:input"])
    assert [t.headroom[0] for t in found] == pytest.approx([0, 2, 3, -1, 3, 3, 3, 3, 0], abs=1e-6)
    assert [t.staleness for t in found] == [None, 1, 2, 3, 1, 2, 3, 1, 1]
    assert [t.num_saturated for t in found] == [0, 0, 0, 16 * 64, 0, 0, 0, 0, 0]


def test_the_first_tensor_that_is_not_finite_is_named():
    model, compiled, watching = watched("blockwise")
    gradient = torch.ones(48, 64)
    gradient[0, 0] = torch.nan
    compiled(batch()).backward(gradient)
    assert re.match(r"1.down:grad_output, for the GEMM grad_\w+, in the backward", watching.latest.first_non_finite)
    train(compiled, batch())
    assert watching.latest.first_non_finite is None
    model[0].down.weight.data[3, 5] = torch.inf
    train(compiled, batch())
    assert watching.latest.first_non_finite.startswith("0.down:weight, for the GEMM output, in the forward (1 element)")
    assert "0.down:weight" in str(watching)


def test_names_for_loggers_and_the_table():
    _, compiled, watching = watched("blockwise")
    assert str(watching) == "Nothing is measured yet: train a step."
    train(compiled, batch())
    flat = watching.latest.to_dict()
    names = {name.rpartition("/")[2] for name in flat if name.startswith("fp8/0.up/input_columnwise/")}
    assert names >= {"underflow", "saturated", "sqnr", "mse", "amax", "headroom", "block_sqnr_q10"}
    assert all(isinstance(value, (int, float)) and re.fullmatch(r"[\w./ -]+", name) for name, value in flat.items())  # MLflow's


def test_bad_arguments():
    model, compiled, first = watched("current")
    for given, options, error, message in (
        (compiled, {"every": 0}, OptionError, "every is 0; use a positive int"),
        *((compiled, {name: "wandb"}, OptionError, f"{name} is 'wandb'") for name in ("log", "results")),
        (compiled, {}, OptionError, "has a monitor already"),
        (model, {}, NotCompiledError, "did not come from fp8_compile"),
    ):
        with pytest.raises(error, match=message):
            monitor(given, **options)
    first.stop()
    monitor(compiled).stop()


def test_what_is_worst_and_asks_for_attention():
    """An outlier's own part of the SQNR hides what it does to the other elements."""
    _, compiled, watching = watched("current")
    train(compiled, batch())
    some, *_ = watching.latest.tensors
    some = dataclasses.replace(some, num_elements=1000, num_underflow=0, num_saturated=0, sqnr=31.0, headroom=(-0.01,) * 5)
    outlier, grown = dataclasses.replace(some, sqnr=32.4, num_underflow=180), dataclasses.replace(some, num_saturated=11)
    found = dataclasses.replace(watching.latest, tensors=(some, grown, outlier))
    assert found.worst is outlier
    assert found.remarks() == [
        f"{some.name}: 18.0% of the elements underflow to zero.",
        f"{some.name}: 1.1% of the elements saturate.",
    ]


@each("step, num_steps, measured", [("auto", 1, [0]), ("auto", 3, [0, 2]), ("auto", 4, [0, 2]), ("manual", 3, [0])])
def test_stop_logs_the_step_under_way(step, num_steps, measured):
    """Of manual steps nobody ends the first."""
    compiled, logged = fp8(make_model(), step=step), []
    with monitor(compiled, 2, logged.append) as watching:
        train(compiled, *map(batch, range(num_steps)))
    assert [found["fp8/step"] for found in logged] == measured
    assert logged[-1] == watching.latest.to_dict()
    watching.stop()
    assert len(logged) == len(measured)
