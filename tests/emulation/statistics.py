"""Statistics that join the code of casts: the H200's code, executed on the CPU, counts what the reference counts, and casts
what it casts, bit for bit.

A check raises, or returns how many results it compared.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from lowering.formats import E4M3, E5M2, Granularity
from lowering.statistics import ERRORS
from tests.emulation.casts import emulated, row_flagged, same_bits, values

ops = torch.ops.lowering
ONE_SCALE = {"granularity": Granularity.TENSOR_WISE.value}
LINES = {"granularity": Granularity.BLOCK_1X128.value, "power_of_2": True, "epsilon": 0.01}
ROWS = {"granularity": Granularity.ROW_WISE.value, "power_of_2": True, "epsilon": 0.01}
#: Ends of groups; the rows behind count nowhere.
ENDS = torch.tensor([20, 49], dtype=torch.int32)


def _of_tensors(xs: list[torch.Tensor], scale: torch.Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
    """Tiles, rows, and what a norm computes; what is in memory, what no cast reads, ragged tiles; rows in groups."""
    tiled, lined, normed, given, alone = xs[0] * 2, xs[1] * 2, row_flagged(xs[2]), xs[3], xs[4] * 2
    copies = [
        *ops.cast([tiled], [scale], dtype, columnwise=True, with_amax=True),
        *ops.cast([lined], [scale], dtype, with_amax=True),
        *ops.cast([normed], [scale], dtype, columnwise=True, with_amax=True),
        *ops.cast([given], [scale], dtype),
    ]
    each, inverse = [tiled, lined, normed, given, alone, given[:33]], scale.reciprocal()
    found = [ops.quantization_statistics(x, dtype, scale, inverse, **ONE_SCALE)[0] for x in each]
    return [*found, *ops.quantization_statistics(lined, dtype, scale, inverse, ENDS, **ONE_SCALE)], copies


def _of_lines(how: dict[str, Any], xs: list[torch.Tensor], scale: torch.Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
    """Both copies of what is computed, of what a norm computes and of what is in memory."""
    each = xs[0] * 2, row_flagged(xs[1]), xs[2]
    copies = [y for x in each for y in ops.cast_with_scales([x], dtype, **how, columnwise=True)]
    return [vector for x in each for vector in ops.quantization_statistics(x, dtype, **how, columnwise=True)], copies


def check(what: Callable[..., Any], rows: int, dtype: torch.dtype, fp8: torch.dtype, folder: pathlib.Path) -> int:
    """Raises unless copies are equal, counts are, and sums but for their order; one matrix of each is not computed."""
    xs, scale = [values(dtype)[:rows, :128].clone() for _ in range(5)], torch.tensor(3.7)

    def statistics(xs: list[torch.Tensor], scale: torch.Tensor) -> Any:
        return what(xs, scale, fp8)

    (found, copies), emulation = emulated(statistics, xs, scale, folder=folder)
    assert sum(code.count("ops.lowering.quantization_statistics.default(") for code in emulation.code) == 1
    wanted, wanted_copies = what(xs, scale, fp8)
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(ours[:4], theirs[:4]), (i, ours, theirs)
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=0), (i, ours, theirs)
        assert theirs[ERRORS] > 0
    return len(found) + same_bits(copies, wanted_copies)


#: Whole blocks, and a norm's rows that one kernel holds.
CHECKS: dict[str, Callable[[pathlib.Path], int]] = {
    "one scale": functools.partial(check, _of_tensors, 64, torch.float32, E4M3),
    "blocks": functools.partial(check, functools.partial(_of_lines, LINES), 128, torch.bfloat16, E5M2),
    "rows": functools.partial(check, functools.partial(_of_lines, ROWS), 128, torch.float32, E4M3),
}
