"""The zoo: tiny random models of other people, one builder each. Nothing is downloaded.

One layer, two where layers could be taken for each other. No width is a multiple of 128: every block of blockwise scaling
is ragged. Dropout is off, so that a compiled model and its eager twin compute the same function.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH, TOKENS, VOCABULARY = 2, 16, 96


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, what it is called with, and which tensor of its result is compared."""

    model: Callable[..., Any]
    """An nn.Module, or a function that takes its parameters as arguments."""
    inputs: dict[str, Any]
    select: Callable[[Any], torch.Tensor]
    discontinuous: str | None = None
    """Glob of parameters whose gradients jump: those of a router, where rounding lets a token change its experts."""

    def parameters(self) -> dict[str, torch.Tensor]:
        """Everything that is trained, by name."""
        if isinstance(self.model, nn.Module):
            return dict(self.model.named_parameters())
        return self.inputs["parameters"]


Builder = Callable[[], Case]
TRANSFORMERS: dict[str, Builder] = {}
TORCH: dict[str, Builder] = {}
MIXTURES: dict[str, Builder] = {}
"""Mixtures of experts, whose grouped GEMMs have tests of their own."""


def _add(zoo: dict[str, Builder]) -> Callable[[Builder], Builder]:
    def register(build: Builder) -> Builder:
        zoo[build.__name__] = build
        return build

    return register


def _logits(out: Any) -> torch.Tensor:
    return out.logits


def _hidden(out: Any) -> torch.Tensor:
    return out.last_hidden_state


def _itself(out: torch.Tensor) -> torch.Tensor:
    return out


def _tokens(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(2, VOCABULARY, (BATCH, TOKENS)), **more}


def _causal(model_class: Any, config: Any) -> Case:
    return Case(model_class(config), {**_tokens(), "use_cache": False}, _logits)


_SPECIAL = {"bos_token_id": 1, "eos_token_id": 1}
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@_add(TRANSFORMERS)
def gpt2() -> Case:
    """Conv1D layers: addmm on [in, out] weights; a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=64, **no_dropout, **_SPECIAL)
    return _causal(GPT2LMHeadModel, config)


@_add(TRANSFORMERS)
def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _causal(LlamaForCausalLM, LlamaConfig(**{**_DECODER, "num_hidden_layers": 2}))


@_add(TRANSFORMERS)
def mistral() -> Case:
    """A sliding window shorter than the sequence."""
    from transformers import MistralConfig, MistralForCausalLM

    return _causal(MistralForCausalLM, MistralConfig(**_DECODER, sliding_window=8))


@_add(TRANSFORMERS)
def qwen3() -> Case:
    """Normalized queries and keys, a head dimension that is not hidden_size / heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _causal(Qwen3ForCausalLM, Qwen3Config(**_DECODER, head_dim=32))


@_add(TRANSFORMERS)
def gemma2() -> Case:
    """Soft-capped logits, a tied head, norms on both sides of a block."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return _causal(Gemma2ForCausalLM, Gemma2Config(**_DECODER, head_dim=16, sliding_window=8))


@_add(TRANSFORMERS)
def phi() -> Case:
    """Attention and MLP in parallel on one normalized input, biases everywhere."""
    from transformers import PhiConfig, PhiForCausalLM

    return _causal(PhiForCausalLM, PhiConfig(**_DECODER, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0))


@_add(TRANSFORMERS)
def opt() -> Case:
    """ReLU, whose gradient jumps wherever noise changes a sign: the noisiest gradients of the zoo."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        ffn_dim=112,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=64,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
    )
    return _causal(OPTForCausalLM, config)


@_add(TRANSFORMERS)
def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    return Case(BertForMaskedLM(BertConfig(**{**_ENCODER, "num_hidden_layers": 2})), _tokens(), _logits)


@_add(TRANSFORMERS)
def distilbert() -> Case:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    config = DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=64,
        hidden_dim=112,
        n_layers=1,
        n_heads=4,
        max_position_embeddings=64,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return Case(DistilBertForMaskedLM(config), _tokens(), _logits)


@_add(TRANSFORMERS)
def roberta() -> Case:
    from transformers import RobertaConfig, RobertaForMaskedLM

    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, TOKENS // 2 :] = 0
    config = RobertaConfig(**_ENCODER, pad_token_id=1)
    return Case(RobertaForMaskedLM(config), _tokens(attention_mask=mask), _logits)


@_add(TRANSFORMERS)
def t5() -> Case:
    """Encoder and decoder with cross attention, relative positions, gated GELU."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=112,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    more = {"decoder_input_ids": torch.randint(2, VOCABULARY, (BATCH, 8)), "use_cache": False}
    return Case(T5ForConditionalGeneration(config), _tokens(**more), _logits)


@_add(TRANSFORMERS)
def vit() -> Case:
    """Patches by convolution, 17 tokens: M is never a multiple of 16."""
    from transformers import ViTConfig, ViTForImageClassification

    encoder = {k: v for k, v in _ENCODER.items() if k not in ("vocab_size", "max_position_embeddings")}
    config = ViTConfig(**encoder, image_size=32, patch_size=8, num_labels=10)
    return Case(ViTForImageClassification(config), {"pixel_values": torch.randn(BATCH, 3, 32, 32)}, _logits)


@_add(TRANSFORMERS)
def clip() -> Case:
    """Two towers and a matmul of two activations at the end. What is compared are the embeddings: the four logits are sums
    over nearly orthogonal vectors, so that hardly anything but noise is left of them."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config={**tower, "vocab_size": VOCABULARY, "max_position_embeddings": 32, **_SPECIAL},
        vision_config={**tower, "image_size": 32, "patch_size": 8},
        projection_dim=48,
    )
    inputs = _tokens(pixel_values=torch.randn(BATCH, 3, 32, 32))
    inputs["input_ids"][:, -1] = 1

    def embeddings(out: Any) -> torch.Tensor:
        return torch.cat([out.text_embeds, out.image_embeds]) + 0 * out.logits_per_text.sum()

    return Case(CLIPModel(config), inputs, embeddings)


@_add(TRANSFORMERS)
def whisper() -> Case:
    """Convolutions before the encoder, key projections without bias beside ones with it."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=112,
        decoder_ffn_dim=112,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
        dropout=0.0,
    )
    inputs = {
        "input_features": torch.randn(BATCH, 16, 32),
        "decoder_input_ids": torch.randint(2, VOCABULARY, (BATCH, 8)),
        "use_cache": False,
    }
    return Case(WhisperForConditionalGeneration(config), inputs, _logits)


@_add(TRANSFORMERS)
def mixtral() -> Case:
    """Routing: which tokens an expert sees is known at run time only."""
    from transformers import MixtralConfig, MixtralForCausalLM

    case = _causal(MixtralForCausalLM, MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2))
    return dataclasses.replace(case, discontinuous="*.mlp.gate.weight")


def _mixture(case: Case, factor: float = 50) -> Case:
    """With routers whose choices rounding does not change: an expert's gradients jump when a token comes or goes."""
    assert isinstance(case.model, nn.Module)
    with torch.no_grad():
        for name, parameter in case.model.named_parameters():
            if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                parameter.mul_(factor)
    return case


_MIXTURE = {**_DECODER, "num_experts_per_tok": 2}


@_add(MIXTURES)
def mixtral_experts() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    return _mixture(_causal(MixtralForCausalLM, MixtralConfig(**_MIXTURE, num_local_experts=4)))


@_add(MIXTURES)
def qwen3_moe() -> Case:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**_MIXTURE, num_experts=4, moe_intermediate_size=48, head_dim=16)
    return _mixture(_causal(Qwen3MoeForCausalLM, config))


@_add(MIXTURES)
def olmoe() -> Case:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    return _mixture(_causal(OlmoeForCausalLM, OlmoeConfig(**_MIXTURE, num_experts=4)))


@_add(MIXTURES)
def deepseek_v3() -> Case:
    """Sigmoid routing within groups of experts; experts that every token has."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **{**_MIXTURE, "num_key_value_heads": 4},
        n_routed_experts=8,
        moe_intermediate_size=48,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=0,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    return _mixture(_causal(DeepseekV3ForCausalLM, config), 8)  # more would saturate the sigmoid


@_add(MIXTURES)
def gpt_oss() -> Case:
    """Weights stored [experts, in, out], and a bias per expert."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return _mixture(_causal(GptOssForCausalLM, GptOssConfig(**_MIXTURE, num_local_experts=4, head_dim=16, sliding_window=8)))


@_add(TRANSFORMERS)
def mamba() -> Case:
    """A state-space scan in a Python loop, without the CUDA kernels; Dynamo unrolls it, so sequences are short."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=64, state_size=8, num_hidden_layers=1, time_step_rank=8, use_mambapy=False
    )
    inputs = {"input_ids": torch.randint(2, VOCABULARY, (BATCH * TOKENS // 4, 4)), "use_cache": False}
    return Case(MambaForCausalLM(config), inputs, _logits)


@_add(TORCH)
def nn_transformer() -> Case:
    torch_transformer = nn.Transformer(64, 4, 1, 1, 112, dropout=0.0, batch_first=True)
    inputs = {"src": torch.randn(BATCH, TOKENS, 64), "tgt": torch.randn(BATCH, 8, 64)}
    return Case(torch_transformer, inputs, _itself)


class SelfAttention(nn.Module):
    """nn.MultiheadAttention on one tensor: one packed projection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        nn.init.normal_(self.attention.out_proj.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@_add(TORCH)
def multihead_self_attention() -> Case:
    return Case(SelfAttention(), {"x": torch.randn(BATCH, TOKENS, 64)}, _itself)


class CrossAttention(nn.Module):
    """nn.MultiheadAttention of two tensors of other widths: three projections."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True, kdim=48, vdim=80)
        nn.init.normal_(self.attention.out_proj.bias)

    def forward(self, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.attention(x, key, value)[0]


@_add(TORCH)
def multihead_cross_attention() -> Case:
    inputs = {"x": torch.randn(BATCH, TOKENS, 64), "key": torch.randn(BATCH, 12, 48), "value": torch.randn(BATCH, 12, 80)}
    return Case(CrossAttention(), inputs, _itself)


class Projection(nn.Module):
    """A linear and an activation, in a frame of its own."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x))


class Recurrent(nn.Module):
    """Linears before and behind an LSTM. Dynamo leaves the frame that calls an LSTM to eager, and compiles those below it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Projection(48, 64)
        self.lstm = nn.LSTM(64, 32, batch_first=True)
        self.head = Projection(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.inner(x))[0])


@_add(TORCH)
def lstm() -> Case:
    return Case(Recurrent(), {"x": torch.randn(BATCH, TOKENS, 48)}, _itself)


class Einsum(nn.Module):
    """Attention of einsums: projections by a 3-D weight, scores, a contraction of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.to_heads = nn.Parameter(torch.randn(64, 4, 16) / 8)
        self.from_heads = nn.Parameter(torch.randn(4, 16, 64) / 8)
        self.up = nn.Parameter(torch.randn(64, 112) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = torch.einsum("btd,dhk->bthk", x, self.to_heads)
        scores = torch.einsum("bthk,bshk->bhts", heads, heads).softmax(-1)
        mixed = torch.einsum("bhts,bshk->bthk", scores, heads)
        return torch.einsum("td,df->tf", torch.einsum("bthk,hkd->btd", mixed, self.from_heads).flatten(0, 1), self.up)


@_add(TORCH)
def einsum() -> Case:
    return Case(Einsum(), {"x": torch.randn(BATCH, TOKENS, 64)}, _itself)


class Matmul(nn.Module):
    """`@` in its forms: activation by weight, weight by activation, activation by activation, one weight read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Parameter(torch.randn(64, 48) / 8)
        self.left = nn.Parameter(torch.randn(32, 32) / 6)
        self.middle = nn.Parameter(torch.randn(48, 48) / 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ self.right)
        h = self.left @ h
        h = h @ self.middle + h @ self.middle.T
        return (h @ h.T) @ h


@_add(TORCH)
def matmul() -> Case:
    return Case(Matmul(), {"x": torch.randn(BATCH * TOKENS, 64)}, _itself)


def _functional_mlp(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(F.linear(x, parameters["up"], parameters["up_bias"]))
    return F.linear(hidden, parameters["down"]) + x @ parameters["skip"]


@_add(TORCH)
def functional() -> Case:
    """No module at all."""
    shapes = {"up": (112, 64), "up_bias": (112,), "down": (48, 112), "skip": (64, 48)}
    parameters = {name: (torch.randn(shape) / 8).requires_grad_() for name, shape in shapes.items()}
    return Case(_functional_mlp, {"parameters": parameters, "x": torch.randn(BATCH, TOKENS, 64)}, _itself)
