"""The FP8 GEMMs of CUDA devices with scalar scales and with a scale per row: torch's, with their conditions met here."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowering.formats import Granularity, pad_to_alignment
from lowering.hardware import Gemm, needs_dense_rows, refusal, rows_refusal
from lowering.products import Compute, Product
from lowering.triton.epilogue import finished


def of_tensors(product: Product) -> Compute:
    """The function that computes products with scalar scales which differ from this one in their values alone. The GEMM takes
    a [M, K] row-major, b [K, N] column-major, K and N multiples of 16, and scales at addresses of whole 16 bytes (cuBLAS 13
    refuses others); what comes otherwise is copied into that form first. It adds a bias of the output's own half precision; any
    other bias is added in float32, before the one rounding."""
    a, b, bias, out_dtype, (m, n, k) = product.a, product.b, product.bias, product.out_dtype, product.sizes
    fast_accum = product.fast_accum
    if m == 0 or n == 0 or k == 0:
        return lambda a, b, scale_inv_a, scale_inv_b, bias: _without_products(a, n, bias, out_dtype)
    in_epilogue = False
    if bias is not None:
        gemm = Gemm(a.dtype, b.dtype, out_dtype=out_dtype, bias_dtype=bias.dtype)
        in_epilogue = refusal(gemm, a.device) is None
    padded_k, padded_n = pad_to_alignment(k), pad_to_alignment(n)
    fits_a, fits_b = _is_ready(a, m, padded_k), _is_ready(b.t(), padded_n, padded_k)
    ready_a, ready_b = _is_ready_scale(product.scale_inv_a), _is_ready_scale(product.scale_inv_b)
    asked = out_dtype if bias is None or in_epilogue else torch.float32
    is_whole = bias is None or in_epilogue

    def compute(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, bias: Tensor | None) -> Tensor:
        out = torch._scaled_mm(
            a if fits_a else _row_major(a, m, padded_k),
            b if fits_b else _row_major(b.t(), padded_n, padded_k).t(),
            scale_inv_a if ready_a else scale_inv_a.reshape(()).clone(),
            scale_inv_b if ready_b else scale_inv_b.reshape(()).clone(),
            bias=_padded(bias, padded_n) if in_epilogue else None,
            out_dtype=asked,
            use_fast_accum=fast_accum,
        )
        if is_whole:
            return out if padded_n == n else out[:, :n].contiguous()
        return finished(out, Product(a, b, scale_inv_a, scale_inv_b, bias, out_dtype=out_dtype))

    return compute


def _is_ready(x: Tensor, rows: int, cols: int) -> bool:
    """True if the GEMM takes x as a row-major [rows, cols] matrix: with rows of whole 16 bytes."""
    is_row_major = x.shape == (rows, cols) and x.stride(1) == 1 and x.stride(0) >= cols and x.stride(0) % 16 == 0
    return is_row_major and x.data_ptr() % 16 == 0


def _is_ready_scale(scale_inv: Tensor) -> bool:
    return scale_inv.dim() == 0 and scale_inv.data_ptr() % 16 == 0


def _row_major(x: Tensor, rows: int, cols: int) -> Tensor:
    """x as a row-major [rows, cols] matrix with rows of whole 16 bytes, padded with zeros."""
    if x.shape != (rows, cols):
        padded = torch.zeros((rows, cols), dtype=torch.uint8, device=x.device)
        padded[: x.shape[0], : x.shape[1]] = x.view(torch.uint8)
        return padded.view(x.dtype)
    return x if _is_ready(x, rows, cols) else x.clone(memory_format=torch.contiguous_format)


def _padded(bias: Tensor | None, n: int) -> Tensor | None:
    """The bias as cuBLASLt reads it: dense, whatever its strides were, and from a 16-byte address."""
    if bias is None:
        return None
    if bias.shape[0] != n:
        return pad(bias, (0, n - bias.shape[0]))
    is_dense = bias.stride(0) == 1 and bias.data_ptr() % 16 == 0
    return bias if is_dense else bias.clone(memory_format=torch.contiguous_format)


def _without_products(a: Tensor, n: int, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    out = torch.zeros((a.shape[0], n), dtype=out_dtype, device=a.device)
    return out if bias is None else out.copy_(bias.to(torch.float32).expand_as(out))


def of_rows(product: Product) -> Compute:
    """`of_tensors` with scales of rows. NOTE [scales after the GEMM] Where torch's rowwise GEMM does not take these dtypes or
    sizes, or is slow (`hardware.rows_refusal`), the per-tensor GEMM multiplies with scale 1 into float32, and one kernel scales
    its result, adds the bias and rounds once. Scales that are one for all rows and one for all columns are those of the
    per-tensor GEMM."""
    (m, n, _), out_dtype, fast_accum = product.sizes, product.out_dtype, product.fast_accum
    if fits(product):
        ready_a, ready_b = _is_per_line(product.scale_inv_a, m), _is_per_line(product.scale_inv_b, n)

        def by_torch(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, bias: Tensor | None) -> Tensor:
            scale_a = scale_inv_a if ready_a else _per_line(scale_inv_a, m)
            scale_b = scale_inv_b if ready_b else _per_line(scale_inv_b, n)
            how: Any = {"bias": bias, "out_dtype": out_dtype, "use_fast_accum": fast_accum}
            return torch._scaled_mm(a, b, scale_a, scale_b.t(), **how)

        return by_torch
    if product.scale_inv_a.numel() == product.scale_inv_b.numel() == 1:
        return of_tensors(product)
    one = torch.ones((), dtype=torch.float32, device="meta")
    multiply = of_tensors(dataclasses.replace(product, scale_inv_a=one, scale_inv_b=one, bias=None, out_dtype=torch.float32))

    def afterwards(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, bias: Tensor | None) -> Tensor:
        one = torch.ones((), dtype=torch.float32, device=a.device)
        given = Product(a, b, scale_inv_a, scale_inv_b, bias, out_dtype=out_dtype)
        return finished(multiply(a, b, one, one, None), given, scales_lines=True)

    return afterwards


def fits(product: Product) -> bool:
    """True if torch's rowwise GEMM takes these tensors as they are, and is the kernel to prefer."""
    device, bias = product.a.device, product.bias
    gemm = product.gemm(Granularity.ROW_WISE, Granularity.ROW_WISE)
    if rows_refusal(gemm, device, product.fast_accum) is not None:
        return False
    is_dense = bias is None or (bias.stride(0) == 1 and bias.data_ptr() % 16 == 0)
    without_gaps = needs_dense_rows(device)
    return is_dense and all(_is_row_major(x, without_gaps) for x in (product.a, product.b.t()))


def _is_row_major(x: Tensor, without_gaps: bool) -> bool:
    rows, cols = x.shape
    is_dense = x.stride(1) == 1 and (x.stride(0) == cols if without_gaps else x.stride(0) >= cols)
    return is_dense and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0 and pad_to_alignment(cols) == cols and rows > 0


def _is_per_line(scale_inv: Tensor, lines: int) -> bool:
    return scale_inv.shape == (lines, 1) and scale_inv.is_contiguous() and scale_inv.data_ptr() % 16 == 0


def _per_line(scale_inv: Tensor, lines: int) -> Tensor:
    """The scales [lines, 1], dense, in memory of their own; a scalar is repeated."""
    return scale_inv.expand(lines, 1).clone(memory_format=torch.contiguous_format)
