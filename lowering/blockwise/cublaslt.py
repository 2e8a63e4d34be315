"""Blockwise GEMMs through cuBLASLt, by way of `torch.nn.functional.scaled_mm` (SM90, CUDA 12.9 or newer), after a trial."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowering import hardware
from lowering.blockwise import reference
from lowering.blockwise.arguments import BlockwiseGemm
from lowering.blockwise.reference import SCALE_ALIGNMENT
from lowering.copies import num_blocks
from lowering.formats import BLOCK, Granularity
from lowering.products import finished
from lowering.trials import fault_of, in_words, is_trusted

log = logging.getLogger(__name__)

#: M, N, K of the trials: 5 blocks of K, which 128x128 scales pad to 8, and 4, which they do not; ragged last blocks.
_WHOLE, _RAGGED = ((256, 384, 640), (128, 256, 512)), ((132, 272, 656), (130, 272, 656))
#: Largest relative error, in the Frobenius norm: what FP8 tensor cores and the rounding of the output may lose
#: (docs/numerics.md), and far below what a scale in a wrong place does.
_TOLERANCES = {torch.float32: 3e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}


#: Of what cuBLASLt reads.
ALIGNMENT_BYTES = 16

#: torch's names for granularities.
_SCALING = {
    Granularity.BLOCK_1X128: torch.nn.functional.ScalingType.BlockWise1x128,
    Granularity.BLOCK_128X128: torch.nn.functional.ScalingType.BlockWise128x128,
}


def refusal(gemm: BlockwiseGemm) -> str | None:
    """Why cuBLASLt cannot compute this GEMM with the semantics of `scaled_mm_blockwise`, or None where it can."""
    if not gemm.a.is_cuda:
        return f"a is on {gemm.a.device}, not on a CUDA device"
    k, a, b = gemm.a.shape[1], gemm.a.stride(), gemm.b.stride()
    reason = hardware.refusal(_with_epilogue(gemm)[0], gemm.a.device)
    if reason is None and (a != (k, 1) or b != (1, k)):
        return f"strides of a {a} and b {b} are not row-major and column-major"
    if reason is None and not (_is_aligned(gemm.a) and _is_aligned(gemm.b)):
        return f"the addresses of a and b are not both multiples of {ALIGNMENT_BYTES}"
    return reason


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether x begins where cuBLASLt can read it. A tensor without memory, as in tracing, begins as its view of it does."""
    offset = x.storage_offset() * x.element_size()
    return (offset if isinstance(x, FakeTensor) else x.data_ptr()) % ALIGNMENT_BYTES == 0


def _with_epilogue(gemm: BlockwiseGemm) -> tuple[hardware.Gemm, bool]:
    """The GEMM that cuBLASLt is asked for, and whether its epilogue adds the bias: it takes one of the output's own half
    precision. Any other is added in float32 to a float32 output. M is rounded up to a multiple of 4: rows of zeros."""
    asked = gemm.gemm(*gemm.granularities, multiple=SCALE_ALIGNMENT)
    takes_bias = gemm.bias is None or hardware.refusal(asked, gemm.a.device) is None
    return (asked, True) if takes_bias else (dataclasses.replace(asked, out_dtype=torch.float32, bias_dtype=None), False)


def scaled_mm_blockwise(gemm: BlockwiseGemm) -> torch.Tensor:
    """See `reference.scaled_mm_blockwise`; only for arguments that `refusal` accepts."""
    a, bias, (rows, n, k) = gemm.a, gemm.bias, gemm.sizes
    asked, in_epilogue = _with_epilogue(gemm)
    if asked.m != rows:  # the scales' memory has these lines already
        a = torch.nn.functional.pad(a.view(torch.uint8), (0, 0, 0, asked.m - rows)).view(a.dtype)
    if bias is not None and in_epilogue and (bias.stride(0) != 1 or not _is_aligned(bias)):
        bias = bias.clone(memory_format=torch.contiguous_format)
    scale_inv_a, scale_inv_b = (s if _is_aligned(s) else s.clone() for s in (gemm.scale_inv_a, gemm.scale_inv_b))
    out = torch.nn.functional.scaled_mm(
        a,
        gemm.b,
        scale_view(scale_inv_a, asked.m, k, gemm.granularity_a),
        _SCALING[asked.granularity_a],
        scale_view(scale_inv_b, n, k, gemm.granularity_b),
        _SCALING[asked.granularity_b],
        bias=bias if in_epilogue else None,
        output_dtype=asked.out_dtype,
    )
    out = out if asked.m == rows else out[:rows]
    return out if in_epilogue else finished(out, gemm)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """GEMMs that are right or wrong together."""

    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype]
    granularities: tuple[Granularity, Granularity]
    bias_dtype: torch.dtype | None
    out_dtype: torch.dtype
    is_ragged: bool

    def __str__(self) -> str:
        operands = (f"{g.label} {d}" for g, d in zip(self.granularities, self.dtypes, strict=True))
        return f"{' by '.join(operands)} to {self.out_dtype} on {self.device}"


_TRIED: dict[_Kind, bool] = {}


def is_right(gemm: BlockwiseGemm) -> bool:
    """Whether cuBLASLt computes GEMMs like this one as the reference does (lowering/trials.py)."""
    device, dtypes = gemm.a.device, (gemm.a.dtype, gemm.b.dtype)
    is_ragged = any(size % BLOCK for size in gemm.sizes)
    kind = _Kind(device, dtypes, gemm.granularities, gemm.bias_dtype, gemm.out_dtype, is_ragged)
    return is_trusted(kind, device, _TRIED, _fault, log, "cuBLASLt's blockwise GEMM")


def trials() -> dict[str, bool]:
    """What this process has tried so far, in words, and whether cuBLASLt is used for it."""
    return in_words(_TRIED)


def trials_of(scales: Collection[tuple[str | None, str | None]]) -> dict[str, bool]:
    """Those trials of which the operands had such scales, by the labels of their granularities."""
    return in_words({kind: right for kind, right in _TRIED.items() if tuple(g.label for g in kind.granularities) in scales})


def _fault(kind: _Kind) -> str | None:
    """What is wrong with cuBLASLt's results, or None."""
    granularity_a, granularity_b = kind.granularities
    for m, n, k in _RAGGED if kind.is_ragged else _WHOLE:
        a, scale_inv_a = _operand(m, k, kind.dtypes[0], granularity_a)
        b, scale_inv_b = _operand(n, k, kind.dtypes[1], granularity_b)
        bias = None if kind.bias_dtype is None else torch.linspace(-1, 1, n).to(kind.bias_dtype)
        scaling: dict[str, Any] = {"granularity_a": granularity_a, "granularity_b": granularity_b}
        gemm = BlockwiseGemm(a, b.t(), scale_inv_a, scale_inv_b, bias, **scaling, out_dtype=kind.out_dtype)
        expected = reference.scaled_mm_blockwise(**vars(dataclasses.replace(gemm, out_dtype=torch.float32)))
        on_device = gemm.on(kind.device)
        fault = fault_of(functools.partial(scaled_mm_blockwise, on_device), expected, _TOLERANCES[kind.out_dtype])
        if fault is not None:
            return f"{fault} for M, N, K = {m}, {n}, {k}"
    return None


def _operand(outer: int, inner: int, dtype: torch.dtype, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random values whose blocks differ in magnitude, quantized. The user's random numbers are left alone."""
    generator = torch.Generator().manual_seed(outer + inner)
    x = torch.randn(outer, inner, generator=generator)
    magnitudes = torch.exp2(torch.randint(-4, 5, (num_blocks(outer, BLOCK), num_blocks(inner, BLOCK)), generator=generator))
    x *= magnitudes.repeat_interleave(BLOCK, 0)[:outer].repeat_interleave(BLOCK, 1)[:, :inner]
    q, scale_inv = reference.cast_blockwise([x], dtype, granularity=granularity)
    return q, scale_inv


def scale_view(scale_inv: torch.Tensor, outer: int, inner: int, granularity: str) -> torch.Tensor:
    """GEMM-ready scales as `torch._scaled_mm_v2` describes them, the memory unchanged.

    1x128: [outer, ceil(inner/128)] with strides (1, outer), outer a multiple of 4. 128x128: [pad4(ceil(inner/128)),
    ceil(outer/128)] with strides (1, pad4(ceil(inner/128))), whose padding torch's `_scaled_mm` of 2.9 left out.
    """
    if granularity == Granularity.BLOCK_1X128:
        return scale_inv.as_strided((outer, num_blocks(inner, BLOCK)), (1, outer))
    width = scale_inv.shape[1]
    return scale_inv.as_strided((width, num_blocks(outer, BLOCK)), (1, width))
