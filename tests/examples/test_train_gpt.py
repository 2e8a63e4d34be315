"""The training example: a tiny run from the command line's arguments to the files, and its text and options."""

import json
import math
import shlex

import pytest
import torch

pytest.importorskip("rich")

from examples import train_gpt
from tests.tolerances import LOSS_PERCENT

TINY = shlex.split("--layers 1 --width 32 --heads 2 --context 16 --batch 2 --eval-batches 2 --backend aot_eager --device cpu")
GEMMS = 3 * 5  # output, grad_input and grad_weight of four linears and the head


def run(tmp_path, *options):
    return train_gpt.main([*TINY, "--out", str(tmp_path), *options])


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "mxfp8"])
def test_a_tiny_run_of_a_recipe(tmp_path, capsys, recipe):
    """With state, with none, and with a format of its own: the example asks a recipe for no more."""
    result = run(tmp_path, "--recipe", recipe, "--steps", "12")
    assert result["gemms"] == GEMMS
    assert result["gemms_in_fp8"] == GEMMS - 3, "the loss is in the graph, so the head is known and stays"
    assert (result["state_tensors"] > 0) == (recipe == "delayed")
    high, low = result["losses"]["float32 twin"], result["losses"][f"FP8 {recipe}"]
    assert len(high) == len(low) == 12
    assert all(map(math.isfinite, high + low))
    assert high != low  # two models, and one of them is not in high precision
    assert low[-1] < low[0]
    assert abs(result["difference_percent"]) < LOSS_PERCENT
    assert abs(result["held_out_difference_percent"]) < LOSS_PERCENT
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert f"{GEMMS - 3} of {GEMMS} GEMMs run in FP8" in printed
    assert "layers.0.attn.qkv" in printed
    for name in ("float32 twin", f"FP8 {recipe}"):
        assert f"{name}: compiled, with its first step, in " in printed
    assert "nan" not in printed
    assert "On a CPU FP8 is emulated" in printed


def test_the_same_seed_gives_the_same_losses(tmp_path):
    first, second, other = (run(tmp_path, "--steps", "3", "--seed", seed)["losses"] for seed in ("7", "7", "8"))
    assert first == second
    assert first != other


def test_a_tied_head_under_autocast(tmp_path):
    result = run(tmp_path, "--steps", "3", "--tie", "--dtype", "bfloat16")
    assert result["gemms_in_fp8"] == GEMMS - 3, "the head stays in high precision"
    assert set(result["losses"]) == {"bfloat16 twin", "FP8 delayed"}


def test_a_tied_head_is_the_embedding():
    sizes = {"layers": 1, "width": 32, "heads": 2, "context": 16}
    tied, untied = train_gpt.GPT(**sizes, tie=True), train_gpt.GPT(**sizes, tie=False)
    assert tied.head.weight is tied.tokens.weight
    assert untied.head.weight is not untied.tokens.weight
    count = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert count[1] - count[0] == train_gpt.VOCABULARY * 32


def test_batches_are_windows_of_the_text_and_targets_their_next_bytes():
    args = train_gpt.parse(TINY)
    text = torch.arange(200, dtype=torch.uint8)  # every byte is its own position
    for _, (tokens, targets) in zip(range(5), train_gpt.batches(text, args, seed=1), strict=False):
        assert tokens.shape == targets.shape == (2, 16)
        assert torch.equal(targets, tokens + 1)
        assert torch.equal(tokens - tokens[:, :1], torch.arange(16).expand(2, -1))


def test_held_out_text_is_not_trained_on():
    train, held_out = (bytes(text.tolist()) for text in train_gpt.standard_library())
    assert 5 * len(held_out) < len(train)
    assert held_out[:2000] not in train
    assert held_out[-2000:] not in train


@pytest.mark.parametrize("steps", [1, 2, 10, 57])
def test_the_learning_rate_rises_and_falls(steps):
    args = train_gpt.parse(["--steps", str(steps), "--lr", "1.0"])
    rates = [train_gpt.learning_rate(step, args) for step in range(steps)]
    assert all(0.1 <= rate <= 1 for rate in rates)
    assert max(rates) == 1
    if steps > 10:
        assert rates[-1] < 0.11


@pytest.mark.parametrize("wrong", [["--recipe", "nvfp4"], ["--backend", "eager"], ["--width", "30", "--heads", "4"]])
def test_options_without_meaning_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        train_gpt.parse(wrong)
    assert wrong[0] in capsys.readouterr().err
