"""Train LoRA adapters on a frozen FP8 base with peft.

    pip install 'fp8pass[peft]'
    python examples/lora.py --steps 20

The model is a small Llama with random weights, so that nothing is downloaded. Its base is frozen: with `release_frozen=True`
`fp8_compile` quantizes those weights once and keeps one FP8 copy of each in their place, half of the memory. Forward and
backward multiply by it; the adapters stay in high precision.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import fp8pass


def make_model(width: int = 128, layers: int = 2) -> torch.nn.Module:
    """A Llama whose attention and MLP have adapters of rank 8."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config).bfloat16(), lora)


def batches(count: int, tokens: int = 64):
    """Sequences that count upwards from a random number, which a model can learn."""
    for _ in range(count):
        start = torch.randint(0, 256, (4, 1))
        yield (start + torch.arange(tokens)) % 256


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--recipe", default="current", choices=["delayed", "current", "blockwise", "rowwise"])
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = make_model().to(given.device)
    compiled = fp8pass.fp8_compile(model, given.recipe, backend=given.backend, release_frozen=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for tokens in batches(given.steps):
        tokens = tokens.to(given.device)
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {len(losses)}: loss {losses[-1]:.3f}")
    print("\n".join(line for line in fp8pass.inspect(compiled).remarks() if "weights" in line))
    return losses


if __name__ == "__main__":
    main()
