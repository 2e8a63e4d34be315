"""Eager semantics of grouped GEMMs and of columnwise copies in groups, in plain torch. This is the specification: schemas
are inferred from these signatures, kernels are held against these results.

A GEMM is a loop over the groups with the reference GEMM of that kind of scaling, so it reads the sizes of the groups: on the
CPU that costs nothing, on a GPU it would wait for the device. Layouts: `layouts.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from lowering import blocks, products
from lowering.copies import dense
from lowering.formats import Granularity, pad_to_alignment, round_up
from lowering.grouped.arguments import GroupedGemm
from lowering.grouped.layouts import alignment, padded_inner, padded_width
from lowering.products import Product
from lowering.scaling import quantize, scales_from_amax


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    granularity_a: str = "tensor_wise",
    granularity_b: str = "tensor_wise",
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> torch.Tensor:
    """A GEMM per group of FP8 operands, in one launch: (a_g @ b_g) * scale_inv_a * scale_inv_b + bias_g in `out_dtype`.

    The dimensions of a and b tell the form, `offs` [E] (int32, cumulative ends, on the operands' device) the groups:

        2D x 3D   a [S, K], b [E, K, N]: rows offs[g-1] to offs[g] of a meet b[g]; [S, N], zeros from row offs[-1] on
        2D x 2D   a [M, P], b [P, N]: columns of a meet rows of b, groups at padded offsets; [E, M, N], zeros where a group
                  is empty
        3D x 3D   a [E, M, K], b [E, K, N], no offs; [E, M, N]

    a is row-major, b column-major: the transpose of copies [E, N, K] or [N, P]. In 2D x 2D the operands are columnwise copies
    as `group_columns` and the casts of columns write them: `offs` still counts rows without padding, P is
    `layouts.padded_width`. Rows from offs[-1] on are never read. bias is [E, N] or None. Granularities are members of
    `Granularity` or their values; scales are compact (NOTE [scales of grouped operands] in lowering/grouped/layouts.py).
    Products accumulate in float32 (`fast_accum` allows the tensor cores their shorter accumulator; blocks have none) and
    are rounded once. The CPU emulates; a GPU needs compute capability 8.9 and Triton. Raises ValueError for operands that
    do not fit and for pairs that FP8 tensor cores do not multiply, NotImplementedError on a GPU that cannot.
    """
    kinds = Granularity(granularity_a), Granularity(granularity_b)
    given = GroupedGemm(a, b, scale_inv_a, scale_inv_b, offs, bias)
    has_rows, num_groups = given.has_rows, given.num_groups
    out = a.new_zeros(given.shape, dtype=out_dtype)
    ends = [] if offs is None else offs.tolist()
    start = padded_start = 0
    for g in range(num_groups):
        scales = _of(scale_inv_a, g), _of(scale_inv_b, g)
        if offs is None:
            out[g] = _product(Product(a[g], b[g], *scales, _of(bias, g), out_dtype=out_dtype), kinds)
            continue
        end = ends[g]
        if has_rows:
            scale_a = scales[0] if kinds[0] is Granularity.TENSOR_WISE else scale_inv_a[start:end]
            product = Product(a[start:end], b[g], scale_a, scales[1], _of(bias, g), out_dtype=out_dtype)
            out[start:end] = _product(product, kinds)
        else:
            stop = padded_start + padded_inner(end - start, kinds[0])
            of_a, of_b = (
                _columns_of_scale(scale, kind, g, padded_start, stop)
                for scale, kind in zip((scale_inv_a, scale_inv_b), kinds, strict=True)
            )
            operands = a[:, padded_start:stop], b[padded_start:stop], of_a, of_b, _of(bias, g)
            out[g] = _product(Product(*operands, out_dtype=out_dtype), kinds)
            padded_start += round_up(end - start, alignment(kinds[0]))
        start = end
    return out


def _of(x: Any, g: int) -> Any:
    """What belongs to group g of something that each group has, or that all share."""
    return x if x is None or x.dim() == 0 else x[g]


def _columns_of_scale(scale: torch.Tensor, kind: Granularity, g: int, start: int, stop: int) -> torch.Tensor:
    if kind.block is None:
        return _of(scale, g)
    width = kind.block[1]
    return scale[:, start // width : (stop + width - 1) // width]


def _product(product: Product, kinds: tuple[Granularity, Granularity]) -> torch.Tensor:
    """The reference GEMM of one group: a [M, K], b [K, N], compact scales."""
    if kinds == (Granularity.TENSOR_WISE, Granularity.TENSOR_WISE):
        return products.of_tensors(product)
    return products.of_lines(product) if kinds[0].block is None else products.of_blocks(product, kinds)


def valid_rows(offs: torch.Tensor, num_rows: int, index: torch.Tensor | None = None) -> torch.Tensor:
    """Which of the rows of a matrix [num_rows, C] belong to a group, or with `index` [S] are read by one: bool [num_rows].

    Row r of the groups is row index[r] of the matrix, counted from its end where negative. What is False may be uninitialized
    memory: it must reach no amax.
    """
    count = num_rows if index is None else index.shape[0]
    is_valid = torch.arange(count, device=offs.device) < offs[-1]
    if index is None:
        return is_valid
    rows = torch.where(is_valid, _from_start(index, num_rows), num_rows)
    return torch.zeros(num_rows + 1, dtype=torch.bool, device=offs.device).index_fill_(0, rows, True)[:num_rows].clone()


def _from_start(index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Rows as int64, those counted from the end (negative) made positive."""
    index = index.to(torch.int64)
    return torch.where(index < 0, index + num_rows, index)


def padded_rows(
    x: torch.Tensor, offs: torch.Tensor, index: torch.Tensor | None, align: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of the P tokens of a columnwise copy the row of x that it holds, -1 for padding, and the group; both [P], int64.

    With `index` [S] the rows of the groups are x[index]. See NOTE [padded offsets]. Reads nothing on the host.
    """
    num_groups, num_rows = offs.shape[0], x.shape[0] if index is None else index.shape[0]
    ends, ends_with_padding = offs.to(torch.int64), padded_ends(offs, align).to(torch.int64)
    position = torch.arange(padded_width(num_rows, num_groups, align), device=offs.device)
    group = torch.searchsorted(ends_with_padding, position, right=True)
    g = group.clamp(max=num_groups - 1)
    row = position - _starts(ends_with_padding)[g] + _starts(ends)[g]
    is_padding = (group == num_groups) | (row >= ends[g])
    if index is not None and num_rows:
        row = _from_start(index[row.clamp(0, num_rows - 1)], x.shape[0])
    return torch.where(is_padding, -1, row), group


def padded_ends(offs: torch.Tensor, align: int) -> torch.Tensor:
    """Where the groups of a columnwise copy end: [E], int32. See NOTE [padded offsets]."""
    sizes = offs - _starts(offs)
    return ((sizes + align - 1) // align * align).cumsum(0).to(torch.int32)


def _starts(ends: torch.Tensor) -> torch.Tensor:
    return pad(ends[:-1], (1, 0))


def _rows_at_padded_offsets(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The matrix [P, C] of x's rows, zeros where `rows` is -1."""
    if x.shape[0] == 0:
        return x.new_zeros((rows.shape[0], x.shape[1]))
    return torch.where((rows >= 0)[:, None], x[rows.clamp(min=0)], torch.zeros((), dtype=x.dtype, device=x.device))


def group_columns(q: torch.Tensor, offs: torch.Tensor, index: torch.Tensor | None = None, *, align: int = 16) -> torch.Tensor:
    """The columnwise copy [C, P] of the rows of q in groups at padded offsets: the bytes of q, moved.

    q is FP8 [S, C], or with `index` [S] (int32 or int64) a matrix [T, C] whose rows q[index] are in groups: gather and
    transposition are one. Zeros between groups; rows that belong to no group are not read. For scales that do not depend on
    the row, so that both copies of a matrix hold the same values. P: `layouts.padded_width`.
    """
    rows, _ = padded_rows(q, offs, index, align)
    moved = _rows_at_padded_offsets(q.view(torch.uint8), rows)
    return dense(moved.t()).view(q.dtype)


def cast_columns(
    x: torch.Tensor,
    dtype: torch.dtype,
    offs: torch.Tensor,
    index: torch.Tensor | None = None,
    *,
    granularity: str,
    pad_outer: bool = False,
    power_of_2: bool = True,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The columnwise copy [C, P] of the rows of x in groups at padded offsets, with scales along the tokens of each group.

    x is [S, C], or [T, C] with `index` [S], of float32, bfloat16 or float16; rows that no group reads may hold anything.
    Returns q and its scales, compact (NOTE [scales of grouped operands] in layouts.py). `pad_outer` pads C of both to a
    multiple of 16, q with zeros. Each group holds what the cast of its rows makes of them:

        row_wise       scale_inv [E, C, 1], float32: of amax 0 for an empty group, 1 for lines of padding
        block_1x128    scale_inv [C, P / 128], float32, strides (1, C): what a GEMM reads at once is together. The last block of
                       a group counts its rows only; a block of padding has 1, a line of padding 0
        block_1x32     E8M0 codes [C, P / 32], uint8, whatever `power_of_2` and `epsilon`; 0 for padding
    """
    kind = Granularity(granularity)
    rows, group = padded_rows(x, offs, index, alignment(kind))
    moved = _rows_at_padded_offsets(x, rows)
    if kind is Granularity.BLOCK_1X32:
        q, codes = blocks.quantize_mx_blocks(moved.t(), dtype, False)
        return _padded_columns(q, pad_outer), _padded_lines(codes, pad_outer)
    if kind is Granularity.BLOCK_1X128:
        q, scale_inv = blocks.quantize_blocks(moved.t(), dtype, kind, power_of_2, epsilon)
        return _padded_columns(q, pad_outer), dense(pad(scale_inv.t(), (0, _extra(scale_inv.shape[0], pad_outer)))).t()
    magnitudes = moved.abs().to(torch.float32)
    amaxes = torch.stack([torch.where((group == g)[:, None], magnitudes, 0.0).amax(0) for g in range(offs.shape[0])])
    scale, scale_inv = scales_from_amax(amaxes, dtype, power_of_2=power_of_2, epsilon=epsilon)
    q = quantize(moved, scale[group.clamp(max=offs.shape[0] - 1)], dtype)
    return _padded_columns(q.t(), pad_outer), pad(scale_inv, (0, _extra(q.shape[1], pad_outer)), value=1.0)[:, :, None]


def _extra(outer: int, pad_outer: bool) -> int:
    return pad_to_alignment(outer) - outer if pad_outer else 0


def _padded_columns(q: torch.Tensor, pad_outer: bool) -> torch.Tensor:
    """FP8 q [C, P] row-major, C padded with zeros."""
    return _padded_lines(q.view(torch.uint8), pad_outer).view(q.dtype)


def _padded_lines(x: torch.Tensor, pad_outer: bool) -> torch.Tensor:
    return dense(pad(x, (0, 0, 0, _extra(x.shape[0], pad_outer))))
