"""Untied heads of models whose loss is in the training loop: litgpt's and torchtitan's, as their packages have them.

Neither is an extra of this project: `pip install --no-deps litgpt torchtitan` (and for the latter spmd_types, tyro,
docstring_parser) is enough here.
"""

import pytest
import torch

from fp8pass import fp8_compile, inspect
from tests.support.selection import kinds

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:(torch|torchtitan|litgpt)"),
]


@pytest.mark.parametrize("scores", [None, 30.0], ids=["logits", "capped"])
def test_litgpt(scores):
    litgpt = pytest.importorskip("litgpt")
    config = litgpt.Config(
        block_size=64,
        n_layer=2,
        n_embd=64,
        n_head=4,
        padded_vocab_size=96,
        intermediate_size=112,
        mlp_class_name="LLaMAMLP",
        norm_class_name="RMSNorm",
        bias=False,
        final_logit_softcapping=scores,
    )
    found = kinds(litgpt.GPT(config), torch.randint(96, (2, 16)))
    assert found.pop("lm_head") == "head"
    assert len(found) == 10
    assert set(found.values()) == {"fp8"}


def test_torchtitans_llama3():
    llama3 = pytest.importorskip("torchtitan.models.llama3")
    model = llama3._debugmodel("flex").build()
    tokens, positions = torch.randint(2048, (1, 128)), torch.arange(128)[None]
    masks = model.get_attention_masks(positions)
    compiled = fp8_compile(model, "current", backend="aot_eager")
    with torch.no_grad():  # flex_attention has no backward on a CPU
        compiled(tokens, positions, masks)
    stay = {g.module: g.reason.partition(":")[0] for g in inspect(compiled).gemms if not g.quantized}
    assert stay == {"lm_head": "head"}
    assert len(inspect(compiled).gemms) == 31
