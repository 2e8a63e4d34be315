"""Blockwise GEMMs through MXFP8: SM100 has no GEMM with blocks of 128, and one with blocks of 32.

A power of two that 128 values share is four equal E8M0 scales of 32: the operands' values are the same numbers exactly.
Source: TransformerEngine, which runs its blockwise recipe so on SM100.
"""

from __future__ import annotations

import torch

from lowering.blockwise.arguments import BlockwiseGemm
from lowering.blockwise.gemm import IMPLEMENTATIONS, Implementation, as_told
from lowering.copies import num_blocks
from lowering.formats import BLOCK, Granularity
from lowering.mxfp8.gemm import WrongGemmError, scaled_mm_mxfp8
from lowering.mxfp8.reference import TILE


def scaled_mm_blockwise(gemm: BlockwiseGemm) -> torch.Tensor:
    """See `reference.scaled_mm_blockwise`; the scales are powers of two, which is checked on the CPU alone: a GPU would have
    to be waited for."""
    m, n, k = gemm.sizes
    scale_a = e8m0_scales(gemm.scale_inv_a, m, k, gemm.granularity_a)
    scale_b = e8m0_scales(gemm.scale_inv_b, n, k, gemm.granularity_b)
    try:
        return scaled_mm_mxfp8(gemm.a, gemm.b, scale_a, scale_b, gemm.bias, out_dtype=gemm.out_dtype)
    except WrongGemmError:  # which the trial has logged
        compute = IMPLEMENTATIONS["triton"].prepare(gemm)
        return compute(gemm.a, gemm.b, gemm.scale_inv_a, gemm.scale_inv_b, gemm.bias)


def e8m0_scales(scale_inv: torch.Tensor, outer: int, inner: int, granularity: str) -> torch.Tensor:
    """GEMM-ready float32 scales of a copy [outer, inner] as GEMM-ready E8M0 ones.

    A tile of E8M0 scales covers 128 rows and 128 of inner: one float32 scale per row or, with 128x128 blocks, in all.
    """
    bits = scale_inv.view(torch.int32)
    if not scale_inv.is_cuda:
        _check_powers_of_two(scale_inv, bits)
    codes = (bits >> 23).to(torch.uint8)  # 2**-127, a subnormal, and the padding, which is 0.0, have code 0
    rows, cols = (outer + BLOCK - 1) // BLOCK, num_blocks(inner, BLOCK)
    if granularity == Granularity.BLOCK_128X128:
        return codes[:, :cols, None, None].expand(rows, cols, *TILE).contiguous()
    padded = torch.nn.functional.pad(codes, (0, rows * BLOCK - codes.shape[1]))
    lines = padded.reshape(cols, rows, 4, 32).permute(1, 0, 3, 2)
    return lines[..., None].expand(rows, cols, 32, 4, 4).reshape(rows, cols, *TILE)


def _check_powers_of_two(scale_inv: torch.Tensor, bits: torch.Tensor) -> None:
    is_power = ((bits & 0x7FFFFF) == 0) | (bits == 0x400000)
    if not bool(is_power.all()):
        found = scale_inv[~is_power][0].item()
        raise ValueError(f"a scale is {found}, no power of two, which MXFP8 needs; quantize with power_of_2=True")


IMPLEMENTATIONS["mxfp8"] = Implementation(as_told(scaled_mm_blockwise))
