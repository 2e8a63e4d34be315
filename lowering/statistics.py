"""Statistics of what quantization does to a tensor: elements lost and clipped, error, headroom. For monitoring.

A vector of statistics is float64 [WIDTH]; counts in it are exact below 2**53. `MERGES` says how those of two parts of a tensor
become those of the whole.

    COUNT        elements
    UNDERFLOW    finite ones that are not zero, and whose FP8 value is
    SATURATED    finite ones whose product with their scale, in float32 as the cast computes it, is beyond what rounds
                 to FP8_MAX: clipping changes them by more than rounding does
    NON_FINITE   NaN and infinities: they are left out of what follows
    SQUARES      sum of x**2
    ERRORS       sum of (x - q * scale_inv)**2
    AMAX         largest magnitude
    CALLS        1
    HEADROOM     5 quantiles over the blocks of FP8_MAX / (amax * scale): below 1, the largest element of a block is clipped
    RATIO        5 quantiles over the blocks of SQUARES / ERRORS, inf where nothing is lost

A block is what shares a scale: the tensor, a matrix of it, a line, a block. A quantile is an element: the one at position
floor(QUANTILES[i] * (n - 1)) of those in order, over the n blocks that hold anything but zeros; inf where there are none.

All sums are those of float64 values, each computed in float64: x is exact there, so is q, and scale_inv is the float32 value
that the GEMM multiplies by.
"""

from __future__ import annotations

import dataclasses

import torch

from lowering.formats import Granularity, fp8_max, largest_rounded
from lowering.grouped.reference import alignment, padded_rows, valid_rows
from lowering.hardware import runs_kernels
from lowering.operation import operation
from lowering.scaling import block_scales, e8m0_from_amax, factors, scales_from_amax, split_blocks

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
COUNT, UNDERFLOW, SATURATED, NON_FINITE, SQUARES, ERRORS, AMAX, CALLS, HEADROOM = range(9)
RATIO = HEADROOM + len(QUANTILES)
WIDTH = RATIO + len(QUANTILES)
#: The reductions that merge vectors, by entry. Inner quantiles are added, and divided by CALLS when they are read: their mean.
_OF_QUANTILES = ("min", *("sum",) * (len(QUANTILES) - 2), "max")
MERGES = (*("sum",) * 6, "max", "sum", *_OF_QUANTILES, *_OF_QUANTILES)
_IDENTITY = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}
#: Elements that are in float64 at once on the CPU: 8 MB of each of some tensors.
_CHUNK = 1 << 20


def empty_statistics(count: int, device: torch.device) -> torch.Tensor:
    """Vectors [count, WIDTH] to which nothing was merged yet."""
    return torch.tensor([_IDENTITY[merge] for merge in MERGES], dtype=torch.float64, device=device).repeat(count, 1)


def merged_statistics(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The statistics of two parts together, [..., WIDTH] each."""
    by = {"sum": first + second, "max": torch.maximum(first, second), "min": torch.minimum(first, second)}
    return torch.stack([by[merge][..., i] for i, merge in enumerate(MERGES)], dim=-1)


def quantization_statistics(
    x: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    of_rows: torch.Tensor | None = None,
    of_columns: torch.Tensor | None = None,
    *,
    granularity: str,
    rowwise: bool = True,
    columnwise: bool = False,
    square: bool = False,
    power_of_2: bool = False,
    epsilon: float = 0.0,
    inverse: str | None = None,
) -> list[torch.Tensor]:
    """The statistics [WIDTH] of FP8 copies of x [R, C], or of a batch [E, R, C], as the casts of this granularity make them: of
    the rowwise copy, then of the columnwise one, those that are asked for. With one scale both have the same; ask for one.
    scale and scale_inv: float32 scalars, or [E] of a batch, for "tensor_wise"; the others compute their own, along rows or,
    `columnwise`, along columns; square: blocks of "block_1x32" are 32x32; inverse: "multiply" or "divide", by what engines call
    the scale (`scaling.quantize_as`). offs [G] int32 and index [S]: the groups of a grouped GEMM; without index its slots are
    the rows. Rows that no group reads count nowhere; columnwise, every group has scales of its own, and a row counts once for
    each slot that reads it. of_rows and of_columns: for "row_wise", the reciprocals of the scales as the casts have made them,
    where they are known. Kernels take scales that are powers of two from them, and read x once; the numbers are the same."""
    how = How(Granularity(granularity), dtype, square, power_of_2, epsilon, inverse)
    given = x, how, scale, scale_inv, offs, index
    return [_of_copy(*given, side) for side, wanted in ((False, rowwise), (True, columnwise)) if wanted]


@dataclasses.dataclass(frozen=True)
class How:
    """The options of `quantization_statistics` that say how elements are quantized."""

    kind: Granularity
    dtype: torch.dtype
    square: bool = False
    power_of_2: bool = False
    epsilon: float = 0.0
    inverse: str | None = None


def _of_copy(
    x: torch.Tensor,
    how: How,
    scale: torch.Tensor | None,
    scale_inv: torch.Tensor | None,
    offs: torch.Tensor | None,
    index: torch.Tensor | None,
    columnwise: bool,
) -> torch.Tensor:
    kind = how.kind
    if kind is Granularity.TENSOR_WISE:
        assert scale is not None
        assert scale_inv is not None
        if offs is not None:
            x, count = _only_valid(x, offs, index)
        else:
            count = _whole(x)
        matrices = list(x) if scale.dim() else [x.flatten(0, 1) if x.dim() == 3 else x]
        pairs = zip(scale.reshape(-1), scale_inv.reshape(-1), strict=True)
        found = [_of_tensor(m, *pair, how.dtype) for m, pair in zip(matrices, pairs, strict=True)]
    elif offs is not None and columnwise:
        align = alignment(kind)
        rows, group = padded_rows(x, offs, index, align)
        moved = torch.where((rows >= 0)[:, None], x[rows.clamp(min=0)], torch.zeros((), dtype=x.dtype, device=x.device)).t()
        count = (rows >= 0).sum() * x.shape[1]
        each = [moved] if kind.block else [torch.where(group == g, moved, moved.new_zeros(())) for g in range(offs.shape[0])]
        found = [_of_lines(lines, how) for lines in each]
    else:
        x, count = (x, _whole(x)) if offs is None else _only_valid(x, offs, index)
        found = [_of_lines(m.t() if columnwise else m, how) for m in (x if x.dim() == 3 else [x])]
    return vector_of_sums(count, found, how.dtype)


@dataclasses.dataclass(frozen=True)
class Sums:
    """Counts of a matrix, and sums of each of its blocks [rows of blocks, columns of blocks]."""

    counts: torch.Tensor  # [3] int64: UNDERFLOW, SATURATED, NON_FINITE.
    squares: torch.Tensor  # float64, as are the others.
    errors: torch.Tensor
    amax: torch.Tensor
    scale: torch.Tensor

    def as_one(self) -> Sums:
        """Lines that share one scale, as one block."""
        amax = self.amax.amax() if self.amax.numel() else self.amax.sum()
        return Sums(self.counts, self.squares.sum(), self.errors.sum(), amax, self.scale.reshape(-1)[:1].sum())


def _whole(x: torch.Tensor) -> torch.Tensor:
    return torch.full((), x.numel(), dtype=torch.int64, device=x.device)


def _only_valid(x: torch.Tensor, offs: torch.Tensor, index: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix with zeros in the rows that no group reads, and the number of elements in the others."""
    valid = valid_rows(offs, x.shape[0], index)
    return torch.where(valid[:, None], x, torch.zeros((), dtype=x.dtype, device=x.device)), valid.sum() * x.shape[1]


def _of_tensor(x: torch.Tensor, scale: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> Sums:
    lines = (x.shape[0], 1)
    return _sums(x, scale.expand(lines), scale_inv.expand(lines), (1, max(x.shape[1], 1)), dtype).as_one()


def _of_lines(x: torch.Tensor, how: How) -> Sums:
    """Sums of a copy [outer, inner], each block with the scale of its own amax."""
    block = how.kind.block or (1, max(x.shape[1], 1))
    if how.square:
        block = (max(block), max(block))
    amax, dtype = split_blocks(x.abs(), block).amax(dim=(1, 3)), how.dtype
    if how.kind is Granularity.BLOCK_1X32:
        codes = e8m0_from_amax(amax.to(torch.float32), dtype)
        return _sums(x, factors(codes), codes.view(torch.float8_e8m0fnu).to(torch.float32), block, dtype)
    if how.kind is Granularity.ROW_WISE:
        pair = scales_from_amax(amax, dtype, power_of_2=how.power_of_2, epsilon=how.epsilon, inverse=how.inverse)
    else:
        pair = block_scales(amax, dtype, how.power_of_2, how.epsilon, how.inverse, x.dtype)
    return _sums(x, *pair, block, dtype, divides=how.inverse == "divide")


def _sums(
    x: torch.Tensor,
    scale: torch.Tensor,
    scale_inv: torch.Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    divides: bool = False,
) -> Sums:
    """Sums of blocks with scales [rows of blocks, columns of blocks]; divides: elements are divided by scale_inv."""
    height, cols = block[0], max(x.shape[1], 1)
    step = max(1, _CHUNK // (height * cols)) if x.device.type == "cpu" else max(1, scale.shape[0])
    parts = []
    for first in range(0, max(1, scale.shape[0]), step):
        rows, lines = slice(first, first + step), slice(first * height, (first + step) * height)
        parts.append(_sums_of(split_blocks(x[lines], block), scale[rows], scale_inv[rows], dtype, divides))
    return Sums(
        torch.stack([part.counts for part in parts]).sum(dim=0),
        *(torch.cat([getattr(p, name) for p in parts]) for name in ("squares", "errors", "amax", "scale")),
    )


def _sums_of(blocks: torch.Tensor, scale: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype, divides: bool) -> Sums:
    limit, values = fp8_max(dtype), blocks.to(torch.float32)
    scaled = values / scale_inv[:, None, :, None] if divides else values * scale[:, None, :, None]
    q = scaled.clamp(-limit, limit).to(dtype).to(torch.float64)
    x = values.to(torch.float64)
    made = q * scale_inv.to(torch.float64)[:, None, :, None]
    is_finite = torch.isfinite(values)
    zero = x.new_zeros(())
    is_right = is_finite & torch.isfinite(made)
    x = torch.where(is_right, x, zero)
    error = torch.where(is_right, x - made, zero)
    counts = [is_finite & (values != 0) & (q == 0), is_finite & (scaled.abs() > largest_rounded(dtype)), ~is_finite]
    return Sums(
        torch.stack([c.sum() for c in counts]),
        x.square().sum(dim=(1, 3)),
        error.square().sum(dim=(1, 3)),
        x.abs().amax(dim=(1, 3)) if blocks.numel() else x.sum(dim=(1, 3)),
        scale.to(torch.float64),
    )


def vector_of_sums(count: torch.Tensor, found: list[Sums], dtype: torch.dtype) -> torch.Tensor:
    """The statistics [WIDTH] of parts together; count: int64, their elements."""
    counts = torch.stack([part.counts for part in found]).sum(dim=0).to(torch.float64)
    squares, errors, amax, scale = (
        torch.cat([getattr(part, name).reshape(-1) for part in found]) for name in ("squares", "errors", "amax", "scale")
    )
    inf = torch.full_like(squares, torch.inf)
    is_zero = amax == 0
    headroom = torch.where(is_zero, torch.nan, fp8_max(dtype) / (amax * scale))
    ratio = torch.where(is_zero, torch.nan, torch.where(errors == 0, inf, squares / errors))
    largest = amax.amax() if amax.numel() else amax.sum()
    sums = torch.stack([squares.sum(), errors.sum(), largest, torch.ones_like(largest)])
    return torch.cat([count.to(torch.float64)[None], counts, sums, _quantiles(headroom), _quantiles(ratio)])


def vector_of_blocks(
    count: torch.Tensor, totals: torch.Tensor, scaled: torch.Tensor, ratio: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The statistics [WIDTH] of totals [n, 6], float64: UNDERFLOW, SATURATED, NON_FINITE, SQUARES, ERRORS and AMAX of parts;
    and of blocks, float32: `scaled`, the amax times the scale, and RATIO, of blocks where that is not 0. What is too small for
    float32's normal numbers, next to an infinity, is times -2**150."""
    scaled = scaled.to(torch.float64)
    scaled = torch.where(scaled < 0, scaled * -(2.0**-150), scaled)
    headroom = torch.where(scaled == 0, torch.nan, fp8_max(dtype) / scaled)
    ratio = torch.where(scaled == 0, torch.nan, ratio)
    each = [count.to(torch.float64)[None], totals[:, :5].sum(dim=0), totals[:, 5].amax()[None], torch.ones_like(totals[0, :1])]
    return torch.cat([*each, _quantiles(headroom), _quantiles(ratio).to(torch.float64)])


def _quantiles(values: torch.Tensor) -> torch.Tensor:
    """Elements of the values that are not NaN; inf where all are."""
    if not values.numel():
        return values.new_full((len(QUANTILES),), torch.inf)
    last = ((~values.isnan()).sum() - 1).clamp(min=0)
    ordered = values.sort().values  # NaN comes last
    positions = torch.tensor(QUANTILES, dtype=torch.float64, device=values.device) * last
    found = ordered[positions.to(torch.int64)]
    return torch.where(found.isnan(), torch.inf, found)


#: Bits of each of the three counts of a part of a matrix, in one number.
PACKED_BITS = {torch.int32: 10, torch.int64: 20}


def statistics_of_parts(
    squares: torch.Tensor,
    errors: torch.Tensor,
    amax: torch.Tensor,
    counts: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    count: int,
    are_blocks: bool,
    offs: torch.Tensor | None = None,
) -> torch.Tensor:
    """The statistics [WIDTH] of a matrix of `count` elements, of those of its parts. squares and errors: float64, sums of each
    part; amax: float32; counts: UNDERFLOW + SATURATED * 2**b + NON_FINITE * 2**2b of less than 2**b elements, with b =
    `PACKED_BITS` of its dtype; of one shape. scale: float32, of each part if `are_blocks`, or a scalar; without the first
    dimension of the parts if blocks are cut along it. offs: the ends of groups of rows, the last dimension of the parts; other
    rows count nowhere."""
    bits = PACKED_BITS[counts.dtype]
    number = torch.full((), count, dtype=torch.int64, device=squares.device)
    if offs is not None:
        valid = torch.arange(squares.shape[-1], device=offs.device) < offs[-1]
        squares, errors, amax, counts = (
            torch.where(valid, part, torch.zeros_like(part)) for part in (squares, errors, amax, counts)
        )
        number = number // squares.shape[-1] * offs[-1]
    masked = [(counts >> (bits * i)) & ((1 << bits) - 1) for i in range(3)]
    if are_blocks and scale.dim() < squares.dim():
        squares, errors, amax = squares.sum(dim=0), errors.sum(dim=0), amax.amax(dim=0)
    found = Sums(torch.stack([c.sum() for c in masked]), squares, errors, amax.to(torch.float64), scale.to(torch.float64))
    return vector_of_sums(number, [found if are_blocks else found.as_one()], dtype)


def product_statistics(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, addend: torch.Tensor | None = None
) -> torch.Tensor:
    """The statistics [WIDTH] of the result of an FP8 GEMM: SQUARES of the one in high precision, ERRORS of the difference. out:
    the result in FP8's place. a, b and offs: the operands in high precision of `a @ b`, or of torch's grouped GEMM; addend:
    what is added to it. The product is that of torch in the operands' dtype, rounded as it rounds. UNDERFLOW and SATURATED are
    0, as nothing is quantized. NON_FINITE counts elements of `out`. This costs a GEMM."""
    if a.dim() == 2 and b.dim() == 2 and offs is None:
        exact = a @ b if addend is None else torch.addmm(addend, a, b)
    elif offs is None:
        exact = torch.bmm(a, b)
    else:
        exact = torch._grouped_mm(a, b, offs)
        if a.dim() == 2 and b.dim() == 3:  # rows that belong to no group may hold anything
            used = (torch.arange(out.shape[0], device=out.device) < offs[-1])[:, None]
            exact, out = torch.where(used, exact, 0), torch.where(used, out, 0)
    exact, made = exact.to(torch.float64), out.to(torch.float64)
    is_finite = torch.isfinite(exact) & torch.isfinite(made)
    zero = exact.new_zeros(())
    squares = torch.where(is_finite, exact, zero).square().sum()
    errors = torch.where(is_finite, exact - made, zero).square().sum()
    ratio = torch.where(errors == 0, torch.inf, squares / errors).expand(len(QUANTILES))
    largest = torch.where(is_finite, made, zero).abs().amax() if made.numel() else squares
    numbers = [_whole(out), zero, zero, (~torch.isfinite(made)).sum(), squares, errors, largest, torch.ones_like(squares)]
    scalars = torch.stack([n.to(torch.float64) for n in numbers])
    return torch.cat([scalars, ratio.new_full((len(QUANTILES),), torch.inf), ratio])


def record_statistics(buffer: torch.Tensor, vectors: list[torch.Tensor], rows: list[int]) -> None:
    """buffer[rows[i]] = `merged_statistics` of itself and vectors[i], in place: [n, WIDTH] and [WIDTH] each, float64."""
    if vectors:
        where = torch.tensor(rows, device=buffer.device)
        # `.data` leaves the version counter alone: autograd holds this buffer for backward, and its content goes nowhere.
        buffer.data[where] = merged_statistics(buffer.data[where], torch.stack(vectors))


def _check(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    scale_inv: torch.Tensor | None,
    granularity: str,
    rowwise: bool,
    columnwise: bool,
) -> None:
    """One scale per tensor is given, others are not; a copy is requested, and one where both are the same."""
    is_one = Granularity(granularity) is Granularity.TENSOR_WISE
    if rowwise + columnwise not in ((1,) if is_one else (1, 2)):
        raise ValueError(f"rowwise={rowwise}, columnwise={columnwise}: request {'one copy' if is_one else 'a copy'}")
    is_given = scale is not None and scale_inv is not None
    if is_one != is_given:
        needs = "takes scale and scale_inv" if not is_given else "computes its own scales; leave scale and scale_inv out"
        raise ValueError(f"granularity {granularity!r} {needs}")
    if x.dim() not in (2, 3):
        raise ValueError(f"x has the shape {tuple(x.shape)}; pass a matrix [R, C] or a batch [E, R, C]")


_quantization = operation(quantization_statistics, checks=[_check])


_quantization.lazy_provider(runs_kernels, "lowering.kernels")


@_quantization.fake
def _(x: torch.Tensor, rowwise: bool, columnwise: bool) -> list[torch.Tensor]:
    return [x.new_empty((WIDTH,), dtype=torch.float64) for _ in range(rowwise + columnwise)]


_parts = operation(statistics_of_parts)


@_parts.fake
def _(squares: torch.Tensor) -> torch.Tensor:
    return squares.new_empty((WIDTH,))


_product = operation(product_statistics)


@_product.fake
def _(out: torch.Tensor) -> torch.Tensor:
    return out.new_empty((WIDTH,), dtype=torch.float64)


_record = operation(record_statistics, mutates=["buffer"])
