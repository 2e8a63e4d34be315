"""The trial of a library's blockwise GEMM (lowering/trials.py): small products of every kind, held against the reference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from lowering.blockwise import reference
from lowering.blockwise.reference import BlockwiseGemm
from lowering.copies import num_blocks
from lowering.formats import BLOCK
from lowering.trials import ProductKind, fault_of_sizes

#: M, N, K: 5 blocks of K, which 128x128 scales pad to 8, and 4, which they do not; ragged last blocks.
_WHOLE, _RAGGED = ((256, 384, 640), (128, 256, 512)), ((132, 272, 656), (130, 272, 656))


def kind_of(gemm: BlockwiseGemm) -> ProductKind:
    """The kind that a GEMM is of."""
    is_ragged = any(size % BLOCK for size in gemm.sizes)
    dtypes = gemm.a.dtype, gemm.b.dtype
    return ProductKind(gemm.a.device, dtypes, gemm.granularities, gemm.bias_dtype, gemm.out_dtype, is_ragged)


def fault_of_kind(kind: ProductKind, compute: Callable[[BlockwiseGemm], torch.Tensor]) -> str | None:
    """The fault of a library's results, or None."""
    granularity_a, granularity_b = kind.granularities

    def made(m: int, n: int, k: int, bias: torch.Tensor | None) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
        a, scale_inv_a = _operand(m, k, kind.dtypes[0], granularity_a)
        b, scale_inv_b = _operand(n, k, kind.dtypes[1], granularity_b)
        scaling: dict[str, Any] = {"granularity_a": granularity_a, "granularity_b": granularity_b}
        gemm = BlockwiseGemm(a, b.t(), scale_inv_a, scale_inv_b, bias, **scaling, out_dtype=kind.out_dtype)
        expected = reference.scaled_mm_blockwise(**vars(dataclasses.replace(gemm, out_dtype=torch.float32)))
        return functools.partial(compute, gemm.on(kind.device)), expected

    return fault_of_sizes(kind, _RAGGED if kind.is_ragged else _WHOLE, made)


def _operand(outer: int, inner: int, dtype: torch.dtype, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random values whose blocks differ in magnitude, quantized. The user's random numbers are left alone."""
    generator = torch.Generator().manual_seed(outer + inner)
    x = torch.randn(outer, inner, generator=generator)
    magnitudes = torch.exp2(torch.randint(-4, 5, (num_blocks(outer, BLOCK), num_blocks(inner, BLOCK)), generator=generator))
    x *= magnitudes.repeat_interleave(BLOCK, 0)[:outer].repeat_interleave(BLOCK, 1)[:, :inner]
    q, scale_inv = reference.cast_blockwise([x], dtype, granularity=granularity)
    return q, scale_inv
