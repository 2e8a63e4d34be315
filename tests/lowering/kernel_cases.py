"""Every kernel against the reference, bit for bit, on the device it is given: by the samples of `benchmarks/part0`, and a
function for each case beside.

Run as a script, it prints as JSON what each case raised in Triton's interpreter on the CPU (None if nothing).
`test_kernels.py` runs that script, and these functions on a GPU where there is one.
See NOTE [interpreter's faults] in tests/support/interpreter.py: they are mended, so that everything is compared bit for bit.
"""

import contextlib
import functools
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from benchmarks.part0 import operations
from benchmarks.part0.samples import Sample, samples
from lowering import products
from lowering.blockwise import reference as blockwise_reference
from lowering.casts import cast_with_scales
from lowering.formats import E4M3, E5M2, Granularity
from lowering.grouped import reference
from lowering.grouped.reference import GroupedGemm
from lowering.operation import NAMESPACE
from lowering.products import Product
from lowering.scaling import scale_shape
from tests.support.fp8 import every_bfloat16
from tests.support.moe import offsets

TENSOR, ROW, MX, ONE, TWO = Granularity

FP8 = (E4M3, E5M2)
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
#: 1, other powers of two, odd mantissas, and the largest and the smallest of float32's normal numbers.
EDGE_SCALES = (1.0, 2.0**-9, 2.0**127, 1 + 2.0**-23, 2 - 2.0**-23, 448 / 3, 1e30, 3.4028234663852886e38, 2.0**-126)
CASES: dict[str, Callable[[str], None]] = {}


def case(function: Callable[[str], None]) -> Callable[[str], None]:
    CASES[function.__name__] = function
    return function


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised tensors are full of 0xFF bytes: NaN in every floating dtype, -1 as an integer."""

    def poison(allocate):
        def allocated(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.dtype == torch.int32:
                return tensor.fill_(torch.iinfo(torch.int32).max)  # a partial amax that no other beats
            tensor.untyped_storage().fill_(0xFF)
            return tensor

        return allocated

    with (
        mock.patch.object(torch, "empty_like", poison(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty)),
        mock.patch.object(torch, "empty", poison(torch.empty)),
    ):
        yield


def kernel(name: str) -> Callable:
    """The function that computes the operation of this name on a GPU."""
    return NAMESPACE.operations[name].implementations()[-2]  # the last is the reference


def check_samples(name: str, device: str) -> None:
    operation = NAMESPACE.operations[name]
    for sample in samples(name, torch.device(device)):
        given = Sample("", *operation.picked(sample.arguments, sample.options))
        with poisoned_memory():
            found = operations.called(kernel(name), given)
        expected = operations.called(operation.reference, given)
        if name == "transposed_copy":  # moves bytes, also those of NaN
            found, expected = ([x.view(torch.uint8) for x in results] for results in (found, expected))
        try:
            if sample.sums is None:
                operations.require_same(found, expected, sample.is_unordered)
            else:
                assert max(map(operations.largest_error, found, expected)) <= sample.sums
        except AssertionError as error:
            raise AssertionError(f"{name}: {sample.name}: {error}") from error


#: Operations that Triton's kernels compute; GEMMs have cases of their own.
WITH_KERNELS = [
    name
    for name, operation in NAMESPACE.operations.items()
    if len(operation.implementations()) > 1 and not name.startswith("scaled_")
]
CASES |= {f"samples of {name}": functools.partial(check_samples, name) for name in WITH_KERNELS}


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Same shape, dtype, bits, and strides where they matter; the sign and payload of a NaN are free."""
    operations.require_same([actual.cpu()], [expected.cpu()], False)


def check(name: str, *arguments, **options) -> None:
    """A function of the kernels equals that of the reference in every result."""
    with poisoned_memory():
        got = kernel(name)(*arguments, **options)
    want = NAMESPACE.operations[name].reference(*arguments, **options)
    for actual, expected in zip(got, want, strict=True) if isinstance(want, (tuple, list)) else [(got, want)]:
        assert_same(actual, expected)


def scale_on(device: str, value: float = 3.7) -> torch.Tensor:
    return torch.tensor(value, device=device)


@case
def quantize_edges(device: str) -> None:
    """Every bfloat16 value, and scales at which finite products overflow float32, or are subnormal there."""
    for fp8, scale in itertools.product(FP8, EDGE_SCALES):
        check("quantize", every_bfloat16().to(device), scale_on(device, scale), fp8)


@case
def scales_of_every_exponent(device: str) -> None:
    """Amaxes at powers of two, a step below and above what changes the scale, in blocks along both dimensions."""
    powers = torch.tensor([2.0**e for e in range(-149, 128)], dtype=torch.float64)
    for fp8, most in ((E4M3, 448 / 256), (E5M2, 57344 / 32768)):
        amaxes = torch.cat([powers * f for f in (1, most, most * (1 - 2**-23), most * (1 + 2**-23))]).float()
        amaxes = torch.cat([amaxes, amaxes[: -amaxes.numel() % 128]])
        x = torch.zeros(amaxes.numel(), 128, device=device)
        x[:, 5], x[:, 6] = amaxes, -amaxes / 3
        for values, granularity in itertools.product((x, x.t()), ("block_1x32", "block_1x128")):
            check("cast_with_scales", [values], fp8, granularity=granularity, columnwise=True)


@case
def scales_of_blocks_of_128(device: str) -> None:
    """As those of blocks of 32, for ragged and empty products: ends of the exponents, and what is no scale."""
    from lowering.mxfp8 import kernels, reference

    ends = torch.tensor([2.0**-127, 2.0**127, 2.0**-126, torch.inf, torch.nan, -3.0], device=device)
    sizes = ((130, 300, 1300), (128, 256, 512), (1, 1, 1), (300, 16, 16), (0, 5, 128), (5, 4, 0))
    for (m, n, k), kinds in itertools.product(sizes, itertools.product(("block_1x128", "block_128x128"), repeat=2)):
        scales = []
        for size, kind in zip((m, n), kinds, strict=True):
            scales.append(cast_with_scales([torch.randn(size, k, device=device)], E4M3, granularity=kind)[1])
            scales[-1].view(-1)[: len(ends)] = ends[: scales[-1].numel()]
        options = {f"square_{name}": kind == "block_128x128" for name, kind in zip("ab", kinds, strict=True)}
        with poisoned_memory():
            found = kernels.e8m0_scales(*scales, m, n, k, **options)
        for actual, expected in zip(found, reference.e8m0_scales(*scales, m, n, k, **options), strict=True):
            assert_same(actual, expected)


@case
def epilogues(device: str) -> None:
    """The kernel behind a GEMM, of its sums [m, padded n]."""
    from lowering.triton import epilogue

    for (m, n), out, of_bias in itertools.product(((1, 16), (9, 70), (13, 513), (40, 1040)), INPUTS, (None, *INPUTS)):
        generator = torch.Generator().manual_seed(m * n)
        sums = (torch.randn(m, n + -n % 16, generator=generator) * 300).to(device)
        sums[0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e38])
        a, b = (torch.zeros(size, 16, dtype=E4M3, device=device) for size in (m, n))
        lines = [torch.rand(size, 1, generator=generator).to(device) * 1e-3 for size in (m, n)]
        bias = None if of_bias is None else torch.randn(2 * n, generator=generator).to(device, of_bias)[::2]
        one, ways = scale_on(device, 0.37), ((True, products.scaled_lines), (False, products.finished))
        for of_lines, (scales_lines, expected) in itertools.product((lines, [lines[0], one], [one, lines[1]]), ways):
            product = Product(a, b.t(), *of_lines, bias, out_dtype=out)
            found = epilogue.launch(sums.clone(), n, product, scales_lines)
            assert_same(found, expected(sums[:, :n].clone(), product).contiguous())


# -- GEMMs: products of small integers and scales that are powers of two, so that every order of additions is exact

ROUTINGS = [[0, 1, 7, 15, 16, 17, 127, 128, 129], [3, 0, 0, 0, 90], [0, 150, 0]]
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


def options_of(pair: tuple[Granularity, Granularity], **options) -> dict:
    return {"granularity_a": pair[0].value, "granularity_b": pair[1].value, **options}


@case
def dense_blockwise(device: str) -> None:
    """Without groups, by blocks; scales are as casts write them."""
    from lowering.blockwise.kernels import multiply

    sizes = [(3, 5, 7), (130, 70, 200), (64, 128, 256), (4, 3, 0)]
    for i, (outers, pair) in enumerate(itertools.product(sizes, [(ONE, TWO), (TWO, ONE), (ONE, ONE)])):
        (a, scale_a), (b, scale_b) = (
            cast_with_scales([integers(outer, outers[2], dtype=torch.float32)], fp8, granularity=kind.value, power_of_2=True)
            for outer, kind, fp8 in zip(outers[:2], pair, (E5M2, E4M3), strict=True)
        )
        operands = a, b.t(), scale_a, scale_b, *([torch.arange(float(outers[1]))] * (i % 2))
        options = options_of(pair, out_dtype=INPUTS[(i + i // 3) % 3])
        with poisoned_memory():
            found = multiply(Product(*(x.to(device) for x in operands), **options))
        assert_same(found, blockwise_reference.multiply(Product(*operands, **options)))


PAIRS = [(TENSOR, TENSOR), (ROW, ROW), (ROW, TENSOR), (TENSOR, ROW), (ONE, ONE), (ONE, TWO)]


@case
def grouped_gemms(device: str) -> None:
    """Rows of experts 2D x 3D, with rows of no group that hold NaN; stacks 3D x 3D; columns at padded offsets 2D x 2D. Ragged k
    and n, wide tiles, with and without biases, in all output dtypes and both orders of formats."""
    from lowering.grouped.gemm_kernels import scaled_grouped_mm

    rows = [("rows", sizes, pair) for sizes, pair in zip(ROUTINGS * 4, [pair for pair in PAIRS for _ in range(2)], strict=True)]
    stacks = [("stacks", [70] * 3, pair) for pair in (*PAIRS, (TWO, ONE))]
    columns = [("columns", sizes, (kind, kind)) for sizes, kind in itertools.product(ROUTINGS, (TENSOR, ROW, ONE))]
    for i, (form, sizes, pair) in enumerate([*rows, *stacks, *columns]):
        num_rows, groups, offs = sum(sizes) + TAIL, len(sizes), offsets(sizes)
        fp8 = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))[i % 3]
        m, n, k = num_rows if form == "rows" else 130, (48, 130, 272)[i // 2 % 3], (160, 128, 48)[i % 3]
        if form == "columns":
            align = reference.alignment(pair[0])
            k = reference.padded_width(num_rows, groups, align)
            a, b = (
                reference.transposed_copy(integers(num_rows, outer, dtype=dtype), offs, align=align)
                for outer, dtype in zip((m, n), fp8, strict=True)
            )
        else:
            a = integers(*([groups] * (form == "stacks")), m, k, dtype=fp8[0])
            b = integers(groups, n, k, dtype=fp8[1], seed=1)
        per_group = pair[0] is ROW if form == "columns" else form == "stacks"
        scale_a = scales(pair[0], m, k, groups, per_group, 2)
        scale_b = scales(pair[1], n, k, groups, per_group or form == "rows", 3)
        if form == "rows":
            for given in (a, *([scale_a] * (scale_a.dim() > 0))):
                given[sum(sizes) :] = torch.nan
        bias = torch.arange(groups * n).view(-1, n).to(INPUTS[i // 4 % 3]) if i % 4 in (0, 3) and form != "columns" else None
        options = options_of(pair, out_dtype=INPUTS[(i + i // 3) % 3], fast_accum=i % 2 == 0 and pair[0].block is None)
        operands = a, b.mT, scale_a, scale_b, None if form == "stacks" else offs, bias
        there = [None if x is None else x.to(device) for x in operands]
        with poisoned_memory():
            found = scaled_grouped_mm(GroupedGemm(*there, **options))
        assert_same(found, reference.scaled_grouped_mm(*operands, **options))


@case
def rows_at_padded_offsets(device: str) -> None:
    """There and back, with factors and groups; rows that belong to no group, and padding, are left alone."""
    from lowering.grouped import column_kernels as kernels
    from lowering.grouped.gemm_kernels import clear_rows_of_no_group

    for sizes, k in zip(ROUTINGS, (160, 2064, 16), strict=True):
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
        cleared = clear_rows_of_no_group(torch.ones_like(back), offs).cpu()
        assert torch.equal(cleared != 0, (torch.arange(num_rows) < sum(sizes))[:, None].expand(num_rows, k))


def main() -> None:
    from tests.support.interpreter import exact_interpreter

    results = {}
    with exact_interpreter():
        for name, function in CASES.items():
            try:
                function("cpu")
            except Exception:
                results[name] = traceback.format_exc()
            else:
                results[name] = None
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
