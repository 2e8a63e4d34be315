"""FP8 GEMMs in plain torch, accumulated in float32 and rounded once: what kernels of every kind of scaling are held against."""

import torch

from lowering.blocks import dequantize


def of_tensors(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a [M, K] @ b [K, N] with a scalar scale each, + bias [N]; [M, N] in `out_dtype`."""
    out = a.to(torch.float32) @ b.to(torch.float32)
    return finished(out * (scale_inv_a * scale_inv_b), bias, out_dtype)


def of_lines(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The same with a scale for each row of a [M, 1] and each column of b [N, 1]; either may be a scalar."""
    out = a.to(torch.float32) @ b.to(torch.float32)
    return scaled_lines(out, scale_inv_a, scale_inv_b, bias, out_dtype)


def of_values(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """a [M, K] @ b [N, K].t() of float32 values."""
    return finished(a @ b.t(), bias, out_dtype)


def of_blocks(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    granularities: tuple[str, str],
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The same with compact scales of blocks, of a and of the copy [N, K] whose transpose b is."""
    values = dequantize(a, scale_a, granularities[0]), dequantize(b.t(), scale_b, granularities[1])
    return of_values(*values, bias, out_dtype)


def scaled_lines(
    out: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """A float32 product, times the scales of its rows and columns."""
    return finished(out * scale_inv_a.reshape(-1, 1) * scale_inv_b.reshape(1, -1), bias, out_dtype)


def finished(out: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """A float32 product with the bias added, of any float dtype, and rounded."""
    return (out if bias is None else out + bias.to(torch.float32)).to(out_dtype)
