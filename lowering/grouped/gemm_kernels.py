"""Grouped GEMMs: one launch, whose programs find their groups on the device.

NOTE [static grid] The host does not know the sizes of the groups, and does not wait for them. Where rows are in groups, a group
takes cdiv(size, BLOCK_M) tiles of rows; what follows the last group is one more group, whose rows become zeros. So many groups
never take more than cdiv(S, BLOCK_M) + E tiles, which is the grid; programs that are left over return. Groups are masked, not
padded in memory: a tile reads rows of the next group only where it does not store.

Scales per block accumulate as in `lowering/blockwise/kernels.py`; all others multiply the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from lowering.formats import BLOCK, Granularity
from lowering.grouped.reference import GroupedGemm, alignment
from lowering.triton import limits
from lowering.triton.ahead import Kernel
from lowering.triton.launch import cdiv, on_device
from lowering.triton.tile import one_per_thread

#: Neighbouring tiles of the output run together in bands of this many tile rows, so that they share operands in L2.
BAND = 8
#: The products that the tensor cores of SM90 may add in their shorter accumulator before the sum moves to float32, where fast
#: accumulation is not allowed: as in blockwise scaling.
PRECISE_STEP = 128

Compute = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor
]
"""a, b, their scales, the ends of groups and the bias -> the product."""

#: Programs that clear rows of no group; where there are none, they return.
CLEARING_PROGRAMS = 256

#: The scales of an operand: per tensor or group, per line, per 1x128 block, per 128x128 block.
TENSOR, LINE, BLOCK_1D, BLOCK_2D = (tl.constexpr(i) for i in range(4))
_KINDS = {Granularity.TENSOR_WISE: 0, Granularity.ROW_WISE: 1, Granularity.BLOCK_1X128: 2, Granularity.BLOCK_128X128: 3}


@triton.jit
def group_sizes(offs, num_groups, BLOCK_E: tl.constexpr):
    """Index, first row and size of every group; padding groups have no rows."""
    g = tl.arange(0, BLOCK_E)
    ends = tl.load(offs + g, mask=g < num_groups, other=0)
    starts = tl.load(offs + g - 1, mask=(g > 0) & (g < num_groups), other=0)
    return g, starts, tl.where(g < num_groups, ends - starts, 0)


@triton.jit
def pick(values, g, group):
    """The element of a vector at one index, 0 where there is none."""
    return tl.sum(tl.where(g == group, values, 0), axis=0)


@triton.jit
def tile_in_group(offs, num_groups, num_rows, tile, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """The group of a tile of rows (`num_groups`: rows that belong to none), its first row, and where the group ends."""
    g, starts, sizes = group_sizes(offs, num_groups, BLOCK_E)
    tiles = tl.cdiv(sizes, BLOCK_M)
    group = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (g < num_groups)).to(tl.int32), axis=0)
    start, size = pick(starts, g, group), pick(sizes, g, group)
    last = tl.load(offs + num_groups - 1)
    start = tl.where(group == num_groups, last, start)
    end = tl.where(group == num_groups, num_rows, start + size)
    first_tile = tl.sum(tl.where(g < group, tiles, 0), axis=0)
    return group, start + (tile - first_tile) * BLOCK_M, end


@triton.jit
def tile_of_band(tile, tiles_m, tiles_n, BAND: tl.constexpr):
    """Row and column of a tile, in bands of BAND rows of tiles."""
    band = tile // (BAND * tiles_n)
    height = min(tiles_m - band * BAND, BAND)
    within = tile % (BAND * tiles_n)
    return band * BAND + within % height, within // height


@triton.jit
def line_factors(scale_inv, lines, first, stride_line, KIND: tl.constexpr):
    """Pointers to the factors of the lines of a tile, which begins at line `first`: one for all, one per line, or those of
    the first blocks along k."""
    if KIND == TENSOR:
        return scale_inv
    elif KIND == BLOCK_2D:  # noqa: RET505 (Triton compiles one branch)
        return scale_inv + (first // 128).to(tl.int64) * stride_line
    else:
        return scale_inv + lines.to(tl.int64) * stride_line


@triton.jit
def product(
    pointers_a, pointers_b, factors_a, factors_b, k, step_a, step_b,
    KIND_A: tl.constexpr, KIND_B: tl.constexpr, EVEN_K: tl.constexpr, IMPRECISE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The float32 sum over k of one tile, factors of blocks included, other factors not. step_*: to the factors of the next
    blocks along k."""
    offsets_k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(tl.cdiv(k, BLOCK_K)):
        if EVEN_K:
            a = tl.load(pointers_a)
            b = tl.load(pointers_b)
        else:
            left = k - block * BLOCK_K
            a = tl.load(pointers_a, mask=offsets_k[None, :] < left, other=0.0)
            b = tl.load(pointers_b, mask=offsets_k[:, None] < left, other=0.0)
        if KIND_A <= LINE:
            total = tl.dot(a, b, total, max_num_imprecise_acc=IMPRECISE)
        else:
            factor_a = tl.load(factors_a)
            factor_b = tl.load(factors_b)
            part = tl.dot(a, b)
            if KIND_B == BLOCK_1D:
                factor_b = one_per_thread(factor_b)  # NOTE [factors of columns] in lowering/blockwise/kernels.py
            if KIND_A == BLOCK_1D and KIND_B == BLOCK_1D:
                total += part * factor_a[:, None] * factor_b[None, :]
            elif KIND_A == BLOCK_1D:
                total += part * (factor_a * factor_b)[:, None]
            else:
                total += part * (factor_a * factor_b)[None, :]
            factors_a += step_a
            factors_b += step_b
        pointers_a += BLOCK_K
        pointers_b += BLOCK_K
    return total


@triton.jit
def finished(total, factors_a, factors_b, bias, columns, KIND_A: tl.constexpr, KIND_B: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The sum times the factors that are not those of blocks, and the bias."""
    if KIND_A == TENSOR and KIND_B == TENSOR:
        total *= tl.load(factors_a) * tl.load(factors_b)
    elif KIND_A <= LINE:
        if KIND_A == LINE:
            total *= tl.load(factors_a)[:, None]
        else:
            total *= tl.load(factors_a)
        if KIND_B == LINE:
            total *= tl.load(factors_b)[None, :]
        else:
            total *= tl.load(factors_b)
    if HAS_BIAS:
        total += tl.load(bias + columns).to(tl.float32)[None, :]
    return total


@Kernel
@triton.jit
def grouped_rows_kernel(
    a, b, scale_inv_a, scale_inv_b, offs, bias, out, num_rows, n, k, num_groups, tiles_m,
    stride_a, stride_b_group, stride_b,
    scale_a_group, scale_a_line, scale_a_block, scale_b_group, scale_b_line, scale_b_block,
    KIND_A: tl.constexpr, KIND_B: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, IMPRECISE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """out [num_rows, n] = a [num_rows, k] @ b [num_groups, k, n] by groups of rows. a has strides (stride_a, 1), each matrix of
    b strides (1, stride_b), out is contiguous. Scales: *_group is the step to the next group, *_line to the next line, *_block
    to the next block along k."""
    tile_m, tile_n = tile_of_band(tl.program_id(0), tiles_m, tl.cdiv(n, BLOCK_N), BAND)
    group, row, end = tile_in_group(offs, num_groups, num_rows, tile_m, BLOCK_M, BLOCK_E)
    if row < end:
        rows = row + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        # Lines beyond the edge read valid memory and are not stored: no mask in the loop.
        lines_a = tl.minimum(rows, end - 1)
        lines_b = columns % n
        offsets_k = tl.arange(0, BLOCK_K)
        is_group = group < num_groups
        g = tl.where(is_group, group, 0).to(tl.int64)
        pointers_a = a + lines_a.to(tl.int64)[:, None] * stride_a + offsets_k[None, :]
        pointers_b = b + g * stride_b_group + offsets_k[:, None] + lines_b.to(tl.int64)[None, :] * stride_b
        factors_a = line_factors(scale_inv_a + g * scale_a_group, lines_a, row, scale_a_line, KIND_A)
        factors_b = line_factors(scale_inv_b + g * scale_b_group, lines_b, tile_n * BLOCK_N, scale_b_line, KIND_B)
        total = product(
            pointers_a, pointers_b, factors_a, factors_b, tl.where(is_group, k, 0), scale_a_block, scale_b_block,
            KIND_A, KIND_B, EVEN_K, IMPRECISE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        total = finished(total, factors_a, factors_b, bias + g * n, lines_b, KIND_A, KIND_B, HAS_BIAS)
        # Rows of no group may have any factors: zeros by selection.
        total = tl.where(is_group, total, 0.0)
        pointers = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
        tl.store(pointers, total.to(out.dtype.element_ty), mask=(rows < end)[:, None] & (columns < n)[None, :])


@Kernel
@triton.jit
def grouped_batch_kernel(
    a, b, scale_inv_a, scale_inv_b, offs, bias, out, m, n, k, num_groups,
    stride_a_group, stride_a, stride_b_group, stride_b,
    scale_a_group, scale_a_line, scale_a_block, scale_b_group, scale_b_line, scale_b_block,
    KIND_A: tl.constexpr, KIND_B: tl.constexpr, HAS_OFFS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    IMPRECISE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """out [num_groups, m, n] = a [m, k] @ b [k, n] by groups of k at padded offsets (HAS_OFFS), or of the batches' matrices."""
    tile_m, tile_n = tile_of_band(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), BAND)
    g = tl.program_id(1).to(tl.int64)
    a += g * stride_a_group
    b += g * stride_b_group
    scale_inv_a += g * scale_a_group
    scale_inv_b += g * scale_b_group
    if HAS_OFFS:
        index, _, sizes = group_sizes(offs, num_groups, BLOCK_E)
        # Multiplied last: so Triton knows what they are multiples of, and loads 16 bytes at once.
        steps = tl.cdiv(sizes, ALIGN)
        start = tl.sum(tl.where(index < g, steps, 0), axis=0) * ALIGN
        k = pick(steps, index, g) * ALIGN
        a += start
        b += start
        if KIND_A == BLOCK_1D:
            scale_inv_a += (start // 128).to(tl.int64) * scale_a_block
            scale_inv_b += (start // 128).to(tl.int64) * scale_b_block
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    lines_a, lines_b = rows % m, columns % n
    offsets_k = tl.arange(0, BLOCK_K)
    pointers_a = a + lines_a.to(tl.int64)[:, None] * stride_a + offsets_k[None, :]
    pointers_b = b + offsets_k[:, None] + lines_b.to(tl.int64)[None, :] * stride_b
    factors_a = line_factors(scale_inv_a, lines_a, tile_m * BLOCK_M, scale_a_line, KIND_A)
    factors_b = line_factors(scale_inv_b, lines_b, tile_n * BLOCK_N, scale_b_line, KIND_B)
    total = product(
        pointers_a, pointers_b, factors_a, factors_b, k, scale_a_block, scale_b_block,
        KIND_A, KIND_B, EVEN_K, IMPRECISE, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    total = finished(total, factors_a, factors_b, bias + g * n, lines_b, KIND_A, KIND_B, HAS_BIAS)
    pointers = out + g * m * n + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@Kernel
@triton.jit
def clear_rows_kernel(offs, out, num_rows, n, num_groups, BLOCK_N: tl.constexpr):
    """out [num_rows, n] = 0 from row offs[-1] on."""
    first = tl.load(offs + num_groups - 1) + tl.program_id(0)
    out += first.to(tl.int64) * n
    step = tl.num_programs(0).to(tl.int64) * n
    for _ in range(first, num_rows, tl.num_programs(0)):
        for start in range(0, n, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            tl.store(out + columns, tl.zeros((BLOCK_N,), dtype=out.dtype.element_ty), mask=columns < n)
        out += step


def clear_rows_of_no_group(out: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Zeros in the contiguous `out` [S, N] from row offs[-1] on, in place; touches no other row."""
    with on_device(out):
        clear_rows_kernel[(CLEARING_PROGRAMS,)](offs, out, *out.shape, offs.shape[0], BLOCK_N=1024, num_warps=4)
    return out


def prepare(given: GroupedGemm) -> Compute:
    """The function that computes `reference.scaled_grouped_mm` of operands which differ from these in their values alone. Any
    sizes; operands whose lines do not begin at multiples of 16 bytes are copied."""
    a, b = _lines(given.a), _lines(given.b.mT).mT
    is_ready = _has_lines(given.a), _has_lines(given.b.mT)
    has_offs, has_bias = given.offs is not None, given.bias is not None
    num_groups, k, n = given.num_groups, a.shape[-1], b.shape[-1]
    has_rows, kinds, shape, out_dtype = given.has_rows, given.granularities, given.shape, given.out_dtype
    rows = a.shape[0] // num_groups if has_rows else a.shape[-2]
    # A wide tile reads 0.75 times as many bytes per product, and by estimate the L2 cache limits these GEMMs. Its registers
    # hold one sum: the tensor cores add over all of k.
    is_wide = given.fast_accum and kinds[0].block is None and n >= 2 * BLOCK
    adds_to_lines = Granularity.ROW_WISE in kinds and has_bias
    tile = limits.tile_of_gemm(rows, limits.of_device(a.device), is_wide, adds_to_lines)
    flags: dict[str, Any] = {
        "KIND_A": _KINDS[kinds[0]],
        "KIND_B": _KINDS[kinds[1]],
        "HAS_BIAS": has_bias,
        "IMPRECISE": None if given.fast_accum else PRECISE_STEP,
        "BLOCK_E": max(16, triton.next_power_of_2(num_groups)),
        "BLOCK_K": BLOCK,
        "BAND": BAND,
        **tile,
    }
    steps = (
        *scale_steps(given.scale_inv_a, kinds[0], a.dim() == 3 or not has_rows),
        *scale_steps(given.scale_inv_b, kinds[1], True),
    )
    stride_b = b.stride(0) if b.dim() == 3 else 0, b.stride(-1)
    grid: tuple[int, ...]
    sizes: tuple[int, ...]
    if has_rows:
        tiles_m = cdiv(a.shape[0], tile["BLOCK_M"]) + num_groups
        grid = (tiles_m * cdiv(n, tile["BLOCK_N"]),)
        sizes = a.shape[0], n, k, num_groups, tiles_m, a.stride(0), *stride_b, *steps
        flags["EVEN_K"] = k % BLOCK == 0
    else:
        align = alignment(kinds[0]) if has_offs else 1
        grid = (cdiv(a.shape[-2], tile["BLOCK_M"]) * cdiv(n, tile["BLOCK_N"]), num_groups)
        sizes = a.shape[-2], n, k, num_groups, a.stride(0) if a.dim() == 3 else 0, a.stride(-2), *stride_b, *steps
        flags |= {"HAS_OFFS": has_offs, "EVEN_K": (align if has_offs else k) % BLOCK == 0, "ALIGN": align}
    is_empty = 0 in shape

    def compute(
        a: torch.Tensor, b: torch.Tensor, scale_inv_a: torch.Tensor, scale_inv_b: torch.Tensor, offs: Any, bias: Any
    ) -> torch.Tensor:
        out = torch.empty(shape, dtype=out_dtype, device=a.device)
        if is_empty:
            return out
        if not is_ready[0]:
            a = _lines(a)
        if not is_ready[1]:
            b = _lines(b.mT).mT
        offs = offs if has_offs else scale_inv_a  # a pointer that is not read, as is that of no bias
        bias = bias.contiguous() if has_bias else offs
        arguments = a, b, scale_inv_a, scale_inv_b, offs, bias, out, *sizes
        with on_device(a):
            if has_rows:
                grouped_rows_kernel[grid](*arguments, **flags)
            else:
                grouped_batch_kernel[grid](*arguments, **flags)
        return out

    return compute


def scaled_grouped_mm(given: GroupedGemm) -> torch.Tensor:
    """The product of these operands."""
    return prepare(given)(given.a, given.b, given.scale_inv_a, given.scale_inv_b, given.offs, given.bias)


def scale_steps(scale: torch.Tensor, kind: Granularity, has_groups: bool) -> tuple[int, int, int]:
    """Elements from the scales of a group to those of the next, from those of a line (or row of blocks) to the next, and from a
    block along k to the next."""
    if kind is Granularity.TENSOR_WISE:
        return (0 if scale.dim() == 0 else scale.stride(0)), 0, 0
    if kind is Granularity.ROW_WISE:  # [E, lines, 1], [lines, 1], or without the last dimension
        is_per_group = has_groups
        return (scale.stride(0) if is_per_group else 0), scale.stride(1 if is_per_group else 0), 0
    return (scale.stride(0) if scale.dim() == 3 else 0), scale.stride(-2), scale.stride(-1)


def _has_lines(q: torch.Tensor) -> bool:
    """True if the lines of a copy [.., outer, inner] begin at multiples of 16 bytes, and are dense."""
    inner = q.shape[-1]
    is_dense = inner <= 1 or q.stride(-1) == 1
    return inner % 16 == 0 and is_dense and q.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in q.stride()[:-1])


def _lines(q: torch.Tensor) -> torch.Tensor:
    """A copy with such lines: q itself where it has them; others would be read byte by byte. Zeros at the end of a line add
    nothing."""
    return (
        q if _has_lines(q) else torch.nn.functional.pad(q.view(torch.uint8), (0, -q.shape[-1] % 16)).contiguous().view(q.dtype)
    )
