"""Matmuls that are no FP8 GEMM get a row with the reason, and are never passed over in silence."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import lowering
from fp8pass import fp8_compile, inspect
from fp8pass.errors import ForwardModeError
from tests.support.cases import each
from tests.support.models import mlp
from tests.tolerances import SQNR_LINEAR_E4M3, SQNR_LINEAR_E5M2, sqnr


def test_matmuls_in_branches_stay_with_a_reason():
    def branch(x, w, flag):
        return torch.cond(flag, lambda x, w: x @ w, lambda x, w: (x @ w) @ w, (x, w)) @ w

    x, w = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    compiled = fp8_compile(branch, "current", backend="aot_eager")
    arguments = (x, w, torch.tensor(True))
    expected, *expected_grads = (out := branch(*arguments)), *torch.autograd.grad(out.square().sum(), (x, w))
    result, *grads = (out := compiled(*arguments)), *torch.autograd.grad(out.square().sum(), (x, w))
    assert sqnr(expected, result) >= SQNR_LINEAR_E4M3
    assert all(sqnr(e, g) >= SQNR_LINEAR_E5M2 for e, g in zip(expected_grads, grads, strict=True))
    gemms = inspect(compiled).gemms
    assert [g.role for g in gemms if g.quantized] == ["output", "grad_weight", "grad_input"]
    assert [g.reason for g in gemms if g.role == "output"][1:] == [
        "unsupported op: mm in a branch or body of cond, which is not rewritten"
    ] * 3


@torch.library.custom_op("fp8pass_test::mm_into", mutates_args=("out",))
def _matmul_into(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    torch.mm(x, w, out=out)


def test_a_custom_matmul_stays_with_a_reason():
    """Even one that writes into an argument."""

    def multiply(x, w):
        out = x.new_empty(x.shape[0], w.shape[1])
        _matmul_into(out, x, w)
        return out @ w

    compiled = fp8_compile(multiply, "current", backend="aot_eager")
    x, w = torch.randn(16, 32), torch.randn(32, 32)
    assert sqnr(multiply(x, w), compiled(x, w)) >= SQNR_LINEAR_E4M3
    custom, plain = inspect(compiled).gemms
    assert custom.op == "fp8pass_test.mm_into"
    assert custom.reason == "unsupported op: fp8pass_test.mm_into: this operation has no FP8 counterpart"
    assert plain.quantized


@pytest.fixture
def fast_path():
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    yield torch.backends.mha.set_fastpath_enabled
    torch.backends.mha.set_fastpath_enabled(was_enabled)


def test_the_fast_path_of_transformer_layers_stays_with_a_reason_that_says_how_to_leave_it(fast_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)).eval()
    compiled = fp8_compile(model, "current", backend="aot_eager")
    fast_path(True)
    with torch.no_grad():
        compiled(torch.randn(4, 16, 64))
    report = inspect(compiled)
    assert [(g.module, g.quantized) for g in report.gemms] == [("0", True), ("1", False)]
    assert report.gemms[1].reason.startswith("unsupported op: _transformer_encoder_layer_fwd: all GEMMs of the layer")
    assert "torch.backends.mha.set_fastpath_enabled(False)" in report.gemms[1].reason
    assert report.outside == ["1.self_attn.out_proj", "1.linear1", "1.linear2"]


# -- forward mode: what FP8 has no derivative for is refused


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
