"""Forward-mode differentiation: what FP8 has no derivative for is refused, and no tangent is lost in silence."""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jacfwd, jvp

import lowering
from fp8pass import fp8_compile
from fp8pass.errors import ForwardModeError
from tests.support.cases import combinations, rest
from tests.support.models import mlp

RECIPES = ("delayed", "current", "blockwise", "rowwise", "mxfp8")
INDUCTOR = [("current", False, with_grad, "inductor") for with_grad in (True, False)]


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


FORMS = [*INDUCTOR, *((*form, "aot_eager") for form in combinations(RECIPES, (False, True), (False, True)))]
FAST = [FORMS[i] for i in (0, 2, 5, 7, 8, 11)]  # every recipe, cold and warm, with gradients and without


@pytest.mark.parametrize(("recipe", "warm", "with_grad", "backend"), [*FAST, *rest(form for form in FORMS if form not in FAST)])
def test_a_tangent_of_an_input_or_a_parameter_is_refused(recipe, warm, with_grad, backend):
    compiled = fp8_compile(model := mlp(), recipe, backend=backend)
    x, tangent = torch.randn(32, 64), torch.randn(32, 64)
    with torch.set_grad_enabled(with_grad):
        expected = compiled(x) if warm else None
        with forward_ad.dual_level(), pytest.raises(ForwardModeError, match=r"reverse mode"):
            compiled(forward_ad.make_dual(x, tangent))
        if backend == "inductor":
            return
        with dual_parameter(model), pytest.raises(ForwardModeError):
            compiled(x)
        with forward_ad.dual_level():  # without a tangent
            found = compiled(x)
        assert expected is None or found.shape == expected.shape


@pytest.mark.filterwarnings("ignore:.*:fp8pass.errors.Fp8FallbackWarning", "ignore::UserWarning")
def test_derivatives_inside_of_the_model_run_in_fp8_and_those_around_it_in_high_precision():
    """torch.compile runs a model eagerly below a transform of torch.func, and says so."""
    model, x, tangent = mlp(), torch.randn(32, 64), torch.randn(32, 64)

    def inside(x):
        return jvp(model, (x,), (torch.ones_like(x),))[1]

    with torch.no_grad():
        found, expected = fp8_compile(inside, "current", backend="aot_eager")(x), inside(x)
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()
    compiled = fp8_compile(model, "current", backend="aot_eager")
    assert torch.equal(jvp(compiled, (x,), (tangent,))[1], jvp(model, (x,), (tangent,))[1])
    found, expected = (jacfwd(lambda v, call=call: call(v).sum(0))(x[:1]) for call in (compiled, model))
    torch.testing.assert_close(found, expected)


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
