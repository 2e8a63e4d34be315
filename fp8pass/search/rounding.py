"""What quantization does to a matrix and to a product of two: in float32, with the operations that the rewrite uses."""

from __future__ import annotations

from typing import Any

import torch

import lowering
from fp8pass.recipes.quantization import Quantization, ScaleFrom
from lowering.formats import Granularity


def rounded(x: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """A matrix [outer, inner], or a batch of them, as FP8 holds it: float32 of the same shape. The GEMM sums over `inner`.

    Scales from the state are computed from the matrix itself, as delayed scaling does where it has no history.
    """
    if x.dim() == 3:
        return torch.stack([rounded(matrix, quantization) for matrix in x])
    x = x.contiguous()
    dtype, options = quantization.dtype, {"power_of_2": quantization.power_of_2, "epsilon": quantization.epsilon}
    granularity = quantization.granularity
    if granularity is Granularity.TENSOR_WISE or quantization.scale_from is ScaleFrom.SHARED:
        scale = lowering.scale_from_amax(lowering.amax(x), dtype, margin=quantization.margin, **options)  # type: ignore[arg-type]
        return lowering.quantize(x, scale, dtype).float() * scale.reciprocal()
    if granularity is Granularity.ROW_WISE:
        q, scale_inv = lowering.quantize_rowwise(x, dtype, **options)  # type: ignore[arg-type]
        return q.float() * scale_inv
    block = quantization.block
    assert block is not None
    if granularity is Granularity.BLOCK_1X32:
        q, codes = lowering.quantize_mxfp8(x, dtype, square=quantization.square)
        scale_inv = torch.exp2(codes.float() - 127)
    else:
        q, scale_inv = lowering.quantize_blockwise(x, dtype, block, **options)  # type: ignore[arg-type]
    for dim, size in enumerate(block):
        scale_inv = scale_inv.repeat_interleave(size, dim).narrow(dim, 0, x.shape[dim])
    return q.float() * scale_inv


def product_error(
    a: torch.Tensor, b: torch.Tensor, of_a: Quantization, of_b: Quantization, grouped: Any = None
) -> torch.Tensor:
    """What quantizing both operands adds to a [m, k] @ b [k, n], or to their batched product: float32, of its shape.

    grouped: for groups of rows, what multiplies two operands of the dtypes of a and b. Blocks along the rows may cross groups
    here, which those of the kernels do not.
    """
    near_a, near_b = rounded(a, of_a), rounded(b.mT, of_b).mT
    if grouped is not None:
        return grouped(near_a.to(a.dtype), near_b.to(b.dtype)).float() - grouped(a, b).float()
    return near_a @ near_b - a.float() @ b.float()
