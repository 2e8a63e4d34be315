"""A weight's FP8 values and scales, as the casts of the forward make them: the same operations with the same options."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import lowering
from fp8pass.errors import ExportError
from fp8pass.recipes import Quantization, ScaleFrom
from fp8pass.schemes.eager import bytes_and_scales, compact
from fp8pass.schemes.scheme import scaling
from fp8pass.weights.cache import CachedWeight
from fp8pass.weights.released import MESSAGE
from lowering.formats import MX_BLOCK, Granularity
from lowering.scaling import scales_from_amax


def quantize_weight(
    matrix: torch.Tensor,
    quantization: Quantization,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values of a matrix [N, K] and their factors: one per tensor [], row [N, 1], block [ceil(N/128), ceil(K/128)], all
    float32, or 32 values [N, ceil(K/32)], E8M0 codes in uint8. Nothing is padded.

    scale: the float32 scalar of a tensor whose scale comes from the state; None where it comes from the matrix. amax: of all
    that share one scale of a whole tensor; None: the matrix's own.
    """
    if not quantization.has_one_scale:
        data, scales = compact(matrix, quantization)
        if quantization.square:  # the GEMM reads one for each line of a tile
            scales = scales.repeat_interleave(MX_BLOCK, dim=0)[: matrix.shape[0]]
        return data, scales
    dtype = quantization.dtype
    if scale is not None:
        return lowering.quantize(matrix, scale, dtype), scale.reciprocal()
    amax = lowering.amax(matrix) if amax is None else amax
    if quantization.scale_from is ScaleFrom.STATE:
        scale = lowering.scale_from_amax(amax, dtype, margin=quantization.margin)
        return lowering.quantize(matrix, scale, dtype), scale.reciprocal()
    scale, scale_inv = scales_from_amax(amax, dtype, **scaling(quantization))
    return lowering.quantize(matrix, scale, dtype), scale_inv


def quantized_before(
    held: Sequence[CachedWeight], quantization: Quantization, matrix: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_weight` of a Parameter that gave its values back, from the copies that it holds. matrix: one of a batch."""
    found = next((w for w in held if w.quantization == quantization and w.made is not None), None)
    if found is None or found.made is None:
        raise ExportError(f"no copy of {list(held[0].shape)} is quantized as its forward GEMM reads it: {MESSAGE}")
    layout, data = next(iter(found.made.data.items()))
    data, scales = bytes_and_scales(quantization, layout, data, found.made.scale_inv[layout], found.shape)
    if matrix is not None:
        data, scales = data[matrix], scales[matrix]
    granularity = quantization.granularity
    if quantization.has_one_scale:
        return data, scales[..., 0, 0].clone()
    rows, columns = granularity.block or (1, scales.shape[-1])
    scales = scales[..., ::rows, ::columns].contiguous()
    if granularity is Granularity.BLOCK_1X32:
        scales = (scales.log2().round() + 127).nan_to_num(255).to(torch.uint8)
    return data, scales
