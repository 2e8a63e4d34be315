"""The paths that an FP8 GEMM can take on a GPU: what computes it, by its formats and the platform.

What a library refuses because of sizes, strides or addresses, or after its trial, is known when a GEMM runs, and takes the path
without a library. The rules themselves are in `hardware.py`; who runs is decided in `gemm.py`,
`inductor/rowwise.py`, `blockwise/gemm.py` and `grouped/gemm.py`.

NOTE [blocks of 128 as blocks of 32] SM100 has no GEMM with blocks of 128, and one with blocks of 32. A power of two that 128
values share is four equal E8M0 scales of 32: the operands' values are the same numbers exactly. Source: TransformerEngine,
which runs its blockwise recipe so on SM100.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

from lowering import deep_gemm, hardware
from lowering.blockwise.gemm import IMPLEMENTATIONS
from lowering.formats import E4M3, Granularity
from lowering.gemm import by_decision
from lowering.hardware import Gemm, Platform, cutlass_refusal, refusal, rows_refusal
from lowering.mxfp8.gemm import WrongGemmError
from lowering.products import Product, as_told


class GemmPath(enum.Enum):
    """A way to compute a GEMM on a GPU."""

    TENSORS = "torch, one scale per tensor"
    ROWS = "torch, scales of rows"
    ROWS_AFTERWARDS = "torch, scales of rows applied afterwards"
    BLOCKS = "cuBLASLt or DeepGEMM"
    BLOCKS_BY_MXFP8 = "torch, blocks of 128 as blocks of 32"
    BLOCKS_BY_TRITON = "Triton"
    MXFP8 = "torch, blocks of 32"
    GROUPS = "CUTLASS or DeepGEMM, all groups in one launch"
    GROUPS_BY_TRITON = "Triton, all groups in one launch"


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
    if not is_its_kind or platform.capability != deep_gemm.CAPABILITY:
        return False
    return hardware.is_present(platform) and deep_gemm.library() is not None  # not expected on another machine


def multiply_as_mxfp8(gemm: Product) -> torch.Tensor:
    """A blockwise GEMM by that of MXFP8, see NOTE [blocks of 128 as blocks of 32]. The scales are powers of two, which is
    checked on the CPU alone: a GPU would have to be waited for."""
    m, n, k = gemm.sizes
    if not gemm.a.is_cuda:
        for scale_inv in (gemm.scale_inv_a, gemm.scale_inv_b):
            _check_powers_of_two(scale_inv)
    square_a, square_b = (kind is Granularity.BLOCK_128X128 for kind in gemm.granularities)
    if hardware.runs_kernels(gemm.a.device):
        from lowering.mxfp8.kernels import e8m0_scales  # imports Triton
    else:
        from lowering.mxfp8.reference import e8m0_scales
    scale_a, scale_b = e8m0_scales(gemm.scale_inv_a, gemm.scale_inv_b, m, n, k, square_a=square_a, square_b=square_b)
    how: Any = dict.fromkeys(("granularity_a", "granularity_b"), Granularity.BLOCK_1X32.value)
    try:
        return by_decision(gemm.a, gemm.b, scale_a, scale_b, gemm.bias, **how, out_dtype=gemm.out_dtype)
    except WrongGemmError:  # which the trial has logged
        return IMPLEMENTATIONS["triton"](gemm)(*gemm.operands)


def _check_powers_of_two(scale_inv: torch.Tensor) -> None:
    bits = scale_inv.view(torch.int32)
    is_power = ((bits & 0x7FFFFF) == 0) | (bits == 0x400000)
    if not bool(is_power.all()):
        found = scale_inv[~is_power][0].item()
        raise ValueError(f"a scale is {found}, no power of two, which MXFP8 needs; quantize with power_of_2=True")


IMPLEMENTATIONS["mxfp8"] = as_told(multiply_as_mxfp8)
