"""dtypes: autocast, gradient scaling, and mixtures of dtypes, also those that are an error."""

import pytest
import torch
from torch import nn

from fp8pass import DelayedScaling, inspect, state
from tests.support.copies import casts, scaled_gemms
from tests.support.models import LlamaBlock, mlp
from tests.support.training import assert_close, fp8, normal, step
from tests.tolerances import NEGLIGIBLE_GRADIENT

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def under(dtype, call):
    """The call under autocast; the loss is outside of it, as in every training loop."""

    def forward(x):
        with torch.autocast("cpu", dtype=dtype):
            return call(x)

    return forward


def dtypes_of(nodes):
    return {node.meta["val"].dtype for node in nodes}


@pytest.mark.parametrize(("dtype", "recipe"), [(BF16, "delayed"), (F16, "blockwise")])
def test_autocast(dtype, recipe):
    """Weights are quantized from their float32 Parameters; the GEMM itself keeps autocast's output."""
    block, x = LlamaBlock(64, 112), torch.randn(2, 16, 64)
    compiled = fp8(block, recipe)
    expected = step(under(dtype, block), block, x, loss=normal)
    for _ in range(3):
        found = step(under(dtype, compiled), block, x, loss=normal)
    assert_close(found, expected, negligible=NEGLIGIBLE_GRADIENT)
    assert [g.quantized for g in inspect(compiled).gemms] == [True] * 21
    graph = inspect(compiled).graphs[-1].after.graph
    matrices = [matrix for cast in casts(graph) for matrix in cast.matrices]
    assert dtypes_of(n for n in matrices if n.op == "placeholder" and n.meta["val"].dim() == 2) == {F32}
    assert dtypes_of(scaled_gemms(graph)) == {dtype}


def make(dtype, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def grouped(x, w):
    return torch._grouped_mm(x, w, offs=torch.tensor([16, 32], dtype=torch.int32))


MIXED = {
    "mm": (torch.mm, make(BF16, 32, 64), make(F32, 64, 48)),
    "linear, bias": (nn.functional.linear, make(F32, 32, 64), make(F32, 48, 64), make(BF16, 48)),
    "grouped": (grouped, make(BF16, 32, 64), make(F32, 2, 64, 48)),
}


@pytest.mark.parametrize("case", MIXED)
def test_operands_of_two_dtypes_are_torchs_error(case):
    """Tracing lets them pass, so it is the GEMM that raises: one that FP8 replaced would not."""
    function, *args = MIXED[case]
    errors = []
    for compiled in (torch.compile(function, backend="aot_eager"), fp8(function, "current")):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError) as raised:
            compiled(*(x.clone().requires_grad_() for x in args))
        errors.append((type(raised.value), str(raised.value)))
    assert errors[0] == errors[1]


def test_an_overflow_under_gradscaler_skips_the_step_and_leaves_the_histories_sane():
    model, x = mlp(32, 48, 32), torch.randn(24, 32)
    compiled = fp8(model, DelayedScaling(amax_history_len=4))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu", init_scale=256.0)

    def train(factor=1.0):
        """Whether the optimizer moved."""
        optimizer.zero_grad()
        scaler.scale(factor * under(F16, compiled)(x).float().square().mean()).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        return any(not p.equal(b) for p, b in zip(model.parameters(), before, strict=True))

    assert train()
    held = state(compiled)
    held.step()
    scales = {name: held.scale(name) for name in held.tensors if name.endswith(":grad_output")}
    assert not train(factor=float("inf"))
    held.step()
    assert all(held.amax_history(name).isfinite().all() for name in held.tensors)
    for name, scale in scales.items():
        assert held.scale(name).equal(scale), "an overflow is no amax"
        assert held.num_non_finite(name) == 1
    assert train()
