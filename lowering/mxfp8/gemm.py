"""Who computes an MXFP8 GEMM: cuBLASLt, by way of `torch.nn.functional.scaled_mm` (SM100), or the reference."""

from __future__ import annotations

import torch

from lowering import hardware
from lowering.formats import MX_BLOCK, Granularity
from lowering.mxfp8 import reference


def scaled_mm_mxfp8(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """See `reference.scaled_mm_mxfp8`."""
    if not a.is_cuda or 0 in (*a.shape, b.shape[1]):
        return reference.scaled_mm_mxfp8(a, b, scale_a, scale_b, bias, out_dtype=out_dtype)
    (m, k), n = a.shape, b.shape[1]
    k += -k % MX_BLOCK
    mx = Granularity.BLOCK_1X32
    reason = hardware.refusal(hardware.Gemm(a.dtype, b.dtype, mx, mx, m=m, n=n, k=k), a.device)
    if reason is not None:
        raise NotImplementedError(f"{reason}; blockwise and per-tensor scaling run where MXFP8 does not")
    gemm = hardware.Gemm(a.dtype, b.dtype, mx, mx, out_dtype, None if bias is None else bias.dtype)
    if hardware.refusal(gemm, a.device) is None:
        return _cublaslt(a, b, scale_a, scale_b, bias, out_dtype)
    # A bias that the epilogue does not take: still one rounding.
    out = _cublaslt(a, b, scale_a, scale_b, None, torch.float32)
    return (out if bias is None else out + bias.to(torch.float32)).to(out_dtype)


def _cublaslt(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    functional = torch.nn.functional
    scaling, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    return functional.scaled_mm(
        _whole_blocks(a),
        _whole_blocks(b.t()).t(),
        scale_a.view(torch.float8_e8m0fnu),
        scaling,
        scale_b.view(torch.float8_e8m0fnu),
        scaling,
        swizzle,
        swizzle,
        bias=bias,
        output_dtype=out_dtype,
    )


def _whole_blocks(q: torch.Tensor) -> torch.Tensor:
    """A copy [outer, inner] contiguous, with zeros up to whole blocks; itself where it is so already."""
    extra = -q.shape[1] % MX_BLOCK
    if not extra:
        return q.contiguous()
    return torch.nn.functional.pad(q.view(torch.uint8), (0, extra)).view(q.dtype)
