"""Eager semantics of the operations with one scale per tensor, in plain torch. This is the specification: schemas are
inferred from these signatures, kernels are held against these results.

Formulas: docs/numerics.md. All functions run on any device and take any strides.
Checks raise a ValueError that names the value and the fix.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lowering.checks import check_inputs
from lowering.copies import matrices, padded
from lowering.formats import fp8_max
from lowering.scaling import amax, quantize, scale_from_amax, scales_from_amax

__all__ = [
    "amax",
    "amaxes",
    "cast",
    "multi_scales",
    "quantize",
    "scale_from_amax",
    "scales_from_amax",
]


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
    """FP8 copies of matrices [R, C] or batches of matrices [E, R, C], each quantized with its scale (`quantize`). Returns the
    rowwise copies [R, C16] of all, then the columnwise ones [C, R16], the transposes; padding is that of lowering/copies.py, to
    multiples of 16. scales: a float32 scalar for each of xs; for a batch [E] also, one for each of its matrices. with_amax: the
    last result is the float32 amax: a scalar of one matrix; of several, or of batches, a vector with an entry for each matrix.
    in_parts: of one matrix instead the amaxes [P] of its tiles, in any order (`num_parts`), which `record_amax` takes. Raises
    ValueError for arguments of other shapes or dtypes."""
    each = [scale.reshape(-1, 1, 1) if x.dim() == 3 else scale for x, scale in zip(xs, scales, strict=True)]
    values = [quantize(x, scale, dtype) for x, scale in zip(xs, each, strict=True)]
    row = [padded(q, pad_rows) for q in values] if rowwise else []
    col = [padded(q.mT, pad_cols) for q in values] if columnwise else []
    if not with_amax:
        return [*row, *col]
    if in_parts and xs[0].numel():
        return [*row, *col, amaxes(list(tiles(xs[0], rowwise, columnwise))).reshape(-1)]
    has_one = len(xs) == 1 and xs[0].dim() == 2 and not in_parts
    return [*row, *col, amaxes(xs, per_matrix=not has_one)]


def amaxes(xs: list[torch.Tensor], *, per_matrix: bool = False) -> torch.Tensor:
    """`amax` of each tensor, float32 [n], a scalar of one; with `per_matrix` [n] of each matrix of those that are batches
    [E, R, C]."""
    found = torch.stack([amax(x) for x in (matrices(xs) if per_matrix else xs)])
    return found if per_matrix or len(xs) > 1 else found[0]


def multi_scales(
    xs: list[torch.Tensor], dtype: torch.dtype, *, margin: int = 0, epsilon: float = 0.0, power_of_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scales_from_amax` of the `amax` of each tensor, at least one: scales [n] and their reciprocals [n]."""
    return scales_from_amax(amaxes(xs).reshape(-1), dtype, margin=margin, epsilon=epsilon, power_of_2=power_of_2)


#: Rows and columns of a tile of a row-major matrix of which the rowwise copy alone is made, and of one with a columnwise copy.
ROWWISE_TILE = (64, 128)
COLUMNWISE_TILE = (128, 64)


def tile_of(x: torch.Tensor, rowwise: bool, columnwise: bool) -> tuple[int, int]:
    """Rows and columns, as x has them, of a tile of the matrix x. Both copies of a column-major one are those of its
    transpose."""
    is_column_major = x.stride(0) == 1 and x.stride(1) != 1
    return COLUMNWISE_TILE if columnwise and not (rowwise and is_column_major) else ROWWISE_TILE


def num_parts(x: torch.Tensor, rowwise: bool, columnwise: bool) -> torch.types.IntLikeType:
    """The number of tiles that cover x; 1 for an empty matrix, whose amax is 0."""
    rows, cols = tile_of(x, rowwise, columnwise)
    count = ((x.shape[0] + rows - 1) // rows) * ((x.shape[1] + cols - 1) // cols)
    return torch.sym_max(count, 1)


def tiles(x: torch.Tensor, rowwise: bool, columnwise: bool) -> Iterator[torch.Tensor]:
    """The tiles themselves."""
    rows, cols = tile_of(x, rowwise, columnwise)
    for band in x.split(rows):
        yield from band.split(cols, dim=1)


def check_scale(scale: torch.Tensor) -> None:
    """`scale` is one float32 value."""
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(f"scale must be one float32 value, got {scale.dtype} of shape {tuple(scale.shape)}")


def check_margin(inverse: str | None, margin: int) -> None:
    """Scales as engines make them have no margin."""
    if inverse is not None and margin:
        raise ValueError(f"inverse is {inverse!r} and margin {margin}; engines have no margin: pass margin=0")


def check_casts(
    xs: list[torch.Tensor],
    scales: list[torch.Tensor],
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    with_amax: bool,
    in_parts: bool,
) -> None:
    """Every tensor is a matrix or a batch that can be quantized to `dtype`, and has its scale."""
    fp8_max(dtype)
    check_inputs(xs, rowwise, columnwise)
    if len(scales) != len(xs):
        raise ValueError(f"{len(xs)} matrices need as many scales, got {len(scales)}")
    for i, x in enumerate(xs):
        scale = scales[i]
        if x.dim() == 2:
            check_scale(scale)
        elif scale.dtype != torch.float32 or tuple(scale.shape) not in ((), (x.shape[0],)):
            raise ValueError(
                f"scale is {scale.dtype} {tuple(scale.shape)}; pass a float32 scalar, or one for each of the"
                f" {x.shape[0]} matrices"
            )
    if in_parts and not (with_amax and len(xs) == 1 and xs[0].dim() == 2):
        raise ValueError("in_parts is True, which is for one matrix, with_amax=True; pass in_parts=False")
