"""The Triton kernels against the reference: in Triton's interpreter, and on a GPU where there is one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowering import hardware
from tests.lowering import kernel_cases
from tests.lowering.kernel_cases import kernel

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(not hardware.triton_available(), reason="Triton is not installed")


@pytest.fixture(scope="module")
def in_interpreter() -> dict[str, str | None]:
    """The error of each case in Triton's interpreter, which only a process of its own can switch on."""
    command = [sys.executable, "-W", "ignore", "-m", kernel_cases.__name__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@needs_triton
@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_in_the_interpreter(in_interpreter, name):
    assert in_interpreter[name] is None, in_interpreter[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_on_a_gpu(name):
    kernel_cases.CASES[name]("cuda")


def test_no_kernel_counts_tiles_by_a_sum_that_may_overflow():
    """But those of groups, whose rows are counted by int32 offsets and whose columns are a layer's."""
    sources = [p for p in (ROOT / "lowering").rglob("*kernels.py") if "grouped" not in p.parts]
    assert len(sources) == 6
    assert [path.name for path in sources if "tl.cdiv(" in path.read_text()] == []


@pytest.mark.gpu
def test_offsets_beyond_32_bits_on_a_gpu():
    x = torch.zeros(2**31 + 64, dtype=torch.bfloat16, device="cuda")
    x[-1] = -9.0
    assert kernel("amaxes")([x]).item() == 9.0
    q = kernel("quantize")(x, torch.tensor(1.0, device="cuda"), kernel_cases.E4M3)
    assert q[-1].float().item() == -9.0
    far = torch.zeros((2, 2**31), dtype=torch.bfloat16, device="cuda")[:, : 2**27 : 2**20]
    far[1, 5] = 3.0
    kernel_cases.check("cast", [far], [torch.tensor(1.0, device="cuda")], kernel_cases.E4M3)


@needs_triton
def test_int32_holds_every_distance_inside_a_whole_tile():
    from lowering.triton.launch import MAX_STRIDE, is_whole

    def matrix(*strides: int) -> torch.Tensor:
        return torch.empty_strided((256, 128), strides, device="meta")

    far = matrix(MAX_STRIDE, MAX_STRIDE)
    assert sum(stride * (128 - 1) for stride in far.stride()) < 2**31
    assert is_whole([far, matrix(128, 1)], 128, 128)
    assert not is_whole([matrix(MAX_STRIDE + 1, 1), matrix(128, 1)], 128, 128)
    assert not is_whole([matrix(128, 1), matrix(1, MAX_STRIDE + 1)], 128, 128)
    assert not is_whole([matrix(128, 1), matrix(128, 1)[:255]], 128, 128)
