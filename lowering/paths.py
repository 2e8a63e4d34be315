"""The paths that an FP8 GEMM can take on a GPU: what computes it, by its formats and the platform.

What a library refuses because of sizes, strides or addresses, or after its trial, is known when a GEMM runs, and takes the path
without a library. The rules themselves are in `hardware.py`; who runs is decided in `rowwise/kernels/gemm.py`,
`inductor/rowwise.py`, `blockwise/gemm.py` and `grouped/gemm.py`.
"""

from __future__ import annotations

import enum

from lowering import deep_gemm
from lowering.formats import E4M3, Granularity
from lowering.hardware import Gemm, Platform, cutlass_refusal, refusal, rows_refusal


class GemmPath(enum.Enum):
    """What computes a GEMM."""

    TENSORS = "torch, one scale per tensor"
    ROWS = "torch, scales of rows"
    ROWS_AFTERWARDS = "torch, scales of rows applied afterwards"
    BLOCKS = "cuBLASLt or DeepGEMM"
    BLOCKS_BY_MXFP8 = "torch, blocks of 128 as blocks of 32"
    BLOCKS_BY_TRITON = "Triton"
    MXFP8 = "torch, blocks of 32"
    GROUPS = "CUTLASS or DeepGEMM, all groups"
    GROUPS_BY_TRITON = "Triton, all groups"


_SQUARES = (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128)


def path_of(gemm: Gemm, platform: Platform, *, fast_accum: bool) -> GemmPath | None:
    """The path of a GEMM on an NVIDIA GPU; None where there is none."""
    scales = gemm.granularity_a, gemm.granularity_b
    if gemm.is_grouped:
        if refusal(gemm, platform) is not None:
            return None
        is_torchs = fast_accum and cutlass_refusal(gemm, platform) is None
        return GemmPath.GROUPS if is_torchs or _takes_deep_gemm(gemm, platform) else GemmPath.GROUPS_BY_TRITON
    if Granularity.BLOCK_1X32 in scales:
        return GemmPath.MXFP8 if refusal(gemm, platform) is None else None
    if gemm.has_blocks:
        if refusal(gemm, platform) is None or _takes_deep_gemm(gemm, platform):
            return GemmPath.BLOCKS
        one_by_32 = Gemm(gemm.a_dtype, gemm.b_dtype, Granularity.BLOCK_1X32, Granularity.BLOCK_1X32)
        return GemmPath.BLOCKS_BY_MXFP8 if refusal(one_by_32, platform) is None else GemmPath.BLOCKS_BY_TRITON
    if scales == (Granularity.ROW_WISE, Granularity.ROW_WISE):
        return GemmPath.ROWS if rows_refusal(gemm, platform, fast_accum) is None else GemmPath.ROWS_AFTERWARDS
    return GemmPath.TENSORS


def _takes_deep_gemm(gemm: Gemm, platform: Platform) -> bool:
    is_its_kind = (gemm.a_dtype, gemm.b_dtype) == (E4M3, E4M3) and (gemm.granularity_a, gemm.granularity_b) == _SQUARES
    return is_its_kind and platform.capability == deep_gemm.CAPABILITY and deep_gemm.library() is not None
