"""`saved_activations="fp8"`: which values are saved in FP8, what they are worth, and that nothing else changes.

Oracles: an autograd.Function written by hand, bit for bit; storages counted from outside; the same model without the option.
"""

import contextlib
import copy
import itertools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.models import LlamaBlock
from fp8pass import Float8BlockScaling, estimate, fp8_compile, inspect, monitor
from fp8pass.errors import Fp8Warning, InvariantError, OptionError, RecipeError, RuleError
from fp8pass.recipes import Granularity, Quantization
from fp8pass.rewrite import runner
from fp8pass.rewrite.saved import apply_saved, plan_saved
from fp8pass.rewrite.verify import arguments, verify_saved
from lowering import quantize_blockwise
from lowering.formats import E4M3
from tests.support.memory import allocated
from tests.support.models import mlp
from tests.support.mutations import mutations
from tests.support.numerics import sqnr

RECIPES = ("delayed", "current", "blockwise")
TOKENS = 256


def llama(**changes):
    """A block with the proportions of Llama-3 8B: ffn 3.5 times as wide, four queries for a key."""
    torch.manual_seed(0)
    return LlamaBlock(**{"dim": 256, "ffn": 896, "num_heads": 8, "num_kv_heads": 2} | changes).bfloat16()


def step(model, recipe, x, count=1, **options):
    """The compiled model after steps, its last output and all gradients."""
    torch._dynamo.reset()
    compiled = fp8_compile(model, recipe, **{"backend": "aot_eager", "saved_activations": "fp8"} | options)
    for _ in range(count):
        model.zero_grad()
        given = x.clone().requires_grad_()
        torch.manual_seed(1)
        out = compiled(given)
        out.float().square().mean().backward()
    return compiled, [out.detach(), given.grad, *(p.grad for p in model.parameters())]


def saved(compiled):
    """The records of the one graph that trains."""
    (graph,) = [graph for graph in inspect(compiled).graphs if graph.trains]
    return graph.saved


def in_fp8(compiled):
    return [value for value in saved(compiled) if value.quantized]


def bytes_of_bf16(model, x):
    compiled, _ = step(model, "delayed", x, rules={"*": None}, saved_activations=None)
    return inspect(compiled).graphs[0].saved_bytes


# -- how much


@pytest.fixture(scope="module")
def block_of_bf16():
    with contextlib.suppress(Fp8Warning):
        return bytes_of_bf16(llama(), torch.randn(1, TOKENS, 256, dtype=torch.bfloat16))


@pytest.mark.parametrize(("recipe", "most"), [*((r, 0.47) for r in RECIPES), (None, 0.55)], ids=lambda x: str(x))
@pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")
def test_a_llama_block_saves_less_than_half(block_of_bf16, recipe, most):
    x = torch.randn(1, TOKENS, 256, dtype=torch.bfloat16)
    compiled, _ = step(llama(), recipe, x, weight_copies="recompute")
    (graph,) = inspect(compiled).graphs
    assert graph.saved_bytes <= most * block_of_bf16
    before, after = (sum(getattr(v, name) for v in graph.saved) for name in ("bytes_before", "bytes_after"))
    assert (graph.saved_bytes_before, graph.saved_bytes) == (before, after)


def memory_of(model, recipe, x, **options):
    """Bytes that a forward leaves allocated besides its result, and the peak of a step, by the allocator's count."""
    compiled, _ = step(model, recipe, x, **options)
    left, _ = allocated(lambda: compiled(x))

    def train():
        compiled(x).float().square().mean().backward()

    _, peak = allocated(train)
    return left - x.nbytes, peak


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", [None, "current"], ids=str)
@pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")
def test_the_allocator_sees_what_is_saved(recipe):
    def stack():
        return nn.Sequential(*(llama(dim=128, ffn=448) for _ in range(6)))

    x = torch.randn(1, TOKENS, 128, dtype=torch.bfloat16, requires_grad=True)
    plain, plain_peak = memory_of(stack(), "delayed", x, rules={"*": None}, saved_activations=None)
    ours, peak = memory_of(stack(), recipe, x, weight_copies="recompute")
    assert ours <= 0.49 * plain
    assert peak <= 0.8 * plain_peak  # the emulated casts take some


# -- what the values are worth


class ByHand(torch.autograd.Function):
    """`mlp` with GELU, whose backward reads the input of GELU in E4M3 and computes GELU again."""

    @staticmethod
    def forward(ctx, x, w0, b0, w1, b1):
        hidden = torch.addmm(b0, x, w0.t())
        q, scale_inv = quantize_blockwise(hidden, E4M3, (1, 128))
        ctx.save_for_backward(x, w0, w1, q, scale_inv)
        return torch.addmm(b1, F.gelu(hidden), w1.t())

    @staticmethod
    def backward(ctx, grad):
        x, w0, w1, q, scale_inv = ctx.saved_tensors
        factors = scale_inv.repeat_interleave(128, 1)[:, : q.shape[1]]
        hidden = (q.float() * factors).to(x.dtype)
        grad_hidden = torch.ops.aten.gelu_backward(grad @ w1, hidden)
        grad_w1 = grad.t() @ F.gelu(hidden)
        return grad_hidden @ w0, grad_hidden.t() @ x, grad_hidden.sum(0), grad_w1, grad.sum(0)


@pytest.mark.parametrize("hidden", [256, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_those_of_a_function_written_by_hand(hidden, dtype):
    model = nn.Sequential(nn.Linear(64, hidden), nn.GELU(), nn.Linear(hidden, 64)).to(dtype)
    x, grad = torch.randn(48, 64, dtype=dtype), torch.randn(48, 64, dtype=dtype)
    parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    by_hand = x.clone().requires_grad_()
    expected = ByHand.apply(by_hand, *parameters)
    expected.backward(grad)
    compiled = fp8_compile(model, None, backend="aot_eager", saved_activations="fp8")
    given = x.clone().requires_grad_()
    out = compiled(given)
    out.backward(grad)
    assert [v.op for v in in_fp8(compiled)] == ["addmm"]
    ours, theirs = [out, given.grad], [expected, by_hand.grad]
    ours, theirs = ours + [p.grad for p in model.parameters()], theirs + [p.grad for p in parameters]
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")
def test_the_input_of_gelu_is_saved_in_fp8_through_inductor(approximate):
    """Inductor's decompositions compute GELU's gradient by an exponential, or by a tanh."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(approximate), nn.Linear(256, 64))
    x = torch.randn(48, 64)
    _, expected = step(copy.deepcopy(model), None, x)
    compiled, ours = step(copy.deepcopy(model), None, x, backend="inductor")
    assert [(v.op, v.shape) for v in in_fp8(compiled)] == [("addmm", (48, 256))]
    assert all(sqnr(a, b) > 60 for a, b in zip(expected, ours, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_forward_changes_no_bit_and_gradients_hardly(recipe):
    x = torch.randn(1, 64, 256)
    block = LlamaBlock(256, 384, 4)
    _, plain = step(copy.deepcopy(block), recipe, x, saved_activations=None)
    _, ours = step(copy.deepcopy(block), recipe, x)
    assert ours[0].equal(plain[0])
    assert all(sqnr(a, b) > 20 for a, b in zip(plain[1:], ours[1:], strict=True))


def test_non_finite_values_come_back_non_finite():
    x = torch.randn(4, 256)
    x[0, 3], x[1, 200], x[2, 5] = torch.inf, torch.nan, -torch.inf
    q, scale_inv = torch.ops.lowering.save_activation(x)
    back = torch.ops.lowering.load_activation(q, scale_inv, dtype=torch.float32)
    assert back.isfinite().equal(x.isfinite())


@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (5,), (2, 3, 130), (1, 1), (4, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_odd_shapes_are_saved_and_loaded(shape, dtype):
    x = torch.randn(shape).to(dtype)
    for as_bytes in (False, True):
        q, scale_inv = torch.ops.lowering.save_activation(x, as_bytes=as_bytes)
        back = torch.ops.lowering.load_activation(q, scale_inv, dtype=dtype)
        assert back.shape == x.shape
        assert back.dtype == dtype
        assert q.dtype == (torch.uint8 if as_bytes else E4M3)
        assert torch.allclose(back, x, rtol=2**-4, atol=2**-9 * (x.abs().max().item() if x.numel() else 0) / 256)


def test_wrong_arguments_of_the_operations_are_named():
    with pytest.raises(ValueError, match="int64"):
        torch.ops.lowering.save_activation(torch.zeros(2, 2, dtype=torch.int64))
    q, scale_inv = torch.ops.lowering.save_activation(torch.randn(2, 200))
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        torch.ops.lowering.load_activation(q, scale_inv[:, :1], dtype=torch.float32)
    with pytest.raises(ValueError, match="int8"):
        torch.ops.lowering.load_activation(q, scale_inv, dtype=torch.int8)


# -- which values


@pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")
def test_what_is_never_saved_in_fp8_has_its_reason():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = LlamaBlock(256, 384, 4)
            self.head = nn.Linear(256, 512)

        def forward(self, x):
            h = F.dropout(self.block(x), 0.5)
            return F.log_softmax(self.head(h.relu()), -1) * 2

    compiled, _ = step(Model(), "delayed", torch.randn(1, 64, 256))
    reasons = {(v.op, v.dtype): v.reason for v in saved(compiled) if not v.quantized}
    kinds = {reason.partition(":")[0] for reason in reasons.values()}
    assert kinds >= {"readers", "sensitive", "small", "dtype"}
    assert all(v.dtype in ("float32", "bfloat16", "float16") and v.bytes_before > 4096 for v in in_fp8(compiled))
    attention = [v for v in saved(compiled) if "attention" in v.op or (v.reason or "").endswith("attention reads it")]
    assert len(attention) == 5  # q, k, v, its output and its statistics
    assert not any(v.quantized for v in attention)
    assert any("softmax" in (v.reason or "") for v in saved(compiled))


def test_a_rule_keeps_values_in_high_precision():
    x = torch.randn(1, 64, 256)
    compiled, _ = step(LlamaBlock(256, 384, 4), "delayed", x, rules={"gate:saved": None})
    assert {v.module for v in saved(compiled) if (v.reason or "").startswith("rule")} == {"gate"}
    assert "up" in {v.module for v in in_fp8(compiled)}
    assert all(g.quantized for g in inspect(compiled).gemms if g.module == "gate")


@pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")
def test_a_rule_without_a_role_that_keeps_everything_changes_no_bit():
    x, block = torch.randn(1, 64, 256), LlamaBlock(256, 384, 4)
    compiled, ours = step(copy.deepcopy(block), "delayed", x, rules={"*": None})
    _, theirs = step(copy.deepcopy(block), "delayed", x, rules={"*": None}, saved_activations=None)
    assert not in_fp8(compiled)
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


def test_attention_is_saved_in_fp8_by_a_rule_alone():
    x = torch.randn(1, 64, 256)
    compiled, _ = step(LlamaBlock(256, 384, 4), "current", x, rules={"w[qkv]:saved": "blockwise"})
    assert {"wq", "wk", "wv"} <= {v.module for v in in_fp8(compiled)}
    statistics = [v for v in saved(compiled) if v.op.startswith("_scaled_dot") and "statistics" in (v.reason or "")]
    assert len(statistics) == 1


def test_a_rule_with_a_recipe_and_no_role_does_not_reach_attention():
    compiled, _ = step(LlamaBlock(256, 384, 4), "current", torch.randn(1, 64, 256), rules={"w[qkv]": "blockwise"})
    assert not {"wq", "wk", "wv"} & {v.module for v in in_fp8(compiled)}


@pytest.mark.filterwarnings("error::fp8pass.errors.Fp8Warning")
def test_a_rule_that_matches_no_saved_value_is_reported():
    with pytest.raises(Fp8Warning, match=r"'nowhere:saved' has matched no saved value"):
        step(LlamaBlock(256, 384, 4), "delayed", torch.randn(1, 64, 256), rules={"nowhere:saved": None})


def test_recipes_decide_the_scales():
    class Own(Float8BlockScaling):
        """Saves with scales that are no powers of two."""

        def saved(self):
            return Quantization(E4M3, Granularity.BLOCK_1X128, power_of_2=False)

    class Wrong(Float8BlockScaling):
        """Would save in another format."""

        def saved(self):
            return Quantization(torch.float8_e5m2, Granularity.BLOCK_1X128)

    x = torch.randn(1, 64, 256)
    compiled, _ = step(LlamaBlock(256, 384, 4), Own(), x)
    (graph,) = inspect(compiled).graphs
    casts = graph.forward.graph.find_nodes(op="call_function", target=torch.ops.lowering.save_activation.default)
    assert casts
    assert not any(node.kwargs["power_of_2"] for node in casts)
    with pytest.raises(RecipeError, match=r"Wrong\.saved"):
        step(LlamaBlock(256, 384, 4), Wrong(), x)


# -- copies that GEMMs read


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


class Gated(nn.Module):
    """A tanh whose result a GEMM and the backward read; the input of the model has three dimensions."""

    def __init__(self, tanh=torch.tanh):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.tanh = tanh

    def forward(self, x):
        return self.down(self.tanh(self.up(x)))


SCALES = {"delayed": "tensor-wise", "current": "tensor-wise", "rowwise": "row-wise", "blockwise": "1x128", "mxfp8": "1x32"}


@pytest.mark.parametrize("recipe", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")
def test_a_copy_that_a_gemm_reads_is_saved_itself_and_once(recipe, dtype):
    x = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    by_hand = Gated(lambda x: TanhByHand.apply(x, recipe)).to(dtype)
    _, expected = step(by_hand, recipe, x, saved_activations=None)
    compiled, ours = step(Gated().to(dtype), recipe, x)
    (value,) = in_fp8(compiled)
    assert (value.op, value.shared_with, value.bytes_after) == ("tanh", "down", 0)
    assert value.format == f"e4m3 {SCALES[recipe]}"
    (graph,) = inspect(compiled).graphs
    assert sum(v.bytes_after for v in graph.saved) == graph.saved_bytes
    assert sum(v.shape in ((96, 256), (2, 48, 256), (256, 96)) and v.bytes_after > 0 for v in graph.saved) == 1
    assert not graph.forward.graph.find_nodes(op="call_function", target=torch.ops.lowering.save_activation.default)
    assert "Saved in FP8 copies of down, which GEMMs read, too." in str(inspect(compiled))
    assert all(a.equal(b) for a, b in zip(ours, expected, strict=True))


def test_the_output_of_attention_is_shared_by_a_rule():
    x, block = torch.randn(2, 64, 256), LlamaBlock(256, 384, 4)
    compiled, ours = step(copy.deepcopy(block), "current", x, rules={"*:saved": "blockwise"})
    shared = {v.shared_with: v for v in in_fp8(compiled) if v.shared_with}
    assert shared.keys() == {"wo"}
    assert "attention" in shared["wo"].op
    _, plain = step(block, "current", x, saved_activations=None)
    assert ours[0].equal(plain[0])
    assert all(sqnr(a, b) > 15 for a, b in zip(plain[1:], ours[1:], strict=True))


def test_copies_with_padding_and_of_dynamic_sizes_are_shared():
    model = Gated()
    model.up, model.down = nn.Linear(64, 200), nn.Linear(200, 64)
    x = torch.randn(3, 31, 64)
    _, plain = step(copy.deepcopy(model), "current", x, saved_activations=None)
    compiled, ours = step(copy.deepcopy(model), "current", x)
    assert [v.shared_with for v in in_fp8(compiled)] == ["down"]
    dynamic, same = step(copy.deepcopy(model), "current", x, dynamic=True)
    assert in_fp8(dynamic)
    assert all(a.equal(b) for a, b in zip(ours, same, strict=True) if in_fp8(dynamic)[0].shared_with)
    assert all(sqnr(a, b) > 25 for a, b in zip(plain, ours, strict=True))


def test_a_copy_of_other_elements_is_not_shared():
    """The matrix that the GEMM reads has the value's elements in another order."""

    class Turned(Gated):
        def forward(self, x):
            y = torch.tanh(self.up(x))
            return self.down(y.transpose(0, 1).reshape(x.shape[0] * x.shape[1], -1))

    compiled, ours = step(Turned(), "current", torch.randn(2, 48, 64))
    assert not any(v.shared_with for v in in_fp8(compiled))
    assert all(r.isfinite().all() for r in ours)


# -- together with


class Checkpointed(nn.Module):
    """Blocks that the backward computes again, all of them or but for matrix products."""

    def __init__(self, **options):
        super().__init__()
        self.blocks = nn.ModuleList(LlamaBlock(256, 384, 4) for _ in range(2))
        self.options = options

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.options)
        return x


def saving_products():
    def policy(context, op, *args, **kwargs):
        is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def test_what_a_recomputed_forward_reads_is_saved_as_it_is():
    x = torch.randn(1, 64, 256)
    model = Checkpointed()
    compiled, ours = step(copy.deepcopy(model), "current", x)
    _, theirs = step(copy.deepcopy(model), "current", x, saved_activations=None)
    assert not in_fp8(compiled)
    assert any("runs again" in (v.reason or "") or "attention" in (v.reason or "") for v in saved(compiled))
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


def test_selective_checkpointing_saves_products_in_fp8():
    compiled, ours = step(Checkpointed(context_fn=saving_products), "current", torch.randn(1, 64, 256))
    assert {"gate", "up"} <= {v.module.rpartition(".")[2] for v in in_fp8(compiled)}
    assert all(x.isfinite().all() for x in ours)


def test_hooks_see_ordinary_tensors_and_change_no_bit():
    x, block = torch.randn(1, 64, 256), LlamaBlock(256, 384, 4)
    _, expected = step(copy.deepcopy(block), "delayed", x, count=2)
    seen = set()

    def pack(tensor):
        seen.add(tensor.dtype)
        return tensor.detach().numpy().copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        _, ours = step(copy.deepcopy(block), "delayed", x, count=2)
    assert not any("float8" in str(dtype) for dtype in seen)
    assert all(a.equal(b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")
def test_saving_on_the_cpu_changes_no_bit():
    """Pinned memory needs a GPU; what is saved is moved and comes back."""
    x, block = torch.randn(1, 64, 256), LlamaBlock(256, 384, 4)
    _, expected = step(copy.deepcopy(block), None, x)
    with torch.autograd.graph.save_on_cpu():
        _, ours = step(copy.deepcopy(block), None, x)
    assert all(a.equal(b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("copies", ["save", "cache"])
def test_copies_of_weights_change_no_bit(copies):
    x, block = torch.randn(1, 64, 256), LlamaBlock(256, 384, 4)
    _, expected = step(copy.deepcopy(block), "delayed", x, count=2, weight_copies="recompute")
    compiled, ours = step(copy.deepcopy(block), "delayed", x, count=2, weight_copies=copies)
    assert in_fp8(compiled)
    assert all(a.equal(b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_the_partitioners_memory_budget_holds(budget):
    x = torch.randn(1, 64, 256)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        compiled, results = step(LlamaBlock(256, 384, 4), "current", x)
    full, _ = step(LlamaBlock(256, 384, 4), "current", x)
    assert inspect(compiled).graphs[0].saved_bytes <= inspect(full).graphs[0].saved_bytes
    assert all(r.isfinite().all() for r in results)


def test_dynamic_shapes_compile_once():
    x, block = torch.randn(1, 64, 256), LlamaBlock(256, 384, 4)
    _, expected = step(copy.deepcopy(block), "blockwise", x)
    compiled, ours = step(block, "blockwise", x, dynamic=True)
    assert all(a.equal(b) for a, b in zip(ours, expected, strict=True))
    for tokens in (96, 33):
        compiled(torch.randn(1, tokens, 256, requires_grad=True)).square().mean().backward()
    graphs = inspect(compiled).graphs
    assert len(graphs) <= 2
    values = graphs[0].saved
    assert any(v.quantized for v in values)
    assert any(isinstance(v.bytes_after, str) for v in values)


def test_values_that_are_views_of_one_tensor_are_saved_together_or_not_at_all():
    class Fused(nn.Module):
        def __init__(self, reads_first):
            super().__init__()
            self.up, self.down = nn.Linear(64, 512, bias=False), nn.Linear(256, 64, bias=False)
            self.reads_first = reads_first

        def forward(self, x):
            gate, up = self.up(x).chunk(2, -1)
            return self.down(F.silu(gate) * up) + (gate.cos().mean() if self.reads_first else 0)

    x = torch.randn(96, 64)
    compiled, ours = step(Fused(False), "current", x)
    assert sum(v.bytes_before for v in in_fp8(compiled)) == 96 * 512 * 4
    assert all(r.isfinite().all() for r in ours)
    compiled, _ = step(Fused(True), "current", x)
    assert not in_fp8(compiled)


def test_inputs_and_outputs_are_not_saved_a_second_time():
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(256, 256), nn.Linear(256, 256)

        def forward(self, x):
            hidden = self.up(x)
            return hidden, self.down(F.silu(hidden) * x)

    model = Returns()
    compiled = fp8_compile(model, "current", backend="aot_eager", saved_activations="fp8")
    sum(out.square().mean() for out in compiled(torch.randn(64, 256, requires_grad=True))).backward()
    assert not in_fp8(compiled)


def test_transposed_values_come_back_with_their_strides():
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(128, 128)

        def forward(self, x):
            return torch.tanh(self.linear(x).transpose(1, 2)).cumsum(1)

    x, model = torch.randn(2, 64, 128), Transposed()
    compiled, ours = step(copy.deepcopy(model), None, x)
    assert in_fp8(compiled)
    assert all(sqnr(a, b) > 20 for a, b in zip(step(model, "current", x, rules={"*": None})[1], ours, strict=True))


def test_autocast_and_in_place():
    block = LlamaBlock(256, 384, 4)
    compiled = fp8_compile(block, "blockwise", backend="aot_eager", saved_activations="fp8", in_place=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(torch.randn(1, 64, 256, requires_grad=True))
    out.float().square().mean().backward()
    assert {v.dtype for v in in_fp8(compiled)} == {"bfloat16"}
    assert all(p.grad.isfinite().all() for p in block.parameters())


@pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")
def test_graph_breaks_leave_each_graph_its_own_values():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = mlp(128, 512, 128), mlp(128, 512, 128)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    torch._dynamo.reset()
    model = Broken()
    compiled = fp8_compile(model, None, backend="aot_eager", saved_activations="fp8")
    compiled(torch.randn(64, 128, requires_grad=True)).square().mean().backward()
    graphs = [graph for graph in inspect(compiled).graphs if graph.trains]
    assert [sum(v.quantized for v in graph.saved) for graph in graphs] == [1, 1]


def test_torchs_own_pass_is_refused():
    given = {"post_grad_fusion_options": {"activation_quantization_aten_pass": {"quant_type": "torch.float8_e5m2"}}}
    with torch._inductor.config.patch(given), pytest.raises(OptionError, match="activation_quantization_aten_pass"):
        fp8_compile(mlp(), "delayed", saved_activations="fp8")
    with pytest.raises(OptionError, match="activation_quantization_aten_pass"):
        fp8_compile(mlp(), "delayed", saved_activations="fp8", options=given)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"recipe": "delayed", "saved_activations": "int8"}, OptionError, "'int8'"),
        ({"recipe": "delayed", "saved_activations": True}, OptionError, "True"),
        ({"recipe": None}, OptionError, "saved_activations='fp8'"),
        ({"recipe": None, "saved_activations": "fp8", "match": "vllm"}, OptionError, "'vllm'"),
        ({"recipe": "delayed", "rules": {"*:saved": None}}, RuleError, "saved_activations='fp8'"),
        ({"recipe": "delayed", "schedule": {5: {"*:saved": None}}}, RuleError, "saved_activations='fp8'"),
        ({"recipe": "delayed", "saved_activations": "fp8", "rules": {"*:save": None}}, RuleError, "'saved'"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        fp8_compile(mlp(), **arguments)


# -- verification


@contextlib.contextmanager
def partitioned(model, x, recipe):
    """The graphs that the partitioner made of a model, before anything is saved in FP8, and what plans need."""
    found = []

    def hand_out(*args):
        found.append(args[:5])
        return args[5]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "save_activations", hand_out)
        patch.setattr("fp8pass.runtime.backend.save_activations", hand_out)
        step(model, recipe, x)
    yield found[0]


class Turned(nn.Module):
    """A value that lies transposed in memory, and others of its size and dtype."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(128, 128) for _ in range(3))

    def forward(self, x):
        up, gate = self.up(x), self.gate(x)
        return self.down(torch.tanh(up.transpose(1, 2)).transpose(1, 2) * F.silu(gate))


@pytest.mark.parametrize(
    ("model", "recipe"),
    [*((Turned, recipe) for recipe in (None, "delayed", "blockwise")), *((Gated, r) for r in SCALES)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")
def test_no_mutation_of_the_new_nodes_passes_unseen(model, recipe):
    torch.manual_seed(0)
    x = torch.randn(2, 64, 64 if model is Gated else 128)
    with partitioned(model(), x, recipe) as (forward, backward, num_outputs, rules, context):
        before = arguments(forward), arguments(backward)
        applied = apply_saved(forward, backward, plan_saved(forward, backward, num_outputs, rules, context))

        def verify():
            verify_saved(forward, backward, applied, before)

        verify()
        assert applied
        unseen, count = [], 0
        for graph, known in zip((forward, backward), before, strict=True):
            for mutation in mutations(types.SimpleNamespace(graph=graph, known=set(known)), None):
                count += 1
                with mutation.made(), contextlib.suppress(InvariantError):
                    verify()
                    unseen.append(str(mutation))
        assert not unseen
        assert count > (1 if model is Gated else 10)
        for wrong in misplaced(forward, backward, applied) if model is Turned else ():
            with wrong, pytest.raises(InvariantError):
                verify()
        verify()


def misplaced(forward, backward, applied):
    """Defects that are no wrong argument: results in another order, another value saved or read, a second reader of a value."""
    output, made = forward.output_node(), next(iter(applied.values()))

    @contextlib.contextmanager
    def results(changed):
        held = output.args
        output.args = (type(held[0])(changed(list(held[0]))),)
        try:
            yield
        finally:
            output.args = held

    def swapped(nodes):
        i, j = nodes.index(made.data), nodes.index(made.scale_inv)
        nodes[i], nodes[j] = nodes[j], nodes[i]
        return nodes

    @contextlib.contextmanager
    def input_moved():
        made.data_input.next.append(made.data_input)
        try:
            yield
        finally:
            made.scale_input.prepend(made.data_input)

    @contextlib.contextmanager
    def reader_changed():
        user = next(iter(made.loaded.users))
        user.replace_input_with(made.loaded, made.scale_input)
        try:
            yield
        finally:
            user.replace_input_with(made.scale_input, made.loaded)

    @contextlib.contextmanager
    def wrong_value():
        value, made.data_input.meta["val"] = made.data_input.meta["val"], made.scale_input.meta["val"]
        try:
            yield
        finally:
            made.data_input.meta["val"] = value

    yield results(swapped)
    yield results(lambda nodes: [n for n in nodes if n is not made.scale_inv])
    yield results(lambda nodes: [(next(iter(applied)).node if n is made.data else n) for n in nodes])
    yield input_moved()
    yield reader_changed()
    yield wrong_value()


def test_every_node_of_the_backward_reads_the_copy():
    compiled, _ = step(LlamaBlock(256, 384, 4), "current", torch.randn(1, 64, 256))
    (graph,) = inspect(compiled).graphs
    saves = graph.forward.graph.find_nodes(op="call_function", target=torch.ops.lowering.save_activation.default)
    results = {n for n in graph.forward.graph.output_node().args[0] if isinstance(n, fx.Node)}
    loads = graph.backward.graph.find_nodes(op="call_function", target=torch.ops.lowering.load_activation.default)
    assert len(loads) == len(saves) == len(in_fp8(compiled))
    assert all(n.op == "placeholder" for load in loads for n in load.all_input_nodes)
    assert all(set(save.users) <= results for save in saves)


def test_rows_of_the_table_name_the_largest_values_that_are_left():
    compiled, _ = step(LlamaBlock(256, 384, 4), "current", torch.randn(1, 64, 256))
    text = str(inspect(compiled))
    assert "Saved for the backward" in text
    assert "attention reads it" in text
    (graph,) = inspect(compiled).to_dict()["graphs"]
    assert sum(graph["saved_dtypes"].values()) == graph["saved_bytes"] < graph["saved_bytes_before"]
    assert {v["format"] for v in graph["saved"]} == {None, "e4m3 1x128"}
    assert list(itertools.chain(v["reason"] for v in graph["saved"] if not v["quantized"]))


def test_the_page_has_every_saved_value_and_the_estimate_a_column(tmp_path):
    pytest.importorskip("jinja2")
    compiled, _ = step(LlamaBlock(256, 384, 4), "current", torch.randn(1, 64, 256))
    inspect(compiled).to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Saved values" in page
    assert page.count("e4m3 1x128") == len(in_fp8(compiled))
    assert "attention reads it" in page
    x = torch.empty(1, 64, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = estimate(LlamaBlock(256, 384, 4).bfloat16().to("meta"), x, recipe="current")
    both, _ = step(LlamaBlock(256, 384, 4).bfloat16(), "current", torch.randn(1, 64, 256, dtype=torch.bfloat16))
    assert found.recipes["current"].saved_bytes_in_fp8 == inspect(both).graphs[0].saved_bytes
    assert "saved_activations" in str(found)


@pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")
@pytest.mark.parametrize("recipe", [None, "delayed"], ids=str)
def test_a_monitor_has_the_error_of_saved_values_and_changes_nothing(recipe):
    x, model = torch.randn(48, 128), nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    expected = step(copy.deepcopy(model), recipe, x, count=2)[1]
    compiled = fp8_compile(model, recipe, backend="aot_eager", saved_activations="fp8")
    with monitor(compiled, every=1) as watching:
        for _ in range(2):
            model.zero_grad()
            given = x.clone().requires_grad_()
            out = compiled(given)
            out.square().mean().backward()
        (found,) = [t for t in watching.latest.tensors if t.kind == "saved"]
    hidden = F.linear(x, model[0].weight, model[0].bias)
    if recipe is None:
        q, scale_inv = torch.ops.lowering.save_activation(hidden)
        rounded = torch.ops.lowering.load_activation(q, scale_inv, dtype=torch.float32)
        assert found.sqnr == pytest.approx(sqnr(hidden, rounded), abs=0.01)
    assert (found.name, found.scaling, found.num_elements) == ("0:saved", "1x128", hidden.numel())
    assert 25 < found.sqnr < 40
    assert all(a.equal(b) for a, b in zip(expected, [out, given.grad, *(p.grad for p in model.parameters())], strict=True))


def test_what_is_made_of_parameters_alone_is_no_activation():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.randn(256, 256)), nn.Parameter(torch.randn(256, 1))

        def forward(self, x):
            return torch.tanh(x @ torch.tanh(torch.sigmoid(self.weight) * self.scale))

    compiled, _ = step(Scaled(), "current", torch.randn(64, 256), select="all")
    assert not any(v.shape == (256, 256) for v in in_fp8(compiled))
    assert {v.reason for v in saved(compiled) if v.shape == (256, 256) and v.dtype == "float32"} <= {
        "derived: computed from Parameters only"
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("power_of_2", [True, False])
@pytest.mark.parametrize("columns", [256])  # Inductor's C++ leaves out the columns beyond the last multiple of 128
def test_generated_code_without_fp8_instructions_equals_the_reference(columns, power_of_2):
    """The lowering for GPUs without FP8 instructions, compiled for the CPU: every rounding, subnormals, NaN and infinities."""
    from torch._inductor.lowering import lowerings

    from lowering.inductor import blockwise, register_lowerings

    register_lowerings()
    ops, room = torch.ops.lowering, blockwise.LOWERINGS
    save, load = ops.save_activation.default, ops.load_activation.default
    x = torch.randn(64, columns) * torch.exp2(torch.randint(-24, 3, (64, columns)))
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    x[1], x[2] = 0.0, torch.arange(columns) * 2.0**-9

    def there_and_back(x):
        q, scale_inv = save(x, as_bytes=True, power_of_2=power_of_2)
        return q, scale_inv, load(q, scale_inv, dtype=torch.bfloat16)

    expected = there_and_back(x)
    with pytest.MonkeyPatch.context() as patch:
        for operation in (save, load):
            patch.setitem(lowerings, operation, room[operation])
        torch._dynamo.reset()
        ours = torch.compile(there_and_back, fullgraph=True)(x)
    finite = ~expected[2].isnan()
    assert ours[2].isnan().equal(~finite)
    assert ours[0][finite].equal(expected[0][finite])  # the sign of a NaN is not specified
    assert ours[1].equal(expected[1])
    assert ours[2][finite].equal(expected[2][finite])
