"""The rowwise FP8 GEMM of CUDA devices: torch's, with its conditions met here."""

from __future__ import annotations

import torch

from lowering.formats import Granularity, pad_to_alignment
from lowering.hardware import Gemm, has_blockwise_scaled_mm, refusal
from lowering.products import scaled_lines
from lowering.tensor_cores import scaled_mm


def scaled_mm_rowwise(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> torch.Tensor:
    """`reference.scaled_mm_rowwise` on FP8 tensor cores.

    NOTE [scales after the GEMM] Where torch's rowwise GEMM does not take these dtypes or sizes, and where it would be the
    CUTLASS kernel without fast accumulation (before capability 9 or CUDA 12.9; it is slow), the per-tensor GEMM multiplies
    with scale 1 into float32, and its result is scaled, the bias added, and rounded once.
    """
    m, n = a.shape[0], b.shape[1]
    if fits(a, b, bias, out_dtype, fast_accum):
        return torch._scaled_mm(
            a,
            b,
            _per_line(scale_inv_a, m),
            _per_line(scale_inv_b, n).t(),
            bias=bias,
            out_dtype=out_dtype,
            use_fast_accum=fast_accum,
        )
    one = torch.ones((), dtype=torch.float32, device=a.device)
    out = scaled_mm(a, b, one, one, out_dtype=torch.float32, fast_accum=fast_accum)
    return scaled_lines(out, scale_inv_a, scale_inv_b, bias, out_dtype)


def fits(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, fast_accum: bool) -> bool:
    """Whether torch's rowwise GEMM takes these tensors as they are, and is the kernel to prefer."""
    gemm = Gemm(
        a.dtype,
        b.dtype,
        Granularity.ROW_WISE,
        Granularity.ROW_WISE,
        out_dtype,
        None if bias is None else bias.dtype,
        a.shape[0],
        b.shape[1],
        a.shape[1],
    )
    if refusal(gemm, a.device) is not None or not (fast_accum or has_blockwise_scaled_mm(a.device)):
        return False
    is_dense = bias is None or (bias.stride(0) == 1 and bias.data_ptr() % 16 == 0)
    return is_dense and _is_row_major(a) and _is_row_major(b.t())


def _is_row_major(x: torch.Tensor) -> bool:
    rows, cols = x.shape
    is_dense = x.stride(1) == 1 and x.stride(0) >= cols
    return is_dense and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0 and pad_to_alignment(cols) == cols and rows > 0


def _per_line(scale_inv: torch.Tensor, lines: int) -> torch.Tensor:
    """The scales [lines, 1], dense; a scalar is repeated."""
    return scale_inv.expand(lines, 1).contiguous()
