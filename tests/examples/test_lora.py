"""The LoRA example learns, quantizes each frozen weight once, and has the gradients of weights that are cast at each call, also
when the base has given its values back."""

import pytest
import torch

from fp8pass import fp8_compile, inspect
from fp8pass.errors import ReleasedWeightError
from fp8pass.weights import cache

pytest.importorskip("peft")
from examples import lora

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it


def test_adapters_learn(capsys):
    losses = lora.main(["--steps", "6", "--backend", "aot_eager"])
    assert losses[-1] < losses[0]
    assert "14 frozen weights are released: 655,360 bytes of high precision are free." in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_gradients_of_adapters(recipe, monkeypatch, tmp_path):
    counts, original = [], cache.quantize
    monkeypatch.setattr(cache, "quantize", lambda kind, ws, scale: (counts.append(len(ws)), original(kind, ws, scale))[1])
    found = {}
    for copies in ("auto", "cache", "released", "save"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = lora.make_model(width=128, layers=1)
        options = {"release_frozen": True} if copies == "released" else {"weight_copies": copies}
        compiled = fp8_compile(model, recipe, backend="aot_eager", **options)
        for tokens in lora.batches(2, tokens=16):
            compiled(input_ids=tokens, labels=tokens).loss.backward()
        found[copies] = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        if copies == "released":
            check_released(model, compiled, tmp_path)
    assert len(found["auto"]) == 14
    for copies in ("auto", "cache", "released"):
        assert [n for n, g in found["save"].items() if not torch.equal(g, found[copies][n])] == []
    assert sum(counts) == 7 + 7, "once, in two steps, and not at all by default"
    assert inspect(compiled).graphs[0].kept == []


def check_released(model, compiled, folder):
    """Frozen weights take at most 0.52 of bfloat16, scales included, and adapters are saved without them."""
    weights = [p for name, p in model.named_parameters() if name.endswith("base_layer.weight")]
    assert len(weights) == 7
    assert sum(w.untyped_storage().nbytes() for w in weights) == 0
    made = [w.made for w in compiled._fp8pass_session.weights.cache._weights.values()]
    parts = [t.untyped_storage() for m in made for t in (*m.data.values(), *m.scale_inv.values())]
    low = sum({s._cdata: s.nbytes() for s in parts}.values())
    assert low <= 0.52 * sum(2 * w.numel() for w in weights)
    model.save_pretrained(folder)
    assert (folder / "adapter_model.safetensors").exists()
    with pytest.raises(ReleasedWeightError, match="linear: this Parameter has no values"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
