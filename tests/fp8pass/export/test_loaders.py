"""The loaders of each export: the table of docs/export.md, made again, and the modules that an export names; and exports as
transformers and compressed-tensors load them on a CPU, whose weights are our dequantized copies, bit for bit."""

import json

import pytest
import torch
from torch import nn

from fp8pass import export_fp8, fp8_compile, state_dict_fp8
from fp8pass.errors import Fp8Warning
from lowering.operation import NAMESPACE
from tests.support import engines, exports
from tests.support.cases import rest
from tests.support.models import Net

transformers = pytest.importorskip("transformers")
for module in ("accelerate", "peft", "compressed_tensors.compressors", "transformers.models.llama.modeling_llama"):
    pytest.importorskip(module)

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:(torch|transformers|compressed_tensors|peft)"),
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*groups of weights:fp8pass.errors.Fp8Warning"),
    pytest.mark.filterwarnings("ignore:.*engines fuse these:fp8pass.errors.Fp8Warning"),
]


def is_offered(name, recipe):
    """Column -> whether the page has the recipe there."""
    (line,) = [line for line in exports.rows_on_page() if line.startswith(f"| {exports.CASES[name].title} | ")]
    cells = line.removesuffix(" |").split(" | ")[1:]
    return {column: cell.startswith("all") or recipe in cell for column, cell in zip(exports.COLUMNS, cells, strict=True)}


#: Every recipe where the page has a line for one model; two by turns for models that share a line.
ROWS = {
    name: exports.RECIPES if name in ("llama", "mixed", "head", "odd") else (exports.RECIPES * 2)[i % 5 : i % 5 + 3 : 2]
    for i, name in enumerate(exports.CASES)
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ROWS)
def test_the_row_of_the_page(name):
    for recipe in ROWS[name]:
        found = exports.outcomes(name, recipe)
        assert {column: text != "refused" for column, text in found.items()} == is_offered(name, recipe)
        lost = {(name, recipe, column): text for column, text in found.items() if text not in ("", "refused")}
        assert lost.keys() == {key for key in exports.NOT_READ if key[:2] == (name, recipe)}, lost


def test_the_page_has_every_row_and_nothing_else():
    rows = exports.rows_on_page()
    assert sorted(line.split(" | ")[0] for line in rows) == sorted(f"| {case.title}" for case in exports.CASES.values())
    assert exports.on_page() == exports.table(rows)


def test_a_wrong_export_is_not_read(tmp_path):
    """The check of this file finds what it is for: here a head that nobody names, and a scale that is off."""
    exported = exports.export(exports.CASES["tied"], exports.compiled_model(exports.CASES["tied"], "current"), "fp8", tmp_path)
    path = tmp_path / "config.json"
    right = path.read_text()
    path.write_text(right.replace('"lm_head"', '"no_such"'))
    assert exports.outcome(exported, exports.LOADERS["fp8 modules"]).startswith("NotRead: missing lm_head")
    path.write_text(right)
    exported.weights["model.layers.0.mlp.up_proj.weight"].mul_(1.02)
    assert exports.outcome(exported, exports.LOADERS["fp8 plain"]).startswith(
        "NotRead: model.layers.0.mlp.up_proj.weight is not"
    )


def llama(**options):
    return exports._model("Llama", **options)


def named(folder):
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return config.get("ignore", config.get("modules_to_not_convert"))


def tied():
    """Every kind of Linear that stays in high precision beside one in FP8."""

    def forward(m, tokens):
        x = m.again(m.body(m.embed(tokens)))
        return m.head(m.normed(x)) + m.thin(x).sum()

    model = Net(forward, embed=nn.Embedding(64, 128), thin=nn.Linear(128, 4), head=nn.Linear(128, 64, bias=False))
    model.body, model.again, model.unused, model.other = (nn.Linear(n, n) for n in (128, 128, 64, 64))
    model.again.weight, model.other.weight, model.head.weight = model.body.weight, model.unused.weight, model.embed.weight
    model.normed = nn.utils.parametrizations.weight_norm(nn.Linear(128, 128))
    return model


@pytest.mark.parametrize("fmt", ["compressed-tensors", "fp8"])
def test_every_linear_that_is_not_in_fp8_is_named(fmt, tmp_path):
    """Also where loaders would take a name for a pattern: a class, a prefix of compressed-tensors, no regular expression."""
    model = tied()
    for name in ("Linear", "re:x", "a(b"):
        model.add_module(name, nn.Linear(8, 8))
    compiled = fp8_compile(model, "current", backend="aot_eager")
    compiled(torch.randint(0, 64, (2, 16))).sum().backward()
    report = export_fp8(compiled, tmp_path, fmt)
    assert [w.name for w in report.written] == ["body.weight"]
    patterns = ["a(b", "re:Linear$", "re:re:x$"] if fmt == "compressed-tensors" else ["Linear", r"^a\(b$", "^re:x$"]
    assert {"head", "normed", "other", "thin", "unused", *patterns} <= set(named(tmp_path))
    assert not {"body", "again", "embed"} & set(named(tmp_path))


def test_what_stays_in_high_precision_for_loaders(tmp_path):
    model = llama()
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = mlp.gate_proj.weight
    report = export_fp8(exports.run(model, "current"), tmp_path)
    assert "loaders tie weights without their scales" in report.kept["model.layers.0.mlp.gate_proj.weight"]
    assert {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")} <= set(named(tmp_path))
    # It leaves those alone that a model's own list names, such as `wo` of T5.
    model = llama()
    model._keep_in_fp32_modules = ["down_proj"]
    report = export_fp8(exports.run(model, "current"), tmp_path, "fp8")
    reason = "precision: transformers keeps down_proj of LlamaForCausalLM from being converted"
    assert report.kept["model.layers.0.mlp.down_proj.weight"] == reason
    assert "model.layers.0.mlp.down_proj" in named(tmp_path)
    report = export_fp8(exports.run(llama(intermediate_size=200), "blockwise"), tmp_path)
    assert report.kept["model.layers.0.mlp.down_proj.weight"] == "shape: K is 200, and loaders divide inputs into groups of 128"
    assert "model.layers.0.mlp.down_proj" in named(tmp_path)


@pytest.mark.exhaustive
def test_an_encoder_decoder(tmp_path):
    """T5: its embeddings are tied three times, and its loader converts no `wo`."""
    sizes = {"d_model": 128, "d_kv": 64, "d_ff": 256, "num_layers": 1, "num_heads": 2, "vocab_size": 128}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    compiled = exports.run(model.eval(), "current")
    export_fp8(compiled, tmp_path, "fp8")
    assert {"decoder.block.0.layer.2.DenseReluDense.wo", "lm_head"} <= set(named(tmp_path))
    inputs = {name: torch.randint(0, 128, (2, 16)) for name in ("input_ids", "decoder_input_ids")}
    with exports.fp8_modules():
        loaded, info = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
        with torch.no_grad():
            found, wanted, high = (m(**inputs).logits for m in (loaded, compiled, model))
    assert not info["missing_keys"]
    assert exports.difference(found, wanted) <= exports.SPREAD * exports.difference(wanted, high)


@pytest.mark.parametrize("recipe", ["current", pytest.param("delayed", marks=pytest.mark.exhaustive)])
def test_scales_per_tensor_have_the_names_of_engines_and_of_transformers(recipe, tmp_path):
    """Of these files none is left by an export that does not need it, also of a model that was loaded from such a folder."""
    from safetensors import safe_open

    compiled = exports.run(llama(), recipe)
    report = export_fp8(compiled, tmp_path, "fp8")
    assert report.files == ["model.safetensors", "transformers-scales.safetensors"]
    found = {}
    for file in report.files:
        with safe_open(tmp_path / file, "pt") as opened:
            found[file] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    engine, theirs = found.values()
    pairs = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    if recipe == "current":
        del pairs["input_scale"]
    for name, its_name in pairs.items():
        scales = {key.removesuffix(name): scale for key, scale in engine.items() if key.endswith(f".{name}")}
        assert len(scales) == 7
        assert all(torch.equal(theirs[base + its_name], scale) for base, scale in scales.items())
    assert len(theirs) == 7 * len(pairs)
    assert not [name for name in engine if name.endswith(("_scale_inv", "activation_scale"))]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == dict.fromkeys(engine, "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    other = json.loads((tmp_path / config["transformers_weights"]).read_text())["weight_map"]
    assert other == index | dict.fromkeys(theirs, "transformers-scales.safetensors")
    compiled._orig_mod.config.transformers_weights = "transformers.safetensors.index.json"  # as from_pretrained sets it
    assert export_fp8(compiled, tmp_path).files == ["model.safetensors"]
    assert not list(tmp_path.glob("transformers*")) + list(tmp_path.glob("*.index.json"))
    assert "transformers_weights" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize(
    ("recipe", "other", "strategies", "count"),
    [
        ("mxfp8", "current", ["tensor", "group"], 1),
        ("blockwise", "current", ["block", "tensor"], 0),
        *rest([("rowwise", "blockwise", ["block", "channel"], 1), ("rowwise", "rowwise", ["channel"], 0)]),
    ],
)
def test_where_several_kinds_of_scales_are_not_dequantized(recipe, other, strategies, count, tmp_path, recwarn):
    """The order of groups makes what transformers reads wrongly an error."""
    report = export_fp8(exports.run(llama(), recipe, rules={"*.mlp.*": other}), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert [group["weights"]["strategy"] for group in config["config_groups"].values()] == strategies
    told = [str(w.message) for w in recwarn if w.category is Fp8Warning]
    assert len(told) == len(report.remarks) == count
    assert all("Without it transformers reads each group as it is" in text for text in told)
    assert all(f"2 groups of weights ({', '.join(strategies)})" in text for text in told)


@pytest.mark.parametrize(
    ("recipe", "fmt", "count"),
    [("current", "fp8", 1), ("blockwise", "compressed-tensors", 1), *rest([("rowwise", "compressed-tensors", 0)])],
)
def test_a_head_that_engines_do_not_read_is_said(recipe, fmt, count, tmp_path):
    report = export_fp8(exports.run(llama(), recipe, rules={"lm_head": recipe}), tmp_path, fmt)
    assert sum(remark.startswith("lm_head is in FP8") for remark in report.remarks) == count
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert fmt == "fp8" or config["config_groups"]["group_0"]["targets"] == ["lm_head", "Linear"]


#: Recipe, rules, sizes, and what is said of the projections that engines fuse: nothing where they are alike.
UNEQUAL = {
    "one in high precision": ("rowwise", {"*.q_proj": None}, {}, "self_attn.{k_proj,v_proj,q_proj}"),
    "one with other scales": ("rowwise", {"*.up_proj": "current"}, {}, "mlp.{gate_proj,up_proj}"),
    "one with static scales": ("current", {"*.v_proj": "delayed"}, {}, "self_attn.{q_proj,k_proj,v_proj}"),
    "blocks": ("blockwise", {}, {"intermediate_size": 200}, "gate_proj has 200 rows"),
    "all by a rule": ("rowwise", {"*.[qkv]_proj": "current", "*.mlp.*": None}, {}, ""),
}


@pytest.mark.parametrize("case", UNEQUAL)
def test_projections_that_engines_fuse_and_that_are_not_alike_are_said(case, tmp_path, recwarn):
    """By the report and a warning, for what `engines.obstacles` finds in the folder."""
    recipe, rules, sizes, text = UNEQUAL[case]
    compiled = exports.run(llama(**sizes), recipe, rules=rules)
    report = export_fp8(compiled, tmp_path)
    next(state_dict_fp8(compiled))
    found = [remark for remark in report.remarks if "engines fuse these projections" in remark]
    assert len(found) == bool(text) == bool(list(engines.obstacles(tmp_path)))
    assert all(text in remark for remark in found)
    assert [str(w.message) for w in recwarn if "engines fuse these projections" in str(w.message)] == 2 * found


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("mxfp8", torch.float16), ("rowwise", torch.bfloat16), *rest([("rowwise", torch.float16), ("rowwise", torch.float32)])],
)
def test_the_rest_has_the_dtype_of_the_model(recipe, dtype, tmp_path):
    """But for MXFP8, which compressed-tensors dequantizes to bfloat16: other tensors of float16 beside it would be an error in
    the first GEMM."""
    report = export_fp8(exports.run(llama(dtype=dtype), recipe), tmp_path)
    written = torch.bfloat16 if recipe == "mxfp8" else dtype
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(written).removeprefix("torch.")
    assert any(remark.startswith("config.json says bfloat16") for remark in report.remarks) == (recipe == "mxfp8")
    assert recipe == "mxfp8" or transformers.AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.dtype is dtype


# -- weights, bit for bit


def ragged(**options):
    """q_proj is [192, 256], and the MLP has 576 rows."""
    sizes = {"hidden_size": 256, "intermediate_size": 576, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48}
    return llama(**sizes | options)


def trained(model, recipe, **options):
    compiled = fp8_compile(model, recipe, backend="aot_eager", **options)
    tokens = torch.randint(0, 128, (2, 32))
    compiled(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return compiled, tokens


def assert_exported(compiled, folder, fmt):
    """An export loads in float32 with our weights, bit for bit. Returns its report and the weights."""
    report, wanted = export_fp8(compiled, folder, fmt), dict(exports.weights(compiled, fmt))
    found = dict(exports.load_dequantized(folder, dtype=torch.float32).named_parameters())
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    return report, wanted


@pytest.mark.parametrize("recipe", exports.RECIPES)
def test_llama(recipe, tmp_path):
    """[192, 256] and 576 rows: of blocks of 128 only the head consists, in FP8 by a rule."""
    model = ragged()
    compiled, _ = trained(model, recipe, rules={"lm_head": recipe})
    for fmt in ("compressed-tensors", "fp8")[: 1 if recipe in ("rowwise", "mxfp8") else 2]:
        report, weights = assert_exported(compiled, tmp_path / fmt, fmt)
        # of whole blocks: the head; with a whole number of blocks of inputs: all but o_proj and down_proj
        expected_count = {"fp8": 1, "compressed-tensors": 6}[fmt] if recipe == "blockwise" else 8
        assert len(report.written) == expected_count
        for name, tensor in weights.items():
            original = model.get_parameter(name).float()
            assert (tensor - original).norm() < 0.04 * original.norm()


@pytest.mark.parametrize("fmt", ["compressed-tensors", "fp8"])
def test_scales_that_projections_share(fmt, tmp_path):
    """match="vllm" with current scaling: q, k and v have one, gate and up another."""
    compiled, _ = trained(ragged(), "current", match="vllm")
    report, _ = assert_exported(compiled, tmp_path, fmt)
    assert len(report.written) == 7
    scales = {n.split(".")[-2]: t.item() for n, t in state_dict_fp8(compiled, fmt) if "_scale" in n}
    assert scales["q_proj"] == scales["k_proj"] == scales["v_proj"] != scales["o_proj"]
    assert scales["gate_proj"] == scales["up_proj"] != scales["down_proj"]


@pytest.mark.parametrize(("recipe", "fmt"), [("rowwise", "compressed-tensors"), ("blockwise", "fp8")])
def test_mixtral(recipe, fmt, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "experts_implementation": "grouped_mm"}
    compiled, _ = trained(exports._model("Mixtral", **sizes, **experts), recipe)
    report = export_fp8(compiled, tmp_path, fmt)
    assert {w.name.rpartition(".")[2] for w in report.written} == {"weight", "gate_up_proj", "down_proj"}
    tensors = dict(exports.weights(compiled, fmt))
    experts = [f"model.layers.0.block_sparse_moe.experts.{i}" for i in range(4)]
    found = dict(exports.load_dequantized(tmp_path, dtype=torch.float32).named_parameters())
    gate_up = torch.stack([torch.cat([tensors[f"{e}.w1.weight"], tensors[f"{e}.w3.weight"]]) for e in experts])
    assert torch.equal(found["model.layers.0.mlp.experts.gate_up_proj"], gate_up)
    down = torch.stack([tensors[f"{e}.w2.weight"] for e in experts])
    assert torch.equal(found["model.layers.0.mlp.experts.down_proj"], down)
    assert "routing" in report.kept["model.layers.0.mlp.gate.weight"]


def test_gpt_oss_keeps_its_experts(tmp_path):
    sizes = {"intermediate_size": 128, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = exports._model("GptOss", **sizes, num_local_experts=4, layer_types=["full_attention"])
    compiled, _ = trained(model, "blockwise")
    report = export_fp8(compiled, tmp_path, "fp8")
    assert "inputs first" in report.kept["model.layers.0.mlp.experts.gate_up_proj"]
    found = exports.load_dequantized(tmp_path, dtype=torch.float32)
    assert torch.equal(found.model.layers[0].mlp.experts.gate_up_proj, model.model.layers[0].mlp.experts.gate_up_proj.float())


def gemm_of_torch(a, b, scale_a, scale_b, bias=None, *, out_dtype=torch.bfloat16, fast_accum=False, **kinds):
    """`scaled_mm` of rows, by the GEMM that transformers calls."""
    return torch._scaled_mm(a, b, scale_a, scale_b.t(), bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accum)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's CPU GEMM has scales per row since 2.13")
def test_logits_of_transformers_fp8_linear(tmp_path, monkeypatch):
    """transformers' own linear with our exported weights computes what our evaluation computes, bit for bit, where both run
    torch's GEMM. On a CPU ours is the reference, whose sums have another order: the last bits of products differ."""
    from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear, quantize_fp8_per_row

    model = ragged()
    compiled, tokens = trained(model, "rowwise", match="hf")
    export_fp8(compiled, tmp_path)
    tensors = dict(state_dict_fp8(compiled))
    engine = exports.load_dequantized(tmp_path, dtype=torch.bfloat16).bfloat16()  # buffers, too, as ours
    for name, module in list(engine.named_modules()):
        if f"{name}.weight_scale" in tensors:
            data, scale = quantize_fp8_per_row(model.get_parameter(f"{name}.weight").detach())
            assert torch.equal(data.view(torch.uint8), tensors[f"{name}.weight"].view(torch.uint8))
            assert torch.equal(scale.flatten(), tensors[f"{name}.weight_scale"].flatten())
            linear = CompressedTensorsFP8Linear(module.in_features, module.out_features)
            linear.weight.data = tensors[f"{name}.weight"]
            linear.weight_scale.data = tensors[f"{name}.weight_scale"].reshape(1, -1)
            engine.set_submodule(name, linear)
    with torch.no_grad():
        theirs, ours = engine(tokens).logits, compiled(input_ids=tokens).logits
        assert (theirs - ours).float().norm() < 0.03 * ours.float().norm()
        monkeypatch.setattr(NAMESPACE.operations["scaled_mm"], "implementation", lambda device: gemm_of_torch)
        assert torch.equal(compiled(input_ids=tokens).logits, theirs)
