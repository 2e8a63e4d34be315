"""A tiny Llama and its data, for every framework."""

import torch

VOCABULARY, LENGTH = 64, 16


def llama(layers: int = 1):
    """A LlamaForCausalLM with the same weights at every call, all of whose linears but the head are wide enough for FP8."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def token_data(count: int = 64):
    """Sequences of tokens as the Trainer's data set: the label of each is itself."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def assert_same_tensors(left, right):
    """Two state_dicts have the same keys and are bit for bit equal."""
    assert sorted(left) == sorted(right)
    different = [name for name, value in left.items() if not value.equal(right[name])]
    assert different == []
