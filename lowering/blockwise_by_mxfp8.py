"""Blockwise GEMMs through MXFP8: SM100 has no GEMM with blocks of 128, and one with blocks of 32.

A power of two that 128 values share is four equal E8M0 scales of 32: the operands' values are the same numbers exactly.
Source: TransformerEngine, which runs its blockwise recipe so on SM100.
"""

from __future__ import annotations

import torch

from lowering.blockwise.arguments import BlockwiseGemm
from lowering.blockwise.gemm import IMPLEMENTATIONS, Implementation, as_told
from lowering.formats import Granularity
from lowering.mxfp8.gemm import WrongGemmError, scaled_mm_mxfp8
from lowering.mxfp8.ops import e8m0_scales


def scaled_mm_blockwise(gemm: BlockwiseGemm) -> torch.Tensor:
    """See `reference.scaled_mm_blockwise`; the scales are powers of two, which is checked on the CPU alone: a GPU would have
    to be waited for."""
    m, n, k = gemm.sizes
    if not gemm.a.is_cuda:
        for scale_inv in (gemm.scale_inv_a, gemm.scale_inv_b):
            _check_powers_of_two(scale_inv)
    square_a, square_b = (kind is Granularity.BLOCK_128X128 for kind in gemm.granularities)
    scale_a, scale_b = e8m0_scales(gemm.scale_inv_a, gemm.scale_inv_b, m, n, k, square_a=square_a, square_b=square_b)
    try:
        return scaled_mm_mxfp8(gemm.a, gemm.b, scale_a, scale_b, gemm.bias, out_dtype=gemm.out_dtype)
    except WrongGemmError:  # which the trial has logged
        compute = IMPLEMENTATIONS["triton"].prepare(gemm)
        return compute(gemm.a, gemm.b, gemm.scale_inv_a, gemm.scale_inv_b, gemm.bias)


def _check_powers_of_two(scale_inv: torch.Tensor) -> None:
    bits = scale_inv.view(torch.int32)
    is_power = ((bits & 0x7FFFFF) == 0) | (bits == 0x400000)
    if not bool(is_power.all()):
        found = scale_inv[~is_power][0].item()
        raise ValueError(f"a scale is {found}, no power of two, which MXFP8 needs; quantize with power_of_2=True")


IMPLEMENTATIONS["mxfp8"] = Implementation(as_told(scaled_mm_blockwise))
