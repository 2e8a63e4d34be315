"""Casts, amaxes and scales with one scale per tensor: the H200's code for them, executed on the CPU, equals the reference bit
for bit.

A check raises, or returns how many results it compared.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from lowering import state as state_reference
from lowering.formats import E4M3, E5M2
from lowering.tensorwise import reference
from tests.emulation.support import emulated, emulated_h200, same_bits

ops = torch.ops.lowering
SCALE = 3.7
AMAXES = [0.0, 1.0, 0.3, 448.0, 1e-38, 1e-45, 3.4e38, torch.inf, torch.nan, 5.5e-37]

Check = Callable[[pathlib.Path], int]


def doubled(x: torch.Tensor) -> torch.Tensor:
    """A pointwise producer that is exact in every precision, as long as it does not overflow."""
    return x * 2


def row_flagged(x: torch.Tensor) -> torch.Tensor:
    """A producer with a reduction over rows, exact in every precision."""
    return x * (2 - (x.abs().amax(1, keepdim=True) < 1e30).to(x.dtype))


@dataclasses.dataclass(frozen=True)
class Case:
    rows: int
    cols: int
    dtype: torch.dtype = torch.float32
    producer: Callable[[torch.Tensor], torch.Tensor] = doubled
    dynamic: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.rows}x{self.cols}-{dtype}-{self.producer.__name__}{'-dynamic' * self.dynamic}"


CASES = [
    Case(64, 128),
    Case(64, 192, torch.bfloat16),
    Case(32, 64, torch.float16),
    Case(48, 64),
    Case(50, 32, torch.bfloat16),
    Case(33, 50),
    Case(64, 128, torch.float32, row_flagged),
    Case(37, 48, torch.bfloat16, row_flagged),
]
if torch.__version__ >= (2, 13):  # before, code generation asks for sizes that a captured graph has no more
    CASES.append(Case(100, 64, dynamic=True))


def values(case: Case, special: bool) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(case.rows, case.cols) * 40
    if special:
        x[0, :6] = torch.tensor([torch.inf, -torch.inf, 30000.0, -0.0, 1e-8, -30000.0])
        x[-1, -1] = torch.nan
    return x.to(case.dtype)


def casts(xs: list[torch.Tensor], scale: torch.Tensor, dtype: torch.dtype, module: Any) -> list[torch.Tensor]:
    """Every cast, each of a matrix of its own."""
    return [
        module.cast([xs[0]], [scale], dtype)[0],
        module.cast([xs[1]], [scale], dtype, rowwise=False, columnwise=True)[0],
        *module.cast([xs[2]], [scale], dtype, pad_rows=True, with_amax=True),
        *module.cast([xs[3]], [scale], dtype, rowwise=False, columnwise=True, pad_cols=True, with_amax=True),
        *module.cast([xs[4]], [scale], dtype, pad_cols=True, columnwise=True),
        *module.cast([xs[5]], [scale], dtype, columnwise=True, with_amax=True),
        *module.cast([xs[6]], [scale], dtype, pad_rows=True, pad_cols=True, columnwise=True, with_amax=True),
        module.amaxes([xs[7]]),
    ]


def check_casts(case: Case, dtype: torch.dtype, folder: pathlib.Path) -> int:
    scale, num_results = torch.tensor(SCALE), 0

    @torch.compile(dynamic=case.dynamic)
    def compiled(xs: list[torch.Tensor], scale: torch.Tensor) -> list[torch.Tensor]:
        return casts([case.producer(x) for x in xs], scale, dtype, ops)

    with emulated_h200(folder) as emulation:
        for special in (False, True):
            x = values(case, special)
            xs = [x.clone() for _ in range(8)]  # of one matrix, that many casts would have the product written
            found = compiled(xs, scale)
            num_results += same_bits(found, casts([case.producer(x)] * 8, scale, dtype, reference))
    assert emulation.kernels, "nothing was generated"
    assert len(emulation.graphs) == 1, "the same code computes both"
    return num_results


def check_scales(power_of_2: bool, folder: pathlib.Path) -> int:
    amaxes = torch.cat([torch.tensor(AMAXES), torch.rand(1000) * 100])
    options = {"margin": 1, "epsilon": 1e-30, "power_of_2": power_of_2}

    def scales(amax: torch.Tensor) -> Any:
        amax = amax * 1
        alone = ops.scales_from_amax(amax, E5M2, **options)[0]
        return alone, *ops.scales_from_amax(amax, E4M3, **options), *ops.scales_from_amax(amax[2], E4M3, **options)

    alone, scale = (reference.scale_from_amax(amaxes, dtype, **options) for dtype in (E5M2, E4M3))
    found, _ = emulated(scales, amaxes, folder=folder)
    return same_bits(found, (alone, scale, scale.reciprocal(), scale[2], scale[2].reciprocal()))


def check_scales_of_a_matrix(folder: pathlib.Path) -> int:
    """From a hand-written kernel, and from generated ones; of 2000 rows, whose amaxes one program reduces in a loop."""
    x, long = torch.randn(40, 30), torch.randn(2000, 16)
    long[1999, 15] = 1000.0

    def scales(x: torch.Tensor, long: torch.Tensor) -> Any:
        small = *ops.scales_from_amax(ops.amaxes([x]), E4M3), *ops.scales_from_amax(ops.amaxes([x.tile(8, 8) * 2]), E4M3)
        return *small, *ops.scales_from_amax(ops.amaxes([long * 2]), E4M3)

    wanted = [reference.scale_from_amax(reference.amax(m), E4M3) for m in (x, x * 2, long * 2)]
    found, emulation = emulated(scales, x, long, folder=folder)
    assert len(emulation.kernels) == 4, "two for the amax and scale of each of the two that code makes"
    return same_bits(found, [part for scale in wanted for part in (scale, scale.reciprocal())])


def check_state(index: list[int], folder: pathlib.Path) -> int:
    """Scales loaded, some of them taken, and amaxes recorded from their parts."""
    scale, slots = torch.rand(64) + 0.01, torch.randperm(64)
    x, y = torch.randn(64, 128), torch.randn(10, 24)
    y[3, 3] = torch.nan
    one = torch.tensor(1.0)

    def step(scale: Any, slots: Any, staging: Any, x: Any, y: Any, one: Any) -> Any:
        loaded = ops.load_scales(scale, slots, 11)
        _, _, tiled = ops.cast([x * 2], [one], E4M3, columnwise=True, with_amax=True)
        _, _, given = ops.cast([x], [one], E4M3, columnwise=True, with_amax=True)
        _, by_row = ops.cast([y + 1], [one], E4M3, with_amax=True)
        ops.record_amax(staging, slots, [tiled, given, by_row], [5, 2, 0])
        return *loaded, ops.take(loaded[0], index), tiled

    staging = torch.full((64,), 3.0)
    expected = staging.clone()
    observed = [reference.amax(x * 2), reference.amax(x), reference.amax(y + 1)]
    state_reference.record_amax(expected, slots, observed, [5, 2, 0])
    taken, inverse = state_reference.load_scales(scale, slots, 11)
    found, _ = emulated(step, scale, slots, staging, x, y, one, folder=folder)
    return same_bits([*found, staging], [taken, inverse, taken[index], observed[0], expected])


#: Each size and producer with one FP8 format, by turns; the first with both.
CHECKS: dict[str, Check] = {
    f"{case}-{str(dtype).removeprefix('torch.')}": functools.partial(check_casts, case, dtype)
    for i, case in enumerate(CASES)
    for dtype in ((E4M3, E5M2) if i == 0 else ((E4M3, E5M2)[i % 2],))
}
CHECKS |= {f"scales, power_of_2={power_of_2}": functools.partial(check_scales, power_of_2) for power_of_2 in (False, True)}
CHECKS["scales of a matrix"] = check_scales_of_a_matrix
for taken in ([2, 3, 4], [1, 2, 3, 5, 7, 8, 10], [9], [4, 0, 1]):
    CHECKS[f"state, {taken}"] = functools.partial(check_state, taken)
