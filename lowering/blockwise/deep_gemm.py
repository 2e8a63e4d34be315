"""Blockwise GEMMs by DeepGEMM (SM90), where the package `deep_gemm` is installed, after a trial.

Its `fp8_gemm_nt` computes a @ b.T of E4M3 matrices, rows of K together, a with 1x128 and b with 128x128 scales, to bfloat16:
the output and grad_input GEMMs. Its grad_weight (1x128 by 1x128) adds to a float32 matrix, which costs another pass, and
is left to cuBLASLt or Triton.

Sources: csrc/apis/gemm.hpp, csrc/apis/layout.hpp and csrc/utils/layout.hpp of DeepGEMM (54e2261).
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from lowering import deep_gemm
from lowering.blockwise.reference import fault_of_kind, kind_of
from lowering.copies import num_blocks
from lowering.formats import BLOCK, Granularity
from lowering.products import Compute, Product
from lowering.trials import ALIGNMENT_BYTES, Trial, is_aligned

log = logging.getLogger(__name__)

_SCALES = (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128)


def refusal(gemm: Product) -> str | None:
    """Why DeepGEMM cannot compute this GEMM, or None where it can."""
    if gemm.granularities != _SCALES:
        return f"it is used for 1x128 by 128x128 scales, not {' by '.join(g.label for g in gemm.granularities)}"
    if gemm.out_dtype != torch.bfloat16 or gemm.bias is not None:
        return "it has no bias and gives bfloat16"
    if not all(map(is_aligned, (gemm.a, gemm.b, gemm.scale_inv_a))):
        return f"an address is not a multiple of {ALIGNMENT_BYTES} bytes"
    return deep_gemm.refusal(gemm.a, gemm.b, "fp8_gemm_nt")


def prepare(gemm: Product) -> Compute:
    """The function that computes such GEMMs, which `refusal` has accepted."""
    m, n, k = gemm.sizes
    device = gemm.a.device
    # GEMM-ready memory as it is, with strides (1, M rounded up to 4), which DeepGEMM takes without a copy.
    view_a = (m, num_blocks(k, BLOCK)), (1, gemm.scale_inv_a.stride(0))
    blocks_b = num_blocks(n, BLOCK), num_blocks(k, BLOCK)
    copies_b = gemm.scale_inv_b.shape != blocks_b  # it takes no padding

    def compute(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, bias: None) -> Tensor:
        out = torch.empty((m, n), dtype=torch.bfloat16, device=device)
        scale_b = scale_inv_b[: blocks_b[0], : blocks_b[1]].contiguous() if copies_b else scale_inv_b
        operands = (a, scale_inv_a.as_strided(*view_a)), (b.t(), scale_b), out
        deep_gemm.call("fp8_gemm_nt", device, *operands, recipe=deep_gemm.BY_SQUARES)
        return out

    return compute


def multiply(gemm: Product) -> torch.Tensor:
    """See `reference.multiply`; only for arguments that `refusal` accepts."""
    return prepare(gemm)(*gemm.operands)


trial = Trial(log, "DeepGEMM's blockwise GEMM", kind_of, lambda kind: fault_of_kind(kind, multiply), "torch's or Triton's")
