"""Grouped GEMMs and their casts: against float64 products per expert, and bit for bit against the ungrouped operations."""

import itertools

import torch

import lowering
from lowering.formats import E4M3, E5M2, Granularity, round_up
from lowering.grouped import reference as layouts
from tests.support.cases import each
from tests.support.copies import one_copy
from tests.support.fp8 import rows_of_range, same_bits
from tests.support.moe import offsets
from tests.tolerances import SCALED_MM, relative_error

ops = torch.ops.lowering
TENSOR, ROW, MX, ONE, TWO = Granularity
SIZES = [0, 1, 7, 15, 16, 17, 127, 128, 129]
ROUTINGS = [SIZES, [0, 0, 300, 0], [440], [5, 0, 0]]
TAIL = 9


def groups(sizes):
    """Rows of each group."""
    ends = offsets(sizes).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def with_tail(x, rows=TAIL):
    """Rows that belong to no group, as uninitialized memory holds them."""
    return torch.cat([x, x.new_full((rows, x.shape[1]), torch.nan)])


def cast_rows(x, kind, dtype):
    """The rowwise copy of a matrix, rows in groups or not, and its compact scales."""
    if kind is TENSOR:
        scale = torch.tensor(4.0)
        return ops.cast([x], [scale], dtype)[0], scale.reciprocal()
    return tuple(t[0] for t in cast_stack(x[None], kind, dtype))


def cast_stack(x, kind, dtype, columnwise=False):
    """Copies of a stack, and their compact scales."""
    side = one_copy(columnwise=columnwise)
    if kind is TENSOR:
        scale = 2.0 ** torch.arange(x.shape[0]).float()
        return ops.cast([x], [scale], dtype, **side)[0], scale.reciprocal()
    how = {} if kind is MX else {"power_of_2": False}
    return ops.cast_with_scales([x], dtype, **side, **how, granularity=kind.value)


def cast_columns(x, offs, kind, dtype, index=None):
    """The columnwise copy of rows in groups."""
    if kind is TENSOR:
        q, scale_inv = cast_rows(x, kind, dtype)
        return ops.transposed_copy(q[:, : x.shape[1]], offs, index), scale_inv
    return ops.cast_columns(x, dtype, offs, index, granularity=kind.value, power_of_2=False)


def dequantized(q, scale_inv, kind):
    """float64 values of one copy [outer, inner], by the meaning of its scales: an oracle that shares no code."""
    outer, inner = q.shape
    if kind is MX:
        scale_inv = torch.exp2(scale_inv.double() - 127)
    height, width = kind.block or (1, inner)
    if kind is TENSOR:
        return q.double() * scale_inv.double()
    rows, cols = torch.arange(outer) // height, torch.arange(inner) // max(width, 1)
    return q.double() * scale_inv.double()[rows][:, cols]


PAIRS = [(TENSOR, TENSOR), (ROW, ROW), (ROW, TENSOR), (MX, MX), (ONE, TWO), (ONE, ONE)]


def options(pair):
    return {"granularity_a": pair[0].value, "granularity_b": pair[1].value}


@each("sizes", ROUTINGS)
@each("pair", PAIRS)
def test_rows_times_experts(sizes, pair):
    """2D x 3D: float64 products per expert, whatever the rows of no group hold; these are zero in the result."""
    rows, k, n = sum(sizes), 160, 48
    x, w = with_tail(rows_of_range(rows, k)), rows_of_range(len(sizes), n, k, seed=1)
    offs, bias = offsets(sizes), torch.randn(len(sizes), n)
    dtypes = (E5M2, E4M3) if len(sizes) == 1 else (E4M3, E4M3)
    a, scale_a = cast_rows(x, pair[0], dtypes[0])
    b, scale_b = cast_stack(w, pair[1], dtypes[1])
    for out_dtype, with_bias in itertools.product(SCALED_MM, (False, True)):
        given = bias if with_bias else None
        out = lowering.scaled_grouped_mm(a, b.mT, scale_a, scale_b, offs, given, **options(pair), out_dtype=out_dtype)
        assert out.dtype == out_dtype
        assert out[rows:].abs().max() == 0
        for g, part in enumerate(groups(sizes)):
            scale_of_a = scale_a if pair[0] is TENSOR else scale_a[part]
            expected = dequantized(a[part], scale_of_a, pair[0]) @ dequantized(b[g], scale_b[g], pair[1]).t()
            expected += bias[g].double() if with_bias else 0
            assert relative_error(out[part], expected) < SCALED_MM[out_dtype]


@each("sizes", ROUTINGS)
@each("kind", [TENSOR, ROW, MX, ONE])
@each("gathered", [False, True])
def test_grad_weight(sizes, kind, gathered):
    """2D x 2D: x and dy in high precision, quantized per group; float64 products of what each group's cast gives alone."""
    rows, n, k = sum(sizes), 48, 160
    x, dy = with_tail(rows_of_range(rows, k)), with_tail(rows_of_range(rows, n, seed=1))
    offs, index, source = offsets(sizes), None, x
    if gathered:  # the rows in groups are rows of a smaller matrix, more than once
        source = rows_of_range(37, k)
        index = torch.randint(37, (rows + TAIL,), generator=torch.Generator().manual_seed(0))
        x = source[index]
    a, scale_a = cast_columns(dy, offs, kind, E5M2)
    b, scale_b = cast_columns(source, offs, kind, E4M3, index)
    assert a.shape == (n, layouts.padded_width(rows + TAIL, len(sizes), layouts.alignment(kind)))
    out = lowering.scaled_grouped_mm(
        a, b.t(), scale_a, scale_b, offs, granularity_a=kind, granularity_b=kind, out_dtype=torch.float32
    )
    assert out.shape == (len(sizes), n, k)
    for g, part in enumerate(groups(sizes)):
        if not sizes[g]:
            assert out[g].abs().max() == 0
            continue
        quantized = [
            dequantized(*(t[0] for t in cast_stack(m[None, part], kind, dtype, columnwise=True)), kind)
            if kind is not TENSOR
            else dequantized(*cast_rows(m[part], kind, dtype), kind).t()[: m.shape[1]]
            for m, dtype in ((dy, E5M2), (x, E4M3))
        ]
        assert relative_error(out[g], quantized[0] @ quantized[1].t()) < SCALED_MM[torch.float32]


@each("pair", PAIRS)
def test_stacks(pair):
    """3D x 3D, with sizes that casts have to pad."""
    x, w = rows_of_range(3, 70, 150), rows_of_range(3, 40, 150, seed=1)
    a, scale_a = cast_stack(x, pair[0], E4M3)
    b, scale_b = cast_stack(w, pair[1], E4M3)
    out = lowering.scaled_grouped_mm(a, b.mT, scale_a, scale_b, **options(pair))
    for g in range(3):
        expected = dequantized(a[g], scale_a[g], pair[0]) @ dequantized(b[g], scale_b[g], pair[1]).t()
        assert relative_error(out[g], expected) < SCALED_MM[torch.bfloat16]


@each("sizes", ROUTINGS)
@each("kind", [ROW, MX, ONE])
def test_columns_of_a_group_are_those_of_its_cast(sizes, kind):
    """And what is between the groups is zero."""
    x, offs, align = with_tail(rows_of_range(sum(sizes), 40, dtype=torch.bfloat16)), offsets(sizes), layouts.alignment(kind)
    x[::11] *= 1e4
    q, scales = cast_columns(x, offs, kind, E4M3)
    start = 0
    for g, part in enumerate(groups(sizes)):
        alone, scales_alone = (t[0] for t in cast_stack(x[None, part], kind, E4M3, columnwise=True))
        assert same_bits(q[:, start : start + alone.shape[1]], alone)
        first, last = start // align, start // align + scales_alone.shape[1]
        assert same_bits(scales[g] if kind is ROW else scales[:, first:last], scales_alone)
        stop = start + round_up(sizes[g], align)
        assert not q[:, start + sizes[g] : stop].float().any()
        start = stop
    assert not q[:, start:].float().any()


@each("sizes", ROUTINGS)
@each("dtype", [E4M3, E5M2])
def test_both_copies_of_one_read_are_those_of_two_casts(sizes, dtype):
    """Also of rows that no group reads, which hold anything; values, scales, their memory."""
    x, offs = with_tail(rows_of_range(sum(sizes), 200, dtype=torch.bfloat16)), offsets(sizes)
    x[::11] *= 1e4
    for options in ({}, {"power_of_2": False, "epsilon": 1e-3}):
        how = {"granularity": ONE.value, **options}
        both = ops.cast_columns(x, dtype, offs, pad_outer=True, rowwise=True, **how)
        rows = [copy[0] for copy in ops.cast_with_scales([x[None]], dtype, **how)]
        alone = [*rows, *ops.cast_columns(x, dtype, offs, pad_outer=True, **how)]
        for found, expected in zip(both, alone, strict=True):
            assert same_bits(found, expected)
            assert found.stride() == expected.stride()


@each("index_dtype", [torch.int32, torch.int64])
@each("align", [16, 128])
def test_group_columns_moves_bytes(index_dtype, align):
    """Against a loop over rows; the gather is the one that its index makes."""
    source = torch.randint(0, 256, (20, 7), dtype=torch.uint8).view(E5M2)
    index = torch.randint(-20, 20, (60,), dtype=index_dtype)
    sizes = [3, 0, 33, 16]
    moved = ops.transposed_copy(source, offsets(sizes), index, align=align).view(torch.uint8)
    expected = torch.zeros_like(moved)
    start = 0
    for part, size in zip(groups(sizes), sizes, strict=True):
        for i, row in enumerate(index[part].tolist()):
            expected[:, start + i] = source.view(torch.uint8)[row]
        start += round_up(size, align)
    assert torch.equal(moved, expected)
    assert same_bits(ops.transposed_copy(source[index], offsets(sizes), align=align).view(torch.uint8), expected)


@each("kind", [ROW, ONE, MX])
def test_columns_with_outer_padding(kind):
    """Zeros, and scales that change nothing."""
    x, offs, granularity = rows_of_range(40, 24), offsets([10, 0, 30]), kind.value
    q, scales = ops.cast_columns(x, E4M3, offs, granularity=granularity)
    wide, wide_scales = ops.cast_columns(x, E4M3, offs, granularity=granularity, pad_outer=True)
    assert same_bits(wide[:24], q)
    lines = (slice(None), slice(0, 24)) if kind is ROW else slice(0, 24)
    assert same_bits(wide_scales[lines], scales)
    assert wide.shape[0] == 32
    assert not wide[24:].float().any()


def test_valid_rows():
    """Rows of the groups, and rows that some slot of a group reads: also from the end, not those of slots beyond."""
    offs = offsets([2, 0, 3])
    assert ops.valid_rows(offs, 7).tolist() == [True] * 5 + [False] * 2
    index = torch.tensor([0, 3, 3, -1, 1, 2, 5])
    assert ops.valid_rows(offs, 8, index).tolist() == [True, True, False, True, False, False, False, True]


def test_stacks_are_cast_matrix_by_matrix():
    """Every cast of a stack, padding included, against the ungrouped cast of each matrix."""
    x, scales = rows_of_range(3, 20, 40, dtype=torch.bfloat16), torch.tensor([1.0, 8.0, 0.5])
    x[1, 3, 3], x[2] = torch.inf, 0
    for pad, columnwise in itertools.product((False, True), repeat=2):
        side = one_copy(columnwise=columnwise, pad_outer=pad)
        q, amaxes = ops.cast([x], [scales], E5M2, **side, with_amax=True)
        rows = ops.cast_with_scales([x], E4M3, **side, granularity="row_wise")
        for g in range(3):
            assert same_bits(q[g], ops.cast([x[g]], [scales[g]], E5M2, **side)[0])
            assert amaxes[g] == x[g].abs().max()
            alone = ops.cast_with_scales([x[g]], E4M3, **side, granularity="row_wise")
            assert all(same_bits(actual[g], expected) for actual, expected in zip(rows, alone, strict=True))
            for how in ({"granularity": ONE}, {"granularity": TWO}, {"granularity": MX}, {"granularity": MX, "square": True}):
                of_stack, compact = ops.cast_with_scales([x], E4M3, **side, **how)
                alone, ready = ops.cast_with_scales([x[g]], E4M3, **side, **how)
                assert same_bits(of_stack[g], alone)
                if how["granularity"] is MX:
                    assert same_bits(lowering.mxfp8.reference.swizzled(compact[g]), ready)
                else:
                    made = lowering.blockwise.reference.gemm_ready_scales(compact[g], alone.shape[0], how["granularity"])
                    assert same_bits(made, ready)
