"""Eager semantics of the operations with one scale per row, in plain torch. This is the specification: schemas are
inferred from these signatures, kernels are held against these results.

A *line* is what shares a scale: a row of the matrix in the rowwise copy, a column in the columnwise copy. A copy is
[outer, inner], its inner dimension is the one that the GEMM contracts, and its scales are [outer, 1]: the shape in which
torch's GEMM reads those of a; those of b are their transpose, a view. The two copies of a matrix have different scales
and hence different values, so both are quantized from high precision.

Formulas: docs/numerics.md. All functions take any device and strides.
Checks raise a ValueError that names the value and the fix.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from lowering.checks import check_bias, check_inputs, check_sizes, check_two_dimensions
from lowering.copies import CastOptions, empty_copy, padded, stacked
from lowering.formats import SCALE_ALIGNMENT, Granularity, fp8_max, pad_to_alignment, round_up
from lowering.hardware import Gemm, refusal
from lowering.products import Product
from lowering.scaling import quantize_as, scales_from_amax


def amax_rowwise(xs: list[torch.Tensor], *, rowwise: bool, columnwise: bool) -> torch.Tensor:
    """The largest magnitude of every line: for each matrix [R, C] first its rows [R], then its columns [C], all in one float32
    vector. 0 for a line without elements; inf or NaN if an element is (NaN wins)."""
    parts = []
    for x in xs:
        parts += [_amax(x, dim=1)] if rowwise else []
        parts += [_amax(x, dim=0)] if columnwise else []
    return torch.cat(parts)


def _amax(x: torch.Tensor, dim: int) -> torch.Tensor:
    if x.shape[dim] == 0:
        return torch.zeros(x.shape[1 - dim], dtype=torch.float32, device=x.device)
    return x.abs().amax(dim=dim).to(torch.float32)


def scale_slices(sizes: Sequence[Sequence[int]], sides: CastOptions) -> tuple[list[tuple[int, int]], int]:
    """The places of the scales of each copy of matrices of these sizes in the vector of `cast_lines_rowwise`, rowwise before
    columnwise for each matrix, as (start, end); and the length of the vector."""
    found, start = [], 0
    for rows, cols in sizes:
        for is_turned, is_padded in sides.wanted:
            lines = cols if is_turned else rows
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
    """The FP8 copies of matrices whose `amax_rowwise` is known. Returns the rowwise copies of all matrices, the columnwise
    copies (what was not asked for is left out), and the scales of all copies in one vector (`scale_slices`), 1 between them.
    Each copy with its scales is what `cast_with_scales` returns."""
    sides = CastOptions(rowwise, columnwise, pad_rows, pad_cols)
    slices, length = scale_slices([x.shape for x in xs], sides)
    scales = amaxes.new_ones(length)
    copies: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    start = 0
    places = iter(slices)
    for x, (is_turned, pad_outer) in itertools.product(xs, sides.wanted):
        matrix = x.t() if is_turned else x
        amax = amaxes[start : start + matrix.shape[0]]
        start += matrix.shape[0]
        q, scale_inv = _copy(matrix, amax, dtype, pad_outer, power_of_2, epsilon)
        copies[is_turned].append(q)
        scales[slice(*next(places))] = scale_inv[:, 0]
    return [*copies[False], *copies[True], scales]


def _copy(
    x: torch.Tensor,
    amax: torch.Tensor,
    dtype: torch.dtype,
    pad_outer: bool,
    power_of_2: bool,
    epsilon: float,
    inverse: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of x [outer, inner] with the amax of each outer row, and its scales. Rows of padding have scale 1."""
    scale, scale_inv = scales_from_amax(amax, dtype, power_of_2=power_of_2, epsilon=epsilon, inverse=inverse)
    q = padded(quantize_as(x, scale[:, None], scale_inv[:, None], dtype, inverse), pad_outer)
    stored = scale_inv.new_ones((q.shape[0], 1))
    stored[: x.shape[0], 0] = scale_inv
    return q, stored


def copy(
    x: torch.Tensor, dtype: torch.dtype, how: CastOptions, columnwise: bool, pad_outer: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of a matrix or of a batch, and its scales: `casts.cast_with_scales`."""
    x = x.mT if columnwise else x
    if x.dim() == 2:
        return _copy(x, _amax(x, dim=1), dtype, pad_outer, how.power_of_2, how.epsilon, how.inverse)
    return stacked(copy(matrix, dtype, how, False, pad_outer) for matrix in x.unbind())


def empty(
    x: torch.Tensor, dtype: torch.dtype, how: CastOptions, columnwise: bool, pad_outer: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory of a copy and of its scales."""
    q = empty_copy(x, dtype, columnwise, pad_outer)
    return q, x.new_empty((*q.shape[:-1], 1), dtype=torch.float32)


def check_lines(xs: list[torch.Tensor], rowwise: bool, columnwise: bool) -> None:
    """Every tensor is a matrix that can be quantized, and there is something to do."""
    for x in xs:
        check_two_dimensions(x)
    check_inputs(xs, rowwise, columnwise)


def check_amaxes(xs: list[torch.Tensor], amaxes: torch.Tensor, dtype: torch.dtype, rowwise: bool, columnwise: bool) -> None:
    """`amaxes` has an entry for every line."""
    fp8_max(dtype)
    check_lines(xs, rowwise, columnwise)
    lines = sum(x.shape[0] * rowwise + x.shape[1] * columnwise for x in xs)
    if amaxes.dtype != torch.float32 or tuple(amaxes.shape) != (lines,):
        raise ValueError(
            f"amaxes is {amaxes.dtype} {tuple(amaxes.shape)}, these matrices have {lines} lines; pass the result of"
            " amax_rowwise for them, with the same rowwise and columnwise"
        )


def check_gemm(product: Product) -> None:
    """Operands, scales and bias fit together."""
    a, b = product.a, product.b
    check_sizes(a, b)
    reason = refusal(Gemm(a.dtype, b.dtype, Granularity.ROW_WISE, Granularity.ROW_WISE, product.out_dtype), None)
    if reason is not None:
        fix = "quantize both operands to FP8, at least one operand to E4M3, and ask for a float output"
        raise ValueError(f"cannot multiply {a.dtype} by {b.dtype}: {reason}; {fix}")
    _check_scale("scale_inv_a", product.scale_inv_a, a.shape[0], "rows of a")
    _check_scale("scale_inv_b", product.scale_inv_b, b.shape[1], "columns of b")
    check_bias(product.bias, b)


def _check_scale(name: str, scale_inv: torch.Tensor, lines: int, what: str) -> None:
    is_scalar = scale_inv.dim() == 0
    if scale_inv.dtype != torch.float32 or not (is_scalar or tuple(scale_inv.shape) == (lines, 1)):
        raise ValueError(
            f"{name} is {scale_inv.dtype} {tuple(scale_inv.shape)}; pass float32 ({lines}, 1), one for each of the {what},"
            " or a scalar"
        )
