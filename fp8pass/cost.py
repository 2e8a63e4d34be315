"""The cost model: the speed-up over bfloat16 that is expected of a GEMM in FP8 on a device, and the table of devices.

A GEMM takes the larger of two times, computing and moving its operands, and never less than its kernel's latency on top.
Computing is quantized: output tiles are dealt to SMs in waves, and the last wave counts as a full one. cuBLAS chooses
among tile sizes and splits of K, so the model takes the best of a few. A cast takes what it reads and writes at the bandwidth
that casts reach, and a latency per kernel. GEMM and casts run one after another. All of it is an estimate of time on the
GPU: launches are taken to be hidden, as under CUDA graphs or with enough work queued.

Sources of the formulas: the roofline model (Williams et al., 2009), and wave quantization as NVIDIA's "Matrix Multiplication
Background" describes it. The comment of a number of a device says how far it can be trusted: published (a vendor's data
sheet), measured (by whom, and how), or estimate (from what). Hopper's and Ada's rates are those of large GEMMs at the power
that the product has, not peaks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fp8pass.errors import OptionError, nearest
from lowering import hardware
from lowering.copies import num_blocks
from lowering.paths import GemmPath

#: CUDA toolkit of the estimates where torch has none.
_CUDA = (13, 0)
_TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64))
_SPLITS = (1, 2, 4, 8, 16)
#: Tiles of Triton GEMMs (lowering/grouped/gemm_kernels.py); the wide one is for one scale per tensor with fast accumulation.
_TRITON_TILES, _TRITON_WIDE = ((128, 128), (64, 128)), (128, 256)
#: Share of one GEMM's rate that CUTLASS's GEMMs of groups have: in bfloat16, and in FP8 with scales of rows. Measured on an
#: H100, torchao's pull request 2490: 16 groups of 512 rows on average, K 5120, N 8192.
_GROUPED_BF16, _GROUPED_ROWS = 0.8, 0.61


# -- devices


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
    """FLOP/s of large per-tensor FP8 GEMMs without fast accumulation."""
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
    """Bytes/s of a cast that writes a transposed copy."""
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
    triton_flops=0.36 * 1979e12,  # estimate: instructions of the cubin, of the peak in NVIDIA's data sheet
    memory_bandwidth=4.3e12,  # estimate: 0.9 of the published 4.8 TB/s; kernels on Hopper reach 0.82 to 0.92 of theirs
    transpose_bandwidth=0.85 * 4.3e12,  # estimate: casts to both copies at 0.82 to 0.92 of a copy
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
    transpose_bandwidth=0.75 * 0.9 * 864e9,  # an assumption: machine code for Ada was not looked at
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

DEFAULT = H200  # The device that fp8pass is designed for: the estimate where no GPU says otherwise.

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
    """The constants for a torch device. A CUDA device without constants of its own gets those of its compute capability, and
    any other device an H200's; `note` then says so."""
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
            f"device is {name!r}, which has no constants.{nearest(short, DEVICES)} Use one of {', '.join(DEVICES)}, or"
            f" pass your own: a fp8pass.cost.Device with the rates of its GEMMs and memory"
        )
    return DEVICES[short]


# -- GEMMs and casts


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmShape:
    """The shape of a product [m, k] @ [k, n] -> [m, n]; a size that is no int (symbolic, unknown) means no estimate."""

    m: Any  # Rows of the result.
    n: Any  # Columns of the result.
    k: Any  # Length of the dot products.
    groups: Any = 1
    """Number of products in one grouped GEMM: each has m / groups rows on average, and a right operand [k, n] of its own.

    The grad_weight of a grouped layer is `groups` products [out, tokens / groups] @ [tokens / groups, in], so m = groups * out
    and k = tokens / groups.
    """
    out_bytes: int = 2  # Bytes of an element of the result.


@dataclasses.dataclass(frozen=True, kw_only=True)
class CastShape:
    """The cast of one tensor to FP8, for one or several GEMMs."""

    elements: Any  # Number of elements; what is no int means no estimate.
    in_bytes: int = 2  # Bytes of an element of the source.
    copies: int = 1  # Number of FP8 copies written: one, or a row-major and a transposed one.
    transposes: bool = False  # One of the copies is transposed.
    reads: int = 1  # Number of reads of the source: 2 where its amax is read first.
    fused_with_producer: bool = False  # The kernel that makes the source does the first read: that read and kernel are free.
    num_readers: int = 1  # Number of GEMMs that use the cast: each counts its share of the time.


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Expected seconds of one GEMM on the GPU, both ways."""

    bf16_seconds: float
    """In bfloat16."""
    fp8_seconds: float
    """In FP8, with this GEMM's share of its casts; equal to `bf16_seconds` for a GEMM in high precision."""

    @property
    def speedup(self) -> float:
        """Above 1 where FP8 is expected to be faster."""
        return self.bf16_seconds / self.fp8_seconds


def gemm_seconds(
    gemm: GemmShape, device: Device, kind: str, *, fast_accum: bool = True, path: GemmPath | None = None
) -> float | None:
    """Expected seconds of a GEMM on the GPU. `kind` is "bf16" or the granularity of the scales: "tensor_wise", "row_wise",
    "block_1x128", "block_128x128", "block_1x32" (or an enum of these values). `fast_accum` matters only to "tensor_wise".
    `path` names its kernel (`lowering.paths.path_of`); None: a library's GEMM, with nothing behind it. The result is None where
    a size is not an int or the device has no such GEMM. Raises ValueError for another kind or a size below 0."""
    kind = getattr(kind, "value", kind)
    in_groups = path in (GemmPath.GROUPS, GemmPath.GROUPS_BY_TRITON)
    flops = _rate(device, kind, fast_accum)
    tiles: Sequence[tuple[int, int]] = _TILES
    splits: Sequence[int] = _SPLITS
    if kind == "bf16":
        flops = device.bf16_flops * (_GROUPED_BF16 if in_groups else 1.0)
    elif path is GemmPath.ROWS_AFTERWARDS:  # a float32 product, and a kernel that reads it
        product = dataclasses.replace(gemm, out_bytes=4)
        seconds = gemm_seconds(product, device, "tensor_wise", fast_accum=fast_accum)
        if seconds is None:
            return None
        elements = gemm.m * gemm.n
        return seconds + cast_seconds(4 * elements, gemm.out_bytes * elements, device)
    elif path is GemmPath.BLOCKS_BY_MXFP8:
        seconds = gemm_seconds(gemm, device, "block_1x32")
        return None if seconds is None else seconds + device.kernel_latency  # of the kernel that turns the scales
    elif path in (GemmPath.BLOCKS_BY_TRITON, GemmPath.GROUPS_BY_TRITON) and device.triton_flops is not None:
        is_wide = kind == "tensor_wise" and fast_accum
        flops, splits = device.triton_flops, (1,)
        tiles = (*_TRITON_TILES, _TRITON_WIDE) if is_wide else _TRITON_TILES
    elif path is GemmPath.GROUPS and flops is not None and kind in ("tensor_wise", "row_wise"):
        flops *= _GROUPED_ROWS
    if flops is None or not _known(gemm.m, gemm.n, gemm.k, gemm.groups):
        return None
    in_bytes, latency = (2, device.bf16_gemm_latency) if kind == "bf16" else (1, device.fp8_gemm_latency)
    if gemm.groups == 0 or 0 in (gemm.m, gemm.n, gemm.k):
        return float(latency)
    operands = (gemm.m + gemm.groups * gemm.n) * gemm.k * in_bytes
    moving = (operands + gemm.m * gemm.n * gemm.out_bytes) / device.memory_bandwidth
    return max(_computing(gemm, device, flops, tiles, splits), moving) + latency


def _rate(device: Device, kind: str, fast_accum: bool) -> float | None:
    rates = {
        "bf16": device.bf16_flops,
        "tensor_wise": device.fp8_flops if fast_accum else device.fp8_accurate_flops,
        "row_wise": device.row_wise_flops,
        "block_1x128": device.blockwise_flops,
        "block_128x128": device.blockwise_flops,
        "block_1x32": device.mx_flops,
    }
    if kind not in rates:
        raise ValueError(f"no GEMM is of kind {kind!r}; use one of {', '.join(rates)}")
    return rates[kind]


def _computing(
    gemm: GemmShape, device: Device, flops: float, tiles: Sequence[tuple[int, int]], splits_of_k: Sequence[int]
) -> float:
    """Seconds of the best choice of tile and split of K; `flops` is the rate of the first tile."""
    rows = max(1, round(gemm.m / gemm.groups))
    per_sm = flops / device.num_sms
    best = float("inf")
    for tile_m, tile_n in tiles:
        num_tiles = gemm.groups * num_blocks(rows, tile_m) * num_blocks(gemm.n, tile_n)
        share = _products_per_byte(tile_m, tile_n) / _products_per_byte(*tiles[0])
        for splits in splits_of_k:
            depth = num_blocks(gemm.k, splits)
            waves = num_blocks(num_tiles * splits, int(device.num_sms))
            seconds = waves * 2 * tile_m * tile_n * depth / (per_sm * share)
            if splits > 1:  # float32 parts are written and read by a second kernel
                seconds += 2 * splits * gemm.m * gemm.n * 4 / device.memory_bandwidth + device.kernel_latency
            best = min(best, seconds)
    return best


def _products_per_byte(tile_m: int, tile_n: int) -> float:
    """A tile's products per byte of its operands, to which its rate is proportional. At their full rate the tensor cores take
    all that L2 delivers to the largest tile; smaller ones load more per product."""
    return tile_m * tile_n / (tile_m + tile_n)


def cast_seconds(
    bytes_read: float, bytes_written: float, device: Device, *, num_kernels: int = 1, transposes: bool = False
) -> float:
    """Expected seconds of `num_kernels` kernels that read and write so many bytes together."""
    bandwidth = device.transpose_bandwidth if transposes else device.memory_bandwidth
    return (bytes_read + bytes_written) / bandwidth + num_kernels * device.kernel_latency


def shared_cast_seconds(cast: CastShape, device: Device) -> float | None:
    """One reader's share of the expected seconds of a cast; None where its size is no int. A read for the amax is a kernel of
    its own, at full bandwidth; the last read is that of the kernel that writes copies."""
    if not _known(cast.elements):
        return None
    if cast.reads < 1 or cast.num_readers < 1:
        raise ValueError(f"{cast} has reads={cast.reads}, num_readers={cast.num_readers}; use 1 or more of each")
    amax_reads = cast.reads - 1
    fused_amax = cast.fused_with_producer and amax_reads > 0
    fused_cast = cast.fused_with_producer and amax_reads == 0
    seconds = 0.0
    for _ in range(amax_reads - fused_amax):
        seconds += cast_seconds(cast.elements * cast.in_bytes, 0, device)
    read = 0 if fused_cast else cast.elements * cast.in_bytes
    num_kernels = 0 if fused_cast else 1
    seconds += cast_seconds(read, cast.elements * cast.copies, device, num_kernels=num_kernels, transposes=cast.transposes)
    return seconds / cast.num_readers


def estimate_gemm(
    gemm: GemmShape,
    casts: Iterable[CastShape],
    device: Device,
    granularity: str,
    *,
    fast_accum: bool = True,
    path: GemmPath | None = None,
) -> Estimate | None:
    """Expected seconds of a GEMM in bfloat16, and in FP8 with its share of `casts`. Arguments as for `gemm_seconds`. None where
    a size is no int or the device has no such GEMM."""
    bf16 = gemm_seconds(gemm, device, "bf16", path=path)
    fp8 = gemm_seconds(gemm, device, granularity, fast_accum=fast_accum, path=path)
    shares = [shared_cast_seconds(cast, device) for cast in casts]
    known = [share for share in shares if share is not None]
    if bf16 is None or fp8 is None or len(known) < len(shares):
        return None
    return Estimate(bf16, fp8 + sum(known))


def graph_speedup(estimates: Sequence[Estimate | None]) -> float | None:
    """Expected speed-up of all GEMMs of a graph together: the sum of seconds in bfloat16 over the sum in FP8. GEMMs without an
    estimate are left out of both sums; None where no GEMM has one."""
    known = [each for each in estimates if each is not None]
    if not known:
        return None
    return sum(each.bf16_seconds for each in known) / sum(each.fp8_seconds for each in known)


def _known(*sizes: object) -> bool:
    for size in sizes:
        if isinstance(size, int) and size < 0:
            raise ValueError(f"a size is {size}; use 0 or more")
    return all(isinstance(size, int) for size in sizes)
