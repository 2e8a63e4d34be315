"""Checks of the arguments of the blockwise operations. Every error is a ValueError that names the value and the fix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.blocks import scale_shape
from lowering.blockwise.reference import gemm_ready_scale_shape
from lowering.checks import check_blocks_of, check_product
from lowering.formats import BLOCK, E4M3, Granularity, fp8_max
from lowering.hardware import Gemm, refusal

GRANULARITIES = (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128)


def check_block(block: Sequence[int]) -> None:
    if not isinstance(block, Sequence) or tuple(block) not in ((1, BLOCK), (BLOCK, BLOCK)):
        raise ValueError(f"block is {block!r}; use (1, {BLOCK}) or ({BLOCK}, {BLOCK})")


def check_granularity(name: str, granularity: str) -> None:
    if granularity not in GRANULARITIES:
        raise ValueError(f"{name} is {str(granularity)!r}; use {' or '.join(repr(g.value) for g in GRANULARITIES)}")


def check_casts(
    xs: list[torch.Tensor], dtype: torch.dtype, granularity: str, rowwise: bool, columnwise: bool, compact: bool
) -> None:
    check_blocks_of(xs, dtype, "blockwise", rowwise, columnwise, compact)
    check_granularity("granularity", granularity)


def check_compact(q: torch.Tensor, scale_inv: torch.Tensor, granularity: str, columnwise: bool) -> None:
    check_granularity("granularity", granularity)
    fp8_max(q.dtype)
    if q.dim() != 2:
        raise ValueError(f"q has shape {tuple(q.shape)}; flatten it to a matrix")
    outer, inner = (q.shape[1], q.shape[0]) if columnwise else q.shape
    expected = scale_shape(outer, inner, granularity)
    expected = expected[::-1] if columnwise else expected
    if tuple(scale_inv.shape) != tuple(expected) or scale_inv.dtype != torch.float32:
        raise ValueError(
            f"scale_inv is {scale_inv.dtype} {tuple(scale_inv.shape)}, compact scales of this copy are float32"
            f" {tuple(expected)}; pass what cast_blockwise with compact=True returned"
        )


def check_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    granularity_a: str,
    granularity_b: str,
    out_dtype: torch.dtype,
) -> None:
    check_granularity("granularity_a", granularity_a)
    check_granularity("granularity_b", granularity_b)
    # The granularities alone: of the dtypes that torch's GEMM refuses, Triton's takes E5M2 by E5M2.
    reason = refusal(Gemm(E4M3, E4M3, Granularity(granularity_a), Granularity(granularity_b)), None)
    if reason is not None:
        raise ValueError(f"{reason}; quantize one operand with 1x128 blocks")
    check_product(a, b, bias, out_dtype)


def check_scales(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    granularity_a: str,
    granularity_b: str,
) -> None:
    _check_gemm_scales("a", scale_inv_a, a.shape[0], a.shape[1], granularity_a)
    _check_gemm_scales("b", scale_inv_b, b.shape[1], b.shape[0], granularity_b)


def _check_gemm_scales(name: str, scale_inv: torch.Tensor, outer: int, inner: int, granularity: str) -> None:
    expected = gemm_ready_scale_shape(outer, inner, granularity)
    if tuple(scale_inv.shape) != expected or not scale_inv.is_contiguous() or scale_inv.dtype != torch.float32:
        raise ValueError(
            f"scale_inv_{name} is {scale_inv.dtype} {tuple(scale_inv.shape)} with strides {scale_inv.stride()},"
            f" expected contiguous float32 {expected}: the GEMM-ready scales of cast_blockwise or gemm_ready_blockwise"
        )


def granularity_of_compact(name: str, scale_inv: torch.Tensor, outer: int, inner: int, transposed: bool) -> Granularity:
    """The blocks that compact scales of an operand belong to, told by their shape.

    The operand is [outer, inner], and with `transposed` both it and its scales stand transposed. A square grid looks
    the same either way; there the scales of a transposed operand must be column-major like it, because the scales of
    `quantize_blockwise` passed without their `.t()` would give wrong numbers in silence.
    """
    shapes = [scale_shape(outer, inner, granularity) for granularity in GRANULARITIES]
    if transposed:
        shapes = [shape[::-1] for shape in shapes]
    given = tuple(scale_inv.shape)
    for granularity, shape in zip(GRANULARITIES, shapes, strict=True):
        if given == tuple(shape):
            if transposed and given == given[::-1] and given[0] > 1 and scale_inv.stride(0) != 1:
                raise ValueError(
                    f"{name} has the square shape {given} and strides {scale_inv.stride()}, which do not tell whether"
                    " it is transposed; pass the scales that quantize_blockwise returned with .t()"
                )
            return granularity
    fix = "transpose it with .t()" if given[::-1] in shapes else "pass what quantize_blockwise returned for this operand"
    raise ValueError(f"{name} has shape {given}; 1x{BLOCK} scales are {shapes[0]}, {BLOCK}x{BLOCK} ones {shapes[1]}: {fix}")
