"""What the compiler makes of the Triton kernels on a machine without a GPU: conversions, barriers.

Wide accesses of casts: test_kernel_cost.py. What kernels take: test_limits.py. The launch wrappers run on CPU tensors with
Triton's `run` replaced by a recorder; see benchmarks/variants.py.
"""

import re

import pytest
import torch

from benchmarks.variants import Launch, compile_launch, recorded
from lowering import hardware
from lowering.formats import E4M3, E5M2
from tests.lowering.kernel_cases import kernel

pytestmark = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")


def call(name: str, *arguments, **options) -> list[Launch]:
    return recorded(kernel(name), *arguments, **options)


X, SCALE = torch.empty((4096, 4096), dtype=torch.bfloat16), torch.tensor(2.0)
BOTH, AMAX, SQUARES = {"columnwise": True}, {"with_amax": True}, {"granularity": "block_128x128"}
HISTORY, VECTOR = torch.zeros(1024, 1008)[:, :1000], torch.zeros(1000)
BOUNDARY = "update_scales", (HISTORY, VECTOR, VECTOR), {"num_non_finite": VECTOR.int(), "algo": "max", "margin": 1}


@pytest.mark.parametrize("arch", [89, 90])
@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("cast", ([X], [SCALE], E5M2), AMAX),
        ("cast_with_scales", ([X], E4M3), {"granularity": "block_1x32", **BOTH}),
        ("cast_with_scales", ([X] * 3, E4M3), SQUARES | BOTH),
    ],
)
def test_conversions_are_one_piece_of_ptx(name, arguments, options, arch):
    """NOTE [one piece of PTX] in lowering/formats.py: by it alone, and not by way of float16."""
    ptx = compile_launch(call(name, *arguments, **options)[0], arch).asm["ptx"]
    pieces = re.findall(r"\{ \.reg \.b16 lo, hi; .* mov\.b32 %r\d+, \{lo, hi\}; \}", ptx)
    assert len(re.findall(r"cvt\.\S*e[45]m[23]", ptx)) == 2 * len(pieces) > 0
    assert "f16.f32" not in ptx.replace("bf16.f32", "")


def test_the_step_boundary_has_its_barriers_and_rounds_its_quotients():
    """One between the loads and the stores of a step, one before the staging row is cleared; reductions add their own
    later, so these are counted before."""
    name, arguments, options = BOUNDARY
    asm = compile_launch(call(name, *arguments, **options)[0], 90).asm
    order = re.findall(r"\b(?:gpu|ttg)\.\w*(barrier)|tt\.(store)", asm["ttgir"])
    assert ["".join(names) for names in order] == ["barrier", "store", "barrier", "store", "store", "store", "store"]
    assert "div.rn.f32" in asm["ptx"]
