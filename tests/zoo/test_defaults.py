"""The finds of select="auto" in other people's models: routers and heads, and nothing else.

What is a router and what a head is written down here, per model, by the names that its authors gave. fp8pass goes by structure.
"""

from typing import Any

import pytest
import torch

from fp8pass import fp8_compile, inspect
from tests.support.cases import rest
from tests.zoo.models import DEEPSEEK_V3, TORCH, TOWER, TRANSFORMERS, VOCABULARY, build

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:(torch|transformers|torchtitan|litgpt)"),
]

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_TEXT = {**TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
_DECODER = {**_TEXT, "num_key_value_heads": 4, **_SPECIAL}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64, **_SPECIAL}
_IMAGE = {**TOWER, "image_size": 32, "patch_size": 8}


def selected(model: Any, **inputs: Any) -> dict[str, set[str]]:
    """Reason's kind -> modules, of what "auto" leaves in high precision; widths are such that only adapters are thin."""
    compiled = fp8_compile(model.eval(), "current", backend="aot_eager")
    with torch.no_grad():  # what is selected depends on forward alone
        compiled(**inputs)
    found: dict[str, set[str]] = {"fp8": set()}
    for g in inspect(compiled).gemms:
        kind = "fp8" if g.reason is None else g.reason.partition(":")[0]
        if kind != "unsupported op":
            found.setdefault(kind, set()).add(g.module)
    return found


def text(tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {"input_ids": torch.randint(2, VOCABULARY, (32 // tokens, tokens)), **more}


_EXPERTS = {**_DECODER, "num_experts_per_tok": 2}
ROUTERS = {
    "Mixtral": ({"num_local_experts": 4}, {"model.layers.0.mlp.gate"}),
    "Qwen3Moe": (
        {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16, "decoder_sparse_step": 1}, {"model.layers.0.mlp.gate"}
    ),
    "DeepseekV3": ({**DEEPSEEK_V3, "n_group": 4, "topk_group": 2, "q_lora_rank": 32}, {"model.layers.0.mlp.gate"}),
    "GptOss": ({"num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 16}, {"model.layers.0.mlp.router"}),
    "JetMoe": (
        {"kv_channels": 16, "num_local_experts": 4},
        {"model.layers.0.mlp.router.layer", "model.layers.0.self_attention.experts.router.layer"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name):
    options, routers = ROUTERS[name]
    found = selected(build(f"{name}ForCausalLM", **{**_EXPERTS, **options}).to(torch.bfloat16), **text(use_cache=False))
    assert found.pop("fp8")
    assert found == {"routing": routers, "head": {"lm_head"}}


def test_routers_of_switch():
    """Top-1 by argmax. The router returns a mask, and the experts run behind a graph break."""
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    config = transformers.SwitchTransformersConfig(d_model=64, d_ff=112, num_experts=4)
    found = selected(SwitchTransformersSparseMLP(config), hidden_states=torch.randn(2, 16, 64))
    (router,) = found["routing"]
    assert router.endswith("router.classifier")
    assert found["fp8"]
    assert found["fp8"] <= {f"experts.expert_{i}.{linear}" for i in range(4) for linear in ("wi", "wo")}


#: Model -> its options; whether the head is tied.
HEADS: dict[str, tuple[dict[str, Any], bool]] = {
    "GPT2LMHeadModel": (_GPT, True),
    "LlamaForCausalLM": (_DECODER, False),
    "MistralForCausalLM": (_DECODER, False),
    "Qwen3ForCausalLM": ({**_DECODER, "head_dim": 16}, True),
    "Gemma2ForCausalLM": ({**_DECODER, "head_dim": 16}, True),
    "PhiForCausalLM": (_DECODER, False),
    "OPTForCausalLM": ({**_DECODER, "ffn_dim": 112, "word_embed_proj_dim": 64}, True),
    "GPTNeoXForCausalLM": (_DECODER, False),
    "CohereForCausalLM": (_DECODER, True),
    "MambaForCausalLM": (
        {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 1, "time_step_rank": 32}, True
    ),
}  # fmt: skip
#: Tied and not, with the loss in the graph, with biases, with a scan.
FAST = ("GPT2LMHeadModel", "LlamaForCausalLM", "PhiForCausalLM", "MambaForCausalLM")


@pytest.mark.parametrize("name", [*FAST, *rest(name for name in HEADS if name not in FAST)])
def test_heads_of_causal_models(name):
    """One with the loss in the graph; those of one with a scan, whose steps Dynamo unrolls, are few."""
    (options, is_tied), has_scan = HEADS[name], name.startswith("Mamba")
    model = build(name, tie_word_embeddings=is_tied, **options)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == is_tied
    inputs = text(4 if has_scan else 16, use_cache=False)
    if name == "LlamaForCausalLM":
        inputs["labels"] = inputs["input_ids"]
    found = selected(model, **inputs)
    in_fp8, thin = found.pop("fp8"), found.pop("thin", set())
    assert found == {"head": {"lm_head"}}
    assert len(in_fp8) >= 3
    assert len(in_fp8) == 7 or name != "LlamaForCausalLM"
    assert thin <= ({"backbone.layers.0.mixer"} if has_scan else set())


#: Model -> its options; the inputs besides tokens, or in their place.
ENCODERS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "BertModel": (_TEXT, True, False),
    "ViTForImageClassification": ({**_IMAGE, "num_labels": 40}, False, True),
    "RobertaModel": ({**_TEXT, "pad_token_id": 1}, True, False),
    "T5EncoderModel": (
        {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 112, "num_layers": 1, "num_heads": 4}, True, False
    ),
    "Dinov2Model": (_IMAGE, False, True),
    "CLIPModel": (
        {"text_config": {**_TEXT, "max_position_embeddings": 32, "eos_token_id": 1}, "vision_config": _IMAGE,
         "projection_dim": 48}, True, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*list(ENCODERS)[:2], *rest(list(ENCODERS)[2:])])
def test_encoders_and_vision_models_have_neither(name):
    options, reads_text, reads_pixels = ENCODERS[name]
    inputs = (text() if reads_text else {}) | ({"pixel_values": torch.randn(2, 3, 32, 32)} if reads_pixels else {})
    found = selected(build(name, **options), **inputs)
    assert set(found) <= {"fp8", "thin"}
    assert len(found["fp8"]) >= 6
    assert found.get("thin", set()) <= {"matmul", ""}, "the few products of CLIP's two towers"


#: Stand above.
_SEEN = ("gpt2", "llama", "mistral", "qwen3", "gemma2", "phi", "opt", "mamba", "clip", "vit", "bert", "roberta", "mixtral")


@pytest.mark.parametrize("name", [*TORCH, *(n for n in TRANSFORMERS if n not in _SEEN)])
def test_no_router_in_the_dense_models_of_the_zoo(name):
    case = {**TORCH, **TRANSFORMERS}[name]()
    compiled = fp8_compile(case.model, "current", backend="aot_eager")
    with torch.no_grad():
        compiled(**case.inputs)
    reasons = {g.reason.partition(":")[0] for g in inspect(compiled).gemms if g.reason}
    assert not reasons & ({"routing", "head"} if name in TORCH else {"routing"})
