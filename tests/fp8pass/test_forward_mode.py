"""Forward-mode differentiation: what FP8 has no derivative for is refused, and no tangent is lost in silence."""

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import jacfwd, jvp

import lowering
from fp8pass import fp8_compile
from fp8pass.errors import ForwardModeError

RECIPES = ("delayed", "current", "blockwise", "rowwise", "mxfp8")


def make_model():
    return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32))


@contextlib.contextmanager
def dual_parameter(model):
    """In a level of its own, with a tangent at one Parameter."""
    last = model[2]
    weight = last.weight
    with forward_ad.dual_level():
        del last.weight
        last.weight = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        try:
            yield
        finally:
            del last.weight
            last.weight = weight


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_tangent_of_an_input_or_a_parameter_is_refused(recipe, warm, with_grad):
    model = make_model()
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    x, tangent = torch.randn(32, 64), torch.randn(32, 64)
    with torch.set_grad_enabled(with_grad):
        expected = compiled(x) if warm else None
        with forward_ad.dual_level(), pytest.raises(ForwardModeError, match=r"reverse mode"):
            compiled(forward_ad.make_dual(x, tangent))
        with dual_parameter(model), pytest.raises(ForwardModeError):
            compiled(x)
        with forward_ad.dual_level():  # without a tangent
            found = compiled(x)
        if expected is not None:
            assert found.shape == expected.shape


@pytest.mark.slow
@pytest.mark.parametrize("with_grad", [True, False])
def test_generated_code_refuses_it(with_grad):
    compiled = fp8_compile(make_model(), "current", backend="inductor")
    x = torch.randn(32, 64)
    with torch.set_grad_enabled(with_grad), forward_ad.dual_level(), pytest.raises(ForwardModeError):
        compiled(forward_ad.make_dual(x, x))


def test_a_derivative_inside_of_the_model_runs_in_fp8():
    """A part of the graph like any other."""
    model, x = make_model(), torch.randn(32, 64)

    def inside(x):
        return jvp(model, (x,), (torch.ones_like(x),))[1]

    with torch.no_grad():
        found, expected = fp8_compile(inside, "current", backend="aot_eager")(x), inside(x)
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()


@pytest.mark.filterwarnings("ignore:.*:fp8pass.errors.Fp8FallbackWarning", "ignore::UserWarning")
def test_transforms_around_the_model_have_the_derivative_of_high_precision():
    """torch.compile runs a model eagerly below a transform of torch.func, and says so."""
    model = make_model()
    compiled = fp8_compile(model, "current", backend="aot_eager")
    x, tangent = torch.randn(8, 64), torch.randn(8, 64)
    assert torch.equal(jvp(compiled, (x,), (tangent,))[1], jvp(model, (x,), (tangent,))[1])
    x = torch.randn(1, 64)
    found = jacfwd(lambda v: compiled(v).sum(0))(x)
    torch.testing.assert_close(found, jacfwd(lambda v: model(v).sum(0))(x))


def test_operations_of_lowering_refuse_it():
    x, scale = torch.randn(16, 32), torch.tensor(2.0)
    q = x.to(torch.float8_e4m3fn)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        for refused in (
            lambda: lowering.amax(dual),
            lambda: lowering.quantize(dual, scale, torch.float8_e4m3fn),
            lambda: lowering.quantize_rowwise(dual, torch.float8_e4m3fn),
            lambda: lowering.scaled_mm(q, q.t(), forward_ad.make_dual(scale, scale), scale),
        ):
            with pytest.raises(NotImplementedError, match=r"lowering.\w+ has no forward-mode derivative"):
                refused()
        assert lowering.amax(x) == x.abs().max()
