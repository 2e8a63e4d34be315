"""Forward-mode differentiation: what FP8 has no derivative for is refused, and no tangent is lost in silence."""

import pytest
import torch
from torch.autograd import forward_ad

import lowering
from fp8pass import fp8_compile
from fp8pass.errors import ForwardModeError
from tests.support.cases import each
from tests.support.models import mlp


@each("recipe, warm, with_grad", [("delayed", True, True), ("current", False, True), ("mxfp8", True, False)])
def test_a_tangent_of_an_input_or_a_parameter_is_refused(recipe, warm, with_grad):
    model, x = mlp(), torch.randn(32, 64)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    with torch.set_grad_enabled(with_grad), forward_ad.dual_level():
        if warm:
            compiled(x)
        with pytest.raises(ForwardModeError, match=r"reverse mode"):
            compiled(forward_ad.make_dual(x, torch.ones_like(x)))
        assert compiled(x).shape == x.shape, "without a tangent"
        weight = model[2].weight.detach()
        del model[2].weight
        model[2].weight = forward_ad.make_dual(weight, torch.ones_like(weight))
        with pytest.raises(ForwardModeError):
            compiled(x)


def test_operations_of_lowering_refuse_it():
    x = torch.randn(16, 32)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=r"lowering.\w+ has no forward-mode derivative"):
            lowering.amax(forward_ad.make_dual(x, x))
        assert lowering.amax(x) == x.abs().max()
