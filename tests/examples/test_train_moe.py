"""The example of a mixture of experts: a tiny run from the command line's arguments to the files."""

import json
import math
import shlex

import pytest
import torch

pytest.importorskip("rich")

from examples import train_moe
from tests.tolerances import LOSS_PERCENT

TINY = shlex.split(
    "--layers 1 --width 32 --hidden 32 --heads 2 --experts 4 --context 32 --batch 4 --backend aot_eager --device cpu"
)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_a_tiny_run(tmp_path, capsys, recipe):
    result = train_moe.main([*TINY, "--out", str(tmp_path), "--recipe", recipe, "--steps", "20"])
    assert result["grouped_gemms"] == result["grouped_gemms_in_fp8"] == 6
    assert result["gemms"] == 6 + 3 * 4  # besides the experts: qkv, out, router and head
    assert result["gemms_in_fp8"] == 6 + 3 * 2, "the router and the head stay"
    assert sorted(n for n in result["scales"].values() if n > 1) == ([4, 4] if recipe == "delayed" else [])
    high, low = result["losses"]["float32"], result["losses"][f"FP8 {recipe}"]
    assert all(map(math.isfinite, high + low))
    assert high != low
    assert low[-1] < low[0]
    assert abs(result["difference_percent"]) < LOSS_PERCENT
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert "4 groups" in capsys.readouterr().out


def test_experts_one_by_one_are_the_grouped_gemm():
    args = train_moe.parse(TINY)
    moe = train_moe.MoE(args.width, args.hidden, args.experts, args.top_k)
    x = torch.randn(2, 16, args.width)
    grouped = moe(x)
    moe.experts.one_by_one = True
    torch.testing.assert_close(grouped, moe(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("wrong", [["--recipe", "nvfp4"], ["--width", "30", "--heads", "4"], ["--top-k", "9"]])
def test_options_without_meaning_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        train_moe.parse(wrong)
    assert wrong[0] in capsys.readouterr().err
