"""Expected time of GEMMs and casts, and the speed-up of FP8 over bfloat16 that follows.

A GEMM takes the larger of two times, computing and moving its operands, and never less than its kernel's latency on top.
Computing is quantized: output tiles are dealt to SMs in waves, and the last wave counts as a full one. cuBLAS chooses
among tile sizes and splits of K, so the model takes the best of a few. A cast takes what it reads and writes at the bandwidth
that casts reach, and a latency per kernel. GEMM and casts run one after another. All of it is an estimate of time on the
GPU: launches are taken to be hidden, as under CUDA graphs or with enough work queued.

Sources of the formulas: the roofline model (Williams et al., 2009), and wave quantization as NVIDIA's "Matrix Multiplication
Background" describes it. `python -m benchmarks.cost_model` compares the model with published measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from fp8pass.cost.device import Device
from lowering.paths import GemmPath

_TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64))
_SPLITS = (1, 2, 4, 8, 16)
#: Of the Triton GEMMs (lowering/grouped/kernels/gemm.py); the wide one is for one scale per tensor with fast accumulation.
_TRITON_TILES, _TRITON_WIDE = ((128, 128), (64, 128)), (128, 256)
#: What CUTLASS's GEMMs of groups reach of the rate of one GEMM: in bfloat16, and in FP8 with scales of rows. Measured on an
#: H100, torchao's pull request 2490: 16 groups of 512 rows on average, K 5120, N 8192.
_GROUPED_BF16, _GROUPED_ROWS = 0.8, 0.61


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm:
    """The shape of a product [m, k] @ [k, n] -> [m, n]; a size that is no int (symbolic, unknown) means no estimate."""

    m: Any
    """Rows of the result."""
    n: Any
    """Columns of the result."""
    k: Any
    """Length of the dot products."""
    groups: Any = 1
    """Number of products in one grouped GEMM: each has m / groups rows on average, and a right operand [k, n] of its own.

    The grad_weight of a grouped layer is `groups` products [out, tokens / groups] @ [tokens / groups, in], so m = groups * out
    and k = tokens / groups.
    """
    out_bytes: int = 2
    """Bytes of an element of the result."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast:
    """The cast of one tensor to FP8, for one or several GEMMs."""

    elements: Any
    """Number of elements; what is no int means no estimate."""
    in_bytes: int = 2
    """Bytes of an element of the source."""
    copies: int = 1
    """Number of FP8 copies written: one, or a row-major and a transposed one."""
    transposes: bool = False
    """Whether one of the copies is transposed."""
    reads: int = 1
    """How often the source is read: 2 where its amax is read first."""
    fused_with_producer: bool = False
    """Whether the kernel that makes the source also does the first read: that read and its kernel are then free."""
    num_readers: int = 1
    """Number of GEMMs that use the cast: each counts its share of the time."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Expected seconds of one GEMM on the GPU, both ways."""

    bf16_seconds: float
    """In bfloat16."""
    fp8_seconds: float
    """In FP8, with this GEMM's share of its casts; equal to `bf16_seconds` for a GEMM that stays in high precision."""

    @property
    def speedup(self) -> float:
        """Above 1 where FP8 is expected to be faster."""
        return self.bf16_seconds / self.fp8_seconds


def gemm_seconds(
    gemm: Gemm, device: Device, kind: str, *, fast_accum: bool = True, path: GemmPath | None = None
) -> float | None:
    """Expected seconds of a GEMM on the GPU.

    `kind` is "bf16" or the granularity of the scales: "tensor_wise", "row_wise", "block_1x128", "block_128x128", "block_1x32"
    (or an enum of these values). `fast_accum` matters to "tensor_wise" alone. `path` is what computes it
    (`lowering.paths.path_of`); None: a library's GEMM, with nothing behind it. The result is None where a size is no int or
    the device has no such GEMM. Raises ValueError for another kind or a size below 0.
    """
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


def _computing(gemm: Gemm, device: Device, flops: float, tiles: Sequence[tuple[int, int]], splits_of_k: Sequence[int]) -> float:
    """Seconds of the best choice of tile and split of K; `flops` is the rate of the first tile."""
    rows = max(1, round(gemm.m / gemm.groups))
    per_sm = flops / device.num_sms
    best = float("inf")
    for tile_m, tile_n in tiles:
        num_tiles = gemm.groups * _ceil_div(rows, tile_m) * _ceil_div(gemm.n, tile_n)
        share = _products_per_byte(tile_m, tile_n) / _products_per_byte(*tiles[0])
        for splits in splits_of_k:
            depth = _ceil_div(gemm.k, splits)
            waves = _ceil_div(num_tiles * splits, int(device.num_sms))
            seconds = waves * 2 * tile_m * tile_n * depth / (per_sm * share)
            if splits > 1:  # float32 parts are written and read by a second kernel
                seconds += 2 * splits * gemm.m * gemm.n * 4 / device.memory_bandwidth + device.kernel_latency
            best = min(best, seconds)
    return best


def _products_per_byte(tile_m: int, tile_n: int) -> float:
    """A tile's products per byte of its operands, to which its rate is proportional.

    At their full rate the tensor cores take all that L2 delivers to the largest tile; smaller ones load more per product.
    """
    return tile_m * tile_n / (tile_m + tile_n)


def cast_seconds(
    bytes_read: float, bytes_written: float, device: Device, *, num_kernels: int = 1, transposes: bool = False
) -> float:
    """Expected seconds of `num_kernels` kernels that read and write so many bytes together."""
    bandwidth = device.transpose_bandwidth if transposes else device.memory_bandwidth
    return (bytes_read + bytes_written) / bandwidth + num_kernels * device.kernel_latency


def shared_cast_seconds(cast: Cast, device: Device) -> float | None:
    """One reader's share of the expected seconds of a cast; None where its size is no int.

    A read for the amax is a kernel of its own, at full bandwidth; the last read is that of the kernel that writes copies.
    """
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
    gemm: Gemm,
    casts: Iterable[Cast],
    device: Device,
    granularity: str,
    *,
    fast_accum: bool = True,
    path: GemmPath | None = None,
) -> Estimate | None:
    """Expected seconds of a GEMM in bfloat16, and in FP8 with its share of `casts`.

    Arguments as for `gemm_seconds`. None where a size is no int or the device has no such GEMM.
    """
    bf16 = gemm_seconds(gemm, device, "bf16", path=path)
    fp8 = gemm_seconds(gemm, device, granularity, fast_accum=fast_accum, path=path)
    shares = [shared_cast_seconds(cast, device) for cast in casts]
    known = [share for share in shares if share is not None]
    if bf16 is None or fp8 is None or len(known) < len(shares):
        return None
    return Estimate(bf16, fp8 + sum(known))


def graph_speedup(estimates: Sequence[Estimate | None]) -> float | None:
    """Expected speed-up of all GEMMs of a graph together: the sum of seconds in bfloat16 over the sum in FP8.

    GEMMs without an estimate are left out of both sums; None where no GEMM has one.
    """
    known = [each for each in estimates if each is not None]
    if not known:
        return None
    return sum(each.bf16_seconds for each in known) / sum(each.fp8_seconds for each in known)


def _known(*sizes: object) -> bool:
    for size in sizes:
        if isinstance(size, int) and size < 0:
            raise ValueError(f"a size is {size}; use 0 or more")
    return all(isinstance(size, int) for size in sizes)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
