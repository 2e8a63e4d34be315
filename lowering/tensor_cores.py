"""The FP8 GEMM of CUDA devices with scalar scales: torch's, with its conditions met here."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from lowering.checks import check_operands
from lowering.formats import pad_to_alignment
from lowering.hardware import Gemm, refusal
from lowering.products import LineProduct
from lowering.triton.epilogue import finished


def scaled_mm(*operands: Any, **options: Any) -> torch.Tensor:
    """`lowering::scaled_mm` on FP8 tensor cores.

    The GEMM takes a [M, K] row-major, b [K, N] column-major, K and N multiples of 16; other operands are copied into
    that form first. It adds a bias of the output's own half precision; any other bias is added in float32, before the
    one rounding.
    """
    product = LineProduct(*operands, **options)
    a, b, bias, out_dtype, (m, n, k) = product.a, product.b, product.bias, product.out_dtype, product.sizes
    check_operands(a, b)
    if m == 0 or n == 0 or k == 0:
        return _without_products(a, n, bias, out_dtype)
    in_epilogue = False
    if bias is not None:
        gemm = Gemm(a.dtype, b.dtype, out_dtype=out_dtype, bias_dtype=bias.dtype)
        in_epilogue = refusal(gemm, a.device) is None
    padded_k, padded_n = pad_to_alignment(k), pad_to_alignment(n)
    out = torch._scaled_mm(
        _row_major(a, m, padded_k),
        _row_major(b.t(), padded_n, padded_k).t(),
        product.scale_inv_a.reshape(()),
        product.scale_inv_b.reshape(()),
        bias=_padded(bias, padded_n) if in_epilogue else None,
        out_dtype=out_dtype if bias is None or in_epilogue else torch.float32,
        use_fast_accum=product.fast_accum,
    )
    if bias is None or in_epilogue:
        return out if padded_n == n else out[:, :n].contiguous()
    return finished(out, product)


def _row_major(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """x as a row-major [rows, cols] matrix with rows of whole 16 bytes, padded with zeros."""
    if x.shape != (rows, cols):
        padded = torch.zeros((rows, cols), dtype=torch.uint8, device=x.device)
        padded[: x.shape[0], : x.shape[1]] = x.view(torch.uint8)
        return padded.view(x.dtype)
    is_row_major = x.stride(1) == 1 and x.stride(0) >= cols and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    return x if is_row_major else x.clone(memory_format=torch.contiguous_format)


def _padded(bias: torch.Tensor | None, n: int) -> torch.Tensor | None:
    """The bias as cuBLASLt reads it: dense, whatever its strides were, and from a 16-byte address."""
    if bias is None:
        return None
    if bias.shape[0] != n:
        return pad(bias, (0, n - bias.shape[0]))
    is_dense = bias.stride(0) == 1 and bias.data_ptr() % 16 == 0
    return bias if is_dense else bias.clone(memory_format=torch.contiguous_format)


def _without_products(a: torch.Tensor, n: int, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros((a.shape[0], n), dtype=out_dtype, device=a.device)
    return out if bias is None else out.copy_(bias.to(torch.float32).expand_as(out))
