"""Blockwise GEMM: FP8 tensor cores, each 128 of K multiplied by its factors and added in float32.

The tensor cores of SM90 keep about 14 bits of the sum of an FP8 product; a float32 accumulator outside them, touched
every 128 of K, bounds that error (DeepSeek-V3, arXiv 2412.19437, section 3.3.2) and is where the factors of the blocks
belong anyway.

NOTE [factors of columns] A thread has elements of 32 columns of a product. Loaded as they are multiplied, the factors of the
columns would take 16 loads and, while the tensor cores work, 32 registers. One thread loads one, and they go through shared
memory when the product is there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering.blockwise.reference import BlockwiseGemm
from lowering.formats import BLOCK, Granularity
from lowering.triton import limits
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, on_device
from lowering.triton.tile import one_per_thread, tiles_of

#: Neighbouring tiles of the output run together in groups of this many tile rows, so that they share operands in L2.
GROUP_M = 8


@Kernel
@triton.jit
def scaled_mm_blockwise_kernel(
    a, b, scale_inv_a, scale_inv_b, bias, out, m, n, k, stride_a, stride_b, scale_stride_a, scale_stride_b,
    BLOCK_DIMS_A: tl.constexpr, BLOCK_DIMS_B: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out [m, n] = a [m, k] @ b [k, n], a with strides (stride_a, 1), b with strides (1, stride_b), out contiguous.

    Scales are GEMM-ready memory of leading dimension scale_stride_*. BLOCK_K is the side of a block; BLOCK_M and
    BLOCK_N divide it.
    """
    tile = tl.program_id(0)
    tiles_m = tiles_of(m, BLOCK_M)
    tiles_n = tiles_of(n, BLOCK_N)
    group = tile // (GROUP_M * tiles_n)
    group_height = min(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + (tile % (GROUP_M * tiles_n)) % group_height
    tile_n = (tile % (GROUP_M * tiles_n)) // group_height

    offsets_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets_k = tl.arange(0, BLOCK_K)
    # Lines beyond the edge read valid memory and are not stored: no mask in the loop.
    lines_a = offsets_m % m
    lines_b = offsets_n % n
    pointers_a = a + lines_a.to(tl.int64)[:, None] * stride_a + offsets_k[None, :]
    pointers_b = b + offsets_k[:, None] + lines_b.to(tl.int64)[None, :] * stride_b
    if BLOCK_DIMS_A == 1:
        scales_a = scale_inv_a + lines_a
        step_a = scale_stride_a
    else:
        scales_a = scale_inv_a + (tile_m * BLOCK_M // BLOCK_K).to(tl.int64) * scale_stride_a
        step_a = 1
    if BLOCK_DIMS_B == 1:
        scales_b = scale_inv_b + lines_b
        step_b = scale_stride_b
    else:
        scales_b = scale_inv_b + (tile_n * BLOCK_N // BLOCK_K).to(tl.int64) * scale_stride_b
        step_b = 1

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(tiles_of(k, BLOCK_K)):
        if EVEN_K:
            tile_a = tl.load(pointers_a)
            tile_b = tl.load(pointers_b)
        else:
            left = k - block * BLOCK_K
            tile_a = tl.load(pointers_a, mask=offsets_k[None, :] < left, other=0.0)
            tile_b = tl.load(pointers_b, mask=offsets_k[:, None] < left, other=0.0)
        factor_a = tl.load(scales_a)
        factor_b = tl.load(scales_b)
        product = tl.dot(tile_a, tile_b)
        if BLOCK_DIMS_B == 1:
            factor_b = one_per_thread(factor_b)
        if BLOCK_DIMS_A == 1 and BLOCK_DIMS_B == 1:
            total += product * factor_a[:, None] * factor_b[None, :]
        elif BLOCK_DIMS_A == 1:
            total += product * (factor_a * factor_b)[:, None]
        else:
            total += product * (factor_a * factor_b)[None, :]
        pointers_a += BLOCK_K
        pointers_b += BLOCK_K
        scales_a += step_a
        scales_b += step_b

    if HAS_BIAS:
        total += tl.load(bias + lines_b).to(tl.float32)[None, :]
    pointers = out + offsets_m.to(tl.int64)[:, None] * n + offsets_n[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=(offsets_m < m)[:, None] & (offsets_n < n)[None, :])


def scaled_mm_blockwise(gemm: BlockwiseGemm) -> torch.Tensor:
    """See `reference.scaled_mm_blockwise`. Any M, N and K; rows of 16 bytes are what makes it fast."""
    a, b, (m, n, k) = gemm.a, gemm.b, gemm.sizes
    if (k > 1 and a.stride(1) != 1) or (k > 1 and b.stride(0) != 1):
        raise ValueError(
            f"strides of a are {a.stride()} and of b {b.stride()}; FP8 tensor cores take a row-major and b column-major"
        )
    out = torch.empty((m, n), dtype=gemm.out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    options = limits.tile_of_gemm(m, limits.of_device(a.device))
    bias = None if gemm.bias is None else gemm.bias.contiguous()
    of_a, of_b = gemm.granularities
    with on_device(a):
        scaled_mm_blockwise_kernel[(cdiv(m, options["BLOCK_M"]) * cdiv(n, options["BLOCK_N"]),)](
            a, b, gemm.scale_inv_a, gemm.scale_inv_b, bias, out, m, n, k, a.stride(0), b.stride(1),
            gemm.scale_inv_a.stride(0), gemm.scale_inv_b.stride(0),
            BLOCK_DIMS_A=2 if of_a == Granularity.BLOCK_128X128 else 1,
            BLOCK_DIMS_B=2 if of_b == Granularity.BLOCK_128X128 else 1, HAS_BIAS=bias is not None,
            EVEN_K=k % BLOCK == 0, BLOCK_K=BLOCK, GROUP_M=GROUP_M, **options,
        )  # fmt: skip
    return out
