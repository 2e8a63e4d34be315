"""The cost model: GEMMs by hand, and a block against what was measured."""

import dataclasses

import pytest
import torch

from benchmarks.models import LlamaBlock
from fp8pass import cost, estimate
from lowering.paths import GemmPath
from tests.support.devices import TOY


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
