"""lowering.capability: versions parsed, devices judged by their capability, nothing asked at import."""

import subprocess
import sys

import pytest
import torch

from lowering import capability

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """Pretend that torch was built with a CUDA toolkit and that cuda:0 has a capability."""

    def pretend(device_capability: tuple[int, int], cuda: str | None = "12.9") -> None:
        for cached in (capability.cuda_version, capability._capability_of, capability.torch_version):
            cached.cache_clear()
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: device_capability)

    yield pretend
    monkeypatch.undo()
    for cached in (capability.cuda_version, capability._capability_of, capability.torch_version):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("12.9", (12, 9)), ("2.14.0a0+git1234", (2, 14, 0)), ("13", (13,)), (None, ())],
)
def test_versions(text, numbers):
    assert capability.version_tuple(text) == numbers


@pytest.mark.parametrize(
    ("device_capability", "expected"),
    [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)],
)
def test_fp8_tensor_cores(machine, device_capability, expected):
    machine(device_capability)
    assert capability.has_fp8_tensor_cores(CUDA) is expected
    assert capability.runs_kernels(CUDA) is (expected and capability.triton_available())
    assert not capability.has_fp8_tensor_cores(CPU)


@pytest.mark.parametrize(
    ("device_capability", "cuda", "expected"),
    [
        ((9, 0), "12.9", True),
        ((9, 0), "13.0", True),
        ((9, 0), "12.8", False),
        ((8, 9), "12.9", False),
        ((10, 0), "13.0", False),
    ],
)
def test_blockwise_scaled_mm(machine, device_capability, cuda, expected):
    machine(device_capability, cuda)
    assert capability.has_blockwise_scaled_mm(CUDA) is expected
    assert not capability.has_blockwise_scaled_mm(CPU)


def test_other_vendors_have_no_cuda_capability(machine):
    machine((9, 4), cuda=None)
    assert capability.cuda_capability(CUDA) is None
    assert not capability.runs_kernels(CUDA)


def test_a_device_without_index_is_the_current_one(machine, monkeypatch):
    machine((9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: asked.append(index) or (9, 0))
    assert capability.has_fp8_tensor_cores(torch.device("cuda"))
    assert asked == [3]


def test_import_loads_neither_triton_nor_the_pass():
    code = "import sys, lowering; print([m for m in ('triton', 'fp8pass') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_importing_lowering_starts_no_cuda():
    code = "import torch, lowering; print(torch.cuda.is_initialized())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
