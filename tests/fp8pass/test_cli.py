"""The command line: `python -m fp8pass`, and what `estimate` makes of the names it is given."""

import json
import sys
import types
from unittest import mock

import pytest
import torch

import fp8pass
from fp8pass import __main__ as environment
from fp8pass.__main__ import main
from fp8pass.errors import OptionError
from fp8pass.tools.named_models import load
from lowering import hardware


def loaded(name, sizes=(), tokens=256, sequence=128):
    return load(name, sizes, tokens, sequence, torch.bfloat16)


def test_the_environment(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["fp8pass", fp8pass.__version__]
    assert any(line.startswith("torch ") and torch.__version__ in line for line in lines)
    caches = next(i for i, line in enumerate(lines) if line.startswith("caches "))
    assert lines[caches].split()[1] in ("on,", "off,")
    assert [line.split()[0] for line in lines[caches + 1 : caches + 5]] == ["aotautograd", "fxgraph", "fp8pass", "triton"]
    assert all(" MB: " in line for line in lines[caches + 1 : caches + 5])
    if not torch.cuda.is_available():
        assert "GPU           none" in lines[-1]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), ["torch's GEMM", "torch's GEMM", "torch's GEMM", "no: 1x32 blocks need"]),
        ((8, 9), ["torch's GEMM", "torch's GEMM", "Triton's GEMM: 1x128", "no: 1x32 blocks need"]),
        ((10, 0), ["torch's GEMM", "torch's GEMM", "MXFP8 GEMMs with the same numbers", "torch's GEMM"]),
        ((8, 0), ["no FP8"]),
    ],
)
def test_what_runs_natively_on_a_gpu(capability, expected):
    properties = types.SimpleNamespace(total_memory=80e9)
    with (
        mock.patch.object(hardware, "cuda_capability", return_value=capability),
        mock.patch.object(hardware, "cuda_version", return_value=(12, 9)),
        mock.patch.object(hardware, "torch_version", return_value=(2, 13)),
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch("torch.cuda.get_device_name", return_value="a GPU"),
    ):
        first, *lines = environment._gpu(torch.device("cuda", 0))
    assert first.startswith("GPU 0         a GPU, capability ")
    assert len(lines) == len(expected)
    for line, text in zip(lines, expected, strict=True):
        assert text in line


def test_a_function_of_a_module(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Linear(2048, 4096, bias=False, dtype=torch.bfloat16)\n"
        "    return model, torch.empty(8192, 2048, dtype=torch.bfloat16, requires_grad=True)\n"
        "def nothing():\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert main(["estimate", "mine:build", "--gpu", "h100", "--recipe", "delayed", "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["device"] == "NVIDIA H100"
    assert held["call"] == 'fp8_compile(model, "delayed")'
    gemms = held["recipes"]["delayed"]["gemms"]
    assert {(g["role"], g["m"], g["n"], g["k"]) for g in gemms} == {
        ("output", 8192, 4096, 2048),
        ("grad_input", 8192, 2048, 4096),
        ("grad_weight", 4096, 2048, 8192),
    }
    assert main(["estimate", "mine:build", "--recipe", "current", "--html"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")
    wrongs = {"mine:nothing": "let it return", "mine:other": "no attribute 'other'", "theirs:build": "No module"}
    for wrong, text in wrongs.items():
        assert main(["estimate", wrong]) == 2
        assert text in capsys.readouterr().err


def test_what_is_wrong_is_named_first_and_sizes_may_stand_behind_options(capsys):
    assert main(["estimate", "no such model", "--gpu", "a100"]) == 2
    assert "device is 'a100', which has no constants. Did you mean 'h100'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["estimate"])
    assert "the following arguments are required: model\n" in capsys.readouterr().err
    assert main(["estimate", "mine:build", "--gpu", "h100", "x=1"]) == 2
    assert "'x=1' is for a configuration of transformers" in capsys.readouterr().err
    for rest in ("--gpuu", "64"):
        with pytest.raises(SystemExit):
            main(["estimate", "mine:build", "--gpu", "h100", rest])
        assert f"unrecognized arguments: {rest}; see `python -m fp8pass estimate --help`" in capsys.readouterr().err


# -- configurations of transformers

SIZES = ("hidden_size=64", "intermediate_size=128", "num_hidden_layers=2", "num_attention_heads=4", "num_key_value_heads=2")


@pytest.mark.zoo
def test_models_by_their_configurations(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    model, _, kwargs, _ = loaded("LlamaConfig", [*SIZES, "vocab_size=256"])
    assert type(model).__name__ == "LlamaForCausalLM"
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert model.model.layers[0].mlp.up_proj.weight.shape == (128, 64)
    assert kwargs["input_ids"].shape == (2, 128)
    assert model.training
    model, *_ = loaded("Qwen3MoeConfig", [*SIZES, "vocab_size=256", "head_dim=32", "num_experts=4"])
    assert model.model.layers[0].self_attn.q_proj.out_features == 4 * 32, "a value that only the code knows"
    _, _, kwargs, _ = loaded("ViTConfig", [*SIZES[:-1], "image_size=64", "patch_size=16"], tokens=160)
    assert kwargs["pixel_values"].shape == (10, 3, 64, 64)
    with pytest.raises(OptionError, match=r"has no config\.json"):
        loaded(str(tmp_path))
    sizes = dict(size.split("=") for size in SIZES)
    transformers.Qwen3Config(**{k: int(v) for k, v in sizes.items()}, vocab_size=256).save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        assert loaded(str(name), ["vocab_size=512"])[0].lm_head.out_features == 512


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("name", "sizes", "text"),
    [
        ("LamaConfig", [], "Did you mean 'LlamaConfig'"),
        ("LlamaConfig", ["hiden_size=3"], "Did you mean 'hidden_size'"),
        ("LlamaConfig", ["64"], "NAME=VALUE"),
        ("ClapConfig", [], "write module:function"),
        ("a:b", ["x=1"], "set sizes there"),
        ("llama", [], "Did you mean 'LlamaConfig'"),
        ("meta-llama/Llama-3-8B", [], "nothing is downloaded"),
        ("LlamaConfig", ["hidden_size=abc"], "LlamaConfig refuses.*expected int, got str"),
    ],
)
def test_what_is_wrong_is_named(name, sizes, text):
    pytest.importorskip("transformers", minversion="5")
    with pytest.raises(OptionError, match=text):
        loaded(name, sizes)
