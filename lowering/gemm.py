"""The FP8 GEMM of the public interface: the scales tell which operation it is."""

from __future__ import annotations

from typing import Any

import torch

from lowering.blockwise.checks import granularity_of_compact
from lowering.blockwise.ops import scaled_mm_blockwise
from lowering.blockwise.reference import gemm_ready_scales
from lowering.formats import BLOCK
from lowering.rowwise import ops as rowwise
from lowering.tensorwise import ops as tensorwise


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> torch.Tensor:
    """(a @ b) * scale_inv_a * scale_inv_b + bias for FP8 a [M, K] and b [K, N]; [M, N] in `out_dtype`.

    Products accumulate in float32 (`fast_accum` allows the tensor cores their shorter accumulator) and are rounded
    once. bias [N] or None. The scales are scalars, or those of `quantize_rowwise` or `quantize_blockwise` in the
    orientation of their operands: for a [M, 1], [M, ceil(K/128)] or [ceil(M/128), ceil(K/128)], for b [1, N],
    [ceil(K/128), N] or [ceil(K/128), ceil(N/128)] (b = q.t() takes the scales of q transposed, as a view). Blockwise
    GEMMs have no fast accumulation; one operand at least has 1x128 blocks. Raises ValueError for scales of other shapes,
    and for operands that FP8 tensor cores do not multiply (E5M2 by E5M2).
    """
    if _are_rowwise(a, b, scale_inv_a, scale_inv_b, fast_accum):
        return rowwise.scaled_mm_rowwise(a, b, scale_inv_a, scale_inv_b.t(), bias, out_dtype=out_dtype, fast_accum=fast_accum)
    if scale_inv_a.numel() != 1 or scale_inv_b.numel() != 1:
        if fast_accum:
            raise ValueError("fast_accum is True, which blockwise scaling does not have; pass fast_accum=False")
        (m, k), n = a.shape, b.shape[1]
        granularity_a = granularity_of_compact("scale_inv_a", scale_inv_a, m, k, False)
        granularity_b = granularity_of_compact("scale_inv_b", scale_inv_b, n, k, True)
        scales = gemm_ready_scales(scale_inv_a, m, granularity_a), gemm_ready_scales(scale_inv_b.t(), n, granularity_b)
        blocks: dict[str, Any] = {"granularity_a": granularity_a, "granularity_b": granularity_b}
        return scaled_mm_blockwise(a, b, *scales, bias, **blocks, out_dtype=out_dtype)
    return tensorwise.scaled_mm(a, b, scale_inv_a, scale_inv_b, bias, out_dtype=out_dtype, fast_accum=fast_accum)


def _are_rowwise(
    a: torch.Tensor, b: torch.Tensor, scale_inv_a: torch.Tensor, scale_inv_b: torch.Tensor, fast_accum: bool
) -> bool:
    """Whether scales belong to rows. Where one block of 128 covers K, those of blocks have the same shape and meaning; then
    the GEMM of blocks is taken unless fast accumulation is requested."""
    if a.dim() != 2 or b.dim() != 2 or scale_inv_a.numel() == scale_inv_b.numel() == 1:
        return False
    is_per_line = scale_inv_a.shape == (a.shape[0], 1) and scale_inv_b.shape == (1, b.shape[1])
    return is_per_line and (a.shape[1] > BLOCK or fast_accum)
