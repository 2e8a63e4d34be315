"""Programs of frameworks, some of which change the model or train a part of it: losses and scales are as they have to be."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments  # noqa: E402

from fp8pass import DelayedScaling, fp8_compile, inspect, state  # noqa: E402
from fp8pass.errors import Fp8FallbackWarning  # noqa: E402
from tests.integrations.support import (  # noqa: E402
    VOCABULARY,
    adapted,
    assert_follows,
    learn,
    llama,
    losses_of,
    token_data,
    trainer_of,
)

pytestmark = [
    pytest.mark.filterwarnings("error::fp8pass.errors.Fp8FallbackWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # peft's own use of transformers
    pytest.mark.filterwarnings("ignore:Cannot determine whether:UserWarning"),
]
RECIPE = DelayedScaling(amax_history_len=4)


def as_in_high_precision(folder, make, data=None, *, change=None, also=lambda trainer: None, **options):
    """Losses are those in high precision, in one stage or in two with a change of the model between them; the model that was
    trained in FP8."""
    losses, model = ([], []), None
    for found, recipe in zip(losses, (None, RECIPE), strict=True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()
        for prepare in [None] if change is None else [None, change]:
            if prepare is not None:
                prepare(model)
            trainer = trainer_of(folder, model, data, recipe, **options)
            trainer.train()
            assert recipe is None or any(g.quantized for g in inspect(model).gemms)
            also(trainer)
            found += losses_of(trainer)
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    return model


def assert_scales_of_its_weights(model):
    """Most GEMMs run in FP8, and each weight has the scale of its own amax."""
    found, view = inspect(model), state(model)
    assert not found.ran_eagerly
    assert sum(g.quantized for g in found.gemms) > len(found.gemms) / 2
    for name in view.tensors:
        module, _, kind = name.rpartition(":")
        if kind == "weight":
            assert view.amax_history(name)[1:].any(), name
            largest = model.get_submodule(module).weight.detach().abs().max()
            assert view.scale(name) == pytest.approx(448 / largest.item(), rel=0.05), name


def test_the_vocabulary_grows_between_two_stages(tmp_path):
    model = as_in_high_precision(tmp_path, llama, change=lambda m: m.resize_token_embeddings(VOCABULARY + 32))
    assert_scales_of_its_weights(model)
    assert model._compiled_call_impl.session.num_steps == 8
    assert model.lm_head.weight.shape[0] == VOCABULARY + 32


@pytest.mark.parametrize("kind", ["IA3", "prefixes"])
def test_peft(tmp_path, kind):
    peft = pytest.importorskip("peft")
    config = {
        "IA3": lambda: peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"],
                                      feedforward_modules=["down_proj"]),
        "prefixes": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    }[kind]  # fmt: skip
    change = lambda model: None  # noqa: E731 (a second stage)
    assert_scales_of_its_weights(as_in_high_precision(tmp_path, lambda: peft.get_peft_model(llama(), config()), change=change))


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
    model = as_in_high_precision(tmp_path, vit, data, change=lambda model: None)
    assert_scales_of_its_weights(model)
    assert {g.reason.partition(":")[0] for g in inspect(model).gemms if not g.quantized} == {"head"}  # the classifier


def t5():
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def test_t5_with_generation_in_evaluation(tmp_path):
    def generate(trainer):
        found = trainer.predict(token_data(4), max_new_tokens=6)
        assert found.predictions.shape[0] == 4

    options = {"predict_with_generate": True, "eval_strategy": "steps", "eval_steps": 2}
    as_in_high_precision(
        tmp_path, t5, token_data(), cls=Seq2SeqTrainer, args=Seq2SeqTrainingArguments, also=generate, **options
    )


def ctc():
    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, conv_dim=(32, 32),
        conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer", do_stable_layer_norm=True, mask_time_prob=0.0,
        layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_ctc(tmp_path):
    generator = torch.Generator().manual_seed(0)
    data = [
        {"input_values": torch.randn(1600, generator=generator), "labels": torch.randint(1, 32, (8,), generator=generator)}
        for _ in range(16)
    ]
    as_in_high_precision(tmp_path, ctc, data)


def test_left_padding_and_rows_grouped_by_length(tmp_path):
    data = []
    for i, row in enumerate(token_data(32)):
        length = 6 + i % 10
        ids = torch.cat([torch.zeros(16 - length, dtype=torch.long), row["input_ids"][:length]])
        mask = (torch.arange(16) >= 16 - length).long()
        data.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    as_in_high_precision(tmp_path, llama, data, train_sampling_strategy="group_by_length")


def test_trials_by_model_init(tmp_path):
    trainer = trainer_of(tmp_path, lambda: llama(), recipe=RECIPE, max_steps=2)
    found = []
    for _ in range(10):  # more than Dynamo's recompile limit
        trainer.train()
        found.append(state(trainer.model).state_dict())
    assert all(value.equal(found[-1][name]) for name, value in found[0].items())


# -- adapters


@pytest.mark.parametrize("recipe", [RECIPE, "current"], ids=["delayed", "current"])
def test_adapters_off_and_on_and_exchanged(recipe):
    models = model, twin = adapted(), adapted()
    for each in models:
        each.add_adapter("other", each.peft_config["default"])
    compiled = fp8_compile(model, recipe, backend="aot_eager", in_place=True)
    learn(compiled, model, lr=0.01)
    twin.load_state_dict(model.state_dict())
    with model.disable_adapter(), twin.disable_adapter():
        assert_follows(compiled, twin)
    for name in ("default", "other"):
        for each in models:
            each.set_adapter(name)
        assert_follows(compiled, twin)
    learn(compiled, model, lr=0.01)


def test_adapters_added_after_compilation():
    model = fp8_compile(llama(), RECIPE, backend="aot_eager", in_place=True)
    learn(model, model, lr=0.01)
    added = adapted(model)
    learn(added, added, lr=0.01)
    twin = adapted()
    twin.load_state_dict(added.state_dict())
    assert_follows(added, twin)
    assert any("lora_A" in g.module or "base_layer" in g.module for g in inspect(model).gemms)


@pytest.mark.filterwarnings("ignore::fp8pass.errors.Fp8FallbackWarning")
def test_base_layers_of_dora_run_eagerly_and_are_said():
    model = adapted(use_dora=True)
    compiled = fp8_compile(model, RECIPE, backend="aot_eager")
    with pytest.warns(Fp8FallbackWarning, match="mlp.up_proj.base_layer, .*mlp.down_proj.base_layer .graph break: "):
        learn(compiled, model, lr=0.01)
    found = inspect(compiled)
    base = {f"base_model.model.model.layers.0.mlp.{name}_proj.base_layer" for name in ("up", "down")}
    assert base == set(found.ran_eagerly) == {g.module for g in found.gemms if str(g.reason).startswith("ran eagerly")}
    assert any(g.quantized for g in found.gemms)


# -- Lightning


def fitted(folder, module, loader, *callbacks, fp8=True, **options):
    """Train a LightningModule of a model of two linears."""
    lightning = pytest.importorskip("lightning")
    from fp8pass.integrations.lightning import Fp8Callback as LightningCallback

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    own = [LightningCallback(RECIPE, backend="aot_eager", print_table=False)] if fp8 else []
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu", callbacks=[*own, *callbacks], default_root_dir=folder, **quiet, **options
    )
    trainer.fit(module, loader)


def linears(hidden):
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 64))


@pytest.fixture
def lightning_module():
    """A class whose instances learn to be the identity."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.pytorch.LightningModule):
        lr = 0.1

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model, self.top, self.losses, self.batch_size = linears(96), nn.Identity(), [], 2

        def training_step(self, x, _):
            loss = (self.top(self.model(x)) - x).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)

    return Module


def rows(batch_size):
    return DataLoader(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), batch_size=batch_size)


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_backbone_that_is_frozen_at_first(lightning_module, tmp_path):
    from lightning.pytorch.callbacks import BackboneFinetuning

    class Tuned(lightning_module):
        def __init__(self):
            super().__init__()
            self.top = linears(64)

        @property
        def backbone(self):
            return self.model

    modules = []
    for fp8 in (False, True):
        torch._dynamo.reset()
        module = Tuned()
        thaw = BackboneFinetuning(unfreeze_backbone_at_epoch=2, lambda_func=lambda epoch: 1.5, backbone_initial_lr=0.05)
        before = module.model[0].weight.detach().clone()
        fitted(tmp_path, module, rows(16), thaw, fp8=fp8, max_epochs=4, enable_checkpointing=False)
        assert not module.model[0].weight.equal(before)
        modules.append(module)
    plain, module = modules
    assert module.losses == pytest.approx(plain.losses, rel=0.03)
    assert ("model.0", "grad_weight") in {(g.module, g.role) for g in inspect(module).gemms if g.quantized}
    view = state(module)
    for name in view.tensors:
        assert view.amax_history(name)[1:].any(), name


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("finder", ["LearningRateFinder", "BatchSizeFinder"])
def test_finders(lightning_module, tmp_path, finder):
    from lightning.pytorch import callbacks

    options = {"LearningRateFinder": {"num_training_steps": 8}, "BatchSizeFinder": {"max_trials": 2, "steps_per_trial": 1}}
    lightning_module.lr, lightning_module.train_dataloader = 1e-3, lambda self: rows(self.batch_size)
    module = lightning_module()
    fitted(tmp_path, module, None, getattr(callbacks, finder)(**options[finder]), max_steps=4)
    weight, view = module.model[0].weight.detach(), state(module)
    assert view.scale("model.0:weight").item() == pytest.approx(448 / weight.abs().max().item(), rel=0.05)
    assert all(g.quantized for g in inspect(module).gemms)
