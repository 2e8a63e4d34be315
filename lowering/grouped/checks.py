"""Checks of the arguments of the grouped operations. Every error is a ValueError that names the value and the fix."""

from __future__ import annotations

import torch

from lowering.blocks import scale_shape
from lowering.checks import check_blocks
from lowering.formats import FP8_MAX, Granularity, fp8_max
from lowering.grouped.layouts import alignment, padded_width
from lowering.hardware import Gemm, refusal

_INDEX_DTYPES = (torch.int32, torch.int64)
#: Of columnwise copies that are quantized from rows in groups.
_ALONG_TOKENS = (Granularity.ROW_WISE, Granularity.BLOCK_1X128, Granularity.BLOCK_1X32)


def check_offs(offs: torch.Tensor) -> None:
    """`offs` is a vector of cumulative ends."""
    if offs.dtype != torch.int32 or offs.dim() != 1 or offs.shape[0] == 0:
        raise ValueError(f"offs is {offs.dtype} {tuple(offs.shape)}; pass int32 [E], the cumulative ends of the groups")


def check_index(index: torch.Tensor | None) -> None:
    """`index` is a vector of rows."""
    if index is not None and (index.dtype not in _INDEX_DTYPES or index.dim() != 1):
        raise ValueError(f"index is {index.dtype} {tuple(index.shape)}; pass int32 or int64 [S], a row for each row in groups")


def check_columns(q: torch.Tensor, offs: torch.Tensor, index: torch.Tensor | None, align: int) -> None:
    """`q` is an FP8 matrix with rows in groups."""
    fp8_max(q.dtype)
    if q.dim() != 2:
        raise ValueError(f"q has shape {tuple(q.shape)}; pass a matrix [S, C]")
    if align < 1 or align & (align - 1):
        raise ValueError(f"align is {align}; use a power of two: 16, or what layouts.alignment says")
    check_offs(offs)
    check_index(index)


def check_cast_columns(
    x: torch.Tensor, offs: torch.Tensor, dtype: torch.dtype, index: torch.Tensor | None, granularity: str
) -> None:
    """`x` is a matrix that can be quantized, with rows in groups, along the tokens of one group."""
    if granularity not in _ALONG_TOKENS:
        raise ValueError(
            f"granularity is {str(granularity)!r}; use one of {', '.join(repr(g.value) for g in _ALONG_TOKENS)}. With one scale"
            " per tensor group_columns moves the rowwise copy, and 128x128 blocks would hold rows of two groups"
        )
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
        if granularity not in list(Granularity):
            raise ValueError(
                f"granularity_{name} is {granularity!r}; use one of {', '.join(repr(g.value) for g in Granularity)}"
            )
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
            f"a and b have {a.shape[1]} tokens, not a multiple of {align}; pass columnwise copies of group_columns or of a cast"
            f" of columns, {padded_width(0, num_groups, align)} wide at least"
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
