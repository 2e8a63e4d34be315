"""The LoRA example learns, quantizes each frozen weight once, and has the gradients of weights that are cast at each call."""

from __future__ import annotations

import pytest
import torch

from fp8pass import fp8_compile, inspect
from fp8pass.weights import cache

pytest.importorskip("peft")
from examples import lora

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it


def test_adapters_learn(capsys):
    losses = lora.main(["--steps", "6", "--backend", "aot_eager"])
    assert losses[-1] < losses[0]
    assert "14 frozen weights quantized once" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_gradients_of_adapters(recipe, monkeypatch):
    counts, original = [], cache.quantize
    monkeypatch.setattr(cache, "quantize", lambda kind, ws, scale: (counts.append(len(ws)), original(kind, ws, scale))[1])
    found = {}
    for copies in ("auto", "save"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = lora.make_model(width=64, layers=1)
        compiled = fp8_compile(model, recipe, backend="aot_eager", weight_copies=copies)
        for tokens in lora.batches(2, tokens=16):
            compiled(input_ids=tokens, labels=tokens).loss.backward()
        found[copies] = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(found["auto"]) == 14
    assert [n for n, g in found["save"].items() if not torch.equal(g, found["auto"][n])] == []
    assert sum(counts) == 7, "once, in two steps"
    assert inspect(compiled).graphs[0].kept == []
