"""Who computes an MXFP8 GEMM: cuBLASLt, by way of `torch.nn.functional.scaled_mm` (SM100), or the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lowering import hardware
from lowering.formats import MX_BLOCK, Granularity
from lowering.mxfp8 import reference
from lowering.products import Product


def scaled_mm_mxfp8(*operands: Any, **options: Any) -> torch.Tensor:
    """See `reference.scaled_mm_mxfp8`."""
    product = Product(*operands, **options)
    (m, n, k), device = product.sizes, product.a.device
    if not product.a.is_cuda or 0 in (m, n, k):
        return reference.scaled_mm_mxfp8(*operands, **options)
    mx = Granularity.BLOCK_1X32
    gemm = dataclasses.replace(product.gemm(mx, mx), k=k + -k % MX_BLOCK)
    reason = hardware.refusal(dataclasses.replace(gemm, out_dtype=torch.bfloat16, bias_dtype=None), device)
    if reason is not None:
        raise NotImplementedError(f"{reason}; blockwise and per-tensor scaling run where MXFP8 does not")
    if hardware.refusal(gemm, device) is None:
        return _cublaslt(product)
    from lowering.triton.epilogue import finished  # imports Triton

    # A bias that the epilogue does not take: still one rounding.
    return finished(_cublaslt(dataclasses.replace(product, bias=None, out_dtype=torch.float32)), product)


def _cublaslt(product: Product) -> torch.Tensor:
    functional = torch.nn.functional
    scaling, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    return functional.scaled_mm(
        _whole_blocks(product.a),
        _whole_blocks(product.b.t()).t(),
        product.scale_inv_a.view(torch.float8_e8m0fnu),
        scaling,
        product.scale_inv_b.view(torch.float8_e8m0fnu),
        scaling,
        swizzle,
        swizzle,
        bias=product.bias,
        output_dtype=product.out_dtype,
    )


def _whole_blocks(q: torch.Tensor) -> torch.Tensor:
    """A copy [outer, inner] contiguous, with zeros up to whole blocks; itself where it is so already."""
    extra = -q.shape[1] % MX_BLOCK
    if not extra:
        return q.contiguous()
    return torch.nn.functional.pad(q.view(torch.uint8), (0, extra)).view(q.dtype)
