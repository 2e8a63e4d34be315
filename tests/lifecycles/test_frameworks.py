"""Programs of the net that frameworks run: a second stage of training, the best model at the end, adapters merged."""

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

from fp8pass import DelayedScaling, fp8_compile, state  # noqa: E402
from fp8pass.integrations.transformers import FILE, Fp8Callback  # noqa: E402
from tests.integrations.support import llama, token_data  # noqa: E402
from tests.support.numerics import sqnr  # noqa: E402

RECIPE = DelayedScaling(amax_history_len=2)
WEIGHT = "model.layers.0.mlp.up_proj:weight"


def train(folder, model, *callbacks, **options):
    options = {"max_steps": 10, "per_device_train_batch_size": 2, "use_cpu": True, "save_strategy": "no", **options}
    args = TrainingArguments(output_dir=str(folder), report_to="none", disable_tqdm=True, **options)
    data = token_data()
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks))
    trainer.train()
    return trainer


def fp8_callback():
    return Fp8Callback(RECIPE, backend="aot_eager", print_table=False)


def part_of_the_range(scale: float, largest: float) -> float:
    """Of E4M3: 1 where the scale is that of the tensor."""
    return scale * largest / 448


def test_a_second_stage_of_the_trainer_without_the_callback(tmp_path):
    model = llama()
    train(tmp_path, model, fp8_callback())
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(50)
    train(tmp_path, model)
    found = part_of_the_range(
        float(state(model).scale(WEIGHT)), float(model.model.layers[0].mlp.up_proj.weight.detach().abs().max())
    )
    assert 0.9 < found < 1.1


@pytest.mark.filterwarnings("ignore")
def test_a_second_stage_of_lightning_without_the_callback(tmp_path):
    lightning = pytest.importorskip("lightning")
    from torch import nn
    from torch.utils.data import DataLoader

    from fp8pass.integrations.lightning import Fp8Callback as LightningCallback

    class Module(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))

        def training_step(self, x, _):
            return (self.model(x) - x).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    def fit(module, *callbacks):
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.pytorch.Trainer(
            accelerator="cpu", max_steps=5, callbacks=list(callbacks), default_root_dir=tmp_path, **quiet
        )
        trainer.fit(module, DataLoader(torch.randn(64, 64), batch_size=16))

    module = Module()
    fit(module, LightningCallback(RECIPE, backend="aot_eager", print_table=False))
    with torch.no_grad():
        module.model[0].weight.mul_(50)
    fit(module)
    scale = float(state(module).scale("model.0:weight"))
    assert 0.9 < part_of_the_range(scale, float(module.model[0].weight.detach().abs().max())) < 1.1


def test_the_best_model_at_the_end_has_its_state(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = train(tmp_path, llama(), fp8_callback(), max_steps=12, **options, **best)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    saved, found = load_file(f"{trainer.state.best_model_checkpoint}/{FILE}"), state(trainer.model).state_dict()
    assert all(found[name].equal(value) for name, value in saved.items() if name in found)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own use of transformers
@pytest.mark.parametrize("recipe", [RECIPE, "current"], ids=["delayed", "current"])
def test_adapters_of_peft_that_are_merged_and_unmerged(recipe):
    peft = pytest.importorskip("peft")
    alpha = 64 if recipe == "current" else 4  # under delayed scaling a merged weight has the scale of the last step
    config = peft.LoraConfig(r=32, lora_alpha=alpha, target_modules=["up_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), config)
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    tokens = torch.stack([row["input_ids"] for row in token_data(8)])
    for _ in range(3):
        optimizer.zero_grad()
        compiled(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        with torch.no_grad():
            for change in (lambda: None, model.merge_adapter, model.unmerge_adapter):
                change()
                assert sqnr(model(input_ids=tokens).logits, compiled(input_ids=tokens).logits) > 20, change


def adapted():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=32, lora_alpha=4, target_modules=["up_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(llama(1), config)


def learn(compiled, model, tokens, steps=2):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        compiled(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


@torch.no_grad()
def assert_follows(compiled, eager, tokens):
    assert sqnr(eager(input_ids=tokens).logits, compiled(input_ids=tokens).logits) > 20


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("recipe", "in_place"), [(RECIPE, False), ("current", True)], ids=["delayed", "current in place"])
def test_adapters_that_are_merged_and_unloaded_in_mid_run(recipe, in_place):
    """The compiled peft model calls what is left of it, whose base weights then train."""
    model, tokens = adapted(), torch.stack([row["input_ids"] for row in token_data(8)])
    compiled = fp8_compile(model, recipe, backend="aot_eager", in_place=in_place)
    learn(compiled, model, tokens)
    merged = model.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert_follows(compiled, merged._call_impl, tokens)
    learn(compiled, merged.requires_grad_(True), tokens)
    assert_follows(compiled, merged._call_impl, tokens)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_that_is_loaded_over_a_larger_one(tmp_path):
    model, tokens = adapted(), torch.stack([row["input_ids"] for row in token_data(8)])
    compiled = fp8_compile(model, RECIPE, backend="aot_eager", select="all")
    learn(compiled, model, tokens)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.mul_(30)
    learn(compiled, model, tokens)
    model.load_adapter(tmp_path, "default")
    state(compiled).forget_weights()
    assert_follows(compiled, model, tokens)
    learn(compiled, model, tokens)
    names = [name for name in state(compiled).tensors if "lora_A" in name and name.endswith(":weight")]
    assert names
    for name in names:
        largest = model.get_submodule(name.removesuffix(":weight")).weight.detach().abs().max()
        assert 0.9 < part_of_the_range(float(state(compiled).scale(name)), float(largest)) < 1.1
