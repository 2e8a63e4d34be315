"""What is installed and what runs here, for bug reports: `python -m fp8pass`."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from lowering import hardware
from lowering.formats import E4M3, Granularity

#: What fp8pass works with, and what it is built on.
_PACKAGES = ("triton", "transformers", "accelerate", "peft", "lightning", "torchtitan", "torchao", "numpy", "rich")
_SCALES = {
    "delayed, current": (Granularity.TENSOR_WISE, Granularity.TENSOR_WISE),
    "rowwise": (Granularity.ROW_WISE, Granularity.ROW_WISE),
    "blockwise": (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128),
    "mxfp8": (Granularity.BLOCK_1X32, Granularity.BLOCK_1X32),
}


def report() -> str:
    """Versions, GPUs, and for each GPU and recipe what multiplies FP8 operands."""
    import fp8pass

    lines = [f"fp8pass       {fp8pass.__version__}"]
    lines += [f"Python        {platform.python_version()}, {platform.platform()}"]
    lines += [f"torch         {torch.__version__}, CUDA {torch.version.cuda or 'no'}, {torch.get_num_threads()} CPU threads"]
    lines += [f"{name:13} {version(name) or 'not installed'}" for name in _PACKAGES]
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.version.cuda else []
    if not devices:
        return "\n".join([*lines, "GPU           none: FP8 is emulated, slower than float32, for development and tests"])
    for device in devices:
        lines += _gpu(device)
    return "\n".join(lines)


def version(package: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(device: torch.device) -> list[str]:
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    memory = torch.cuda.get_device_properties(device).total_memory / 1e9
    lines = [f"GPU {device.index}         {torch.cuda.get_device_name(device)}, capability {capability}, {memory:.0f} GB"]
    if not hardware.has_fp8_tensor_cores(device):
        return [*lines, f"  no FP8: it requires compute capability {'.'.join(map(str, hardware.FP8_CAPABILITY))}"]
    return [*lines, *(f"  {name:18} {_native(scales, device)}" for name, scales in _SCALES.items())]


def _native(scales: tuple[Granularity, Granularity], device: torch.device) -> str:
    gemm = hardware.Gemm(E4M3, E4M3, *scales)
    refusal = hardware.refusal(gemm, device)
    if refusal is None:
        return "torch's GEMM"
    if not gemm.has_blocks or Granularity.BLOCK_1X32 in scales:
        return f"no: {refusal}"
    return "MXFP8 GEMMs with the same numbers" if hardware.has_mx_scaled_mm(device) else f"Triton's GEMM: {refusal}"
