"""The fused kernels compile for the GPU, and their loads and stores are as wide as meant."""

import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from benchmarks.cross_codegen import capture, compile_kernels, report
from lowering import hardware
from lowering.formats import E4M3, E5M2
from lowering.inductor import register_lowerings

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="needs Triton to generate CUDA code")

ops = torch.ops.lowering


def kernels_of(function, *args, folder, target=90):
    register_lowerings()
    with capture() as graphs:
        torch.compile(function, dynamic=False)(*args)
    (generated,) = report(graphs)
    return compile_kernels(generated.code, folder, target)


def widths(ptx: str, instruction: str) -> Counter:
    return Counter(re.findall(rf"{instruction}\.global(?:\.L1::\w+|\.L2::\w+)*((?:\.v\d)?\.b\d+)", ptx))


@pytest.mark.parametrize("target", [89, 90])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_tile_is_stored_sixteen_bytes_at_a_time_in_both_layouts(dtype, target, tmp_path):
    def function(x, scale):
        return ops.cast([F.silu(x)], [scale], dtype, columnwise=True, with_amax=True)

    x = torch.zeros(1024, 2048, dtype=torch.bfloat16)
    kernels = kernels_of(function, x, torch.ones(()), folder=tmp_path, target=target)
    (tile,) = (ptx for name, (ptx, *_) in kernels.items() if "silu" in name and len(widths(ptx, "st")) > 1)
    assert widths(tile, "st")[".v4.b32"] == 2
    assert ".v4.b32" in widths(tile, "ld")
    assert "st.local" not in tile, "registers spilled"


def test_no_generated_kernel_transposes_what_a_row_kernel_stores(tmp_path):
    def function(x, scale):
        return ops.cast([F.rms_norm(x, (1024,))], [scale], E4M3, columnwise=True, with_amax=True)

    kernels = kernels_of(function, torch.zeros(2048, 1024, dtype=torch.bfloat16), torch.ones(()), folder=tmp_path)
    assert kernels
    assert not any(name.startswith("triton_poi") for name in kernels)
