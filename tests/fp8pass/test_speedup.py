"""Expected speed-ups of a plan's GEMMs: from a device of round numbers, by hand; and what `min_speedup` makes of them.

The cost model itself is tested in `test_cost.py`; here it is what a plan asks of it: which casts, shared by how many GEMMs.
"""

import dataclasses

import pytest
import torch
from torch import nn

from fp8pass import cost, fp8_compile, inspect
from tests.support.devices import TOY
from tests.support.models import mlp

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


def inspected(model, **options):
    compiled = fp8_compile(model, "delayed", backend="aot_eager", weight_copies="save", **options)
    with torch.no_grad():
        compiled(torch.randn(M, K))
    return inspect(compiled)


def speedups(model, **options):
    """Module -> expected speed-up of its forward GEMM, or the reason's kind."""
    gemms = [g for g in inspected(model, **options).gemms if g.role == "output"]
    return {g.module.removeprefix("layers."): g.reason.partition(":")[0] if g.reason else g.speedup for g in gemms}


def seconds(m, n, k, kind="tensor_wise"):
    return cost.gemm_seconds(cost.GemmShape(m=m, n=n, k=k, out_bytes=4), TOY, kind, fast_accum=True)


def cast(elements, kernel=True):
    """One read of four bytes per element, and a byte for its copy, by a kernel or within another one."""
    return elements * (4 * kernel + 1) / 1e7 + 1e-3 * kernel


def test_the_shares_of_casts_in_inference_by_hand():
    """Three linears read an input of the graph: each bears a third of its cast, and all of its weight's."""
    found = speedups(Fan(64, 96, 128))
    for i, n in enumerate((64, 96, 128)):
        expected = seconds(M, n, K, "bf16") / (seconds(M, n, K) + cast(M * K) / 3 + cast(n * K))
        assert found[str(i)] == pytest.approx(expected)
    # A cast within its producer's kernel costs what it writes.
    found = speedups(mlp(K, 64, 96, bias=False))
    expected = seconds(M, 96, 64, "bf16") / (seconds(M, 96, 64) + cast(M * 64, kernel=False) + cast(96 * 64))
    assert found["2"] == pytest.approx(expected)


# -- min_speedup


def test_what_is_expected_to_lose_stays_and_says_why_and_dynamic_sizes_have_no_estimate():
    assert speedups(Fan(32))["0"] < 1, "off by default"
    (gemm,) = inspected(Fan(32), min_speedup=1.0).gemms
    assert gemm.reason.startswith("slow: expected speed-up 0.")
    assert "min_speedup=1.0" in gemm.reason
    report = inspected(Fan(64), dynamic=True, min_speedup=1e9)
    assert [(g.quantized, g.speedup) for g in report.gemms] == [(True, None)], "nothing is known to be slow"
    assert report.speedup is None
    assert "Expected speed-up" not in str(report)


def test_rules_overrule_min_speedup_and_selection_comes_first():
    found = speedups(Fan(32, 48), min_speedup=1e9, rules={"layers.0": "current"})
    assert found["1"] == "slow"
    assert isinstance(found["0"], float)
    assert speedups(Fan(16), min_speedup=1e9)["0"] == "thin"
