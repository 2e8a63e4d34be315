"""Expected speed-ups of a plan's GEMMs: from a device of round numbers, by hand; and what `min_speedup` makes of them.

The cost model itself is tested in `test_cost.py`; here it is what a plan asks of it: which casts, shared by how many GEMMs.
"""

import dataclasses

import pytest
import torch
from torch import nn

from fp8pass import cost, fp8_compile, inspect
from fp8pass.graph.gemms import Sharded
from fp8pass.graph.origin import TensorName
from fp8pass.rewrite.plan import KeptWeight
from fp8pass.rewrite.speedup import casts_of_kept
from fp8pass.schemes.copies import Layout
from fp8pass.weights.cache import WeightTensor
from tests.support.devices import TOY

M, K = 256, 128

# Slow enough at everything that latencies do not matter; bytes cost more than operations.
TOY = dataclasses.replace(
    TOY, num_sms=1, bf16_flops=1e9, fp8_flops=2e9, fp8_accurate_flops=1.6e9, row_wise_flops=1.8e9,
    blockwise_flops=1.5e9, memory_bandwidth=1e7, transpose_bandwidth=0.5e7, kernel_latency=1e-3, bf16_gemm_latency=1e-9,
    fp8_gemm_latency=1e-9,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _toy_device(monkeypatch):
    monkeypatch.setattr(cost, "device_for", lambda device: TOY)


class Fan(nn.Module):
    def __init__(self, *widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(K, n, bias=False) for n in widths)

    def forward(self, x):
        return [layer(x) for layer in self.layers]


def inspected(model, x=None, recipe="delayed", trains=False, **options):
    compiled = fp8_compile(model, recipe, backend="aot_eager", **{"weight_copies": "save", **options})
    with torch.set_grad_enabled(trains):
        compiled(torch.randn(M, K) if x is None else x)
    return inspect(compiled)


def speedups(model, x=None, **options):
    """Module -> expected speed-up of its forward GEMM, or the reason's kind."""
    gemms = [g for g in inspected(model, x, **options).gemms if g.role == "output"]
    return {g.module.removeprefix("layers."): g.reason.partition(":")[0] if g.reason else g.speedup for g in gemms}


def seconds(m, n, k, kind="tensor_wise", fast=True, out_bytes=4):
    gemm = cost.GemmShape(m=m, n=n, k=k, out_bytes=out_bytes)
    return cost.gemm_seconds(gemm, TOY, kind, fast_accum=fast)


def cast(elements, copies=1, kernel=True, read_bytes=4, transposes=False):
    """One read of `read_bytes` per element and a byte per copy, by a kernel or within another one."""
    bandwidth = 0.5e7 if transposes else 1e7
    return elements * (read_bytes * kernel + copies) / bandwidth + 1e-3 * kernel


def test_the_shares_of_casts_in_inference_by_hand():
    """Three linears read an input of the graph: each bears a third of its cast, and all of its weight's."""
    found = speedups(Fan(64, 96, 128))
    for i, n in enumerate((64, 96, 128)):
        expected = seconds(M, n, K, "bf16") / (seconds(M, n, K) + cast(M * K) / 3 + cast(n * K))
        assert found[str(i)] == pytest.approx(expected)
    # A cast within its producer's kernel costs what it writes; current scaling reads a tensor once more.
    found = speedups(nn.Sequential(nn.Linear(K, 64, bias=False), nn.Tanh(), nn.Linear(64, 96, bias=False)))
    expected = seconds(M, 96, 64, "bf16") / (seconds(M, 96, 64) + cast(M * 64, kernel=False) + cast(96 * 64))
    assert found["2"] == pytest.approx(expected)
    more = M * K * 4 / 1e7 + 1e-3 + 64 * K * 4 / 1e7 + 1e-3
    expected = seconds(M, 64, K, "bf16") / (seconds(M, 64, K) + cast(M * K) + cast(64 * K) + more)
    assert speedups(Fan(64), recipe="current")["0"] == pytest.approx(expected)


def test_a_training_graph_shares_each_tensor_between_its_gemms():
    """The input is read by output and grad_weight GEMMs, as it lies and transposed; the weight by output and grad_input."""
    x = torch.randn(M, K, requires_grad=True)
    compiled = fp8_compile(Fan(64), "delayed", backend="aot_eager", weight_copies="save")
    compiled(x)[0].sum().backward()
    found = {g.role: g.speedup for g in inspect(compiled).gemms}
    share_x, share_w = (cast(elements, copies=2, transposes=True) / 2 for elements in (M * K, 64 * K))
    expected = seconds(M, 64, K, "bf16") / (seconds(M, 64, K) + share_x + share_w)
    assert found["output"] == pytest.approx(expected)
    assert found["grad_input"] < seconds(M, K, 64, "bf16") / (seconds(M, K, 64, fast=False) + share_w)
    assert found["grad_weight"] < seconds(64, K, M, "bf16") / (seconds(64, K, M, fast=False) + share_x)


def test_cached_weights_that_train_are_cast_in_each_step():
    """Their copies last until the optimizer has written to them; those of frozen weights, and of all in inference, for good."""
    x, share_x = torch.randn(M, K, requires_grad=True), cast(M * K, copies=2, transposes=True) / 2
    bf16, gemm = seconds(M, 64, K, "bf16"), seconds(M, 64, K)
    share_w = cast(64 * K, copies=2, transposes=True) / 2
    for model, trains, expected in (
        (Fan(64), True, gemm + share_x + share_w),
        (Fan(64).requires_grad_(False), True, gemm + cast(M * K)),
        (Fan(64), False, gemm + cast(M * K)),
    ):
        assert speedups(model, x, trains=trains, weight_copies="cache")["0"] == pytest.approx(bf16 / expected)


def test_of_a_gathered_weight_each_rank_casts_its_shard():
    """With one scale the columnwise copy is made of the bytes that have travelled; with two, both travel."""
    sharded = Sharded(4, 25, 25 * K, None, None)
    whole = cost.CastShape(elements=97 * K, in_bytes=4, copies=2, transposes=True, reads=2, num_readers=2)
    rows, columns = Layout(False), Layout(True)
    kept = WeightTensor(0, (97, K), None, None, TensorName("0", "weight"), is_gathered=True)
    one, both = (KeptWeight(None, held, kept, sharded, is_static=False) for held in ((rows,), (rows, columns)))
    shard, turned = casts_of_kept(whole, one)
    assert shard == dataclasses.replace(whole, elements=97 * K // 4, copies=1, transposes=False)
    assert turned == dataclasses.replace(whole, in_bytes=1, copies=1, reads=1)
    assert casts_of_kept(whole, both) == [dataclasses.replace(whole, elements=97 * K // 4)]


def test_the_graphs_speedup_is_that_of_the_sums():
    report = inspected(Fan(64, 128), rules={"layers.0": None})
    (graph,) = report.graphs
    high, low = seconds(M, 64, K, "bf16"), seconds(M, 128, K) + cast(M * K) + cast(128 * K)
    expected = (high + seconds(M, 128, K, "bf16")) / (high + low)
    assert graph.speedup == pytest.approx(expected)
    assert report.speedup == pytest.approx(expected)
    assert report.to_dict()["speedup"] == report.speedup
    assert f"Expected speed-up of all GEMMs, with their casts: {expected:.2f}" in str(report)
    assert [g.speedup for g in report.gemms] == [None, pytest.approx(seconds(M, 128, K, "bf16") / low)]


# -- min_speedup


def test_what_is_expected_to_lose_stays_and_says_why_and_dynamic_sizes_have_no_estimate():
    assert speedups(Fan(32))["0"] < 1, "off by default"
    report = inspected(Fan(32), min_speedup=1.0)
    (gemm,) = report.gemms
    assert gemm.reason.startswith("slow: expected speed-up 0.")
    assert "min_speedup=1.0" in gemm.reason
    assert "rule" in gemm.reason
    assert report.speedup == 1.0
    report = inspected(Fan(64), dynamic=True, min_speedup=1e9)
    (gemm,) = report.gemms
    assert isinstance(gemm.m, str)
    assert gemm.quantized, "nothing is known to be slow"
    assert gemm.speedup is report.speedup is None
    assert "Expected speed-up" not in str(report)


def test_what_loses_its_company_is_judged_again():
    """A GEMM bears more of a shared cast when another reader has left: until nothing changes any more."""
    widths = (64, 96, 320)
    bf16 = [seconds(M, n, K, "bf16") for n in widths]

    def speedup(i, readers):
        n = widths[i]
        return bf16[i] / (seconds(M, n, K) + cast(M * K) / readers + cast(n * K))

    bound = (speedup(0, 3) + speedup(1, 3)) / 2  # only the first is below at first
    assert speedup(1, 2) < bound < speedup(1, 3), "the second is, once the first has left"
    found = speedups(Fan(*widths), min_speedup=bound)
    assert found["0"] == found["1"] == "slow"
    alone = speedup(2, 1)
    assert found["2"] == (pytest.approx(alone) if alone >= bound else "slow")


def test_rules_overrule_min_speedup_and_selection_comes_first():
    found = speedups(Fan(32, 48), min_speedup=1e9, rules={"layers.0": "current"})
    assert found["1"] == "slow"
    assert isinstance(found["0"], float)
    assert speedups(Fan(16), min_speedup=1e9)["0"] == "thin"
