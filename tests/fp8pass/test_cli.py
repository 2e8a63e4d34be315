"""The command line: `python -m fp8pass`, and what `estimate` makes of the names it is given."""

import json
import sys
import types

import pytest
import torch

import fp8pass
from fp8pass import __main__ as environment
from fp8pass.__main__ import main
from fp8pass.errors import OptionError
from fp8pass.tools.named_models import load
from lowering import hardware


def test_the_environment(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["fp8pass", fp8pass.__version__]
    assert any(line.startswith("torch ") and torch.__version__ in line for line in lines)
    assert [line.split()[0] for line in lines if " MB: " in line] == ["aotautograd", "fxgraph", "fp8pass", "triton"]


def test_what_runs_natively_on_a_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "cuda_capability", lambda device: (8, 9))
    monkeypatch.setattr(hardware, "cuda_version", lambda: (12, 9))
    monkeypatch.setattr(hardware, "torch_version", lambda: (2, 13))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=80e9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    first, *lines = environment._gpu(torch.device("cuda", 0))
    assert first.startswith("GPU 0         a GPU, capability ")
    expected = ["torch's GEMM", "torch's GEMM", "Triton's GEMM: 1x128", "no: 1x32 blocks need"]
    assert [text in line for line, text in zip(lines, expected, strict=True)] == [True] * 4


MINE = """
import torch

def build():
    model = torch.nn.Linear(2048, 4096, bias=False, dtype=torch.bfloat16)
    return model, torch.empty(8192, 2048, dtype=torch.bfloat16, requires_grad=True)

def nothing():
    return 3
"""


def test_a_function_of_a_module_and_what_is_wrong_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert main(["estimate", "mine:build", "--gpu", "h100", "--tokens", "16", "--recipe", "delayed", "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    gemms = {g["role"]: (g["m"], g["n"], g["k"]) for g in held["recipes"]["delayed"]["gemms"]}
    assert gemms == {"output": (8192, 4096, 2048), "grad_input": (8192, 2048, 4096), "grad_weight": (4096, 2048, 8192)}
    assert main(["estimate", "mine:build", "--recipe", "current", "--html"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")
    for arguments, text in (
        (["mine:nothing"], "let it return"),
        (["theirs:build"], "No module"),
        (["no such model", "--gpu", "a100"], "device is 'a100', which has no constants. Did you mean 'h100'?"),
        (["mine:build", "--gpu", "h100", "x=1"], "'x=1' is for a configuration of transformers"),
    ):
        assert main(["estimate", *arguments]) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["estimate", "mine:build", "--gpu", "h100", "--gpuu"])
    assert "unrecognized arguments: --gpuu; see `python -m fp8pass estimate --help`" in capsys.readouterr().err


def loaded(name, *sizes, tokens=256, sequence=128):
    return load(str(name), sizes, tokens, sequence, torch.bfloat16)


@pytest.mark.zoo
def test_models_by_their_configurations(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = ["hidden_size=64", "intermediate_size=128", "num_hidden_layers=2", "num_attention_heads=4"]
    model, _, kwargs, note = loaded("LlamaConfig", *sizes, "num_key_value_heads=2", "vocab_size=256")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.model.layers[0].mlp.up_proj.weight.shape == (128, 64)
    assert model.lm_head.weight.is_meta
    assert (kwargs["input_ids"].shape, note, model.training) == ((2, 128), "", True)
    _, _, kwargs, _ = loaded("ViTConfig", *sizes, "image_size=64", "patch_size=16", tokens=160)
    assert kwargs["pixel_values"].shape == (10, 3, 64, 64)
    _, _, kwargs, note = loaded("RobertaConfig", "num_hidden_layers=1", "vocab_size=64", tokens=8192, sequence=8192)
    assert kwargs["input_ids"].shape == (8192 // 510, 510)
    assert note == "RobertaConfig has 510 positions: texts of 510 tokens, not of 8192"
    for given, text in (
        ([tmp_path], r"has no config\.json"),
        (["LlamaConfig", "hiden_size=3"], "Did you mean 'hidden_size'"),
        (["LlamaConfig", "hidden_size"], "'hidden_size' is not a size; write NAME=VALUE"),
        (["LlamaConfig", "hidden_size=wide"], "LlamaConfig refuses {'hidden_size': 'wide'}"),
        *((["ClapConfig"], "write module:function"), (["Llma"], "Did you mean 'LlamaConfig'")),
        (["meta-llama/Llama-3-8B"], "nothing is downloaded"),
    ):
        with pytest.raises(OptionError, match=text):
            loaded(*given)
    transformers.Qwen3Config(num_hidden_layers=1, hidden_size=64, vocab_size=256).save_pretrained(tmp_path)
    assert loaded(tmp_path, "vocab_size=512")[0].lm_head.out_features == 512
