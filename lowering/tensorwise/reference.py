"""Eager semantics of the operations with one scale per tensor, in plain torch. This is the specification: schemas are
inferred from these signatures, kernels are held against these results.

Formulas: docs/numerics.md. All functions run on any device and take any strides.
"""

import dataclasses

import torch

from lowering import products
from lowering.copies import Sides, dense, matrices, padded
from lowering.products import Product
from lowering.scaling import amax, quantize, scale_from_amax, scales_from_amax
from lowering.tensorwise import parts

__all__ = [
    "Cast",
    "amax",
    "cast",
    "multi_amax",
    "multi_scales",
    "quantize",
    "scale_from_amax",
    "scaled_mm",
    "scales_from_amax",
    "transposed_copy",
]


@dataclasses.dataclass(frozen=True)
class Cast(Sides):
    """The options of `cast`."""

    with_amax: bool = False
    in_parts: bool = False


def cast(
    xs: list[torch.Tensor],
    scales: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    pad_rows: bool = False,
    pad_cols: bool = False,
    with_amax: bool = False,
    in_parts: bool = False,
) -> list[torch.Tensor]:
    """FP8 copies of matrices [R, C] or batches of matrices [E, R, C], each quantized with its scale (`quantize`).

    Returns the rowwise copies [R, C16] of all, then the columnwise ones [C, R16], the transposes; padding is that of
    lowering/copies.py, to multiples of 16. scales: a float32 scalar for each of xs; for a batch [E] also, one for each of its
    matrices. with_amax: the last result is the float32 amax: a scalar of one matrix; of several, or of batches, a vector with
    an entry for each matrix. in_parts: of one matrix instead the amaxes [P] of its tiles, in any order (`parts.num_parts`),
    which `record_amax` takes. Raises ValueError for arguments of other shapes or dtypes.
    """
    each = [scale.reshape(-1, 1, 1) if x.dim() == 3 else scale for x, scale in zip(xs, scales, strict=True)]
    values = [quantize(x, scale, dtype) for x, scale in zip(xs, each, strict=True)]
    row = [padded(q, pad_rows) for q in values] if rowwise else []
    col = [padded(q.mT, pad_cols) for q in values] if columnwise else []
    if not with_amax:
        return [*row, *col]
    if in_parts and xs[0].numel():
        return [*row, *col, multi_amax(list(parts.tiles(xs[0], rowwise, columnwise)))]
    has_one = len(xs) == 1 and xs[0].dim() == 2 and not in_parts
    return [*row, *col, amax(xs[0]) if has_one else multi_amax(xs, per_matrix=True)]


def transposed_copy(rowwise: torch.Tensor) -> torch.Tensor:
    """The columnwise copy [C, R16] made of the rowwise one, FP8 [R, C]: the same bytes, for all elements have one scale."""
    return padded(dense(rowwise.t()), False)


def multi_amax(xs: list[torch.Tensor], *, per_matrix: bool = False) -> torch.Tensor:
    """`amax` of each tensor, with `per_matrix` of each matrix of those that are batches [E, R, C]: [n], float32."""
    return torch.stack([amax(x) for x in (matrices(xs) if per_matrix else xs)])


def multi_scales(
    xs: list[torch.Tensor], dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scales_from_amax` of the `multi_amax` of tensors, at least one: scales [n] and their reciprocals [n]."""
    return scales_from_amax(multi_amax(xs), dtype, margin=margin, epsilon=epsilon, power_of_2=power_of_2)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> torch.Tensor:
    """(a @ b) * scale_inv_a * scale_inv_b + bias for FP8 a [M, K] and b [K, N], accumulated in float32, rounded once
    to out_dtype.

    The scales are scalars, bias is [N] or None. `fast_accum` lets hardware accumulate in fewer bits; here it changes
    nothing.
    """
    return products.of_tensors(Product(a, b, scale_inv_a, scale_inv_b, bias, out_dtype=out_dtype))
