"""The MXFP8 GEMM: cuBLASLt's, by way of `torch.nn.functional.scaled_mm` (SM100), after a trial, or the reference."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowering import hardware
from lowering.copies import CastOptions, num_blocks
from lowering.formats import MX_BLOCK, Granularity
from lowering.mxfp8 import reference
from lowering.products import Compute, Product, as_told
from lowering.trials import ProductKind, Trial, fault_of_sizes

log = logging.getLogger(__name__)


_SCALES = (Granularity.BLOCK_1X32, Granularity.BLOCK_1X32)
#: M, N and K of a trial: whole tiles of 128 rows and 128 of K, and what leaves them ragged.
_SIZES = ((256, 384, 512), (130, 272, 160))


def _fault_of_kind(kind: ProductKind) -> str | None:
    def made(m: int, n: int, k: int, bias: Tensor | None) -> tuple[Callable[[], Tensor], Tensor]:
        generator = torch.Generator().manual_seed(m)  # the user's random numbers are left alone
        (a, scale_a), (b, scale_b) = (
            _operand(rows, k, dtype, generator) for rows, dtype in zip((m, n), kind.dtypes, strict=True)
        )
        operands = a, b.t(), scale_a, scale_b, bias
        there: list[Any] = [x if x is None else x.to(kind.device) for x in operands]
        expected = reference.multiply(Product(*operands, out_dtype=torch.float32))
        return functools.partial(_cublaslt, *there, out_dtype=kind.out_dtype), expected

    return fault_of_sizes(kind, _SIZES, made)


def _operand(rows: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """Random values whose blocks differ in magnitude, quantized, and their scales."""
    magnitudes = torch.exp2(torch.randint(-4, 5, (rows, num_blocks(k, MX_BLOCK)), generator=generator))
    x = torch.randn(rows, k, generator=generator) * magnitudes.repeat_interleave(MX_BLOCK, 1)[:, :k]
    return list(reference.copy(x, dtype, CastOptions.of(), False, False))


def _kind_of(product: Product) -> ProductKind:
    return ProductKind(product.a.device, (product.a.dtype, product.b.dtype), _SCALES, product.bias_dtype, product.out_dtype)


trial = Trial(log, "cuBLASLt's MXFP8 GEMM", _kind_of, _fault_of_kind, "nothing")


class WrongGemmError(NotImplementedError):
    """cuBLASLt's GEMM computed something else in its trial. The message says what, and what to use."""


def decided(product: Product) -> Compute:
    """The function that computes products which differ from this one in their values alone; raises where none does."""
    (m, n, k), device, out_dtype = product.sizes, product.a.device, product.out_dtype
    if not product.a.is_cuda or 0 in (m, n, k):
        return as_told(reference.multiply)(product)
    mx = Granularity.BLOCK_1X32
    gemm = dataclasses.replace(product.gemm(mx, mx), k=k + -k % MX_BLOCK)
    reason = hardware.refusal(dataclasses.replace(gemm, out_dtype=torch.bfloat16, bias_dtype=None), device)
    if reason is not None:
        raise NotImplementedError(f"{reason}; blockwise and per-tensor scaling run where MXFP8 does not")
    if hardware.refusal(gemm, device) is None:
        _require_right(product)
        return functools.partial(_cublaslt, out_dtype=out_dtype)
    _require_right(dataclasses.replace(product, bias=None, out_dtype=torch.float32))
    from lowering.triton.epilogue import finished  # imports Triton

    def compute(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None) -> Tensor:
        """With a bias that the epilogue does not take: still one rounding."""
        out = _cublaslt(a, b, scale_a, scale_b, None, out_dtype=torch.float32)
        return finished(out, Product(a, b, scale_a, scale_b, bias, out_dtype=out_dtype))

    return compute


def _require_right(product: Product) -> None:
    """Raise WrongGemmError if the trial of the GEMM's kind on a GPU has failed. In the capture of a CUDA graph, where none can
    be made, it is trusted: nothing else computes it."""
    kind = _kind_of(product)
    if kind.device.type == "cuda" and not isinstance(product.a, FakeTensor):
        trial.is_passed(product)
    if not trial.tried.get(kind, True):
        fault = f"cuBLASLt's MXFP8 GEMM of {kind} was tried here: {trial.reasons[kind]}"
        raise WrongGemmError(f"{fault}; use the recipe 'blockwise' or 'current' on this machine")


def _cublaslt(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
    functional = torch.nn.functional
    scaling, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    return functional.scaled_mm(
        _whole_blocks(a),
        _whole_blocks(b.t()).t(),
        scale_a.view(torch.float8_e8m0fnu),
        scaling,
        scale_b.view(torch.float8_e8m0fnu),
        scaling,
        swizzle,
        swizzle,
        bias=bias,
        output_dtype=out_dtype,
    )


def _whole_blocks(q: Tensor) -> Tensor:
    """A copy [outer, inner] contiguous, with zeros up to whole blocks; itself if it is one already."""
    extra = -q.shape[1] % MX_BLOCK
    if not extra:
        return q.contiguous()
    return torch.nn.functional.pad(q.view(torch.uint8), (0, extra)).view(q.dtype)
