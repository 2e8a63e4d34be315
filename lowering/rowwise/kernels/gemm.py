"""The rowwise FP8 GEMM of CUDA devices: torch's, with its conditions met here."""

from __future__ import annotations

from typing import Any

import torch

from lowering.formats import Granularity, pad_to_alignment
from lowering.hardware import has_blockwise_scaled_mm, refusal
from lowering.products import LineProduct, scaled_lines
from lowering.tensor_cores import scaled_mm


def scaled_mm_rowwise(*operands: Any, **options: Any) -> torch.Tensor:
    """`reference.scaled_mm_rowwise` on FP8 tensor cores.

    NOTE [scales after the GEMM] Where torch's rowwise GEMM does not take these dtypes or sizes, and where it would be the
    CUTLASS kernel without fast accumulation (before capability 9 or CUDA 12.9; it is slow), the per-tensor GEMM multiplies
    with scale 1 into float32, and its result is scaled, the bias added, and rounded once.
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
    one = torch.ones((), dtype=torch.float32, device=a.device)
    return scaled_lines(scaled_mm(a, b, one, one, out_dtype=torch.float32, fast_accum=product.fast_accum), product)


def fits(product: LineProduct) -> bool:
    """Whether torch's rowwise GEMM takes these tensors as they are, and is the kernel to prefer."""
    device, bias = product.a.device, product.bias
    gemm = product.gemm(Granularity.ROW_WISE, Granularity.ROW_WISE)
    if refusal(gemm, device) is not None or not (product.fast_accum or has_blockwise_scaled_mm(device)):
        return False
    is_dense = bias is None or (bias.stride(0) == 1 and bias.data_ptr() % 16 == 0)
    return is_dense and _is_row_major(product.a) and _is_row_major(product.b.t())


def _is_row_major(x: torch.Tensor) -> bool:
    rows, cols = x.shape
    is_dense = x.stride(1) == 1 and x.stride(0) >= cols
    return is_dense and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0 and pad_to_alignment(cols) == cols and rows > 0


def _per_line(scale_inv: torch.Tensor, lines: int) -> torch.Tensor:
    """The scales [lines, 1], dense; a scalar is repeated."""
    return scale_inv.expand(lines, 1).contiguous()
