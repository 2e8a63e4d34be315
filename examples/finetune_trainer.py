"""Train a Llama with transformers.Trainer in FP8, stop, and resume from a checkpoint.

    python examples/finetune_trainer.py --recipe delayed --steps 20 --out out/trainer

The Trainer gets one callback and is used as always. The model is tiny and random, and nothing is downloaded. The second half of
the training is run again from the checkpoint of the first half, FP8 state included. With `--lora`, peft's adapters are trained
instead of the model. In several processes: `torchrun --nproc-per-node 2 examples/finetune_trainer.py`.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fp8pass.integrations.transformers import Fp8Callback

VOCABULARY, LENGTH = 256, 64


def make_model(args: argparse.Namespace):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=32, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    return model


def make_data():
    """Sequences that count upwards from a random token: easy to learn."""
    starts = torch.randint(VOCABULARY, (512, 1), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(LENGTH)) % VOCABULARY]


def train(args: argparse.Namespace, resume_from: Path | None = None) -> Trainer:
    options = TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        save_steps=args.steps // 2,
        logging_steps=args.steps // 2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    callback = Fp8Callback(args.recipe, backend=args.backend, print_table=resume_from is None)
    trainer = Trainer(make_model(args), options, train_dataset=make_data(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    return trainer


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="delayed", help="a recipe of fp8_compile, by name")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps; half of them are resumed")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lora", action="store_true", help="train adapters of peft")
    parser.add_argument("--backend", default="inductor", help="'aot_eager' compiles without generating code")
    parser.add_argument("--out", type=Path, default=Path("out/trainer"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Losses at the middle and at the end, and at the end of the resumed training."""
    args = parse(argv)
    whole = train(args)
    resumed = train(args, args.out / f"checkpoint-{args.steps // 2}")
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    result = {"middle": losses[0], "end": losses[-1], "resumed": resumed.state.log_history[-2]["loss"]}
    if whole.is_world_process_zero():
        print(f"loss {result['middle']:.3f} after {args.steps // 2} steps, {result['end']:.3f} after {args.steps}")
        print(f"resumed from step {args.steps // 2}: {result['resumed']:.3f} after {args.steps}")
    return result


if __name__ == "__main__":
    main()
