"""Blockwise GEMMs through cuBLASLt, by way of `torch.nn.functional.scaled_mm` (SM90, CUDA 12.9 or newer), after a trial."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor

from lowering import hardware
from lowering.blockwise.reference import fault_of_kind, kind_of
from lowering.copies import num_blocks
from lowering.formats import BLOCK, SCALE_ALIGNMENT, Granularity
from lowering.products import Compute, Product
from lowering.trials import ALIGNMENT_BYTES, Trial, is_aligned

log = logging.getLogger(__name__)

#: torch's names for granularities.
_SCALING = {
    Granularity.BLOCK_1X128: torch.nn.functional.ScalingType.BlockWise1x128,
    Granularity.BLOCK_128X128: torch.nn.functional.ScalingType.BlockWise128x128,
}


def refusal(gemm: Product) -> str | None:
    """Why cuBLASLt cannot compute this GEMM with the semantics of `reference.multiply`, or None where it can."""
    if not gemm.a.is_cuda:
        return f"a is on {gemm.a.device}, not on a CUDA device"
    k, a, b = gemm.a.shape[1], gemm.a.stride(), gemm.b.stride()
    reason = hardware.refusal(_with_epilogue(gemm)[0], gemm.a.device)
    if reason is None and (a != (k, 1) or b != (1, k)):
        return f"strides of a {a} and b {b} are not row-major and column-major"
    if reason is None and not (is_aligned(gemm.a) and is_aligned(gemm.b)):
        return f"the addresses of a and b are not both multiples of {ALIGNMENT_BYTES}"
    return reason


def _with_epilogue(gemm: Product) -> tuple[hardware.Gemm, bool]:
    """The GEMM that cuBLASLt is to compute, and whether its epilogue adds the bias: it takes one of the output's own half
    precision. Any other is added in float32 to a float32 output. M is rounded up to a multiple of 4: rows of zeros."""
    asked = gemm.gemm(*gemm.granularities, multiple=SCALE_ALIGNMENT)
    takes_bias = gemm.bias is None or hardware.refusal(asked, gemm.a.device) is None
    return (asked, True) if takes_bias else (dataclasses.replace(asked, out_dtype=torch.float32, bias_dtype=None), False)


def prepare(gemm: Product) -> Compute:
    """The function that computes such GEMMs, which `refusal` has accepted."""
    rows, n, k = gemm.sizes
    asked, in_epilogue = _with_epilogue(gemm)
    padding, bias = asked.m - rows, gemm.bias
    copies_bias = bias is not None and in_epilogue and (bias.stride(0) != 1 or not is_aligned(bias))
    seen_a = scale_view(gemm.scale_inv_a, asked.m, k, gemm.granularity_a)
    seen_b = scale_view(gemm.scale_inv_b, n, k, gemm.granularity_b)
    view_a, view_b = (seen_a.shape, seen_a.stride()), (seen_b.shape, seen_b.stride())
    is_ready_a, is_ready_b = is_aligned(gemm.scale_inv_a), is_aligned(gemm.scale_inv_b)
    scaling_a, scaling_b, dtype = _SCALING[asked.granularity_a], _SCALING[asked.granularity_b], asked.out_dtype
    how: Any = {"granularity_a": gemm.granularity_a, "granularity_b": gemm.granularity_b, "out_dtype": gemm.out_dtype}

    def compute(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, bias: Tensor | None) -> Tensor:
        rows_of_a = a
        if padding:  # the scales' memory has these lines already
            rows_of_a = torch.nn.functional.pad(a.view(torch.uint8), (0, 0, 0, padding)).view(a.dtype)
        if copies_bias and bias is not None:
            bias = bias.clone(memory_format=torch.contiguous_format)
        scale_a = (scale_inv_a if is_ready_a else scale_inv_a.clone()).as_strided(*view_a)
        scale_b = (scale_inv_b if is_ready_b else scale_inv_b.clone()).as_strided(*view_b)
        out = torch.nn.functional.scaled_mm(
            rows_of_a, b, scale_a, scaling_a, scale_b, scaling_b, bias=bias if in_epilogue else None, output_dtype=dtype
        )
        out = out[:rows] if padding else out
        if in_epilogue:
            return out
        from lowering.triton.epilogue import finished  # imports Triton

        return finished(out, Product(a, b, scale_inv_a, scale_inv_b, bias, **how))

    return compute


def multiply(gemm: Product) -> torch.Tensor:
    """See `reference.multiply`; only for arguments that `refusal` accepts."""
    return prepare(gemm)(*gemm.operands)


trial = Trial(log, "cuBLASLt's blockwise GEMM", kind_of, lambda kind: fault_of_kind(kind, multiply))


def scale_view(scale_inv: Tensor, outer: int, inner: int, granularity: str) -> Tensor:
    """GEMM-ready scales as `torch._scaled_mm_v2` describes them, the memory unchanged. 1x128: [outer, ceil(inner/128)] with
    strides (1, outer), outer a multiple of 4. 128x128: [pad4(ceil(inner/128)), ceil(outer/128)] with strides (1,
    pad4(ceil(inner/128))), whose padding torch's `_scaled_mm` of 2.9 left out."""
    if granularity == Granularity.BLOCK_1X128:
        return scale_inv.as_strided((outer, num_blocks(inner, BLOCK)), (1, outer))
    width = scale_inv.shape[1]
    return scale_inv.as_strided((width, num_blocks(outer, BLOCK)), (1, width))
