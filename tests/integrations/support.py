"""A tiny Llama and its data, for every framework."""

import pytest
import torch

from tests.tolerances import sqnr

VOCABULARY, LENGTH = 64, 16


def llama(layers: int = 1):
    """A LlamaForCausalLM with the same weights at every call, all of whose linears but the head are wide enough for FP8."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "eos_token_id": None}
    config = LlamaConfig(num_hidden_layers=layers, **sizes, **heads)
    return LlamaForCausalLM(config)


def token_data(count: int = 64):
    """Sequences of tokens as the Trainer's data set: the label of each is itself."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


TOKENS = torch.stack([row["input_ids"] for row in token_data(8)])


def adapted(model=None, **options):
    """A peft model with adapters whose second matrices are not zeros, around a Llama of one layer if no model is given."""
    peft = pytest.importorskip("peft")
    given = {"r": 32, "lora_alpha": 4, "target_modules": ["up_proj", "down_proj"], "init_lora_weights": False, **options}
    return peft.get_peft_model(llama() if model is None else model, peft.LoraConfig(**given))


def learn(compiled, model, steps=2, lr=0.1):
    """Steps of SGD on `TOKENS`."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        compiled(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()


@torch.no_grad()
def assert_follows(compiled, eager):
    """A compiled model computes what another does, but for FP8."""
    assert sqnr(eager(input_ids=TOKENS).logits, compiled(input_ids=TOKENS).logits) > 20


def trainer_of(folder, model, recipe=None, callback=None, **options):
    """A Trainer of a model, or of a function that makes it: four rows a step, on the CPU, in FP8 where a recipe or a callback
    is given."""
    import transformers

    from fp8pass.integrations.transformers import Fp8Callback

    usual = {"save_strategy": "no", "logging_steps": 1, "per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 1e-3}
    args = transformers.TrainingArguments(
        output_dir=str(folder), report_to="none", disable_tqdm=True, use_cpu=True, **{**usual, **options}
    )
    if recipe is not None:
        callback = Fp8Callback(recipe, backend="aot_eager", print_table=False)
    made = {"model" if isinstance(model, torch.nn.Module) else "model_init": model}
    callbacks, data = [] if callback is None else [callback], token_data()
    return transformers.Trainer(args=args, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks, **made)


def assert_same_tensors(left, right):
    """Two state_dicts have the same keys and are bit for bit equal."""
    assert sorted(left) == sorted(right)
    different = [name for name, value in left.items() if not value.equal(right[name])]
    assert different == []


def num_updates(model):
    """How often the scales of a model that a callback has compiled were updated."""
    (store,) = model._compiled_call_impl.session.stores
    return store.version
