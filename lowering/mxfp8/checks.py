"""Checks of the arguments of the MXFP8 operations. Every error is a ValueError that names the value and the fix."""

from __future__ import annotations

import torch

from lowering.checks import check_blocks_of, check_flat, check_product
from lowering.formats import fp8_max
from lowering.mxfp8.reference import compact_scale_shape, gemm_ready_scale_shape


def check_casts(xs: list[torch.Tensor], dtype: torch.dtype, rowwise: bool, columnwise: bool, compact: bool) -> None:
    check_blocks_of(xs, dtype, "to MXFP8", rowwise, columnwise, compact)


def check_compact(q: torch.Tensor, codes: torch.Tensor, square: bool, columnwise: bool) -> None:
    fp8_max(q.dtype)
    if q.dim() != 2:
        raise ValueError(f"q has shape {tuple(q.shape)}; flatten it to a matrix")
    outer, inner = (q.shape[1], q.shape[0]) if columnwise else q.shape
    expected = compact_scale_shape(outer, inner, square)
    expected = expected[::-1] if columnwise else expected
    if tuple(codes.shape) != tuple(expected) or codes.dtype != torch.uint8:
        raise ValueError(
            f"codes are {codes.dtype} {tuple(codes.shape)}, compact scales of this copy are uint8 {tuple(expected)}; pass"
            " what cast_mxfp8 with compact=True or quantize_mxfp8 returned"
        )


def check_gemm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    check_product(a, b, bias, out_dtype)


def check_scales(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> None:
    _check_gemm_ready("scale_a", scale_a, *a.shape)
    _check_gemm_ready("scale_b", scale_b, *b.shape[::-1])


def check_scale(q: torch.Tensor, scale: torch.Tensor) -> None:
    fp8_max(q.dtype)
    check_flat(q)
    _check_gemm_ready("scale", scale, *q.shape)


def _check_gemm_ready(name: str, scale: torch.Tensor, outer: int, inner: int) -> None:
    expected = gemm_ready_scale_shape(outer, inner)
    if tuple(scale.shape) != expected or not scale.is_contiguous() or scale.dtype != torch.uint8:
        raise ValueError(
            f"{name} is {scale.dtype} {tuple(scale.shape)} with strides {scale.stride()}, expected contiguous"
            f" uint8 {expected}: the GEMM-ready scales of cast_mxfp8 or gemm_ready_mxfp8"
        )
