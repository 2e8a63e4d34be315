"""Exports: the bytes are those that forward GEMMs read, files are what safetensors reads, and what cannot be held is said."""

import itertools
import json
import os
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8pass import DelayedScaling, export_fp8, fp8_compile, state, state_dict_fp8
from fp8pass.errors import ExportError, NotCompiledError
from tests.support.engines import dequantized
from tests.support.models import Net
from tests.support.operands import recorded

#: Recipe -> the shape of the scales of a matrix of 576 rows and 192 columns.
SCALES = {"delayed": (1,), "current": (1,), "rowwise": (576, 1), "blockwise": (5, 2), "mxfp8": (576, 6)}


class Model(nn.Module):
    """Ragged sizes, a bias, a Linear that never runs, an embedding and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 256)
        self.layers = nn.ModuleList([nn.Linear(256, 192, bias=False), nn.Linear(192, 576), nn.Linear(576, 256)])
        self.unused = nn.Linear(64, 64)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def chain(*sizes):
    return nn.Sequential(nn.Embedding(64, sizes[0]), *(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))


def trained(recipe, model=None, **options):
    model = model or Model().bfloat16()
    compiled = fp8_compile(model, recipe, backend="aot_eager", **options)
    tokens = torch.randint(0, 64, (2, 16))
    compiled(tokens).float().square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    return model, compiled, tokens


def evaluated(compiled, tokens):
    """The FP8 GEMMs of a forward, and what is exported."""
    with torch.no_grad(), recorded() as gemms:
        compiled(tokens)
    return gemms, dict(state_dict_fp8(compiled))


def bits(data):
    return data.contiguous().view(torch.uint8)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("recipe", SCALES)
def test_the_bytes_are_those_of_the_forward_and_only_static_input_scales_are_not_dynamic(recipe, tmp_path):
    """Static ones are from training, all others the engine's own."""
    model, compiled, tokens = trained(recipe)
    gemms, exported = evaluated(compiled, tokens)
    for layer, gemm in zip(range(3), gemms, strict=True):
        data, scale = exported[f"layers.{layer}.weight"], exported[f"layers.{layer}.weight_scale"]
        assert data.dtype is torch.float8_e4m3fn
        assert data.shape == model.layers[layer].weight.shape
        assert torch.equal(bits(data), bits(gemm.b[: len(data), : data.shape[1]]))
        if recipe == "blockwise":
            assert torch.equal(scale, gemm.scale_b[:, : scale.shape[1]])
        elif recipe != "mxfp8":
            assert torch.equal(scale.reshape(-1), gemm.scale_b.reshape(-1)[: scale.numel()])
        if recipe == "delayed":
            assert torch.equal(exported[f"layers.{layer}.input_scale"], gemm.scale_a.reshape(1))
        weight = model.layers[layer].weight.float()
        assert (dequantized(data, scale) - weight).norm() < 0.04 * weight.norm()
    assert tuple(exported["layers.1.weight_scale"].shape) == SCALES[recipe]
    for name in ("embed.weight", "unused.weight", "unused.bias", "layers.1.bias", "steps"):
        assert torch.equal(exported[name], model.state_dict()[name])
    export_fp8(compiled, tmp_path)
    (group,) = config_of(tmp_path)["config_groups"].values()
    assert (group["weights"]["dynamic"], group["input_activations"]["dynamic"]) == (False, recipe != "delayed")
    if recipe in ("delayed", "current"):
        export_fp8(compiled, tmp_path, "fp8")
        assert config_of(tmp_path)["activation_scheme"] == ("static" if recipe == "delayed" else "dynamic")


def test_files_hold_what_the_iteration_gives(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    _, compiled, _ = trained("blockwise", chain(256, 384, 256))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("of an earlier export")
    report = export_fp8(compiled, tmp_path, max_shard_bytes=120_000)
    expected = dict(state_dict_fp8(compiled))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    others = {"config.json", "model.safetensors.index.json", "tokenizer.json"}
    assert {p.name for p in tmp_path.iterdir()} == {*others, *report.files}
    found = {}
    for file in report.files:
        with safetensors.safe_open(str(tmp_path / file), "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            found |= {name: opened.get_tensor(name) for name in opened.offset_keys()}
            assert {name for name, place in index["weight_map"].items() if place == file} == set(opened.offset_keys())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert torch.equal(bits(tensor.reshape(-1)), bits(expected[name].reshape(-1)))
    assert index["metadata"]["total_size"] == report.num_bytes == sum(t.nbytes for t in expected.values())
    assert export_fp8(compiled, tmp_path).files == ["model.safetensors"]
    assert not (tmp_path / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("num_moved", [1, 2, 3])
def test_a_crash_while_files_get_their_names_leaves_nothing_that_looks_whole(num_moved, tmp_path, monkeypatch):
    """Tensors without an index, or beside an earlier config.json, would load as something else."""
    _, compiled, _ = trained("blockwise", chain(256, 384, 256))
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    (tmp_path / "model.safetensors").write_text("of another model")
    replace = mock.Mock(side_effect=[*[mock.DEFAULT] * num_moved, KeyboardInterrupt], wraps=os.replace)
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        export_fp8(compiled, tmp_path, max_shard_bytes=50_000)
    index = tmp_path / "model.safetensors.index.json"
    needed = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    assert not needed <= {path.name for path in tmp_path.iterdir()}
    assert config_of(tmp_path)


def test_configs_name_groups_and_all_that_is_not_in_fp8(tmp_path):
    _, compiled, _ = trained("rowwise", rules={"layers.1": "blockwise", "layers.2": None})
    report = export_fp8(compiled, tmp_path)
    quantization = config_of(tmp_path)
    assert quantization["ignore"] == ["layers.2", "unused"]
    groups = {g["weights"]["strategy"]: g for g in quantization["config_groups"].values()}
    assert {strategy: g["targets"] for strategy, g in groups.items()} == {"channel": ["layers.0"], "block": ["layers.1"]}
    assert report.kept.keys() == {"embed.weight", "layers.2.weight", "unused.weight"}
    assert report.kept["layers.2.weight"] == "rule: 'layers.2' keeps high precision"
    # In blocks that are not whole there is no FP8.
    _, compiled, _ = trained("blockwise", chain(256, 384, 576, 200))
    report = export_fp8(compiled, tmp_path, "fp8")
    assert [w.name for w in report.written] == ["1.weight"]
    assert "[576, 384] does not consist of whole 128x128 blocks" in report.kept["2.weight"]
    blocks = {"activation_scheme": "dynamic", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    assert config_of(tmp_path) == {"quant_method": "fp8", "modules_to_not_convert": ["2", "3"], **blocks}
    assert dict(state_dict_fp8(compiled, "fp8"))["1.weight_scale_inv"].dtype is torch.float8_e8m0fnu


def test_scales_of_delayed_scaling():
    compiled, tokens = fp8_compile(chain(256, 128), "delayed", backend="aot_eager"), torch.randint(0, 64, (2, 16))
    with torch.no_grad():
        compiled(tokens)
    with pytest.raises(ExportError, match="no step has recorded an amax of its input"):
        state_dict_fp8(compiled)
    # Exchanged weights take their scales from themselves, with the headroom that the recipe asks for.
    model, compiled, tokens = trained(DelayedScaling(margin=2))
    state(compiled).forget_weights()
    gemms, exported = evaluated(compiled, tokens)
    for layer, gemm in zip(range(3), gemms, strict=True):
        scale_inv = exported[f"layers.{layer}.weight_scale"]
        assert scale_inv.item() == pytest.approx(model.layers[layer].weight.abs().max().item() * 4 / 448)
        assert torch.equal(scale_inv, gemm.scale_b.reshape(1))


def tied():
    """Every kind of Linear that stays in high precision beside one in FP8."""

    def forward(m, tokens):
        x = m.again(m.body(m.embed(tokens)))
        return m.head(m.normed(x)) + m.thin(x).sum()

    model = Net(forward, embed=nn.Embedding(64, 128), thin=nn.Linear(128, 4), head=nn.Linear(128, 64, bias=False))
    model.body, model.again, model.unused, model.other = (nn.Linear(n, n) for n in (128, 128, 64, 64))
    model.again.weight, model.other.weight, model.head.weight = model.body.weight, model.unused.weight, model.embed.weight
    model.normed = nn.utils.parametrizations.weight_norm(nn.Linear(128, 128))
    for name in ("Linear", "re:x", "a(b", "dy"):
        model.add_module(name, nn.Linear(8, 8))
    return model


@pytest.mark.parametrize("fmt", ["compressed-tensors", "fp8"])
def test_tied_weights_and_every_linear_that_is_not_in_fp8_is_named(fmt, tmp_path):
    """Also where loaders would take a name for a pattern: a class, a prefix of compressed-tensors, no regular expression, or
    the end of another name."""
    _, compiled, _ = trained("current", tied(), rules={"head": "current"})
    report, names = export_fp8(compiled, tmp_path, fmt), set(dict(state_dict_fp8(compiled, fmt)))
    assert [w.name for w in report.written] == ["body.weight"]
    assert {"body.weight", "body.weight_scale", "embed.weight"} <= names
    assert not names & {"again.weight", "head.weight", "again.weight_scale"}
    assert report.kept["embed.weight"] == "tied: an embedding reads it in high precision"
    patterns = ["a(b", "re:Linear$", "re:re:x$"] if fmt == "compressed-tensors" else ["Linear", r"^a\(b$", "^re:x$", "^dy$"]
    named = set(config_of(tmp_path)["ignore" if fmt == "compressed-tensors" else "modules_to_not_convert"])
    assert {"head", "normed", "other", "thin", "unused", *patterns} <= named
    assert not {"body", "again", "embed"} & named
    report = export_fp8(trained("delayed", tied(), select="all")[1], tmp_path, fmt)
    assert "several GEMMs read it, with inputs that have scales of their own" in report.kept["body.weight"]


def test_layouts_and_reads_that_no_format_has():
    parameters = {"turned": nn.Parameter(torch.randn(128, 64) / 8), "scaled": nn.Parameter(torch.randn(64, 64) / 8)}

    def forward(m, tokens):
        return m.plain(F.linear(F.one_hot(tokens, 128).float() @ m.turned, m.scaled * 2))

    _, compiled, _ = trained("current", Net(forward, plain=nn.Linear(64, 64), **parameters))
    exported = dict(state_dict_fp8(compiled))
    assert exported["turned"].dtype is exported["scaled"].dtype is torch.float32
    assert exported["plain.weight"].dtype is torch.float8_e4m3fn


def test_what_fails_names_the_cause_and_leaves_the_earlier_export(tmp_path):
    """Tensors in FP8 beside a config.json that does not say so would be loaded without their scales."""
    _, compiled, _ = trained("rowwise")
    assert "layers.*.weight (x3): " in repr(export_fp8(compiled, tmp_path))
    fresh, (model, odd, _) = fp8_compile(Model(), "rowwise", backend="aot_eager"), trained("rowwise")
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex64))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for call, message in (
        (lambda: export_fp8(compiled, tmp_path, "compressed_tensors"), "'compressed_tensors'. Did you mean 'compressed-tens"),
        (lambda: export_fp8(compiled, tmp_path, "fp8"), "has one per tensor or per 128x128 block"),
        (lambda: export_fp8(compiled, tmp_path / "config.json"), "config.json is a file; pass a folder"),
        (lambda: export_fp8(odd, tmp_path), r"odd is torch\.complex64"),
        (lambda: state_dict_fp8(fresh), "Call the compiled model before"),
    ):
        with pytest.raises(ExportError, match=message):
            call()
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ExportError, match=r"config\.json.* is not JSON \(Expecting .*correct or"):
        export_fp8(compiled, tmp_path)
    with pytest.raises(NotCompiledError):
        state_dict_fp8(nn.Linear(2, 2))
