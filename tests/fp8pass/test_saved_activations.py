"""`saved_activations="fp8"`: which values are saved in FP8, what they are worth, and that nothing else changes.

Oracles: an autograd.Function written by hand, bit for bit; storages counted from outside; the same model without the option.
"""

import contextlib
import copy
import functools
import pathlib
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.models import LlamaBlock
from fp8pass import Float8BlockScaling, estimate, fp8_compile, inspect, monitor
from fp8pass.errors import Fp8Warning, InvariantError, OptionError, RecipeError
from fp8pass.recipes import Granularity, Quantization
from fp8pass.rewrite import runner
from fp8pass.rewrite.saved import apply_saved, plan_saved
from fp8pass.rewrite.verify_partitioned import arguments, verify_saved
from lowering import quantize_blockwise
from lowering.formats import E4M3
from tests.support.cases import each, rest
from tests.support.memory import allocated
from tests.support.models import Net, Stack, mlp
from tests.support.mutations import mutations
from tests.support.numerics import sqnr
from tests.support.training import Step, assert_equal, compiled_step

TOKENS = 256
X = torch.randn(1, 64, 256, generator=torch.Generator().manual_seed(2))
PLAIN, NO_GEMM = {"saved_activations": None}, {"rules": {"*": None}}
ops = torch.ops.lowering
quiet = pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8Warning")  # of recipe=None, or of rules that leave nothing


def llama(**changes):
    """A block with the proportions of Llama-3 8B: ffn 3.5 times as wide, four queries for a key."""
    torch.manual_seed(0)
    return LlamaBlock(**{"dim": 256, "ffn": 896, "num_heads": 8, "num_kv_heads": 2} | changes).bfloat16()


def block():
    torch.manual_seed(0)
    return LlamaBlock(256, 384, 4)


def perceptron():
    torch.manual_seed(0)
    return mlp(256, 512, 256)


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


def is_finite(found):
    return all(x.isfinite().all() for x in (found.out, *found.gradients))


def called(graph, operation):
    return graph.graph.find_nodes(op="call_function", target=operation.default)


# -- how much


@pytest.mark.parametrize(("recipe", "most"), [("delayed", 0.47), (None, 0.55), *rest([("current", 0.47), ("blockwise", 0.47)])])
@quiet
def test_a_llama_block_saves_less_than_half(recipe, most):
    x = torch.randn(1, TOKENS, 256, dtype=torch.bfloat16)
    plain = graph_of(step(llama(), "delayed", x, **NO_GEMM | PLAIN)[0])
    graph = graph_of(step(llama(), recipe, x, weight_copies="recompute")[0])
    assert graph.saved_bytes <= most * plain.saved_bytes
    before, after = (sum(getattr(v, name) for v in graph.saved) for name in ("bytes_before", "bytes_after"))
    assert (graph.saved_bytes_before, graph.saved_bytes) == (before, after)


class Layer(nn.Module):
    """A decoder layer of transformers with the positions that it is given."""

    def __init__(self, layer, rope):
        super().__init__()
        self.layer, self.rope = layer, rope

    def forward(self, x):
        positions = torch.arange(x.shape[1])[None]
        return self.layer(x, position_embeddings=self.rope(x, positions), position_ids=positions)


def block_of(name):
    """A block of the table in docs/memory.md by the first word of its row, of 256 features, and the shape of its input."""
    if name.startswith("Llama"):
        return llama(**({} if name.startswith("Llama-3") else {"ffn": 704, "num_heads": 4, "num_kv_heads": 4})), (1, 512, 256)
    models = pytest.importorskip("transformers").models
    torch.manual_seed(0)
    given = {"hidden_size": 256, "num_attention_heads": 4, "attn_implementation": "sdpa"}
    if name.startswith("GPT-2"):
        config = models.gpt2.GPT2Config(n_embd=256, n_head=4, attn_implementation="sdpa", resid_pdrop=0.0, attn_pdrop=0.0)
        return models.gpt2.modeling_gpt2.GPT2Block(config, layer_idx=0), (1, 512, 256)
    if name.startswith("ViT"):
        config = models.vit.ViTConfig(**given, intermediate_size=1024)
        return models.vit.modeling_vit.ViTLayer(config), (2, 257, 256)
    assert name.startswith("Qwen3-MoE")
    experts = {"moe_intermediate_size": 96, "num_experts": 16, "num_experts_per_tok": 8, "experts_implementation": "grouped_mm"}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}
    modeling = models.qwen3_moe.modeling_qwen3_moe
    config = models.qwen3_moe.Qwen3MoeConfig(**given | heads | experts)
    return Layer(modeling.Qwen3MoeDecoderLayer(config, 0), modeling.Qwen3MoeRotaryEmbedding(config)), (1, 512, 256)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["Llama-3", "Llama:", "GPT-2", "Qwen3-MoE", "ViT, 257 tokens, delayed", "ViT, 257 tokens, blockwise"]
)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning")  # transformers' experts
@quiet
def test_the_table_of_blocks_in_the_documents(name):
    """Bytes relative to bfloat16: GEMMs in FP8, the same with saved activations, saved activations alone."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {name}"))
    recipe = name.rpartition(", ")[2] if "ViT" in name else "current"
    model, shape = block_of(name)
    model, x = model.bfloat16(), torch.randn(shape, dtype=torch.bfloat16)

    def bytes_of(recipe, saved, **options):
        torch._dynamo.reset()
        compiled = fp8_compile(
            model, recipe, backend="aot_eager", weight_copies="recompute", saved_activations=saved, **options
        )
        out = compiled(x.clone().requires_grad_())
        (out[0] if isinstance(out, tuple) else out).float().square().mean().backward()
        return sum(graph.saved_bytes for graph in inspect(compiled).graphs if graph.trains)

    plain = bytes_of("current", None, rules={"*": None})
    found = [bytes_of(*given) / plain for given in ((recipe, None), (recipe, "fp8"), (None, "fp8"))]
    assert found == pytest.approx([float(cell) for cell in row.split("|")[2:5]], abs=0.011)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", [None, "current"], ids=str)
@quiet
def test_the_allocator_sees_what_is_saved(recipe):
    x = torch.randn(1, TOKENS, 128, dtype=torch.bfloat16, requires_grad=True)

    def memory(recipe, **options):
        """Bytes that a forward leaves allocated besides its result, and the peak of a step."""
        compiled, _ = step(Stack(llama(dim=128, ffn=448) for _ in range(6)), recipe, x, **options)
        left, _ = allocated(lambda: compiled(x))
        _, peak = allocated(lambda: compiled(x).float().square().mean().backward())
        return left - x.nbytes, peak

    plain, plain_peak = memory("delayed", rules={"*": None}, saved_activations=None)
    ours, peak = memory(recipe, weight_copies="recompute")
    assert ours <= 0.49 * plain
    assert peak <= 0.8 * plain_peak  # the emulated casts take some


# -- what the values are worth


class AtRounded(torch.autograd.Function):
    """A module of x, whose backward is that of the module of what the copy of x is worth."""

    @staticmethod
    def forward(ctx, module, x, *weights):
        q, scale_inv = quantize_blockwise(x, E4M3, (1, 128))
        rounded = q.float() * scale_inv.repeat_interleave(128, 1)[:, : q.shape[1]]
        ctx.module = module
        ctx.save_for_backward(rounded.to(x.dtype), *weights)
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        x, *weights = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        names = [name for name, _ in ctx.module.named_parameters()]
        with torch.enable_grad():
            out = torch.func.functional_call(ctx.module, dict(zip(names, weights, strict=True)), (x,))
        return None, *torch.autograd.grad(out, [x, *weights], grad)


def by_hand(module, x):
    """A norm whose variance reads the mean, which is saved, too."""
    centered = x - x.mean(-1, keepdim=True)
    return centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


TAILS = {  # of the width, with the number of statistics that are computed again
    "gelu": (lambda width: nn.Sequential(nn.GELU(), nn.Linear(width, 64)), 0),
    "layer": (nn.LayerNorm, 2),
    "rms": (nn.RMSNorm, 1),
    "group": (lambda width: nn.GroupNorm(8, width), 2),
    "by hand": (lambda width: Net(by_hand), 2),
}


@pytest.mark.parametrize(
    ("kind", "width", "dtype", "is_dynamic"),
    [
        *(("gelu", width, d, False) for width in (256, 200) for d in (torch.float32, torch.bfloat16, torch.float16)),
        *((kind, 256, torch.float32, dynamic) for kind in list(TAILS)[1:] for dynamic in (False, True)),
    ],
)
@quiet
def test_gradients_and_statistics_are_those_of_the_rounded_values(kind, width, dtype, is_dynamic):
    """Bit for bit, or for norms nearly: their gradient is orthogonal to the rounded values, and statistics are not saved."""
    make, num_statistics = TAILS[kind]
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, width), make(width)).to(dtype), torch.randn(48, 64, dtype=dtype)
    ours = copy.deepcopy(model)
    compiled = fp8_compile(ours, None, backend="aot_eager", saved_activations="fp8", dynamic=is_dynamic)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    expected, out = AtRounded.apply(model[1], model[0](leaves[0]), *model[1].parameters()), compiled(leaves[1])
    grad = torch.randn(out.shape, dtype=dtype)
    for result in (expected, out):
        result.backward(grad)
    assert [v.op for v in in_fp8(compiled)] == ["addmm"]
    assert out.equal(expected)
    close = {"rtol": 1e-4, "atol": 1e-5} if num_statistics else {"rtol": 0, "atol": 0}
    for got, want in zip([leaves[1], *ours.parameters()], [leaves[0], *model.parameters()], strict=True):
        torch.testing.assert_close(got.grad, want.grad, **close)
    computed = [v for v in saved(compiled) if "computed again from values that are saved in FP8" in (v.reason or "")]
    assert [v.bytes_after for v in computed] == [0] * num_statistics
    assert is_dynamic or not num_statistics or graph_of(compiled).saved_bytes < width * 48 * 1.04 + x.nbytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@quiet
def test_the_input_of_gelu_is_saved_in_fp8_through_inductor(approximate):
    """Inductor's decompositions compute GELU's gradient by an exponential, or by a tanh."""
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(approximate), nn.Linear(256, 64)), torch.randn(48, 64)
    _, expected = step(model, None, x)
    compiled, ours = step(model, None, x, backend="inductor")
    assert [(v.op, v.shape) for v in in_fp8(compiled)] == [("addmm", (48, 256))]
    assert sqnr(expected.out, ours.out) > 60
    assert_near(ours, expected, 60)


@each("shape", [(0, 256), (3, 0), (5,), (2, 3, 130), (1, 1), (4, 128)])
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
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


# -- which values


@quiet
def test_what_is_never_saved_in_fp8_has_its_reason():
    compiled, _ = step(
        Net(
            lambda m, x: F.log_softmax(m.head(F.dropout(m.block(x), 0.5).relu()), -1) * 2,
            block=block(),
            head=nn.Linear(256, 512),
        ),
        "delayed",
    )
    reasons = [v.reason for v in saved(compiled) if not v.quantized]
    assert {reason.partition(":")[0] for reason in reasons} >= {"readers", "sensitive", "small", "dtype"}
    assert all(v.dtype in ("float32", "bfloat16", "float16") and v.bytes_before > 4096 for v in in_fp8(compiled))
    attention = [v for v in saved(compiled) if "attention" in v.op or (v.reason or "").endswith("attention reads it")]
    assert [v.quantized for v in attention] == [False] * 5  # q, k, v, its output and its statistics
    assert any("softmax" in reason for reason in reasons)


@pytest.mark.filterwarnings("error::fp8pass.errors.Fp8Warning")
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
    with pytest.raises(Fp8Warning, match=r"'nowhere:saved' has matched no saved value"):
        found({"nowhere:saved": None}, make=lambda: mlp(256, 128, 256))


def test_recipes_decide_the_scales():
    class Own(Float8BlockScaling):
        dtype = E4M3

        def saved(self):
            return Quantization(self.dtype, Granularity.BLOCK_1X128, power_of_2=False)

    class Wrong(Own):
        dtype = torch.float8_e5m2

    compiled, _ = step(block(), Own())
    assert {node.kwargs["power_of_2"] for node in called(graph_of(compiled).forward, ops.save_activation)} == {False}
    with pytest.raises(RecipeError, match=r"Wrong\.saved"):
        step(block(), Wrong())


def test_statistics_of_inputs_and_of_values_that_a_rule_keeps_are_saved():
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64))
    for rules in ({"0:saved": None}, {"1:saved": None}):
        compiled, _ = step(model, "current", torch.randn(48, 64), rules=rules, select="all")
        assert [v.bytes_after for v in saved(compiled) if v.module == "1" and v.shape == (48, 1)] == [4 * 48] * 2
    compiled, _ = step(block(), "current")  # the input of the first norm is the model's, that of the second a sum with it
    assert {v.module: v.bytes_after for v in saved(compiled) if v.op == "rsqrt"} == {"attn_norm": 4 * 64, "ffn_norm": 0}


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

    def __init__(self, tanh=torch.tanh, hidden=256):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.tanh = nn.Linear(64, hidden), nn.Linear(hidden, 64), tanh

    def forward(self, x):
        return self.down(self.tanh(self.up(x)))


SCALES = {"delayed": "tensor-wise", "current": "tensor-wise", "rowwise": "row-wise", "blockwise": "1x128", "mxfp8": "1x32"}


@pytest.mark.parametrize("recipe", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@quiet
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
    assert not called(graph.forward, ops.save_activation)
    assert "Saved in FP8 copies of down, which GEMMs read, too." in str(inspect(compiled))
    assert_equal(ours, expected)


def test_the_output_of_attention_is_shared_by_a_rule():
    x = torch.randn(2, 64, 256)
    compiled, ours = step(block(), "current", x, rules={"*:saved": "blockwise"})
    assert [(v.shared_with, "attention" in v.op) for v in in_fp8(compiled) if v.shared_with] == [("wo", True)]
    _, plain = step(block(), "current", x, **PLAIN)
    assert ours.out.equal(plain.out)
    assert_near(ours, plain, 15)


class Reordered(Gated):
    """The matrix that the GEMM reads has the value's elements in another order."""

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)).transpose(0, 1).reshape(x.shape[0] * x.shape[1], -1))


def test_copies_with_padding_and_of_dynamic_sizes_are_shared_and_those_of_reordered_elements_are_not():
    model, x = Gated(hidden=200), torch.randn(3, 31, 64)
    _, plain = step(model, "current", x, **PLAIN)
    compiled, ours = step(model, "current", x)
    assert [v.shared_with for v in in_fp8(compiled)] == ["down"]
    dynamic, same = step(model, "current", x, dynamic=True)
    assert in_fp8(dynamic)
    if in_fp8(dynamic)[0].shared_with:
        assert_equal(ours, same)
    assert_near(ours, plain, 25)
    compiled, ours = step(Reordered(), "current", torch.randn(2, 48, 64))
    assert not any(v.shared_with for v in in_fp8(compiled))
    assert is_finite(ours)


# -- together with


def checkpointed(**options):
    """Blocks that the backward computes again, all of them or but for what a policy saves."""
    return Stack([block(), block()], use_reentrant=False, **options)


def saving_products():
    def policy(context, op, *args, **kwargs):
        is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextlib.contextmanager
def numpy_hooks():
    """Hooks that take what is saved to NumPy, which has no FP8."""
    seen = set()

    def pack(tensor):
        seen.add(tensor.dtype)
        return tensor.detach().numpy().copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        yield
    assert not any("float8" in str(dtype) for dtype in seen)


@pytest.mark.parametrize(
    ("model", "recipe", "ours", "theirs", "context", "saves"),
    [
        pytest.param(block, "delayed", NO_GEMM, NO_GEMM | PLAIN, contextlib.nullcontext, False, id="a rule keeps everything"),
        pytest.param(checkpointed, "current", {}, PLAIN, contextlib.nullcontext, False, id="a recomputed forward"),
        pytest.param(block, None, {}, {}, torch.autograd.graph.save_on_cpu, True, id="saved on the CPU"),
        *(
            pytest.param(
                model,
                "delayed",
                {"count": 2, "weight_copies": copies},
                {"count": 2, "weight_copies": "recompute"},
                context,
                True,
                id=f"weight_copies={copies}",
            )
            for copies, model, context in (("save", block, numpy_hooks), ("cache", perceptron, contextlib.nullcontext))
        ),
    ],
)
@quiet
def test_no_bit_changes(model, recipe, ours, theirs, context, saves):
    _, expected = step(model(), recipe, **theirs)
    with context():
        compiled, found = step(model(), recipe, **ours)
    assert bool(in_fp8(compiled)) == saves
    assert_equal(found, expected)
    if model is checkpointed:
        assert any("runs again" in (v.reason or "") or "attention" in (v.reason or "") for v in saved(compiled))


def test_selective_checkpointing_saves_products_in_fp8():
    compiled, ours = step(checkpointed(context_fn=saving_products), "current")
    assert {"gate", "up"} <= {v.module.rpartition(".")[2] for v in in_fp8(compiled)}
    assert is_finite(ours)


def test_dynamic_shapes_compile_once():
    _, expected = step(block(), "blockwise")
    compiled, ours = step(block(), "blockwise", dynamic=True)
    assert_equal(ours, expected)
    for tokens in (96, 33):
        compiled(torch.randn(1, tokens, 256, requires_grad=True)).square().mean().backward()
    graphs = inspect(compiled).graphs
    assert len(graphs) <= 2
    assert any(v.quantized for v in graphs[0].saved)
    assert any(isinstance(v.bytes_after, str) for v in graphs[0].saved)


def test_views_of_one_tensor_are_saved_together_or_not_at_all_and_inputs_and_outputs_not_a_second_time():
    def fused(m, x, reads_first=False):
        gate, up = m.up(x).chunk(2, -1)
        return m.down(F.silu(gate) * up) + (gate.cos().mean() if reads_first else 0)

    layers, x = {"up": nn.Linear(64, 512, bias=False), "down": nn.Linear(256, 64, bias=False)}, torch.randn(96, 64)
    compiled, ours = step(Net(fused, **layers), "current", x)
    assert sum(v.bytes_before for v in in_fp8(compiled)) == 96 * 512 * 4
    assert is_finite(ours)
    assert not in_fp8(step(Net(lambda m, x: fused(m, x, reads_first=True), **layers), "current", x)[0])

    def returned(m, x):
        hidden = m.up(x)
        return hidden, m.down(F.silu(hidden) * x)

    model = Net(returned, up=nn.Linear(256, 256), down=nn.Linear(256, 256))
    compiled = fp8_compile(model, "current", backend="aot_eager", saved_activations="fp8")
    sum(out.square().mean() for out in compiled(torch.randn(64, 256, requires_grad=True))).backward()
    assert not in_fp8(compiled)


def test_transposed_values_come_back_with_their_strides():
    model = Net(lambda m, x: torch.tanh(m.linear(x).transpose(1, 2)).cumsum(1), linear=nn.Linear(128, 128))
    x = torch.randn(2, 64, 128)
    compiled, ours = step(model, None, x)
    assert in_fp8(compiled)
    assert_near(ours, step(model, "current", x, **NO_GEMM)[1], 20)


def test_torchs_own_pass_is_refused():
    given = {"post_grad_fusion_options": {"activation_quantization_aten_pass": {"quant_type": "torch.float8_e5m2"}}}
    for patch, options in ((given, None), ({}, given)):
        with torch._inductor.config.patch(patch), pytest.raises(OptionError, match="activation_quantization_aten_pass"):
            fp8_compile(mlp(), "delayed", saved_activations="fp8", options=options)


# -- verification


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
    return found[0]


def turned():
    """A value that lies transposed in memory, and others of its size and dtype."""

    def forward(m, x):
        up, gate = m.up(x), m.gate(x)
        return m.down(torch.tanh(up.transpose(1, 2)).transpose(1, 2) * F.silu(gate))

    return Net(forward, **{name: nn.Linear(128, 128) for name in ("up", "gate", "down")})


def normed():
    return Stack(nn.Sequential(nn.Linear(128, 128), norm, nn.Tanh()) for norm in (nn.RMSNorm(128), nn.LayerNorm(128)))


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        *((turned, recipe) for recipe in (None, "delayed", "blockwise")),
        *((normed, recipe) for recipe in (None, "delayed")),
        *((Gated, recipe) for recipe in SCALES),
    ],
)
@quiet
def test_no_mutation_of_the_new_nodes_passes_unseen(model, recipe):
    torch.manual_seed(0)
    x = torch.randn(2, 64, 64 if model is Gated else 128)
    forward, backward, num_outputs, rules, context = partitioned(model(), x, recipe)
    before = arguments(forward), arguments(backward)
    copies, computed = apply_saved(forward, backward, plan_saved(forward, backward, num_outputs, rules, context))
    assert copies
    assert len(computed) == (3 if model is normed else 0)
    verify = functools.partial(verify_saved, forward, backward, copies, computed, before)
    verify()
    unseen, count = [], 0
    for graph, known in zip((forward, backward), before, strict=True):
        for mutation in mutations(types.SimpleNamespace(graph=graph, known=set(known)), None):
            count += 1
            with mutation.made(), contextlib.suppress(InvariantError):
                verify()
                unseen.append(str(mutation))
    assert not unseen
    assert count > (1 if model is Gated else 10)
    for make, undo in misplaced(forward, copies) if model is turned else ():
        make()
        try:
            with pytest.raises(InvariantError):
                verify()
        finally:
            undo()
    verify()


def misplaced(forward, applied):
    """Defects that are no wrong argument, and how each is undone: results in another order, another value saved or read, a
    second reader of a value."""
    output, made, value = forward.output_node(), next(iter(applied.values())), next(iter(applied)).node
    held, meta, user = output.args, made.data_input.meta, next(iter(made.loaded.users))
    data_value, scale_value = meta["val"], made.scale_input.meta["val"]

    def results(change):
        nodes = list(held[0])
        return lambda: setattr(output, "args", (type(held[0])(change(nodes)),)), lambda: setattr(output, "args", held)

    exchanged = {made.data: made.scale_inv, made.scale_inv: made.data}
    yield results(lambda nodes: [exchanged.get(n, n) for n in nodes])
    yield results(lambda nodes: [n for n in nodes if n is not made.scale_inv])
    yield results(lambda nodes: [value if n is made.data else n for n in nodes])
    following = made.data_input.next
    yield lambda: following.append(made.data_input), lambda: made.scale_input.prepend(made.data_input)
    yield (
        lambda: user.replace_input_with(made.loaded, made.scale_input),
        lambda: user.replace_input_with(made.scale_input, made.loaded),
    )
    yield lambda: meta.update(val=scale_value), lambda: meta.update(val=data_value)


def test_the_table_and_the_page_have_saved_values_and_the_estimate_a_column(tmp_path):
    pytest.importorskip("jinja2")
    compiled, _ = step(block(), "current")
    report = inspect(compiled)
    assert "Saved for the backward" in str(report)
    assert "attention reads it" in str(report)
    (graph,) = report.to_dict()["graphs"]
    assert sum(graph["saved_dtypes"].values()) == graph["saved_bytes"] < graph["saved_bytes_before"]
    assert {v["format"] for v in graph["saved"]} == {None, "e4m3 1x128"}
    assert any(v["reason"] for v in graph["saved"] if not v["quantized"])
    report.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Saved values" in page
    assert page.count("e4m3 1x128") == len(in_fp8(compiled))
    assert "attention reads it" in page
    x = torch.empty(1, 64, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = estimate(block().bfloat16().to("meta"), x, recipe="current")
    both, _ = step(block().bfloat16(), "current", X.bfloat16())
    assert found.recipes["current"].saved_bytes_in_fp8 == inspect(both).graphs[0].saved_bytes
    assert "saved_activations" in str(found)


@quiet
@pytest.mark.parametrize("recipe", [None, "delayed"], ids=str)
def test_a_monitor_has_the_error_of_saved_values_and_changes_nothing(recipe):
    x, model = torch.randn(48, 128), mlp(128, 256, 128)
    _, expected = step(model, recipe, x, count=2)
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
        rounded = ops.load_activation(*ops.save_activation(hidden), dtype=torch.float32)
        assert found.sqnr == pytest.approx(sqnr(hidden, rounded), abs=0.01)
    assert (found.name, found.scaling, found.num_elements) == ("0:saved", "1x128", hidden.numel())
    assert 25 < found.sqnr < 40
    assert_equal(Step(out, [given.grad], {name: p.grad for name, p in model.named_parameters()}), expected)


def test_what_is_made_of_parameters_alone_is_no_activation():
    weight, scale = nn.Parameter(torch.randn(256, 256)), nn.Parameter(torch.randn(256, 1))
    model = Net(lambda m, x: torch.tanh(x @ torch.tanh(torch.sigmoid(m.weight) * m.scale)), weight=weight, scale=scale)
    compiled, _ = step(model, "current", X[0], select="all")
    assert not any(v.shape == (256, 256) for v in in_fp8(compiled))
    reasons = {v.reason for v in saved(compiled) if v.shape == (256, 256) and v.dtype == "float32"}
    assert reasons <= {"derived: computed from Parameters only"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("power_of_2", [True, False])
def test_generated_code_without_fp8_instructions_equals_the_reference(power_of_2):
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
        q, scale_inv = save(x, as_bytes=True, power_of_2=power_of_2)
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


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", *rest(["current"])])
def test_the_forward_changes_no_bit_and_gradients_hardly(recipe):
    (_, plain), (_, ours) = step(block(), recipe, saved_activations=None), step(block(), recipe)
    assert ours.out.equal(plain.out)
    assert_near(ours, plain, 20)


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_the_partitioners_memory_budget_holds(budget):
    with torch._functorch.config.patch(activation_memory_budget=budget):
        compiled, results = step(block(), "current")
    full, _ = step(block(), "current")
    assert inspect(compiled).graphs[0].saved_bytes <= inspect(full).graphs[0].saved_bytes
    assert is_finite(results)


def test_autocast_and_in_place():
    model = block()
    compiled = fp8_compile(model, "blockwise", backend="aot_eager", saved_activations="fp8", in_place=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(X.clone().requires_grad_())
    out.float().square().mean().backward()
    assert {v.dtype for v in in_fp8(compiled)} == {"bfloat16"}
    assert all(p.grad.isfinite().all() for p in model.parameters())
