"""`Device`: what the cost model has to know of a GPU, the table of the GPUs, and which of them describes a torch.device.

The comment of a number says how far it can be trusted: published (a vendor's data sheet), measured (by whom, and how), or
estimate (from what). Hopper's and Ada's rates are those of large GEMMs at the power that the product has, not peaks.
"""

from __future__ import annotations

import dataclasses
import re

import torch

from fp8pass.errors import OptionError, nearest
from lowering import hardware

#: CUDA toolkit of the estimates where torch has none.
_CUDA = (13, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as the cost model sees it. Rates are what large GEMMs and casts reach, not peaks; times are in seconds."""

    name: str
    """The product's name."""
    compute_capability: tuple[int, int]
    """(major, minor) of CUDA's compute capability."""
    num_sms: float
    """Number of streaming multiprocessors."""
    bf16_flops: float
    """FLOP/s of large bfloat16 GEMMs (a multiply-add is two operations)."""
    fp8_flops: float
    """FLOP/s of large per-tensor FP8 GEMMs with fast accumulation."""
    fp8_accurate_flops: float
    """The same without fast accumulation."""
    row_wise_flops: float
    """FLOP/s of large FP8 GEMMs with one scale per row."""
    blockwise_flops: float
    """FLOP/s of large FP8 GEMMs with a scale per 1x128 or 128x128 values."""
    mx_flops: float | None
    """FLOP/s of large MXFP8 GEMMs; None where the tensor cores know no MXFP8."""
    triton_flops: float | None = None
    """FLOP/s of large FP8 GEMMs of this project's Triton kernels, with tiles of 128x128: blocks of 128 and groups that no
    library takes. None: they count like the libraries'."""
    memory_bandwidth: float
    """Bytes/s, read and written together, of a large cast whose copies all keep the layout of the source."""
    transpose_bandwidth: float
    """The same for a cast that writes a transposed copy."""
    kernel_latency: float = 2e-6
    """Seconds that the shortest kernel other than a GEMM takes. The default is measured on an H100: torchao's
    testing/training/roofline_utils.py, a Triton kernel of one element."""
    bf16_gemm_latency: float = 4e-6
    """Seconds that the smallest bfloat16 GEMM takes; measured with the H100's rates, M = N = K = 256."""
    fp8_gemm_latency: float = 6e-6
    """Seconds that the smallest FP8 GEMM takes; measured likewise, one scale per tensor."""
    note: str = ""
    """Why this device was taken, where it is not the one that the model runs on; else ''."""

    @property
    def platform(self) -> hardware.Platform:
        """With the CUDA toolkit of the torch that runs, or 13.0 where that has none."""
        return hardware.Platform(self.compute_capability, hardware.cuda_version() or _CUDA, hardware.torch_version())

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not value > 0:
                raise ValueError(f"{field.name} of the {self.name} is {value!r}; use a number above 0")


# GEMMs: measured, torchao's commit dec031314, M = N = K = 32768. Its FP8 operands are zeros, which draw less power than real
# data, so these rates are the upper end. Casts: torchao, benchmarks/prototype/blockwise_fp8_training/README.md, 2026-03-20.
H100 = Device(
    name="NVIDIA H100",  # SXM5, 80 GB HBM3
    compute_capability=(9, 0),
    num_sms=132,  # published: NVIDIA H100 Tensor Core GPU Architecture, table of the SXM5 product
    bf16_flops=682e12,  # measured; 585 to 658 TFLOP/s from 4096 to 16384
    fp8_flops=1463e12,  # measured; 1354 to 1676 TFLOP/s from 4096 to 16384
    fp8_accurate_flops=1421e12,  # measured; 1361 to 1395 TFLOP/s from 4096 to 16384
    row_wise_flops=0.9 * 1463e12,  # estimate: pytorch issue 147971, most shapes at 90 to 100 % of per-tensor, a tail to 50 %
    blockwise_flops=1234e12,  # published: DeepGEMM's kernel, the same README, N 2048, K 7168; cuBLASLt's is not known
    mx_flops=None,
    triton_flops=712e12,  # estimate: as on the H200
    memory_bandwidth=2.75e12,  # measured: 2634 to 2900 GB/s of 3352
    # estimate: as on the H200
    transpose_bandwidth=0.85 * 2.75e12,
)
# The H100's die, faster memory; what fp8pass is designed for.
H200 = Device(
    name="NVIDIA H200",  # SXM
    compute_capability=(9, 0),
    num_sms=132,  # published, for the same die
    bf16_flops=794.5e12,  # measured: S. Bekman, ml-engineering, insights/when-to-upgrade-gpus, highest matmul rate found
    fp8_flops=1453.4e12,  # measured: the same
    fp8_accurate_flops=0.97 * 1453.4e12,  # estimate: the H100's ratio
    row_wise_flops=0.9 * 1453.4e12,  # estimate: the H100's ratio
    blockwise_flops=1234e12,  # estimate: as on the H100
    mx_flops=None,
    triton_flops=0.36 * 1979e12,  # estimate: benchmarks.gemm_steps, of the peak in NVIDIA's data sheet
    memory_bandwidth=4.3e12,  # estimate: 0.9 of the published 4.8 TB/s; kernels on Hopper reach 0.82 to 0.92 of theirs
    transpose_bandwidth=0.85 * 4.3e12,  # estimate: benchmarks.kernel_cost, casts to both copies at 0.82 to 0.92 of a copy
)
B200 = Device(
    name="NVIDIA B200",  # SXM
    compute_capability=(10, 0),
    num_sms=148,  # estimate: what CUDA reports by common accounts; NVIDIA's data sheet does not say
    bf16_flops=1745e12,  # measured: S. Bekman, as for the H200
    fp8_flops=3432.5e12,  # measured: the same
    fp8_accurate_flops=3432.5e12,  # estimate: the tensor cores accumulate in float32, so both choices run one instruction
    row_wise_flops=0.9 * 3432.5e12,  # estimate: the H100's ratio
    blockwise_flops=0.8 * 3432.5e12,  # estimate: the H100's ratio is 0.84, and the kernels are younger
    mx_flops=0.9 * 3432.5e12,  # estimate: the tensor cores apply the scales; 0.9 for loading and arranging them
    triton_flops=0.5 * 3432.5e12,  # estimate: the H100's ratio
    memory_bandwidth=0.9 * 7.672e12,  # estimate: 0.9 of 7680 bits x 3996 MHz x 2, from torchao's roofline_utils.py
    transpose_bandwidth=0.5 * 7.672e12,  # estimate: issuing does not grow with the memory, so less of it than on the H200
)
# Estimates, but for the SMs: 0.7 of the dense rates in NVIDIA's data sheet, as 350 W do not hold the boost clock in GEMMs. No
# measurement tells the two kinds of accumulation apart on Ada.
L40S = Device(
    name="NVIDIA L40S",
    compute_capability=(8, 9),
    num_sms=142,  # published: NVIDIA L40S data sheet, 18,176 CUDA cores of 128 per SM
    bf16_flops=0.7 * 362e12,
    fp8_flops=0.7 * 733e12,
    fp8_accurate_flops=0.7 * 733e12,
    row_wise_flops=0.9 * 0.7 * 733e12,  # the H100's ratio
    blockwise_flops=0.6 * 0.7 * 733e12,  # cuBLASLt has no blockwise GEMM for Ada, so a Triton kernel runs
    mx_flops=None,
    triton_flops=0.6 * 0.7 * 733e12,
    memory_bandwidth=0.9 * 864e9,  # 0.9 of the 864 GB/s in NVIDIA's data sheet
    transpose_bandwidth=0.75 * 0.9 * 864e9,  # an assumption: nobody has looked at machine code for Ada
)
# Estimates, but for the SMs: 0.9 of the dense rates with float32 accumulation in NVIDIA's Ada GPU Architecture white paper,
# appendix A. FP8 has twice that with float16 accumulation, which cuBLASLt does not use.
RTX_4090 = Device(
    name="NVIDIA GeForce RTX 4090",
    compute_capability=(8, 9),
    num_sms=128,  # published: the white paper
    bf16_flops=0.9 * 165.2e12,
    fp8_flops=0.9 * 330.3e12,
    fp8_accurate_flops=0.9 * 330.3e12,
    row_wise_flops=0.9 * 0.9 * 330.3e12,
    blockwise_flops=0.6 * 0.9 * 330.3e12,
    mx_flops=None,
    triton_flops=0.6 * 0.9 * 330.3e12,
    memory_bandwidth=0.9 * 1008e9,
    transpose_bandwidth=0.75 * 0.9 * 1008e9,
)
# Estimates, but for the SMs: 0.9 of the dense rates with float32 accumulation in NVIDIA's RTX Blackwell GPU Architecture white
# paper, appendix A. Shares are those of the RTX 4090, MXFP8's that of the B200.
RTX_5090 = Device(
    name="NVIDIA GeForce RTX 5090",
    compute_capability=(12, 0),
    num_sms=170,  # published: the white paper
    bf16_flops=0.9 * 209.5e12,
    fp8_flops=0.9 * 419e12,
    fp8_accurate_flops=0.9 * 419e12,
    row_wise_flops=0.9 * 0.9 * 419e12,
    blockwise_flops=0.6 * 0.9 * 419e12,
    mx_flops=0.9 * 0.9 * 419e12,
    triton_flops=0.6 * 0.9 * 419e12,
    memory_bandwidth=0.9 * 1792e9,
    transpose_bandwidth=0.75 * 0.9 * 1792e9,
)

DEFAULT = H200
"""The device that fp8pass is designed for: the estimate where no GPU says otherwise."""

DEVICES = {"h100": H100, "h200": H200, "b200": B200, "l40s": L40S, "rtx4090": RTX_4090, "rtx5090": RTX_5090}
"""The GPUs that have constants, by the names that `device_called` takes."""

_BY_NAME = (
    (r"\bG?H200\b", H200),
    (r"\b(H100|H800)\b", H100),
    (r"\bG?B200\b", B200),
    (r"\bL40S\b", L40S),
    (r"\bRTX 4090\b", RTX_4090),
    (r"\bRTX 5090\b", RTX_5090),
)
_BY_CAPABILITY = {(9, 0): H100, (8, 9): L40S, (10, 0): B200, (10, 3): B200, (12, 0): RTX_5090}


def device_for(device: torch.device | None) -> Device:
    """The constants for a torch device.

    A CUDA device without constants of its own gets those of its compute capability, and any other device an H200's; `note`
    then says so.
    """
    if device is None or device.type != "cuda" or not torch.cuda.is_available():
        what = "no device is known" if device is None else f"device '{device}' has no constants"
        return dataclasses.replace(DEFAULT, note=f"{what}: estimated for an {DEFAULT.name}")
    return device_named(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def device_named(name: str, capability: tuple[int, int]) -> Device:
    """The constants for a CUDA device by its name and compute capability; `note` is set where they are another's."""
    for pattern, device in _BY_NAME:
        if re.search(pattern, name):
            return device
    device = _BY_CAPABILITY.get(capability, DEFAULT)
    return dataclasses.replace(device, note=f"{name} has no constants: estimated for an {device.name}")


def device_called(name: str) -> Device:
    """The constants of a GPU by a short name such as "h200" or "RTX 4090"; raises OptionError for one that has none."""
    short = re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
    if short not in DEVICES:
        raise OptionError(
            f"device is {name!r}, of which no constants are known.{nearest(short, DEVICES)} Use one of {', '.join(DEVICES)}, or"
            f" pass your own: a fp8pass.cost.Device with the rates of its GEMMs and memory"
        )
    return DEVICES[short]
