"""Checks of arguments that operations of several kinds share. Every error is a ValueError that names the value and the fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from lowering.copies import outer_and_inner
from lowering.formats import HIGH_PRECISION_DTYPES, Granularity, fp8_max
from lowering.hardware import Gemm, refusal, short
from lowering.scaling import INVERSES


def check_input(x: torch.Tensor) -> None:
    """`x` has a dtype that can be quantized."""
    if x.dtype not in HIGH_PRECISION_DTYPES:
        names = ", ".join(str(dtype) for dtype in HIGH_PRECISION_DTYPES)
        raise ValueError(f"cannot quantize a {x.dtype} tensor; cast it to one of {names} first")


def check_each(xs: list[torch.Tensor]) -> None:
    """Each of `xs` has such a dtype."""
    for x in xs:
        check_input(x)


def check_two_dimensions(x: torch.Tensor) -> None:
    """`x` is a matrix."""
    if x.dim() != 2:
        raise ValueError(f"expected a matrix, got a tensor of shape {tuple(x.shape)}; reshape it to two dimensions")


def check_inputs(xs: list[torch.Tensor], rowwise: bool = True, columnwise: bool = True) -> None:
    """Each of `xs` is a matrix that can be quantized, or a batch of them; there is one, and a copy to be made."""
    for x in xs:
        check_input(x)
        if x.dim() != 3:
            check_two_dimensions(x)
    _check_some(xs, rowwise, columnwise)


def check_blocks_of(
    xs: list[torch.Tensor], dtype: torch.dtype, how: str, rowwise: bool, columnwise: bool, compact: bool
) -> None:
    """Each of `xs` is a matrix, or a batch of them unless they travel, that can be quantized to `dtype`; there is one, and a
    copy to be made. `how` it would be quantized, for the error."""
    for x in xs:
        check_blocks(x, dtype, how)
        if x.dim() != 3 or compact:
            check_flat(x)
    _check_some(xs, rowwise, columnwise)


def _check_some(xs: list[torch.Tensor], rowwise: bool, columnwise: bool) -> None:
    for x in xs:
        if x.dim() == 3 and not x.shape[0]:
            raise ValueError(f"x has shape {tuple(x.shape)}; pass a batch of matrices [E, R, C], E at least 1")
    if not xs or not (rowwise or columnwise):
        raise ValueError(f"{len(xs)} matrices, rowwise={rowwise}, columnwise={columnwise}: pass a matrix and ask for a copy")


def check_inverse(inverse: str | None, power_of_2: bool) -> None:
    """`inverse` is a way to make scales that are no powers of two, or None."""
    if inverse is not None and (inverse not in INVERSES or power_of_2):
        raise ValueError(
            f"inverse is {inverse!r} and power_of_2 {power_of_2}; pass one of {', '.join(map(repr, INVERSES))} with"
            " power_of_2=False, or None"
        )


def check_granularity(name: str, granularity: str, known: Iterable[Granularity]) -> None:
    """`granularity` is one of these."""
    values = [kind.value for kind in known]
    if granularity not in values:
        raise ValueError(f"{name} is {str(granularity)!r}; use {' or '.join(map(repr, values))}")


def check_blocks(x: torch.Tensor, dtype: torch.dtype, how: str) -> None:
    """`x` can be quantized to `dtype` and has blocks; `how` it would be quantized, for the error."""
    fp8_max(dtype)
    if x.dtype not in HIGH_PRECISION_DTYPES:
        names = ", ".join(str(d) for d in HIGH_PRECISION_DTYPES)
        raise ValueError(f"x is {x.dtype}, which is not quantized {how}; convert it to one of {names}")
    if x.dim() == 0:
        raise ValueError("x has no dimensions, blocks need one; reshape it to (1,)")


def check_flat(x: torch.Tensor) -> None:
    """`x` is a matrix."""
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; flatten it to a matrix [rows, last]")


def check_sizes(a: torch.Tensor, b: torch.Tensor) -> None:
    """`a` and `b` are matrices with a product."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}; a is [M, K] and b is [K, N]")


def check_operands(a: torch.Tensor, b: torch.Tensor) -> None:
    """`a` and `b` are FP8 matrices that FP8 tensor cores multiply; the same rule on every device."""
    check_sizes(a, b)
    reason = refusal(Gemm(a.dtype, b.dtype), None)
    if reason is not None:
        fix = "quantize both operands to FP8, at least one operand to E4M3"
        raise ValueError(f"cannot multiply {a.dtype} by {b.dtype}: {reason}; {fix}")


def check_product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    """`a` [M, K] and `b` [K, N] are FP8 and multiply; `bias` and `out_dtype` suit the product."""
    fp8_max(a.dtype)
    fp8_max(b.dtype)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} do not multiply; pass a [M, K] and b [K, N]")
    check_output(b, bias, out_dtype)


def check_output(b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    """`bias` and `out_dtype` suit a product with `b`."""
    if out_dtype not in HIGH_PRECISION_DTYPES:
        raise ValueError(f"out_dtype is {out_dtype}; use torch.bfloat16, torch.float16 or torch.float32")
    check_bias(bias, b)


def check_bias(bias: torch.Tensor | None, b: torch.Tensor) -> None:
    """`bias` has an entry for each column of `b`, if there is one."""
    if bias is not None and tuple(bias.shape) != (b.shape[1],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; pass one of shape ({b.shape[1]},), the columns of b")


def check_compact(
    q: torch.Tensor,
    scale_inv: torch.Tensor,
    columnwise: bool,
    shape_of: Callable[[int, int], tuple[int, int]],
    dtype: torch.dtype,
) -> None:
    """`scale_inv` are the compact scales of the FP8 copy `q`. shape_of: their shape for its outer and inner size."""
    fp8_max(q.dtype)
    if q.dim() != 2:
        raise ValueError(f"q has shape {tuple(q.shape)}; flatten it to a matrix")
    expected = shape_of(*outer_and_inner(q, columnwise))
    expected = expected[::-1] if columnwise else expected
    if tuple(scale_inv.shape) != tuple(expected) or scale_inv.dtype != dtype:
        raise ValueError(
            f"scale_inv is {scale_inv.dtype} {tuple(scale_inv.shape)}, compact scales of this copy are {short(dtype)}"
            f" {tuple(expected)}; pass the result of cast_with_scales with compact=True"
        )


def check_gemm_ready(name: str, scale: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """`scale` has the dtype and the shape of GEMM-ready scales, and no gaps; `name` for the error."""
    if tuple(scale.shape) != shape or not scale.is_contiguous() or scale.dtype != dtype:
        raise ValueError(
            f"{name} is {scale.dtype} {tuple(scale.shape)} with strides {scale.stride()}, expected contiguous"
            f" {short(dtype)} {shape}: the GEMM-ready scales of cast_with_scales or gemm_ready"
        )
