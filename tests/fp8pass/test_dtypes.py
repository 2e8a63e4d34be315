"""dtypes: autocast, gradient scaling, pure bfloat16 and float16, mixtures, and float64, which is refused."""

import functools

import pytest
import torch
from torch import nn

import fp8pass
from fp8pass import inspect, state
from tests.support.cases import rest
from tests.support.models import LlamaBlock, Net, mlp
from tests.support.training import assert_close, assert_trains_as, normal, step
from tests.tolerances import NEGLIGIBLE_GRADIENT

#: Small and odd sizes are the subject: no GEMM stays in high precision because it is thin.
fp8_compile = functools.partial(fp8pass.fp8_compile, select="all")

RECIPES = ("delayed", "current", "blockwise", "rowwise", "mxfp8")
LOW_PRECISION = (torch.bfloat16, torch.float16)
lowering = torch.ops.lowering


check = functools.partial(assert_trains_as, loss=normal, warm_up=2, negligible=NEGLIGIBLE_GRADIENT)


def under(dtype, call):
    """The call under autocast; the loss is outside of it, as in every training loop."""

    def forward(x):
        with torch.autocast("cpu", dtype=dtype):
            return call(x)

    return forward


def quantized_nodes(compiled):
    """The values that the rewritten joint graph quantizes: the node behind each cast to FP8."""
    (graph,) = inspect(compiled).graphs
    found = []
    for node in graph.after.graph.nodes:
        if str(node.target).startswith("lowering.") and isinstance(node.args and node.args[0], (list, tuple)):
            found += [n for n in node.args[0] if isinstance(n, torch.fx.Node)]
    return found


#: Every recipe with one dtype, two of them with Inductor as well: where dtypes are told apart no recipe is asked.
AUTOCAST = [
    *((LOW_PRECISION[i % 2], recipe, "aot_eager") for i, recipe in enumerate(RECIPES[:-1])),
    *rest([(torch.bfloat16, "mxfp8", "aot_eager")]),  # which is below, in bfloat16
    (torch.float16, "delayed", "inductor"),
    (torch.bfloat16, "rowwise", "inductor"),
]


@pytest.mark.parametrize(("dtype", "recipe", "backend"), AUTOCAST)
def test_autocast(dtype, recipe, backend):
    """Weights are quantized from their float32 Parameters; the GEMM itself keeps autocast's output."""
    block, x = LlamaBlock(64, 112), torch.randn(2, 16, 64)
    compiled = fp8_compile(block, recipe, backend=backend)
    expected = step(under(dtype, block), block, x, loss=normal)
    for _ in range(3):
        found = step(under(dtype, compiled), block, x, loss=normal)
    assert_close(found, expected, negligible=NEGLIGIBLE_GRADIENT)
    assert [g.quantized for g in inspect(compiled).gemms] == [True] * 21
    weights = {n for n in quantized_nodes(compiled) if n.op == "placeholder" and n.meta["val"].dim() == 2}
    assert [n.meta["val"].dtype for n in weights] == [torch.float32] * 7
    if recipe == "blockwise":  # cast from memory by kernels, at half the bytes; fused casts read registers
        assert {n.meta["val"].dtype for n in quantized_nodes(compiled)} == {dtype, torch.float32}
    graph = inspect(compiled).graphs[-1]
    assert {n.meta["val"].dtype for n in graph.after.graph.nodes if "scaled_mm" in str(n.target)} == {dtype}


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", *rest(["current", "rowwise", "mxfp8"])])
def test_float32_norm_in_a_bfloat16_model(recipe):
    """As Llama's reference code has it."""
    layers = {"norm": nn.LayerNorm(48), "up": nn.Linear(48, 80).bfloat16(), "down": nn.Linear(80, 48).bfloat16()}
    model = Net(lambda m, x: x + m.down(torch.tanh(m.up(m.norm(x.float()).to(x.dtype)))), **layers)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    check(compiled, model, torch.randn(2, 16, 48, dtype=torch.bfloat16))
    assert [g.quantized for g in inspect(compiled).gemms] == [True] * 6
    sources = {n.meta["val"].dtype for n in quantized_nodes(compiled)}
    # Blocks are cast from memory, where the model keeps bfloat16; else the norm's output is quantized before it is rounded.
    assert sources == ({torch.bfloat16} if recipe in ("blockwise", "mxfp8") else {torch.float32, torch.bfloat16})


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_default_dtype_of_torch_is_not_that_of_scales(recipe):
    torch.set_default_dtype(torch.bfloat16)
    try:
        compiled = fp8_compile(mlp(64, 96, 64), recipe, backend="aot_eager", weight_copies="cache")
        for _ in range(3):
            compiled(torch.randn(32, 64)).square().mean().backward()
        assert all(value.dtype != torch.bfloat16 for value in state(compiled).state_dict().values())
    finally:
        torch.set_default_dtype(torch.float32)


def make(dtype, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def grouped(x, w):
    return torch._grouped_mm(x, w, offs=torch.tensor([16, 32], dtype=torch.int32))


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MIXED = {
    "mm": (torch.mm, make(BF16, 32, 64), make(F32, 64, 48)),
    "mm, wider input": (torch.mm, make(F32, 32, 64), make(BF16, 64, 48)),
    "mm, both narrow": (torch.mm, make(F16, 32, 64), make(BF16, 64, 48)),
    "linear": (nn.functional.linear, make(BF16, 2, 32, 64), make(F32, 48, 64)),
    "linear, bias": (nn.functional.linear, make(F32, 32, 64), make(F32, 48, 64), make(BF16, 48)),
    "linear, wider bias": (nn.functional.linear, make(BF16, 32, 64), make(BF16, 48, 64), make(F32, 48)),
    "addmm": (torch.addmm, make(BF16, 32, 48), make(F32, 32, 64), make(F32, 64, 48)),
    "bmm": (torch.bmm, make(BF16, 2, 32, 64), make(F32, 2, 64, 48)),
    "baddbmm": (torch.baddbmm, make(BF16, 2, 32, 48), make(F32, 2, 32, 64), make(F32, 2, 64, 48)),
    "einsum": (lambda x, w: torch.einsum("btk,kn->btn", x, w), make(BF16, 2, 32, 64), make(F32, 64, 48)),
    "grouped": (grouped, make(BF16, 32, 64), make(F32, 2, 64, 48)),
}


def error_of(function, args):
    torch._dynamo.reset()
    with pytest.raises(RuntimeError) as raised:
        function(*args)
    return type(raised.value), str(raised.value)


@pytest.mark.parametrize(
    ("case", "trains"),
    [*((case, i % 2 == 0) for i, case in enumerate(MIXED)), *rest((case, i % 2 == 1) for i, case in enumerate(MIXED))],
)
def test_operands_of_two_dtypes_are_torchs_error(case, trains):
    """Tracing lets them pass, so it is the GEMM that raises: one that FP8 replaced would not."""
    function, *args = MIXED[case]
    args = [x.clone().requires_grad_(trains) for x in args]
    expected = error_of(torch.compile(function, backend="aot_eager"), args)
    for recipe in ("current", "rowwise"):
        assert error_of(fp8_compile(function, recipe, backend="aot_eager"), args) == expected


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_an_overflow_under_gradscaler_skips_the_step_and_leaves_the_histories_sane(dtype):
    model, x, target = mlp(32, 48, 32), torch.randn(24, 32), torch.randn(24, 32)
    compiled = fp8_compile(model, fp8pass.DelayedScaling(amax_history_len=4), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)

    def train(factor=1.0):
        optimizer.zero_grad()
        loss = (under(dtype, compiled)(x).float() - target).square().mean()
        scaler.scale(factor * loss).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        return loss.item(), any(not p.equal(b) for p, b in zip(model.parameters(), before, strict=True))

    losses = [train()[0] for _ in range(4)]
    held = state(compiled)
    held.step()
    assert len(held.tensors) == 6
    scales = {name: held.scale(name) for name in held.tensors}
    assert train(factor=float("inf"))[1] is False
    assert scaler.get_scale() == 128.0
    held.step()
    for name in held.tensors:
        assert held.amax_history(name).isfinite().all()
        assert held.scale(name).isfinite()
        if name.endswith(":grad_output"):
            assert held.scale(name).equal(scales[name]), "an overflow is no amax"
            assert held.num_non_finite(name) == 1
    loss, moved = train()
    assert moved
    assert loss < losses[0]
