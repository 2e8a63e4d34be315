"""dtypes: autocast, gradient scaling, pure bfloat16 and float16, mixtures, and float64, which is refused."""

import functools

import pytest
import torch
from torch import nn

import fp8pass
from fp8pass import DelayedScaling, inspect, state
from tests.support.cases import rest
from tests.support.models import LlamaBlock
from tests.support.training import assert_close, assert_equal, normal, step
from tests.tolerances import NEGLIGIBLE_GRADIENT

#: Small and odd sizes are the subject: no GEMM stays in high precision because it is thin.
fp8_compile = functools.partial(fp8pass.fp8_compile, select="all")

RECIPES = ("delayed", "current", "blockwise", "rowwise", "mxfp8")
LOW_PRECISION = (torch.bfloat16, torch.float16)
lowering = torch.ops.lowering


def run(call, module, x, autocast=None):
    """A step; the loss is outside of autocast, as in every training loop."""

    def forward(x):
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            return call(x)

    return step(forward, module, x, loss=normal)


def check(module, compiled, x, autocast=None):
    """A compiled module against itself, two steps of warm-up first."""
    expected = run(module, module, x, autocast)
    for _ in range(3):
        found = run(compiled, module, x, autocast)
    assert_close(found, expected, negligible=NEGLIGIBLE_GRADIENT)


def quantized_nodes(compiled):
    """The values that the rewritten joint graph quantizes: the node behind each cast to FP8."""
    (graph,) = inspect(compiled).graphs
    found = []
    for node in graph.after.graph.nodes:
        if str(node.target).startswith("lowering.") and isinstance(node.args and node.args[0], (list, tuple)):
            found += [n for n in node.args[0] if isinstance(n, torch.fx.Node)]
    return found


def by_turns():
    """Every recipe with one dtype, two of them with Inductor as well: where dtypes are told apart no recipe is asked."""
    slow = pytest.mark.slow
    eager = [(LOW_PRECISION[i % 2], recipe, "aot_eager") for i, recipe in enumerate(RECIPES)]
    eager = [*eager[:-1], *rest(eager[-1:])]  # mxfp8 is below, in bfloat16
    generated = [(LOW_PRECISION[(i + 1) % 2], recipe, "inductor") for i, recipe in enumerate(RECIPES)]
    chosen = [row for row in generated if row[1] in ("delayed", "rowwise")]
    return [*eager, *(pytest.param(*row, marks=slow) for row in chosen)]


@pytest.mark.parametrize(("dtype", "recipe", "backend"), by_turns())
def test_autocast(dtype, recipe, backend):
    """Weights are quantized from their float32 Parameters; the GEMM itself keeps autocast's output."""
    block = LlamaBlock(64, 112)
    compiled = fp8_compile(block, recipe, backend=backend)
    check(block, compiled, torch.randn(2, 16, 64), autocast=dtype)
    assert [g.quantized for g in inspect(compiled).gemms] == [True] * 21
    weights = [n for n in quantized_nodes(compiled) if n.op == "placeholder" and n.meta["val"].dim() == 2]
    assert len(set(weights)) == 7
    assert {n.meta["val"].dtype for n in weights} == {torch.float32}
    graph = inspect(compiled).graphs[-1]
    outputs = {n.meta["val"].dtype for n in graph.after.graph.nodes if "scaled_mm" in str(n.target)}
    assert outputs == {dtype}


@pytest.mark.parametrize(
    ("dtype", "recipe"),
    [
        *((torch.bfloat16, recipe) for recipe in ("blockwise", "rowwise", "mxfp8")),
        (torch.float16, "delayed"),
        *rest([(torch.bfloat16, "delayed"), (torch.bfloat16, "current"), (torch.float32, "current")]),
    ],
)
def test_one_dtype_everywhere(dtype, recipe):
    block = LlamaBlock(64, 112).to(dtype)
    compiled = fp8_compile(block, recipe, backend="aot_eager")
    check(block, compiled, torch.randn(2, 16, 64, dtype=dtype))
    assert [g.quantized for g in inspect(compiled).gemms] == [True] * 21


class NormInFloat32(nn.Module):
    """A bfloat16 block whose norm computes in float32, as Llama's reference code does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.up = nn.Linear(48, 80, dtype=torch.bfloat16)
        self.down = nn.Linear(80, 48, dtype=torch.bfloat16)

    def forward(self, x):
        h = self.norm(x.float()).to(x.dtype)
        return x + self.down(torch.tanh(self.up(h)))


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", *rest(["current", "rowwise", "mxfp8"])])
def test_float32_norm_in_a_bfloat16_model(recipe):
    model = NormInFloat32()
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    check(model, compiled, torch.randn(2, 16, 48, dtype=torch.bfloat16))
    assert [g.quantized for g in inspect(compiled).gemms] == [True] * 6
    sources = {n.meta["val"].dtype for n in quantized_nodes(compiled)}
    if recipe in ("blockwise", "mxfp8"):  # their casts read the value from memory, where the model keeps it in bfloat16
        assert sources == {torch.bfloat16}
    else:
        assert sources == {torch.float32, torch.bfloat16}, "the norm's output is quantized before it is rounded to bfloat16"


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", *rest(["current", "blockwise", "mxfp8"])])
def test_float64_is_refused_with_the_reason(recipe):
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)).double()
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    x = torch.randn(16, 32, dtype=torch.float64)
    assert_equal(run(compiled, model, x), run(model, model, x))
    assert {g.reason.split(";")[0] for g in inspect(compiled).gemms} == {"dtype: float64"}
    assert state(compiled).tensors == []


def test_a_float64_island_stays_alone():
    class Island(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(32, 48)
            self.head = nn.Linear(48, 16).double()

        def forward(self, x):
            return self.head(torch.tanh(self.inner(x)).double())

    model = Island()
    compiled = fp8_compile(model, "current", backend="aot_eager")
    check(model, compiled, torch.randn(24, 32))
    quantized = {module: {g.quantized for g in inspect(compiled).gemms if g.module == module} for module in ("inner", "head")}
    assert quantized == {"inner": {True}, "head": {False}}


def make(dtype, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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


@pytest.mark.parametrize("recipe", ["current", "mxfp8", *rest(["delayed", "blockwise", "rowwise"])])
def test_a_model_with_an_input_of_another_dtype_is_torchs_error(recipe):
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32))
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    assert error_of(compiled, [x]) == error_of(torch.compile(model, backend="aot_eager"), [x])
    torch._dynamo.reset()
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which casts both
        compiled(x).sum().backward()
    assert [g.quantized for g in inspect(compiled).gemms] == [True] * 5


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_an_overflow_under_gradscaler_skips_the_step_and_leaves_the_histories_sane(dtype):
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))
    compiled = fp8_compile(model, DelayedScaling(amax_history_len=4), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    x, target = torch.randn(24, 32), torch.randn(24, 32)

    def step(factor=1.0):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            out = compiled(x)
        loss = (out.float() - target).square().mean()
        scaler.scale(factor * loss).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        moved = any(not p.equal(b) for p, b in zip(model.parameters(), before, strict=True))
        return loss.item(), moved

    losses = [step()[0] for _ in range(4)]
    state(compiled).step()
    names = state(compiled).tensors
    assert len(names) == 6
    scales = {name: state(compiled).scale(name) for name in names}
    gradients = [name for name in names if name.endswith(":grad_output")]

    assert step(factor=float("inf"))[1] is False
    assert scaler.get_scale() == 128.0
    state(compiled).step()
    for name in gradients:
        assert state(compiled).scale(name).equal(scales[name]), "an overflow is no amax"
        assert state(compiled).num_non_finite(name) == 1
    for name in names:
        assert state(compiled).amax_history(name).isfinite().all()
        assert state(compiled).scale(name).isfinite()

    loss, moved = step()
    assert moved
    assert loss < losses[0]
