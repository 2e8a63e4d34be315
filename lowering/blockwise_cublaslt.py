"""Blockwise GEMMs through cuBLASLt, by way of `torch.nn.functional.scaled_mm` (SM90, CUDA 12.9 or newer).

NOTE [trusted after a trial] A wrong scale layout raises nothing here and gives wrong numbers; torch 2.9 had one. So each
kind of GEMM is tried once per process and device on small matrices, and used only if it agrees with the reference.
"""

from __future__ import annotations

import dataclasses
import logging

import torch

from lowering import blockwise_reference as reference
from lowering.blockwise_reference import num_blocks
from lowering.formats import BLOCK, E5M2, GEMM_ALIGNMENT
from lowering.hardware import has_blockwise_scaled_mm

log = logging.getLogger(__name__)

#: M, N, K of the trials: 5 blocks of K, which 128x128 scales pad to 8, and 4, which they do not; ragged last blocks.
_WHOLE, _RAGGED = ((256, 384, 640), (128, 256, 512)), ((132, 272, 656),)
#: Largest relative error, in the Frobenius norm: what FP8 tensor cores and the rounding of the output may lose
#: (docs/numerics.md), and far below what a scale in a wrong place does.
_TOLERANCES = {torch.float32: 3e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def refusal(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> str | None:
    """Why cuBLASLt cannot compute this GEMM with the semantics of `scaled_mm_blockwise`, or None where it can.

    Restrictions: ScaledBlas.cpp of torch 2.13 (`_check_deepseek_support`, `_scaled_gemm`) and cuBLAS's "1D and 2D block
    scaling".
    """
    m, k = a.shape
    n = b.shape[1]
    if not a.is_cuda:
        return f"a is on {a.device}, not on a CUDA device"
    if not has_blockwise_scaled_mm(a.device):
        return "it needs compute capability 9.x and CUDA 12.9 or newer"
    if 0 in (m, n, k):
        return f"M, N, K = {m}, {n}, {k} has a zero"
    if k % GEMM_ALIGNMENT or n % GEMM_ALIGNMENT or m % 4:
        return f"M, N, K = {m}, {n}, {k} are not multiples of 4, {GEMM_ALIGNMENT}, {GEMM_ALIGNMENT}"
    if a.dtype == E5M2 and b.dtype == E5M2:
        return "both operands are float8_e5m2"
    if a.stride() != (k, 1) or b.stride() != (1, k):
        return f"strides of a {a.stride()} and b {b.stride()} are not row-major and column-major"
    if bias is not None and (bias.dtype != out_dtype or out_dtype == torch.float32):
        return f"a bias of {bias.dtype} with an output of {out_dtype}"
    return None


def scaled_mm_blockwise(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None,
    block_dims_a: int,
    block_dims_b: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See `blockwise.scaled_mm_blockwise`; only for arguments that `refusal` accepts."""
    recipes = {1: torch.nn.functional.ScalingType.BlockWise1x128, 2: torch.nn.functional.ScalingType.BlockWise128x128}
    return torch.nn.functional.scaled_mm(
        a,
        b,
        scale_view(scale_inv_a, a.shape[0], a.shape[1], block_dims_a),
        recipes[block_dims_a],
        scale_view(scale_inv_b, b.shape[1], b.shape[0], block_dims_b),
        recipes[block_dims_b],
        bias=bias,
        output_dtype=out_dtype,
    )


@dataclasses.dataclass(frozen=True)
class _Kind:
    """GEMMs that are right or wrong together."""

    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype]
    block_dims: tuple[int, int]
    has_bias: bool
    out_dtype: torch.dtype
    is_ragged: bool

    def __str__(self) -> str:
        operands = (f"{BLOCK if dims == 2 else 1}x{BLOCK} {d}" for dims, d in zip(self.block_dims, self.dtypes, strict=True))
        return f"{' by '.join(operands)} to {self.out_dtype} on {self.device}"


_TRIED: dict[_Kind, bool] = {}


def is_right(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, block_dims: tuple[int, int], out_dtype: torch.dtype
) -> bool:
    """Whether cuBLASLt computes GEMMs like this one as the reference does. See NOTE [trusted after a trial].

    The first call of a kind launches small kernels and waits for them; while a CUDA graph is being captured, which
    allows no waiting, what has not been tried is not used.
    """
    is_ragged = any(size % BLOCK for size in (*a.shape, b.shape[1]))
    kind = _Kind(a.device, (a.dtype, b.dtype), block_dims, bias is not None, out_dtype, is_ragged)
    if kind not in _TRIED:
        if a.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        fault = _fault(kind)
        _TRIED[kind] = fault is None
        if fault is not None:
            log.warning("cuBLASLt's blockwise GEMM is not used for %s, Triton's is: %s", kind, fault)
    return _TRIED[kind]


def trials() -> dict[str, bool]:
    """What this process has tried so far, in words, and whether cuBLASLt is used for it."""
    return {str(kind): right for kind, right in _TRIED.items()}


def _fault(kind: _Kind) -> str | None:
    """What is wrong with cuBLASLt's results, or None."""
    for m, n, k in _RAGGED if kind.is_ragged else _WHOLE:
        a, scale_inv_a = _operand(m, k, kind.dtypes[0], kind.block_dims[0])
        b, scale_inv_b = _operand(n, k, kind.dtypes[1], kind.block_dims[1])
        bias = torch.linspace(-1, 1, n).to(kind.out_dtype) if kind.has_bias else None
        expected = reference.scaled_mm_blockwise(a, b.t(), scale_inv_a, scale_inv_b, bias, *kind.block_dims, torch.float32)
        to = kind.device
        try:
            out = scaled_mm_blockwise(
                a.to(to),
                b.to(to).t(),
                scale_inv_a.to(to),
                scale_inv_b.to(to),
                None if bias is None else bias.to(to),
                *kind.block_dims,
                kind.out_dtype,
            )
        except (RuntimeError, ValueError) as raised:  # torch's and cuBLAS's for a GEMM that they do not have
            return f"it raises {str(raised).splitlines()[0]}"
        error = float((out.cpu().float() - expected).norm() / expected.norm())
        if not error <= _TOLERANCES[kind.out_dtype]:
            return f"its relative error is {error:.2g} for M, N, K = {m}, {n}, {k}"
    return None


def _operand(outer: int, inner: int, dtype: torch.dtype, block_dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random values whose blocks differ in magnitude, quantized. The user's random numbers are left alone."""
    generator = torch.Generator().manual_seed(outer + inner)
    x = torch.randn(outer, inner, generator=generator)
    magnitudes = torch.exp2(torch.randint(-4, 5, (num_blocks(outer), num_blocks(inner)), generator=generator))
    x *= magnitudes.repeat_interleave(BLOCK, 0)[:outer].repeat_interleave(BLOCK, 1)[:, :inner]
    return reference.cast_blockwise(x, dtype, block_dims)


def scale_view(scale_inv: torch.Tensor, outer: int, inner: int, block_dims: int) -> torch.Tensor:
    """GEMM-ready scales as `torch._scaled_mm_v2` describes them, the memory unchanged.

    1x128: [outer, ceil(inner/128)] with strides (1, outer), outer a multiple of 4. 128x128: [pad4(ceil(inner/128)),
    ceil(outer/128)] with strides (1, pad4(ceil(inner/128))), whose padding torch's `_scaled_mm` of 2.9 left out.
    """
    if block_dims == 1:
        return scale_inv.as_strided((outer, num_blocks(inner)), (1, outer))
    width = scale_inv.shape[1]
    return scale_inv.as_strided((width, num_blocks(outer)), (1, width))
