"""Programs of the net that frameworks run: the best model at the end, adapters merged."""

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


from fp8pass import DelayedScaling, fp8_compile, state  # noqa: E402
from fp8pass.errors import Fp8Warning  # noqa: E402
from tests.integrations.support import TOKENS, adapted, assert_follows, learn  # noqa: E402

RECIPE = DelayedScaling(amax_history_len=2)


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
