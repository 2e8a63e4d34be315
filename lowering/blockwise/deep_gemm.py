"""Blockwise GEMMs by DeepGEMM (SM90), where the package `deep_gemm` is installed, after a trial.

Its `fp8_gemm_nt` computes a @ b.T of E4M3 matrices, rows of K together, a with 1x128 and b with 128x128 scales, to bfloat16:
the output and grad_input GEMMs. Its grad_weight (1x128 by 1x128) adds to a float32 matrix, which costs another pass; its
grouped GEMMs want every group padded in memory and, for grad_weight, sizes on the host. Those stay where they are.

Sources: csrc/apis/gemm.hpp, csrc/apis/layout.hpp and csrc/utils/layout.hpp of DeepGEMM (54e2261).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import Any

import torch

from lowering import hardware
from lowering.blockwise.arguments import ALIGNMENT_BYTES, BlockwiseGemm, is_aligned
from lowering.blockwise.trial import Kind, fault_of_kind, kind_of
from lowering.copies import num_blocks
from lowering.formats import BLOCK, E4M3, GEMM_ALIGNMENT, Granularity
from lowering.trials import is_trusted

log = logging.getLogger(__name__)

#: DeepGEMM's word for 1x128 by 128x128 scales: rows of a, rows of b, and K that share one.
_RECIPE = (1, BLOCK, BLOCK)
_SCALES = (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128)


@functools.cache
def library() -> Any:
    """The package, or None where it is not installed or cannot be loaded, which is logged."""
    if importlib.util.find_spec("deep_gemm") is None:
        return None
    try:
        return importlib.import_module("deep_gemm")
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch or CUDA
        log.warning("deep_gemm is installed but cannot be loaded, and is not used: %s", error)
        return None


def refusal(gemm: BlockwiseGemm) -> str | None:
    """Why DeepGEMM cannot compute this GEMM, or None where it can."""
    (m, n, k), device = gemm.sizes, gemm.a.device
    if hardware.cuda_capability(device) != (9, 0):
        return f"it is used on compute capability 9.0, which {device} does not have"
    if gemm.granularities != _SCALES:
        return f"it is used for 1x128 by 128x128 scales, not {' by '.join(g.label for g in gemm.granularities)}"
    if (gemm.a.dtype, gemm.b.dtype) != (E4M3, E4M3):
        return f"it takes only float8_e4m3fn, not {gemm.a.dtype} by {gemm.b.dtype}"
    if gemm.out_dtype != torch.bfloat16 or gemm.bias is not None:
        return "it has no bias and gives bfloat16"
    if 0 in (m, n, k) or n % GEMM_ALIGNMENT or k % GEMM_ALIGNMENT:
        return f"N {n} and K {k} are not multiples of {GEMM_ALIGNMENT} above 0, or M is 0"
    if gemm.a.stride() != (k, 1) or gemm.b.stride() != (1, k):
        return f"strides of a {gemm.a.stride()} and b {gemm.b.stride()} are not row-major and column-major"
    if not all(map(is_aligned, (gemm.a, gemm.b, gemm.scale_inv_a))):
        return f"an address is not a multiple of {ALIGNMENT_BYTES} bytes"
    return None if library() is not None else "the package deep_gemm is not installed"


def scaled_mm_blockwise(gemm: BlockwiseGemm) -> torch.Tensor:
    """See `reference.scaled_mm_blockwise`; only for arguments that `refusal` accepts."""
    m, n, _ = gemm.sizes
    out = torch.empty((m, n), dtype=torch.bfloat16, device=gemm.a.device)
    scales = scales_of_a(gemm), scales_of_b(gemm)
    library().fp8_gemm_nt((gemm.a, scales[0]), (gemm.b.t(), scales[1]), out, recipe=_RECIPE)
    return out


def scales_of_a(gemm: BlockwiseGemm) -> torch.Tensor:
    """[M, ceil(K/128)] with strides (1, M rounded up to 4): GEMM-ready memory as it is, which DeepGEMM takes without a copy."""
    m, _, k = gemm.sizes
    return gemm.scale_inv_a.as_strided((m, num_blocks(k, BLOCK)), (1, gemm.scale_inv_a.stride(0)))


def scales_of_b(gemm: BlockwiseGemm) -> torch.Tensor:
    """[ceil(N/128), ceil(K/128)], contiguous: a copy where the memory has padding."""
    _, n, k = gemm.sizes
    return gemm.scale_inv_b[: num_blocks(n, BLOCK), : num_blocks(k, BLOCK)].contiguous()


_TRIED: dict[Kind, bool] = {}


def is_right(gemm: BlockwiseGemm) -> bool:
    """Whether DeepGEMM computes GEMMs like this one as the reference does (lowering/trials.py)."""
    return is_trusted(kind_of(gemm), gemm.a.device, _TRIED, _fault, log, "DeepGEMM's blockwise GEMM", "torch's or Triton's")


def tried() -> dict[Kind, bool]:
    """What this process has tried so far, and whether the library is used for it."""
    return dict(_TRIED)


def _fault(kind: Kind) -> str | None:
    return fault_of_kind(kind, scaled_mm_blockwise)
