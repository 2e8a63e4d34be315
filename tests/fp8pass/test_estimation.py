"""Estimates of models that are not run: they agree with what a compiled model says, and equal layers count in full."""

import json
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8pass
from fp8pass.cost import H200
from fp8pass.errors import OptionError, RecipeError
from fp8pass.recipes import PRESETS
from fp8pass.rules import parse_rules
from fp8pass.tools import estimation
from fp8pass.tools.estimation import GemmEstimate, RecipeEstimate
from tests.support.models import Decoder, LlamaBlock, Net, Stack

pytestmark = pytest.mark.filterwarnings("ignore:.*lru_cache.*:UserWarning")
TOKENS = torch.zeros(1, 256, dtype=torch.long, device="meta")


def on_meta(make, *args, **kwargs):
    with torch.device("meta"):
        return make(*args, **kwargs).bfloat16()


def gemms_of(found):
    return sorted(
        (g.record.module, g.record.role, str(g.record.reason), str(g.expected)) for g in found.recipes["blockwise"].gemms
    )


def test_one_layer_of_each_kind_gives_what_all_layers_give(monkeypatch):
    model = on_meta(Decoder, layers=9, dim=128, vocabulary=512)
    for i in range(1, 9, 2):
        model.layers[i] = on_meta(LlamaBlock, ffn=512)
    cut = fp8pass.estimate(model, TOKENS, recipe="blockwise")
    monkeypatch.setattr(estimation, "cut_repeats", lambda graph: {})
    whole = fp8pass.estimate(model, TOKENS, recipe="blockwise")
    assert gemms_of(cut) == gemms_of(whole)
    assert len(gemms_of(cut)) == 9 * 21 + 3
    assert cut.bf16_saved_bytes == whole.bf16_saved_bytes
    assert (cut.attention_seconds, cut.bf16_seconds) == pytest.approx((whole.attention_seconds, whole.bf16_seconds), rel=1e-8)
    # Scales are saved in one vector for all tensors of the graph.
    assert cut.recipes["blockwise"].saved_bytes == pytest.approx(whole.recipes["blockwise"].saved_bytes, rel=1e-3)


def test_an_estimate_is_what_inspect_says_of_the_compiled_model():
    """For the graph on the CPU, of which the cost model takes an H200."""
    model = LlamaBlock().bfloat16()
    x = torch.randn(2, 256, 128, dtype=torch.bfloat16, requires_grad=True)
    compiled = fp8pass.fp8_compile(model, "rowwise", backend="aot_eager")
    compiled(x).sum().backward()
    inspected = fp8pass.inspect(compiled)
    found = fp8pass.estimate(model, x, recipe="rowwise").recipes["rowwise"]
    assert found.speedup == pytest.approx(inspected.speedup)
    for ours, theirs in zip((g.record for g in found.gemms), inspected.gemms, strict=True):
        assert (ours.module, ours.role, ours.speedup) == (theirs.module, theirs.role, theirs.speedup)
    # Its attention keeps what a GPU's keeps, not what the CPU's does: one number for each row, in float32, in both.
    assert found.saved_bytes == inspected.graphs[0].saved_bytes


@pytest.mark.parametrize("has_mask", [False, True])
def test_attention_stays_one_operation(has_mask):
    """Values are narrower than queries, for which the CPU has no fused kernel, nor has it one with dropout."""

    def attend(m, x, mask):
        q, k, v = (w(x).unflatten(-1, (4, -1)).transpose(1, 2) for w in (m.q, m.k, m.v))
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=not has_mask, dropout_p=0.0 if has_mask else 0.1)

    model = Net(attend, q=nn.Linear(64, 192), k=nn.Linear(64, 192), v=nn.Linear(64, 128))
    mask = torch.zeros(256, 256, requires_grad=True) if has_mask else None
    found = fp8pass.estimate(model, torch.empty(2, 256, 64, requires_grad=True), mask, recipe="current")
    assert [g.record.op for g in found.recipes["current"].gemms].count("bmm") == 0
    assert len(found.recipes["current"].gemms) == 9
    operations = 2 * 4 * 256 * 256 * (1 if has_mask else 0.5) * (48 + 32)
    seconds = 2 * operations / (0.75 * H200.bf16_flops) + 5 * operations / (0.6 * H200.bf16_flops)
    assert found.attention_seconds == pytest.approx(seconds)
    assert ("gives its attention a mask, so all scores count" in " ".join(str(found).split())) == has_mask


def test_the_model_is_not_changed_and_its_checkpointed_attention_counts():
    x = on_meta(torch.empty, 1, 256, 128).requires_grad_()
    model = on_meta(lambda: Stack((LlamaBlock() for _ in range(2)), use_reentrant=False))
    before = dict(model.named_parameters())
    found = fp8pass.estimate(model, x, recipe="current")
    assert all(before.pop(name) is p and p.is_meta and p.grad is None for name, p in model.named_parameters())
    assert not before
    plain = fp8pass.estimate(Stack(model.layers), x, recipe="current")
    assert 0 < plain.attention_seconds == pytest.approx(found.attention_seconds)


def test_layers_between_graph_breaks_whose_results_are_read_later():
    def forward(m, x):
        results = [x]
        for layer in m.layers:
            results.append(layer(results[-1]))
        torch._dynamo.graph_break()
        return m.last(torch.stack(results[1:]).sum(0))

    model = Net(forward, layers=nn.ModuleList(nn.Linear(64, 64) for _ in range(5)), last=nn.Linear(64, 64))
    found = fp8pass.estimate(model, torch.empty(64, 64, requires_grad=True), recipe="current")
    assert len(found.recipes["current"].gemms) == 18


def test_min_speedup_and_the_rules_that_do_the_same():
    """Small GEMMs lose, large ones gain: the rules leave the same GEMMs in high precision as min_speedup does."""

    def stack(size):
        return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(2)))

    model = on_meta(lambda: Net(lambda m, x, y: m.layers(x).sum() + m.small(y).sum(), layers=stack(4096), small=stack(64)))
    x, y = (on_meta(torch.empty, *shape).requires_grad_() for shape in ((8192, 4096), (64, 64)))
    found = fp8pass.estimate(model, x, y, recipe="current")
    one = found.recipes["current"]
    assert set(one.rules) == {f"small.*:{role}" for role in ("output", "grad_input", "grad_weight")}
    assert one.best_speedup > one.speedup
    assert "min_speedup=1.0" in found.call
    ruled = fp8pass.estimate(model, x, y, recipe="current", rules=one.rules).recipes["current"]
    assert ruled.speedup == pytest.approx(one.best_speedup)


@pytest.mark.parametrize(
    ("slow", "others", "expected"),
    [
        (["0"], ["up.small"], {"0"}),  # `*` would match both
        (["w[0]"], ["w0"], {"w[[]0]"}),
        ([""], ["w"], set()),  # ":output" would match all
    ],
)
def test_rules_match_no_other_gemm(slow, others, expected):
    reasons = dict.fromkeys(slow, "slow: 0.5") | dict.fromkeys(others)
    records = [types.SimpleNamespace(module=module, role="output", reason=reason) for module, reason in reasons.items()]
    rules = RecipeEstimate("current", chosen=[GemmEstimate(record, None) for record in records]).rules
    assert set(rules) == {f"{name}:output" for name in expected}
    parsed = parse_rules("current", rules)
    assert [m for m in reasons if m and parsed.recipe_for(m, "output") is None] == [m for m in slow if m]


def depends(x):
    torch._dynamo.graph_break()
    return x * 2 if x.sum().item() > 0 else x


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        *(({name: 3}, OptionError, f"{name} is 3") for name in ("model", "device")),
        ({"device": "h300"}, OptionError, "device is 'h300'.*'h[12]00'.*h100, h200, b200, l40s, rtx4090"),
        ({"recipe": "dlayed"}, RecipeError, "delayed"),
        ({"model": Net(lambda m, x: depends(x)), "recipe": "current"}, OptionError, "depends on values"),
        ({"recipe": "current", "rules": {"1": "mxfp8"}}, OptionError, "NVIDIA H200: it has no GEMM with 1x32 .* 1 needs. Use"),
    ],
)
def test_wrong_arguments_and_what_the_device_cannot_run(arguments, error, text):
    given = {"model": nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)), **arguments}
    with pytest.raises(error, match=text):
        fp8pass.estimate(given.pop("model"), torch.empty(64, 64, requires_grad=True), **given)


def test_texts_and_the_recipes_that_are_refused(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = fp8pass.estimate(on_meta(Decoder, layers=6, dim=128, vocabulary=512), TOKENS)
    assert found.refused["mxfp8"].startswith("it has no GEMM with 1x32 scales, which")
    assert (*found.recipes, *found.refused) == tuple(PRESETS)
    assert max(map(len, str(found).splitlines())) <= 80
    assert all(part in repr(found) for part in ("layers.0-5.gate", "an estimate", "mxfp8: not on this device"))
    held = json.loads(found.to_json())
    gemms = held["recipes"]["delayed"]["gemms"]
    assert sum(g["bf16_seconds"] for g in gemms) == pytest.approx(held["bf16_seconds"])
