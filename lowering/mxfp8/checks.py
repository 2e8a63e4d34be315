"""Checks of the arguments of the MXFP8 operations. Every error is a ValueError that names the value and the fix."""

from __future__ import annotations

import torch

from lowering.formats import HIGH_PRECISION_DTYPES, fp8_max
from lowering.mxfp8.reference import compact_scale_shape, gemm_ready_scale_shape


def check_quantize(x: torch.Tensor, dtype: torch.dtype) -> None:
    fp8_max(dtype)
    if x.dtype not in HIGH_PRECISION_DTYPES:
        names = ", ".join(str(d) for d in HIGH_PRECISION_DTYPES)
        raise ValueError(f"x is {x.dtype}, which is not quantized to MXFP8; convert it to one of {names}")
    if x.dim() == 0:
        raise ValueError("x has no dimensions, blocks need one; reshape it to (1,)")


def check_matrix(x: torch.Tensor, dtype: torch.dtype) -> None:
    check_quantize(x, dtype)
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; flatten it to a matrix [rows, last]")


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
            " what compact_mxfp8 or quantize_mxfp8 returned"
        )


def check_gemm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    fp8_max(a.dtype)
    fp8_max(b.dtype)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} do not multiply; pass a [M, K] and b [K, N]")
    if out_dtype not in HIGH_PRECISION_DTYPES:
        raise ValueError(f"out_dtype is {out_dtype}; use torch.bfloat16, torch.float16 or torch.float32")
    if bias is not None and tuple(bias.shape) != (b.shape[1],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; pass one of shape ({b.shape[1]},), the columns of b")


def check_scales(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> None:
    for name, scale, (outer, inner) in (("a", scale_a, a.shape), ("b", scale_b, b.shape[::-1])):
        expected = gemm_ready_scale_shape(outer, inner)
        if tuple(scale.shape) != expected or not scale.is_contiguous() or scale.dtype != torch.uint8:
            raise ValueError(
                f"scale_{name} is {scale.dtype} {tuple(scale.shape)} with strides {scale.stride()}, expected contiguous"
                f" uint8 {expected}: the GEMM-ready scales of cast_mxfp8 or gemm_ready_mxfp8"
            )
