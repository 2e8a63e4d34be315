"""The zoo: tiny random models of other people, a row each. Nothing is downloaded.

One layer, two where layers could be taken for each other. No width is a multiple of 128: every block of blockwise scaling
is ragged. Dropout is off, so that a compiled model and its eager twin compute the same function.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

BATCH, TOKENS, VOCABULARY = 2, 16, 96


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, what it is called with, and which tensor of its result is compared."""

    model: nn.Module
    inputs: dict[str, Any]
    select: Callable[[Any], torch.Tensor]
    discontinuous: str | None = None
    """Glob of parameters whose gradients jump: those of a router, where rounding lets a token change its experts."""


Builder = Callable[[], Case]


def _tokens(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(2, VOCABULARY, (BATCH, TOKENS)), **more}


def _causal(tokens: int = TOKENS) -> dict[str, Any]:
    return {"input_ids": torch.randint(2, VOCABULARY, (BATCH * TOKENS // tokens, tokens)), "use_cache": False}


def _decoded(**inputs: torch.Tensor) -> dict[str, Any]:
    """Of a model with an encoder."""
    return {**inputs, "decoder_input_ids": torch.randint(2, VOCABULARY, (BATCH, 8)), "use_cache": False}


def _masked() -> dict[str, torch.Tensor]:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, TOKENS // 2 :] = 0
    return _tokens(attention_mask=mask)


def _logits(out: Any) -> torch.Tensor:
    return out.logits


def _itself(out: torch.Tensor) -> torch.Tensor:
    return out


def build(model: str, **config: Any) -> nn.Module:
    """A model of transformers by the name of its class."""
    import transformers

    stem = re.split("For|LMHead|Model|Encoder", model)[0]
    return getattr(transformers, model)(getattr(transformers, f"{stem}Config")(**config))


def _of(
    model: str,
    inputs: Callable[[], dict[str, Any]] = _causal,
    select: Callable[[Any], torch.Tensor] = _logits,
    discontinuous: str | None = None,
    **config: Any,
) -> Builder:
    return lambda: Case(build(model, **config), inputs(), select, discontinuous)


_SPECIAL = {"bos_token_id": 1, "eos_token_id": 1}
TOWER = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 1, "num_attention_heads": 4}
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
DECODER = {**TOWER, **_TEXT, "num_key_value_heads": 2, "pad_token_id": 0}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = {**TOWER, **_TEXT, **_NO_DROPOUT}
_IMAGE = {"image_size": 32, "patch_size": 8}
_TRANSFORMER = {"dropout": 0.0, "attention_dropout": 0.0, "vocab_size": VOCABULARY}

TRANSFORMERS: dict[str, Builder] = {
    # Conv1D layers: addmm on [in, out] weights; a tied head.
    "gpt2": _of("GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0, **_SPECIAL),
    "llama": _of("LlamaForCausalLM", **{**DECODER, "num_hidden_layers": 2}),
    # Normalized queries and keys, a head dimension that is not hidden_size / heads.
    "qwen3": _of("Qwen3ForCausalLM", **DECODER, head_dim=32),
    # Soft-capped logits, a tied head, norms on both sides of a block, a sliding window shorter than the sequence.
    "gemma2": _of("Gemma2ForCausalLM", **DECODER, head_dim=16, sliding_window=8),
    # Attention and MLP in parallel on one normalized input, biases everywhere.
    "phi": _of("PhiForCausalLM", **DECODER, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0),
    # ReLU, whose gradient jumps wherever noise changes a sign: the noisiest gradients of the zoo.
    "opt": _of("OPTForCausalLM", hidden_size=64, ffn_dim=112, num_hidden_layers=1, num_attention_heads=4,
               max_position_embeddings=64, word_embed_proj_dim=64, layerdrop=0.0, **_TRANSFORMER),
    "bert": _of("BertForMaskedLM", _masked, **{**_ENCODER, "num_hidden_layers": 2}),
    # Encoder and decoder with cross attention, relative positions, gated GELU.
    "t5": _of("T5ForConditionalGeneration", lambda: _decoded(**_tokens()), vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=112,
              num_layers=1, num_decoder_layers=1, num_heads=4, dropout_rate=0.0, feed_forward_proj="gated-gelu",
              decoder_start_token_id=0),
    # Patches by convolution, 17 tokens: M is never a multiple of 16.
    "vit": _of("ViTForImageClassification", lambda: {"pixel_values": torch.randn(BATCH, 3, 32, 32)}, **TOWER, **_NO_DROPOUT,
               **_IMAGE, num_labels=10),
    # Convolutions before the encoder, key projections without bias beside ones with it.
    "whisper": _of("WhisperForConditionalGeneration", lambda: _decoded(input_features=torch.randn(BATCH, 16, 32)),
                   num_mel_bins=16, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                   decoder_attention_heads=4, encoder_ffn_dim=112, decoder_ffn_dim=112, max_source_positions=16,
                   max_target_positions=32, pad_token_id=0, decoder_start_token_id=1, **_SPECIAL, **_TRANSFORMER),
    # Routing: which tokens an expert sees is known at run time only.
    "mixtral": _of("MixtralForCausalLM", discontinuous="*.mlp.gate.weight", **DECODER, num_local_experts=4,
                   num_experts_per_tok=2),
    # A state-space scan in a Python loop, without the CUDA kernels; Dynamo unrolls it, so sequences are short.
    "mamba": _of("MambaForCausalLM", lambda: _causal(4), vocab_size=VOCABULARY, hidden_size=64, state_size=8,
                 num_hidden_layers=1, time_step_rank=8, use_mambapy=False),
}  # fmt: skip


def _mixture(model: str, factor: float = 50, **config: Any) -> Builder:
    """With routers whose choices rounding does not change: an expert's gradients jump when a token comes or goes."""

    def made() -> Case:
        case = _of(model, **{**DECODER, "num_experts_per_tok": 2, **config})()
        with torch.no_grad():
            for name, parameter in case.model.named_parameters():
                if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                    parameter.mul_(factor)
        return case

    return made


#: Mixtures of experts, whose grouped GEMMs have tests of their own.
MIXTURES: dict[str, Builder] = {
    "mixtral_experts": _mixture("MixtralForCausalLM", num_local_experts=4),
    "qwen3_moe": _mixture("Qwen3MoeForCausalLM", num_experts=4, moe_intermediate_size=48, head_dim=16),
    "olmoe": _mixture("OlmoeForCausalLM", num_experts=4),
    # Sigmoid routing within groups of experts, which a larger factor would saturate; experts that every token has.
    "deepseek_v3": _mixture("DeepseekV3ForCausalLM", 8, n_routed_experts=8, moe_intermediate_size=48, n_shared_experts=1,
                            num_key_value_heads=4, first_k_dense_replace=0, kv_lora_rank=32, qk_rope_head_dim=16,
                            qk_nope_head_dim=16, v_head_dim=16, n_group=2, topk_group=1, q_lora_rank=48),
    # Weights stored [experts, in, out], and a bias per expert.
    "gpt_oss": _mixture("GptOssForCausalLM", num_local_experts=4, head_dim=16, sliding_window=8),
}  # fmt: skip


# -- torch's own modules


class CrossAttention(nn.Module):
    """nn.MultiheadAttention of two tensors of other widths: three projections."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True, kdim=48, vdim=80)
        nn.init.normal_(self.attention.out_proj.bias)

    def forward(self, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.attention(x, key, value)[0]


def _by_hand(make: Callable[[], nn.Module], **shapes: tuple[int, ...]) -> Builder:
    """With normal inputs of these shapes."""
    return lambda: Case(make(), {name: torch.randn(shape) for name, shape in shapes.items()}, _itself)


TORCH: dict[str, Builder] = {
    "nn_transformer": _by_hand(
        lambda: nn.Transformer(64, 4, 1, 1, 112, dropout=0.0, batch_first=True), src=(BATCH, TOKENS, 64), tgt=(BATCH, 8, 64)
    ),
    "multihead_cross_attention": _by_hand(CrossAttention, x=(BATCH, TOKENS, 64), key=(BATCH, 12, 48), value=(BATCH, 12, 80)),
}
