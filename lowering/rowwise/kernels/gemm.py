"""The rowwise FP8 GEMM of CUDA devices: torch's, with its conditions met here."""

from __future__ import annotations

from typing import Any

import torch

from lowering.formats import Granularity, pad_to_alignment
from lowering.hardware import needs_dense_rows, rows_refusal
from lowering.products import LineProduct
from lowering.tensor_cores import scaled_mm
from lowering.triton.epilogue import finished


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
    """Whether torch's rowwise GEMM takes these tensors as they are, and is the kernel to prefer."""
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
