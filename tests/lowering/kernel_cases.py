"""Every kernel against the reference, bit for bit, on the device it is given: a function per kernel.

Run as a script it prints, as JSON, what each case raised in Triton's interpreter on the CPU (None if nothing).
`test_kernels.py` runs that script, and these functions on a GPU where there is one.
See NOTE [interpreter's faults] in tests/support/interpreter.py: they are mended, so that everything is compared bit for bit.
"""

import contextlib
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from lowering import products
from lowering.formats import E4M3, E5M2
from lowering.operation import NAMESPACE
from lowering.products import LineProduct
from lowering.state import reference as state_reference
from lowering.tensorwise import reference
from tests.support.copies import one_copy

FP8 = (E4M3, E5M2)
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(63, 100), (129, 257), (1, 130), (33, 50), (64, 128), (48, 16), (1, 1), (0, 7), (5, 0)]
#: 1, other powers of two, odd mantissas, and the largest and the smallest of float32's normal numbers.
EDGE_SCALES = (1.0, 2.0**-9, 2.0**127, 1 + 2.0**-23, 2 - 2.0**-23, 448 / 3, 1e30, 3.4028234663852886e38, 2.0**-126)
FLAGS = [{"pad_rows": rows, "pad_cols": cols} for rows, cols in itertools.product((False, True), repeat=2)]
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


def called(name: str, *arguments, **options):
    """That function in poisoned memory."""
    with poisoned_memory():
        return kernel(name)(*arguments, **options)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Same shape, dtype, bits, and strides where they matter; the sign and payload of a NaN are free."""
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if expected.numel():
        for size, stride, wanted in zip(expected.shape, actual.stride(), expected.stride(), strict=True):
            assert size == 1 or stride == wanted, (actual.stride(), expected.stride())
    actual, expected = actual.cpu(), expected.cpu()
    if actual.is_floating_point():
        nan = expected.float().isnan()
        assert torch.equal(actual.float().isnan(), nan)
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
        actual, expected = (t.view(integers).masked_fill(nan, 0) for t in (actual, expected))
    assert torch.equal(actual, expected), (actual != expected).nonzero()[:5]


def check(name: str, *arguments, **options) -> None:
    """A function of the kernels equals that of the reference in every result."""
    got, want = called(name, *arguments, **options), NAMESPACE.operations[name].reference(*arguments, **options)
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


def views(x: torch.Tensor) -> list[torch.Tensor]:
    """The matrix with other strides: transposed, cut out of a wider one, every other row and column, broadcast."""
    rows, cols = x.shape
    wide = torch.nn.functional.pad(x, (3, 5, 1, 2), value=torch.nan)[1 : rows + 1, 3 : cols + 3]
    spread = torch.full((2 * rows, 3 * cols), torch.nan, dtype=x.dtype, device=x.device)[::2, ::3].copy_(x)
    return [x.t(), wide, wide.t(), spread, x[:1].expand(4, cols)]


def matrices(device: str) -> list[torch.Tensor]:
    """Every shape, every input dtype, every kind of strides, with and without non-finite elements."""
    found = [awkward(*shape, INPUTS[i % 3], device, i % 2 == 0) for i, shape in enumerate(SHAPES)]
    found += [awkward(63, 100, dtype, device, True) for dtype in INPUTS]
    return found + views(awkward(33, 50, torch.bfloat16, device, True)) + views(awkward(64, 128, torch.float32, device))


def scale_on(device: str, value: float = 3.7) -> torch.Tensor:
    return torch.tensor(value, device=device)


@case
def amax(device: str) -> None:
    for x in matrices(device):
        assert_same(called("amax", x), reference.amax(x))
    for x in (awkward(24, 35, torch.float32, device).view(2, 12, 5, 7), torch.randn(70000, device=device)):
        for view in (x, x.transpose(0, -1), x[..., 1:], x[::2]):
            assert_same(called("amax", view), reference.amax(view))
    assert called("amax", torch.full((3, 40), -torch.inf, device=device)).item() == torch.inf
    assert called("amax", torch.tensor(-2.0, device=device)).item() == 2.0


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
def transposed_copy(device: str) -> None:
    """Every byte, in matrices of every shape and of other strides."""
    for shape, fp8 in itertools.product([*SHAPES, (256, 256), (130, 400)], FP8):
        q = torch.arange(shape[0] * shape[1], device=device).to(torch.uint8).view(shape).view(fp8)
        wide = torch.zeros((shape[0], shape[1] + 7), dtype=torch.uint8, device=device).view(fp8)[:, 3 : shape[1] + 3]
        wide.view(torch.uint8).copy_(q.view(torch.uint8))
        for given in (q, wide, q.t()):
            got, want = called("transposed_copy", given), reference.transposed_copy(given)
            assert got.dtype == fp8
            assert_same(got.view(torch.uint8), want.view(torch.uint8))


@case
def quantize(device: str) -> None:
    for x, fp8 in itertools.product(matrices(device), FP8):
        assert_same(called("quantize", x, scale_on(device), fp8), reference.quantize(x, scale_on(device), fp8))
    x = awkward(24, 35, torch.float32, device).view(2, 12, 5, 7)
    for view in (x, x.transpose(1, 3), x[:, ::2, 1:3], x.permute(3, 0, 2, 1)[1:], x[0, 0, 0, 0]):
        assert_same(called("quantize", view, scale_on(device), E4M3), reference.quantize(view, scale_on(device), E4M3))


@case
def quantize_edges(device: str) -> None:
    """Every bfloat16 value, and scales at which finite products overflow float32, or are subnormal there."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).to(device)
    for fp8, scale in itertools.product(FP8, EDGE_SCALES):
        assert_same(called("quantize", x, scale_on(device, scale), fp8), reference.quantize(x, scale_on(device, scale), fp8))


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
    from tests.support.interpreter import executed_asm_elementwise

    with (
        mock.patch.object(tile, "compiles_ptx", return_value=True),
        mock.patch.object(tl, "inline_asm_elementwise", executed_asm_elementwise),
    ):
        quantize_beside_ties(device)
        quantize_edges(device)
        cast_transpose(device)


@case
def cast(device: str) -> None:
    for i, (x, fp8, columnwise) in enumerate(itertools.product(matrices(device), FP8, (False, True))):
        copy = one_copy(columnwise=columnwise, pad_outer=i % 3 == 0)
        check("cast", [x], [scale_on(device)], fp8, **copy, with_amax=i % 5 % 2 == 1)


@case
def cast_transpose(device: str) -> None:
    for i, (x, fp8) in enumerate(itertools.product(matrices(device), FP8)):
        check("cast", [x], [scale_on(device)], fp8, columnwise=True, with_amax=i % 5 % 2 == 0, **FLAGS[i % 7 % 4])


@case
def partial_amaxes(device: str) -> None:
    """Matrices of several tiles either way, row-major and column-major; in any order."""
    xs = [
        awkward(130, 257, torch.bfloat16, device),
        awkward(65, 129, torch.float32, device, non_finite=True),
        *matrices(device),
    ]
    for i, x in enumerate([*xs[:2], *(x.t() for x in xs[:2]), *xs[2:]]):
        for sides in (one_copy(columnwise=i // 2 % 2 == 0), {"columnwise": True}):
            how = {**sides, "with_amax": True, "in_parts": True}
            *copies, parts = called("cast", [x], [scale_on(device)], FP8[i % 2], **how)
            *expected, wanted = reference.cast([x], [scale_on(device)], FP8[i % 2], **how)
            for got, want in zip((*copies, parts.sort().values), (*expected, wanted.sort().values), strict=True):
                assert_same(got, want)


@case
def multi_cast_transpose_amax(device: str) -> None:
    aligned = [awkward(*shape, torch.bfloat16, device) for shape in ((64, 128), (16, 16), (160, 272), (48, 0))]
    mixed = matrices(device)
    many = [awkward(17, 3 + i % 5, torch.float32, device) for i in range(131)]
    for i, (xs, fp8) in enumerate(itertools.product((aligned, mixed, aligned[:1]), FP8)):
        check_multi(xs, fp8, FLAGS[::3][(i + i // 2) % 2], device)
    check_multi(many, E4M3, FLAGS[0], device)
    check_multi([*aligned, *many[:3], *aligned], E5M2, FLAGS[-1], device)


def check_multi(xs: list[torch.Tensor], fp8: torch.dtype, flags: dict[str, bool], device: str) -> None:
    """With scales anywhere in a vector."""
    vector = 1 + torch.arange(40, device=device).float()
    check("cast", xs, [vector[(7 * i) % 40] for i in range(len(xs))], fp8, **flags, columnwise=True, with_amax=True)


@case
def multi_cast(device: str) -> None:
    """One copy of each, of scales anywhere in a vector."""
    aligned = [awkward(*shape, torch.bfloat16, device) for shape in ((64, 128), (16, 16), (160, 272), (48, 0))]
    infinite = [awkward(*shape, torch.bfloat16, device, non_finite=True) for shape in ((64, 128), (272, 160))]
    vector = 1 + torch.arange(40, device=device).float()
    for i, xs in enumerate((aligned, matrices(device), infinite, aligned[:1])):
        scales = [vector[(7 * j + i) % 40] for j in range(len(xs))]
        for columnwise, with_amax in itertools.product((False, True), repeat=2):
            wanted = {"columnwise": columnwise, "pad_outer": i % 2 == 0}
            fp8 = FP8[(i + columnwise + with_amax) % 2]
            check("cast", xs, scales, fp8, **one_copy(**wanted), with_amax=with_amax)


@case
def multi_scales(device: str) -> None:
    """Amaxes of every kind, among them none; several dtypes, many programs for a tensor."""
    edges = [torch.tensor([v], device=device) for v in (0.0, float("inf"), float("nan"), 1e-38, 3e38, 448.0, 1e-3)]
    long = [torch.linspace(-3, 5, 20011, device=device), torch.zeros(0, 4, device=device)]
    for i, xs in enumerate((edges, [*long, *edges, *matrices(device)], long[:1])):
        for fp8, power_of_2 in itertools.product(FP8, (False, True)):
            check("multi_scales", xs, fp8, margin=i, epsilon=(0.0, 1e-2)[i % 2], power_of_2=power_of_2)


@case
def scales_from_amax(device: str) -> None:
    """Zeros of both signs, subnormal numbers, infinity, NaN of both signs; random numbers, whose quotients round; scalars of
    such a vector, views of it, a matrix, nothing, other dtypes."""
    edges = (
        0.0,
        -0.0,
        1e-45,
        1e-40,
        1e-38,
        1e-3,
        0.3,
        448.0,
        57344.0,
        3e38,
        3.4028234663852886e38,
        torch.inf,
        torch.nan,
        -torch.nan,
    )
    random = torch.exp2(40 * torch.randn(300, device=device))
    vector = torch.cat([torch.tensor(edges, device=device), random[random.isfinite()]])
    matrix = vector[:300].view(20, 15)
    views = [vector, *vector[: len(edges)], vector[1:2], vector[5:], vector[::3], matrix.t(), matrix[:, 2:9], vector[:0]]
    views += [vector[3].expand(4), vector[:200].bfloat16(), vector[:200].double()]
    plain = [
        {"margin": margin, "epsilon": epsilon, "power_of_2": power_of_2}
        for margin, epsilon, power_of_2 in itertools.product((0, 3, -2), (0.0, 1e-2), (False, True))
    ]
    of_engines = [{"epsilon": epsilon, "inverse": inverse} for epsilon in (0.0, 1e-2) for inverse in ("multiply", "divide")]
    for i, amax in enumerate(views):
        for j, options in enumerate([*plain, *of_engines]):
            check("scales_from_amax", amax, FP8[(i + j) % 2], **options)
        check("scale_from_amax", amax, FP8[i % 2], **plain[i % len(plain)])
    largest = torch.tensor([3e38, 1e38], device=device)  # whose scales are subnormal, and 0 as powers of two
    for power_of_2 in (False, True):
        check("scales_from_amax", largest, E4M3, margin=20, power_of_2=power_of_2)


@case
def multi_cast_blockwise(device: str) -> None:
    """Whole tiles, which share a launch, and parts of them, which do not; several input dtypes."""
    whole = [awkward(*shape, torch.bfloat16, device, non_finite=True) for shape in ((128, 256), (256, 128), (128, 128))]
    ragged = [awkward(63, 100, torch.float32, device), whole[1].t(), awkward(0, 7, torch.float16, device)]
    single = [awkward(128, 128, torch.float32, device)]
    for i, (xs, granularity) in enumerate(
        itertools.product((whole, whole + ragged + single, single), ("block_1x128", "block_128x128"))
    ):
        options = {"granularity": granularity, "power_of_2": i % 2 == 0, "epsilon": 0.0 if i < 3 else 1e-3}
        for columnwise in (False, True):
            check("cast_blockwise", xs, FP8[i % 2], **one_copy(columnwise=columnwise, pad_outer=i < 2, **options))
        check("cast_blockwise", xs, FP8[i % 2], **options, **FLAGS[i % 4], columnwise=True)


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
    """Copies that travel; whole tiles with a block of zeros, tiny values and infinity; every exponent."""
    whole = awkward(256, 384, torch.bfloat16, device)
    whole[:, 128:256], whole[:, 7], whole[:128, 300] = 0, 1e-30, torch.inf
    for i, (x, kind) in enumerate(itertools.product((whole, *matrices(device)), ("block_1x128", "block_128x128"))):
        compact = {"compact": True, "columnwise": i // 2 % 2 == 0, "granularity": kind, "power_of_2": i % 3 == 0}
        check("cast_blockwise", [x], FP8[i // 3 % 2], **compact)
    for fp8, epsilon in itertools.product(FP8, (0.0, 3e-5)):
        options = {"granularity": "block_1x128", "power_of_2": True, "epsilon": epsilon, "columnwise": True}
        check("cast_blockwise", [every_exponent(device)], fp8, **options)
        check("cast_blockwise", [whole], fp8, **options)


def mx_matrices(device: str) -> list[torch.Tensor]:
    """Several tiles and parts of one; rows and columns of very different size; blocks with NaN, inf and nothing; strides."""
    found = []
    for shape, dtype in zip(
        [(63, 100), (129, 257), (1, 130), (128, 256), (128, 32), (1, 1), (0, 7), (5, 0)], itertools.cycle(INPUTS)
    ):
        x = awkward(*shape, torch.float32, device, non_finite=True)
        x *= torch.exp2(torch.linspace(-140, 100, shape[0], device=device))[:, None]
        x[:, 40:72] = 0
        found.append(x.to(dtype))
    return found + views(awkward(160, 64, torch.bfloat16, device, True))[:4]


@case
def mxfp8(device: str) -> None:
    for i, (x, square) in enumerate(itertools.product(mx_matrices(device), (False, True))):
        fp8 = FP8[i // 2 % 2]
        turn = (i + i // 2) % 2 == 0  # each matrix has either, with and without squares
        check("cast_mxfp8", [x], fp8, square=square, columnwise=turn, compact=True)
        check("cast_mxfp8", [x], fp8, **one_copy(square=square, columnwise=turn, pad_outer=i % 3 == 0))
        check("cast_mxfp8", [x], fp8, square=square, **FLAGS[i % 4], columnwise=True)


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
            check("cast_mxfp8", [values.to(device)], fp8, columnwise=True)


@case
def update_scales(device: str) -> None:
    lengths = (1, 2, 3, 129, 130, 131, 400)
    for i, (length, n, algo) in enumerate(itertools.product(lengths, (1, 16, 37), ("max", "most_recent"))):
        margin = (0, 3, -2)[(i + i // 6) % 3]
        generator = torch.Generator().manual_seed(length * n)
        storage = torch.exp(8 * torch.randn(length, n + 3, generator=generator)).to(device)
        awkward_values = torch.tensor([torch.inf, torch.nan, 0.0, 1e-44, 3e38], device=device)
        storage[0, : min(n, 5)] = awkward_values[: min(n, 5)]
        limits = torch.tensor([448.0, 57344.0], device=device).repeat(n)[:n]
        for count in (True, False):
            state = [storage.clone(), torch.full((n,), 2.5, device=device)]
            state.append(torch.full((n,), 5, dtype=torch.int32, device=device) if count else None)
            expected = [None if tensor is None else tensor.clone() for tensor in state]
            options = {"algo": algo, "margin": margin}
            called("update_scales", state[0][:, :n], state[1], limits, num_non_finite=state[2], **options)
            update = state_reference.update_scales
            update(expected[0][:, :n], expected[1], limits, num_non_finite=expected[2], **options)
            for actual, want in zip(state, expected, strict=True):
                if actual is not None:
                    assert_same(actual, want)
    called("update_scales", *(torch.empty(shape, device=device) for shape in ((4, 0), (0,), (0,))))


@case
def record_amax(device: str) -> None:
    slots = torch.arange(199, -1, -1, device=device)
    for index in ([0], [3, 4, 5], [7, 2, 9], [5, 5, 6], list(range(20, 170)), list(range(0, 200, 2)), [199]):
        observed = [torch.tensor(float(7 * i % 11), device=device) for i in range(len(index))]
        observed[-1] = torch.tensor(torch.nan, device=device)
        for dtype in (torch.int64, torch.int32):
            staging = torch.full((3, 200), 4.0, device=device)
            expected = staging.clone()
            called("record_amax", staging[0], slots.to(dtype), observed, index)
            state_reference.record_amax(expected[0], slots, observed, index)
            assert_same(staging, expected)
    untouched = torch.ones(4, device=device)
    called("record_amax", untouched, slots, [], [])
    assert untouched.tolist() == [1.0] * 4


@case
def load_scales(device: str) -> None:
    scale = torch.exp(20 * torch.randn(300, generator=torch.Generator().manual_seed(0))).to(device)
    slots = torch.arange(299, -1, -1, device=device)
    for count in (0, 1, 5, 128, 300):
        check("load_scales", scale, slots, count)


@case
def rowwise_casts(device: str) -> None:
    """Each way to cast; non-finite elements, zeros and views come with `matrices`."""
    for i, (x, fp8) in enumerate(itertools.product(matrices(device), FP8)):
        scaling = {"power_of_2": i % 2 == 0, "epsilon": (0.0, 1e-3)[i % 3 == 0]}
        check("cast_rowwise", [x], fp8, **one_copy(columnwise=i % 5 < 2, pad_outer=i % 7 < 3, **scaling))
        check("cast_rowwise", [x], fp8, **FLAGS[i % 7 % 4], **scaling, columnwise=True)


@case
def rowwise_passes(device: str) -> None:
    """Amaxes alone, then casts by amaxes, of one matrix and of many: aligned, ragged, of mixed dtypes, empty."""
    aligned = [awkward(*shape, torch.bfloat16, device) for shape in ((64, 128), (16, 16), (160, 272), (48, 0))]
    many = [awkward(17, 3 + i % 5, torch.float32, device) for i in range(131)]
    sides = ((True, True), (True, False), (False, True))
    for i, xs in enumerate((aligned, matrices(device), aligned[:1], aligned[3:], many)):
        for rowwise, columnwise in sides if i < 2 else sides[4 - i : 5 - i]:
            wanted = {"rowwise": rowwise, "columnwise": columnwise}
            check("amax_rowwise", xs, **wanted)
            amaxes = NAMESPACE.operations["amax_rowwise"].reference(xs, **wanted)
            check("cast_lines_rowwise", xs, amaxes, FP8[i % 2], **wanted, **FLAGS[i % 4], power_of_2=rowwise)
        check("cast_rowwise", xs, FP8[i % 2], **FLAGS[i % 4], columnwise=True)
        check("cast_rowwise", xs, FP8[i % 2], **one_copy(columnwise=i % 2 == 0, pad_outer=i > 2, epsilon=1e-3))


def check_statistics(*arguments, **options) -> None:
    """Counts are equal, sums to what the order of additions and float32 quantiles leave."""
    found = called("quantization_statistics", *arguments, **options)
    wanted = NAMESPACE.operations["quantization_statistics"].reference(*arguments, **options)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours[:4], theirs[:4]), (options, ours, theirs)
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=0), (options, ours, theirs)


def _lost(rows: int, cols: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Matrices with everything that is counted, in either format."""
    x = awkward(rows, cols, dtype, device, True) * torch.logspace(-6, 2, cols, dtype=torch.float32, device=device).to(dtype)
    x.view(-1)[3:8] = torch.tensor([1e-30, -1e-30, -1e-9, 1e-42, 3e38], device=device).to(dtype)
    return x


@case
def statistics(device: str) -> None:
    """Matrices, strided ones and stacks; one scale, those of engines, of lines and of blocks; each copy and both."""
    x, thin = _lost(100, 140, torch.bfloat16, device), _lost(33, 70, torch.float32, device).t()
    stack = torch.stack([_lost(40, 70, torch.float16, device), 3 * _lost(40, 70, torch.float16, device)])
    three = torch.tensor([1.0, 7.0, 0.01], device=device)
    for given, scale in ((x, three[1]), (stack, three[:2]), (stack, three[2])):
        check_statistics(given, E5M2, scale, 1 / scale, granularity="tensor_wise")
    squares = ("block_1x32", {"square": True})
    kinds = [("row_wise", {}), ("block_1x128", {"epsilon": 1e-3}), ("block_128x128", {}), ("block_1x32", {}), squares]
    for i, (kind, options) in enumerate(kinds):
        both = {"granularity": kind, "columnwise": True, "power_of_2": True, **options}
        if i % 2 == 0:
            check_statistics(x, E4M3, **both)
        check_statistics(stack, E5M2, **both | {"power_of_2": i % 2 == 0, "rowwise": False})
        check_statistics(thin, E4M3, **both | {"columnwise": False, "power_of_2": i % 2 == 1})
    check_statistics(thin, E4M3, granularity="row_wise", inverse="divide")
    factors = NAMESPACE.operations["cast_rowwise"].reference([x], E4M3, columnwise=True, pad_rows=True, power_of_2=True)[1::2]
    with mock.patch("lowering.kernels._amaxes", side_effect=AssertionError("one read more")):
        check_statistics(x, E4M3, None, None, None, None, *factors, granularity="row_wise", columnwise=True, power_of_2=True)


@case
def statistics_of_groups(device: str) -> None:
    """Rows in place, gathered, and read by several groups; an empty group, rows of none."""
    x, ends = _lost(150, 40, torch.bfloat16, device), torch.tensor([30, 30, 135], dtype=torch.int32, device=device)
    index = torch.randint(0, 150, (140,), generator=torch.Generator().manual_seed(0)).to(device)
    scale = torch.tensor(7.0, device=device)
    for given in (None, index):
        check_statistics(x, E4M3, scale, 1 / scale, ends, given, granularity="tensor_wise")
        for kind in ("row_wise", "block_1x32" if given is None else "block_1x128"):
            check_statistics(x, E4M3, None, None, ends, given, granularity=kind, columnwise=True, power_of_2=True)
    columns = NAMESPACE.operations["cast_columns"].reference(x, E4M3, ends, granularity="row_wise", pad_outer=True)[1]
    columnwise = {"granularity": "row_wise", "rowwise": False, "columnwise": True, "power_of_2": True}
    check_statistics(x, E4M3, None, None, ends, None, None, columns, **columnwise)


@case
def checksums(device: str) -> None:
    x = awkward(129, 257, torch.bfloat16, device).view(-1)
    check("checksums", [*matrices(device), x, x[1:], x[:3], x.view(torch.uint8)[5:]])


def products_of_lines(device: str) -> Iterator[tuple[torch.Tensor, LineProduct]]:
    """Sums [m, padded n] of a GEMM, and the product that they are of."""
    for (m, n), out, of_bias in itertools.product(((1, 16), (9, 70), (13, 513), (40, 1040)), INPUTS, (None, *INPUTS)):
        generator = torch.Generator().manual_seed(m * n)
        sums = (torch.randn(m, n + -n % 16, generator=generator) * 300).to(device)
        sums[0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e38])
        a, b = (torch.zeros(size, 16, dtype=E4M3, device=device) for size in (m, n))
        lines = [torch.rand(size, 1, generator=generator).to(device) * 1e-3 for size in (m, n)]
        bias = None if of_bias is None else torch.randn(2 * n, generator=generator).to(device, of_bias)[::2]
        for scales in (lines, [lines[0], scale_on(device, 0.37)], [scale_on(device, 0.37), lines[1]]):
            yield sums, LineProduct(a, b.t(), *scales, bias, out_dtype=out)


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
    from tests.support.tile_count import count

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


if __name__ == "__main__":
    main(CASES)
