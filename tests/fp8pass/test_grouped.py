"""Grouped GEMMs through the pass: bit for bit a loop over the experts, roles, names, gathers, rows of no group, reasons."""

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from fp8pass import DelayedScaling, Float8BlockScaling, fp8_compile, inspect, state
from tests.support.cases import rest
from tests.support.copies import CastNode, scaled_gemms
from tests.support.joint import calls, trace, two_ranks
from tests.support.models import Net, Stack
from tests.support.moe import RECIPES, Experts, FallbackExperts, GatheredExperts, MoE, expected, offsets
from tests.support.numerics import sqnr
from tests.support.training import assert_equal, compiled_step, same, step
from tests.tolerances import SQNR_EMULATED, SQNR_MODEL_GRADIENT

aten = torch.ops.aten

SIZES = (0, 1, 7, 15, 16, 17, 127, 128, 129, 0)
ALL_IN_ONE = (0, 0, 0, sum(SIZES), 0, 0, 0, 0, 0, 0)
K, N = 48, 80


ROLES = ("output", "grad_weight", "grad_input")


def roles_of(compiled):
    return [(g.role, g.groups, g.quantized) for g in inspect(compiled).gemms]


def compiled_experts(recipe, dtype=torch.bfloat16):
    model = Experts(len(SIZES), K, N, dtype)
    return model, fp8_compile(model, recipe, backend="aot_eager")


def run(compiled, model, x, dy, offs):
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = compiled(x, offs)
    out.backward(dy)
    return out.detach(), x.grad, model.weight.grad


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_that_a_linear_reads_too(recipe):
    """To the plan a matrix and its rows in groups are two tensors, each quantized once: as if each layer were alone."""
    layers = {"experts": Experts(4, K, N), "shared": nn.Linear(K, N, bias=False, dtype=torch.bfloat16)}
    model, offs = Net(lambda m, x, offs: torch.cat([m.experts(x, offs), m.shared(x)], -1), **layers), offsets((5, 17, 0, 10))
    x, options = torch.randn(32, K, dtype=torch.bfloat16), {"select": "all", "loss": lambda out: out.float().square().sum()}
    both, found = compiled_step(model, recipe, x, offs, **options)
    assert [g.quantized for g in inspect(both).gemms] == [True] * 6
    alone = [
        compiled_step(layer, recipe, *args, **options)[1] for layer, *args in ((model.experts, x, offs), (model.shared, x))
    ]
    assert found.out.equal(torch.cat([each.out for each in alone], -1))
    assert same(list(found.parameters.values()), [grad for each in alone for grad in each.parameters.values()])


@pytest.mark.parametrize("spare", [0, 21])
@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_a_loop_over_the_experts_bit_for_bit(recipe, spare):
    """Rows of no group hold NaN, as uninitialized memory may: they reach nothing."""
    model, compiled = compiled_experts(recipe)
    rows = sum(SIZES) + spare
    for sizes in (SIZES, ALL_IN_ONE):
        x, dy = torch.randn(rows, K, dtype=torch.bfloat16), torch.randn(rows, N, dtype=torch.bfloat16)
        x[sum(SIZES) :] = dy[sum(SIZES) :] = torch.nan
        fresh = fp8_compile(model, recipe, backend="aot_eager") if recipe == "delayed" else compiled
        found = run(fresh, model, x, dy, offsets(sizes))
        wanted = expected(recipe, x, model.weight, dy, sizes)
        assert [got.equal(want) for got, want in zip(found, wanted, strict=True)] == [True] * 3
    assert roles_of(compiled if recipe != "delayed" else fresh) == [(role, len(SIZES), True) for role in ROLES]


# -- which GEMMs, and their names


def test_names_are_those_of_the_stacks_and_the_router_stays():
    compiled = fp8_compile(MoE().to(torch.bfloat16), DelayedScaling(amax_history_len=4), backend="aot_eager")
    compiled(torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    found = {f"{g.module}:{g.role}": (g.m, g.n, g.k) for g in inspect(compiled).gemms if g.groups == 4 and g.quantized}
    of_up = {"up:output": (64, 96, 64), "up:grad_input": (64, 64, 96), "up:grad_weight": (96, 64, 64)}
    of_down = {"down:output": (64, 64, 48), "down:grad_input": (64, 48, 64), "down:grad_weight": (64, 48, 64)}
    assert found == of_up | of_down
    assert {g.module for g in inspect(compiled).gemms if not g.quantized} == {"router"}
    assert "64 x 96 x 64, 4 groups" in str(inspect(compiled))
    scales = {name: tuple(state(compiled).scale(name).shape) for name in state(compiled).tensors}
    kinds = {"input": (), "weight": (4,), "grad_output": ()}
    assert scales == {f"{module}:{kind}": shape for module in ("up", "down") for kind, shape in kinds.items()}
    assert state(compiled).amax_history("up:weight").shape == (4, 4)


@pytest.mark.parametrize(("recipe", "stays"), [("current", False), ("blockwise", False), ("current", True)])
def test_the_loop_of_transformers_in_float32_is_rewritten_with_both_gradients_or_one(recipe, stays):
    pytest.importorskip("transformers.integrations.moe")

    model = FallbackExperts(len(SIZES), 50, 72, torch.float32)
    compiled = fp8_compile(model, recipe, rules={"*:grad_weight": None} if stays else {}, backend="aot_eager")
    rows = sum(SIZES) + 5
    x, dy = torch.randn(rows, 50), torch.randn(rows, 72)
    x[sum(SIZES) :] = dy[sum(SIZES) :] = torch.nan
    found = run(compiled, model, x, dy, offsets(SIZES))
    out, dx, dw = expected(recipe, x, model.weight, dy, SIZES)
    if stays:
        dw = torch.stack([g.t() @ rows for g, rows in zip(dy[: sum(SIZES)].split(SIZES), x.split([*SIZES, 5]), strict=False)])
    for got, want in zip(found, (out, dx, dw), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # the product of x and dy is computed transposed
    assert stays or not any("fallback" in str(n.target) for n in inspect(compiled).graphs[0].after.graph.nodes)
    quantized = {g.role: g.quantized for g in inspect(compiled).gemms}
    assert quantized == {"output": True, "grad_input": True, "grad_weight": not stays}


def batched(multiply):
    """Every expert has as many rows: a batched GEMM."""
    return Net(multiply, weight=nn.Parameter(torch.randn(3, 40, 56) / 6), bias=nn.Parameter(torch.randn(3, 1, 56)))


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bmm_with_a_parameter_equals_a_loop(recipe, use_bias):
    model = batched(lambda m, x: torch.baddbmm(m.bias, x, m.weight) if use_bias else torch.bmm(x, m.weight))
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    x, dy = torch.randn(3, 24, 40, requires_grad=True), torch.randn(3, 24, 56)
    out = compiled(x)
    out.backward(dy)
    flat = (x.detach().flatten(0, 1), model.weight.detach().transpose(1, 2), dy.flatten(0, 1))
    want_out, want_dx, want_dw = expected(recipe, *flat, (24, 24, 24))
    want_out = want_out.view_as(out) + (model.bias if use_bias else 0)
    torch.testing.assert_close(out, want_out, rtol=1e-6, atol=1e-6)  # K is summed in another order
    torch.testing.assert_close(x.grad, want_dx.view_as(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.weight.grad, want_dw.transpose(1, 2), rtol=1e-6, atol=1e-6)
    ops = {"output": "baddbmm" if use_bias else "bmm", "grad_weight": "bmm", "grad_input": "bmm"}
    assert {(g.role, g.op, g.groups) for g in inspect(compiled).gemms if g.quantized} == {(r, op, 3) for r, op in ops.items()}


def test_stacks_of_both_operands():
    """`_grouped_mm` without groups' ends."""
    model, x = batched(lambda m, x: torch._grouped_mm(x, m.weight)).bfloat16(), torch.randn(3, 24, 40, dtype=torch.bfloat16)
    compiled, _ = compiled_step(model, "current", x)
    assert roles_of(compiled) == [(role, 3, True) for role in ROLES]


@pytest.mark.parametrize(
    ("options", "role", "text"),
    [
        ({"x_block_scaling_dim": 2, "w_block_scaling_dim": 1}, "output", "x_block_scaling_dim=1 runs"),
        ({"grad_block_scaling_dim": 2, "w_block_scaling_dim": 1}, "grad_input", "grad_block_scaling_dim=1 runs"),
        ({"backward_override": "dequantized"}, "grad_weight", "a grouped GEMM reads its original operands"),
    ],
    ids=str,
)
def test_reasons(options, role, text):
    model, compiled = compiled_experts(Float8BlockScaling(**options))
    x, dy = torch.randn(440, K, dtype=torch.bfloat16), torch.randn(440, N, dtype=torch.bfloat16)
    run(compiled, model, x, dy, offsets(SIZES))
    (gemm,) = [g for g in inspect(compiled).gemms if g.role == role]
    assert not gemm.quantized
    assert text in gemm.reason


# -- gathers, and rows of no group


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gathered_source_is_cast_before_it_is_gathered(recipe):
    tokens, top_k, sizes = 40, 4, (0, 70, 30, 43)
    model = GatheredExperts(4, K, N)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    index = torch.randperm(tokens * top_k) // top_k
    x = torch.randn(tokens, K, dtype=torch.bfloat16)
    index = torch.where(torch.isin(index, torch.tensor([3, 7])), 0, index)
    index[sum(sizes) :] = 7  # row 7 is read by slots of no group alone
    x[7] = torch.nan
    dy = torch.randn(tokens * top_k, N, dtype=torch.bfloat16)
    dy[sum(sizes) :] = torch.nan
    source = x.clone().requires_grad_()
    out = compiled(source, offsets(sizes), index)
    out.backward(dy)
    want_out, want_dx, want_dw = expected(recipe, x[index], model.weight.detach(), dy, sizes)
    assert out.equal(want_out)
    assert model.weight.grad.equal(want_dw)
    scattered = torch.zeros_like(x).index_put((index,), want_dx, accumulate=True)
    torch.testing.assert_close(source.grad, scattered, rtol=0.02, atol=0.02)
    if recipe == "delayed":
        amax = x[index[: sum(sizes)]].abs().amax().float()
        assert state(compiled).amax_history("weight:input")[0] == amax
    casts = [n for n in inspect(compiled).graphs[0].after.graph.nodes if "lowering.cast" in str(n.target)]
    shapes = [tuple(m.meta["val"].shape) for n in casts for m in CastNode.read(n).matrices]
    inputs = [shape[-2:] for shape in shapes if shape[-1] == K]
    assert inputs
    assert set(inputs) <= {(tokens, K), (N, K)}


def test_a_source_that_is_larger_than_what_is_gathered_is_cast_after_it():
    compiled = fp8_compile(GatheredExperts(2, 32, 48), "current", backend="aot_eager", weight_copies="save")
    with torch.no_grad():
        compiled(torch.randn(100, 32, dtype=torch.bfloat16), offsets((8, 8)), torch.arange(16))
    casts = [n for n in inspect(compiled).graphs[0].after.graph.nodes if "lowering.cast" in str(n.target)]
    assert {tuple(n.args[0][0].meta["val"].shape) for n in casts} == {(16, 32), (2, 48, 32)}


@pytest.mark.parametrize("recipe", [*RECIPES[::2], *rest(RECIPES[1::2])])
def test_what_backward_needs_is_saved_once(recipe):
    """The gathered input is not saved, nor what SwiGLU makes of gate and up: backward makes both again."""
    saved = {}
    for rules in ({}, {"*": None}):
        torch._dynamo.reset()
        model = MoE(256, 96, 16, 8).to(torch.bfloat16)  # the proportions of Qwen3-30B-A3B
        compiled = fp8_compile(model, recipe, rules=rules, backend="aot_eager")
        compiled(torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        saved[bool(rules)] = inspect(compiled).graphs[0].saved_bytes
    assert saved[False] <= 0.60 * saved[True]


@pytest.mark.parametrize("recipe", [Float8BlockScaling(), Float8BlockScaling(w_block_scaling_dim=1)])
def test_scales_of_neighbouring_rows_are_together(recipe):
    """As the GEMM reads them, whatever put the rows into the order of their experts: of inputs and gradients, of weights too
    where they have 1x128 blocks."""
    x = torch.randn(24, 256, dtype=torch.bfloat16, requires_grad=True)
    for model, more in ((Experts(3, 256, 272), ()), (Routed(3, 256, 272), (torch.randperm(24),))):
        work = trace(model, x, offsets((8, 12, 4)), *more, recipe=recipe).run()
        gemms = scaled_gemms(work.graph)
        assert len(gemms) == 3
        for gemm in gemms:
            for name in "ab":
                scales = gemm.args[2 + "ab".index(name)].meta["val"]
                is_line = gemm.kwargs[f"granularity_{name}"] == "block_1x128"
                assert (scales.stride(-2) == 1 < scales.shape[-2]) == is_line, f"{gemm.name}, {name}"


@pytest.mark.parametrize("tail", [0, 5])
def test_a_gradient_in_blocks_is_read_once(tail):
    """One cast makes what grad_input and grad_weight read, also where some rows are of no group."""
    x = torch.randn(24 + tail, 256, dtype=torch.bfloat16, requires_grad=True)
    work = trace(Experts(3, 256, 272), x, offsets((8, 12, 4)), recipe="blockwise").run()
    for role in ("input", "grad_output"):
        makers = [made.maker for copy, made in work.applied.copies.items() if copy.name.kind == role]
        assert len(makers) == 2
        assert len(set(makers)) == 1, role
    assert all(node.kwargs["rowwise"] for node in calls(work.graph, torch.ops.lowering.cast_columns.default))


class Routed(GatheredExperts):
    """Experts of gathered rows, whose source backward does not have."""

    def forward(self, x, offs, index):
        return super().forward(x.cumsum(0), offs, index)


# -- shapes, checkpointing, gathered weights


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_a_number_of_tokens_that_changes(recipe):
    model = MoE().to(torch.bfloat16)
    compiled = fp8_compile(model, recipe, backend="aot_eager", dynamic=True)
    for tokens in (32, 48, 81):
        x = torch.randn(tokens, 64, dtype=torch.bfloat16)
        found, plain = (step(call, model, x).inputs[0] for call in (compiled, model))
        assert sqnr(plain, found) >= SQNR_MODEL_GRADIENT
    assert len(inspect(compiled).graphs) == 1
    assert {g.quantized for g in inspect(compiled).gemms if g.module != "router"} == {True}


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_checkpointing_changes_no_bit(recipe):
    model, x = Stack([MoE()]).to(torch.bfloat16), torch.randn(32, 64, dtype=torch.bfloat16)
    _, expected = compiled_step(model, recipe, x, count=3)
    model.options = {"use_reentrant": False}  # of checkpoint
    _, found = compiled_step(model, recipe, x, count=3)
    assert_equal(found, expected)


def test_gathered_weights_of_experts_travel_in_high_precision():
    class Sharded(Experts):
        def forward(self, x, offs):
            whole = all_gather_tensor_autograd(self.weight, 0, torch.distributed.group.WORLD)
            return torch._grouped_mm(x, whole.transpose(-2, -1), offs)

    with two_ranks():
        model = Sharded(2, 32, 48)
        x = torch.randn(24, 32, dtype=torch.bfloat16, requires_grad=True)
        work = trace(model, x, offsets((8, 12, 4, 0)), recipe="current").run()
    (gathered,) = work.plan.gathers
    assert "a grouped GEMM reads it" in str(gathered.reason)
    assert len(scaled_gemms(work.graph)) == 3


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "mxfp8"])  # tests/test_gpu_smoke.py has experts with every recipe
def test_with_inductor(recipe):
    """Equal to the results without code generation, but for the roundings of pointwise code."""
    model, x = MoE().to(torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    results = []
    for backend in ("aot_eager", "inductor"):
        compiled, found = compiled_step(model, recipe, x, backend=backend, loss=lambda out: out.square().sum())
        assert sum(g.quantized for g in inspect(compiled).gemms) == 6
        results.append([found.out, *found.gradients])
    assert all(sqnr(a, b) > SQNR_EMULATED[torch.bfloat16] for a, b in zip(*results, strict=True))
