"""The finds of select="auto" in other people's models: routers and heads, and nothing else.

What is a router and what a head is written down here, per model, by the names that its authors gave. fp8pass goes by structure.
"""

import copy
from typing import Any

import pytest
import torch

from fp8pass import fp8_compile, inspect
from tests.support.cases import rest
from tests.support.numerics import sqnr
from tests.zoo.models import TORCH, TRANSFORMERS, VOCABULARY

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:(torch|transformers)"),
]

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64, **_DECODER}
_GPT = {k: v for k, v in _GPT.items() if k not in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
_TOWER = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 1, "num_attention_heads": 4}


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


def build(name: str, **options: Any) -> Any:
    """A causal model by the stem of its classes' names."""
    config = getattr(transformers, f"{name}Config")(**options)
    model_class = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel")
    return model_class(config)


EXPERTS = {"num_experts_per_tok": 2}
ROUTERS = {
    "Mixtral": ({**_DECODER, **EXPERTS, "num_local_experts": 4}, {"model.layers.0.mlp.gate"}),
    "Qwen3Moe": (
        {**_DECODER, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16, "decoder_sparse_step": 1},
        {"model.layers.0.mlp.gate"},
    ),
    "DeepseekV3": (
        {
            **_DECODER,
            **EXPERTS,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 48,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
        },
        {"model.layers.0.mlp.gate"},
    ),
    "GptOss": (
        {**_DECODER, **EXPERTS, "num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 16},
        {"model.layers.0.mlp.router"},
    ),
    "JetMoe": (
        {**_DECODER, **EXPERTS, "kv_channels": 16, "num_local_experts": 4},
        {"model.layers.0.mlp.router.layer", "model.layers.0.self_attention.experts.router.layer"},
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name):
    options, routers = ROUTERS[name]
    found = selected(build(name, **options).to(torch.bfloat16), **text(use_cache=False))
    assert found["routing"] == routers
    assert found["head"] == {"lm_head"}
    assert found["fp8"]
    assert set(found) == {"fp8", "routing", "head"}


def test_routers_of_switch():
    """Top-1 by argmax. The router returns a mask, and the experts run behind a graph break."""
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    config = transformers.SwitchTransformersConfig(d_model=64, d_ff=112, num_experts=4)
    found = selected(SwitchTransformersSparseMLP(config), hidden_states=torch.randn(2, 16, 64))
    (router,) = found["routing"]
    assert router.endswith("router.classifier")
    assert found["fp8"] <= {f"experts.expert_{i}.{linear}" for i in range(4) for linear in ("wi", "wo")}
    assert found["fp8"]


# Name -> options, the head, and whether it is tied.
HEADS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "GPT2": ({**_GPT, "tie_word_embeddings": True}, "lm_head", True),
    "Llama": ({**_DECODER, "tie_word_embeddings": False}, "lm_head", False),
    "Mistral": ({**_DECODER, "tie_word_embeddings": False}, "lm_head", False),
    "Qwen3": ({**_DECODER, "head_dim": 16, "tie_word_embeddings": True}, "lm_head", True),
    "Gemma2": ({**_DECODER, "head_dim": 16, "tie_word_embeddings": True}, "lm_head", True),
    "Phi": ({**_DECODER, "tie_word_embeddings": False}, "lm_head", False),
    "OPT": ({**_DECODER, "ffn_dim": 112, "word_embed_proj_dim": 64, "tie_word_embeddings": True}, "lm_head", True),
    "GPTNeoX": ({**_DECODER, "tie_word_embeddings": False}, "lm_head", False),
    "Cohere": ({**_DECODER, "tie_word_embeddings": True}, "lm_head", True),
    "Mamba": ({"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 1, "time_step_rank": 32}, "lm_head", True),
}


FAST = ("GPT2", "Llama", "Phi", "Mamba")
"""Tied and not, with the loss in the graph, with biases, with a scan."""


@pytest.mark.parametrize("name", [*FAST, *rest(name for name in HEADS if name not in FAST)])
def test_heads_of_causal_models(name):
    """One with the loss in the graph; those of one with a scan, whose steps Dynamo unrolls, are few."""
    options, head, is_tied = HEADS[name]
    model = build(name, **options)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == is_tied
    inputs = text(4 if name == "Mamba" else 16, use_cache=False)
    if name == "Llama":
        inputs["labels"] = inputs["input_ids"]
    found = selected(model, **inputs)
    assert {k: v for k, v in found.items() if k not in ("fp8", "thin")} == {"head": {head}}
    assert len(found["fp8"]) >= 3
    assert len(found["fp8"]) == 7 or name != "Llama"
    assert found.get("thin", set()) <= ({"backbone.layers.0.mixer"} if name == "Mamba" else set())


def encoder(name: str) -> tuple[Any, dict[str, Any]]:
    t = transformers
    pixels = {"pixel_values": torch.randn(2, 3, 32, 32)}
    images = {"image_size": 32, "patch_size": 8}
    tokens = {**_TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
    return {
        "bert": lambda: (t.BertModel(t.BertConfig(**tokens)), text()),
        "roberta": lambda: (t.RobertaModel(t.RobertaConfig(**tokens, pad_token_id=1)), text()),
        "t5 encoder": lambda: (
            t.T5EncoderModel(t.T5Config(vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=112, num_layers=1, num_heads=4)),
            text(),
        ),
        "vit": lambda: (t.ViTForImageClassification(t.ViTConfig(**_TOWER, **images, num_labels=40)), pixels),
        "dinov2": lambda: (t.Dinov2Model(t.Dinov2Config(**_TOWER, **images)), pixels),
        "clip": lambda: (
            t.CLIPModel(
                t.CLIPConfig(
                    text_config={**_TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 1},
                    vision_config={**_TOWER, **images},
                    projection_dim=48,
                )
            ),
            text(**pixels),
        ),
    }[name]()


@pytest.mark.parametrize("name", ["bert", "vit", *rest(["roberta", "t5 encoder", "dinov2", "clip"])])
def test_encoders_and_vision_models_have_neither(name):
    model, inputs = encoder(name)
    found = selected(model, **inputs)
    assert set(found) <= {"fp8", "thin"}
    assert len(found["fp8"]) >= 6
    assert found.get("thin", set()) <= {"matmul", ""}, "the few products of CLIP's two towers"


OTHERS = ("gpt2", "llama", "mistral", "qwen3", "gemma2", "phi", "opt", "mamba", "clip", "vit", "bert", "roberta", "mixtral")


@pytest.mark.parametrize("name", [*TORCH, *(n for n in TRANSFORMERS if n not in OTHERS)])
def test_no_router_in_the_dense_models_of_the_zoo(name):
    """The others stand above."""
    case = {**TORCH, **TRANSFORMERS}[name]()
    compiled = fp8_compile(case.model, "current", backend="aot_eager")
    with torch.no_grad():
        compiled(**case.inputs)
    reasons = {(g.module, g.reason.partition(":")[0]) for g in inspect(compiled).gemms if g.reason}
    assert not [module for module, kind in reasons if kind == "routing"]
    if name in TORCH:
        assert not [module for module, kind in reasons if kind == "head"]


@pytest.mark.slow
def test_the_first_steps_of_cohere_are_current_scalings():
    """Two layers whose attention and MLP read one tensor, a tied head: what a scale of 1 trains badly."""
    config = {**_DECODER, "num_hidden_layers": 2, "tie_word_embeddings": True}
    models = {"float32": build("Cohere", **config).train()}
    models |= {recipe: copy.deepcopy(models["float32"]) for recipe in ("delayed", "current")}
    calls = {n: m if n == "float32" else fp8_compile(m, n, backend="aot_eager") for n, m in models.items()}
    inputs = text(use_cache=False)
    gradients, losses = {}, {}
    for name, call in calls.items():
        optimizer = torch.optim.AdamW(models[name].parameters(), 1e-3)
        for step in range(10):
            optimizer.zero_grad()
            loss = call(**inputs, labels=inputs["input_ids"]).loss
            loss.backward()
            if step == 0:
                gradients[name] = {n: p.grad.clone() for n, p in models[name].named_parameters()}
            optimizer.step()
        losses[name] = loss.item()
    for name, reference in gradients["float32"].items():
        found, expected = (sqnr(reference, gradients[recipe][name]) for recipe in ("delayed", "current"))
        assert abs(found - expected) < 1, name
    assert losses["delayed"] == pytest.approx(losses["current"], rel=5e-3)
