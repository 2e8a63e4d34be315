"""Programs of frameworks that change the model, or train a part of it: losses and scales are as they have to be."""

import copy
import uuid

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from fp8pass import DelayedScaling, inspect, state  # noqa: E402
from fp8pass.integrations.transformers import Fp8Callback  # noqa: E402
from tests.integrations.support import VOCABULARY, llama, losses_of, trainer_of  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("error::fp8pass.errors.Fp8FallbackWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # peft's own use of transformers
    pytest.mark.filterwarnings("ignore:Cannot determine whether:UserWarning"),
]
RECIPE = DelayedScaling(amax_history_len=4)


def assert_as_in_high_precision(folder, make, change=lambda model: None, data=None):
    """Two stages with a change between them; returns the model that was trained in FP8."""
    losses, model = ([], []), None
    for found, recipe in zip(losses, (None, RECIPE), strict=True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()
        for prepare in (lambda model: None, change):
            prepare(model)
            trainer = trainer_of(folder, model, data, recipe)
            trainer.train()
            found += losses_of(trainer)
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    session = model._compiled_call_impl.session
    assert session.num_steps == 8
    found = inspect(model)
    assert not found.ran_eagerly
    assert sum(g.quantized for g in found.gemms) > len(found.gemms) / 2
    view = state(model)
    for name in view.tensors:
        module, _, kind = name.rpartition(":")
        if kind == "weight":
            assert view.amax_history(name)[1:].any(), name
            largest = model.get_submodule(module).weight.detach().abs().max()
            assert view.scale(name) == pytest.approx(448 / largest.item(), rel=0.05), name
    return model


def test_the_vocabulary_grows_between_two_stages(tmp_path):
    model = assert_as_in_high_precision(tmp_path, llama, lambda m: m.resize_token_embeddings(VOCABULARY + 32))
    assert model.lm_head.weight.shape[0] == VOCABULARY + 32


@pytest.mark.parametrize("kind", ["IA3", "prompts", "prefixes"])
def test_peft(tmp_path, kind):
    peft = pytest.importorskip("peft")
    config = {
        "IA3": lambda: peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"],
                                      feedforward_modules=["down_proj"]),
        "prompts": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "prefixes": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    }[kind]  # fmt: skip
    assert_as_in_high_precision(tmp_path, lambda: peft.get_peft_model(llama(), config()))


def vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_labels=8,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def test_vit(tmp_path):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 32, 32, generator=generator)
    labels = torch.randint(8, (64,), generator=generator)
    data = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    model = assert_as_in_high_precision(tmp_path, vit, data=data)
    assert {g.reason.partition(":")[0] for g in inspect(model).gemms if not g.quantized} == {"head"}  # the classifier


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_backbone_that_is_frozen_at_first(tmp_path):
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import BackboneFinetuning
    from torch.utils.data import DataLoader

    from fp8pass.integrations.lightning import Fp8Callback as LightningCallback

    class Tuned(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.backbone = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
            self.top = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
            self.losses = []

        def training_step(self, x, _):
            loss = (self.top(self.backbone(x)) - x).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    torch.manual_seed(0)
    data, modules = torch.randn(64, 64), {}
    for fp8 in (False, True):
        torch._dynamo.reset()
        modules[fp8] = module = Tuned()
        own = [LightningCallback(RECIPE, backend="aot_eager", print_table=False)] if fp8 else []
        thaw = BackboneFinetuning(unfreeze_backbone_at_epoch=2, lambda_func=lambda epoch: 1.5, backbone_initial_lr=0.05)
        trainer = lightning.pytorch.Trainer(
            accelerator="cpu", max_epochs=4, callbacks=[thaw, *own], default_root_dir=tmp_path, **quiet
        )
        before = copy.deepcopy(module.backbone.state_dict())
        trainer.fit(module, DataLoader(data, batch_size=16))
        assert not module.backbone[0].weight.equal(before["0.weight"])
    assert modules[True].losses == pytest.approx(modules[False].losses, rel=0.03)
    trained = {(g.module, g.role) for g in inspect(modules[True]).gemms if g.quantized}
    assert ("backbone.0", "grad_weight") in trained
    view = state(modules[True])
    for name in view.tensors:
        assert view.amax_history(name)[1:].any(), name


def test_trl(tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    for name in ("generate_fingerprint", "update_fingerprint"):  # which pickle what pyarrow cannot pickle
        monkeypatch.setattr(datasets.fingerprint, name, lambda *_: uuid.uuid4().hex)
    monkeypatch.setattr(datasets.fingerprint.Hasher, "hash", classmethod(lambda *_: uuid.uuid4().hex))
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(VOCABULARY - 3)}}
    tokens = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, **special)
    llama(2).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    text = [" ".join(f"w{(7 * i + j * j) % (VOCABULARY - 3)}" for j in range(6)) for i in range(32)]
    rows = datasets.Dataset.from_list([{"prompt": t, "chosen": t[::-1], "rejected": t} for t in text])
    losses = {}
    for fp8 in (False, True):
        torch._dynamo.reset()
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        args = trl.DPOConfig(
            str(tmp_path), report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no", logging_steps=1, max_steps=4,
            per_device_train_batch_size=4, bf16=False, gradient_checkpointing=False,
        )  # fmt: skip
        own = [Fp8Callback(RECIPE, backend="aot_eager", print_table=False)] if fp8 else []
        trainer = trl.DPOTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer, callbacks=own)
        trainer.train()
        losses[fp8] = losses_of(trainer)
        if fp8:
            assert trainer.model._compiled_call_impl.session.num_steps == 4
            assert all(g.quantized for g in inspect(trainer.model).gemms)
    assert losses[True] == pytest.approx(losses[False], rel=0.03)
