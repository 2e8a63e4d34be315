"""Eager semantics of grouped GEMMs and of columnwise copies in groups, in plain torch. This is the specification: schemas
are inferred from these signatures, kernels are held against these results.

A GEMM is a loop over the groups with the reference GEMM of that kind of scaling, so it reads the sizes of the groups: on the
CPU that costs nothing, on a GPU it would wait for the device.
Checks raise a ValueError that names the value and the fix.

NOTE [groups] `offs` [E], int32, holds the cumulative ends of E groups of rows: group g is rows offs[g - 1] to offs[g] of a
matrix of S rows. Rows from offs[-1] on belong to no group and may hold anything: on a GPU they are uninitialized memory.

NOTE [padded offsets] In a columnwise copy tokens are the inner dimension, which the grad_weight GEMM contracts, so every
group starts at a multiple of `alignment`: at the sum of the sizes before it, each rounded up. Between groups there are
zeros. The width of the copy does not depend on the sizes of the groups: S + E * (alignment - 1), rounded up.

NOTE [scales of grouped operands] Scales are compact: in the orientation of their copy, without padding. For a copy
[outer, inner], or a batch of such copies [E, outer, inner]:

    tensor_wise     [] or [E]: one for all, or one for each group
    row_wise        [outer, 1], [E, outer, 1]; the last 1 may be left out. Of a columnwise copy with groups: [E, outer, 1]
    block_1x128     [outer, ceil(inner/128)], [E, outer, ceil(inner/128)], any strides. Casts write them by blocks, strides
                    (.., 1, outer): a tile of the GEMM reads the scales of its lines at once
    block_128x128   [E, ceil(outer/128), ceil(inner/128)]
    block_1x32      uint8 codes [outer, ceil(inner/32)], [E, outer, ceil(inner/32)]
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn.functional import pad

from lowering import hardware, products, scaling
from lowering.checks import check_blocks, check_granularity
from lowering.copies import dense, padded
from lowering.formats import BLOCK, FP8_MAX, GEMM_ALIGNMENT, MX_BLOCK, Granularity, fp8_max, pad_to_alignment, round_up
from lowering.hardware import Gemm, refusal
from lowering.products import Product
from lowering.scaling import quantize, scale_shape, scales_from_amax

_ALIGNMENTS = {
    Granularity.TENSOR_WISE: GEMM_ALIGNMENT,
    Granularity.ROW_WISE: GEMM_ALIGNMENT,
    Granularity.BLOCK_1X32: MX_BLOCK,
    Granularity.BLOCK_1X128: BLOCK,
}


def alignment(granularity: str) -> int:
    """The number at whose multiples the groups of a columnwise copy start, so that no block of scales holds rows of two
    groups."""
    return _ALIGNMENTS[Granularity(granularity)]


def padded_width(num_rows: int, num_groups: int, align: int) -> int:
    """Width of a columnwise copy of `num_rows` rows (an int or a SymInt) in groups; see NOTE [padded offsets]."""
    return round_up(num_rows + num_groups * (align - 1), align)


@dataclasses.dataclass(frozen=True)
class GroupedGemm:
    """The arguments of `reference.scaled_grouped_mm`, by their names."""

    a: torch.Tensor
    b: torch.Tensor
    scale_inv_a: torch.Tensor
    scale_inv_b: torch.Tensor
    offs: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    _: dataclasses.KW_ONLY
    granularity_a: str = "tensor_wise"
    granularity_b: str = "tensor_wise"
    out_dtype: torch.dtype = torch.bfloat16
    fast_accum: bool = False

    @property
    def granularities(self) -> tuple[Granularity, Granularity]:
        return Granularity(self.granularity_a), Granularity(self.granularity_b)

    @property
    def num_groups(self) -> int:
        """As many as there are ends, or matrices in the batches."""
        return self.b.shape[0] if self.offs is None else self.offs.shape[0]

    @property
    def has_rows(self) -> bool:
        """True if rows are in groups (2D x 3D)."""
        return self.a.dim() == 2 and self.b.dim() == 3

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        (*_, m, _), n = self.a.shape, self.b.shape[-1]
        return (m, n) if self.has_rows else (self.num_groups, m, n)

    @property
    def gemm(self) -> hardware.Gemm:
        """The hardware's GEMM; a bias is the kernel's own."""
        return hardware.Gemm(self.a.dtype, self.b.dtype, *self.granularities, self.out_dtype, is_grouped=True)


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
    as `transposed_copy` and the casts of columns write them: `offs` still counts rows without padding, P is
    `layouts.padded_width`. Rows from offs[-1] on are never read. bias is [E, N] or None. Granularities are members of
    `Granularity` or their values; scales are compact (NOTE [scales of grouped operands]).
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
            stop = padded_start + round_up(end - start, MX_BLOCK if kinds[0] == Granularity.BLOCK_1X32 else GEMM_ALIGNMENT)
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
    """The part of group g of something that each group has, or that all share."""
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
    """True for rows of a matrix [num_rows, C] that belong to a group, or with `index` [S] are read by one: bool [num_rows]. Row
    r of the groups is row index[r] of the matrix, counted from its end where negative. What is False may be uninitialized
    memory: it must reach no amax."""
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
    """The ends of the groups of a columnwise copy: [E], int32. See NOTE [padded offsets]."""
    sizes = offs - _starts(offs)
    return ((sizes + align - 1) // align * align).cumsum(0).to(torch.int32)


def _starts(ends: torch.Tensor) -> torch.Tensor:
    return pad(ends[:-1], (1, 0))


def _rows_at_padded_offsets(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The matrix [P, C] of x's rows, zeros where `rows` is -1."""
    if x.shape[0] == 0:
        return x.new_zeros((rows.shape[0], x.shape[1]))
    return torch.where((rows >= 0)[:, None], x[rows.clamp(min=0)], torch.zeros((), dtype=x.dtype, device=x.device))


def transposed_copy(
    q: torch.Tensor, offs: torch.Tensor | None = None, index: torch.Tensor | None = None, *, align: int = 16
) -> torch.Tensor:
    """The columnwise copy made of the rowwise one, FP8 [R, C]: the bytes of q, moved, for scales that do not depend on the row.
    [C, R16]; with `offs` [C, P], its rows in groups at padded offsets, or with `index` [S] (int32 or int64) the rows q[index]:
    gather and transposition are one. Zeros between groups; rows that belong to no group are not read. P: `padded_width`."""
    if offs is None:
        return padded(dense(q.t()), False)
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
    rowwise: bool = False,
) -> list[torch.Tensor]:
    """The columnwise copy [C, P] of the rows of x in groups at padded offsets, with scales along the tokens of each group.

    x is [S, C], or [T, C] with `index` [S], of float32, bfloat16 or float16; rows that no group reads may hold anything.
    Returns q and its scales, compact (NOTE [scales of grouped operands]). `pad_outer` pads C of both to a
    multiple of 16, q with zeros. With `rowwise`, of 1x128 blocks and without an index, the rowwise copy [S, C16] and its
    scales come before them: what `cast_with_scales` makes of a batch of one, of one read. Each group holds what the cast of its
    rows makes of them:

        row_wise       scale_inv [E, C, 1], float32: of amax 0 for an empty group, 1 for lines of padding
        block_1x128    scale_inv [C, P / 128], float32, strides (1, C): what a GEMM reads at once is together. The last block of
                       a group counts its rows only; a block of padding has 1, a line of padding 0
        block_1x32     E8M0 codes [C, P / 32], uint8, whatever `power_of_2` and `epsilon`; 0 for padding
    """
    kind = Granularity(granularity)
    rows, group = padded_rows(x, offs, index, alignment(kind))
    moved = _rows_at_padded_offsets(x, rows)
    if kind is Granularity.BLOCK_1X32:
        q, codes = scaling.quantize_mx_blocks(moved.t(), dtype, False)
        return [_padded_columns(q, pad_outer), _padded_lines(codes, pad_outer)]
    if kind is Granularity.BLOCK_1X128:
        q, scale_inv = scaling.quantize_blocks(moved.t(), dtype, kind, power_of_2, epsilon)
        made = [_padded_columns(q, pad_outer), dense(pad(scale_inv.t(), (0, _extra(scale_inv.shape[0], pad_outer)))).t()]
        if not rowwise:
            return made
        q, scale_inv = scaling.quantize_blocks(x, dtype, kind, power_of_2, epsilon)
        return [padded(q, False), dense(scale_inv.t()).t(), *made]
    magnitudes = moved.abs().to(torch.float32)
    amaxes = torch.stack([torch.where((group == g)[:, None], magnitudes, 0.0).amax(0) for g in range(offs.shape[0])])
    scale, scale_inv = scales_from_amax(amaxes, dtype, power_of_2=power_of_2, epsilon=epsilon)
    q = quantize(moved, scale[group.clamp(max=offs.shape[0] - 1)], dtype)
    return [_padded_columns(q.t(), pad_outer), pad(scale_inv, (0, _extra(q.shape[1], pad_outer)), value=1.0)[:, :, None]]


def _extra(outer: int, pad_outer: bool) -> int:
    return pad_to_alignment(outer) - outer if pad_outer else 0


def _padded_columns(q: torch.Tensor, pad_outer: bool) -> torch.Tensor:
    """FP8 q [C, P] row-major, C padded with zeros."""
    return _padded_lines(q.view(torch.uint8), pad_outer).view(q.dtype)


def _padded_lines(x: torch.Tensor, pad_outer: bool) -> torch.Tensor:
    return dense(pad(x, (0, 0, 0, _extra(x.shape[0], pad_outer))))


_INDEX_DTYPES = (torch.int32, torch.int64)
#: The granularities of columnwise copies that are quantized from rows in groups.
_ALONG_TOKENS = (Granularity.ROW_WISE, Granularity.BLOCK_1X128, Granularity.BLOCK_1X32)


def check_offs(offs: torch.Tensor) -> None:
    """`offs` is a vector of cumulative ends."""
    if offs.dtype != torch.int32 or offs.dim() != 1 or offs.shape[0] == 0:
        raise ValueError(f"offs is {offs.dtype} {tuple(offs.shape)}; pass int32 [E], the cumulative ends of the groups")


def check_index(index: torch.Tensor | None) -> None:
    """`index` is a vector of rows."""
    if index is not None and (index.dtype not in _INDEX_DTYPES or index.dim() != 1):
        raise ValueError(f"index is {index.dtype} {tuple(index.shape)}; pass int32 or int64 [S], a row for each row in groups")


def check_columns(q: torch.Tensor, offs: torch.Tensor | None, index: torch.Tensor | None, align: int) -> None:
    """`q` is an FP8 matrix, its rows in groups if there are any."""
    fp8_max(q.dtype)
    if q.dim() != 2:
        raise ValueError(f"q has shape {tuple(q.shape)}; pass a matrix [S, C]")
    if align < 1 or align & (align - 1):
        raise ValueError(f"align is {align}; use a power of two: 16, or the value of layouts.alignment")
    if offs is not None:
        check_offs(offs)
    elif index is not None:
        raise ValueError("index is given, and offs is None; pass the ends of the groups")
    check_index(index)


def check_cast_columns(
    x: torch.Tensor, offs: torch.Tensor, dtype: torch.dtype, index: torch.Tensor | None, granularity: str, rowwise: bool
) -> None:
    """`x` is a matrix that can be quantized, with rows in groups, along the tokens of one group."""
    if granularity not in _ALONG_TOKENS:
        raise ValueError(
            f"granularity is {str(granularity)!r}; use one of {', '.join(repr(g.value) for g in _ALONG_TOKENS)}. With one scale"
            " per tensor transposed_copy moves the rowwise copy, and 128x128 blocks would hold rows of two groups"
        )
    if rowwise and granularity != Granularity.BLOCK_1X128:
        fix = f"use {Granularity.BLOCK_1X128.value!r}, or a cast of its own for the rowwise copy"
        raise ValueError(f"rowwise is True and granularity {str(granularity)!r}; {fix}")
    if rowwise and index is not None:
        raise ValueError("rowwise is True, and rows are gathered by index; quantize the rowwise copy in a cast of its own")
    check_blocks(x, dtype, "in groups")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; pass a matrix [S, C]")
    check_offs(offs)
    check_index(index)


def check_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    granularity_a: str,
    granularity_b: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> None:
    """The operands, their formats, the groups and the bias make one of the three forms."""
    for name, q, granularity in (("a", a, granularity_a), ("b", b, granularity_b)):
        if q.dtype not in FP8_MAX:
            raise ValueError(f"{name} is {q.dtype}; quantize both operands to FP8")
        check_granularity(f"granularity_{name}", granularity, Granularity)
    gemm = Gemm(a.dtype, b.dtype, Granularity(granularity_a), Granularity(granularity_b), out_dtype, is_grouped=True)
    reason = refusal(gemm, None)
    if reason is not None:
        raise ValueError(f"cannot multiply {a.dtype} by {b.dtype}: {reason}; use a pair of formats and scales that GEMMs take")
    if fast_accum and gemm.has_blocks:
        raise ValueError("fast_accum is True, which scales per block do not have; pass fast_accum=False")
    for name, q, granularity in (("a", a, granularity_a), ("b", b, granularity_b)):
        if granularity == Granularity.BLOCK_128X128 and q.dim() == 2:
            raise ValueError(
                f"granularity_{name} is {granularity!r}, whose blocks would hold rows of two groups; quantize {name} with 1x128"
            )
    num_groups = _check_form(a, b, offs)
    if bias is not None and tuple(bias.shape) != (num_groups, b.shape[-1]):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; pass one of shape ({num_groups}, {b.shape[-1]}), or None")


def _check_form(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> int:
    """One of the three forms; returns the number of groups."""
    form = (a.dim(), b.dim())
    if form not in ((2, 3), (2, 2), (3, 3)) or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)} make no grouped GEMM; pass a [S, K] and b [E, K, N], a [M, P] and"
            " b [P, N], or a [E, M, K] and b [E, K, N]"
        )
    if form == (3, 3):
        if offs is not None or a.shape[0] != b.shape[0]:
            raise ValueError(
                f"a {tuple(a.shape)} and b {tuple(b.shape)} are batches: pass equal numbers of matrices, and offs=None"
            )
        return int(b.shape[0])
    if offs is None:
        raise ValueError(f"a {tuple(a.shape)} has rows in groups, and offs is None; pass their cumulative ends [E]")
    check_offs(offs)
    if form == (2, 3) and offs.shape[0] != b.shape[0]:
        raise ValueError(f"offs has {offs.shape[0]} groups and b {b.shape[0]} matrices; pass one for each")
    return int(offs.shape[0])


def check_scales(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    offs: torch.Tensor | None,
    granularity_a: str,
    granularity_b: str,
) -> None:
    """Scales are compact ones of the operands, and columnwise copies have room for groups at padded offsets."""
    num_groups = b.shape[0] if offs is None else offs.shape[0]
    if b.dim() == 2 and a.shape[1] % alignment(granularity_a):
        align = alignment(granularity_a)
        raise ValueError(
            f"a and b have {a.shape[1]} tokens, not a multiple of {align}; pass columnwise copies of transposed_copy or"
            f" cast_columns, {padded_width(0, num_groups, align)} wide at least"
        )
    for name, scale, q, granularity in (
        ("a", scale_inv_a, a, Granularity(granularity_a)),
        ("b", scale_inv_b, b.mT, Granularity(granularity_b)),
    ):
        shapes = _scale_shapes(q, granularity, num_groups, b.dim() == 2)
        dtype = torch.uint8 if granularity is Granularity.BLOCK_1X32 else torch.float32
        if scale.dtype != dtype or tuple(scale.shape) not in shapes:
            wanted = " or ".join(str(shape) for shape in shapes)
            raise ValueError(
                f"scale_inv_{name} is {scale.dtype} {tuple(scale.shape)}, {granularity.label} scales of this operand are"
                f" {dtype} {wanted}: the compact scales of its cast"
            )


def _scale_shapes(q: torch.Tensor, granularity: Granularity, num_groups: int, has_columns: bool) -> list[tuple[int, ...]]:
    """The shapes that the scales of a copy q may have."""
    if granularity is Granularity.TENSOR_WISE:
        return [(), (num_groups,)]
    shape = scale_shape(q.shape[-2], q.shape[-1], granularity)
    is_per_row = granularity is Granularity.ROW_WISE
    full = (num_groups, *shape) if q.dim() == 3 or (has_columns and is_per_row) else shape
    return [full, full[:-1]] if is_per_row else [full]
