"""Estimates of models that are not run: they agree with what a compiled model says, and equal layers count in full."""

import dataclasses
import json
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8pass
from benchmarks.models import LlamaBlock as Block
from fp8pass.__main__ import main
from fp8pass.cost import B200, H200, Device
from fp8pass.errors import OptionError, RecipeError
from fp8pass.graph.origin import Path
from fp8pass.recipes import PRESETS
from fp8pass.rules import parse_rules
from fp8pass.runtime.dynamo_graphs import copied
from fp8pass.tools import estimation, repeats
from fp8pass.tools.estimation import GemmEstimate, RecipeEstimate
from fp8pass.tools.repeats import copies_of, kept_positions
from lowering import hardware
from tests.support.cases import rest
from tests.support.models import BrokenBlock, LlamaBlock, Net, mlp

pytestmark = pytest.mark.filterwarnings("ignore:.*lru_cache.*:UserWarning")


class Tower(nn.Module):
    """Blocks, every `wide`-th with another width, an embedding and a head over it."""

    def __init__(self, layers=6, wide=0, checkpointed=False):
        super().__init__()
        self.tokens = nn.Embedding(512, 128)
        self.layers = nn.ModuleList(LlamaBlock(ffn=512 if wide and i % wide == wide - 1 else 256) for i in range(layers))
        self.head = nn.Linear(128, 512, bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def on_meta(make, *args, **kwargs):
    with torch.device("meta"):
        return make(*args, **kwargs).bfloat16()


def tokens(count=256):
    return torch.zeros(1, count, dtype=torch.long, device="meta")


def figures(estimation):
    """Everything that a recipe's estimate holds, in numbers, by name, but the bytes that are saved."""
    by_recipe = {}
    for name, recipe in estimation.recipes.items():
        gemms = {(g.record.module, g.record.role): (g.record.reason, g.expected) for g in recipe.gemms}
        assert len(gemms) == len(recipe.gemms)
        chosen = {(g.record.module, g.record.role): (g.record.reason, g.expected) for g in recipe.chosen}
        by_recipe[name] = (gemms, chosen)
    sums = [f"{x:.9g}" for x in (estimation.attention_seconds, estimation.bf16_seconds)]
    return by_recipe, estimation.bf16_saved_bytes, sums


@pytest.mark.parametrize(
    ("recipe", "layers", "wide", "num_kept"),
    [("delayed", 4, 0, 3), ("blockwise", 9, 2, 5), ("current", 9, 5, 7)],
    ids=["alike", "alternating", "seldom another"],
)
def test_one_layer_of_each_kind_gives_what_all_layers_give(monkeypatch, recipe, layers, wide, num_kept):
    model, found = on_meta(Tower, layers=layers, wide=wide), []
    monkeypatch.setattr(estimation, "cut_repeats", lambda graph: found.append(repeats.cut_repeats(graph)) or found[-1])
    cut = fp8pass.estimate(model, tokens(), recipe=recipe)
    monkeypatch.setattr(estimation, "cut_repeats", lambda graph: {})
    whole = fp8pass.estimate(model, tokens(), recipe=recipe)
    kept = found[0]
    assert len(kept) == num_kept
    assert sorted(i for indices in kept.values() for i in indices) == list(range(layers))
    assert figures(cut) == figures(whole)
    # Scales are saved in one vector for all tensors of the graph.
    assert cut.recipes[recipe].saved_bytes == pytest.approx(whole.recipes[recipe].saved_bytes, rel=1e-3)
    assert len(cut.recipes[recipe].gemms) == layers * 21 + 3


def test_equal_layers_are_left_out():
    kept = []

    def backend(gm, _):
        kept.append(repeats.cut_repeats(copied(gm).graph))
        return gm.forward

    torch.compile(on_meta(Tower, layers=5), backend=backend, dynamic=False)(tokens())
    assert len(kept[0]) == 3
    assert sorted(i for indices in kept[0].values() for i in indices) == list(range(5))


def test_layers_whose_results_are_read_later_all_stay():
    def forward(m, x):
        results = [x]
        for layer in m.layers:
            results.append(layer(results[-1]))
        return torch.stack(results[1:]).sum()

    model = Net(forward, layers=nn.ModuleList(nn.Linear(64, 64) for _ in range(5)))
    found = fp8pass.estimate(model, torch.empty(64, 64, requires_grad=True), recipe="current")
    assert len(found.recipes["current"].gemms) == 15


def test_which_layers_are_kept_and_for_which_they_stand():
    rows = {"": [], "A": [0], "AB": [0, 1], "ABBBC": [0, 3, 4], "ABCBCBCD": [0, 5, 6, 7], "ABCDE": [0, 1, 2, 3, 4]}
    assert {row: kept_positions(row) for row in rows} == rows
    kept = {Path("self", "stages.2"): (2, 11), Path("self", "stages.2.blocks.0"): (0, 1)}
    paths = copies_of(Path("self", "stages.2.blocks.0.mlp"), kept)
    assert sorted(path.below for path in paths) == [f"stages.{i}.blocks.{j}.mlp" for i in (11, 2) for j in (0, 1)]
    assert copies_of(Path("self", "stages.20.blocks.0"), kept) == [Path("self", "stages.20.blocks.0")]
    assert copies_of(None, kept) == []


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_an_estimate_is_what_inspect_says_of_the_compiled_model(recipe):
    """For the graph on the CPU, of which the cost model takes an H200."""
    model = LlamaBlock().bfloat16()
    x = torch.randn(2, 256, 128, dtype=torch.bfloat16, requires_grad=True)
    compiled = fp8pass.fp8_compile(model, recipe, backend="aot_eager")
    compiled(x).sum().backward()
    inspected = fp8pass.inspect(compiled)
    found = fp8pass.estimate(model, x, recipe=recipe).recipes[recipe]
    assert found.speedup == pytest.approx(inspected.speedup)
    records = [g.record for g in found.gemms]
    for ours, theirs in zip(records, inspected.gemms, strict=True):
        assert (ours.module, ours.role, ours.speedup) == (theirs.module, theirs.role, theirs.speedup)
    # Its attention keeps what a GPU's keeps, not what the CPU's does: one number for each row, in float32, in both.
    assert found.saved_bytes == inspected.graphs[0].saved_bytes


class Attends(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(64, 192), nn.Linear(64, 192), nn.Linear(64, 128)
        self.options = options

    def forward(self, x, mask=None):
        q, k, v = (w(x).unflatten(-1, (4, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, mask, **self.options).sum()


@pytest.mark.parametrize(
    ("options", "has_mask"), [({"is_causal": True, "dropout_p": 0.1}, False), ({}, True)], ids=["causal, dropout", "mask"]
)
def test_attention_stays_one_operation(options, has_mask):
    """Values are narrower than queries, for which the CPU has no fused kernel, nor has it one with dropout."""
    x = torch.empty(2, 256, 64, requires_grad=True)
    mask = torch.zeros(256, 256, requires_grad=True) if has_mask else None
    found = fp8pass.estimate(Attends(**options), x, mask, recipe="current")
    assert {g.record.op for g in found.recipes["current"].gemms} <= {"mm", "addmm"}
    assert len(found.recipes["current"].gemms) == 9
    scores = 2 * 4 * 256 * 256 * (0.5 if options.get("is_causal") else 1)
    forward, backward = 2 * scores * (48 + 32), 5 * scores * (48 + 32)
    seconds = forward / (0.75 * H200.bf16_flops) + backward / (0.6 * H200.bf16_flops)
    assert found.attention_seconds == pytest.approx(seconds)
    assert ("gives its attention a mask, so all scores count" in " ".join(str(found).split())) == has_mask


def test_the_model_is_not_changed_and_its_checkpointed_attention_counts():
    model = on_meta(mlp)
    keys, before = list(model.state_dict()), dict(model.named_parameters())
    fp8pass.estimate(model, torch.empty(64, 64, dtype=torch.bfloat16), recipe="delayed")
    assert list(model.state_dict()) == keys
    assert all(before[name] is parameter and parameter.is_meta for name, parameter in model.named_parameters())
    assert not any(parameter.grad is not None for parameter in before.values())
    found, plain = (
        fp8pass.estimate(on_meta(Tower, layers=2, checkpointed=given), tokens(), recipe="current") for given in (True, False)
    )
    assert plain.attention_seconds > 0
    assert found.attention_seconds == pytest.approx(plain.attention_seconds)
    assert {g.record.op for g in found.recipes["current"].gemms} == {g.record.op for g in plain.recipes["current"].gemms}


def test_tied_weights_and_graph_breaks():
    model = on_meta(Tower, layers=1)
    model.head.weight = model.tokens.weight
    found = fp8pass.estimate(model, tokens(), recipe="current")
    assert {g.record.reason.partition(":")[0] for g in found.recipes["current"].gemms if g.record.module == "head"} == {"head"}
    found = fp8pass.estimate(BrokenBlock(64, 64), torch.empty(64, 64, requires_grad=True), recipe="delayed")
    names = sorted(f"{g.record.module}:{g.record.role}" for g in found.recipes["delayed"].gemms)
    assert names == [f"{module}:{role}" for module in ("down", "up") for role in ("grad_input", "grad_weight", "output")]


def test_min_speedup_and_the_rules_that_do_the_same():
    """Small GEMMs lose, large ones gain: the rules leave the same GEMMs in high precision as min_speedup does."""

    def stack(size):
        return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(2)))

    model = on_meta(lambda: Net(lambda m, x, y: m.layers(x).sum() + m.small(y).sum(), layers=stack(4096), small=stack(64)))
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, requires_grad=True, device="meta")
    y = torch.empty(64, 64, dtype=torch.bfloat16, requires_grad=True, device="meta")
    found = fp8pass.estimate(model, x, y, recipe="current")
    one = found.recipes["current"]
    assert set(one.rules) == {f"small.*:{role}" for role in ("output", "grad_input", "grad_weight")}
    assert one.best_speedup > one.speedup
    assert "min_speedup=1.0" in found.call
    ruled = fp8pass.estimate(model, x, y, recipe="current", rules=one.rules).recipes["current"]
    assert ruled.speedup == pytest.approx(one.best_speedup)


LOSES = [("h100", (12, 6)), ("h100", (12, 8)), ("rtx4090", (13, 0))]


@pytest.mark.parametrize(
    ("device", "cuda"), [*LOSES, ("b200", (13, 0)), *rest((device, (13, 0)) for device in ("h100", "rtx5090"))]
)
def test_no_rowwise_gemm_that_is_let_through_is_slower_than_bf16(device, cuda, monkeypatch):
    """Of an 8B block: where scales of rows are applied to a float32 result, GEMMs with few operations per element lose."""
    monkeypatch.setattr(hardware, "cuda_version", lambda: cuda)
    x = torch.empty(1, 16384, 4096, dtype=torch.bfloat16, requires_grad=True, device="meta")
    block = on_meta(Block, 4096, 14336, 32, 8)
    found = fp8pass.estimate(block, x, device=device, recipe="rowwise").recipes["rowwise"]
    let_through = [g.expected.speedup for g in found.chosen if g.record.quantized]
    assert min(let_through) >= 1
    slower = {(g.record.module, g.record.role) for g in found.gemms if g.expected.speedup < 1}
    assert slower == ({("wk", "grad_input"), ("wv", "grad_input")} if (device, cuda) in LOSES else set())
    assert len(let_through) == len(found.gemms) - len(slower) == 21 - len(slower)


@pytest.mark.parametrize(
    ("gemms", "expected"),
    [
        ({"0": True, "up.small": False}, {"0"}),  # `*` would match both
        ({"0": True, "1": True}, {"*"}),
        ({"a.0.w": True, "a.1.w": False}, {"a.0.w"}),
        ({"a.0.w": True, "a.1.w": True, "a.0.b.w": True}, {"a.0.w", "a.1.w", "a.*.b.w"}),
        ({"a.0.w": True, "a.1.w": True, "a.x": False}, {"a.*.w"}),
        ({"w[0]": True, "w0": False}, {"w[[]0]"}),
        ({"": True, "w": False}, set()),  # ":output" would match all
    ],
)
def test_rules_match_no_other_gemm(gemms, expected):
    given = [
        GemmEstimate(types.SimpleNamespace(module=module, role="output", reason="slow: 0.5" if slow else None), None)
        for module, slow in gemms.items()
    ]
    rules = RecipeEstimate("current", chosen=given).rules
    assert set(rules) == {f"{name}:output" for name in expected}
    parsed = parse_rules("current", rules)
    assert {m for m in gemms if m and parsed.recipe_for(m, "output") is None} == {m for m, slow in gemms.items() if m and slow}


def test_devices():
    model, x = on_meta(mlp, 1024, 4096, 1024), torch.empty(8192, 1024, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = fp8pass.estimate(model, x, device="RTX 4090", recipe="current")
    assert found.device.name == "NVIDIA GeForce RTX 4090"
    fast = Device(**{**{f: getattr(H200, f) for f in H200.__dataclass_fields__}, "name": "of mine", "fp8_flops": 9e15})
    assert fp8pass.estimate(model, x, device=fast, recipe="current").recipes["current"].speedup > (
        fp8pass.estimate(model, x, recipe="current").recipes["current"].speedup
    )
    everything = fp8pass.estimate(on_meta(nn.Linear, 64, 64), x[:, :64].detach().requires_grad_(), device=B200)
    assert set(everything.recipes) == set(PRESETS)
    assert everything.refused == {}
    assert "mxfp8: not on this device" in str(dataclasses.replace(found, refused={"mxfp8": "it is another"}))


@fp8pass.recipes.recipe.recipe
class Mine(fp8pass.MXFP8BlockScaling):
    """MXFP8 by another name."""

    name = "mine"


@pytest.mark.parametrize(
    "arguments", [{"recipe": "all"}, {"recipe": Mine()}, {"recipe": "current", "rules": {"1": "mxfp8"}}], ids=str
)
def test_what_the_device_cannot_run_is_refused_by_what_it_does(arguments):
    """By the GEMMs that are asked for, whatever the recipe is called and whether a rule names it."""
    model, x = on_meta(nn.Sequential, nn.Linear(64, 128), nn.Linear(128, 64)), on_meta(torch.empty, 64, 64)
    reason = "it has no GEMM with 1x32 scales, which"
    if arguments["recipe"] == "all":
        found = fp8pass.estimate(model, x, **arguments)
        assert found.refused["mxfp8"].startswith(reason)
        assert (*found.recipes, *found.refused) == tuple(PRESETS)
        return
    with pytest.raises(OptionError, match=f"does not run on NVIDIA H200: {reason} [01] needs. Use another"):
        fp8pass.estimate(model, x, **arguments)
    assert fp8pass.estimate(model, x, device="b200", **arguments).refused == {}


class Decides(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x * 2 if x.sum().item() > 0 else x


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"device": "h300"}, OptionError, "device is 'h300'.*'h[12]00'.*h100, h200, b200, l40s, rtx4090"),
        ({"device": 9}, OptionError, "device is 9"),
        ({"recipe": "mxfp8"}, OptionError, "mxfp8.* does not run on NVIDIA H200"),
        ({"recipe": "dlayed"}, RecipeError, "delayed"),
        ({"select": "some"}, OptionError, "select"),
        ({"model": torch.relu}, OptionError, r"pass an nn\.Module"),
        ({"model": Decides(), "recipe": "current"}, OptionError, "depends on values"),
    ],
)
def test_wrong_arguments(arguments, error, text):
    given = {"model": mlp(), **arguments}
    with pytest.raises(error, match=text):
        fp8pass.estimate(given.pop("model"), torch.empty(64, 64, requires_grad=True), **given)


def test_texts(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = fp8pass.estimate(on_meta(Tower, layers=6), tokens(), recipe="delayed")
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "layers.0-5.gate" in text
    assert "an estimate" in text
    assert repr(found) == text.rstrip("\n")
    page = found._repr_html_()
    assert page.count("<tr>") == (1 + 2) + (1 + 8)  # two recipes, seven linears of a block and the head, and a heading each
    held = json.loads(found.to_json())
    assert held["recipes"]["delayed"]["gemms"][0]["module"] == "layers.0.wq"
    total = held["recipes"]["delayed"]["gemms"]
    assert sum(g["bf16_seconds"] for g in total) == pytest.approx(held["bf16_seconds"])


@pytest.mark.parametrize(
    ("config", "positions"), [("BertConfig", 512), ("GPT2Config", 1024), ("RobertaConfig", 510), ("LlamaConfig", None)]
)
def test_texts_are_no_longer_than_the_positions_of_the_model(config, positions, capsys):
    pytest.importorskip("transformers")
    sizes = ["num_hidden_layers=1", "vocab_size=64"]
    assert main(["estimate", config, *sizes, "--recipe", "current", "--tokens", "8192", "--json"]) == 0
    out, err = capsys.readouterr()
    assert ("note:" in err) == (positions is not None)
    if positions is not None:
        assert f"{config} has {positions} positions: texts of {positions} tokens, not of 8192" in err
        rows = {g["m"] for g in json.loads(out)["recipes"]["current"]["gemms"] if g["role"] == "output"}
        assert max(rows) == 8192 // positions * positions
