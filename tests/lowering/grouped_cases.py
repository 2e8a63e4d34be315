"""Every kernel of grouped GEMMs against the reference, bit for bit: a function per kernel. See `kernel_cases.py`.

Products are of small integers and scales powers of two where they enter the sum, so that every order of additions gives the
same float32.
"""

import itertools
from unittest import mock

import torch

import lowering  # noqa: F401 (the operations)
from lowering.blockwise import reference as blockwise_reference
from lowering.casts import cast_with_scales
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped import reference
from lowering.grouped.reference import GroupedGemm, alignment, padded_width
from lowering.products import Product
from lowering.scaling import scale_shape
from tests.lowering.deep_gemm_stand_in import Library
from tests.lowering.kernel_cases import CASES, FP8, INPUTS, assert_same, awkward, case, check, main, poisoned_memory
from tests.support.moe import offsets

TENSOR, ROW, MX, ONE, TWO = Granularity
ROUTINGS = [[0, 1, 7, 15, 16, 17, 127, 128, 129], [0, 150, 0], [70], [3, 0, 0, 0, 90]]
#: Rows that belong to no group; they hold NaN.
TAIL = 11


def integers(*shape: int, dtype: torch.dtype = E4M3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float().to(dtype)


def scales(kind: Granularity, outer: int, inner: int, groups: int, per_group: bool, seed: int) -> torch.Tensor:
    """Compact scales of a copy: powers of two for blocks, any float otherwise."""
    generator = torch.Generator().manual_seed(seed)
    if kind is TENSOR:
        return torch.rand(groups if per_group else (), generator=generator) + 0.5
    shape = scale_shape(outer, inner, kind)
    shape = (groups, *shape) if per_group else shape
    if kind is ROW:
        return torch.rand(shape, generator=generator) + 0.5
    return torch.exp2(torch.randint(-2, 3, shape, generator=generator).float())


def check_gemm(a, b, scale_a, scale_b, offs, bias, device, **options) -> None:
    from lowering.grouped.gemm_kernels import scaled_grouped_mm

    given = [None if t is None else t.to(device) for t in (a, b, scale_a, scale_b, offs, bias)]
    with poisoned_memory():
        actual = scaled_grouped_mm(GroupedGemm(*given, **options))
    assert_same(actual, reference.scaled_grouped_mm(a, b, scale_a, scale_b, offs, bias, **options))


def options_of(pair: tuple[Granularity, Granularity], **options) -> dict:
    return {"granularity_a": pair[0].value, "granularity_b": pair[1].value, **options}


PAIRS = [(TENSOR, TENSOR), (ROW, ROW), (ROW, TENSOR), (TENSOR, ROW), (ONE, ONE), (ONE, TWO)]


@case
def rows_times_experts(device: str) -> None:
    """2D x 3D; ragged k and n, with and without biases, in all output dtypes and both orders of formats."""
    outputs = itertools.cycle([torch.bfloat16, torch.float32, torch.float16])
    routings = [*itertools.product(ROUTINGS[:1], PAIRS), *zip(ROUTINGS[1:] * 2, PAIRS, strict=True)]
    for i, (sizes, pair) in enumerate(routings):
        k, n = ((160, 48), (128, 130))[i % 4 == 3]
        a = torch.cat([integers(sum(sizes), k, dtype=(E4M3, E5M2)[i % 3 == 0]).float(), torch.full((TAIL, k), torch.nan)])
        b = integers(len(sizes), n, k, dtype=(E4M3, E5M2)[i % 3 == 1], seed=1).mT
        scale_a = scales(pair[0], a.shape[0], k, len(sizes), False, 2)
        if pair[0] is not TENSOR:
            scale_a[sum(sizes) :] = torch.nan
        scale_b = scales(pair[1], n, k, len(sizes), True, 3)
        bias = torch.arange(len(sizes) * n).view(-1, n).to(torch.bfloat16) if i % 4 == 0 else None
        a = a.to((E4M3, E5M2)[i % 3 == 0])
        options = options_of(pair, out_dtype=next(outputs), fast_accum=pair[0].block is None and i % 2 == 0)
        check_gemm(a, b, scale_a, scale_b, offsets(sizes), bias, device, **options)


@case
def dense_blockwise(device: str) -> None:
    """Without groups, by blocks; scales are as casts write them."""
    from lowering.blockwise.kernels import multiply

    sizes = [(3, 5, 7), (130, 70, 200), (64, 128, 256), (4, 3, 0)]
    for i, (outers, pair) in enumerate(itertools.product(sizes, [(ONE, TWO), (TWO, ONE), (ONE, ONE)])):
        copies = [
            cast_with_scales(
                [integers(outer, outers[2], dtype=torch.float32, seed=outer)], fp8, granularity=kind.value, power_of_2=True
            )
            for outer, kind, fp8 in zip(outers, pair, (E5M2, E4M3), strict=False)
        ]
        operands = copies[0][0], copies[1][0].t(), copies[0][1], copies[1][1], *([torch.arange(float(outers[1]))] * (i % 2))
        options = options_of(pair, out_dtype=INPUTS[(i + i // 3) % 3])
        with poisoned_memory():
            found = multiply(Product(*(x.to(device) for x in operands), **options))
        assert_same(found, blockwise_reference.multiply(Product(*operands, **options)))


@case
def wide_tiles(device: str) -> None:
    """256 columns and more, with one sum: rows of experts, and stacks."""
    a, b, bias = integers(211, 48), integers(3, 272, 48, seed=1).mT, integers(3, 272, seed=2).float()
    fast, scale_b = options_of((TENSOR, ROW), fast_accum=True), scales(ROW, 272, 48, 3, True, 1)
    check_gemm(a, b, scales(TENSOR, 211, 48, 3, False, 0), scale_b, offsets([70, 0, 130]).to(device), bias, device, **fast)
    check_gemm(integers(3, 70, 48), b, scales(TENSOR, 70, 48, 3, True, 0), scale_b, None, None, device, **fast)


@case
def grad_weight(device: str) -> None:
    """2D x 2D: groups of columns at padded offsets."""
    for i, (sizes, kind) in enumerate(itertools.product(ROUTINGS[:3], (TENSOR, ROW, ONE))):
        m, n = ((130, 40), (64, 144))[i % 2]
        offs, width = offsets(sizes), padded_width(sum(sizes) + TAIL, len(sizes), alignment(kind))
        copies, factors = [], []
        for outer, dtype, seed in ((m, E5M2, 0), (n, E4M3, 1)):
            rows = integers(sum(sizes) + TAIL, outer, dtype=dtype, seed=seed)
            copies.append(reference.transposed_copy(rows, offs, align=alignment(kind)))
            factors.append(scales(kind, outer, width, len(sizes), kind is ROW, seed))
        options = options_of((kind, kind), out_dtype=(torch.bfloat16, torch.float32)[i % 2])
        check_gemm(copies[0], copies[1].t(), *factors, offs, None, device, **options)


@case
def stacks(device: str) -> None:
    """3D x 3D."""
    for i, pair in enumerate([*PAIRS, (TWO, ONE)]):
        m, n, k = ((150, 130, 160), (48, 33, 256))[i % 2]
        a, b = integers(3, m, k), integers(3, n, k, seed=1).mT
        scale_a, scale_b = scales(pair[0], m, k, 3, True, 2), scales(pair[1], n, k, 3, True, 3)
        bias = torch.arange(3 * n).view(3, n).float() if i % 3 == 0 else None
        check_gemm(
            a, b, scale_a, scale_b, None, bias, device, **options_of(pair, fast_accum=i % 2 == 0 and pair[0].block is None)
        )


@case
def rows_of_no_group(device: str) -> None:
    from lowering.grouped.gemm_kernels import clear_rows_of_no_group

    for sizes, dtype in ((ROUTINGS[1], torch.bfloat16), ([3, 4], torch.float32)):
        out = torch.ones(sum(sizes) + TAIL, 1030, dtype=dtype, device=device)
        expected = out.clone()
        expected[sum(sizes) :] = 0
        assert_same(clear_rows_of_no_group(out, offsets(sizes).to(device)), expected)


@case
def rows_at_padded_offsets(device: str) -> None:
    """There and back, with factors and groups; rows that belong to no group, and padding, are left alone."""
    from lowering.grouped import column_kernels as kernels

    for sizes, k in ((ROUTINGS[0], 160), (ROUTINGS[3], 2064), (ROUTINGS[1], 16)):
        offs, num_rows = offsets(sizes).to(device), sum(sizes) + TAIL
        q, scale_inv = integers(num_rows, k), scales(ONE, num_rows, k, len(sizes), False, 1)
        expected, groups = reference.padded_rows(q, offs.cpu(), None, 128)
        is_row = expected >= 0
        with poisoned_memory():
            rows, padded, factors, indices = kernels.padded_rows(q.to(device), scale_inv.to(device), offs)
            back = kernels.rows_of_groups(padded.float().to(torch.bfloat16), rows, num_rows)
        assert_same(rows, expected.to(torch.int32))
        assert_same(indices, torch.where(is_row, groups, -1).to(torch.int32))
        assert_same(padded.cpu()[is_row], q[expected[is_row]])
        assert padded.cpu()[~is_row].view(torch.uint8).eq(0xFF).all(), "not written"
        at_rows = torch.where(is_row[:, None], scale_inv[expected.clamp(min=0)], 0.0)
        assert_same(factors, at_rows.t().contiguous().t())
        assert_same(back[: sum(sizes)], q[: sum(sizes)].to(torch.bfloat16))
        assert back[sum(sizes) :].isnan().all(), "not written"


@case
def rows_by_deep_gemm(device: str) -> None:
    """A stand-in for the package computes what lies in whole tiles; on a GPU, too."""
    from lowering import deep_gemm as package
    from lowering.grouped import deep_gemm

    for sizes, k, n in ((ROUTINGS[0], 160, 48), (ROUTINGS[3], 256, 272)):
        num_rows, library = sum(sizes) + TAIL, Library()
        a, b = integers(num_rows, k), integers(len(sizes), n, k, seed=1).mT
        factors = scales(ONE, num_rows, k, len(sizes), False, 2), scales(TWO, n, k, len(sizes), True, 3)
        operands = a, b, *factors, offsets(sizes)
        given = GroupedGemm(*(x.to(device) for x in operands), **options_of((ONE, TWO)))
        with mock.patch.object(package, "library", lambda library=library: library), poisoned_memory():
            found = deep_gemm.scaled_grouped_mm(given)
        assert (library.calls, library.copies) == (1, 0), "scales are taken as they are in memory"
        assert_same(found[: sum(sizes)], reference.scaled_grouped_mm(*operands, **options_of((ONE, TWO)))[: sum(sizes)])


@case
def columns_of_groups(device: str) -> None:
    """Bytes moved and values quantized, of rows in groups and of rows gathered; NaN where no group reads."""
    for i, (sizes, fp8, gathered) in enumerate(itertools.product(ROUTINGS[:2], FP8, (False, True))):
        offs, cols, num_slots = offsets(sizes).to(device), (130, 64, 70)[i % 3], sum(sizes) + TAIL
        x = awkward(num_slots, cols, INPUTS[i % 3], device, non_finite=i % 4 < 2)
        index = None
        if gathered:
            generator = torch.Generator().manual_seed(i)
            index = torch.randint(-50, 50, (num_slots,), generator=generator).to(device, (torch.int32, torch.int64)[i % 4 // 2])
            x = x[:50]
        else:
            x[sum(sizes) :] = torch.nan
        x = x.t().contiguous().t() if i % 5 == 0 else x
        check("transposed_copy", x.to(fp8), offs, index, align=(16, 128)[i // 2 % 2])
        scaling = {"pad_outer": i % 2 == 0, "power_of_2": i % 3 == 0, "epsilon": (0.0, 1e-3)[i % 5 == 0]}
        check("cast_columns", x, fp8, offs, index, granularity="block_1x128", **scaling)
        check("cast_columns", x, fp8, offs, index, granularity="row_wise", **scaling)
        if not gathered:  # the rowwise copy is that of all rows, also of those that no group reads
            check("cast_columns", x, fp8, offs, granularity="block_1x128", **scaling, rowwise=True)


if __name__ == "__main__":
    main(CASES)
