"""Checks of the arguments of the blockwise operations. Every error is a ValueError that names the value and the fix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowering.blockwise_reference import compact_scale_shape, gemm_ready_scale_shape
from lowering.formats import BLOCK, HIGH_PRECISION_DTYPES, fp8_max


def check_block(block: Sequence[int]) -> None:
    if not isinstance(block, Sequence) or tuple(block) not in ((1, BLOCK), (BLOCK, BLOCK)):
        raise ValueError(f"block is {block!r}; use (1, {BLOCK}) or ({BLOCK}, {BLOCK})")


def check_block_dims(name: str, block_dims: int) -> None:
    if block_dims not in (1, 2):
        raise ValueError(f"{name} is {block_dims}; use 1 (blocks of 1x{BLOCK}) or 2 (blocks of {BLOCK}x{BLOCK})")


def check_quantize(x: torch.Tensor, dtype: torch.dtype) -> None:
    fp8_max(dtype)
    if x.dtype not in HIGH_PRECISION_DTYPES:
        names = ", ".join(str(d) for d in HIGH_PRECISION_DTYPES)
        raise ValueError(f"x is {x.dtype}, which is not quantized blockwise; convert it to one of {names}")
    if x.dim() == 0:
        raise ValueError("x has no dimensions, blocks need one; reshape it to (1,)")


def check_matrix(x: torch.Tensor, dtype: torch.dtype, block_dims: int) -> None:
    check_quantize(x, dtype)
    check_block_dims("block_dims", block_dims)
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; flatten it to a matrix [rows, last]")


def check_compact(q: torch.Tensor, scale_inv: torch.Tensor, block_dims: int, columnwise: bool) -> None:
    check_block_dims("block_dims", block_dims)
    fp8_max(q.dtype)
    if q.dim() != 2:
        raise ValueError(f"q has shape {tuple(q.shape)}; flatten it to a matrix")
    outer, inner = (q.shape[1], q.shape[0]) if columnwise else q.shape
    expected = compact_scale_shape(outer, inner, block_dims)
    expected = expected[::-1] if columnwise else expected
    if tuple(scale_inv.shape) != tuple(expected) or scale_inv.dtype != torch.float32:
        raise ValueError(
            f"scale_inv is {scale_inv.dtype} {tuple(scale_inv.shape)}, compact scales of this copy are float32"
            f" {tuple(expected)}; pass what compact_blockwise returned"
        )


def check_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    block_dims_a: int,
    block_dims_b: int,
    out_dtype: torch.dtype,
) -> None:
    check_block_dims("block_dims_a", block_dims_a)
    check_block_dims("block_dims_b", block_dims_b)
    if block_dims_a == 2 and block_dims_b == 2:
        raise ValueError("block_dims_a and block_dims_b are both 2; quantize one operand with 1x128 blocks")
    fp8_max(a.dtype)
    fp8_max(b.dtype)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} do not multiply; pass a [M, K] and b [K, N]")
    if out_dtype not in HIGH_PRECISION_DTYPES:
        raise ValueError(f"out_dtype is {out_dtype}; use torch.bfloat16, torch.float16 or torch.float32")
    if bias is not None and tuple(bias.shape) != (b.shape[1],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; pass one of shape ({b.shape[1]},), the columns of b")


def check_gemm_scales(name: str, scale_inv: torch.Tensor, outer: int, inner: int, block_dims: int) -> None:
    expected = gemm_ready_scale_shape(outer, inner, block_dims)
    if tuple(scale_inv.shape) != expected or not scale_inv.is_contiguous() or scale_inv.dtype != torch.float32:
        raise ValueError(
            f"scale_inv_{name} is {scale_inv.dtype} {tuple(scale_inv.shape)} with strides {scale_inv.stride()},"
            f" expected contiguous float32 {expected}: the GEMM-ready scales of cast_blockwise or gemm_ready_blockwise"
        )


def block_dims_of_compact(name: str, scale_inv: torch.Tensor, outer: int, inner: int, transposed: bool) -> int:
    """1 or 2: the blocks that compact scales of an operand belong to, told by their shape.

    The operand is [outer, inner], and with `transposed` both it and its scales stand transposed. A square grid looks
    the same either way; there the scales of a transposed operand must be column-major like it, because the scales of
    `quantize_blockwise` passed without their `.t()` would give wrong numbers in silence.
    """
    shapes = [compact_scale_shape(outer, inner, block_dims) for block_dims in (1, 2)]
    if transposed:
        shapes = [shape[::-1] for shape in shapes]
    given = tuple(scale_inv.shape)
    for block_dims, shape in zip((1, 2), shapes, strict=True):
        if given == tuple(shape):
            if transposed and given == given[::-1] and given[0] > 1 and scale_inv.stride(0) != 1:
                raise ValueError(
                    f"{name} has the square shape {given} and strides {scale_inv.stride()}, which do not tell whether"
                    " it is transposed; pass the scales that quantize_blockwise returned with .t()"
                )
            return block_dims
    fix = "transpose it with .t()" if given[::-1] in shapes else "pass what quantize_blockwise returned for this operand"
    raise ValueError(f"{name} has shape {given}; 1x{BLOCK} scales are {shapes[0]}, {BLOCK}x{BLOCK} ones {shapes[1]}: {fix}")
