"""Checks of the arguments of the blockwise operations. Every error is a ValueError that names the value and the fix."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from lowering import checks
from lowering.blocks import scale_shape
from lowering.blockwise.reference import gemm_ready_scale_shape
from lowering.formats import BLOCK, E4M3, Granularity
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
    checks.check_blocks_of(xs, dtype, "blockwise", rowwise, columnwise, compact)
    check_granularity("granularity", granularity)


def check_compact(q: torch.Tensor, scale_inv: torch.Tensor, granularity: str, columnwise: bool) -> None:
    check_granularity("granularity", granularity)
    shape_of = functools.partial(scale_shape, granularity=granularity)
    source = "cast_blockwise with compact=True"
    checks.check_compact("scale_inv is", q, scale_inv, columnwise, shape_of, torch.float32, source)


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
    checks.check_product(a, b, bias, out_dtype)


def check_scales(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    granularity_a: str,
    granularity_b: str,
) -> None:
    for name, scale_inv, outer, inner, granularity in (
        ("scale_inv_a", scale_inv_a, *a.shape, granularity_a),
        ("scale_inv_b", scale_inv_b, *b.shape[::-1], granularity_b),
    ):
        shape = gemm_ready_scale_shape(outer, inner, granularity)
        checks.check_gemm_ready(name, scale_inv, shape, torch.float32, "cast_blockwise or gemm_ready_blockwise")


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
