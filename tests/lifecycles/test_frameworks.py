"""Programs of the net that frameworks run: the best model at the end, adapters merged."""

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from fp8pass import DelayedScaling, fp8_compile, state  # noqa: E402
from fp8pass.errors import Fp8Warning  # noqa: E402
from fp8pass.integrations.transformers import FILE  # noqa: E402
from tests.integrations.support import TOKENS, adapted, assert_follows, learn, llama, trainer_of  # noqa: E402

RECIPE = DelayedScaling(amax_history_len=2)


def test_the_best_model_at_the_end_has_its_state(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    options |= {"per_device_train_batch_size": 2, "learning_rate": 5e-5}
    trainer = trainer_of(tmp_path, llama(), recipe=RECIPE, max_steps=12, **options, **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    saved, found = load_file(f"{trainer.state.best_model_checkpoint}/{FILE}"), state(trainer.model).state_dict()
    assert all(found[name].equal(value) for name, value in saved.items() if name in found)


# -- adapters of peft


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own use of transformers
@pytest.mark.parametrize("recipe", [RECIPE, "current"], ids=["delayed", "current"])
def test_adapters_of_peft_that_are_merged_and_unmerged(recipe):
    model = adapted(lora_alpha=64 if recipe == "current" else 4)  # a merged weight has the scale of the last step
    compiled = fp8_compile(model, recipe, backend="aot_eager")
    for _ in range(3):
        learn(compiled, model, 1)
        for change in (lambda: None, model.merge_adapter, model.unmerge_adapter):
            change()
            assert_follows(compiled, model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("recipe", "in_place"), [(RECIPE, False), ("current", True)], ids=["delayed", "current in place"])
def test_adapters_that_are_merged_and_unloaded_in_mid_run(recipe, in_place):
    """The compiled peft model calls what is left of it, whose base weights then train."""
    model = adapted()
    compiled = fp8_compile(model, recipe, backend="aot_eager", in_place=in_place)
    learn(compiled, model)
    merged = model.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert_follows(compiled, merged._call_impl)
    learn(compiled, merged.requires_grad_(True))
    assert_follows(compiled, merged._call_impl)


def merge(model, folder):
    model.merge_adapter()


def load_adapter(model, folder):
    model.load_adapter(folder, "default")


def average(model, folder):
    for parameter in model.parameters():
        parameter.data.lerp_(3 * parameter.data, 0.9)


def call_twice(compiled, train):
    with torch.set_grad_enabled(train):
        for _ in range(2):
            compiled(input_ids=TOKENS, labels=TOKENS)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("exchange", [merge, load_adapter, average])
def test_exchanged_weights_without_their_state_are_said(exchange, tmp_path):
    model = adapted(lora_alpha=500 if exchange is merge else 4)
    compiled = fp8_compile(model, DelayedScaling(amax_history_len=4), backend="aot_eager", select="all")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(0.1 if "lora_A" in name and exchange is load_adapter else 1)
    learn(compiled, model, 3)
    exchange(model, tmp_path)
    with pytest.warns(Fp8Warning, match="(base_layer|lora_A.default):weight.* has more than doubled at once"):
        call_twice(compiled, train=exchange is load_adapter)  # what is merged does not train
    state(compiled).forget_weights()
    if exchange is not average:  # by which the activations grow as well
        assert_follows(compiled, model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.* has more than doubled")
def test_an_adapter_that_is_loaded_over_a_larger_one(tmp_path):
    model = adapted()
    compiled = fp8_compile(model, RECIPE, backend="aot_eager", select="all")
    learn(compiled, model)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(30 if "lora_A" in name else 1)
    learn(compiled, model)
    model.load_adapter(tmp_path, "default")
    state(compiled).forget_weights()
    assert_follows(compiled, model)
    learn(compiled, model)
    names = [name for name in state(compiled).tensors if "lora_A" in name and name.endswith(":weight")]
    assert names
    for name in names:  # the weight fills the range of E4M3
        weight = model.get_submodule(name.removesuffix(":weight")).weight.detach()
        assert 0.9 < float(state(compiled).scale(name) * weight.abs().max()) / 448 < 1.1
