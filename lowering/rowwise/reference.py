"""Eager semantics of the operations with one scale per row, in plain torch. This is the specification: schemas are
inferred from these signatures, kernels are held against these results.

A *line* is what shares a scale: a row of the matrix in the rowwise copy, a column in the columnwise copy. A copy is
[outer, inner], its inner dimension is the one that the GEMM contracts, and its scales are [outer, 1]: the shape in which
torch's GEMM reads those of a; those of b are their transpose, a view. The two copies of a matrix have different scales
and hence different values, so both are quantized from high precision.

Formulas: docs/numerics.md. All functions take any device and strides.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lowering.blockwise.reference import as_matrix, padded
from lowering.formats import pad_to_alignment, round_up
from lowering.tensorwise.reference import quantize, scales_from_amax

#: The scales of a copy begin at a multiple of this many float32 values: at 16 bytes, as cuBLASLt reads them.
SCALE_ALIGNMENT = 4


def amax_rowwise(xs: list[torch.Tensor], *, rowwise: bool, columnwise: bool) -> torch.Tensor:
    """The largest magnitude of every line: for each matrix [R, C] first its rows [R], then its columns [C], all in one
    float32 vector. 0 for a line without elements; inf or NaN if an element is (NaN wins).
    """
    parts = []
    for x in xs:
        parts += [_amax(x, dim=1)] if rowwise else []
        parts += [_amax(x, dim=0)] if columnwise else []
    return torch.cat(parts)


def _amax(x: torch.Tensor, dim: int) -> torch.Tensor:
    if x.shape[dim] == 0:
        return torch.zeros(x.shape[1 - dim], dtype=torch.float32, device=x.device)
    return x.abs().amax(dim=dim).to(torch.float32)


def scale_slices(
    sizes: Sequence[Sequence[int]], rowwise: bool, columnwise: bool, pad_rows: bool = False, pad_cols: bool = False
) -> tuple[list[tuple[int, int]], int]:
    """Where the scales of each copy of matrices of these sizes are in the vector of `cast_lines_rowwise`, rowwise before
    columnwise for each matrix, as (start, end); and the length of the vector."""
    found, start = [], 0
    for rows, cols in sizes:
        for wanted, lines, is_padded in ((rowwise, rows, pad_rows), (columnwise, cols, pad_cols)):
            if wanted:
                stored = pad_to_alignment(lines) if is_padded else lines
                found.append((start, start + stored))
                start = start + round_up(stored, SCALE_ALIGNMENT)
    return found, start


def cast_lines_rowwise(
    xs: list[torch.Tensor],
    amaxes: torch.Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool,
    columnwise: bool,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:
    """The FP8 copies of matrices whose `amax_rowwise` is known.

    Returns the rowwise copies of all matrices, the columnwise copies (what was not asked for is left out), and the scales of
    all copies in one vector (`scale_slices`), 1 between them. Each copy with its scales is what `cast_rowwise` returns.
    """
    options: dict[str, Any] = {"power_of_2": power_of_2, "epsilon": epsilon}
    slices, length = scale_slices([x.shape for x in xs], rowwise, columnwise, pad_rows, pad_cols)
    scales = amaxes.new_ones(length)
    row: list[torch.Tensor] = []
    col: list[torch.Tensor] = []
    start = 0
    places = iter(slices)
    for x in xs:
        for wanted, matrix, pad_outer, copies in ((rowwise, x, pad_rows, row), (columnwise, x.t(), pad_cols, col)):
            if wanted:
                amax = amaxes[start : start + matrix.shape[0]]
                start += matrix.shape[0]
                q, scale_inv = _copy(matrix, amax, dtype, pad_outer, **options)
                copies.append(q)
                scales[slice(*next(places))] = scale_inv[:, 0]
    return [*row, *col, scales]


def _copy(
    x: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype, pad_outer: bool, power_of_2: bool, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of x [outer, inner] with the amax of each outer row, and its scales. Rows of padding have scale 1."""
    scale, scale_inv = scales_from_amax(amax, dtype, power_of_2=power_of_2, epsilon=epsilon)
    q = padded(quantize(x, scale[:, None], dtype), pad_outer)
    stored = scale_inv.new_ones((q.shape[0], 1))
    stored[: x.shape[0], 0] = scale_inv
    return q, stored


def quantize_rowwise(
    x: torch.Tensor, dtype: torch.dtype, *, power_of_2: bool = True, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values of `x` and one factor per row of its matrix [rows, last]: q = cast(x * scale), scale_inv = 1/scale.

    x: float32, bfloat16 or float16, at least one dimension; all but the last are flattened to rows. Returns q,
    contiguous, `dtype`, shape of x; and scale_inv, float32, [rows, 1]. Each row has the scale of `scale_from_amax` with
    the amax of its elements: 1 where that is 0 or not finite, the largest finite float32 where the quotient overflows;
    `power_of_2` rounds it down to a power of two. Amaxes below `epsilon` count as `epsilon`. Non-finite elements as in
    `quantize`. Raises ValueError for another dtype or type of x. Source: torchao's rowwise float8 recipe,
    docs/numerics.md.
    """
    matrix = as_matrix(x)
    amax = amax_rowwise([matrix], rowwise=True, columnwise=False)
    scale, scale_inv = scales_from_amax(amax, dtype, power_of_2=power_of_2, epsilon=epsilon)
    q = quantize(matrix, scale[:, None], dtype).clone(memory_format=torch.contiguous_format)
    return q.view(x.shape), scale_inv[:, None]


def cast_rowwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One FP8 copy of the matrix `x` [R, C] and its scales.

    Returns q, rowwise [R, C16] or columnwise (the transpose) [C, R16], padded with zeros along the inner dimension to a
    multiple of 16, with `pad_outer` along both; and scale_inv, contiguous float32 [outer, 1], 1 for rows of padding.
    Scales as in `quantize_rowwise`, along the inner dimension of the copy.
    """
    matrix = x.t() if columnwise else x
    return _copy(matrix, _amax(matrix, dim=1), dtype, pad_outer, power_of_2, epsilon)


def cast_transpose_rowwise(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both copies of the matrix `x`: q_rowwise, scale_inv_rowwise, q_columnwise, scale_inv_columnwise.

    Each pair is what `cast_rowwise` returns. `pad_rows` pads R of the rowwise copy to a multiple of 16, `pad_cols` C of
    the columnwise one.
    """
    options: dict[str, Any] = {"pad_rows": pad_rows, "pad_cols": pad_cols, "power_of_2": power_of_2, "epsilon": epsilon}
    q, scale_inv, q_t, scale_inv_t = multi_cast_transpose_rowwise([x], dtype, **options)
    return q, scale_inv, q_t, scale_inv_t


def multi_cast_rowwise(
    xs: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    columnwise: bool = False,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:
    """`cast_rowwise` of each matrix, at least one: the copies of all, then the scales of all."""
    options: dict[str, Any] = {"columnwise": columnwise, "pad_outer": pad_outer, "power_of_2": power_of_2, "epsilon": epsilon}
    copies = [cast_rowwise(x, dtype, **options) for x in xs]
    return [copy[part] for part in (0, 1) for copy in copies]


def multi_cast_transpose_rowwise(
    xs: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    pad_rows: bool = False,
    pad_cols: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:
    """`cast_transpose_rowwise` of each matrix: rowwise copies, their scales, columnwise copies, their scales."""
    options: dict[str, Any] = {"power_of_2": power_of_2, "epsilon": epsilon}
    row = [cast_rowwise(x, dtype, pad_outer=pad_rows, **options) for x in xs]
    col = [cast_rowwise(x, dtype, columnwise=True, pad_outer=pad_cols, **options) for x in xs]
    return [pair[part] for pairs in (row, col) for part in (0, 1) for pair in pairs]


def scaled_mm_rowwise(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> torch.Tensor:
    """(a @ b) * scale_inv_a * scale_inv_b.t() + bias for FP8 a [M, K] and b [K, N], accumulated in float32, rounded once
    to out_dtype.

    scale_inv_a is [M, 1], scale_inv_b [N, 1]: the scales of the copy [N, K] whose transpose b is. Either may be a scalar,
    which all rows share. bias is [N] or None. `fast_accum` lets hardware accumulate in fewer bits; here it changes
    nothing.
    """
    out = a.to(torch.float32) @ b.to(torch.float32)
    out = out * scale_inv_a.reshape(-1, 1) * scale_inv_b.reshape(1, -1)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)
