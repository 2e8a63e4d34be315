"""`saved_activations="fp8"`: which values are saved in FP8, what they are worth, and that nothing else changes."""

import contextlib
import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.models import LlamaBlock
from fp8pass import Float8BlockScaling, estimate, fp8_compile, inspect, monitor
from fp8pass.errors import Fp8Warning, InvariantError, RecipeError
from fp8pass.recipes import Granularity, Quantization
from fp8pass.rewrite import runner
from fp8pass.rewrite.saved import apply_saved, plan_saved
from fp8pass.rewrite.verify_partitioned import arguments, verify_saved
from lowering import quantize_blockwise
from lowering.formats import E4M3
from tests.support.cases import each
from tests.support.joint import calls
from tests.support.models import Net, Stack, mlp
from tests.support.mutations import mutations
from tests.support.training import assert_equal, compiled_step
from tests.support.training import step as one_step
from tests.tolerances import sqnr

X = torch.randn(1, 64, 256, generator=torch.Generator().manual_seed(2))
PLAIN = {"saved_activations": None}
ops = torch.ops.lowering
pytestmark = pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")  # of recipe=None, or of rules that leave nothing


def block():
    torch.manual_seed(0)
    return LlamaBlock(256, 384, 4)


def step(model, recipe, x=X, **options):
    return compiled_step(copy.deepcopy(model), recipe, x, **{"saved_activations": "fp8"} | options)


def graph_of(compiled):
    (graph,) = [graph for graph in inspect(compiled).graphs if graph.trains]
    return graph


def saved(compiled):
    return graph_of(compiled).saved


def in_fp8(compiled):
    return [value for value in saved(compiled) if value.quantized]


def assert_near(found, plain, bound):
    assert all(sqnr(a, b) > bound for a, b in zip(plain.gradients, found.gradients, strict=True))


def activated(width):
    return nn.Sequential(nn.GELU(), nn.Linear(width, 64))


@pytest.mark.parametrize(
    ("make", "width", "dtype", "is_dynamic", "num_statistics"),
    [
        (activated, 200, torch.float16, False, 0),
        (nn.LayerNorm, 256, torch.float32, True, 2),
        (nn.RMSNorm, 256, torch.float32, False, 1),
    ],
)
def test_gradients_and_statistics_are_those_of_the_rounded_values(make, width, dtype, is_dynamic, num_statistics):
    """Bit for bit, or for norms nearly: their gradient is orthogonal to the rounded values, and statistics are not saved."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, width), make(width)).to(dtype), torch.randn(48, 64, dtype=dtype)
    ours = copy.deepcopy(model)
    compiled = fp8_compile(ours, None, backend="aot_eager", saved_activations="fp8", dynamic=is_dynamic)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    hidden, out = model[0](leaves[0]), compiled(leaves[1])
    assert out.equal(model[1](hidden))
    q, scale_inv = quantize_blockwise(hidden.detach(), E4M3, (1, 128))
    rounded = (q.float() * scale_inv.repeat_interleave(128, 1)[:, :width]).to(dtype).requires_grad_()
    grad = torch.randn(out.shape, dtype=dtype)
    out.backward(grad)
    model[1](rounded).backward(grad)
    hidden.backward(rounded.grad)
    assert [v.op for v in in_fp8(compiled)] == ["addmm"]
    close = {"rtol": 1e-4, "atol": 1e-5} if num_statistics else {"rtol": 0, "atol": 0}
    for got, want in zip([leaves[1], *ours.parameters()], [leaves[0], *model.parameters()], strict=True):
        torch.testing.assert_close(got.grad, want.grad, **close)
    computed = [v for v in saved(compiled) if "computed again from values that are saved in FP8" in (v.reason or "")]
    assert [v.bytes_after for v in computed] == [0] * num_statistics


@pytest.mark.exhaustive
def test_the_input_of_gelu_is_saved_in_fp8_through_inductor():
    """Inductor's decompositions compute its gradient by an exponential, which else keeps what it reads."""
    model, x = mlp(64, 256, 64), torch.randn(48, 64)
    _, expected = step(model, None, x)
    compiled, ours = step(model, None, x, backend="inductor")
    assert [(v.op, v.shape) for v in in_fp8(compiled)] == [("addmm", (48, 256))]
    assert_near(ours, expected, 60)


@each("shape", [(0, 256), (5,), (2, 3, 130), (1, 1)])
@each("dtype", [torch.float32, torch.bfloat16])
@each("as_bytes", [False, True])
def test_odd_shapes_and_non_finite_values_are_saved_and_loaded(shape, dtype, as_bytes):
    x = torch.randn(shape).to(dtype)
    q, scale_inv = ops.save_activation(x, as_bytes=as_bytes)
    back = ops.load_activation(q, scale_inv, dtype=dtype)
    assert (back.shape, back.dtype, q.dtype) == (x.shape, dtype, torch.uint8 if as_bytes else E4M3)
    assert torch.allclose(back, x, rtol=2**-4, atol=2**-9 * (x.abs().max().item() if x.numel() else 0) / 256)
    if x.numel() > 1:
        x.view(-1)[:3] = torch.tensor([torch.inf, torch.nan, -torch.inf], dtype=dtype)
        back = ops.load_activation(*ops.save_activation(x, as_bytes=as_bytes), dtype=dtype)
        assert not back.view(-1)[:3].isfinite().any()
        assert x.dim() == 1 or back[1:].isfinite().all(), "rows have scales of their own"


def test_what_is_never_saved_in_fp8_has_its_reason():
    def forward(m, x):
        return F.log_softmax(m.head(F.dropout(m.block(x), 0.5).relu()), -1) * 2

    compiled, _ = step(Net(forward, block=block(), head=nn.Linear(256, 512)), "delayed")
    reasons = [v.reason for v in saved(compiled) if not v.quantized]
    assert {reason.partition(":")[0] for reason in reasons} >= {"readers", "sensitive", "small", "dtype"}
    assert all(v.dtype in ("float32", "bfloat16", "float16") and v.bytes_before > 4096 for v in in_fp8(compiled))
    attention = [v for v in saved(compiled) if "attention" in v.op or (v.reason or "").endswith("attention reads it")]
    assert [v.quantized for v in attention] == [False] * 5  # q, k, v, its output and its statistics
    assert any("softmax" in reason for reason in reasons)


def test_rules_decide_which_values_are_saved_in_fp8():
    def found(rules, recipe="current", make=block):
        compiled, _ = step(make(), recipe, rules=rules)
        return compiled, {v.module for v in in_fp8(compiled)}

    compiled, modules = found({"gate:saved": None, "w[qkv]:saved": "blockwise"}, "delayed")
    assert {v.module for v in saved(compiled) if (v.reason or "").startswith("rule")} == {"gate"}
    assert "up" in modules
    assert all(g.quantized for g in inspect(compiled).gemms if g.module == "gate")
    assert {"wq", "wk", "wv"} <= modules
    assert sum(v.op.startswith("_scaled_dot") and "statistics" in (v.reason or "") for v in saved(compiled)) == 1
    assert not {"wq", "wk", "wv"} & found({"w[qkv]": "blockwise"})[1]
    with pytest.warns(Fp8Warning, match=r"'nowhere:saved' has matched no saved value"):
        found({"nowhere:saved": None}, make=lambda: mlp(256, 128, 256))


def test_recipes_decide_the_scales():
    def recipe(dtype):
        class Own(Float8BlockScaling):
            def saved(self):
                return Quantization(dtype, Granularity.BLOCK_1X128, power_of_2=False)

        return Own()

    compiled, _ = step(block(), recipe(E4M3))
    saves = calls(graph_of(compiled).forward.graph, ops.save_activation.default)
    assert {node.kwargs["power_of_2"] for node in saves} == {False}
    with pytest.raises(RecipeError, match=r"Own\.saved"):
        step(block(), recipe(torch.float8_e5m2))


def scales_by_hand(m, recipe):
    """The scales of the columnwise copy of a matrix [rows, columns] of at most 128 rows."""
    if recipe in ("delayed", "current"):
        return 448 / m.abs().amax()
    if recipe == "mxfp8":  # 2**-ceil(log2(amax / 448)) of 32 rows
        amax = m.reshape(-1, 32, m.shape[1]).abs().amax(1, keepdim=True)
        return torch.exp2(-torch.ceil(torch.log2(amax / 448))).expand(-1, 32, -1).reshape(m.shape)
    return torch.exp2(torch.floor(torch.log2(448 / m.abs().amax(0))))


class TanhByHand(torch.autograd.Function):
    """tanh, whose backward reads its result as a GEMM's copy has it."""

    @staticmethod
    def forward(ctx, x, recipe):
        y = torch.tanh(x)
        m = y.to(torch.float32, copy=True).reshape(-1, y.shape[-1])
        scales = scales_by_hand(m, recipe)
        ctx.save_for_backward(((m * scales).to(E4M3).float() * scales.reciprocal()).to(y.dtype).reshape(y.shape))
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(grad, y), None


def gated(hidden=256, tanh=torch.tanh):
    """A tanh whose result a GEMM and the backward read; the input of the model has three dimensions."""
    torch.manual_seed(0)
    return Net(lambda m, x: m.down(tanh(m.up(x))), up=nn.Linear(64, hidden), down=nn.Linear(hidden, 64))


@pytest.mark.parametrize(("recipe", "scales"), [("delayed", "tensor-wise"), ("blockwise", "1x128"), ("mxfp8", "1x32")])
def test_a_copy_that_a_gemm_reads_is_saved_itself_and_once(recipe, scales):
    dtype = torch.bfloat16 if recipe == "blockwise" else torch.float32
    x = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    by_hand = gated(tanh=lambda x: TanhByHand.apply(x, recipe)).to(dtype)
    _, expected = step(by_hand, recipe, x, saved_activations=None)
    compiled, ours = step(gated().to(dtype), recipe, x)
    (value,) = in_fp8(compiled)
    assert (value.op, value.shared_with, value.bytes_after, value.format) == ("tanh", "down", 0, f"e4m3 {scales}")
    assert not calls(graph_of(compiled).forward.graph, ops.save_activation.default)
    assert "Saved in FP8 copies of down, which GEMMs read, too." in str(inspect(compiled))
    assert_equal(ours, expected)


def test_copies_with_padding_are_shared_and_those_of_reordered_elements_are_not():
    turned = Net(lambda m, x: m.down(torch.tanh(m.up(x)).mT.reshape(64, 256)), up=nn.Linear(64, 256), down=nn.Linear(256, 64))
    for model, x, shares in ((gated(hidden=200), torch.randn(3, 31, 64), ["down"]), (turned, torch.randn(64, 64), [None])):
        compiled, ours = step(model, "current", x)
        assert [v.shared_with for v in in_fp8(compiled)] == shares
        assert_near(ours, step(model, "current", x, **PLAIN)[1], 25)


def test_no_bit_changes_under_checkpointing_nor_under_hooks():
    checkpointed = Stack([block()], use_reentrant=False)
    compiled, found = step(checkpointed, "current")
    assert not in_fp8(compiled)
    assert_equal(found, step(checkpointed, "current", **PLAIN)[1])
    _, expected = step(block(), "delayed")
    with saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):  # NumPy has no FP8
        compiled, found = step(block(), "delayed")
    assert in_fp8(compiled)
    assert_equal(found, expected)


def test_views_of_one_tensor_are_saved_together_or_not_at_all():
    def fused(m, x, reads_first=False):
        gate, up = m.up(x).chunk(2, -1)
        return m.down(F.silu(gate) * up) + (gate.cos().mean() if reads_first else 0)

    layers, x = {"up": nn.Linear(64, 512, bias=False), "down": nn.Linear(256, 64, bias=False)}, torch.randn(96, 64)
    compiled, ours = step(Net(fused, **layers), "current", x)
    assert sum(v.bytes_before for v in in_fp8(compiled)) == 96 * 512 * 4
    assert all(x.isfinite().all() for x in (ours.out, *ours.gradients))
    assert not in_fp8(step(Net(lambda m, x: fused(m, x, reads_first=True), **layers), "current", x)[0])


def test_no_mutation_of_the_new_nodes_passes_unseen():
    torch.manual_seed(0)
    model = Stack(nn.Sequential(nn.Linear(128, 128), norm, nn.Tanh()) for norm in (nn.RMSNorm(128), nn.LayerNorm(128)))
    found = []

    def hand_out(*args):
        """In the place of the product's: the graphs of the partitioner, and what plans need."""
        found.append(args[:5])
        return args[5]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "save_activations", hand_out)
        patch.setattr("fp8pass.runtime.backend.save_activations", hand_out)
        step(model, "delayed", torch.randn(2, 64, 128))
    forward, backward, *given = found[0]
    before = arguments(forward), arguments(backward)
    copies, computed = apply_saved(forward, backward, plan_saved(forward, backward, *given))
    assert copies
    assert len(computed) == 3
    unseen, count = [], 0
    for graph, known in zip((forward, backward), before, strict=True):
        for mutation in mutations(types.SimpleNamespace(graph=graph, known=set(known)), None):
            count += 1
            with mutation.made(), contextlib.suppress(InvariantError):
                verify_saved(forward, backward, copies, computed, before)
                unseen.append(str(mutation))
    verify_saved(forward, backward, copies, computed, before)
    assert not unseen
    assert count > 10


def test_the_table_and_the_page_have_saved_values_and_the_estimate_a_column(tmp_path):
    pytest.importorskip("jinja2")
    compiled, _ = step(block(), "current")
    report = inspect(compiled)
    report.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Saved for the backward" in str(report)
    assert page.count("e4m3 1x128") == len(in_fp8(compiled))
    (graph,) = report.to_dict()["graphs"]
    assert sum(graph["saved_dtypes"].values()) == graph["saved_bytes"] < graph["saved_bytes_before"]
    x = torch.empty(1, 64, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = estimate(block().bfloat16().to("meta"), x, recipe="current")
    both, _ = step(block().bfloat16(), "current", X.bfloat16())
    assert found.recipes["current"].saved_bytes_in_fp8 == inspect(both).graphs[0].saved_bytes
    assert "saved_activations" in str(found)


def test_a_monitor_has_the_error_of_saved_values_and_changes_nothing():
    x, model = torch.randn(48, 128), mlp(128, 256, 128)
    _, expected = step(model, None, x)
    compiled = fp8_compile(model, None, backend="aot_eager", saved_activations="fp8")
    with monitor(compiled, every=1) as watching:
        found = one_step(compiled, model, x)
        (measured,) = [t for t in watching.latest.tensors if t.kind == "saved"]
    hidden = F.linear(x, model[0].weight, model[0].bias)
    rounded = ops.load_activation(*ops.save_activation(hidden), dtype=torch.float32)
    assert 25 < measured.sqnr == pytest.approx(sqnr(hidden, rounded), abs=0.01)
    assert (measured.name, measured.scaling, measured.num_elements) == ("0:saved", "1x128", hidden.numel())
    assert_equal(found, expected)


@pytest.mark.exhaustive
def test_generated_code_without_fp8_instructions_equals_the_reference():
    """The lowering for GPUs without FP8 instructions, compiled for the CPU: every rounding, subnormals, NaN and infinities.
    Inductor's C++ leaves out the columns beyond the last multiple of 128."""
    from torch._inductor.lowering import lowerings

    from lowering.inductor import blockwise, register_lowerings

    register_lowerings()
    save, load = ops.save_activation.default, ops.load_activation.default
    x = torch.randn(64, 256) * torch.exp2(torch.randint(-24, 3, (64, 256)))
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    x[1], x[2] = 0.0, torch.arange(256) * 2.0**-9

    def there_and_back(x):
        q, scale_inv = save(x, as_bytes=True, power_of_2=False)
        return q, scale_inv, load(q, scale_inv, dtype=torch.bfloat16)

    expected = there_and_back(x)
    with pytest.MonkeyPatch.context() as patch:
        for operation in (save, load):
            patch.setitem(lowerings, operation, blockwise.LOWERINGS[operation])
        torch._dynamo.reset()
        ours = torch.compile(there_and_back, fullgraph=True)(x)
    finite = ~expected[2].isnan()
    assert ours[2].isnan().equal(~finite)
    assert ours[0][finite].equal(expected[0][finite])  # the sign of a NaN is not specified
    assert ours[1].equal(expected[1])
    assert ours[2][finite].equal(expected[2][finite])
