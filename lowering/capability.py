"""What the device, the torch build and Triton can do. The one place that asks; importing it asks nothing."""

from __future__ import annotations

import functools
import importlib.util

import torch

#: First CUDA capability with FP8 tensor cores and FP8 conversion instructions (Ada).
FP8_CAPABILITY = (8, 9)

#: cuBLASLt release, as a CUDA toolkit version, that brought 1x128 and 128x128 scales.
BLOCKWISE_CUDA = (12, 9)


def version_tuple(version: str | None) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0); () for None."""
    numbers = []
    for part in (version or "").split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


@functools.cache
def torch_version() -> tuple[int, ...]:
    """(major, minor) of torch."""
    return version_tuple(torch.__version__)[:2]


@functools.cache
def cuda_version() -> tuple[int, ...]:
    """(major, minor) of the CUDA toolkit torch was built with; () for CPU and ROCm builds."""
    return version_tuple(torch.version.cuda)[:2]


@functools.cache
def triton_available() -> bool:
    """Whether Triton is installed. It is looked for, not imported."""
    return importlib.util.find_spec("triton") is not None


def cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """(major, minor) of an NVIDIA device; None for every other device."""
    if device.type != "cuda" or not cuda_version():
        return None
    return _capability_of(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _capability_of(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def has_fp8_tensor_cores(device: torch.device) -> bool:
    """Whether `device` multiplies FP8 matrices: CUDA capability 8.9 or newer."""
    capability = cuda_capability(device)
    return capability is not None and capability >= FP8_CAPABILITY


def has_blockwise_scaled_mm(device: torch.device) -> bool:
    """Whether torch's scaled GEMM takes 1x128 and 128x128 scales: capability 9.x exactly, cuBLASLt 12.9 or newer."""
    capability = cuda_capability(device)
    return capability is not None and capability[0] == 9 and cuda_version() >= BLOCKWISE_CUDA


def runs_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels run on `device`: they use the FP8 conversion instructions of capability 8.9."""
    return has_fp8_tensor_cores(device) and triton_available()
