"""Exports as transformers and compressed-tensors load them on a CPU: their weights are our dequantized copies, bit for bit."""

import pytest
import torch

from fp8pass import export_fp8, fp8_compile, state_dict_fp8
from lowering.operation import NAMESPACE
from tests.support.engines import dequantized

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:(torch|transformers|compressed_tensors)"),
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*engines fuse these:fp8pass.errors.Fp8Warning"),
]


def llama(**options):
    sizes = {"hidden_size": 256, "intermediate_size": 576, "num_hidden_layers": 1, "vocab_size": 128, "head_dim": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}  # q_proj is [192, 256]
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **heads, **options})).bfloat16()


def mixtral():
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, **heads, experts_implementation="grouped_mm")
    return transformers.MixtralForCausalLM(config).bfloat16()


def trained(model, recipe, steps=1, **options):
    compiled = fp8_compile(model, recipe, backend="aot_eager", **options)
    tokens = torch.randint(0, 128, (2, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        compiled(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return compiled, tokens


def loaded(folder, fmt, dtype=torch.float32, **options):
    if fmt == "fp8":
        config = transformers.FineGrainedFP8Config(dequantize=True)
    else:
        pytest.importorskip("compressed_tensors")
        config = transformers.CompressedTensorsConfig(dequantize=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, output_loading_info=True, dtype=dtype, **options
    )
    known = ("input_scale", "activation_scale", "weight_scale")  # static ones, and those of engines
    unexpected = [name for name in info["unexpected_keys"] if not name.endswith(known)]
    assert not info["missing_keys"]
    assert not unexpected
    assert not info["mismatched_keys"]
    return model


def expected(compiled, fmt):
    """Every tensor as a loader should see it, by its name on disk."""
    tensors = dict(state_dict_fp8(compiled, fmt))
    scales = {name: tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv")) for name in tensors}
    return {
        name: t.float() if scales[name] is None else dequantized(t, scales[name])
        for name, t in tensors.items()
        if not name.endswith(("_scale", "_scale_inv"))
    }


FORMATS = {
    "delayed": ("compressed-tensors", "fp8"),
    "current": ("compressed-tensors", "fp8"),
    "rowwise": ("compressed-tensors",),
    "blockwise": ("compressed-tensors", "fp8"),
    "mxfp8": ("compressed-tensors",),
}


@pytest.mark.parametrize("recipe", FORMATS)
def test_llama(recipe, tmp_path):
    """[192, 256] and 576 rows: of blocks of 128 only the head consists, in FP8 by a rule."""
    model = llama()
    compiled, _ = trained(model, recipe, steps=50 if recipe == "current" else 1, rules={"lm_head": recipe})
    for fmt in FORMATS[recipe]:
        report = export_fp8(compiled, tmp_path / fmt, fmt)
        # of whole blocks: the head; with a whole number of blocks of inputs: all but o_proj and down_proj
        expected_count = {"fp8": 1, "compressed-tensors": 6}[fmt] if recipe == "blockwise" else 8
        assert len(report.written) == expected_count
        found = dict(loaded(tmp_path / fmt, fmt).named_parameters())
        wanted = expected(compiled, fmt)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name
            original = model.get_parameter(name).float()
            assert (tensor - original).norm() < 0.04 * original.norm()


@pytest.mark.parametrize("fmt", ["compressed-tensors", "fp8"])
def test_scales_that_projections_share(fmt, tmp_path):
    """match="vllm" with current scaling: q, k and v have one, gate and up another."""
    compiled, _ = trained(llama(), "current", match="vllm")
    assert len(export_fp8(compiled, tmp_path, fmt).written) == 7
    wanted = expected(compiled, fmt)
    found = dict(loaded(tmp_path, fmt).named_parameters())
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    scales = {n.split(".")[-2]: t.item() for n, t in state_dict_fp8(compiled, fmt) if "_scale" in n}
    assert scales["q_proj"] == scales["k_proj"] == scales["v_proj"] != scales["o_proj"]
    assert scales["gate_proj"] == scales["up_proj"] != scales["down_proj"]


@pytest.mark.parametrize(("recipe", "fmt"), [("rowwise", "compressed-tensors"), ("blockwise", "fp8")])
def test_mixtral(recipe, fmt, tmp_path):
    model = mixtral()
    compiled, _ = trained(model, recipe)
    report = export_fp8(compiled, tmp_path, fmt)
    assert {w.name.rpartition(".")[2] for w in report.written} == {"weight", "gate_up_proj", "down_proj"}
    tensors = expected(compiled, fmt)
    experts = [f"model.layers.0.block_sparse_moe.experts.{i}" for i in range(4)]
    found = dict(loaded(tmp_path, fmt).named_parameters())
    gate_up = torch.stack([torch.cat([tensors[f"{e}.w1.weight"], tensors[f"{e}.w3.weight"]]) for e in experts])
    assert torch.equal(found["model.layers.0.mlp.experts.gate_up_proj"], gate_up)
    down = torch.stack([tensors[f"{e}.w2.weight"] for e in experts])
    assert torch.equal(found["model.layers.0.mlp.experts.down_proj"], down)
    assert "routing" in report.kept["model.layers.0.mlp.gate.weight"]


def test_gpt_oss_keeps_its_experts(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 128, "head_dim": 32}
    config = transformers.GptOssConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, layer_types=["full_attention"]
    )
    model = transformers.GptOssForCausalLM(config).bfloat16()
    compiled, _ = trained(model, "blockwise")
    report = export_fp8(compiled, tmp_path, "fp8")
    assert "inputs first" in report.kept["model.layers.0.mlp.experts.gate_up_proj"]
    found = loaded(tmp_path, "fp8")
    assert torch.equal(found.model.layers[0].mlp.experts.gate_up_proj, model.model.layers[0].mlp.experts.gate_up_proj.float())


def gemm_of_torch(a, b, scale_a, scale_b, bias=None, *, out_dtype=torch.bfloat16, fast_accum=False):
    """`scaled_mm_rowwise`, by the GEMM that transformers calls."""
    return torch._scaled_mm(a, b, scale_a, scale_b.t(), bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accum)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's CPU GEMM has scales per row since 2.13")
def test_logits_of_transformers_fp8_linear(tmp_path, monkeypatch):
    """transformers' own linear with our exported weights computes what our evaluation computes, bit for bit, where both run
    torch's GEMM. On a CPU ours is the reference, whose sums have another order: the last bits of products differ."""
    pytest.importorskip("compressed_tensors")
    from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear

    model = llama()
    compiled, tokens = trained(model, "rowwise", match="hf")
    export_fp8(compiled, tmp_path)
    tensors = dict(state_dict_fp8(compiled))
    engine = loaded(tmp_path, "compressed-tensors", dtype=torch.bfloat16).bfloat16()  # buffers, too, as ours
    for name, module in list(engine.named_modules()):
        if f"{name}.weight_scale" in tensors:
            linear = CompressedTensorsFP8Linear(module.in_features, module.out_features)
            linear.weight.data = tensors[f"{name}.weight"]
            linear.weight_scale.data = tensors[f"{name}.weight_scale"].reshape(1, -1)
            engine.set_submodule(name, linear)
    with torch.no_grad():
        theirs, ours = engine(tokens).logits, compiled(input_ids=tokens).logits
        assert (theirs - ours).float().norm() < 0.03 * ours.float().norm()
        monkeypatch.setattr(NAMESPACE.operations["scaled_mm_rowwise"], "implementation", lambda device: gemm_of_torch)
        assert torch.equal(compiled(input_ids=tokens).logits, theirs)


def test_tied_embeddings_load(tmp_path):
    compiled, _ = trained(llama(tie_word_embeddings=True), "current")
    export_fp8(compiled, tmp_path)
    names = [name for name, _ in state_dict_fp8(compiled)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    found = loaded(tmp_path, "compressed-tensors")
    assert found.lm_head.weight is found.model.embed_tokens.weight


def test_sizes_of_llama_3_8b():
    """At most 0.57 of bfloat16's bytes: by the sizes of meta tensors."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "num_hidden_layers": 2, "head_dim": 128}
    with torch.device("meta"):
        model = llama(**sizes, num_attention_heads=32, num_key_value_heads=8)
        tokens = torch.zeros(1, 16, dtype=torch.int64)
    compiled = fp8_compile(model, "rowwise", backend="aot_eager")
    with torch.no_grad():
        compiled(input_ids=tokens, use_cache=False)
    held = {"layers": 0, "others": 0}
    for name, tensor in state_dict_fp8(compiled):
        held["layers" if ".layers." in name else "others"] += tensor.nbytes
    plain = {"layers": 0, "others": 0}
    for name, tensor in model.named_parameters():
        plain["layers" if ".layers." in name else "others"] += 2 * tensor.numel()
    assert (16 * held["layers"] + held["others"]) / (16 * plain["layers"] + plain["others"]) <= 0.57
