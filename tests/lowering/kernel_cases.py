"""Every kernel against the reference, bit for bit, on the device it is given: by the samples of
`benchmarks/part0`, and a function for each case beside.

`grouped_cases.py`, run as a script, prints as JSON what each case raised in Triton's interpreter on the CPU (None if nothing).
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
from lowering.casts import cast_with_scales
from lowering.formats import E4M3, E5M2
from lowering.operation import NAMESPACE
from lowering.products import Product
from tests.support.fp8 import every_bfloat16

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


def awkward(rows: int, cols: int, dtype: torch.dtype, device: str, non_finite: bool = False) -> torch.Tensor:
    """Values over many binades with both zeros; NaN and both infinities far apart if asked for."""
    generator = torch.Generator().manual_seed(1000 * rows + cols)
    x = torch.randn(rows, cols, generator=generator) * torch.exp(2 * torch.randn(rows, cols, generator=generator))
    x[::5, ::3], x[::7, ::2] = 0.0, -0.0
    if non_finite and x.numel() > 8:
        for place, value in zip((0, x.numel() // 2, x.numel() - 1), (torch.inf, -torch.inf, torch.nan), strict=True):
            x.view(-1)[place] = value
    return x.to(device=device, dtype=dtype)


def scale_on(device: str, value: float = 3.7) -> torch.Tensor:
    return torch.tensor(value, device=device)


@case
def amax_of_views(device: str) -> None:
    for x in (awkward(24, 35, torch.float32, device).view(2, 12, 5, 7), torch.randn(70000, device=device)):
        for view in (x, x.transpose(0, -1), x[..., 1:], x[::2]):
            check("amaxes", [view])
    for value in (-torch.inf, -2.0):
        check("amaxes", [torch.full((3, 40), value, device=device)])


@case
def amax_of_many_tiles(device: str) -> None:
    """More partials than the last program reads at once, with the largest in the first and in the last of them."""
    from lowering.tensorwise.kernels import PARTIALS_PER_STEP, finish_amax

    for place in (0, -1):
        partials = torch.zeros(3 * PARTIALS_PER_STEP + 5, dtype=torch.int32, device=device)
        partials[place] = torch.tensor(7.5, device=device).view(torch.int32)
        with poisoned_memory():
            assert finish_amax(partials).item() == 7.5


@case
def quantize_edges(device: str) -> None:
    """Every bfloat16 value, and scales at which finite products overflow float32, or are subnormal there."""
    for fp8, scale in itertools.product(FP8, EDGE_SCALES):
        check("quantize", every_bfloat16().to(device), scale_on(device, scale), fp8)


def beside_ties(device: str) -> torch.Tensor:
    """The middles of neighbouring FP8 values, each with the float32 values just below and just above it."""
    found = []
    for fp8 in FP8:
        values = torch.arange(0x7C).to(torch.uint8).view(fp8).float()
        middles = ((values[1:] + values[:-1]) / 2)[torch.isfinite(values[1:])]
        found += [middles, torch.nextafter(middles, middles + 1), torch.nextafter(middles, middles - 1)]
    magnitudes = torch.cat(found)
    return torch.cat([magnitudes, -magnitudes]).to(device)


@case
def quantize_beside_ties(device: str) -> None:
    for fp8 in FP8:
        check("quantize", beside_ties(device), scale_on(device, 1.0), fp8)


@case
def quantize_by_ptx(device: str) -> None:
    """Whole kernels with the PTX that is compiled for GPUs, executed by tests/support/ptx_machine.py off one."""
    if device == "cuda":
        return
    import triton.language as tl

    from lowering.triton import tile
    from tests.support.interpreter import inline_asm_elementwise

    with (
        mock.patch.object(tile, "compiles_ptx", return_value=True),
        mock.patch.object(tl, "inline_asm_elementwise", functools.partial(inline_asm_elementwise, executes=True)),
    ):
        quantize_beside_ties(device)
        quantize_edges(device)
        for fp8, sides in itertools.product(FP8, ({}, {"columnwise": True, "with_amax": True})):
            check("cast", [awkward(129, 257, torch.float16, device, True).t()], [scale_on(device)], fp8, **sides)


def every_exponent(device: str) -> torch.Tensor:
    """A row for each power of two of float32, subnormal ones included, and for what lies around 1.75 times it, where the
    scale's exponent changes: 128 columns, of which the last has the largest magnitude."""
    powers = torch.cat([torch.arange(1, 255).int() << 23, 1 << torch.arange(0, 23).int(), torch.tensor([0]).int()])
    around = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF]).int()
    largest = (powers[:, None] | around).view(torch.float32).reshape(-1, 1)
    x = torch.cat([(largest / 3).expand(-1, 127), -largest], 1)
    return torch.cat([x, x[: -len(x) % 128]]).to(device)  # whole tiles


@case
def cast_blockwise_edges(device: str) -> None:
    """Whole tiles with a block of zeros, tiny values and infinity, and copies of them that travel; every exponent."""
    whole = awkward(256, 384, torch.bfloat16, device)
    whole[:, 128:256], whole[:, 7], whole[:128, 300] = 0, 1e-30, torch.inf
    for columnwise, kind in itertools.product((False, True), ("block_1x128", "block_128x128")):
        check("cast_with_scales", [whole], E4M3, compact=True, columnwise=columnwise, granularity=kind, power_of_2=columnwise)
    for fp8, epsilon in itertools.product(FP8, (0.0, 3e-5)):
        options = {"granularity": "block_1x128", "power_of_2": True, "epsilon": epsilon, "columnwise": True}
        check("cast_with_scales", [every_exponent(device)], fp8, **options)
        check("cast_with_scales", [whole], fp8, **options)


@case
def mxfp8_codes(device: str) -> None:
    """Amaxes at powers of two, a step below and above, in blocks along both dimensions; the FP8 values beside ties."""
    powers = torch.tensor([2.0**e for e in range(-149, 128)], dtype=torch.float64)
    for fp8, most in ((E4M3, 448 / 256), (E5M2, 57344 / 32768)):
        amaxes = torch.cat([powers * f for f in (1, most, most * (1 - 2**-23), most * (1 + 2**-23))]).float()
        x = torch.zeros(amaxes.numel(), 32)
        x[:, 5], x[:, 6] = amaxes, -amaxes / 3
        ties = torch.nn.functional.pad(beside_ties("cpu"), (0, -beside_ties("cpu").numel() % 31)).view(-1, 31)
        ties = torch.nn.functional.pad(ties, (1, 0), value=448.0 if fp8 == E4M3 else 57344.0)
        for values in (x, x.t(), ties.nan_to_num(0.0, 0.0, 0.0)):
            check("cast_with_scales", [values.to(device)], fp8, granularity="block_1x32", columnwise=True)


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
def statistics_read_once(device: str) -> None:
    """Where casts gave the factors of lines, no amax is computed."""
    x, options = awkward(100, 140, torch.bfloat16, device), {"granularity": "row_wise", "columnwise": True, "power_of_2": True}
    factors = cast_with_scales([x], E4M3, granularity="row_wise", columnwise=True, pad_rows=True)[1::2]
    with mock.patch("lowering.kernels._amaxes", side_effect=AssertionError("one read more")):
        kernel("quantization_statistics")(x, E4M3, None, None, None, None, *factors, **options)


def products_of_lines(device: str) -> Iterator[tuple[torch.Tensor, Product]]:
    """Sums [m, padded n] of a GEMM, and the product that they are of."""
    for (m, n), out, of_bias in itertools.product(((1, 16), (9, 70), (13, 513), (40, 1040)), INPUTS, (None, *INPUTS)):
        generator = torch.Generator().manual_seed(m * n)
        sums = (torch.randn(m, n + -n % 16, generator=generator) * 300).to(device)
        sums[0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e38])
        a, b = (torch.zeros(size, 16, dtype=E4M3, device=device) for size in (m, n))
        lines = [torch.rand(size, 1, generator=generator).to(device) * 1e-3 for size in (m, n)]
        bias = None if of_bias is None else torch.randn(2 * n, generator=generator).to(device, of_bias)[::2]
        for scales in (lines, [lines[0], scale_on(device, 0.37)], [scale_on(device, 0.37), lines[1]]):
            yield sums, Product(a, b.t(), *scales, bias, out_dtype=out)


@case
def epilogues(device: str) -> None:
    """The kernel behind a GEMM."""
    from lowering.triton import epilogue

    for sums, product in products_of_lines(device):
        n = product.b.shape[1]
        for scales_lines, expected in ((True, products.scaled_lines), (False, products.finished)):
            found = epilogue.launch(sums.clone(), n, product, scales_lines)
            assert_same(found, expected(sums[:, :n].clone(), product).contiguous())


@case
def tile_counts(device: str) -> None:
    """Sizes up to the largest int32, counted in int32: there `tl.cdiv` gives a negative number."""
    from tests.support.small_kernels import count

    largest = 2**31 - 1
    for size in (0, 1, 127, 128, 129, largest - 8191, largest - 8190, largest - 127, largest - 1, largest):
        for block in (16, 128, 8192):
            counted = torch.full((), -1, dtype=torch.int32, device=device)
            count[(1,)](counted, size, BLOCK=block)
            assert counted.item() == -(-size // block), (size, block)


def main(cases: dict[str, Callable[[str], None]]) -> None:
    from tests.support.interpreter import exact_interpreter

    results = {}
    with exact_interpreter():
        for name, function in cases.items():
            try:
                function("cpu")
            except Exception:
                results[name] = traceback.format_exc()
            else:
                results[name] = None
    json.dump(results, sys.stdout)
