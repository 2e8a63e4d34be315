"""Exports as transformers and compressed-tensors load them on a CPU: what the table of docs/export.md says, and bit for bit."""

import json

import pytest
import torch

from fp8pass import export_fp8, state_dict_fp8
from fp8pass.errors import Fp8Warning
from tests.support import engines, exports
from tests.support.training import same

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


#: Every recipe where models have limits of their own, and two by turns for the others.
RECIPES = {
    name: exports.RECIPES if name in ("llama", "mixed", "head", "odd") else (exports.RECIPES * 2)[i % 5 : i % 5 + 3 : 2]
    for i, name in enumerate(exports.CASES)
}
#: Model, recipe and loader of those that are not read: every other combination is, or the export refuses it.
NOT_READ = {
    ("odd", "blockwise", "compressed-tensors engines"),  # they fuse weights whose blocks are not whole
    ("mixed", "mxfp8", "compressed-tensors dequantize"),  # it takes the first group for all
    ("head", "blockwise", "compressed-tensors engines"),
    *(("head", recipe, "fp8 engines") for recipe in ("delayed", "current", "blockwise")),
}


def is_refused(name, recipe, loader):
    """Format fp8 has neither scales of rows nor blocks of 32, nor blocks that are not whole."""
    return (
        loader.startswith("fp8")
        and name != "mixed"
        and (recipe in ("rowwise", "mxfp8") or (name, recipe) == ("odd", "blockwise"))
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RECIPES)
def test_loaders_read_what_the_page_says(name, tmp_path):
    for recipe in RECIPES[name]:
        found = exports.outcomes(name, recipe, tmp_path / recipe)
        assert {loader for loader, text in found.items() if text == "refused"} == {
            n for n in found if is_refused(name, recipe, n)
        }
        lost = {(name, recipe, loader): text for loader, text in found.items() if text not in ("", "refused")}
        assert lost.keys() == {key for key in NOT_READ if key[:2] == (name, recipe)}, lost


def llama(**options):
    return exports._model("Llama", **options)


def test_what_stays_in_high_precision_for_loaders(tmp_path):
    """Those that a model's own list names, such as `wo` of T5, and inputs that are no whole groups."""
    model = llama()
    model._keep_in_fp32_modules = ["down_proj"]
    report = export_fp8(exports.run(model, "current"), tmp_path, "fp8")
    reason = "precision: transformers keeps down_proj of LlamaForCausalLM from being converted"
    assert report.kept["model.layers.0.mlp.down_proj.weight"] == reason
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.down_proj" in config["modules_to_not_convert"]
    report = export_fp8(exports.run(llama(intermediate_size=200), "blockwise"), tmp_path)
    assert report.kept["model.layers.0.mlp.down_proj.weight"] == "shape: K is 200, and loaders divide inputs into groups of 128"


def test_scales_per_tensor_have_the_names_of_engines_and_of_transformers(tmp_path):
    """Of these files none is left by an export that does not need it, also of a model that was loaded from such a folder."""
    from safetensors.torch import load_file

    compiled = exports.run(llama(), "delayed")
    report = export_fp8(compiled, tmp_path, "fp8")
    assert report.files == ["model.safetensors", "transformers-scales.safetensors"]
    engine, theirs = (load_file(tmp_path / file) for file in report.files)
    pairs = (("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale"))
    assert same(theirs, {n.removesuffix(a) + b: scale for n, scale in engine.items() for a, b in pairs if n.endswith(f".{a}")})
    compiled._orig_mod.config.transformers_weights = "transformers.safetensors.index.json"  # as from_pretrained sets it
    assert export_fp8(compiled, tmp_path).files == ["model.safetensors"]
    assert not list(tmp_path.glob("transformers*")) + list(tmp_path.glob("*.index.json"))
    assert "transformers_weights" not in json.loads((tmp_path / "config.json").read_text())


#: Recipe, rules, options of the model, format, and words of the remark.
REMARKS = {
    "several kinds": ("mxfp8", {"*.mlp.*": "current"}, {}, "compressed-tensors", "2 groups of weights (tensor, group)"),
    "a head": ("current", {"lm_head": "current"}, {}, "fp8", "lm_head is in FP8"),
    "a head in blocks": ("blockwise", {"lm_head": "blockwise"}, {}, "compressed-tensors", "lm_head is in FP8"),
    "fused, other scales": ("rowwise", {"*.up_proj": "current"}, {}, "compressed-tensors", "mlp.{gate_proj,up_proj}"),
    "fused, blocks": ("blockwise", {}, {"intermediate_size": 200}, "compressed-tensors", "gate_proj has 200 rows"),
    "fused, all by a rule": ("rowwise", {"*.[qkv]_proj": "current", "*.mlp.*": None}, {}, "compressed-tensors", None),
    "float16": ("mxfp8", {}, {"dtype": torch.float16}, "compressed-tensors", "config.json says bfloat16"),
}


@pytest.mark.parametrize("case", REMARKS)
def test_what_loaders_and_engines_do_not_read_is_said(case, tmp_path, recwarn):
    """By the report, and some by a warning; engines do not read those in which `engines.obstacles` finds something.

    transformers reads the first of several groups for all, and float16 beside MXFP8 would be an error in the first GEMM.
    """
    recipe, rules, options, fmt, text = REMARKS[case]
    report = export_fp8(exports.run(llama(**options), recipe, rules=rules), tmp_path, fmt)
    assert [text in remark for remark in report.remarks] == [True] * (text is not None)
    is_fused = case.startswith("fused") and text is not None
    assert bool(list(engines.obstacles(tmp_path))) == (is_fused or "head" in case)
    told = [str(w.message) for w in recwarn if w.category is Fp8Warning]
    assert told == (list(report.remarks) if is_fused or case == "several kinds" else [])


def test_scales_that_projections_share(tmp_path):
    """match="vllm" with current scaling: q, k and v have one, gate and up another; 576 rows are no whole blocks. It is loaded
    with our weights, bit for bit."""
    model = llama(hidden_size=256, intermediate_size=576, num_attention_heads=4, num_key_value_heads=2, head_dim=48)
    compiled = exports.run(model, "current", match="vllm")
    report, wanted = export_fp8(compiled, tmp_path), dict(exports.weights(compiled, "compressed-tensors"))
    found = dict(exports.load_dequantized(tmp_path, dtype=torch.float32).named_parameters())
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert len(report.written) == 7
    scales = {n.split(".")[-2]: t.item() for n, t in state_dict_fp8(compiled) if "_scale" in n}
    assert scales["q_proj"] == scales["k_proj"] == scales["v_proj"] != scales["o_proj"]
    assert scales["gate_proj"] == scales["up_proj"] != scales["down_proj"]
