"""Exports: the bytes are those that forward GEMMs read, files are what safetensors reads, and what cannot be held is said."""

import itertools
import json
import os
import pathlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8pass import DelayedScaling, export_fp8, fp8_compile, state, state_dict_fp8
from fp8pass.errors import ExportError, NotCompiledError
from fp8pass.tools.export.formats import CompressedTensors, FineGrained, ScaleKind, StoredScheme
from tests.support.engines import dequantized
from tests.support.memory import allocated
from tests.support.models import Net
from tests.support.operands import recorded

RECIPES = ("delayed", "current", "rowwise", "blockwise", "mxfp8")
#: Recipe -> what its scales are called, and their shape for a matrix of 576 rows and 192 columns.
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


def exact(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bytes_are_those_of_the_forward(recipe):
    model, compiled, tokens = trained(recipe)
    gemms, exported = evaluated(compiled, tokens)
    for layer, gemm in zip(range(3), gemms, strict=True):
        data = exported[f"layers.{layer}.weight"]
        assert data.dtype is torch.float8_e4m3fn
        rows, columns = data.shape
        assert (rows, columns) == tuple(model.layers[layer].weight.shape)
        assert torch.equal(bits(data), bits(gemm.b[:rows, :columns]))
        scale = exported[f"layers.{layer}.weight_scale"]
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


@pytest.mark.parametrize("fmt", ["compressed-tensors", "fp8"])
def test_files_hold_what_the_iteration_gives(fmt, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    _, compiled, _ = trained("blockwise", chain(256, 384, 256))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("of an earlier export")
    report = export_fp8(compiled, tmp_path, fmt, max_shard_bytes=120_000)
    expected = dict(state_dict_fp8(compiled, fmt))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert report.files == sorted(set(index["weight_map"].values()))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["config.json", "model.safetensors.index.json", "tokenizer.json", *report.files]
    )
    found = {}
    for file in report.files:
        with safetensors.safe_open(str(tmp_path / file), "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            found |= {name: opened.get_tensor(name) for name in opened.offset_keys()}
            assert all(index["weight_map"][name] == file for name in opened.offset_keys())
    assert {n: exact(t) for n, t in found.items()} == {n: exact(t) for n, t in expected.items()}
    assert index["metadata"]["total_size"] == report.num_bytes == sum(t.nbytes for t in expected.values())
    again = export_fp8(compiled, tmp_path, fmt)
    assert again.files == ["model.safetensors"]
    assert not (tmp_path / "model.safetensors.index.json").exists()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_failed_export_leaves_the_earlier_one(tmp_path):
    """Tensors in FP8 beside a config.json that does not say so would be loaded without their scales."""
    model, compiled, _ = trained("current")
    assert "layers.*.weight (x3): " in str(export_fp8(compiled, tmp_path))
    assert contents(tmp_path).keys() == {"config.json", "model.safetensors"}
    with torch.no_grad():
        model.embed.weight.zero_()
    for spoil, message in (
        (lambda: model.register_buffer("odd", torch.zeros(2, dtype=torch.complex64)), r"odd is torch\.complex64"),
        (lambda: (tmp_path / "config.json").write_text("{"), r"config\.json.* is not JSON \(Expecting .*correct or"),
    ):
        spoil()
        before = contents(tmp_path)
        with pytest.raises(ExportError, match=message):
            export_fp8(compiled, tmp_path)
        assert contents(tmp_path) == before


@pytest.mark.parametrize("num_moved", range(1, 5))
def test_a_crash_while_files_get_their_names_leaves_nothing_that_looks_whole(num_moved, tmp_path, monkeypatch):
    """Tensors without an index, or beside an earlier config.json, would load as something else."""
    _, compiled, _ = trained("blockwise", chain(256, 384, 256))
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    (tmp_path / "model.safetensors").write_text("of another model")
    moved, move = [], os.replace

    class Crash(BaseException):
        """The end of the process."""

    def until_the_end(source, target):
        if len(moved) == num_moved:
            raise Crash
        moved.append(pathlib.Path(target).name)
        move(source, target)

    monkeypatch.setattr(os, "replace", until_the_end)
    with pytest.raises(Crash):
        export_fp8(compiled, tmp_path, max_shard_bytes=50_000)
    found = {path.name for path in tmp_path.iterdir()}
    index = tmp_path / "model.safetensors.index.json"
    needed = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    assert not needed <= found
    assert "quantization_config" in json.loads((tmp_path / "config.json").read_text())


def quantization_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def test_configs_name_groups_and_all_that_is_not_in_fp8(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    _, compiled, _ = trained("rowwise", rules={"layers.1": "blockwise", "layers.2": None})
    report = export_fp8(compiled, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "mine"
    quantization = quantization_of(tmp_path)
    assert quantization["ignore"] == ["layers.2", "unused"]
    groups = {g["weights"]["strategy"]: g for g in quantization["config_groups"].values()}
    assert {strategy: g["targets"] for strategy, g in groups.items()} == {"channel": ["layers.0"], "block": ["layers.1"]}
    assert groups["channel"]["input_activations"].items() >= {"strategy": "token", "dynamic": True}.items()
    assert report.kept == {
        "embed.weight": "embedding: no GEMM reads it",
        "layers.2.weight": "rule: 'layers.2' keeps high precision",
        "unused.weight": "no forward GEMM that has run reads it unchanged",
    }
    assert "layers.*.weight: rowwise: one scale per row" in str(report)
    # In blocks that are not whole there is no FP8.
    _, compiled, _ = trained("blockwise", chain(256, 384, 576, 200))
    report = export_fp8(compiled, tmp_path, "fp8")
    assert [w.name for w in report.written] == ["1.weight"]
    assert "[576, 384] does not consist of whole 128x128 blocks" in report.kept["2.weight"]
    assert quantization_of(tmp_path) == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
        "modules_to_not_convert": ["2", "3"],
    }
    assert dict(state_dict_fp8(compiled, "fp8"))["1.weight_scale_inv"].dtype is torch.float8_e8m0fnu
    # A name that is part of another one is a pattern.
    deep = nn.ModuleDict({"fc": nn.Linear(128, 128)})
    model = Net(lambda m, t: m.deep["fc"](m.fc(F.one_hot(t, 96).float())), fc=nn.Linear(96, 128), deep=deep)
    export_fp8(trained("blockwise", model)[1], tmp_path, "fp8")
    assert quantization_of(tmp_path)["modules_to_not_convert"] == ["^fc$"]


@pytest.mark.parametrize("kind", ScaleKind, ids=lambda kind: kind.name)
def test_only_static_input_scales_are_not_dynamic(kind):
    """Static ones are from training, all others the engine's own."""
    config = CompressedTensors().config({StoredScheme(kind): ["layer"]}, ["head"])
    (group,) = config["config_groups"].values()
    assert group["weights"]["dynamic"] is False
    assert group["input_activations"]["dynamic"] is (kind is not ScaleKind.STATIC)
    assert config["ignore"] == ["head"]
    if kind in (ScaleKind.STATIC, ScaleKind.TENSOR, ScaleKind.BLOCK):
        scheme = FineGrained().config({StoredScheme(kind): ["layer"]}, [])["activation_scheme"]
        assert scheme == ("static" if kind is ScaleKind.STATIC else "dynamic")


def evaluated(compiled, tokens):
    """The FP8 GEMMs of a forward, and what is exported."""
    with torch.no_grad(), recorded() as gemms:
        compiled(tokens)
    return gemms, dict(state_dict_fp8(compiled))


def bits(data):
    return data.contiguous().view(torch.uint8)


def test_scales_of_delayed_scaling():
    compiled, tokens = fp8_compile(chain(256, 128), "delayed", backend="aot_eager"), torch.randint(0, 64, (2, 16))
    with torch.no_grad():
        compiled(tokens)
    with pytest.raises(ExportError, match="no step has recorded an amax of its input"):
        state_dict_fp8(compiled)
    compiled(tokens).sum().backward()
    assert "1.input_scale" in dict(state_dict_fp8(compiled))
    # Exchanged weights take their scales from themselves, with the headroom that the recipe asks for.
    model, compiled, tokens = trained(DelayedScaling(margin=2))
    state(compiled).forget_weights()
    gemms, exported = evaluated(compiled, tokens)
    for layer, gemm in enumerate(gemms):
        scale_inv = exported[f"layers.{layer}.weight_scale"]
        assert scale_inv.item() == pytest.approx(model.layers[layer].weight.abs().max().item() * 4 / 448)
        assert torch.equal(scale_inv, gemm.scale_b.reshape(1))
    assert len(gemms) == 3


def tied():
    model = Net(lambda m, tokens: m.head(m.second(m.first(m.embed(tokens)))))
    model.embed, model.head = nn.Embedding(64, 128), nn.Linear(128, 64, bias=False)
    model.first, model.second = nn.Linear(128, 128), nn.Linear(128, 128)
    model.second.weight, model.head.weight = model.first.weight, model.embed.weight
    return model


def test_tied_and_shared_weights(tmp_path):
    _, compiled, _ = trained("current", tied(), select="all")
    report = export_fp8(compiled, tmp_path)
    names = set(dict(state_dict_fp8(compiled)))
    assert {"first.weight", "first.weight_scale", "embed.weight"} <= names
    assert not names & {"second.weight", "head.weight", "second.weight_scale"}
    assert report.kept == {"embed.weight": "tied: an embedding reads it in high precision"}
    _, compiled, _ = trained("delayed", tied(), select="all")
    with pytest.raises(ExportError, match="several GEMMs read it, with inputs that have scales of their own"):
        state_dict_fp8(compiled)


def test_layouts_and_reads_that_no_format_has():
    parameters = {"turned": nn.Parameter(torch.randn(128, 64) / 8), "scaled": nn.Parameter(torch.randn(64, 64) / 8)}

    def forward(m, tokens):
        return m.plain(F.linear(F.one_hot(tokens, 128).float() @ m.turned, m.scaled * 2))

    _, compiled, _ = trained("current", Net(forward, plain=nn.Linear(64, 64), **parameters))
    exported = dict(state_dict_fp8(compiled))
    assert exported["turned"].dtype is exported["scaled"].dtype is torch.float32
    assert exported["plain.weight"].dtype is torch.float8_e4m3fn


@pytest.mark.parametrize(("recipe", "shape"), [("delayed", (4,)), ("rowwise", (4, 96, 1))])
def test_experts_parameters_under_autocast_and_modules_compiled_one_by_one(recipe, shape):
    def experts(m, tokens):
        x = F.one_hot(tokens.flatten(), 64).to(torch.bfloat16)
        return torch._grouped_mm(x, m.up.transpose(-2, -1), torch.tensor([8, 8, 24, 32], dtype=torch.int32))

    _, compiled, tokens = trained(recipe, Net(experts, up=nn.Parameter(torch.randn(4, 96, 64, dtype=torch.bfloat16))))
    (gemm,), exported = evaluated(compiled, tokens)
    assert tuple(exported["up_scale"].shape) == shape
    assert torch.equal(bits(exported["up"]), bits(gemm.b[:, :96, :64]))
    assert torch.equal(exported["up_scale"].flatten(), gemm.scale_b.flatten())
    with torch.autocast("cpu", torch.bfloat16):
        _, compiled, _ = trained(recipe, chain(128, 128))
        (gemm,), exported = evaluated(compiled, tokens)
    assert torch.equal(bits(exported["1.weight"]), bits(gemm.b)), "of the Parameter itself"
    model = Model()
    for layer in model.layers[:2]:
        fp8_compile(layer, recipe, backend="aot_eager", in_place=True)
    model(tokens).sum().backward()
    dtypes = [dict(state_dict_fp8(model))[f"layers.{i}.weight"].dtype for i in range(3)]
    assert dtypes == [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32]


def test_an_export_needs_the_memory_of_one_layer(tmp_path):
    """Whatever number of layers there is."""
    peaks = []
    for depth in (1, 6):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(depth))).bfloat16()
        compiled = fp8_compile(model, "blockwise", backend="aot_eager")
        with torch.no_grad():
            compiled(torch.randn(16, 256, dtype=torch.bfloat16))
        peaks.append(allocated(lambda compiled=compiled: export_fp8(compiled, tmp_path))[1])
        torch._dynamo.reset()
    assert 256 * 256 <= peaks[0] <= peaks[1] <= 1.01 * peaks[0]


def test_wrong_arguments(tmp_path):
    _, compiled, _ = trained("rowwise")
    (tmp_path / "file").write_text("")
    fresh = fp8_compile(Model(), "rowwise", backend="aot_eager")
    function = fp8_compile(lambda x: x @ x, "rowwise", backend="aot_eager")
    for call, message in (
        (
            lambda: export_fp8(compiled, tmp_path, "compressed_tensors"),
            "is 'compressed_tensors'. Did you mean 'compressed-tens",
        ),
        (lambda: export_fp8(compiled, tmp_path, max_shard_bytes="5GB"), "max_shard_bytes is '5GB'"),
        (lambda: export_fp8(compiled, tmp_path, "fp8"), "has one per tensor or per 128x128 block"),
        (lambda: export_fp8(compiled, tmp_path / "file"), "is a file; pass a folder"),
        (lambda: state_dict_fp8(fresh), "Call the compiled model before"),
        (lambda: state_dict_fp8(function), "compiled function has no Parameters"),
    ):
        with pytest.raises(ExportError, match=message):
            call()
    with pytest.raises(NotCompiledError):
        state_dict_fp8(nn.Linear(2, 2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]
