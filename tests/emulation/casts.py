"""Casts, amaxes and scales that join the code before them: the H200's code, executed on the CPU, equals the reference bit for
bit.

A check raises, or returns how many results it compared.
"""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lowering import casts as block_reference
from lowering.formats import E4M3, E5M2, Granularity
from lowering.tensorwise import reference
from tests.support.copies import one_copy
from tests.support.fp8 import bits

ops = torch.ops.lowering
LINES = {"granularity": Granularity.BLOCK_1X128.value}


@contextlib.contextmanager
def emulated_h200(folder: pathlib.Path) -> Iterator[Any]:
    """`tests.support.emulate.emulated_h200`, which only a process with TRITON_INTERPRET=1 can import."""
    from tests.support import emulate

    with emulate.emulated_h200(folder) as emulation:
        yield emulation


def emulated(function: Callable[..., Any], *args: Any, folder: pathlib.Path) -> tuple[Any, Any]:
    """The results of the code generated for a function, and the emulation."""
    with emulated_h200(folder) as emulation:
        return torch.compile(function, dynamic=False)(*args), emulation


def same_bits(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> int:
    """Raise AssertionError unless results are equal, bit for bit; NaN of any sign is NaN. Returns how many there are."""
    pairs = list(zip(found, wanted, strict=True))
    for i, (ours, theirs) in enumerate(pairs):
        assert (ours.shape, ours.dtype, ours.is_contiguous()) == (theirs.shape, theirs.dtype, True), i
        values = [torch.where(x.float().isnan(), 127, bits(x)) for x in (ours, theirs)]
        differ = int((values[0] != values[1]).sum())
        assert differ == 0, f"{differ} elements of result {i}"
    return len(pairs)


# -- one scale per tensor


def doubled(x: torch.Tensor) -> torch.Tensor:
    """A pointwise producer that is exact in every precision, as long as it does not overflow."""
    return x * 2


def row_flagged(x: torch.Tensor) -> torch.Tensor:
    """A producer with a reduction over rows, exact in every precision."""
    return x * (2 - (x.abs().amax(1, keepdim=True) < 1e30).to(x.dtype))


#: Rows, columns, input dtype, FP8 dtype, producer.
SIZES: list[tuple[int, int, torch.dtype, torch.dtype, Callable[[torch.Tensor], torch.Tensor]]] = [
    (64, 128, torch.float32, E4M3, doubled),
    (50, 32, torch.float16, E4M3, doubled),
    (33, 50, torch.float32, E5M2, doubled),
    (37, 48, torch.bfloat16, E5M2, row_flagged),
]


def casts_of_tensors(xs: list[torch.Tensor], scale: torch.Tensor, dtype: torch.dtype, module: Any) -> list[torch.Tensor]:
    """Every cast, each of a matrix of its own."""
    return [
        module.cast([xs[0]], [scale], dtype)[0],
        module.cast([xs[1]], [scale], dtype, rowwise=False, columnwise=True)[0],
        *module.cast([xs[2]], [scale], dtype, pad_rows=True, with_amax=True),
        *module.cast([xs[3]], [scale], dtype, rowwise=False, columnwise=True, pad_cols=True, with_amax=True),
        *module.cast([xs[4]], [scale], dtype, pad_cols=True, columnwise=True),
        *module.cast([xs[5]], [scale], dtype, pad_rows=True, pad_cols=True, columnwise=True, with_amax=True),
        module.amaxes([xs[6]]),
    ]


def check_casts(of: int, folder: pathlib.Path) -> int:
    rows, cols, dtype, fp8, producer = SIZES[of]
    scale, num_results = torch.tensor(3.7), 0

    @torch.compile(dynamic=False)
    def compiled(xs: list[torch.Tensor], scale: torch.Tensor) -> list[torch.Tensor]:
        return casts_of_tensors([producer(x) for x in xs], scale, fp8, ops)

    x = torch.randn(rows, cols) * 40
    special = x.clone()
    special[0, :6] = torch.tensor([torch.inf, -torch.inf, 30000.0, -0.0, 1e-8, -30000.0])
    special[-1, -1] = torch.nan
    with emulated_h200(folder) as emulation:
        for given in (x.to(dtype), special.to(dtype)):
            xs = [given.clone() for _ in range(7)]  # of one matrix, that many casts would have the product written
            wanted = casts_of_tensors([producer(given)] * 7, scale, fp8, reference)
            num_results += same_bits(compiled(xs, scale), wanted)
    assert emulation.kernels, "nothing was generated"
    assert len(emulation.graphs) == 1, "the same code computes both"
    return num_results


# -- scales per block


def values(dtype: torch.dtype) -> torch.Tensor:
    """[256, 384] whose blocks, along both dimensions, hold everything that a scale or an element may trip over."""
    torch.manual_seed(0)
    x = torch.randn(256, 384) * torch.exp2(torch.randint(-20, 12, (256, 384)).float())
    x[:, :128] *= torch.exp2(torch.arange(256) % 40 - 20.0)[:, None]
    x[3, :128], x[:128, 140] = 0.0, -0.0
    x[5, 130], x[200, 9], x[7, 11] = torch.inf, -torch.inf, torch.nan
    x[9, 128:256] = 0.4375 * torch.exp2(torch.arange(128) % 7 - 3.0)  # amaxes with the mantissa of fp8_max
    x[11, 256:] *= 2.0**-30
    if dtype == torch.float16:
        x = torch.where(x.isfinite(), x.clamp(-3e4, 3e4), x)  # twice of which is no infinity
    else:
        x[13, 256:] = 2.0**-130  # whose quotient is infinite
        x[15, 256:], x[15, 300] = 1e-3, 1.5e38
    return x.to(dtype)


def casts_of_blocks(xs: list[torch.Tensor], dtype: torch.dtype, module: Any) -> list[torch.Tensor]:
    """Every cast, each of a matrix of its own."""
    a, b, c, d, batch, *rest = xs
    made = [
        *module.cast_with_scales([a], dtype, **one_copy(**LINES)),
        *module.cast_with_scales([b], dtype, **one_copy(columnwise=True, pad_outer=True, epsilon=1e-4, **LINES)),
        *module.cast_with_scales([c], dtype, pad_cols=True, **LINES, columnwise=True),
        *module.cast_with_scales([d], dtype, epsilon=0.3, **LINES, columnwise=True),
    ]
    data, scale_inv = module.cast_with_scales([batch], dtype, **one_copy(**LINES))
    made += [data, scale_inv.mT]  # by blocks, which is contiguous
    made += module.cast_with_scales(rest[:2], dtype, **one_copy(columnwise=True, **LINES))
    return made + module.cast_with_scales(rest[2:], dtype, **LINES, columnwise=True)


def check_blocks(dtype: torch.dtype, fp8: torch.dtype, folder: pathlib.Path) -> int:
    x = values(dtype)
    xs = [part.clone() for part in [x, x, x, x, x[None], x, x[:128], x, x[:, :256]]]

    def of_doubled(xs: list[torch.Tensor], module: Any = ops) -> list[torch.Tensor]:
        return casts_of_blocks([x * 2 for x in xs], fp8, module)

    found, emulation = emulated(of_doubled, xs, folder=folder)
    (code,) = emulation.code
    assert "_blockwise.default(" not in code, "a cast is a launch of its own"
    assert "R0_BLOCK: tl.constexpr = 128" in code, "blocks are not held in registers"
    return same_bits(found, of_doubled(xs, block_reference))


CHECKS: dict[str, Callable[[pathlib.Path], int]] = {
    **{f"casts {i}": functools.partial(check_casts, i) for i in range(len(SIZES))},
    "blocks of bfloat16": functools.partial(check_blocks, torch.bfloat16, E4M3),
    "blocks of float16": functools.partial(check_blocks, torch.float16, E5M2),
}
