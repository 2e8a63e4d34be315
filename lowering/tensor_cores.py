"""The FP8 GEMMs of CUDA devices with scalar scales and with a scale per row: torch's, with their conditions met here."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from lowering.checks import check_operands
from lowering.formats import Granularity, pad_to_alignment
from lowering.hardware import Gemm, needs_dense_rows, refusal, rows_refusal
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


def scaled_mm_rowwise(*operands: Any, **options: Any) -> torch.Tensor:
    """`reference.scaled_mm_rowwise` on FP8 tensor cores.

    NOTE [scales after the GEMM] Where torch's rowwise GEMM does not take these dtypes or sizes, or is slow
    (`hardware.rows_refusal`), the per-tensor GEMM multiplies with scale 1 into float32, and one kernel scales its result, adds
    the bias and rounds once. Scales that are one for all rows and one for all columns are those of the per-tensor GEMM.
    """
    product = LineProduct(*operands, **options)
    a, b, (m, n, _) = product.a, product.b, product.sizes
    if fits(product):
        return torch._scaled_mm(
            a,
            b,
            _per_line(product.scale_inv_a, m),
            _per_line(product.scale_inv_b, n).t(),
            bias=product.bias,
            out_dtype=product.out_dtype,
            use_fast_accum=product.fast_accum,
        )
    if product.scale_inv_a.numel() == product.scale_inv_b.numel() == 1:
        return scaled_mm(*operands, **options)
    one = torch.ones((), dtype=torch.float32, device=a.device)
    out = scaled_mm(a, b, one, one, out_dtype=torch.float32, fast_accum=product.fast_accum)
    return finished(out, product, scales_lines=True)


def fits(product: LineProduct) -> bool:
    """True if torch's rowwise GEMM takes these tensors as they are, and is the kernel to prefer."""
    device, bias = product.a.device, product.bias
    gemm = product.gemm(Granularity.ROW_WISE, Granularity.ROW_WISE)
    if rows_refusal(gemm, device, product.fast_accum) is not None:
        return False
    is_dense = bias is None or (bias.stride(0) == 1 and bias.data_ptr() % 16 == 0)
    without_gaps = needs_dense_rows(device)
    return is_dense and all(_is_row_major(x, without_gaps) for x in (product.a, product.b.t()))


def _is_row_major(x: torch.Tensor, without_gaps: bool) -> bool:
    rows, cols = x.shape
    is_dense = x.stride(1) == 1 and (x.stride(0) == cols if without_gaps else x.stride(0) >= cols)
    return is_dense and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0 and pad_to_alignment(cols) == cols and rows > 0


def _per_line(scale_inv: torch.Tensor, lines: int) -> torch.Tensor:
    """The scales [lines, 1], dense; a scalar is repeated."""
    return scale_inv.expand(lines, 1).contiguous()
