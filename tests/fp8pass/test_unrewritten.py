"""Matmuls that are no FP8 GEMM get a row with the reason, and are never passed over in silence."""

import pytest
import torch
from torch import nn

from fp8pass import fp8_compile, inspect
from tests.support.models import Net
from tests.support.numerics import sqnr
from tests.tolerances import SQNR_LINEAR_E4M3, SQNR_LINEAR_E5M2


@torch.library.custom_op("fp8pass_test::grouped_mm", mutates_args=())
def _custom_matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


@_custom_matmul.register_fake
def _(x, w):
    return x.new_empty(x.shape[0], w.shape[1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_matmuls_in_branches_stay_with_a_reason(recipe, backend):
    def branch(x, w, flag):
        return torch.cond(flag, lambda x, w: x @ w, lambda x, w: (x @ w) @ w, (x, w)) @ w

    x, w = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    compiled = fp8_compile(branch, recipe, backend=backend)
    arguments = (x, w, torch.tensor(True))
    expected, *expected_grads = (out := branch(*arguments)), *torch.autograd.grad(out.square().sum(), (x, w))
    for _ in range(3):
        result, *grads = (out := compiled(*arguments)), *torch.autograd.grad(out.square().sum(), (x, w))
    assert sqnr(expected, result) >= SQNR_LINEAR_E4M3
    assert all(sqnr(e, g) >= SQNR_LINEAR_E5M2 for e, g in zip(expected_grads, grads, strict=True))
    gemms = inspect(compiled).gemms
    assert [g.role for g in gemms if g.quantized] == ["output", "grad_weight", "grad_input"]
    assert [g.reason for g in gemms if g.role == "output"][1:] == [
        "unsupported op: mm in a branch or body of cond, which is not rewritten"
    ] * 3


def test_custom_matmul_stays_with_a_reason():
    compiled = fp8_compile(_custom_matmul, backend="aot_eager")
    x, w = torch.randn(16, 32), torch.randn(32, 48)
    assert compiled(x, w).equal(x @ w)
    (gemm,) = inspect(compiled).gemms
    assert (gemm.op, gemm.m, gemm.n, gemm.k) == ("fp8pass_test.grouped_mm", 16, 48, 32)
    assert gemm.reason == "unsupported op: fp8pass_test.grouped_mm: this operation has no FP8 counterpart"


@torch.library.custom_op("fp8pass_test::mm_into", mutates_args=("out",))
def _matmul_into(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    torch.mm(x, w, out=out)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_custom_matmul_that_writes_into_an_argument_stays_with_a_reason(backend):
    def multiply(x, w):
        out = x.new_empty(x.shape[0], w.shape[1])
        _matmul_into(out, x, w)
        return out @ w

    compiled = fp8_compile(multiply, "current", backend=backend)
    x, w = torch.randn(16, 32), torch.randn(32, 32)
    assert sqnr(multiply(x, w), compiled(x, w)) >= SQNR_LINEAR_E4M3
    custom, plain = inspect(compiled).gemms
    assert (custom.op, custom.reason) == (
        "fp8pass_test.mm_into",
        "unsupported op: fp8pass_test.mm_into: this operation has no FP8 counterpart",
    )
    assert plain.quantized


def test_a_bilinear_stays_with_a_reason():
    """It multiplies three operands, each of which has a gradient."""
    model = Net(lambda self, x, y: self.product(x, y), product=nn.Bilinear(32, 48, 16))
    x, y = torch.randn(24, 32, requires_grad=True), torch.randn(24, 48, requires_grad=True)
    compiled = fp8_compile(model, backend="aot_eager", rules={"product": "delayed"})
    assert compiled(x, y).equal(model(x, y))
    gemms = inspect(compiled).gemms
    assert {(g.module, g.m, g.reason) for g in gemms} == {
        ("product", "?", "unsupported op: _trilinear: this operation has no FP8 counterpart")
    }
    assert [g.role for g in gemms] == ["output", *["grad_input"] * 3]


@pytest.fixture
def fast_path():
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    yield torch.backends.mha.set_fastpath_enabled
    torch.backends.mha.set_fastpath_enabled(was_enabled)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_fast_path_of_transformer_layers_stays_with_a_reason_that_says_how_to_leave_it(backend, fast_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)).eval()
    x = torch.randn(4, 16, 64)

    def report():
        compiled = fp8_compile(model, "current", backend=backend)
        with torch.no_grad():
            compiled(x)
        return inspect(compiled)

    fast_path(True)
    first = report()
    assert [(g.module, g.quantized) for g in first.gemms] == [("0", True), ("1", False)]
    assert first.gemms[1].reason.startswith("unsupported op: _transformer_encoder_layer_fwd: all GEMMs of the layer")
    assert "torch.backends.mha.set_fastpath_enabled(False)" in first.gemms[1].reason
    assert first.outside == ["1.self_attn.out_proj", "1.linear1", "1.linear2"]

    fast_path(False)
    torch._dynamo.reset()
    second = report()
    assert all(g.quantized for g in second.gemms)
    assert second.outside == []


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_gemms_on_two_devices(recipe):
    """Delayed scaling keeps its state on one device and names GEMMs elsewhere; weights share no launch. The second linear is on
    torch's device without data, which is the only other one that every machine has."""
    layers = {"here": nn.Linear(32, 32), "there": nn.Linear(32, 32, device="meta")}
    model, x = Net(lambda m, x, y: (m.here(x), m.there(y)), **layers), torch.randn(16, 32)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    out, _ = compiled(x, x.to("meta"))
    out.sum().backward()
    (here,), (there,) = (
        [g for g in inspect(compiled).gemms if g.module == name and g.role == "output"] for name in ("here", "there")
    )
    assert there.quantized
    if recipe == "delayed":
        assert torch.equal(out, model(x, x.to("meta"))[0])
        assert "on cpu; the amax histories of this graph are on meta" in here.reason
    else:
        assert all(g.quantized for g in inspect(compiled).gemms)
    for node in inspect(compiled).graphs[0].after.graph.nodes:
        if "multi" in str(node.target):
            assert len({x.meta["val"].device for x in node.args[0]}) == 1
