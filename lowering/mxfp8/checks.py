"""Checks of the arguments of the MXFP8 operations. Every error is a ValueError that names the value and the fix."""

from __future__ import annotations

import functools

import torch

from lowering import checks
from lowering.copies import num_blocks
from lowering.formats import BLOCK, fp8_max, round_up
from lowering.mxfp8.reference import compact_scale_shape, gemm_ready_scale_shape


def check_casts(xs: list[torch.Tensor], dtype: torch.dtype, rowwise: bool, columnwise: bool, compact: bool) -> None:
    checks.check_blocks_of(xs, dtype, "to MXFP8", rowwise, columnwise, compact)


def check_compact(q: torch.Tensor, codes: torch.Tensor, square: bool, columnwise: bool) -> None:
    shape_of = functools.partial(compact_scale_shape, square=square)
    source = "cast_mxfp8 with compact=True or quantize_mxfp8"
    checks.check_compact("codes are", q, codes, columnwise, shape_of, torch.uint8, source)


def check_gemm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    checks.check_product(a, b, bias, out_dtype)


def check_scales(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> None:
    _check_gemm_ready("scale_a", scale_a, *a.shape)
    _check_gemm_ready("scale_b", scale_b, *b.shape[::-1])


def check_scale(q: torch.Tensor, scale: torch.Tensor) -> None:
    fp8_max(q.dtype)
    checks.check_flat(q)
    _check_gemm_ready("scale", scale, *q.shape)


def check_scales_of_128(
    scale_inv_a: torch.Tensor, scale_inv_b: torch.Tensor, m: int, n: int, k: int, square_a: bool, square_b: bool
) -> None:
    blocks = num_blocks(k, BLOCK)
    for name, scale_inv, outer, square in (
        ("scale_inv_a", scale_inv_a, m, square_a),
        ("scale_inv_b", scale_inv_b, n, square_b),
    ):
        shape = (num_blocks(outer, BLOCK), round_up(blocks, 4)) if square else (blocks, round_up(outer, 4))
        checks.check_gemm_ready(name, scale_inv, shape, torch.float32, "cast_blockwise")


def _check_gemm_ready(name: str, scale: torch.Tensor, outer: int, inner: int) -> None:
    shape = gemm_ready_scale_shape(outer, inner)
    checks.check_gemm_ready(name, scale, shape, torch.uint8, "cast_mxfp8 or gemm_ready_mxfp8")
