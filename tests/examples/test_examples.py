"""The examples: a tiny run of each from the command line's arguments to the files, and what they refuse."""

import json

import pytest

pytest.importorskip("rich")

from examples import train_gpt, train_moe
from tests.tolerances import LOSS_PERCENT

SMALL = ["--layers", "1", "--width", "32", "--backend", "aot_eager", "--device", "cpu"]
GPT = [*SMALL, "--heads", "2", "--context", "16", "--batch", "2", "--eval-batches", "2"]
MOE = [*SMALL, "--hidden", "32", "--heads", "2", "--experts", "4", "--context", "32", "--batch", "4", "--steps", "20"]
GEMMS = 3 * 5  # output, grad_input and grad_weight of four linears and the head


def check_losses(result, high, low):
    """Two models, one of which is not in high precision, learn alike."""
    high, low = result["losses"][high], result["losses"][low]
    assert len(high) == len(low)
    assert high != low
    assert low[-1] < low[0]
    assert abs(result["difference_percent"]) < LOSS_PERCENT


def test_train_gpt(tmp_path, capsys):
    result = train_gpt.main([*GPT, "--out", str(tmp_path), "--recipe", "blockwise", "--steps", "12"])
    assert (result["gemms"], result["gemms_in_fp8"]) == (GEMMS, GEMMS - 3), "the loss is in the graph, so the head stays"
    check_losses(result, "float32 twin", "FP8 blockwise")
    assert abs(result["held_out_difference_percent"]) < LOSS_PERCENT
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for text in (f"{GEMMS - 3} of {GEMMS} GEMMs run in FP8", "layers.0.attn.qkv", "On a CPU FP8 is emulated"):
        assert text in printed


def test_train_moe(tmp_path, capsys):
    result = train_moe.main([*MOE, "--out", str(tmp_path), "--recipe", "blockwise"])
    assert result["grouped_gemms"] == result["grouped_gemms_in_fp8"] == 6
    assert result["gemms"] == 6 + 3 * 4  # besides the experts: qkv, out, router and head
    assert result["gemms_in_fp8"] == 6 + 3 * 2, "the router and the head stay"
    check_losses(result, "float32", "FP8 blockwise")
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert "4 groups" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
def test_lora(capsys):
    pytest.importorskip("peft")
    from examples import lora

    losses = lora.main(["--steps", "6", "--backend", "aot_eager"])
    assert losses[-1] < losses[0]
    assert "14 frozen weights are released: 655,360 bytes of high precision are free." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # the Trainer's, without a GPU
def test_finetune_trainer(tmp_path, capsys):
    """It learns, and the resumed half gives the same loss."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    from examples import finetune_trainer

    options = ["--width", "32", "--layers", "1", "--steps", "8", "--backend", "aot_eager", "--out", str(tmp_path)]
    result = finetune_trainer.main(options)
    assert result["end"] < result["middle"]
    assert result["resumed"] == result["end"]
    assert capsys.readouterr().out.count("GEMMs run in FP8") == 1
