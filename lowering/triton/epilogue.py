"""Behind a GEMM without such an epilogue: scales of rows and columns, a bias of any dtype and one rounding, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowering import products
from lowering.products import Product
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, on_device

BLOCK_R, BLOCK_C = 8, 512


@Kernel
@triton.jit
def epilogue_kernel(
    x, scale_inv_a, scale_inv_b, bias, out, rows, cols, stride_x, stride_bias,
    HAS_SCALES: tl.constexpr, A_LINES: tl.constexpr, B_LINES: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out [rows, cols] = x [rows, cols] * scale_inv_a * scale_inv_b + bias. x has strides (stride_x, 1), out is contiguous.
    A_LINES, B_LINES: a scale for each row, for each column; else one for all."""
    tiles_c = tl.cdiv(cols, BLOCK_C)
    r = (tl.program_id(0) // tiles_c) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = (tl.program_id(0) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_rows, in_cols = r < rows, c < cols
    mask = in_rows[:, None] & in_cols[None, :]
    row = r.to(tl.int64)[:, None]
    value = tl.load(x + row * stride_x + c[None, :], mask=mask, other=0.0)
    if HAS_SCALES:
        if A_LINES:
            value *= tl.load(scale_inv_a + r, mask=in_rows, other=0.0)[:, None]
        else:
            value *= tl.load(scale_inv_a)
        if B_LINES:
            value *= tl.load(scale_inv_b + c, mask=in_cols, other=0.0)[None, :]
        else:
            value *= tl.load(scale_inv_b)
    if HAS_BIAS:
        value += tl.load(bias + c * stride_bias, mask=in_cols, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row * cols + c[None, :], value.to(out.dtype.element_ty), mask=mask)


def finished(out: torch.Tensor, product: Product, *, scales_lines: bool = False) -> torch.Tensor:
    """`products.finished` of the first N columns of a float32 `out` [M, N or more] with dense rows, which may be written to;
    with `scales_lines`, `products.scaled_lines`. Bit for bit what these compute."""
    n, bias = product.b.shape[1], product.bias
    if out.device.type != "cuda":
        reference = products.scaled_lines if scales_lines else products.finished
        return reference(out[:, :n], product).contiguous()
    if out.shape[1] == n and out.dtype == product.out_dtype and bias is None and not scales_lines:
        return out
    return launch(out, n, product, scales_lines)


def launch(out: torch.Tensor, n: int, product: Product, scales_lines: bool) -> torch.Tensor:
    """The kernel; in place where that leaves a contiguous result."""
    m, bias = out.shape[0], product.bias
    in_place = out.dtype == product.out_dtype and out.shape[1] == n
    result = out if in_place else out.new_empty((m, n), dtype=product.out_dtype)
    scale_inv_a, scale_inv_b = out, out  # pointers that are not read
    if scales_lines:
        scale_inv_a, scale_inv_b = product.scale_inv_a.contiguous(), product.scale_inv_b.contiguous()
    with on_device(out):
        epilogue_kernel[(cdiv(m, BLOCK_R) * cdiv(n, BLOCK_C),)](
            out, scale_inv_a, scale_inv_b, out if bias is None else bias, result, m, n, out.stride(0),
            0 if bias is None else bias.stride(0),
            HAS_SCALES=scales_lines, A_LINES=scales_lines and scale_inv_a.numel() > 1,
            B_LINES=scales_lines and scale_inv_b.numel() > 1, HAS_BIAS=bias is not None,
            BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return result
