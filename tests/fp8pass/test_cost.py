"""The cost model: GEMMs by hand, a block against what was measured, and the speed-ups that a plan expects."""

import dataclasses

import pytest
import torch
from torch import nn

from benchmarks.models import LlamaBlock
from fp8pass import cost, estimate, fp8_compile, inspect
from lowering.paths import GemmPath
from tests.support.models import mlp

# Round numbers: an SM computes 1e12 FLOP/s in bfloat16.
TOY = cost.Device(
    name="toy",
    compute_capability=(9, 0),
    num_sms=100,
    bf16_flops=100e12,
    fp8_flops=200e12,
    fp8_accurate_flops=160e12,
    row_wise_flops=180e12,
    blockwise_flops=150e12,
    mx_flops=None,
    memory_bandwidth=1e12,
    transpose_bandwidth=0.5e12,
    kernel_latency=2e-6,
    bf16_gemm_latency=4e-6,
    fp8_gemm_latency=6e-6,
)


def product(m, n, k, **options):
    return cost.GemmShape(m=m, n=n, k=k, **options)


def test_gemms_by_hand():
    # 2560 x 2560 is 200 tiles of 128 x 256 for 100 SMs: two full waves.
    operations = 2 * 2560 * 2560 * 4096
    assert cost.gemm_seconds(product(2560, 2560, 4096), TOY, "bf16") == pytest.approx(operations / 100e12 + 4e-6)
    assert cost.gemm_seconds(product(2560, 2560, 4096), TOY, "tensor_wise") == pytest.approx(operations / 200e12 + 6e-6)
    accurate = cost.gemm_seconds(product(2560, 2560, 4096), TOY, "tensor_wise", fast_accum=False)
    assert accurate == pytest.approx(operations / 160e12 + 6e-6)
    read, written = 2 * (12800 + 12800) * 16, 2 * 12800 * 12800
    assert cost.gemm_seconds(product(12800, 12800, 16), TOY, "row_wise") == pytest.approx((read / 2 + written) / 1e12 + 6e-6)
    # 100 tiles, and 110; K is too short for splitting it to pay.
    full, over = (cost.gemm_seconds(product(m, 2560, 256), TOY, "bf16") - 4e-6 for m in (1280, 1408))
    assert [full, over] == pytest.approx([2 * 128 * 256 * 256 / 1e12, 4 * 128 * 256 * 256 / 1e12])
    # 64 groups of 16 rows: nothing but reading weights.
    seconds = cost.gemm_seconds(product(1024, 4096, 4096, groups=64), cost.H200, "tensor_wise")
    moved = 1024 * 4096 + 64 * 4096 * 4096 + 2 * 1024 * 4096
    assert seconds == pytest.approx(moved / cost.H200.memory_bandwidth + cost.H200.fp8_gemm_latency)
    # A kernel behind the GEMM reads its float32 product, or turns its scales.
    by_rows = cost.gemm_seconds(product(2560, 2048, 4096), TOY, "row_wise", path=GemmPath.ROWS_AFTERWARDS)
    wide = cost.gemm_seconds(product(2560, 2048, 4096, out_bytes=4), TOY, "tensor_wise")
    assert by_rows == pytest.approx(wide + (4 + 2) * 2560 * 2048 / 1e12 + 2e-6)
    turned = cost.gemm_seconds(product(2560, 2048, 4096), cost.B200, "block_1x128", path=GemmPath.BLOCKS_BY_MXFP8)
    assert turned == cost.gemm_seconds(product(2560, 2048, 4096), cost.B200, "block_1x32") + cost.B200.kernel_latency


@pytest.mark.parametrize(("recipe", "measured"), [("delayed", 1.44), ("current", 1.39), ("blockwise", 1.24), ("rowwise", 1.33)])
def test_the_estimate_of_a_block_is_near_the_measured_speed_up(recipe, measured):
    """Of Llama-3-8B on an H200, forward and backward, with its attention: docs/benchmarks.md."""
    with torch.device("meta"):
        block = LlamaBlock(4096, 14336, 32, 8).bfloat16()
        x = torch.empty(2, 8192, 4096, dtype=torch.bfloat16, requires_grad=True)
    found = estimate(block, x, device="h200", recipe=recipe).recipes[recipe]
    assert found.speedup_with_attention == pytest.approx(measured, rel=0.1)


def test_devices_are_known_by_name_and_others_say_whose_constants_they_have():
    for name, capability, device in (("H100 80GB HBM3", (9, 0), cost.H100), ("GH200 480GB", (9, 0), cost.H200)):
        assert cost.device_named(f"NVIDIA {name}", capability) is device
    for name, capability, device in (("H20", (9, 0), cost.H100), ("L4", (8, 9), cost.L40S), ("X1000", (13, 0), cost.H200)):
        note = f"NVIDIA {name} has no constants: estimated for an {device.name}"
        assert cost.device_named(f"NVIDIA {name}", capability) == dataclasses.replace(device, note=note)
    note = "device 'cpu' has no constants: estimated for an NVIDIA H200"
    assert cost.device_for(torch.device("cpu")) == dataclasses.replace(cost.H200, note=note)
    with pytest.raises(ValueError, match=r"bf16_flops of the NVIDIA H200 is -1\.0; use a number"):
        dataclasses.replace(cost.H200, bf16_flops=-1.0)


# -- expected speed-ups of a plan's GEMMs: which casts, shared by how many; and what min_speedup makes of them

M, K = 256, 128

# Slow enough at everything that latencies do not matter; bytes cost more than operations.
SLOW = dataclasses.replace(
    TOY, num_sms=1, bf16_flops=1e9, fp8_flops=2e9, fp8_accurate_flops=1.6e9, row_wise_flops=1.8e9,
    blockwise_flops=1.5e9, memory_bandwidth=1e7, transpose_bandwidth=0.5e7, kernel_latency=1e-3, bf16_gemm_latency=1e-9,
    fp8_gemm_latency=1e-9,
)  # fmt: skip


@pytest.fixture
def slow_device(monkeypatch):
    monkeypatch.setattr(cost, "device_for", lambda device: SLOW)


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
    return cost.gemm_seconds(cost.GemmShape(m=m, n=n, k=k, out_bytes=4), SLOW, kind, fast_accum=True)


def cast(elements, kernel=True):
    """One read of four bytes per element, and a byte for its copy, by a kernel or within another one."""
    return elements * (4 * kernel + 1) / 1e7 + 1e-3 * kernel


def test_the_shares_of_casts_in_inference_by_hand(slow_device):
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


def test_what_is_expected_to_lose_stays_and_says_why_and_dynamic_sizes_have_no_estimate(slow_device):
    assert speedups(Fan(32))["0"] < 1, "off by default"
    (gemm,) = inspected(Fan(32), min_speedup=1.0).gemms
    assert gemm.reason.startswith("slow: expected speed-up 0.")
    assert "min_speedup=1.0" in gemm.reason
    report = inspected(Fan(64), dynamic=True, min_speedup=1e9)
    assert [(g.quantized, g.speedup) for g in report.gemms] == [(True, None)], "nothing is known to be slow"
    assert report.speedup is None
    assert "Expected speed-up" not in str(report)


def test_rules_overrule_min_speedup_and_selection_comes_first(slow_device):
    found = speedups(Fan(32, 48), min_speedup=1e9, rules={"layers.0": "current"})
    assert found["1"] == "slow"
    assert isinstance(found["0"], float)
    assert speedups(Fan(16), min_speedup=1e9)["0"] == "thin"
