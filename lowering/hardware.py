"""Capabilities of the device, the torch build and Triton, and the FP8 GEMMs that torch therefore runs (`refusal`).

The one place that asks; importing it asks nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any

import torch

from lowering.formats import E4M3, E5M2, FP8_MAX, GEMM_ALIGNMENT, HIGH_PRECISION_DTYPES, MX_BLOCK, Granularity

#: First CUDA capability with FP8 tensor cores and FP8 conversion instructions (Ada).
FP8_CAPABILITY = (8, 9)

#: First CUDA capability whose tensor cores take 1x32 blocks (MXFP8).
MX_CAPABILITY = (10, 0)

#: cuBLASLt release, as a CUDA toolkit version, that brought scales per row, per 1x128 and per 128x128 block.
BLOCKWISE_CUDA = (12, 9)

#: CUDA toolkit whose cuBLASLt brought 1x32 blocks.
MX_CUDA = (12, 8)

#: torch whose rowwise CUTLASS kernel for Ada runs on the stream that it is given: before, it clears its barriers on stream 0
#: (pytorch issue 177651, and `cudaMemsetAsync` in the binary of 2.11), which races in any other and cannot be captured.
ADA_ROWS_TORCH = (2, 12)

#: Most groups of torch's grouped GEMM: one program prepares them (GroupMM.cu, ScaledGroupMM.cu: "Can't process more than 1024
#: groups", which 1024 are to it).
CUTLASS_GROUPS = 1023


@functools.cache
def cuda_version() -> tuple[int, ...]:
    """(major, minor) of the CUDA toolkit torch was built with; () for CPU and ROCm builds."""
    return tuple(int(number) for number in torch.version.cuda.split(".")[:2]) if torch.version.cuda else ()


@functools.cache
def torch_version() -> tuple[int, int]:
    """(major, minor) of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@dataclasses.dataclass(frozen=True)
class Platform:
    """The properties that decide which GEMMs an NVIDIA GPU has."""

    capability: tuple[int, int]  # Its compute capability (major, minor).
    cuda: tuple[int, ...]  # The toolkit that torch was built with.
    torch: tuple[int, int]  # (major, minor).

    def __str__(self) -> str:
        return f"compute capability {_version(self.capability)} with CUDA {_version(self.cuda)}"

    @property
    def has_cublaslt_rows(self) -> bool:
        """True if cuBLASLt takes scales per row, per 1x128 and per 128x128 block: capability 9.x exactly, CUDA 12.9."""
        return self.capability[0] == 9 and self.cuda >= BLOCKWISE_CUDA


def platform_of(device: torch.device) -> Platform | None:
    """The platform of an NVIDIA device; None for every other device."""
    capability = cuda_capability(device)
    return None if capability is None else Platform(capability, cuda_version(), torch_version())


def is_present(platform: Platform) -> bool:
    """True if this machine has such a GPU: then what is installed here counts. For another's, Triton comes with torch."""
    if not torch.cuda.is_available():
        return False
    found = (cuda_capability(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))
    return platform.capability in found


def _known(device: torch.device | Platform) -> Platform | None:
    return device if isinstance(device, Platform) else platform_of(device)


@functools.cache
def triton_available() -> bool:
    """True if Triton is installed. It is looked for, not imported."""
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
    """True if `device` multiplies FP8 matrices: CUDA capability 8.9 or newer."""
    capability = cuda_capability(device)
    return capability is not None and capability >= FP8_CAPABILITY


def has_mx_scaled_mm(device: torch.device) -> bool:
    """True if cuBLASLt takes E8M0 scales per 1x32 block: capability 10.0 or newer, CUDA 12.8."""
    return _mx_refusal(device) is None


def _mx_refusal(device: torch.device | Platform) -> str | None:
    platform = _known(device)
    if platform is None:
        return f"{device} has no FP8 tensor cores that torch's GEMM uses"
    if platform.capability < MX_CAPABILITY:
        needed = _version(MX_CAPABILITY)
        return f"1x32 blocks need compute capability {needed}, this device has {_version(platform.capability)}"
    return f"1x32 blocks need CUDA {_version(MX_CUDA)} or newer" if platform.cuda < MX_CUDA else None


def runs_kernels(device: torch.device) -> bool:
    """True if the Triton kernels run on `device`: they use the FP8 conversion instructions of capability 8.9."""
    return has_fp8_tensor_cores(device) and triton_available()


_HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Gemm:
    """a [M, K] @ b [K, N] of FP8 operands with their scales, and the bias that its epilogue adds."""

    a_dtype: torch.dtype
    b_dtype: torch.dtype
    granularity_a: Granularity = Granularity.TENSOR_WISE
    granularity_b: Granularity = Granularity.TENSOR_WISE
    out_dtype: torch.dtype = torch.bfloat16
    bias_dtype: torch.dtype | None = None  # None: no bias in the epilogue.
    m: Any = None  # Sizes. None or symbolic: unknown, and not checked.
    n: Any = None
    k: Any = None
    is_grouped: bool = False  # One GEMM per group, in one launch: M, or K where tokens are contracted, is a size per group.
    num_groups: Any = None  # The number of groups of a grouped one.

    @property
    def has_blocks(self) -> bool:
        """True if an operand has a scale per block."""
        return self.granularity_a.block is not None or self.granularity_b.block is not None


#: Granularities that meet in one GEMM.
_PAIRS = (
    (Granularity.TENSOR_WISE, Granularity.TENSOR_WISE),
    (Granularity.ROW_WISE, Granularity.ROW_WISE),
    (Granularity.BLOCK_1X32, Granularity.BLOCK_1X32),
    (Granularity.BLOCK_1X128, Granularity.BLOCK_1X128),
    (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128),
    (Granularity.BLOCK_128X128, Granularity.BLOCK_1X128),
)
#: More of them that a grouped GEMM takes: it is a kernel of our own.
_GROUPED_PAIRS = ((Granularity.ROW_WISE, Granularity.TENSOR_WISE), (Granularity.TENSOR_WISE, Granularity.ROW_WISE))


def refusal(gemm: Gemm, device: torch.device | Platform | None) -> str | None:
    """Why torch's FP8 GEMM, or our grouped one, cannot run exactly this on a device or platform, in one clause; None where it
    can. For None and for the CPU the rules of SM90 with CUDA 12.9 hold, and those of SM100 for 1x32 blocks, so that what is
    inspected on a laptop is what runs on the cluster. Memory layouts are the caller's: a is row-major, b column-major. Sources:
    ScaledBlas.cpp of torch 2.13 (`_scaled_gemm`, `_check_deepseek_support`), the FP8 section of cuBLASLt's `cublasLtMatmul`."""
    return _format_refusal(gemm) or _size_refusal(gemm) or _output_refusal(gemm) or _device_refusal(gemm, device)


def size_multiples(gemm: Gemm) -> tuple[int, int, int]:
    """The numbers that M, N and K have to be multiples of: K and N by the tensor cores' rows of 16 bytes, K by blocks of 32."""
    if gemm.is_grouped:
        return 1, GEMM_ALIGNMENT, MX_BLOCK if gemm.granularity_a is Granularity.BLOCK_1X32 else GEMM_ALIGNMENT
    has_128_blocks = gemm.has_blocks and Granularity.BLOCK_1X32 not in (gemm.granularity_a, gemm.granularity_b)
    depth = MX_BLOCK if gemm.has_blocks and not has_128_blocks else GEMM_ALIGNMENT
    return (4 if has_128_blocks else 1), GEMM_ALIGNMENT, depth  # 4: float32 scales in rows of 16 bytes


def _format_refusal(gemm: Gemm) -> str | None:
    for dtype in (gemm.a_dtype, gemm.b_dtype):
        if dtype not in FP8_MAX:
            return f"no FP8 GEMM takes {short(dtype)} operands"
    if gemm.a_dtype == gemm.b_dtype == E5M2:
        return "no FP8 GEMM takes two E5M2 operands"
    pairs = (*_PAIRS, *_GROUPED_PAIRS) if gemm.is_grouped else _PAIRS
    if (gemm.granularity_a, gemm.granularity_b) not in pairs:
        names = f"{gemm.granularity_a.label} by {gemm.granularity_b.label}"
        return f"no FP8 GEMM takes {names} {'blocks' if gemm.granularity_a.block and gemm.granularity_b.block else 'scales'}"
    return None


def _size_refusal(gemm: Gemm) -> str | None:
    for name, size, multiple in zip("MNK", (gemm.m, gemm.n, gemm.k), size_multiples(gemm), strict=True):
        if isinstance(size, int) and size == 0:
            return f"{name} is 0, so there is nothing to multiply"
        if isinstance(size, int) and size % multiple:
            return f"{name} is {size}, not a multiple of {multiple}"
    return None


def _output_refusal(gemm: Gemm) -> str | None:
    if gemm.out_dtype not in HIGH_PRECISION_DTYPES:
        return f"no FP8 GEMM has a {short(gemm.out_dtype)} output"
    if gemm.bias_dtype is not None and (gemm.bias_dtype != gemm.out_dtype or gemm.out_dtype not in _HALF_DTYPES):
        return f"a {short(gemm.bias_dtype)} bias does not fit a {short(gemm.out_dtype)} output"
    return None


def _device_refusal(gemm: Gemm, device: torch.device | Platform | None) -> str | None:
    if gemm.is_grouped:
        return _grouped_refusal(gemm, device)
    is_rehearsed = device is None or (isinstance(device, torch.device) and device.type == "cpu")
    if Granularity.BLOCK_1X32 in (gemm.granularity_a, gemm.granularity_b):
        return None if device is None or is_rehearsed else _mx_refusal(device)
    platform = Platform((9, 0), BLOCKWISE_CUDA, torch_version()) if device is None or is_rehearsed else _known(device)
    if platform is None:
        return f"{device} has no FP8 tensor cores that torch's GEMM uses"
    if platform.capability < FP8_CAPABILITY:
        needed = f"they require {_version(FP8_CAPABILITY)}"
        return f"compute capability {_version(platform.capability)} has no FP8 tensor cores; {needed}"
    if gemm.has_blocks and not platform.has_cublaslt_rows:
        return f"1x128 and 128x128 blocks need compute capability 9.x and CUDA {_version(BLOCKWISE_CUDA)} or newer"
    if gemm.granularity_a is Granularity.ROW_WISE and not platform.has_cublaslt_rows:
        return _cutlass_rows_refusal(gemm, platform)
    return None


def _cutlass_rows_refusal(gemm: Gemm, platform: Platform) -> str | None:
    """Source: RowwiseScaledMM.cu of torch 2.11 to 2.13 (`check_inputs`), and the callers of `f8f8bf16_rowwise`."""
    needed = f"need compute capability 9.x and CUDA {_version(BLOCKWISE_CUDA)} or newer"
    if gemm.out_dtype != torch.bfloat16:
        return f"row-wise scales with an output of {short(gemm.out_dtype)} {needed}"
    if gemm.b_dtype != E4M3:
        return f"row-wise scales with {short(gemm.b_dtype)} as the second operand {needed}"
    if platform.capability == FP8_CAPABILITY and platform.torch < ADA_ROWS_TORCH:
        version = _version(ADA_ROWS_TORCH)
        return (
            f"row-wise scales need torch {version} or newer on compute capability 8.9: before, the kernel uses another stream"
        )
    return None


def rows_refusal(gemm: Gemm, device: torch.device | Platform, fast_accum: bool) -> str | None:
    """Why a row-wise GEMM is computed with a scale of 1 and scaled afterwards (NOTE [scales after the GEMM]), in one clause;
    None where torch's row-wise GEMM runs. Before capability 10 CUTLASS's kernel is slow without fast accumulation
    (RowwiseScaledMM.cu says so of its schedule); from there on its code is the same with and without."""
    reason = refusal(gemm, device)
    platform = _known(device)
    if reason is not None or platform is None or fast_accum or platform.has_cublaslt_rows:
        return reason
    if platform.capability < MX_CAPABILITY:
        return "torch's row-wise GEMM is slow without fast accumulation here"
    return None


def needs_dense_rows(device: torch.device) -> bool:
    """True if torch's row-wise GEMM reads operands as if they had no gaps: on Ada it takes K for the stride of rows."""
    return cuda_capability(device) == FP8_CAPABILITY


def _grouped_refusal(gemm: Gemm, device: torch.device | Platform | None) -> str | None:
    if device is None or (isinstance(device, torch.device) and device.type == "cpu"):
        return None
    platform = _known(device)
    if platform is None or platform.capability < FP8_CAPABILITY:
        return f"grouped FP8 GEMMs need compute capability {_version(FP8_CAPABILITY)} or newer, {device} has less"
    if (not isinstance(device, Platform) or is_present(device)) and not triton_available():
        return "grouped FP8 GEMMs are Triton kernels, and Triton is not installed"
    if Granularity.BLOCK_1X32 in (gemm.granularity_a, gemm.granularity_b):
        return "grouped GEMMs with 1x32 blocks (MXFP8) have no kernel for GPUs"
    return None


def cutlass_refusal(gemm: Gemm, device: torch.device | Platform) -> str | None:
    """Why `torch._scaled_grouped_mm` cannot run a grouped GEMM on a device or platform, in one clause; None where it can.
    Source: `_scaled_grouped_mm_cuda` of torch 2.11 and 2.13 and its shape function: E4M3 by E4M3, scales per line, bfloat16,
    compute capability 9.0."""
    platform = _known(device)
    if platform is None or platform.capability != (9, 0):
        return f"torch's grouped GEMM needs compute capability 9.0, not that of {device}"
    if (gemm.a_dtype, gemm.b_dtype) != (E4M3, E4M3):
        return f"torch's grouped GEMM takes only float8_e4m3fn, not {short(gemm.a_dtype)} by {short(gemm.b_dtype)}"
    if gemm.has_blocks:
        return "torch's grouped GEMM has no scales per block of 128"
    if gemm.out_dtype != torch.bfloat16 or gemm.bias_dtype is not None:
        return "torch's grouped GEMM has no bias and gives bfloat16"
    if isinstance(gemm.num_groups, int) and gemm.num_groups > CUTLASS_GROUPS:
        return f"torch's grouped GEMM takes {CUTLASS_GROUPS} groups at most, not {gemm.num_groups}"
    return refusal(gemm, device)


def _version(numbers: tuple[int, ...]) -> str:
    return ".".join(str(n) for n in numbers)


def short(dtype: torch.dtype) -> str:
    """Its name, for messages."""
    return str(dtype).removeprefix("torch.")
