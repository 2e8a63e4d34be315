"""Blockwise GEMMs through cuBLASLt, by way of `torch.nn.functional.scaled_mm` (SM90, CUDA 12.9 or newer)."""

from __future__ import annotations

import torch

from lowering.blockwise_reference import num_blocks
from lowering.capability import has_blockwise_scaled_mm
from lowering.formats import E5M2, GEMM_ALIGNMENT


def refusal(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> str | None:
    """Why cuBLASLt cannot compute this GEMM with the semantics of `scaled_mm_blockwise`, or None where it can.

    Restrictions: ScaledBlas.cpp of torch 2.13 (`_check_deepseek_support`, `_scaled_gemm`) and cuBLAS's "1D and 2D block
    scaling".
    """
    m, k = a.shape
    n = b.shape[1]
    if not a.is_cuda:
        return f"a is on {a.device}, not on a CUDA device"
    if not has_blockwise_scaled_mm(a.device):
        return "it needs compute capability 9.x and CUDA 12.9 or newer"
    if 0 in (m, n, k):
        return f"M, N, K = {m}, {n}, {k} has a zero"
    if k % GEMM_ALIGNMENT or n % GEMM_ALIGNMENT or m % 4:
        return f"M, N, K = {m}, {n}, {k} are not multiples of 4, {GEMM_ALIGNMENT}, {GEMM_ALIGNMENT}"
    if a.dtype == E5M2 and b.dtype == E5M2:
        return "both operands are float8_e5m2"
    if a.stride() != (k, 1) or b.stride() != (1, k):
        return f"strides of a {a.stride()} and b {b.stride()} are not row-major and column-major"
    if bias is not None and (bias.dtype != out_dtype or out_dtype == torch.float32):
        return f"a bias of {bias.dtype} with an output of {out_dtype}"
    return None


def scaled_mm_blockwise(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None,
    block_dims_a: int,
    block_dims_b: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See `blockwise.scaled_mm_blockwise`; only for arguments that `refusal` accepts."""
    recipes = {1: torch.nn.functional.ScalingType.BlockWise1x128, 2: torch.nn.functional.ScalingType.BlockWise128x128}
    return torch.nn.functional.scaled_mm(
        a,
        b,
        scale_view(scale_inv_a, a.shape[0], a.shape[1], block_dims_a),
        recipes[block_dims_a],
        scale_view(scale_inv_b, b.shape[1], b.shape[0], block_dims_b),
        recipes[block_dims_b],
        bias=bias,
        output_dtype=out_dtype,
    )


def scale_view(scale_inv: torch.Tensor, outer: int, inner: int, block_dims: int) -> torch.Tensor:
    """GEMM-ready scales as `torch._scaled_mm_v2` describes them, the memory unchanged.

    1x128: [outer, ceil(inner/128)] with strides (1, outer), outer a multiple of 4. 128x128: [pad4(ceil(inner/128)),
    ceil(outer/128)] with strides (1, pad4(ceil(inner/128))), whose padding torch's `_scaled_mm` of 2.9 left out.
    """
    if block_dims == 1:
        return scale_inv.as_strided((outer, num_blocks(inner)), (1, outer))
    width = scale_inv.shape[1]
    return scale_inv.as_strided((width, num_blocks(outer)), (1, width))
